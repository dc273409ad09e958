/* Experts choose tokens: each its C best by score (Zhou et al. 2022, arXiv:2202.09368). */
#include <string.h>

#include "core/parallel.h"
#include "gating/gate_cpu.h"

/* What experts compare. -inf for tokens that are masked, whose score is NaN, or that switched the expert off. */
static void score_block(void *arg, int64_t block, int32_t thread) {
  const pmoei_gate_call *call = arg;
  pmoei_gate_tile *tile = &call->tile[thread];
  int64_t num_experts = call->gate->cfg.num_experts;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  const uint8_t *mask = call->step.token_mask;
  const float *logits = pmoei_gate_all(call, call->all_logits, block);
  float *score = pmoei_gate_all(call, call->all_scores, block);
  memcpy(score, logits, (size_t)num_experts * LANES * sizeof *score);
  memcpy(tile->logits, logits, (size_t)num_experts * LANES * sizeof *logits);
  pmoei_gate_extremes(call, tile);
  pmoei_gate_raise(call, tile, score);
  bool softmax = call->gate->cfg.score == PMOE_SCORE_SOFTMAX;
  for (int64_t e = 0; e < num_experts; e++) {
    for (int64_t l = 0; l < LANES; l++) {
      int64_t i = e * LANES + l;
      float value = softmax ? score[i] / tile->sum[l] : score[i];
      bool candidate = l < span.rows && (!mask || mask[span.first + l]) && logits[i] != -INFINITY && value == value;
      score[i] = candidate ? value : -INFINITY;
    }
  }
}

static void pick(void *arg, int64_t expert, int32_t thread) {
  const pmoei_gate_call *call = arg;
  int64_t num_experts = call->gate->cfg.num_experts, n = call->blocks * LANES, candidates = 0, ties;
  uint32_t *key = call->pick_key + thread * n, none = pmoei_gate_order_key(-INFINITY);
  for (int64_t b = 0; b < call->blocks; b++) {
    const float *score = pmoei_gate_all(call, call->all_scores, b) + expert * LANES;
    for (int64_t l = 0; l < LANES; l++) key[b * LANES + l] = pmoei_gate_order_key(score[l]);
  }
  for (int64_t i = 0; i < n; i++) candidates += key[i] > none;
  int64_t wanted = candidates < call->capacity ? candidates : call->capacity;
  uint32_t threshold = wanted > 0 ? pmoei_gate_threshold(key, n, wanted, &ties) : UINT32_MAX;
  if (wanted == 0) ties = 0;
  for (int64_t b = 0; b < call->blocks; b++) {
    uint64_t picked = 0;
    for (int64_t l = 0; l < LANES; l++) {
      uint32_t here = key[b * LANES + l];
      bool tie = here == threshold && ties > 0;
      ties -= tie;
      picked |= (uint64_t)(here > threshold || tie) << l;
    }
    call->picked[b * num_experts + expert] = picked;
  }
}

void pmoei_gate_expert_choice(pmoei_gate_call *call) {
  const pmoe_gate *gate = call->gate;
  pmoei_parallel(gate->ctx, call->blocks, score_block, call);
  pmoei_parallel(gate->ctx, gate->cfg.num_experts, pick, call);
}

void pmoei_gate_expert_choice_select(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  const float *score = pmoei_gate_all(call, call->all_scores, block);
  const uint64_t *picked = call->picked + block * cfg->num_experts;
  for (int64_t e = 0; e < cfg->num_experts; e++)
    for (int64_t l = 0; l < LANES; l++)
      tile->selection[e * LANES + l] = picked[e] >> l & 1 ? score[e * LANES + l] : -INFINITY;
  pmoei_gate_best(tile->selection, cfg->num_experts, cfg->top_k, tile->expert, tile->value, tile->open, tile);
  for (int64_t i = 0; i < (int64_t)cfg->top_k * LANES; i++)
    if (tile->value[i] == -INFINITY) tile->expert[i] = -1;
}
