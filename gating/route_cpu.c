#include <string.h>

#include "core/gemm.h"
#include "core/parallel.h"
#include "core/simd.h"
#include "gating/gate_cpu.h"

/* out[l, k] = lanes[k, l]. Four bytes an element, whatever they mean. */
static inline void turn(uint32_t *restrict out, const uint32_t *restrict lanes, int64_t rows, const int64_t top_k) {
  for (int64_t l = 0; l < rows; l++)
    for (int64_t k = 0; k < top_k; k++) out[l * top_k + k] = lanes[k * LANES + l];
}

PMOEI_VECTORISED static void write_rows(void *restrict out, const void *restrict lanes, int64_t rows, int64_t top_k) {
  if (top_k == 1) turn(out, lanes, rows, 1);
  else if (top_k == 2) turn(out, lanes, rows, 2);
  else if (top_k == 4) turn(out, lanes, rows, 4);
  else if (top_k == 8) turn(out, lanes, rows, 8);
  else turn(out, lanes, rows, top_k);
}

static void write_choices(const pmoei_gate_call *call, const pmoei_gate_tile *tile, int64_t block) {
  int64_t num_experts = call->gate->cfg.num_experts, top_k = call->gate->cfg.top_k;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  int64_t n = span.rows * top_k, *count = call->block_count + block * num_experts,
          *slot = call->routing.slot + span.first * top_k;
  int32_t *expert = call->routing.expert + span.first * top_k;
  float *weight = call->routing.weight + span.first * top_k;
  write_rows(expert, tile->expert, span.rows, top_k);
  write_rows(weight, tile->value, span.rows, top_k);
  for (int64_t l = 0; l < span.rows && call->step.token_mask; l++) {
    if (!tile->masked[l]) continue;
    for (int64_t i = l * top_k; i < (l + 1) * top_k; i++) expert[i] = -1;
  }
  memset(count, 0, (size_t)num_experts * sizeof *count);
  for (int64_t i = 0; i < n; i++) {
    if (expert[i] >= 0) count[expert[i]]++;
    else weight[i] = 0;
  }
  if (call->capacity > 0) memset(slot, 0, (size_t)n * sizeof *slot);
}

static void mark_masked(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  pmoei_gate_span span = pmoei_gate_block(call, block);
  const uint8_t *mask = call->step.token_mask;
  memset(tile->masked, 0, (size_t)span.rows);
  memset(tile->masked + span.rows, 1, (size_t)(LANES - span.rows));
  for (int64_t l = 0; l < span.rows && mask; l++) tile->masked[l] = !mask[span.first + l];
}

/* Where the choice looks at all tokens: every block's logits, before anything else. */
static void logits_block(void *arg, int64_t block, int32_t thread) {
  const pmoei_gate_call *call = arg;
  pmoei_gate_tile *tile = &call->tile[thread];
  pmoei_gate_logits(call, tile, block, thread);
  memcpy(pmoei_gate_all(call, call->all_logits, block), tile->logits,
         (size_t)call->gate->cfg.num_experts * LANES * sizeof *tile->logits);
}

static void route_block(void *arg, int64_t block, int32_t thread) {
  const pmoei_gate_call *call = arg;
  pmoei_gate_tile *tile = &call->tile[thread];
  mark_masked(call, tile, block);
  if (call->all_logits)
    memcpy(tile->logits, pmoei_gate_all(call, call->all_logits, block),
           (size_t)call->gate->cfg.num_experts * LANES * sizeof *tile->logits);
  else pmoei_gate_logits(call, tile, block, thread);
  pmoei_gate_extremes(call, tile);
  pmoei_gate_choose(call, tile, block);
  pmoei_gate_count_live(call, tile, block);
  if (pmoei_gate_needs_raise(call->gate)) pmoei_gate_raise_logits(call, tile);
  if (pmoei_gate_has_losses(call->gate)) pmoei_gate_sum_losses(call, tile, block);
  pmoei_gate_scores(call, tile);
  write_choices(call, tile, block);
}

/* Experts and weights are the host's: nothing to compare, no losses. */
static void take_block(void *arg, int64_t block, int32_t thread) {
  const pmoei_gate_call *call = arg;
  pmoei_gate_tile *tile = &call->tile[thread];
  pmoei_gate_span span = pmoei_gate_block(call, block);
  int64_t top_k = call->gate->cfg.top_k;
  mark_masked(call, tile, block);
  for (int64_t l = 0; l < span.rows; l++) {
    tile->finite[l] = 1;
    for (int64_t k = 0; k < top_k; k++) {
      int64_t i = (span.first + l) * top_k + k;
      tile->expert[k * LANES + l] = call->step.expert[i];
      tile->value[k * LANES + l] = call->step.weight[i];
      if (call->step.expert[i] >= 0 && !isfinite(call->step.weight[i])) tile->finite[l] = 0;
    }
  }
  pmoei_gate_count_live(call, tile, block);
  write_choices(call, tile, block);
}

pmoe_status pmoei_gate_route(pmoei_gate_call *call) {
  const pmoe_gate *gate = call->gate;
  int64_t *sums = call->routing.loss_sums, rows = pmoei_gate_loss_rows(gate, call->num_sequences);
  if (rows > 0) memset(sums, 0, (size_t)(rows * (gate->cfg.num_experts + 1)) * sizeof *sums);
  if (gate->cfg.router == PMOE_ROUTER_HOST_ROUTING) {
    pmoei_parallel(gate->ctx, call->blocks, take_block, call);
    return PMOE_OK;
  }
  if (call->all_logits) {
    pmoei_parallel(gate->ctx, call->blocks, logits_block, call);
    if (gate->cfg.choice == PMOE_CHOICE_SINKHORN) pmoei_gate_sinkhorn(call);
    else pmoei_gate_expert_choice(call);
  }
  pmoei_parallel(gate->ctx, call->blocks, route_block, call);
  return pmoei_gemm_take_error(gate->ctx->gemm);
}
