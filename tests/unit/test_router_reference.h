/* A naive router over given logits, in double precision: scores, limited choices, losses over several scopes, and what
 * one token adds to the objective that the gradients belong to. */
#ifndef TEST_ROUTER_REFERENCE_H
#define TEST_ROUTER_REFERENCE_H
#include "test_gate_reference.h"

enum { MOST_EXPERTS = 64 };

static inline void router_scores(const pmoe_gate_config *cfg, const double *logits, double *score) {
  ref_softmax(logits, cfg->num_experts, score);
  for (int e = 0; e < cfg->num_experts; e++) {
    if (cfg->score == PMOE_SCORE_SIGMOID) score[e] = 1 / (1 + exp(-logits[e]));
    if (cfg->score == PMOE_SCORE_SQRT_SOFTPLUS) score[e] = sqrt(fmax(logits[e], 0) + log1p(exp(-fabs(logits[e]))));
  }
}

/* The K best; experts outside the kept groups never. bias may be NULL. */
static inline void router_choose(const pmoe_gate_config *cfg, const double *logits, const float *bias,
                                 int32_t *chosen) {
  double value[MOST_EXPERTS], inside[MOST_EXPERTS], group[MOST_EXPERTS];
  int32_t order[MOST_EXPERTS];
  router_scores(cfg, logits, value);
  for (int e = 0; e < cfg->num_experts; e++) {
    if (cfg->softmax_after_topk) value[e] = logits[e];
    if (bias) value[e] += (double)bias[e];
    if (logits[e] == -INFINITY) value[e] = -INFINITY;
  }
  if (cfg->num_groups > 1) {
    int size = cfg->num_experts / cfg->num_groups, summed = cfg->group_score_top2 ? 2 : cfg->top_k / cfg->groups_kept;
    for (int g = 0; g < cfg->num_groups; g++) {
      ref_select(value + g * size, size, summed > 1 ? summed : 1, order);
      group[g] = 0;
      for (int i = 0; i < (summed > 1 ? summed : 1); i++) group[g] += value[g * size + order[i]];
    }
    ref_select(group, cfg->num_groups, cfg->groups_kept, order);
    for (int e = 0; e < cfg->num_experts; e++) {
      bool kept = false;
      for (int i = 0; i < cfg->groups_kept; i++) kept |= order[i] == e / size;
      inside[e] = kept ? value[e] : NAN;
    }
    memcpy(value, inside, sizeof value);
  }
  ref_select(value, cfg->num_experts, cfg->top_k, chosen);
}

/* What ref_weights takes, for chosen experts (-1: none). */
static inline void router_choice_scores(const pmoe_gate_config *cfg, const double *logits, const int32_t *expert,
                                        double *score) {
  double all[MOST_EXPERTS], sum = 0;
  router_scores(cfg, logits, all);
  for (int k = 0; k < cfg->top_k; k++) {
    if (expert[k] < 0) score[k] = 0;
    else score[k] = cfg->softmax_after_topk ? exp(logits[expert[k]]) : all[expert[k]];
    sum += score[k];
  }
  for (int k = 0; k < cfg->top_k && cfg->softmax_after_topk; k++) score[k] /= sum;
}

typedef struct router_losses {
  double aux, seq_aux, global_aux, z;
} router_losses;

static inline double router_denominator(int64_t given, int64_t counted) {
  return given > 0 ? (double)given : counted > 0 ? (double)counted : 1;
}

/* What one live token adds to the losses, the counts held fixed. sums as in pmoe_routing.loss_sums; global: the row
 * that the global loss divides. */
static inline router_losses router_token_losses(const gate_case *c, const double *logits, int32_t sequence,
                                                const int64_t *sums, const int64_t *global) {
  const pmoe_gate_config *cfg = &c->cfg;
  int64_t E = cfg->num_experts, row = E + 1, live_sequences = 0;
  double score[MOST_EXPERTS], unused[MOST_EXPERTS], total = 0, counted = cfg->aux_first_choice_only ? 1 : cfg->top_k;
  router_losses out = {0};
  router_scores(cfg, logits, score);
  for (int64_t e = 0; e < E; e++) total += score[e];
  for (int32_t s = 0; s < c->step.num_sequences; s++) live_sequences += sums[(1 + s) * row + E] > 0;
  double tokens = router_denominator(c->step.loss_tokens, sums[E]), lse = ref_softmax(logits, E, unused);
  for (int64_t e = 0; e < E; e++) {
    double p = score[e] / total;
    out.aux += (double)cfg->aux_coef * (double)E * (double)sums[e] / (counted * (double)sums[E]) * p / tokens;
    if (cfg->seq_aux_coef > 0) {
      const int64_t *own = sums + (1 + sequence) * row;
      out.seq_aux += (double)cfg->seq_aux_coef * (double)E * (double)own[e] / (counted * (double)own[E]) * p /
                     (double)own[E] / router_denominator(c->step.loss_sequences, live_sequences);
    }
    if (cfg->global_aux_coef > 0)
      out.global_aux += (double)cfg->global_aux_coef * (double)E * (double)global[e] / (counted * (double)global[E]) *
                        p / router_denominator(c->step.loss_tokens, global[E]);
  }
  out.z = (double)cfg->z_coef * lse * lse / tokens;
  return out;
}

/* sum(dweight weight) + scale (losses) of token t, choices and counts as the case has them. */
static inline double router_token_objective(const gate_case *c, const double *logits, int64_t t, double scale,
                                            const int64_t *global) {
  int64_t K = c->cfg.top_k;
  double score[MOST_EXPERTS], weight[MOST_EXPERTS], sum = 0;
  router_choice_scores(&c->cfg, logits, c->routing.expert + t * K, score);
  ref_weights(c, score, c->routing.slot + t * K, weight);
  for (int64_t k = 0; k < K; k++)
    if (c->routing.slot[t * K + k] >= 0) sum += (double)c->dweight[t * K + k] * weight[k];
  if (c->cfg.aux_coef > 0 || c->cfg.seq_aux_coef > 0 || c->cfg.global_aux_coef > 0 || c->cfg.z_coef > 0) {
    int32_t sequence = c->step.sequence ? c->step.sequence[t] : 0;
    router_losses losses = router_token_losses(c, logits, sequence, c->routing.loss_sums, global);
    sum += scale * (losses.aux + losses.seq_aux + losses.global_aux + losses.z);
  }
  return sum;
}

#endif
