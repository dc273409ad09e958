#include <float.h>
#include <string.h>

#include "core/dtype.h"
#include "core/gemm.h"
#include "core/parallel.h"
#include "core/simd.h"
#include "gating/gate_cpu.h"

static void load_choices(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  int64_t top_k = call->gate->cfg.top_k;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  const int32_t *expert = call->routing.expert + span.first * top_k;
  for (int64_t l = 0; l < LANES; l++) {
    tile->masked[l] = l >= span.rows || expert[l * top_k] < 0;
    for (int64_t k = 0; k < top_k; k++) {
      bool chosen = !tile->masked[l] && expert[l * top_k + k] >= 0;
      tile->expert[k * LANES + l] = chosen ? expert[l * top_k + k] : 0;
    }
  }
}

/* The losses' gradients need totals over all tokens, so this pass comes first. It leaves the logits, expert by expert,
 * where the block's dlogits will be. */
static void count_block(void *arg, int64_t block, int32_t thread) {
  const pmoei_gate_call *call = arg;
  pmoei_gate_tile *tile = &call->tile[thread];
  int64_t num_experts = call->gate->cfg.num_experts;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  float *kept = call->dlogits + span.first * num_experts;
  load_choices(call, tile, block);
  pmoei_gate_logits(call, tile, block, thread);
  pmoei_gate_extremes(call, tile);
  pmoei_gate_count_live(call, tile, block);
  for (int64_t e = 0; e < num_experts; e++)
    memcpy(kept + e * span.rows, tile->logits + e * LANES, (size_t)span.rows * sizeof *kept);
}

static void restore_logits(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  int64_t num_experts = call->gate->cfg.num_experts;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  const float *kept = call->dlogits + span.first * num_experts;
  for (int64_t e = 0; e < num_experts; e++) {
    memcpy(tile->logits + e * LANES, kept + e * span.rows, (size_t)span.rows * sizeof *kept);
    memset(tile->logits + e * LANES + span.rows, 0, (size_t)(LANES - span.rows) * sizeof *kept);
  }
}

/* Whether the scores are a softmax over all experts that no later division undoes. */
static bool shares_with_all(const pmoe_gate_config *cfg) {
  return cfg->norm == PMOE_NORM_NONE && !cfg->softmax_after_topk;
}

/* Let r_k be a weight before scaling and g_k its gradient, 0 for a dropped choice. Every mode makes r a softmax over
 * some experts, so dlogit_k = r_k (g_k - mean), mean = sum_k r_k g_k: over all of them when shares_with_all, else over
 * the choices, or the survivors. Turns tile->value from scores into the part of that on the choices; returns the mean
 * to be shared out over all experts. */
static float choice_gradient(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t token, int64_t lane) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  const float *dweight = call->dweight + token * cfg->top_k;
  const int64_t *slot = call->routing.slot + token * cfg->top_k;
  float *value = tile->value + lane, sum = 0, mean = 0;
  for (int64_t k = 0; k < cfg->top_k; k++) {
    if (slot[k] < 0 && cfg->norm == PMOE_NORM_AFTER_DROP) value[k * LANES] = 0;
    sum += value[k * LANES];
  }
  if (cfg->norm == PMOE_NORM_NONE) sum = 1;
  for (int64_t k = 0; k < cfg->top_k; k++) {
    value[k * LANES] = sum < FLT_MIN ? 0 : value[k * LANES] / sum;
    if (slot[k] >= 0) mean += value[k * LANES] * (dweight[k] * cfg->weight_scale);
  }
  float here = shares_with_all(cfg) ? 0 : mean;
  for (int64_t k = 0; k < cfg->top_k; k++)
    value[k * LANES] *= (slot[k] >= 0 ? dweight[k] * cfg->weight_scale : 0) - here;
  return shares_with_all(cfg) ? mean : 0;
}

/* Per token, dlogit_e = p_e (slope f_e + shift): the softmax over all experts' share of the weights, and both losses.
 */
typedef struct dense_part {
  float slope[LANES], shift[LANES]; /* divided by the softmax's sum */
  uint8_t used[LANES];
} dense_part;

PMOEI_VECTORISED static void add_fractions(const float *restrict exponentials, int64_t num_experts,
                                           const float *restrict fraction, float *restrict out) {
  float total[LANES] = {0};
  for (int64_t e = 0; e < num_experts; e++)
    for (int l = 0; l < LANES; l++) total[l] += exponentials[e * LANES + l] * fraction[e];
  for (int l = 0; l < LANES; l++) out[l] = total[l];
}

static void weigh_dense(const pmoei_gate_call *call, const pmoei_gate_tile *tile, const float *shared,
                        dense_part *dense) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  float live = call->totals.live > 0 ? (float)call->totals.live : 1;
  float aux = call->loss_scale * cfg->aux_coef * (float)cfg->num_experts / live,
        z = call->loss_scale * cfg->z_coef * 2 / live;
  float fraction_mean[LANES] = {0}, lse[LANES];
  pmoei_gate_logsumexp(tile, lse);
  if (cfg->aux_coef > 0) add_fractions(tile->logits, cfg->num_experts, call->fraction, fraction_mean);
  for (int l = 0; l < LANES; l++) {
    float inverse = 1 / tile->sum[l], slope = 0, shift = -shared[l];
    bool in_losses = pmoei_gate_has_losses(call->gate) && tile->finite[l];
    if (in_losses) {
      slope = aux;
      shift += z * lse[l] - aux * fraction_mean[l] * inverse;
    }
    dense->slope[l] = slope * inverse;
    dense->shift[l] = shift * inverse;
    dense->used[l] = !tile->masked[l] && (shares_with_all(cfg) || in_losses);
  }
}

