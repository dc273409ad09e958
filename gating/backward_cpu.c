#include <float.h>
#include <string.h>

#include "core/dtype.h"
#include "core/gemm.h"
#include "core/parallel.h"
#include "core/simd.h"
#include "core/vmath_act.h"
#include "gating/gate_cpu.h"

static void load_choices(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  int64_t top_k = call->gate->cfg.top_k;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  const int32_t *expert = call->routing.expert + span.first * top_k;
  const uint8_t *mask = call->step.token_mask;
  for (int64_t l = 0; l < LANES; l++) {
    tile->masked[l] = l >= span.rows || (mask && !mask[span.first + l]);
    for (int64_t k = 0; k < top_k; k++) tile->expert[k * LANES + l] = tile->masked[l] ? -1 : expert[l * top_k + k];
  }
}

/* Let r_k be a weight before scaling and g_k its gradient, 0 for a dropped choice; s'/s the slope of a score divided by
 * it. dlogit_k = r_k (g_k - mean) s'/s with mean = sum_k r_k g_k wherever the r are divided by a sum: over all experts
 * when pmoei_gate_shares_with_all, else over the choices, or the survivors; without a division mean = 0. Turns
 * tile->value from scores into the part of that on the choices; returns the mean to be shared out over all experts.
 * `logit` [K,LANES] is that of the choices. */
static float choice_gradient(const pmoei_gate_call *call, pmoei_gate_tile *tile, const float *logit, int64_t token,
                             int64_t lane) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  const float *dweight = call->dweight + token * cfg->top_k;
  const int64_t *slot = call->routing.slot + token * cfg->top_k;
  float *value = tile->value + lane, sum = 0, mean = 0;
  bool divided = cfg->score == PMOE_SCORE_SOFTMAX || cfg->norm != PMOE_NORM_NONE;
  for (int64_t k = 0; k < cfg->top_k; k++) {
    bool none = tile->expert[k * LANES + lane] < 0;
    bool left_out = none || (slot[k] < 0 && cfg->norm == PMOE_NORM_AFTER_DROP);
    value[k * LANES] = left_out ? 0 : value[k * LANES];
    sum += value[k * LANES];
  }
  if (cfg->norm == PMOE_NORM_NONE) sum = 1;
  for (int64_t k = 0; k < cfg->top_k; k++) {
    float score = value[k * LANES];
    value[k * LANES] = sum < FLT_MIN ? 0 : score / sum;
    if (slot[k] >= 0) mean += value[k * LANES] * (dweight[k] * cfg->weight_scale);
    tile->ratio[k] = score == 0 ? 0 : pmoei_gate_slope_ratio(cfg->score, logit[k * LANES + lane], score);
  }
  float here = pmoei_gate_shares_with_all(cfg) || !divided ? 0 : mean;
  for (int64_t k = 0; k < cfg->top_k; k++)
    value[k * LANES] *= ((slot[k] >= 0 ? dweight[k] * cfg->weight_scale : 0) - here) * tile->ratio[k];
  return pmoei_gate_shares_with_all(cfg) ? mean : 0;
}

/* What the losses and a softmax over all experts give every logit. With P_e = u_e / sum the probability, G_e the
 * losses' slopes and s'/s as above, dlogit_e = P_e (G_e - sum_i P_i G_i - shared) s'/s + z lse softmax_e. */
typedef struct dense_part {
  float inverse[LANES]; /* 1 / sum; 0 where the token is in no loss and shares nothing */
  float shift[LANES];   /* what G_e is reduced by */
  float z[LANES];       /* z lse */
  uint8_t in_losses[LANES];
} dense_part;

PMOEI_VECTORISED static void add_slopes(const float *restrict scores, int64_t num_experts, const float *restrict slope,
                                        float *restrict out) {
  float total[LANES] = {0};
  for (int64_t e = 0; e < num_experts; e++)
    for (int l = 0; l < LANES; l++) total[l] += scores[e * LANES + l] * slope[e];
  for (int l = 0; l < LANES; l++) out[l] = total[l];
}

