/* Limits on a token's choice: the selection bias, and groups of experts. */
#include <string.h>

#include "core/simd.h"
#include "gating/gate_cpu.h"

/* selection = score + bias. An expert whose logit is -inf is switched off, whatever its bias. */
PMOEI_VECTORISED static void add_bias(float *restrict selection, const float *restrict logits, int64_t num_experts,
                                      const float *restrict factor, const float *restrict bias) {
  for (int64_t e = 0; e < num_experts; e++) {
    for (int l = 0; l < LANES; l++) {
      float logit = logits[e * LANES + l], value = selection[e * LANES + l] * factor[l] + bias[e];
      selection[e * LANES + l] = logit == -INFINITY ? logit : value;
    }
  }
}

/* What scores are compared: probabilities or the like; logits where the softmax comes after the choice. */
static void fill_selection(const pmoei_gate_call *call, pmoei_gate_tile *tile, bool scores) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  float factor[LANES];
  memcpy(tile->selection, tile->logits, (size_t)cfg->num_experts * LANES * sizeof *tile->logits);
  for (int l = 0; l < LANES; l++) factor[l] = 1;
  if (scores && !cfg->softmax_after_topk) {
    pmoei_gate_raise(call, tile, tile->selection);
    if (cfg->score == PMOE_SCORE_SOFTMAX)
      for (int l = 0; l < LANES; l++) factor[l] = 1 / tile->sum[l];
  }
  if (scores && cfg->selection_bias)
    add_bias(tile->selection, tile->logits, cfg->num_experts, factor, call->params.selection_bias);
  else if (scores)
    for (int64_t i = 0; i < (int64_t)cfg->num_experts * LANES; i++)
      tile->selection[i] = tile->logits[i] == -INFINITY ? -INFINITY : tile->selection[i] * factor[i % LANES];
}

static void score_groups(const pmoei_gate_call *call, pmoei_gate_tile *tile) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  int64_t size = cfg->num_experts / cfg->num_groups, summed = cfg->group_score_top2 ? 2 : cfg->top_k / cfg->groups_kept;
  if (summed < 1) summed = 1;
  for (int64_t g = 0; g < cfg->num_groups; g++) {
    float *score = tile->group + g * LANES;
    pmoei_gate_best(tile->selection + g * size * LANES, size, summed, tile->which, tile->best, tile->open, tile);
    memcpy(score, tile->best, LANES * sizeof *score);
    for (int64_t i = 1; i < summed; i++)
      for (int l = 0; l < LANES; l++) score[l] += tile->best[i * LANES + l];
  }
}

/* Experts outside the kept groups rank below everything. */
static void keep_groups(const pmoei_gate_call *call, pmoei_gate_tile *tile) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  int64_t size = cfg->num_experts / cfg->num_groups;
  pmoei_gate_best(tile->group, cfg->num_groups, cfg->groups_kept, tile->which, tile->best, tile->open, tile);
  memset(tile->in_group, 0, (size_t)cfg->num_groups * LANES);
  for (int64_t i = 0; i < cfg->groups_kept; i++)
    for (int64_t l = 0; l < LANES; l++) tile->in_group[tile->which[i * LANES + l] * LANES + l] = 1;
  for (int64_t e = 0; e < cfg->num_experts; e++)
    for (int64_t l = 0; l < LANES; l++)
      if (!tile->in_group[e / size * LANES + l]) tile->selection[e * LANES + l] = NAN;
}

void pmoei_gate_limit(const pmoei_gate_call *call, pmoei_gate_tile *tile) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  fill_selection(call, tile, true);
  if (cfg->num_groups <= 1) return;
  score_groups(call, tile);
  /* Within the groups the logits rank like the scores, and do not saturate. */
  if (!cfg->selection_bias) fill_selection(call, tile, false);
  keep_groups(call, tile);
}
