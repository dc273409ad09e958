#include <pmoe/gate.h>

#include <math.h>

#include "core/config.h"
#include "gating/gate_ops.h"

pmoe_status pmoe_gate_create(pmoe_ctx *ctx, int32_t hidden, int32_t layer_id, const pmoe_gate_config *config,
                             pmoe_gate **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(out);
  pmoe_gate_config cfg;
  PMOEI_TRY(pmoei_config_read(&cfg, sizeof cfg, config, "cfg"));
  PMOEI_TRY(pmoei_gate_check_config(hidden, layer_id, &cfg));
  if (cfg.weight_scale == 0) cfg.weight_scale = 1;
  if (cfg.min_capacity == 0) cfg.min_capacity = 1;
  pmoe_gate *gate = NULL;
  PMOEI_TRY(pmoei_alloc(ctx, sizeof *gate, "gate", &gate));
  pmoei_ctx_retain(ctx);
  *gate = (pmoe_gate){.ctx = ctx, .ops = &pmoei_gate_ops_cpu, .cfg = cfg, .hidden = hidden, .layer_id = layer_id};
  *out = gate;
  return PMOE_OK;
}

void pmoe_gate_destroy(pmoe_gate *gate) {
  if (!gate) return;
  pmoe_ctx *ctx = gate->ctx;
  pmoei_free(ctx, gate, sizeof *gate);
  pmoei_ctx_release(ctx);
}

/* Lays the call's scratch out in a frame, which the caller closes. */
static pmoe_status open_scratch(pmoei_gate_call *call, int32_t *frame) {
  pmoei_arena arena = {NULL, 0};
  call->gate->ops->plan(call, &arena);
  void *base;
  PMOEI_TRY(pmoei_scratch_open(call->gate->ctx, arena.used, &base, frame));
  arena = (pmoei_arena){base, 0};
  call->gate->ops->plan(call, &arena);
  return PMOE_OK;
}

static pmoe_status run_forward(pmoei_gate_call *call) {
  const pmoei_gate_ops *ops = call->gate->ops;
  PMOEI_TRY(ops->route(call));
  PMOEI_TRY(ops->total(call));
  if (call->capacity > 0) PMOEI_TRY(ops->drop(call));
  return ops->place(call);
}

static pmoe_status run_backward(pmoei_gate_call *call, pmoe_bwd which) {
  const pmoei_gate_ops *ops = call->gate->ops;
  if (which != PMOE_BWD_WEIGHT) PMOEI_TRY(ops->input_grad(call));
  if (which != PMOE_BWD_INPUT) PMOEI_TRY(ops->weight_grad(call));
  return PMOE_OK;
}

static pmoe_gate_stats statistics(const pmoei_gate_call *call) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  const pmoei_gate_totals *totals = &call->totals;
  int64_t choices = 0, routed = 0, most = 0;
  for (int32_t e = 0; e < cfg->num_experts; e++) {
    int64_t count = call->routing.expert_count[e];
    choices += count;
    routed += call->routing.expert_rows[e];
    if (count > most) most = count;
  }
  double entropy = 0;
  for (int32_t e = 0; e < cfg->num_experts; e++) {
    if (call->routing.expert_count[e] == 0) continue;
    double share = (double)call->routing.expert_count[e] / (double)choices;
    entropy -= share * log(share);
  }
  double live = totals->live > 0 ? (double)totals->live : 1;
  pmoe_gate_stats stats = PMOE_CONFIG_INIT(pmoe_gate_stats);
  stats.tokens = call->tokens;
  stats.masked = totals->masked;
  stats.routed = routed;
  stats.dropped = choices - routed;
  stats.nonfinite = totals->nonfinite;
  stats.aux_loss = (float)((double)cfg->aux_coef * cfg->num_experts * totals->aux_sum);
  stats.z_loss = (float)((double)cfg->z_coef * totals->z_sum / live);
  stats.load_max_over_mean = choices > 0 ? (float)((double)most * cfg->num_experts / (double)choices) : 0;
  stats.entropy = (float)entropy;
  return stats;
}

pmoe_status pmoe_gate_forward(pmoe_gate *gate, const pmoe_gate_params *params, const pmoe_step *step, const pmoe_mat *x,
                              pmoe_routing *routing, pmoe_gate_stats *stats, pmoe_stream stream) {
  (void)stream;
  pmoei_gate_call call = {0};
  PMOEI_TRY(pmoei_gate_check_forward(&call, gate, params, step, x, routing, stats));
  int32_t frame = 0;
  PMOEI_TRY(open_scratch(&call, &frame));
  pmoe_status status = run_forward(&call);
  pmoei_scratch_close(gate->ctx, frame);
  PMOEI_TRY(status);
  call.routing.tokens = call.tokens;
  call.routing.num_experts = gate->cfg.num_experts;
  call.routing.top_k = gate->cfg.top_k;
  call.routing.capacity = call.capacity;
  PMOEI_TRY(PMOEI_STRUCT_WRITE(routing, &call.routing));
  pmoe_gate_stats values = statistics(&call);
  return stats ? PMOEI_STRUCT_WRITE(stats, &values) : PMOE_OK;
}

pmoe_status pmoe_gate_backward(pmoe_gate *gate, const pmoe_gate_params *params, const pmoe_step *step,
                               const pmoe_mat *x, const pmoe_routing *routing, const float *dweight, float loss_scale,
                               float *dlogits, pmoe_mat *dx, pmoe_bwd which, pmoe_stream stream) {
  (void)stream;
  pmoei_gate_call call = {0};
  PMOEI_TRY(pmoei_gate_check_backward(&call, gate, params, step, x, routing, dweight, loss_scale, dlogits, dx, which));
  int32_t frame = 0;
  PMOEI_TRY(open_scratch(&call, &frame));
  pmoe_status status = run_backward(&call, which);
  pmoei_scratch_close(gate->ctx, frame);
  return status;
}

size_t pmoei_gate_scratch_bytes(const pmoe_gate *gate, int64_t tokens) {
  size_t most = 0;
  bool drops = gate->cfg.capacity_factor > 0 || gate->cfg.eval_capacity_factor > 0;
  for (int backward = 0; backward <= 1; backward++) {
    pmoei_gate_call call = {.gate = gate, .tokens = tokens, .capacity = drops, .backward = backward != 0};
    call.blocks = (tokens + PMOEI_GATE_BLOCK - 1) / PMOEI_GATE_BLOCK;
    pmoei_arena arena = {NULL, 0};
    gate->ops->plan(&call, &arena);
    if (arena.used > most) most = arena.used;
  }
  return most;
}
