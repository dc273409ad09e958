#include <string.h>

#include "core/dtype.h"
#include "core/gemm.h"
#include "core/simd.h"
#include "core/vmath_act.h"
#include "gating/gate_cpu.h"

const float *pmoei_gate_input(const pmoei_gate_call *call, float *buffer, int64_t first, int64_t rows, int64_t col,
                              int64_t cols, const uint8_t *masked, int64_t *ld) {
  const pmoe_mat *x = &call->x;
  bool jitter = pmoei_gate_has_jitter(call);
  size_t offset = (size_t)col * pmoe_dtype_size(x->dtype);
  if (x->dtype == PMOE_F32 && !jitter && !masked) {
    *ld = x->ld;
    return (const float *)pmoei_row(x, first) + col;
  }
  for (int64_t r = 0; r < rows; r++) {
    float *row = buffer + r * cols;
    if (masked && masked[r]) {
      memset(row, 0, (size_t)cols * sizeof *row);
      continue;
    }
    pmoei_to_f32(row, (const char *)pmoei_row(x, first + r) + offset, x->dtype, cols);
    if (jitter) pmoei_gate_jitter(call, first + r, col, row, cols);
  }
  *ld = cols;
  return buffer;
}

PMOEI_VECTORISED static void extremes(const float *restrict logits, int64_t num_experts, float *restrict max,
                                      uint8_t *restrict finite) {
  float top[LANES], zero[LANES];
  for (int l = 0; l < LANES; l++) {
    top[l] = -INFINITY;
    zero[l] = 0;
  }
  for (int64_t e = 0; e < num_experts; e++) {
    for (int l = 0; l < LANES; l++) {
      float v = logits[e * LANES + l];
      top[l] = v > top[l] ? v : top[l];
      zero[l] += v * 0.0f; /* NaN from the first NaN or infinity on */
    }
  }
  for (int l = 0; l < LANES; l++) {
    max[l] = top[l];
    finite[l] = zero[l] == 0;
  }
}

static void host_logits(const pmoei_gate_call *call, pmoei_gate_tile *tile, pmoei_gate_span span) {
  const pmoe_mat *logits = call->step.logits;
  int64_t num_experts = call->gate->cfg.num_experts;
  for (int64_t l = 0; l < span.rows; l++) {
    const float *row = pmoei_row(logits, span.first + l);
    for (int64_t e = 0; e < num_experts; e++) tile->logits[e * LANES + l] = row[e];
  }
}

static void router_logits(const pmoei_gate_call *call, pmoei_gate_tile *tile, pmoei_gate_span span, int32_t thread) {
  const pmoe_gate *gate = call->gate;
  int64_t num_experts = gate->cfg.num_experts, hidden = gate->hidden, ld;
  const float *input = pmoei_gate_input(call, tile->input, span.first, span.rows, 0, hidden, NULL, &ld);
  pmoei_product product = {.trans_b = true,
                           .m = num_experts,
                           .n = span.rows,
                           .k = hidden,
                           .a = call->params.weight,
                           .lda = hidden,
                           .b = input,
                           .ldb = ld,
                           .c = tile->logits,
                           .ldc = LANES,
                           .in = PMOE_F32,
                           .out = PMOE_F32};
  pmoei_gemm_run(gate->ctx->gemm, thread, &product);
  for (int64_t e = 0; e < num_experts && call->params.bias; e++)
    for (int64_t l = 0; l < span.rows; l++) tile->logits[e * LANES + l] += call->params.bias[e];
}

void pmoei_gate_logits(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block, int32_t thread) {
  pmoei_gate_span span = pmoei_gate_block(call, block);
  if (call->gate->cfg.router == PMOE_ROUTER_HOST_LOGITS) host_logits(call, tile, span);
  else router_logits(call, tile, span, thread);
  for (int64_t e = 0; e < call->gate->cfg.num_experts && span.rows < LANES; e++)
    memset(tile->logits + e * LANES + span.rows, 0, (size_t)(LANES - span.rows) * sizeof *tile->logits);
}

void pmoei_gate_extremes(const pmoei_gate_call *call, pmoei_gate_tile *tile) {
  extremes(tile->logits, call->gate->cfg.num_experts, tile->max, tile->finite);
}

PMOEI_VECTORISED static void exponentiate(float *restrict logits, int64_t num_experts, const float *restrict max,
                                          float *restrict sum) {
  float total[LANES];
  for (int l = 0; l < LANES; l++) total[l] = 0;
  for (int64_t e = 0; e < num_experts; e++) {
    for (int l = 0; l < LANES; l++) {
      float y = pmoei_expf(logits[e * LANES + l] - max[l]);
      logits[e * LANES + l] = y;
      total[l] += y;
    }
  }
  for (int l = 0; l < LANES; l++) sum[l] = total[l];
}

