/* The router's formulas for single numbers, which both back ends share. */
#ifndef PMOEI_GATE_MATH_H
#define PMOEI_GATE_MATH_H
#include <pmoe/gate.h>
#include <stdbool.h>

#include "core/vmath_act.h"

/* Unsigned integers in the order of floats; NaN, whatever its sign, below everything. Both zeros are equal. */
PMOEI_SHARED uint32_t pmoei_gate_order_key(float value) {
  uint32_t bits = pmoei_bits_of(value + 0.0f);
  uint32_t key = bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
  return value == value ? key : 0;
}

/* s'(x) / s(x) from the logit and, for a sigmoid, the score. A softmax's derivative is r_k (g_k - mean) with a ratio of
 * 1. */
PMOEI_SHARED float pmoei_gate_slope_ratio(pmoe_score score, float logit, float value) {
  if (score == PMOE_SCORE_SIGMOID) return 1 - value;
  return score == PMOE_SCORE_SQRT_SOFTPLUS ? pmoei_sqrt_softplus_slope(logit) : 1;
}

/* Whether the weights are a softmax over all experts that no later division undoes. */
PMOEI_SHARED bool pmoei_gate_shares_with_all(const pmoe_gate_config *cfg) {
  return cfg->score == PMOE_SCORE_SOFTMAX && cfg->norm == PMOE_NORM_NONE && !cfg->softmax_after_topk;
}

PMOEI_SHARED int64_t pmoei_at_least_one(int64_t n) { return n > 0 ? n : 1; }

/* coef E f_e / tokens: the derivative of a loss by a token's probability of an expert. `choices` counts the expert's,
 * of `live` tokens that count `counted` choices each. */
PMOEI_SHARED double pmoei_gate_loss_slope(float coef, int32_t num_experts, int64_t choices, int64_t live,
                                          int32_t counted, double tokens) {
  double all = (double)pmoei_at_least_one(live) * counted;
  return (double)coef * num_experts * ((double)choices / all) / tokens;
}

/* What a loss's mean is taken over. */
PMOEI_SHARED double pmoei_gate_mean_over(int64_t given, int64_t counted) {
  return (double)pmoei_at_least_one(given > 0 ? given : counted);
}

/* sign(mean - count), exact. */
PMOEI_SHARED int32_t pmoei_sign_below_mean(int64_t total, int64_t num_experts, int64_t count) {
  return (total > count * num_experts) - (total < count * num_experts);
}

/* The selection bias after one update; `mean` is that of all signs, or 0. */
PMOEI_SHARED float pmoei_moved_bias(float bias, float rate, int32_t sign, double mean) {
  return (float)((double)bias + (double)rate * (sign - mean));
}

#endif
