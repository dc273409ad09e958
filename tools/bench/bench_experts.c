/* The experts alone, on rows that lie sorted. */
#include <stdlib.h>
#include <string.h>

#include "block.h"
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
  pmoe_mat x, y, dy, dx, pre, dpre; /* the host's */
  float *row_weight, *drow_weight;
  bench_block block;         /* which these lie in */
  bench_floor *floor, *twin; /* on the CPU */
  bench_products *products, *dense;
  bench_ways way[BENCH_NUM_WAYS], best, dense_way; /* on a device */
  bench_block routing_block;
} experts_run;

static pmoe_stream stream_of(const experts_run *r) { return r->rank->device ? r->rank->device->stream : NULL; }

static pmoe_status forward(void *arg) {
  experts_run *r = arg;
  pmoe_mat x = bench_block_mat(&r->block, &r->x), y = bench_block_mat(&r->block, &r->y),
           pre = bench_block_mat(&r->block, &r->pre);
  BENCH_TRY(pmoe_experts_forward(r->experts, &r->params.p, r->routing.expert_rows, &x, &pre, &y, stream_of(r)));
  return PMOE_OK;
}

static pmoe_status backward(void *arg) {
  experts_run *r = arg;
  pmoe_mat x = bench_block_mat(&r->block, &r->x), dy = bench_block_mat(&r->block, &r->dy),
           dx = bench_block_mat(&r->block, &r->dx), pre = bench_block_mat(&r->block, &r->pre),
           dpre = bench_block_mat(&r->block, &r->dpre);
  BENCH_TRY(pmoe_experts_backward(r->experts, &r->params.p, r->routing.expert_rows, &x, &pre,
                                  bench_block_at(&r->block, r->row_weight), &dy, &dpre, &dx,
                                  bench_block_at(&r->block, r->drow_weight), PMOE_BWD_ALL, stream_of(r)));
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
  pmoe_status status = bench_block_create(r->rank->device, bytes, &r->block);
  if (status < 0) return status;
  char *at = r->block.host;
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
  status = bench_tokens(o, 0, n, r->x.data);
  return status == PMOE_OK ? bench_block_push(&r->block) : status;
}

static pmoe_status make_products(experts_run *r, bench_floor_shape *shape) {
  bench_device *device = r->rank->device;
  pmoe_status status = device->products(device, shape, &r->products);
  shape->num_experts = 1, shape->rows = &r->rows;
  if (status == PMOE_OK) status = device->products(device, shape, &r->dense);
  if (status < 0) return status;
  for (int i = 0; i < BENCH_NUM_WAYS; i++) r->way[i] = (bench_ways){r->products, (bench_way)i};
  r->best = r->way[bench_products_best(r->products)];
  r->dense_way = (bench_ways){r->dense, bench_products_best(r->dense)};
  return PMOE_OK;
}

static pmoe_status make(experts_run *r) {
  const bench_options *o = r->rank->options;
  r->rows = o->tokens * o->top_k;
  pmoe_routing there; /* counts are the host's everywhere */
  pmoe_status status = bench_routing(o, NULL, 0, o->tokens, &r->routing, &r->routing_block, &there);
  if (status < 0) return status;
  pmoe_experts_config cfg = bench_experts_config(o);
  BENCH_TRY(pmoe_experts_create(r->rank->ctx, o->hidden, o->experts, &cfg, &r->experts));
  status = bench_params_create(o, r->rank->device, 0, o->experts, &r->params);
  if (status == PMOE_OK) status = make_rows(r);
  if (status < 0) return status;
  bench_floor_shape shape = {o->hidden, o->inner, bench_inner1(o), o->dtype, o->experts, r->routing.expert_rows};
  if (r->rank->device) return make_products(r, &shape);
  BENCH_TRY(bench_floor_experts(r->rank->ctx, &shape, &r->floor));
  shape.num_experts = 1, shape.rows = &r->rows;
  BENCH_TRY(bench_floor_experts(r->rank->ctx, &shape, &r->twin));
  return PMOE_OK;
}

static void end(experts_run *r) {
  bench_floor_destroy(r->floor);
  bench_floor_destroy(r->twin);
  bench_products_destroy(r->products);
  bench_products_destroy(r->dense);
  pmoe_experts_destroy(r->experts);
  bench_params_destroy(&r->params);
  bench_block_destroy(&r->block);
  bench_block_destroy(&r->routing_block);
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
  pmoe_status status = bench_params_compare(&r->params, expert, &f, error);
  bench_feature_destroy(&f);
  return status;
}

