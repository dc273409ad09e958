#include <float.h>
#include <string.h>

#include "core/parallel.h"
#include "core/simd.h"
#include "gating/gate_cpu.h"

/* Sequences cross blocks, so threads meet here; whole numbers add up to the same in any order. */
static void count_for_sequence(const pmoei_gate_call *call, int64_t token, int64_t column) {
  __atomic_fetch_add(pmoei_gate_seq_sums(call, pmoei_gate_sequence_of(call, token)) + column, 1, __ATOMIC_RELAXED);
}

static void count_choices(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  int32_t *count = call->loss_count + block * cfg->num_experts, counted = pmoei_gate_counted(call->gate);
  const int32_t *expert = tile->expert;
  if (tile->plain) {
    pmoei_gate_best(tile->logits, cfg->num_experts, cfg->top_k, tile->plain, tile->best, tile->open, tile);
    expert = tile->plain;
  }
  memset(count, 0, (size_t)cfg->num_experts * sizeof *count);
  for (int64_t k = 0; k < counted; k++) {
    for (int64_t l = 0; l < span.rows; l++) {
      int32_t e = expert[k * LANES + l];
      if (tile->masked[l] || !tile->finite[l] || e < 0) continue;
      count[e]++;
      if (call->num_sequences > 0) count_for_sequence(call, span.first + l, e);
    }
  }
  for (int64_t l = 0; l < span.rows && call->num_sequences > 0; l++)
    if (!tile->masked[l] && tile->finite[l]) count_for_sequence(call, span.first + l, cfg->num_experts);
}

/* Lanes past the last token are masked. */
PMOEI_VECTORISED static void tally_lanes(const uint8_t *restrict masked, const uint8_t *restrict finite,
                                         pmoei_gate_tally *tally) {
  int32_t all_masked = 0, live = 0;
  for (int l = 0; l < LANES; l++) {
    all_masked += masked[l];
    live += (masked[l] ^ 1) & finite[l];
  }
  tally->masked = all_masked;
  tally->live = live;
}

void pmoei_gate_count_live(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  pmoei_gate_span span = pmoei_gate_block(call, block);
  pmoei_gate_tally tally = {0};
  tally_lanes(tile->masked, tile->finite, &tally);
  tally.masked -= LANES - (int32_t)span.rows;
  tally.nonfinite = (int32_t)span.rows - tally.masked - tally.live;
  call->tally[block] = tally;
  if (call->loss_count) count_choices(call, tile, block);
}

/* P of the live lanes; scores that sum to nothing have none. */
PMOEI_VECTORISED static void inverse_sums(const float *restrict sum, const uint8_t *restrict live,
                                          float *restrict factor) {
  for (int l = 0; l < LANES; l++) {
    float inverse = 1.0f / sum[l];
    factor[l] = live[l] && sum[l] >= FLT_MIN ? inverse : 0.0f;
  }
}

PMOEI_VECTORISED static void sum_probabilities(const float *restrict scores, int64_t num_experts,
                                               const float *restrict factor, float *restrict out) {
  for (int64_t e = 0; e < num_experts; e++) {
    float part[LANES];
    for (int l = 0; l < LANES; l++) part[l] = factor[l] != 0 ? scores[e * LANES + l] * factor[l] : 0.0f;
    for (int half = LANES / 2; half > 0; half /= 2)
      for (int l = 0; l < half; l++) part[l] += part[l + half];
    out[e] = part[0];
  }
}

PMOEI_VECTORISED static void keep_probabilities(const float *restrict scores, int64_t num_experts, int64_t rows,
                                                const float *restrict factor, float *restrict out) {
  for (int64_t l = 0; l < rows; l++)
    for (int64_t e = 0; e < num_experts; e++)
      out[l * num_experts + e] = factor[l] != 0 ? scores[e * LANES + l] * factor[l] : 0.0f;
}

