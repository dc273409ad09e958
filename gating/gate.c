#include <pmoe/gate.h>

#include <math.h>

#include <string.h>

#include "core/config.h"
#include "gating/gate_ops.h"

static size_t count_bytes(const pmoe_gate *gate) { return (size_t)gate->cfg.num_experts * sizeof *gate->choice_count; }

static size_t sums_bytes(const pmoe_gate *gate) {
  return ((size_t)gate->cfg.num_experts + 1) * sizeof *gate->global_sums;
}

static size_t prob_bytes(const pmoe_gate *gate) { return (size_t)gate->cfg.num_experts * sizeof *gate->global_prob; }

/* Zeroed, and there when the call returns. */
static pmoe_status take_zeroed(pmoe_ctx *ctx, size_t bytes, const char *what, void *out_pointer) {
  PMOEI_TRY(pmoei_data_alloc(ctx, bytes, what, out_pointer));
  void *p;
  memcpy(&p, out_pointer, sizeof p);
  return pmoei_data_zero(ctx, p, bytes);
}

static pmoe_status take_memory(pmoe_gate *gate) {
  pmoe_ctx *ctx = gate->ctx;
  PMOEI_TRY(pmoei_ctx_enter(ctx, NULL));
  PMOEI_TRY(take_zeroed(ctx, count_bytes(gate), "gate's counts", &gate->choice_count));
  PMOEI_TRY(pmoei_pinned_alloc(ctx, pmoei_gate_report_bytes(gate), "gate's report", &gate->report));
  if (gate->cfg.global_aux_coef > 0) {
    PMOEI_TRY(take_zeroed(ctx, sums_bytes(gate), "gate's global counts", &gate->global_sums));
    PMOEI_TRY(take_zeroed(ctx, prob_bytes(gate), "gate's global sums", &gate->global_prob));
  }
  return pmoei_data_wait(ctx);
}

static const pmoei_gate_ops *ops_of(const pmoe_ctx *ctx) {
#ifdef PMOE_WITH_CUDA
  if (pmoei_on_device(ctx)) return &pmoei_gate_ops_cuda;
#endif
  (void)ctx;
  return &pmoei_gate_ops_cpu;
}

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
  *gate = (pmoe_gate){.ctx = ctx, .ops = ops_of(ctx), .cfg = cfg, .hidden = hidden, .layer_id = layer_id};
  pmoe_status status = take_memory(gate);
  if (status != PMOE_OK) {
    pmoe_gate_destroy(gate);
    return status;
  }
  *out = gate;
  return PMOE_OK;
}

void pmoe_gate_destroy(pmoe_gate *gate) {
  if (!gate) return;
  pmoe_ctx *ctx = gate->ctx;
  pmoei_data_free(ctx, gate->choice_count, count_bytes(gate));
  pmoei_pinned_free(ctx, gate->report, pmoei_gate_report_bytes(gate));
  pmoei_data_free(ctx, gate->global_sums, sums_bytes(gate));
  pmoei_data_free(ctx, gate->global_prob, prob_bytes(gate));
  pmoei_free(ctx, gate, sizeof *gate);
  pmoei_ctx_release(ctx);
}

pmoe_status pmoe_gate_set_loss_sums(pmoe_gate *gate, pmoe_loss_sum micro_batch, pmoe_loss_sum global) {
  PMOEI_REQUIRE_POINTER(gate);
  gate->micro_batch = micro_batch;
  gate->global = global;
  return PMOE_OK;
}

pmoe_status pmoe_gate_loss_rows(const pmoe_gate *gate, int32_t num_sequences, int64_t *rows) {
  PMOEI_REQUIRE_POINTER(gate);
  PMOEI_REQUIRE_POINTER(rows);
  PMOEI_REQUIRE(num_sequences >= 0, "num_sequences is %d; 0 or more was expected", num_sequences);
  *rows = pmoei_gate_loss_rows(gate, num_sequences);
  return PMOE_OK;
}

pmoe_status pmoe_gate_take_counts(pmoe_gate *gate, int64_t *count) {
  PMOEI_REQUIRE_POINTER(gate);
  PMOEI_REQUIRE_POINTER(count);
  pmoe_ctx *ctx = gate->ctx;
  PMOEI_TRY(pmoei_ctx_enter(ctx, ctx->stream));
  PMOEI_TRY(pmoei_data_copy(ctx, count, gate->choice_count, count_bytes(gate)));
  PMOEI_TRY(pmoei_gate_clear_counts(gate));
  return pmoei_data_wait(ctx);
}

pmoe_status pmoei_gate_clear_counts(pmoe_gate *gate) {
  return pmoei_data_zero(gate->ctx, gate->choice_count, count_bytes(gate));
}