PMOEI_VECTORISED static void add_lane_slopes(const float *restrict scores, int64_t num_experts,
                                             const float *restrict slope, float *restrict out) {
  float total[LANES] = {0};
  for (int64_t e = 0; e < num_experts; e++)
    for (int l = 0; l < LANES; l++) total[l] += scores[e * LANES + l] * slope[e * LANES + l];
  for (int l = 0; l < LANES; l++) out[l] = total[l];
}

/* Each lane's slopes, its sequence's included. */
static void fill_lane_slopes(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  int64_t num_experts = call->gate->cfg.num_experts;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  for (int64_t l = 0; l < LANES; l++) {
    const float *own =
        l < span.rows ? call->seq_slope + pmoei_gate_sequence_of(call, span.first + l) * num_experts : call->slope;
    for (int64_t e = 0; e < num_experts; e++) tile->slope[e * LANES + l] = call->slope[e] + own[e];
  }
}

static void weigh_dense(const pmoei_gate_call *call, const pmoei_gate_tile *tile, const float *shared,
                        dense_part *dense) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  bool losses = pmoei_gate_has_losses(call->gate), aux = pmoei_gate_has_aux(call->gate);
  float mean[LANES] = {0};
  if (aux && tile->slope) add_lane_slopes(tile->logits, cfg->num_experts, tile->slope, mean);
  else if (aux) add_slopes(tile->logits, cfg->num_experts, call->slope, mean);
  for (int l = 0; l < LANES; l++) {
    dense->in_losses[l] = losses && tile->finite[l] && !tile->masked[l];
    bool used =
        !tile->masked[l] && (pmoei_gate_shares_with_all(cfg) || dense->in_losses[l]) && !(tile->sum[l] < FLT_MIN);
    dense->inverse[l] = used ? 1 / tile->sum[l] : 0;
    dense->shift[l] = shared[l] + (dense->in_losses[l] ? mean[l] * dense->inverse[l] : 0);
    dense->z[l] = dense->in_losses[l] && cfg->z_coef > 0 ? call->z_factor * tile->lse[l] : 0;
  }
}

/* For a softmax: its probabilities are those of the z-loss too. */
static inline __attribute__((always_inline)) void apply_softmax(float *restrict scores, int64_t num_experts,
                                                                const float *restrict slope, const int expert_stride,
                                                                const int lane_stride,
                                                                const dense_part *restrict dense) {
  for (int64_t e = 0; e < num_experts; e++) {
    for (int l = 0; l < LANES; l++) {
      float here = dense->in_losses[l] ? slope[e * expert_stride + l * lane_stride] : 0.0f;
      float gradient = scores[e * LANES + l] * dense->inverse[l] * (here - dense->shift[l] + dense->z[l]);
      scores[e * LANES + l] = dense->inverse[l] != 0 ? gradient : 0.0f;
    }
  }
}

PMOEI_VECTORISED static void apply_softmax_slope(float *restrict scores, int64_t num_experts,
                                                 const float *restrict slope, const dense_part *restrict dense) {
  apply_softmax(scores, num_experts, slope, 1, 0, dense);
}

PMOEI_VECTORISED static void apply_softmax_lane_slopes(float *restrict scores, int64_t num_experts,
                                                       const float *restrict slope, const dense_part *restrict dense) {
  apply_softmax(scores, num_experts, slope, LANES, 1, dense);
}

PMOEI_VECTORISED static void apply_sigmoid(float *restrict scores, const float *restrict logits, int64_t num_experts,
                                           const float *restrict slope, int64_t expert_stride, int64_t lane_stride,
                                           bool sigmoid, const float *restrict lse, const dense_part *restrict dense) {
  for (int64_t e = 0; e < num_experts; e++) {
    for (int l = 0; l < LANES; l++) {
      float score = scores[e * LANES + l], logit = logits[e * LANES + l];
      float ratio = sigmoid ? 1 - score : pmoei_sqrt_softplus_slope(logit);
      float here = slope[e * expert_stride + l * lane_stride] - dense->shift[l];
      float gradient = score * dense->inverse[l] * here * ratio;
      if (dense->z[l] != 0) gradient += dense->z[l] * pmoei_expf(logit - lse[l]);
      scores[e * LANES + l] = dense->in_losses[l] ? gradient : 0.0f;
    }
  }
}

