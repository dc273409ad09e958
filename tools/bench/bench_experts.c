/* The experts alone, on rows that lie sorted. */
#include <stdlib.h>
#include <string.h>

#include "ceilings.h"
#include "commands.h"
#include "expert_params.h"
#include "reference.h"
#include "report.h"
#include "timing.h"

enum { SAMPLED_ROWS = 4 };

typedef struct experts_run {
  bench_rank *rank;
  int64_t rows;
  pmoe_experts *experts;
  bench_expert_params params;
  pmoe_routing routing;
  pmoe_mat x, y, dy, dx, pre, dpre;
  float *row_weight, *drow_weight;
  bench_floor *floor, *twin;
  void *routing_memory, *memory;
} experts_run;

static pmoe_status forward(void *arg) {
  experts_run *r = arg;
  BENCH_TRY(pmoe_experts_forward(r->experts, &r->params.p, r->routing.expert_rows, &r->x, &r->pre, &r->y, NULL));
  return PMOE_OK;
}

static pmoe_status backward(void *arg) {
  experts_run *r = arg;
  BENCH_TRY(pmoe_experts_backward(r->experts, &r->params.p, r->routing.expert_rows, &r->x, &r->pre, r->row_weight,
                                  &r->dy, &r->dpre, &r->dx, r->drow_weight, PMOE_BWD_ALL, NULL));
  return PMOE_OK;
}

static pmoe_mat take_rows(char **at, pmoe_dtype dtype, int64_t rows, int64_t cols) {
  pmoe_mat m = {*at, dtype, rows, cols, cols};
  *at += ((size_t)(rows * cols) * pmoe_dtype_size(dtype) + 63) / 64 * 64;
  return m;
}

static pmoe_status make_rows(experts_run *r) {
  const bench_options *o = r->rank->options;
  int64_t n = r->rows, h = o->hidden, f1 = bench_inner1(o);
  size_t bytes = (size_t)n * ((size_t)(4 * h + 2 * f1) * pmoe_dtype_size(o->dtype) + 2 * sizeof(float)) + 8 * 64;
  BENCH_TRY(bench_alloc(bytes, &r->memory));
  char *at = r->memory;
  r->x = take_rows(&at, o->dtype, n, h);
  r->y = take_rows(&at, o->dtype, n, h);
  r->dy = take_rows(&at, o->dtype, n, h);
  r->dx = take_rows(&at, o->dtype, n, h);
  r->pre = take_rows(&at, o->dtype, n, f1);
  r->dpre = take_rows(&at, o->dtype, n, f1);
  r->row_weight = take_rows(&at, PMOE_F32, n, 1).data;
  r->drow_weight = take_rows(&at, PMOE_F32, n, 1).data;
  bench_fill(o, BENCH_DY, 0, n * h, r->dy.data);
  bench_fill(o, BENCH_ROW_WEIGHT, 0, n, r->row_weight);
  return bench_tokens(o, 0, n, r->x.data);
}

static pmoe_status make(experts_run *r) {
  const bench_options *o = r->rank->options;
  r->rows = o->tokens * o->top_k;
  BENCH_TRY(bench_routing(o, 0, o->tokens, &r->routing, &r->routing_memory));
  pmoe_experts_config cfg = bench_experts_config(o);
  BENCH_TRY(pmoe_experts_create(r->rank->ctx, o->hidden, o->experts, &cfg, &r->experts));
  BENCH_TRY(bench_params_create(o, 0, o->experts, &r->params));
  BENCH_TRY(make_rows(r));
  bench_floor_shape shape = {o->hidden, o->inner, bench_inner1(o), o->dtype, o->experts, r->routing.expert_rows};
  BENCH_TRY(bench_floor_experts(r->rank->ctx, &shape, &r->floor));
  shape.num_experts = 1, shape.rows = &r->rows;
  BENCH_TRY(bench_floor_experts(r->rank->ctx, &shape, &r->twin));
  return PMOE_OK;
}

static void end(experts_run *r) {
  bench_floor_destroy(r->floor);
  bench_floor_destroy(r->twin);
  pmoe_experts_destroy(r->experts);
  bench_params_destroy(&r->params);
  free(r->routing_memory);
  free(r->memory);
}

/* ---- check ---- */
typedef struct row_buffers {
  double *x, *dy, *out, *dx, *pre, *act;
} row_buffers;

static int32_t expert_of(const experts_run *r, int64_t row) {
  int32_t e = 0;
  while (row >= r->routing.expert_rows[e]) row -= r->routing.expert_rows[e++];
  return e;
}

static void compare_rows(const pmoe_mat *got, int64_t row, const double *want, bench_error *error) {
  for (int64_t h = 0; h < got->cols; h++)
    bench_compare(error, (double)bench_load(got->dtype, got->data, row * got->ld + h), want[h]);
}

enum { ERROR_Y, ERROR_DX, ERROR_DROW_WEIGHT, ERROR_GRADS, NUM_ERRORS };

static void check_row(const experts_run *r, int64_t row, const row_buffers *b, bench_error *errors) {
  const bench_options *o = r->rank->options;
  int32_t expert = expert_of(r, row);
  double weight = (double)r->row_weight[row], drow_weight = 0;
  bench_row(o, BENCH_X, row, b->x);
  bench_row(o, BENCH_DY, row, b->dy);
  bench_expert_forward(o, expert, b->x, b->pre, b->act, b->out);
  compare_rows(&r->y, row, b->out, &errors[ERROR_Y]);
  memset(b->dx, 0, (size_t)o->hidden * sizeof *b->dx);
  for (int64_t h = 0; h < o->hidden; h++) {
    drow_weight += b->dy[h] * b->out[h];
    b->dy[h] *= weight;
  }
  bench_expert_backward(o, expert, b->pre, b->dy, b->dx);
  compare_rows(&r->dx, row, b->dx, &errors[ERROR_DX]);
  bench_compare(&errors[ERROR_DROW_WEIGHT], (double)r->drow_weight[row], drow_weight);
}

