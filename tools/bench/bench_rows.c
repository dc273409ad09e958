/* The row mover on one rank: from tokens to sorted rows and back, against a copy that reads and writes as many bytes.
 */
#include <stdlib.h>
#include <string.h>

#include "block.h"
#include "ceilings.h"
#include "commands.h"
#include "expert_params.h"
#include "report.h"
#include "timing.h"

enum { GATHER, COMBINE, COMBINE_BACKWARD, DISPATCH_BACKWARD, NUM_MOVES, COPY = NUM_MOVES, NUM_OPS };
static const char *const names[NUM_MOVES] = {"rows_gather", "rows_combine", "rows_combine_bwd", "rows_dispatch_bwd"};

typedef struct rows_run {
  bench_rank *rank;
  int64_t num_rows;
  pmoe_a2a *a2a;
  pmoe_plan *plan;
  pmoe_routing routing, there; /* the host's, and what the library sees of it */
  pmoe_mat tokens_in, tokens_out, rows_in, rows_out;
  float *row_weight, *drow_weight, *dweight;
  bench_block block; /* which these lie in */
  bench_copy copy;
  bench_move move; /* on a device */
  bench_block routing_block;
} rows_run;

static pmoe_stream stream_of(const rows_run *r) { return r->rank->device ? r->rank->device->stream : NULL; }

static pmoe_status finish(rows_run *r) {
  BENCH_TRY(pmoe_plan_finish(r->plan, stream_of(r)));
  return PMOE_OK;
}

static pmoe_status gather(void *arg) {
  rows_run *r = arg;
  pmoe_mat in = bench_block_mat(&r->block, &r->tokens_in), out = bench_block_mat(&r->block, &r->rows_out);
  BENCH_TRY(pmoe_dispatch_forward(r->plan, &r->there, &in, &out, stream_of(r)));
  return finish(r);
}

static pmoe_status combine(void *arg) {
  rows_run *r = arg;
  pmoe_mat in = bench_block_mat(&r->block, &r->rows_in), out = bench_block_mat(&r->block, &r->tokens_out);
  BENCH_TRY(pmoe_combine_forward(r->plan, &r->there, &in, NULL, &out, stream_of(r)));
  return finish(r);
}

static pmoe_status combine_backward(void *arg) {
  rows_run *r = arg;
  pmoe_mat in = bench_block_mat(&r->block, &r->tokens_in), out = bench_block_mat(&r->block, &r->rows_out);
  BENCH_TRY(pmoe_combine_backward(r->plan, &r->there, &in, NULL, &out, bench_block_at(&r->block, r->row_weight),
                                  stream_of(r)));
  return finish(r);
}

static pmoe_status dispatch_backward(void *arg) {
  rows_run *r = arg;
  pmoe_mat in = bench_block_mat(&r->block, &r->rows_in), out = bench_block_mat(&r->block, &r->tokens_out);
  BENCH_TRY(pmoe_dispatch_backward(r->plan, &r->there, &in, bench_block_at(&r->block, r->drow_weight), &out,
                                   bench_block_at(&r->block, r->dweight), stream_of(r)));
  return finish(r);
}

static pmoe_status make_memory(rows_run *r) {
  const bench_options *o = r->rank->options;
  size_t size = pmoe_dtype_size(o->dtype), token_bytes = (size_t)(o->tokens * o->hidden) * size + 64,
         row_bytes = (size_t)(r->num_rows * o->hidden) * size + 64;
  token_bytes -= token_bytes % 64, row_bytes -= row_bytes % 64;
  r->copy.bytes = (token_bytes + row_bytes) / 2;
  size_t values = (size_t)r->num_rows * sizeof(float);
  pmoe_status status =
      bench_block_create(r->rank->device, 2 * (token_bytes + row_bytes + r->copy.bytes) + 3 * values, &r->block);
  if (status < 0) return status;
  char *at = r->block.host;
  r->tokens_in = (pmoe_mat){at, o->dtype, o->tokens, o->hidden, o->hidden}, at += token_bytes;
  r->tokens_out = (pmoe_mat){at, o->dtype, o->tokens, o->hidden, o->hidden}, at += token_bytes;
  r->rows_in = (pmoe_mat){at, o->dtype, r->num_rows, o->hidden, o->hidden}, at += row_bytes;
  r->rows_out = (pmoe_mat){at, o->dtype, r->num_rows, o->hidden, o->hidden}, at += row_bytes;
  r->copy.ctx = r->rank->ctx;
  r->copy.src = at, at += r->copy.bytes;
  r->copy.dst = at, at += r->copy.bytes;
  r->row_weight = (float *)(void *)at;
  r->drow_weight = r->row_weight + r->num_rows;
  r->dweight = r->drow_weight + r->num_rows;
  bench_fill(o, BENCH_DY, 0, r->num_rows * o->hidden, r->rows_in.data);
  bench_fill(o, BENCH_ROW_WEIGHT, 0, r->num_rows, r->drow_weight);
  r->move = (bench_move){r->rank->device, bench_block_at(&r->block, r->copy.dst),
                         bench_block_at(&r->block, r->copy.src), r->copy.bytes};
  status = bench_tokens(o, 0, o->tokens, r->tokens_in.data);
  if (status == PMOE_OK) status = bench_block_push(&r->block);
  if (status < 0 || !r->rank->device) return status;
  return bench_device_scatter(r->rank->device, (void *)r->move.from, r->move.bytes);
}

