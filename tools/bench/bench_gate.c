/* The router alone. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "block.h"
#include "ceilings.h"
#include "commands.h"
#include "expert_params.h"
#include "report.h"
#include "timing.h"

enum { SAMPLED = 4 };

typedef struct gate_run {
  bench_rank *rank;
  pmoe_gate *gate;
  pmoe_gate_params params;
  pmoe_step step;
  pmoe_routing routing, there; /* the host's, and what the library sees of it */
  pmoe_mat x, dx;
  float *weight, *weight_grad, *dweight;
  bench_block block;      /* which these lie in */
  bench_floor *floor;     /* on the CPU */
  bench_exp exponentials; /* on the CPU; of as many numbers as there are logits */
  bench_move move[2];     /* on a device: copies that read and write as many bytes */
  bench_block move_block[2];
  bench_block routing_block;
} gate_run;

static pmoe_stream stream_of(const gate_run *r) { return r->rank->device ? r->rank->device->stream : NULL; }

static pmoe_status forward(void *arg) {
  gate_run *r = arg;
  pmoe_mat x = bench_block_mat(&r->block, &r->x);
  BENCH_TRY(pmoe_gate_forward(r->gate, &r->params, &r->step, &x, &r->there, NULL, stream_of(r)));
  return PMOE_OK;
}

static pmoe_status backward(void *arg) {
  gate_run *r = arg;
  pmoe_mat x = bench_block_mat(&r->block, &r->x), dx = bench_block_mat(&r->block, &r->dx);
  BENCH_TRY(pmoe_gate_backward(r->gate, &r->params, &r->step, &x, &r->there, bench_block_at(&r->block, r->dweight),
                               1.0f, NULL, &dx, PMOE_BWD_ALL, stream_of(r)));
  return PMOE_OK;
}

/* Bytes that are read and written at least; dx and dWg are added to. */
static void set_bytes(const bench_options *o, double *forward_bytes, double *backward_bytes) {
  double x = (double)o->tokens * o->hidden * (double)pmoe_dtype_size(o->dtype),
         weight = (double)o->experts * o->hidden * (double)sizeof(float);
  *forward_bytes = x + weight, *backward_bytes = 3 * x + 3 * weight;
}

static pmoe_status make_moves(gate_run *r) {
  double bytes[2];
  set_bytes(r->rank->options, &bytes[0], &bytes[1]);
  pmoe_status status = PMOE_OK;
  for (int i = 0; i < 2 && status == PMOE_OK; i++) {
    size_t half = (size_t)(bytes[i] / 2);
    status = bench_block_create(r->rank->device, 2 * half, &r->move_block[i]);
    if (status < 0) return status;
    status = bench_device_scatter(r->rank->device, r->move_block[i].data + half, half);
    r->move[i] = (bench_move){r->rank->device, r->move_block[i].data, r->move_block[i].data + half, half};
  }
  return status;
}

static pmoe_status make(gate_run *r) {
  const bench_options *o = r->rank->options;
  pmoe_gate_config cfg = PMOE_CONFIG_INIT(pmoe_gate_config);
  cfg.num_experts = o->experts, cfg.top_k = o->top_k;
  BENCH_TRY(pmoe_gate_create(r->rank->ctx, o->hidden, 0, &cfg, &r->gate));
  int64_t router = (int64_t)o->experts * o->hidden, choices = o->tokens * o->top_k, elements = o->tokens * o->hidden,
          logits = o->tokens * o->experts;
  size_t x_bytes = ((size_t)elements * pmoe_dtype_size(o->dtype) + 63) / 64 * 64;
  pmoe_status status = bench_block_create(
      r->rank->device, 2 * x_bytes + (size_t)(2 * (router + logits) + choices) * sizeof(float), &r->block);
  if (status < 0) return status;
  char *at = r->block.host;
  r->x = (pmoe_mat){at, o->dtype, o->tokens, o->hidden, o->hidden};
  r->dx = (pmoe_mat){at + x_bytes, o->dtype, o->tokens, o->hidden, o->hidden};
  r->weight = (float *)(void *)(at + 2 * x_bytes);
  r->weight_grad = r->weight + router;
  r->dweight = r->weight_grad + router;
  r->exponentials = (bench_exp){r->rank->ctx, r->dweight + choices, r->dweight + choices + logits, logits};
  bench_fill(o, BENCH_X, 0, logits, r->dweight + choices);
  r->params = (pmoe_gate_params){.size = sizeof r->params,
                                 .weight = bench_block_at(&r->block, r->weight),
                                 .weight_grad = bench_block_at(&r->block, r->weight_grad)};
  r->step = (pmoe_step)PMOE_CONFIG_INIT(pmoe_step);
  r->step.training = 1;
  bench_router(o, r->weight);
  bench_fill(o, BENCH_ROW_WEIGHT, 0, choices, r->dweight);
  status = bench_tokens(o, 0, o->tokens, r->x.data);
  if (status == PMOE_OK) status = bench_block_push(&r->block);
  if (status == PMOE_OK)
    status = bench_routing(o, r->rank->device, 0, o->tokens, &r->routing, &r->routing_block, &r->there);
  if (status < 0) return status;
  if (r->rank->device) return make_moves(r);
  BENCH_TRY(bench_floor_gate(r->rank->ctx, o->tokens, o->hidden, o->experts, &r->floor));
  return PMOE_OK;
}