/* Gradients were zero before the one backward that they hold. */
static pmoe_status check_feature(const experts_run *r, int32_t expert, int32_t feature, const row_buffers *b,
                                 bench_error *error) {
  const bench_options *o = r->rank->options;
  int64_t row = 0;
  bench_feature f;
  for (int32_t e = 0; e < expert; e++) row += r->routing.expert_rows[e];
  BENCH_TRY(bench_feature_create(o, expert, feature, &f));
  for (int64_t last = row + r->routing.expert_rows[expert]; row < last; row++) {
    bench_row(o, BENCH_X, row, b->x);
    bench_row(o, BENCH_DY, row, b->dy);
    bench_feature_add(&f, b->x, b->dy, (double)r->row_weight[row]);
  }
  bench_params_compare(&r->params, expert, &f, error);
  bench_feature_destroy(&f);
  return PMOE_OK;
}

static pmoe_status check(experts_run *r, double *forward_error, double *backward_error) {
  const bench_options *o = r->rank->options;
  bench_params_zero_grads(&r->params);
  BENCH_TRY(forward(r));
  BENCH_TRY(backward(r));
  double *memory;
  BENCH_TRY(bench_alloc((size_t)(4 * (int64_t)o->hidden + bench_inner1(o) + o->inner) * sizeof *memory, &memory));
  int64_t h = o->hidden;
  row_buffers b = {memory,         memory + h,     memory + 2 * h,
                   memory + 3 * h, memory + 4 * h, memory + 4 * h + bench_inner1(o)};
  bench_error errors[NUM_ERRORS] = {{0, 0}};
  for (int64_t i = 0; r->rows > 0 && i < SAMPLED_ROWS; i++)
    check_row(r, r->rows * (2 * i + 1) / (2 * SAMPLED_ROWS), &b, errors);
  pmoe_status status = check_feature(r, 0, 0, &b, &errors[ERROR_GRADS]);
  if (status == PMOE_OK) status = check_feature(r, o->experts - 1, o->inner - 1, &b, &errors[ERROR_GRADS]);
  free(memory);
  *forward_error = bench_relative(&errors[ERROR_Y]);
  *backward_error = bench_worst(&errors[ERROR_DX], NUM_ERRORS - ERROR_DX);
  return status;
}

/* ---- measurement ---- */
static pmoe_status report(experts_run *r, const bench_op *ops, const double *errors) {
  const bench_options *o = r->rank->options;
  const bench_expert_cost cost =
      bench_expert_cost_of(o, r->rows, bench_experts_with_rows(o->experts, r->routing.expert_rows));
  pmoe_memory memory = PMOE_CONFIG_INIT(pmoe_memory);
  BENCH_TRY(pmoe_ctx_memory(r->rank->ctx, &memory));
  bench_result f = {
      .name = "experts_forward", .has_inner = true, .flops = cost.flops_forward, .bytes = cost.bytes_forward};
  bench_result b = {
      .name = "experts_backward", .has_inner = true, .flops = cost.flops_backward, .bytes = cost.bytes_backward};
  f.peak_bytes = b.peak_bytes = memory.peak_bytes;
  f.saved_bytes = b.saved_bytes = r->rows * (o->hidden + bench_inner1(o)) * (int64_t)pmoe_dtype_size(o->dtype);
  f.error = errors[0], b.error = errors[1];
  f.tolerance = b.tolerance = bench_tolerance(o);
  bench_set_times(&f, ops[0].ms, o->iters);
  bench_set_times(&b, ops[1].ms, o->iters);
  f.floor_ms = bench_median(ops[2].ms, o->iters), b.floor_ms = bench_median(ops[3].ms, o->iters);
  f.twin_ms = bench_median(ops[4].ms, o->iters), b.twin_ms = bench_median(ops[5].ms, o->iters);
  bench_result both = b;
  both.name = "experts";
  both.flops += f.flops, both.bytes += f.bytes;
  both.error = bench_worse(errors[0], errors[1]);
  for (int i = 0; i < 6; i += 2) bench_add(ops[i].ms, ops[i].ms, ops[i + 1].ms, o->iters);
  bench_set_times(&both, ops[0].ms, o->iters);
  both.floor_ms = bench_median(ops[2].ms, o->iters);
  both.twin_ms = bench_median(ops[4].ms, o->iters);
  BENCH_TRY(bench_report(r->rank, &f));
  BENCH_TRY(bench_report(r->rank, &b));
  return bench_report(r->rank, &both);
}

static pmoe_status measure(experts_run *r) {
  double *times = NULL, errors[2] = {0, 0};
  pmoe_ctx_reset_peak_memory(r->rank->ctx);
  bench_op ops[6] = {{forward, r, NULL},
                     {backward, r, NULL},
                     {bench_floor_forward, r->floor, NULL},
                     {bench_floor_backward, r->floor, NULL},
                     {bench_floor_forward, r->twin, NULL},
                     {bench_floor_backward, r->twin, NULL}};
  pmoe_status status = bench_measure(r->rank, ops, 6, &times);
  if (status == PMOE_OK && r->rank->options->check) status = check(r, &errors[0], &errors[1]);
  if (status == PMOE_OK) status = report(r, ops, errors);
  free(times);
  return status;
}

pmoe_status bench_experts(bench_rank *rank) {
  experts_run r = {.rank = rank};
  pmoe_status status = make(&r);
  if (status == PMOE_OK) status = measure(&r);
  end(&r);
  return status;
}