static pmoe_status make(rows_run *r) {
  const bench_options *o = r->rank->options;
  r->num_rows = o->tokens * o->top_k;
  pmoe_status status = bench_routing(o, r->rank->device, 0, o->tokens, &r->routing, &r->routing_block, &r->there);
  if (status < 0) return status;
  pmoe_a2a_config cfg = PMOE_CONFIG_INIT(pmoe_a2a_config);
  BENCH_TRY(pmoe_a2a_create(r->rank->ctx, r->rank->comm, o->hidden, o->dtype, o->experts, 0, &cfg, &r->a2a));
  BENCH_TRY(pmoe_plan_create(r->a2a, &r->plan));
  BENCH_TRY(pmoe_plan_build(r->plan, &r->there, stream_of(r)));
  return make_memory(r);
}

static void end(rows_run *r) {
  pmoe_plan_destroy(r->plan);
  pmoe_a2a_destroy(r->a2a);
  bench_block_destroy(&r->block);
  bench_block_destroy(&r->routing_block);
}

/* ---- check ---- */
static double element(const pmoe_mat *mat, int64_t row, int64_t column) {
  return (double)bench_load(mat->dtype, mat->data, row * mat->ld + column);
}

/* Every row against its token, and the weights that go with it. */
static void check_out(const rows_run *r, const int64_t *first, bool weighted, bench_error *error) {
  const pmoe_routing *g = &r->routing;
  for (int64_t choice = 0; choice < r->num_rows; choice++) {
    int64_t row = first[g->expert[choice]] + g->slot[choice];
    for (int64_t h = 0; h < r->rows_out.cols; h++)
      bench_compare(error, element(&r->rows_out, row, h), element(&r->tokens_in, choice / g->top_k, h));
    if (weighted) bench_compare(error, (double)r->row_weight[row], (double)g->weight[choice]);
  }
}

/* Every token against the sum of its rows. */
static void check_back(const rows_run *r, const int64_t *first, bool weighted, bench_error *error) {
  const pmoe_routing *g = &r->routing;
  for (int64_t t = 0; t < g->tokens; t++)
    for (int64_t h = 0; h < r->tokens_out.cols; h++) {
      double sum = 0;
      for (int64_t choice = t * g->top_k; choice < (t + 1) * g->top_k; choice++)
        sum += element(&r->rows_in, first[g->expert[choice]] + g->slot[choice], h) *
               (weighted ? (double)g->weight[choice] : 1);
      bench_compare(error, element(&r->tokens_out, t, h), sum);
    }
  for (int64_t choice = 0; !weighted && choice < r->num_rows; choice++)
    bench_compare(error, (double)r->dweight[choice],
                  (double)r->drow_weight[first[g->expert[choice]] + g->slot[choice]]);
}

static pmoe_status check(rows_run *r, bench_error *errors) {
  const bench_options *o = r->rank->options;
  int64_t *first;
  BENCH_TRY(bench_alloc(((size_t)o->experts + 1) * sizeof *first, &first));
  for (int32_t e = 0; e < o->experts; e++) first[e + 1] = first[e] + r->routing.expert_rows[e];
  pmoe_status (*const moves[NUM_MOVES])(void *) = {gather, combine, combine_backward, dispatch_backward};
  pmoe_status status = PMOE_OK;
  for (int i = 0; i < NUM_MOVES && status == PMOE_OK; i++) {
    status = moves[i](r);
    if (status == PMOE_OK) status = bench_block_pull(&r->block, r->block.host, r->block.bytes);
    if (i == GATHER || i == COMBINE_BACKWARD) check_out(r, first, i == COMBINE_BACKWARD, &errors[i]);
    else check_back(r, first, i == COMBINE, &errors[i]);
  }
  free(first);
  return status;
}

/* ---- measurement ---- */
static pmoe_status report(rows_run *r, const bench_op *ops, const bench_error *errors) {
  const bench_options *o = r->rank->options;
  for (int i = 0; i < NUM_MOVES; i++) {
    bench_result result = {.name = names[i], .peak_bytes = -1, .saved_bytes = -1, .bytes = 2.0 * (double)r->copy.bytes};
    result.error = bench_relative(&errors[i]);
    if (i == COMBINE || i == DISPATCH_BACKWARD)
      result.tolerance = o->dtype == PMOE_F32 ? 1e-6 : o->dtype == PMOE_BF16 ? 1e-2 : 1e-3;
    bench_set_times(&result, ops[i].ms, o->iters);
    result.copy_ms = bench_median(ops[COPY].ms, o->iters);
    BENCH_TRY(bench_report(r->rank, &result));
  }
  return PMOE_OK;
}

static pmoe_status measure(rows_run *r) {
  double *times = NULL;
  bench_error errors[NUM_MOVES] = {{0, 0}};
  bench_op ops[NUM_OPS] = {{gather, r, NULL},
                           {combine, r, NULL},
                           {combine_backward, r, NULL},
                           {dispatch_backward, r, NULL},
                           {bench_copy_run, &r->copy, NULL}};
  if (r->rank->device) {
    ops[COPY] = (bench_op){bench_move_run, &r->move, NULL};
    bench_device_sees(r->rank->device, 2 * (double)r->copy.bytes);
  }
  pmoe_status status = bench_measure(r->rank, ops, NUM_OPS, &times);
  if (status == PMOE_OK && r->rank->options->check) status = check(r, errors);
  if (status == PMOE_OK) status = report(r, ops, errors);
  free(times);
  return status;
}

pmoe_status bench_rows(bench_rank *rank) {
  rows_run r = {.rank = rank};
  pmoe_status status = make(&r);
  if (status == PMOE_OK) status = measure(&r);
  end(&r);
  return status;
}