pmoe_status pmoe_selection_bias_update(int32_t num_experts, const int64_t *count, float rate, int32_t centred,
                                       float *bias) {
  PMOEI_REQUIRE(num_experts >= 1, "num_experts is %d; at least 1 was expected", num_experts);
  PMOEI_REQUIRE_POINTER(count);
  PMOEI_REQUIRE_POINTER(bias);
  PMOEI_REQUIRE(isfinite(rate) && rate >= 0, "rate is %g; a finite number, 0 or more, was expected", (double)rate);
  PMOEI_REQUIRE(centred == 0 || centred == 1, "centred is %d; 0 or 1 was expected", centred);
  for (int32_t e = 0; e < num_experts; e++)
    PMOEI_REQUIRE(count[e] >= 0 && count[e] <= INT64_MAX / num_experts,
                  "count[%d] is %lld; 0 to 2^63 / num_experts was expected", e, (long long)count[e]);
  return pmoei_gate_ops_cpu.update_bias(NULL, num_experts, count, rate, centred, bias);
}

pmoe_status pmoei_selection_bias_update(pmoe_ctx *ctx, int32_t num_experts, const int64_t *count, float rate,
                                        int32_t centred, float *bias) {
  return ops_of(ctx)->update_bias(ctx, num_experts, count, rate, centred, bias);
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

/* ---- sums over ranks and micro-batches ---- */

/* Every rank makes the same calls, whatever its tokens. */
static pmoe_status sum_over_ranks(pmoei_gate_call *call, pmoe_gate *gate, pmoe_stream stream) {
  int64_t row = gate->cfg.num_experts + 1;
  if (gate->cfg.global_aux_coef > 0) {
    int64_t *global = pmoei_gate_global_sums(call);
    PMOEI_TRY(pmoei_data_copy(gate->ctx, global, pmoei_gate_micro_sums(call), (size_t)row * sizeof *global));
    if (gate->global.sum) PMOEI_TRY(gate->global.sum(gate->global.user, global, row, stream));
  }
  if (pmoei_gate_has_losses(gate) && gate->micro_batch.sum)
    PMOEI_TRY(gate->micro_batch.sum(gate->micro_batch.user, pmoei_gate_micro_sums(call),
                                    (1 + call->num_sequences) * row, stream));
  if (gate->cfg.global_aux_coef == 0 || !call->counts_for_later) return PMOE_OK;
  bool anew = gate->global_step != call->step.step;
  gate->global_step = call->step.step;
  return gate->ops->add_to_step(call, anew);
}

static pmoe_status run_forward(pmoei_gate_call *call, pmoe_gate *gate, pmoe_stream stream) {
  const pmoei_gate_ops *ops = gate->ops;
  PMOEI_TRY(ops->route(call));
  PMOEI_TRY(ops->total(call));
  PMOEI_TRY(sum_over_ranks(call, gate, stream));
  if (pmoei_gate_has_losses(gate)) PMOEI_TRY(ops->losses(call));
  if (call->capacity > 0) PMOEI_TRY(ops->drop(call));
  return ops->place(call);
}

static pmoe_status run_backward(pmoei_gate_call *call, pmoe_bwd which) {
  const pmoei_gate_ops *ops = call->gate->ops;
  if (which != PMOE_BWD_WEIGHT) PMOEI_TRY(ops->input_grad(call));
  if (which != PMOE_BWD_INPUT) PMOEI_TRY(ops->weight_grad(call));
  return PMOE_OK;
}

/* ---- statistics ---- */

size_t pmoei_gate_report_bytes(const pmoe_gate *gate) { return sizeof *gate->report + 2 * count_bytes(gate); }

static pmoe_status write_report(const pmoei_gate_call *call, pmoei_gate_report *report) {
  const pmoe_gate *gate = call->gate;
  report->tokens = call->tokens;
  PMOEI_TRY(pmoei_data_copy(gate->ctx, report, call->result, offsetof(pmoei_gate_report, tokens)));
  PMOEI_TRY(pmoei_data_copy(gate->ctx, report->count, call->routing.expert_count, count_bytes(gate)));
  return pmoei_data_copy(gate->ctx, report->count + gate->cfg.num_experts, call->routing.expert_rows,
                         count_bytes(gate));
}

pmoe_gate_stats pmoei_gate_statistics(const pmoe_gate *gate, const pmoei_gate_report *report) {
  const pmoe_gate_config *cfg = &gate->cfg;
  const int64_t *expert_count = report->count, *expert_rows = report->count + cfg->num_experts;
  int64_t choices = 0, routed = 0, most = 0;
  for (int32_t e = 0; e < cfg->num_experts; e++) {
    int64_t count = expert_count[e];
    choices += count;
    routed += expert_rows[e];
    if (count > most) most = count;
  }
  double entropy = 0, variance = 0, mean = (double)choices / cfg->num_experts;
  for (int32_t e = 0; e < cfg->num_experts; e++) {
    double count = (double)expert_count[e];
    variance += (count - mean) * (count - mean) / cfg->num_experts;
    if (count > 0) entropy -= count / (double)choices * log(count / (double)choices);
  }
  pmoe_gate_stats stats = PMOE_CONFIG_INIT(pmoe_gate_stats);
  stats.tokens = report->tokens;
  stats.masked = report->totals.masked;
  stats.routed = routed;
  stats.dropped = choices - routed;
  stats.nonfinite = report->totals.nonfinite;
  stats.aux_loss = (float)report->losses.aux;
  stats.z_loss = (float)report->losses.z;
  stats.seq_aux_loss = (float)report->losses.seq_aux;
  stats.global_aux_loss = (float)report->losses.global_aux;
  stats.load_max_over_mean = choices > 0 ? (float)((double)most / mean) : 0;
  stats.load_cv = choices > 0 ? (float)(sqrt(variance) / mean) : 0;
  stats.entropy = (float)entropy;
  stats.dropped_share = choices > 0 ? (float)((double)stats.dropped / (double)choices) : 0;
  return stats;
}

static pmoe_status forward(pmoei_gate_call *call, pmoe_gate *gate, pmoe_routing *routing, pmoei_gate_report *report,
                           pmoe_stream stream) {
  PMOEI_TRY(pmoei_ctx_enter(gate->ctx, stream));
  call->counts_for_later = call->step.training && !call->step.recompute;
  int32_t frame = 0;
  PMOEI_TRY(open_scratch(call, &frame));
  pmoe_status status = run_forward(call, gate, stream);
  if (status == PMOE_OK && report) status = write_report(call, report);
  pmoei_scratch_close(gate->ctx, frame);
  PMOEI_TRY(status);
  call->routing.tokens = call->tokens;
  call->routing.num_experts = gate->cfg.num_experts;
  call->routing.top_k = gate->cfg.top_k;
  call->routing.capacity = call->capacity;
  return PMOEI_STRUCT_WRITE(routing, &call->routing);
}

pmoe_status pmoei_gate_forward(pmoe_gate *gate, const pmoe_gate_params *params, const pmoe_step *step,
                               const pmoe_mat *x, pmoe_routing *routing, pmoei_gate_report *report,
                               pmoe_stream stream) {
  pmoei_gate_call call = {0};
  PMOEI_TRY(pmoei_gate_check_forward(&call, gate, params, step, x, routing, NULL));
  return forward(&call, gate, routing, report, stream);
}

pmoe_status pmoe_gate_forward(pmoe_gate *gate, const pmoe_gate_params *params, const pmoe_step *step, const pmoe_mat *x,
                              pmoe_routing *routing, pmoe_gate_stats *stats, pmoe_stream stream) {
  pmoei_gate_call call = {0};
  PMOEI_TRY(pmoei_gate_check_forward(&call, gate, params, step, x, routing, stats));
  PMOEI_TRY(forward(&call, gate, routing, stats ? gate->report : NULL, stream));
  if (!stats) return PMOE_OK;
  PMOEI_TRY(pmoei_data_wait(gate->ctx));
  pmoe_gate_stats values = pmoei_gate_statistics(gate, gate->report);
  return PMOEI_STRUCT_WRITE(stats, &values);
}

pmoe_status pmoe_gate_backward(pmoe_gate *gate, const pmoe_gate_params *params, const pmoe_step *step,
                               const pmoe_mat *x, const pmoe_routing *routing, const float *dweight, float loss_scale,
                               float *dlogits, pmoe_mat *dx, pmoe_bwd which, pmoe_stream stream) {
  pmoei_gate_call call = {0};
  PMOEI_TRY(pmoei_gate_check_backward(&call, gate, params, step, x, routing, dweight, loss_scale, dlogits, dx, which));
  PMOEI_TRY(pmoei_ctx_enter(gate->ctx, stream));
  int32_t frame = 0;
  PMOEI_TRY(open_scratch(&call, &frame));
  pmoe_status status = run_backward(&call, which);
  pmoei_scratch_close(gate->ctx, frame);
  return status;
}

size_t pmoei_gate_scratch_bytes(const pmoe_gate *gate, int64_t tokens, int32_t num_sequences) {
  size_t most = 0;
  bool drops = gate->cfg.capacity_factor > 0 || gate->cfg.eval_capacity_factor > 0;
  for (int backward = 0; backward <= 1; backward++) {
    pmoei_gate_call call = {.gate = gate, .tokens = tokens, .capacity = drops, .backward = backward != 0};
    call.num_sequences = gate->cfg.seq_aux_coef > 0 ? num_sequences : 0;
    call.step.training = 1; /* the more demanding case */
    call.blocks = (tokens + PMOEI_GATE_BLOCK - 1) / PMOEI_GATE_BLOCK;
    call.x = (pmoe_mat){NULL, PMOE_BF16, tokens, gate->hidden, gate->hidden}; /* likewise */
    pmoei_arena arena = {NULL, 0};
    gate->ops->plan(&call, &arena);
    if (arena.used > most) most = arena.used;
  }
  return most;
}
