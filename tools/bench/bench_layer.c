/* The whole layer, and beside it its ceilings and (for ranks that are threads) the same work on one rank. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ceilings.h"
#include "commands.h"
#include "device.h"
#include "layer_setup.h"
#include "report.h"
#include "timing.h"

enum { STAGES = 5 };
static const char *const stage_names[STAGES] = {"forward_gate_ms", "forward_plan_ms", "forward_dispatch_ms",
                                                "forward_experts_ms", "forward_combine_ms"};

enum { FLOOR, TWIN };

typedef struct layer_run {
  bench_rank *rank;
  bench_layer_setup own, alone; /* alone: rank 0 only, and only where ranks are threads */
  pmoe_ctx *alone_ctx;
  bool has_alone;
  bench_floor *floor, *twin; /* on the CPU */
  bench_ways on_device[2];   /* on a device: the same two */
  bench_move move;           /* on a device: a large copy */
  int64_t rows;              /* that come here; with a dense branch its own too */
  int32_t experts_with_rows;
  double *stage_ms; /* [STAGES, iters], of the latest iterations */
  int64_t calls;
} layer_run;

static pmoe_status keep_stages(layer_run *r) {
  pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
  BENCH_TRY(pmoe_stash_metrics(r->own.stash, &m));
  const float ms[STAGES] = {m.ms_gate, m.ms_plan, m.ms_dispatch, m.ms_experts, m.ms_combine};
  int iters = r->rank->options->iters;
  for (int i = 0; i < STAGES; i++) r->stage_ms[i * iters + r->calls % iters] = (double)ms[i];
  r->calls++;
  return PMOE_OK;
}

static pmoe_status forward(void *arg) {
  layer_run *r = arg;
  pmoe_status status = bench_layer_forward(&r->own);
  return status == PMOE_OK ? keep_stages(r) : status;
}

static pmoe_status make_products(layer_run *r, const bench_floor_shape *shape, int which) {
  if (!r->rank->device) {
    pmoe_status status = bench_floor_experts(r->rank->ctx, shape, which == FLOOR ? &r->floor : &r->twin);
    return status < 0 ? bench_complain("bench_floor_experts", status) : status;
  }
  bench_ways *ways = &r->on_device[which];
  pmoe_status status = r->rank->device->products(r->rank->device, shape, &ways->products);
  if (status == PMOE_OK) ways->way = bench_products_best(ways->products);
  return status;
}

static pmoe_status make_ceilings(layer_run *r) {
  const bench_options *o = r->rank->options;
  int64_t *count;
  BENCH_TRY(bench_alloc(((size_t)o->experts + 1) * sizeof *count, &count));
  int32_t expert[BENCH_MAX_TOP_K];
  for (int64_t t = 0; t < o->tokens; t++) {
    bench_choose(o, t, expert);
    for (int32_t k = 0; k < o->top_k; k++) count[expert[k]]++;
  }
  int64_t *own = count + r->own.first_expert;
  int32_t num = r->own.num_experts;
  if (o->residual) own[num++] = r->own.tokens; /* what follows is another rank's, and not read */
  for (int32_t e = 0; e < num; e++) r->rows += own[e];
  r->experts_with_rows = bench_experts_with_rows(num, own);
  bench_floor_shape shape = {o->hidden, o->inner, bench_inner1(o), o->dtype, num, own};
  pmoe_status status = make_products(r, &shape, FLOOR);
  shape.num_experts = 1, shape.rows = &r->rows;
  if (status == PMOE_OK) status = make_products(r, &shape, TWIN);
  free(count);
  return status;
}

/* Far more than the cache holds. */
static pmoe_status make_move(layer_run *r) {
  bench_device *device = r->rank->device;
  void *memory[2] = {NULL, NULL};
  size_t bytes = 16 * device->cache_bytes;
  pmoe_status status = device->take(device, bytes, &memory[0]);
  if (status == PMOE_OK) status = device->take(device, bytes, &memory[1]);
  if (status == PMOE_OK) status = bench_device_scatter(device, memory[0], bytes);
  r->move = (bench_move){device, memory[1], memory[0], bytes};
  return status;
}

static pmoe_status make(layer_run *r) {
  bench_rank *rank = r->rank;
  const bench_options *o = rank->options;
  BENCH_TRY(bench_alloc((size_t)(STAGES * o->iters) * sizeof *r->stage_ms, &r->stage_ms));
  pmoe_status status = bench_layer_create(o, rank->ctx, rank->comm, rank->device, bench_first_token(rank),
                                          bench_num_tokens(rank), &r->own);
  if (status == PMOE_OK) status = make_ceilings(r);
  if (status == PMOE_OK && rank->device) status = make_move(r);
  r->has_alone = rank->nranks > 1 && strcmp(pmoe_comm_transport(rank->comm), "threads") == 0;
  if (status != PMOE_OK || !r->has_alone || rank->rank > 0) return status;
  BENCH_TRY(bench_ctx(o, rank->threads, &r->alone_ctx));
  return bench_layer_create(o, r->alone_ctx, NULL, NULL, 0, o->tokens, &r->alone);
}