static void end(gate_run *r) {
  bench_floor_destroy(r->floor);
  pmoe_gate_destroy(r->gate);
  bench_block_destroy(&r->block);
  bench_block_destroy(&r->routing_block);
  for (int i = 0; i < 2; i++) bench_block_destroy(&r->move_block[i]);
}

/* ---- check ---- */
typedef struct buffers {
  bench_router_reference router;
  double *x, *dlogits, *dweight, *grad[2]; /* gradients of the first and the last expert's row of Wg */
} buffers;

enum { ERROR_WEIGHT, ERROR_DX, ERROR_GRAD, NUM_ERRORS };

static void check_token(const gate_run *r, int64_t t, buffers *b, bench_error *errors) {
  const bench_options *o = r->rank->options;
  int64_t h = o->hidden;
  bench_row(o, BENCH_X, t, b->x);
  bench_router_forward(&b->router, b->x);
  for (int32_t k = 0; k < o->top_k; k++) b->dweight[k] = (double)bench_element(o, BENCH_ROW_WEIGHT, t * o->top_k + k);
  bench_router_backward(&b->router, b->dweight, b->dlogits);
  for (int i = 0; i < 2; i++)
    for (int64_t j = 0; j < h; j++) b->grad[i][j] += b->dlogits[i == 0 ? 0 : o->experts - 1] * b->x[j];
  for (int32_t k = 0; k < o->top_k; k++) {
    int64_t choice = t * o->top_k + k;
    bool same = r->routing.expert[choice] == b->router.expert[k];
    bench_compare(&errors[ERROR_WEIGHT], same ? (double)r->routing.weight[choice] : NAN,
                  b->router.prob[b->router.expert[k]]);
  }
  if (t % (o->tokens / SAMPLED + 1) != 0) return;
  for (int64_t j = 0; j < h; j++) {
    double dx = 0;
    for (int64_t e = 0; e < o->experts; e++) dx += b->dlogits[e] * (double)b->router.weight[e * h + j];
    bench_compare(&errors[ERROR_DX], (double)bench_load(o->dtype, r->dx.data, t * h + j), dx);
  }
}

static pmoe_status check(gate_run *r, double *forward_error, double *backward_error) {
  const bench_options *o = r->rank->options;
  int64_t h = o->hidden;
  memset(r->dx.data, 0, (size_t)(o->tokens * h) * pmoe_dtype_size(o->dtype));
  memset(r->weight_grad, 0, (size_t)(o->experts * h) * sizeof(float));
  pmoe_status status = bench_block_push(&r->block);
  if (status == PMOE_OK) status = forward(r);
  if (status == PMOE_OK) status = backward(r);
  if (status == PMOE_OK) status = bench_block_pull(&r->block, r->block.host, r->block.bytes);
  if (status == PMOE_OK) status = bench_block_pull(&r->routing_block, r->routing_block.host, r->routing_block.bytes);
  if (status < 0) return status;
  buffers b;
  status = bench_router_create(o, &b.router);
  double *memory = NULL;
  if (status == PMOE_OK) status = bench_alloc((size_t)(3 * h + o->experts + o->top_k) * sizeof *memory, &memory);
  if (status == PMOE_OK) {
    b.x = memory, b.grad[0] = memory + h, b.grad[1] = memory + 2 * h, b.dlogits = memory + 3 * h,
    b.dweight = b.dlogits + o->experts;
    bench_error errors[NUM_ERRORS] = {{0, 0}};
    for (int64_t t = 0; t < o->tokens; t++) check_token(r, t, &b, errors);
    for (int i = 0; i < 2; i++)
      for (int64_t j = 0; j < h; j++)
        bench_compare(&errors[ERROR_GRAD], (double)r->weight_grad[(i == 0 ? 0 : o->experts - 1) * h + j], b.grad[i][j]);
    *forward_error = bench_relative(&errors[ERROR_WEIGHT]);
    *backward_error = bench_worst(&errors[ERROR_DX], NUM_ERRORS - ERROR_DX);
  }
  bench_router_destroy(&b.router);
  free(memory);
  return status;
}