PMOEI_VECTORISED static void apply_sigmoid(float *restrict logits, int64_t num_experts, float *restrict sum) {
  float total[LANES] = {0};
  for (int64_t e = 0; e < num_experts; e++) {
    for (int l = 0; l < LANES; l++) {
      float y = pmoei_sigmoid(logits[e * LANES + l]);
      logits[e * LANES + l] = y;
      total[l] += y;
    }
  }
  for (int l = 0; l < LANES; l++) sum[l] = total[l];
}

PMOEI_VECTORISED static void apply_sqrt_softplus(float *restrict logits, int64_t num_experts, float *restrict sum) {
  float total[LANES] = {0};
  for (int64_t e = 0; e < num_experts; e++) {
    for (int l = 0; l < LANES; l++) {
      float y = pmoei_sqrt_softplus(logits[e * LANES + l]);
      logits[e * LANES + l] = y;
      total[l] += y;
    }
  }
  for (int l = 0; l < LANES; l++) sum[l] = total[l];
}

void pmoei_gate_raise(const pmoei_gate_call *call, pmoei_gate_tile *tile, float *logits) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  if (cfg->score == PMOE_SCORE_SIGMOID) apply_sigmoid(logits, cfg->num_experts, tile->sum);
  else if (cfg->score == PMOE_SCORE_SQRT_SOFTPLUS) apply_sqrt_softplus(logits, cfg->num_experts, tile->sum);
  else exponentiate(logits, cfg->num_experts, tile->max, tile->sum);
}

PMOEI_VECTORISED static void add_logs(const float *restrict max, const float *restrict sum, float *restrict out) {
  for (int l = 0; l < LANES; l++) out[l] = max[l] + pmoei_logf(sum[l]);
}

PMOEI_VECTORISED static void sum_exp(const float *restrict logits, int64_t num_experts, const float *restrict max,
                                     float *restrict out) {
  float total[LANES] = {0};
  for (int64_t e = 0; e < num_experts; e++)
    for (int l = 0; l < LANES; l++) total[l] += pmoei_expf(logits[e * LANES + l] - max[l]);
  for (int l = 0; l < LANES; l++) out[l] = total[l];
}

void pmoei_gate_raise_logits(const pmoei_gate_call *call, pmoei_gate_tile *tile) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  float sum[LANES];
  bool softmax = cfg->score == PMOE_SCORE_SOFTMAX;
  if (cfg->z_coef > 0 && !softmax) sum_exp(tile->logits, cfg->num_experts, tile->max, sum);
  pmoei_gate_raise(call, tile, tile->logits);
  if (cfg->z_coef > 0) add_logs(tile->max, softmax ? tile->sum : sum, tile->lse);
}

PMOEI_VECTORISED static void divide_exp(float *restrict value, int64_t top_k, const float *restrict max,
                                        const float *restrict sum) {
  for (int64_t k = 0; k < top_k; k++)
    for (int l = 0; l < LANES; l++) value[k * LANES + l] = pmoei_expf(value[k * LANES + l] - max[l]) / sum[l];
}

PMOEI_VECTORISED static void softmax_of_choices(float *restrict value, int64_t top_k) {
  float max[LANES], sum[LANES];
  for (int l = 0; l < LANES; l++) {
    max[l] = -INFINITY;
    sum[l] = 0;
  }
  for (int64_t k = 0; k < top_k; k++)
    for (int l = 0; l < LANES; l++) max[l] = value[k * LANES + l] > max[l] ? value[k * LANES + l] : max[l];
  for (int64_t k = 0; k < top_k; k++) {
    for (int l = 0; l < LANES; l++) {
      value[k * LANES + l] = pmoei_expf(value[k * LANES + l] - max[l]);
      sum[l] += value[k * LANES + l];
    }
  }
  for (int64_t k = 0; k < top_k; k++)
    for (int l = 0; l < LANES; l++) value[k * LANES + l] /= sum[l];
}

PMOEI_VECTORISED static void score_choices(float *restrict value, int64_t top_k, bool sigmoid) {
  for (int64_t i = 0; i < top_k * LANES && sigmoid; i++) value[i] = pmoei_sigmoid(value[i]);
  for (int64_t i = 0; i < top_k * LANES && !sigmoid; i++) value[i] = pmoei_sqrt_softplus(value[i]);
}

void pmoei_gate_scores(const pmoei_gate_call *call, pmoei_gate_tile *tile) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  if (cfg->score != PMOE_SCORE_SOFTMAX) score_choices(tile->value, cfg->top_k, cfg->score == PMOE_SCORE_SIGMOID);
  else if (cfg->softmax_after_topk) softmax_of_choices(tile->value, cfg->top_k);
  else divide_exp(tile->value, cfg->top_k, tile->max, tile->sum);
}

bool pmoei_gate_needs_raise(const pmoe_gate *gate) {
  bool softmax_over_all = gate->cfg.score == PMOE_SCORE_SOFTMAX && !gate->cfg.softmax_after_topk;
  return softmax_over_all || pmoei_gate_has_losses(gate);
}