static void end(layer_run *r) {
  bench_layer_destroy(&r->own);
  bench_layer_destroy(&r->alone);
  pmoe_ctx_destroy(r->alone_ctx);
  bench_floor_destroy(r->floor);
  bench_floor_destroy(r->twin);
  if (r->rank->device) {
    for (int i = 0; i < 2; i++) bench_products_destroy(r->on_device[i].products);
    r->rank->device->give_back(r->rank->device, r->move.to);
    r->rank->device->give_back(r->rank->device, (void *)r->move.from);
  }
  free(r->stage_ms);
}

/* ---- report ---- */
enum {
  OP_FORWARD,
  OP_BACKWARD,
  OP_FLOOR_FORWARD,
  OP_FLOOR_BACKWARD,
  OP_TWIN_FORWARD,
  OP_TWIN_BACKWARD,
  OP_ALONE_FORWARD,
  OP_ALONE_BACKWARD,
  NUM_OPS,
  OP_MOVE = OP_ALONE_FORWARD /* on a device */
};

/* Sums over ranks, in place. */
static pmoe_status sum_over_ranks(const bench_rank *rank, double *values, int n) {
  if (rank->nranks == 1) return PMOE_OK;
  double *all;
  size_t bytes = (size_t)n * sizeof *values;
  BENCH_TRY(bench_alloc((size_t)rank->nranks * bytes, &all));
  pmoe_status status = pmoe_comm_allgather(rank->comm, values, all, bytes);
  memset(values, 0, bytes);
  for (int32_t i = 0; i < rank->nranks * n; i++) values[i % n] += all[i];
  free(all);
  return status;
}

static void set_half(bench_result *result, const bench_op *ops, int half, int iters) {
  bench_set_times(result, ops[OP_FORWARD + half].ms, iters);
  result->floor_ms = bench_median(ops[OP_FLOOR_FORWARD + half].ms, iters);
  result->twin_ms = bench_median(ops[OP_TWIN_FORWARD + half].ms, iters);
}

static int64_t expert_rows(const layer_run *r) { return r->rows - (r->rank->options->residual ? r->own.tokens : 0); }

/* Rows also cross the gather and the combine, and weights are the router's too. */
static void set_costs(const layer_run *r, double *costs) {
  const bench_options *o = r->rank->options;
  bench_expert_cost c = bench_expert_cost_of(o, r->rows, r->experts_with_rows);
  double tokens = (double)bench_num_tokens(r->rank);
  double router = 2 * tokens * o->hidden * o->experts;
  double moved = 2 * (tokens + (double)expert_rows(r)) * o->hidden * (double)pmoe_dtype_size(o->dtype);
  costs[0] = c.flops_forward + router, costs[1] = c.flops_backward + 3 * router;
  costs[2] = c.bytes_forward + moved, costs[3] = c.bytes_backward + moved;
}

/* The copy's rate, and with it and the twin's what the counted bytes and operations take at least. */
static pmoe_status add_device_facts(layer_run *r, const bench_op *ops, double twin_ms, bench_result *both) {
  const bench_options *o = r->rank->options;
  bench_device *device = r->rank->device;
  double copy_ms = bench_median(ops[OP_MOVE].ms, o->iters), rate = 2 * (double)r->move.bytes / copy_ms;
  double ms = 0;
  const bench_op step[2] = {ops[OP_FORWARD], ops[OP_BACKWARD]};
  pmoe_status status = device->train(device, step, 2, o->iters, &ms);
  if (status < 0) return status;
  bench_add_extra(both, "train_ms", ms);
  bench_add_extra(both, "device_copy_gb_per_s", rate * 1e-6);
  bench_add_extra(both, "bytes_floor_ms", both->bytes / rate);
  bench_add_extra(both, "share_bytes_floor", both->bytes / rate / both->median_ms);
  bench_add_extra(both, "products_over_twin", twin_ms > 0 ? both->floor_ms / twin_ms : 0);
  return PMOE_OK;
}