void pmoei_gate_sum_losses(const pmoei_gate_call *call, const pmoei_gate_tile *tile, int64_t block) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  int64_t num_experts = cfg->num_experts;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  uint8_t live[LANES];
  float factor[LANES];
  double z_sum = 0;
  for (int l = 0; l < LANES; l++) {
    live[l] = !tile->masked[l] && tile->finite[l];
    if (cfg->z_coef > 0 && live[l]) z_sum += (double)tile->lse[l] * (double)tile->lse[l];
  }
  call->tally[block].z_sum = z_sum;
  if (!call->prob_sum) return;
  inverse_sums(tile->sum, live, factor);
  sum_probabilities(tile->logits, num_experts, factor, call->prob_sum + block * num_experts);
  if (call->probability)
    keep_probabilities(tile->logits, num_experts, span.rows, factor, call->probability + span.first * num_experts);
}

static void sum_experts(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const pmoei_gate_call *call = arg;
  int64_t num_experts = call->gate->cfg.num_experts, begin = index * EXPERTS_PER_TASK;
  int64_t n = num_experts - begin < EXPERTS_PER_TASK ? num_experts - begin : EXPERTS_PER_TASK;
  int64_t count[EXPERTS_PER_TASK] = {0}, loss_count[EXPERTS_PER_TASK] = {0};
  double prob[EXPERTS_PER_TASK] = {0};
  for (int64_t at = begin; at < call->blocks * num_experts; at += num_experts) {
    for (int64_t i = 0; i < n; i++) count[i] += call->block_count[at + i];
    if (call->loss_count)
      for (int64_t i = 0; i < n; i++) loss_count[i] += call->loss_count[at + i];
    if (call->prob_sum)
      for (int64_t i = 0; i < n; i++) prob[i] += (double)call->prob_sum[at + i];
  }
  for (int64_t i = 0; i < n; i++) {
    call->routing.expert_count[begin + i] = count[i];
    if (!call->loss_count) continue;
    pmoei_gate_micro_sums(call)[begin + i] = loss_count[i];
    call->prob_total[begin + i] = prob[i];
  }
}

/* An expert may have picked more than the token had room for. */
static void count_picks(const pmoei_gate_call *call) {
  int64_t num_experts = call->gate->cfg.num_experts;
  for (int64_t e = 0; e < num_experts; e++) call->routing.expert_count[e] = 0;
  for (int64_t i = 0; i < call->blocks * num_experts; i++)
    for (uint64_t left = call->picked[i]; left; left &= left - 1) call->routing.expert_count[i % num_experts]++;
}

pmoe_status pmoei_gate_total(pmoei_gate_call *call) {
  int64_t num_experts = call->gate->cfg.num_experts;
  pmoei_gate_totals totals = {0};
  for (int64_t b = 0; b < call->blocks; b++) {
    totals.masked += call->tally[b].masked;
    totals.nonfinite += call->tally[b].nonfinite;
    totals.live += call->tally[b].live;
    totals.z_sum += call->tally[b].z_sum;
  }
  call->totals = totals;
  pmoei_parallel(call->gate->ctx, (num_experts + EXPERTS_PER_TASK - 1) / EXPERTS_PER_TASK, sum_experts, call);
  if (call->picked) count_picks(call);
  if (pmoei_gate_has_losses(call->gate)) pmoei_gate_micro_sums(call)[num_experts] = totals.live;
  return PMOE_OK;
}

/* ---- values and slopes ---- */

static int64_t at_least_one(int64_t n) { return n > 0 ? n : 1; }

static double mean_tokens(const pmoei_gate_call *call, int64_t live) {
  return (double)at_least_one(call->step.loss_tokens > 0 ? call->step.loss_tokens : live);
}

/* coef E f_e / tokens for each expert: the derivative of a loss by a token's probability. Sums are counts, then live
 * tokens. */
static double loss_slope(const pmoei_gate_call *call, float coef, const int64_t *sums, int64_t expert, double tokens) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  double choices = (double)at_least_one(sums[cfg->num_experts]) * pmoei_gate_counted(call->gate);
  return (double)coef * cfg->num_experts * ((double)sums[expert] / choices) / tokens;
}

/* The sequences that the mean is taken over. */
static double mean_sequences(const pmoei_gate_call *call) {
  int64_t live = 0;
  for (int64_t s = 0; s < call->num_sequences; s++)
    live += pmoei_gate_seq_sums(call, s)[call->gate->cfg.num_experts] > 0;
  return (double)at_least_one(call->step.loss_sequences > 0 ? call->step.loss_sequences : live);
}