static void apply_dense(const pmoei_gate_call *call, pmoei_gate_tile *tile, const dense_part *dense) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  int64_t num_experts = cfg->num_experts;
  bool lanes = tile->slope != NULL;
  const float *slope = lanes ? tile->slope : call->slope;
  if (cfg->score == PMOE_SCORE_SOFTMAX && lanes) apply_softmax_lane_slopes(tile->logits, num_experts, slope, dense);
  else if (cfg->score == PMOE_SCORE_SOFTMAX) apply_softmax_slope(tile->logits, num_experts, slope, dense);
  else if (pmoei_gate_has_losses(call->gate))
    apply_sigmoid(tile->logits, tile->kept, num_experts, slope, lanes ? LANES : 1, lanes,
                  cfg->score == PMOE_SCORE_SIGMOID, tile->lse, dense);
  else memset(tile->logits, 0, (size_t)num_experts * LANES * sizeof *tile->logits);
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

/* dlogits of one block, [rows,E]. */
static void gradient_of_logits(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  if (tile->kept) memcpy(tile->kept, tile->logits, (size_t)cfg->num_experts * LANES * sizeof *tile->kept);
  pmoei_gate_extremes(call, tile);
  pmoei_gate_gather(call, tile);
  memcpy(tile->chosen, tile->value, (size_t)cfg->top_k * LANES * sizeof *tile->chosen);
  if (pmoei_gate_needs_raise(call->gate)) pmoei_gate_raise_logits(call, tile);
  pmoei_gate_scores(call, tile);
  float shared[LANES] = {0};
  dense_part dense;
  for (int64_t l = 0; l < span.rows; l++)
    if (!tile->masked[l]) shared[l] = choice_gradient(call, tile, tile->chosen, span.first + l, l);
  if (tile->slope) fill_lane_slopes(call, tile, block);
  weigh_dense(call, tile, shared, &dense);
  apply_dense(call, tile, &dense);
  for (int64_t k = 0; k < cfg->top_k; k++)
    for (int64_t l = 0; l < span.rows; l++)
      if (tile->expert[k * LANES + l] >= 0)
        tile->logits[(int64_t)tile->expert[k * LANES + l] * LANES + l] += tile->value[k * LANES + l];
}

static void write_host_gradient(const pmoei_gate_call *call, const pmoei_gate_tile *tile, int64_t block) {
  int64_t num_experts = call->gate->cfg.num_experts;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  for (int64_t l = 0; l < span.rows; l++) {
    float *row = pmoei_row(call->step.dlogits, span.first + l);
    for (int64_t e = 0; e < num_experts; e++) row[e] = tile->logits[e * LANES + l];
  }
}

static void gradient_block(void *arg, int64_t block, int32_t thread) {
  const pmoei_gate_call *call = arg;
  pmoei_gate_tile *tile = &call->tile[thread];
  int64_t num_experts = call->gate->cfg.num_experts;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  load_choices(call, tile, block);
  pmoei_gate_logits(call, tile, block, thread);
  gradient_of_logits(call, tile, block);
  if (call->gate->cfg.router == PMOE_ROUTER_HOST_LOGITS) {
    write_host_gradient(call, tile, block);
    return;
  }
  transpose(call->dlogits + span.first * num_experts, tile->logits, num_experts, span.rows);
  add_to_dx(call, tile, block, thread);
}

/* The weights came finished: theirs is the gradient, of those that have a slot. */
static void return_weight_gradient(const pmoei_gate_call *call) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  for (int64_t i = 0; i < call->tokens * cfg->top_k; i++)
    call->step.dweight[i] = call->routing.slot[i] < 0 ? 0 : call->dweight[i] * cfg->weight_scale;
}

pmoe_status pmoei_gate_input_grad(pmoei_gate_call *call) {
  const pmoe_gate *gate = call->gate;
  if (gate->cfg.router == PMOE_ROUTER_HOST_ROUTING) {
    return_weight_gradient(call);
    return PMOE_OK;
  }
  call->z_factor = pmoei_gate_has_losses(gate) ? pmoei_gate_slopes(call) : 0;
  if (!pmoei_gate_has_losses(gate)) memset(call->slope, 0, (size_t)gate->cfg.num_experts * sizeof *call->slope);
  pmoei_parallel(gate->ctx, call->blocks, gradient_block, call);
  return pmoei_gemm_take_error(gate->ctx->gemm);
}