static pmoe_status report(layer_run *r, bench_op *ops, const double *errors) {
  const bench_options *o = r->rank->options;
  int iters = o->iters;
  pmoe_memory memory = PMOE_CONFIG_INIT(pmoe_memory);
  BENCH_TRY(pmoe_ctx_memory(r->rank->ctx, &memory));
  pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
  BENCH_TRY(pmoe_stash_metrics(r->own.stash, &m));
  double size = (double)pmoe_dtype_size(o->dtype);
  double least = (double)expert_rows(r) * ((double)(o->hidden + bench_inner1(o)) * size + 16);
  if (o->residual) least += (double)r->own.tokens * (bench_inner1(o) * size + 8);
  double sums[7] = {0, 0, 0, 0, (double)memory.peak_bytes, (double)m.saved_bytes, least};
  set_costs(r, sums);
  BENCH_TRY(sum_over_ranks(r->rank, sums, 7));

  bench_result f = {.name = "layer_forward", .has_inner = true, .flops = sums[0], .bytes = sums[2], .error = errors[0]};
  bench_result b = {
      .name = "layer_backward", .has_inner = true, .flops = sums[1], .bytes = sums[3], .error = errors[1]};
  f.peak_bytes = b.peak_bytes = (int64_t)sums[4];
  f.saved_bytes = b.saved_bytes = (int64_t)sums[5];
  f.tolerance = b.tolerance = bench_tolerance(o);
  set_half(&f, ops, 0, iters);
  set_half(&b, ops, 1, iters);
  for (int i = 0; i < STAGES && !o->graph; i++)
    bench_add_extra(&f, stage_names[i],
                    r->rank->device ? r->stage_ms[i * iters] : bench_median(r->stage_ms + i * iters, iters));

  bench_result both = b;
  both.name = "layer";
  both.flops += f.flops, both.bytes += f.bytes, both.error = bench_worse(errors[0], errors[1]);
  for (int i = 0; i < (r->rank->device ? OP_MOVE : NUM_OPS); i += 2)
    if (ops[i].ms) bench_add(ops[i].ms, ops[i].ms, ops[i + 1].ms, iters);
  set_half(&both, ops, 0, iters);
  bench_add_extra(&both, "saved_share", sums[5] / sums[6]);
  if (r->has_alone) {
    double alone = bench_median(ops[OP_ALONE_FORWARD].ms, iters);
    bench_add_extra(&both, "one_rank_ms", alone);
    bench_add_extra(&both, "ratio_one_rank", both.median_ms / alone);
  }
  if (r->rank->device) {
    pmoe_status status = add_device_facts(r, ops, both.twin_ms, &both);
    if (status < 0) return status;
  }
  BENCH_TRY(bench_report(r->rank, &f));
  BENCH_TRY(bench_report(r->rank, &b));
  return bench_report(r->rank, &both);
}

static pmoe_status measure_on_device(layer_run *r) {
  bench_device *device = r->rank->device;
  double *times = NULL, errors[2] = {0, 0}, costs[4];
  bench_ways *ways = r->on_device;
  pmoe_status status = r->rank->options->graph ? bench_layer_capture(&r->own) : PMOE_OK;
  bench_op ops[NUM_OPS] = {[OP_FORWARD] = {bench_layer_forward, &r->own, NULL},
                           [OP_BACKWARD] = {bench_layer_backward, &r->own, NULL},
                           [OP_FLOOR_FORWARD] = {bench_products_forward, &ways[FLOOR], NULL},
                           [OP_FLOOR_BACKWARD] = {bench_products_backward, &ways[FLOOR], NULL},
                           [OP_TWIN_FORWARD] = {bench_products_forward, &ways[TWIN], NULL},
                           [OP_TWIN_BACKWARD] = {bench_products_backward, &ways[TWIN], NULL},
                           [OP_MOVE] = {bench_move_run, &r->move, NULL}};
  set_costs(r, costs);
  bench_device_sees(device, costs[2]);
  if (status == PMOE_OK) status = bench_measure(r->rank, ops, OP_MOVE + 1, &times);
  if (status == PMOE_OK && r->rank->options->check) status = bench_layer_check(&r->own, &errors[0], &errors[1]);
  if (status == PMOE_OK) status = keep_stages(r);
  if (status == PMOE_OK) status = report(r, ops, errors);
  free(times);
  return status;
}

static pmoe_status measure(layer_run *r) {
  double *times = NULL, errors[2] = {0, 0};
  bool alone = r->has_alone && r->rank->rank == 0;
  bench_op ops[NUM_OPS] = {[OP_FORWARD] = {forward, r, NULL},
                           [OP_BACKWARD] = {bench_layer_backward, &r->own, NULL},
                           [OP_FLOOR_FORWARD] = {bench_floor_forward, r->floor, NULL},
                           [OP_FLOOR_BACKWARD] = {bench_floor_backward, r->floor, NULL},
                           [OP_TWIN_FORWARD] = {bench_floor_forward, r->twin, NULL},
                           [OP_TWIN_BACKWARD] = {bench_floor_backward, r->twin, NULL},
                           [OP_ALONE_FORWARD] = {alone ? bench_layer_forward : NULL, &r->alone, NULL},
                           [OP_ALONE_BACKWARD] = {alone ? bench_layer_backward : NULL, &r->alone, NULL}};
  pmoe_status status = bench_measure(r->rank, ops, r->has_alone ? NUM_OPS : OP_ALONE_FORWARD, &times);
  if (status == PMOE_OK && r->rank->options->check) status = bench_layer_check(&r->own, &errors[0], &errors[1]);
  if (status == PMOE_OK) status = report(r, ops, errors);
  free(times);
  return status;
}

pmoe_status bench_layer(bench_rank *rank) {
  layer_run r = {.rank = rank};
  pmoe_status status = make(&r);
  if (status == PMOE_OK) status = rank->device ? measure_on_device(&r) : measure(&r);
  end(&r);
  return status;
}
