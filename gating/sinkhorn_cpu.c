/* Sinkhorn's iteration: factors a_t and b_e that give the matrix a_t exp(x_te) b_e even row and column sums. Rule and
 * stopping: Megatron-Core (docs/router.md). Each token's largest logit is subtracted first, which its factor absorbs.
 */
#include <string.h>

#include "core/parallel.h"
#include "core/simd.h"
#include "gating/gate_cpu.h"

enum { MAX_ITERATIONS = 100 };
static const double tolerance = 1e-4, guard = 1e-8;

/* exp(x - max), and zeros for tokens that take no part. */
static void prepare_block(void *arg, int64_t block, int32_t thread) {
  const pmoei_gate_call *call = arg;
  pmoei_gate_tile *tile = &call->tile[thread];
  int64_t num_experts = call->gate->cfg.num_experts;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  const uint8_t *mask = call->step.token_mask;
  float *score = pmoei_gate_all(call, call->all_scores, block);
  memcpy(tile->logits, pmoei_gate_all(call, call->all_logits, block),
         (size_t)num_experts * LANES * sizeof *tile->logits);
  pmoei_gate_extremes(call, tile);
  double *takes_part = call->token_factor + block * LANES;
  for (int64_t l = 0; l < LANES; l++)
    takes_part[l] = l < span.rows && tile->finite[l] && (!mask || mask[span.first + l]);
  for (int64_t e = 0; e < num_experts; e++)
    for (int64_t l = 0; l < LANES; l++)
      score[e * LANES + l] = takes_part[l] > 0 ? pmoei_expf(tile->logits[e * LANES + l] - tile->max[l]) : 0;
}

typedef struct sinkhorn_step {
  pmoei_gate_call *call;
  double row_sum; /* what every row shall sum to */
} sinkhorn_step;

PMOEI_VECTORISED static void weigh_rows(const float *restrict score, int64_t num_experts,
                                        const double *restrict expert_factor, double *restrict total) {
  for (int l = 0; l < LANES; l++) total[l] = 0;
  for (int64_t e = 0; e < num_experts; e++)
    for (int l = 0; l < LANES; l++) total[l] += (double)score[e * LANES + l] * expert_factor[e];
}

PMOEI_VECTORISED static void sum_columns(const float *restrict score, int64_t num_experts,
                                         const double *restrict token_factor, double *restrict out) {
  for (int64_t e = 0; e < num_experts; e++) {
    double part[LANES];
    for (int l = 0; l < LANES; l++) part[l] = (double)score[e * LANES + l] * token_factor[l];
    for (int half = LANES / 2; half > 0; half /= 2)
      for (int l = 0; l < half; l++) part[l] += part[l + half];
    out[e] = part[0];
  }
}

static void step_block(void *arg, int64_t block, int32_t thread) {
  (void)thread;
  const sinkhorn_step *step = arg;
  const pmoei_gate_call *call = step->call;
  int64_t num_experts = call->gate->cfg.num_experts;
  const float *score = pmoei_gate_all(call, call->all_scores, block);
  double total[LANES], *token_factor = call->token_factor + block * LANES;
  weigh_rows(score, num_experts, call->expert_factor, total);
  for (int l = 0; l < LANES; l++) token_factor[l] = total[l] > 0 ? step->row_sum / (total[l] + guard) : 0;
  sum_columns(score, num_experts, token_factor, call->column_sum + block * num_experts);
}

/* The mean change of the experts' factors. */
static double update_experts(pmoei_gate_call *call) {
  int64_t num_experts = call->gate->cfg.num_experts;
  double change = 0;
  for (int64_t e = 0; e < num_experts; e++) {
    double sum = 0;
    for (int64_t b = 0; b < call->blocks; b++) sum += call->column_sum[b * num_experts + e];
    double factor = 1.0 / (double)num_experts / (sum + guard);
    change += fabs(factor - call->expert_factor[e]) / (double)num_experts;
    call->expert_factor[e] = factor;
  }
  return change;
}

void pmoei_gate_sinkhorn(pmoei_gate_call *call) {
  const pmoe_gate *gate = call->gate;
  pmoei_parallel(gate->ctx, call->blocks, prepare_block, call);
  double tokens = 0;
  for (int64_t i = 0; i < call->blocks * LANES; i++) tokens += call->token_factor[i];
  for (int32_t e = 0; e < gate->cfg.num_experts; e++) call->expert_factor[e] = 1;
  if (tokens == 0) return;
  sinkhorn_step step = {call, 1 / tokens};
  for (int i = 0; i < MAX_ITERATIONS; i++) {
    pmoei_parallel(gate->ctx, call->blocks, step_block, &step);
    if (update_experts(call) <= tolerance) return;
  }
}

void pmoei_gate_sinkhorn_select(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  const float *score = pmoei_gate_all(call, call->all_scores, block);
  const double *token_factor = call->token_factor + block * LANES;
  for (int64_t e = 0; e < cfg->num_experts; e++) {
    for (int64_t l = 0; l < LANES; l++) {
      int64_t i = e * LANES + l;
      double balanced = (double)score[i] * call->expert_factor[e] * token_factor[l];
      /* A token that took no part chooses by its logits. */
      tile->selection[i] = token_factor[l] > 0 ? (float)balanced : tile->logits[i];
    }
  }
  pmoei_gate_best(tile->selection, cfg->num_experts, cfg->top_k, tile->expert, tile->value, tile->open, tile);
}