static pmoe_status check(experts_run *r, double *forward_error, double *backward_error) {
  const bench_options *o = r->rank->options;
  pmoe_status status = bench_params_zero_grads(&r->params);
  if (status == PMOE_OK) status = forward(r);
  if (status == PMOE_OK) status = backward(r);
  if (status == PMOE_OK) status = bench_block_pull(&r->block, r->block.host, r->block.bytes);
  if (status < 0) return status;
  double *memory;
  BENCH_TRY(bench_alloc((size_t)(4 * (int64_t)o->hidden + bench_inner1(o) + o->inner) * sizeof *memory, &memory));
  int64_t h = o->hidden;
  row_buffers b = {memory,         memory + h,     memory + 2 * h,
                   memory + 3 * h, memory + 4 * h, memory + 4 * h + bench_inner1(o)};
  bench_error errors[NUM_ERRORS] = {{0, 0}};
  for (int64_t i = 0; r->rows > 0 && i < SAMPLED_ROWS; i++)
    check_row(r, r->rows * (2 * i + 1) / (2 * SAMPLED_ROWS), &b, errors);
  status = check_feature(r, 0, 0, &b, &errors[ERROR_GRADS]);
  if (status == PMOE_OK) status = check_feature(r, o->experts - 1, o->inner - 1, &b, &errors[ERROR_GRADS]);
  free(memory);
  *forward_error = bench_relative(&errors[ERROR_Y]);
  *backward_error = bench_worst(&errors[ERROR_DX], NUM_ERRORS - ERROR_DX);
  return status;
}

/* ---- measurement ---- */
enum { CEILINGS = 6 }; /* operations before those of single ways, two a way */

static void add_ways(const experts_run *r, const bench_op *ops, bench_result *result) {
  static const char *const names[BENCH_NUM_WAYS] = {"one_by_one_ms", "batched_ms", "grouped_ms"};
  int iters = r->rank->options->iters, at = CEILINGS;
  for (int i = 0; i < BENCH_NUM_WAYS; i++) {
    if (!bench_products_can(r->products, (bench_way)i)) continue;
    bench_add(ops[at].ms, ops[at].ms, ops[at + 1].ms, iters);
    bench_add_extra(result, names[i], bench_median(ops[at].ms, iters));
    at += 2;
  }
  bench_add_extra(result, "grouped_sets", bench_products_grouped(r->products));
}

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
  if (r->rank->device) add_ways(r, ops, &both);
  BENCH_TRY(bench_report(r->rank, &f));
  BENCH_TRY(bench_report(r->rank, &b));
  return bench_report(r->rank, &both);
}

/* Returns their number. */
static int device_ops(experts_run *r, bench_op *ops) {
  int n = CEILINGS;
  ops[2] = (bench_op){bench_products_forward, &r->best, NULL};
  ops[3] = (bench_op){bench_products_backward, &r->best, NULL};
  ops[4] = (bench_op){bench_products_forward, &r->dense_way, NULL};
  ops[5] = (bench_op){bench_products_backward, &r->dense_way, NULL};
  for (int i = 0; i < BENCH_NUM_WAYS; i++) {
    if (!bench_products_can(r->products, (bench_way)i)) continue;
    ops[n++] = (bench_op){bench_products_forward, &r->way[i], NULL};
    ops[n++] = (bench_op){bench_products_backward, &r->way[i], NULL};
  }
  const bench_expert_cost cost = bench_expert_cost_of(r->rank->options, r->rows, r->rank->options->experts);
  bench_device_sees(r->rank->device, cost.bytes_forward);
  return n;
}

static pmoe_status measure(experts_run *r) {
  double *times = NULL, errors[2] = {0, 0};
  pmoe_ctx_reset_peak_memory(r->rank->ctx);
  bench_op ops[CEILINGS + 2 * BENCH_NUM_WAYS] = {{forward, r, NULL},
                                                 {backward, r, NULL},
                                                 {bench_floor_forward, r->floor, NULL},
                                                 {bench_floor_backward, r->floor, NULL},
                                                 {bench_floor_forward, r->twin, NULL},
                                                 {bench_floor_backward, r->twin, NULL}};
  int num_ops = r->rank->device ? device_ops(r, ops) : CEILINGS;
  pmoe_status status = bench_measure(r->rank, ops, num_ops, &times);
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