/* ---- measurement ---- */

/* Scores, choices and slots: what forward takes beyond its product, beside one exponentiation of as many numbers. */
static pmoe_status add_route_cost(const gate_run *r, const bench_op *ops, bench_result *result) {
  int32_t n = r->rank->options->iters;
  double *route = NULL;
  BENCH_TRY(bench_alloc((size_t)n * sizeof *route, &route));
  for (int32_t i = 0; i < n; i++) route[i] = ops[0].ms[i] - ops[2].ms[i];
  double route_ms = bench_median(route, n), exp_ms = bench_median(ops[4].ms, n);
  free(route);
  bench_add_extra(result, "route_ms", route_ms);
  bench_add_extra(result, "exp_ms", exp_ms);
  bench_add_extra(result, "route_over_exp", route_ms / exp_ms);
  return PMOE_OK;
}

static pmoe_status report(gate_run *r, const bench_op *ops, const double *errors) {
  const bench_options *o = r->rank->options;
  double tokens = (double)o->tokens, h = o->hidden, e = o->experts;
  pmoe_memory memory = PMOE_CONFIG_INIT(pmoe_memory);
  BENCH_TRY(pmoe_ctx_memory(r->rank->ctx, &memory));
  bench_result f = {
      .name = "gate_forward", .flops = 2 * tokens * h * e, .error = errors[0], .tolerance = bench_tolerance(o)};
  bench_result b = {
      .name = "gate_backward", .flops = 6 * tokens * h * e, .error = errors[1], .tolerance = bench_tolerance(o)};
  set_bytes(o, &f.bytes, &b.bytes);
  f.peak_bytes = b.peak_bytes = memory.peak_bytes;
  f.saved_bytes = b.saved_bytes = o->tokens * o->top_k * (int64_t)(sizeof(int32_t) + sizeof(int64_t) + sizeof(float));
  bench_set_times(&f, ops[0].ms, o->iters);
  bench_set_times(&b, ops[1].ms, o->iters);
  if (r->rank->device) {
    f.copy_ms = bench_median(ops[2].ms, o->iters), b.copy_ms = bench_median(ops[3].ms, o->iters);
  } else {
    f.floor_ms = bench_median(ops[2].ms, o->iters), b.floor_ms = bench_median(ops[3].ms, o->iters);
    BENCH_TRY(add_route_cost(r, ops, &f));
  }
  BENCH_TRY(bench_report(r->rank, &f));
  return bench_report(r->rank, &b);
}

static pmoe_status measure(gate_run *r) {
  double *times = NULL, errors[2] = {0, 0};
  pmoe_ctx_reset_peak_memory(r->rank->ctx);
  enum { OPS = 5 };
  bench_op ops[OPS] = {{forward, r, NULL},
                       {backward, r, NULL},
                       {bench_floor_forward, r->floor, NULL},
                       {bench_floor_backward, r->floor, NULL},
                       {bench_exp_run, &r->exponentials, NULL}};
  int num_ops = OPS;
  if (r->rank->device) {
    for (int i = 0; i < 2; i++) ops[2 + i] = (bench_op){bench_move_run, &r->move[i], NULL};
    num_ops = 4;
    bench_device_sees(r->rank->device, 2 * (double)r->move[1].bytes);
  }
  pmoe_status status = bench_measure(r->rank, ops, num_ops, &times);
  if (status == PMOE_OK && r->rank->options->check) status = check(r, &errors[0], &errors[1]);
  if (status == PMOE_OK) status = report(r, ops, errors);
  free(times);
  return status;
}

pmoe_status bench_gate(bench_rank *rank) {
  gate_run r = {.rank = rank};
  pmoe_status status = make(&r);
  if (status == PMOE_OK) status = measure(&r);
  end(&r);
  return status;
}