PMOEI_VECTORISED static void apply_dense(float *restrict logits, int64_t num_experts, const float *restrict fraction,
                                         const dense_part *restrict dense) {
  for (int64_t e = 0; e < num_experts; e++) {
    for (int l = 0; l < LANES; l++) {
      float gradient = logits[e * LANES + l] * (dense->slope[l] * fraction[e] + dense->shift[l]);
      logits[e * LANES + l] = dense->used[l] ? gradient : 0.0f;
    }
  }
}

PMOEI_VECTORISED static void transpose(float *restrict out, const float *restrict lanes, int64_t num_experts,
                                       int64_t rows) {
  enum { STRIP = 16 };
  for (int64_t begin = 0; begin < num_experts; begin += STRIP) {
    int64_t end = begin + STRIP < num_experts ? begin + STRIP : num_experts;
    for (int64_t l = 0; l < rows; l++)
      for (int64_t e = begin; e < end; e++) out[l * num_experts + e] = lanes[e * LANES + l];
  }
}

PMOEI_VECTORISED static void add_f32(float *restrict out, const float *restrict in, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] += in[i];
}

PMOEI_VECTORISED static void add_bf16(pmoei_bf16 *restrict out, const float *restrict in, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = pmoei_f32_to_bf16(pmoei_bf16_to_f32(out[i]) + in[i]);
}

static void add_to_dx(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block, int32_t thread) {
  const pmoe_gate *gate = call->gate;
  const pmoe_mat *dx = &call->dx;
  int64_t num_experts = gate->cfg.num_experts, hidden = gate->hidden;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  bool direct = dx->dtype == PMOE_F32 && !pmoei_gate_has_jitter(call);
  pmoei_product product = {.m = span.rows,
                           .n = hidden,
                           .k = num_experts,
                           .a = call->dlogits + span.first * num_experts,
                           .lda = num_experts,
                           .b = call->params.weight,
                           .ldb = hidden,
                           .in = PMOE_F32,
                           .out = PMOE_F32,
                           .c = direct ? pmoei_row(dx, span.first) : tile->input,
                           .ldc = direct ? dx->ld : hidden,
                           .accumulate = direct};
  pmoei_gemm_run(gate->ctx->gemm, thread, &product);
  for (int64_t r = 0; r < span.rows && !direct; r++) {
    float *row = tile->input + r * hidden;
    if (pmoei_gate_has_jitter(call)) pmoei_gate_jitter(call, span.first + r, 0, row, hidden);
    if (dx->dtype == PMOE_F32) add_f32(pmoei_row(dx, span.first + r), row, hidden);
    else add_bf16(pmoei_row(dx, span.first + r), row, hidden);
  }
}

static void gradient_block(void *arg, int64_t block, int32_t thread) {
  const pmoei_gate_call *call = arg;
  pmoei_gate_tile *tile = &call->tile[thread];
  int64_t num_experts = call->gate->cfg.num_experts, top_k = call->gate->cfg.top_k;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  load_choices(call, tile, block);
  if (pmoei_gate_has_losses(call->gate)) restore_logits(call, tile, block);
  else pmoei_gate_logits(call, tile, block, thread);
  pmoei_gate_extremes(call, tile);
  for (int64_t i = 0; i < top_k * LANES; i++)
    tile->value[i] = tile->logits[(int64_t)tile->expert[i] * LANES + i % LANES];
  if (pmoei_gate_needs_softmax(call->gate)) pmoei_gate_softmax(call, tile);
  pmoei_gate_scores(call, tile);
  float shared[LANES] = {0};
  dense_part dense;
  for (int64_t l = 0; l < span.rows; l++)
    if (!tile->masked[l]) shared[l] = choice_gradient(call, tile, span.first + l, l);
  weigh_dense(call, tile, shared, &dense);
  apply_dense(tile->logits, num_experts, call->fraction, &dense);
  for (int64_t k = 0; k < top_k; k++)
    for (int64_t l = 0; l < span.rows; l++)
      if (!tile->masked[l]) tile->logits[tile->expert[k * LANES + l] * LANES + l] += tile->value[k * LANES + l];
  transpose(call->dlogits + span.first * num_experts, tile->logits, num_experts, span.rows);
  add_to_dx(call, tile, block, thread);
}

pmoe_status pmoei_gate_input_grad(pmoei_gate_call *call) {
  if (pmoei_gate_has_losses(call->gate)) {
    pmoei_parallel(call->gate->ctx, call->blocks, count_block, call);
    PMOEI_TRY(pmoei_gate_total(call));
  } else {
    memset(call->fraction, 0, (size_t)call->gate->cfg.num_experts * sizeof *call->fraction);
  }
  pmoei_parallel(call->gate->ctx, call->blocks, gradient_block, call);
  return pmoei_gemm_take_error(call->gate->ctx->gemm);
}