static double seq_slope(const pmoei_gate_call *call, int64_t sequence, int64_t expert, double sequences) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  const int64_t *sums = pmoei_gate_seq_sums(call, sequence);
  return loss_slope(call, cfg->seq_aux_coef, sums, expert, (double)at_least_one(sums[cfg->num_experts]) * sequences);
}

/* Tokens in order, whoever computes which expert. */
static void sum_sequences(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const pmoei_gate_call *call = arg;
  int64_t num_experts = call->gate->cfg.num_experts, begin = index * EXPERTS_PER_TASK;
  int64_t end = begin + EXPERTS_PER_TASK < num_experts ? begin + EXPERTS_PER_TASK : num_experts;
  for (int64_t s = 0; s < call->num_sequences; s++)
    for (int64_t e = begin; e < end; e++) call->seq_prob_total[s * num_experts + e] = 0;
  for (int64_t t = 0; t < call->tokens; t++) {
    double *total = call->seq_prob_total + pmoei_gate_sequence_of(call, t) * num_experts;
    for (int64_t e = begin; e < end; e++) total[e] += (double)call->probability[t * num_experts + e];
  }
}

static double seq_value(pmoei_gate_call *call) {
  int64_t num_experts = call->gate->cfg.num_experts;
  double value = 0, sequences = mean_sequences(call);
  pmoei_parallel(call->gate->ctx, (num_experts + EXPERTS_PER_TASK - 1) / EXPERTS_PER_TASK, sum_sequences, call);
  for (int64_t s = 0; s < call->num_sequences; s++)
    for (int64_t e = 0; e < num_experts; e++)
      value += seq_slope(call, s, e, sequences) * call->seq_prob_total[s * num_experts + e];
  return value;
}

static double value_over(const pmoei_gate_call *call, float coef, const int64_t *sums, const double *prob) {
  int64_t num_experts = call->gate->cfg.num_experts;
  double value = 0, tokens = mean_tokens(call, sums[num_experts]);
  for (int64_t e = 0; e < num_experts; e++) value += loss_slope(call, coef, sums, e, tokens) * prob[e];
  return value;
}

pmoe_status pmoei_gate_losses_value(pmoei_gate_call *call) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  pmoei_gate_losses losses = {0};
  const int64_t *micro = pmoei_gate_micro_sums(call);
  if (cfg->aux_coef > 0) losses.aux = value_over(call, cfg->aux_coef, micro, call->prob_total);
  if (cfg->seq_aux_coef > 0) losses.seq_aux = seq_value(call);
  if (cfg->global_aux_coef > 0)
    losses.global_aux =
        value_over(call, cfg->global_aux_coef, pmoei_gate_global_so_far(call), pmoei_gate_global_prob(call));
  losses.z = (double)cfg->z_coef * call->totals.z_sum / mean_tokens(call, micro[cfg->num_experts]);
  call->losses = losses;
  return PMOE_OK;
}

float pmoei_gate_slopes(pmoei_gate_call *call) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  const int64_t *micro = pmoei_gate_micro_sums(call), *global = NULL;
  double tokens = mean_tokens(call, micro[cfg->num_experts]), global_tokens = 1, scale = (double)call->loss_scale;
  if (cfg->global_aux_coef > 0) {
    global = pmoei_gate_global_so_far(call);
    global_tokens = mean_tokens(call, global[cfg->num_experts]);
  }
  for (int64_t e = 0; e < cfg->num_experts; e++) {
    double slope = cfg->aux_coef > 0 ? loss_slope(call, cfg->aux_coef, micro, e, tokens) : 0;
    if (global) slope += loss_slope(call, cfg->global_aux_coef, global, e, global_tokens);
    call->slope[e] = (float)(scale * slope);
  }
  double sequences = call->num_sequences > 0 ? mean_sequences(call) : 1;
  for (int64_t s = 0; s < call->num_sequences; s++)
    for (int64_t e = 0; e < cfg->num_experts; e++)
      call->seq_slope[s * cfg->num_experts + e] = (float)(scale * seq_slope(call, s, e, sequences));
  return (float)(scale * 2 * (double)cfg->z_coef / tokens);
}
