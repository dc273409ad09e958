#include <string.h>

#include "core/parallel.h"
#include "core/simd.h"
#include "core/vmath.h"
#include "gating/gate_cpu.h"

void pmoei_gate_count_live(const pmoei_gate_call *call, const pmoei_gate_tile *tile, int64_t block) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  pmoei_gate_tally tally = {0};
  for (int64_t l = 0; l < span.rows; l++) {
    tally.masked += tile->masked[l];
    tally.nonfinite += !tile->masked[l] && !tile->finite[l];
  }
  tally.live = (int32_t)span.rows - tally.masked - tally.nonfinite;
  call->tally[block] = tally;
  if (!call->loss_count) return;
  int32_t *count = call->loss_count + block * cfg->num_experts, counted = cfg->aux_first_choice_only ? 1 : cfg->top_k;
  memset(count, 0, (size_t)cfg->num_experts * sizeof *count);
  for (int64_t k = 0; k < counted; k++)
    for (int64_t l = 0; l < span.rows; l++)
      if (!tile->masked[l] && tile->finite[l]) count[tile->expert[k * LANES + l]]++;
}

PMOEI_VECTORISED static void sum_probabilities(const float *restrict exponentials, int64_t num_experts,
                                               const float *restrict sum, const uint8_t *restrict live,
                                               float *restrict out) {
  float factor[LANES];
  for (int l = 0; l < LANES; l++) factor[l] = live[l] ? 1.0f / sum[l] : 0.0f;
  for (int64_t e = 0; e < num_experts; e++) {
    float part[LANES];
    for (int l = 0; l < LANES; l++) part[l] = live[l] ? exponentials[e * LANES + l] * factor[l] : 0.0f;
    for (int half = LANES / 2; half > 0; half /= 2)
      for (int l = 0; l < half; l++) part[l] += part[l + half];
    out[e] = part[0];
  }
}

PMOEI_VECTORISED static void add_logs(const float *restrict max, const float *restrict sum, float *restrict out) {
  for (int l = 0; l < LANES; l++) out[l] = max[l] + pmoei_logf(sum[l]);
}

void pmoei_gate_logsumexp(const pmoei_gate_tile *tile, float *out) { add_logs(tile->max, tile->sum, out); }

void pmoei_gate_sum_losses(const pmoei_gate_call *call, const pmoei_gate_tile *tile, int64_t block) {
  int64_t num_experts = call->gate->cfg.num_experts;
  uint8_t live[LANES];
  float lse[LANES];
  double z_sum = 0;
  pmoei_gate_logsumexp(tile, lse);
  for (int l = 0; l < LANES; l++) {
    live[l] = !tile->masked[l] && tile->finite[l];
    z_sum += live[l] ? (double)lse[l] * (double)lse[l] : 0;
  }
  call->tally[block].z_sum = z_sum;
  if (call->prob_sum)
    sum_probabilities(tile->logits, num_experts, tile->sum, live, call->prob_sum + block * num_experts);
}

static void sum_experts(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const pmoei_gate_call *call = arg;
  const pmoe_gate_config *cfg = &call->gate->cfg;
  int64_t num_experts = cfg->num_experts, begin = index * EXPERTS_PER_TASK;
  int64_t n = num_experts - begin < EXPERTS_PER_TASK ? num_experts - begin : EXPERTS_PER_TASK;
  int64_t count[EXPERTS_PER_TASK] = {0}, loss_count[EXPERTS_PER_TASK] = {0};
  double prob[EXPERTS_PER_TASK] = {0};
  for (int64_t at = begin; at < call->blocks * num_experts; at += num_experts) {
    if (call->block_count)
      for (int64_t i = 0; i < n; i++) count[i] += call->block_count[at + i];
    if (call->loss_count)
      for (int64_t i = 0; i < n; i++) loss_count[i] += call->loss_count[at + i];
    if (call->prob_sum)
      for (int64_t i = 0; i < n; i++) prob[i] += (double)call->prob_sum[at + i];
  }
  double live = call->totals.live > 0 ? (double)call->totals.live : 1;
  double choices = live * (cfg->aux_first_choice_only ? 1 : cfg->top_k);
  for (int64_t i = 0; i < n; i++) {
    if (call->block_count) call->routing.expert_count[begin + i] = count[i];
    call->fraction[begin + i] = (float)((double)loss_count[i] / choices);
    call->expert_sum[begin + i] = (double)loss_count[i] / choices * (prob[i] / live);
  }
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
  for (int64_t e = 0; e < num_experts; e++) call->totals.aux_sum += call->expert_sum[e];
  return PMOE_OK;
}
