#include <math.h>
#include <stdlib.h>

#include "oracle/oracle.h"

int64_t oracle_capacity(int64_t tokens, int32_t num_experts, int32_t top_k, double factor, int32_t min_capacity) {
  if (factor == 0.0) return 0;
  int64_t millionths = (int64_t)floor(factor * 1e6 + 0.5), whole = (int64_t)num_experts * 1000000;
  int64_t capacity = (tokens * top_k * millionths + whole - 1) / whole, least = min_capacity ? min_capacity : 1;
  return capacity > least ? capacity : least;
}

static int live(const oracle_batch *batch, int64_t t) { return !batch->mask || batch->mask[t]; }

static int finite_row(const double *row, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (!isfinite(row[i])) return 0;
  return 1;
}

static double log_sum_exp(const double *row, int64_t n) {
  double top = row[0], sum = 0.0;
  for (int64_t i = 1; i < n; i++) top = row[i] > top ? row[i] : top;
  for (int64_t i = 0; i < n; i++) sum += exp(row[i] - top);
  return top + log(sum);
}

static double softplus(double x) { return x > 0.0 ? x + log1p(exp(-x)) : log1p(exp(x)); }

static double score_of(const oracle_model *model, double logit, double lse) {
  if (model->gate.score == PMOE_SCORE_SIGMOID) return 1.0 / (1.0 + exp(-logit));
  if (model->gate.score == PMOE_SCORE_SQRT_SOFTPLUS) return sqrt(softplus(logit));
  return exp(logit - lse);
}

/* dlogits += the scores' gradient through the scores. */
static void scores_backward(const oracle_model *model, const double *logits, const double *raw, const double *draw,
                            double *dlogits) {
  int32_t e = model->gate.num_experts;
  double along = 0.0;
  for (int32_t i = 0; i < e; i++) along += draw[i] * raw[i];
  for (int32_t i = 0; i < e; i++) {
    double sigmoid = 1.0 / (1.0 + exp(-logits[i]));
    if (model->gate.score == PMOE_SCORE_SIGMOID) dlogits[i] += draw[i] * sigmoid * (1.0 - sigmoid);
    else if (model->gate.score == PMOE_SCORE_SQRT_SOFTPLUS) dlogits[i] += draw[i] * sigmoid / (2.0 * raw[i]);
    else dlogits[i] += raw[i] * (draw[i] - along);
  }
}

static void score_token(const oracle_model *model, const oracle_batch *batch, int64_t t, oracle_result *result) {
  int64_t e = model->gate.num_experts, h = model->hidden;
  double *logits = result->logits + t * e, *prob = result->prob + t * e;
  for (int64_t i = 0; i < e; i++) {
    logits[i] = model->gate.bias ? model->tensor[ORACLE_ROUTER_BIAS].data[i] : 0.0;
    for (int64_t j = 0; j < h; j++)
      logits[i] += model->tensor[ORACLE_ROUTER_WEIGHT].data[i * h + j] * batch->x[t * h + j];
  }
  double lse = log_sum_exp(logits, e), sum = 0.0, *raw = result->raw + t * e;
  for (int64_t i = 0; i < e; i++) {
    raw[i] = score_of(model, logits[i], lse);
    sum += raw[i];
  }
  for (int64_t i = 0; i < e; i++) prob[i] = raw[i] / sum;
}

static void choose(const oracle_model *model, const oracle_batch *batch, int64_t t, oracle_result *result) {
  int32_t e = model->gate.num_experts, k = model->gate.top_k;
  const double *logits = result->logits + (int64_t)t * e;
  int32_t *expert = result->expert + (int64_t)t * k;
  for (int32_t c = 0; c < k; c++) {
    if (batch->given_expert) {
      expert[c] = batch->given_expert[(int64_t)t * k + c];
      continue;
    }
    int32_t best = -1;
    for (int32_t i = 0; i < e; i++) {
      int taken = 0;
      for (int32_t b = 0; b < c; b++) taken |= expert[b] == i;
      if (!taken && (best < 0 || logits[i] > logits[best])) best = i;
    }
    expert[c] = best;
  }
}

static void score_choices(const oracle_model *model, int64_t t, oracle_result *result) {
  int32_t e = model->gate.num_experts, k = model->gate.top_k;
  const int32_t *expert = result->expert + (int64_t)t * k;
  double sum = 0.0, *score = result->score + (int64_t)t * k;
  for (int32_t c = 0; c < k; c++) {
    score[c] = result->raw[(int64_t)t * e + expert[c]];
    sum += score[c];
  }
  for (int32_t c = 0; c < k && model->gate.softmax_after_topk; c++) score[c] /= sum;
}

/* Does choice a of token ta come before choice b of token tb when an expert's slots are given out? */
static int comes_first(const oracle_model *model, const oracle_result *result, int64_t ta, int32_t a, int64_t tb,
                       int32_t b) {
  int32_t k = model->gate.top_k;
  if (model->gate.drop == PMOE_DROP_PROBS) {
    double pa = result->score[ta * k + a], pb = result->score[tb * k + b];
    return pa != pb ? pa > pb : ta < tb;
  }
  return a != b ? a < b : ta < tb;
}

/* A choice's slot is the number of choices of the same expert that come before it. */
static void give_slots(const oracle_model *model, const oracle_batch *batch, int64_t first, int64_t tokens,
                       int64_t capacity, oracle_result *result) {
  int32_t k = model->gate.top_k;
  for (int64_t i = first * k; i < (first + tokens) * k; i++) {
    if (result->expert[i] < 0) continue;
    if (batch->given_slot) {
      result->slot[i] = batch->given_slot[i];
      continue;
    }
    int64_t before = 0;
    for (int64_t j = first * k; j < (first + tokens) * k; j++)
      before += j != i && result->expert[j] == result->expert[i] &&
                comes_first(model, result, j / k, (int32_t)(j % k), i / k, (int32_t)(i % k));
    result->slot[i] = capacity == 0 || before < capacity ? before : -1;
  }
}

/* Which choices the sum for normalisation runs over. */
static int in_norm(const oracle_model *model, const oracle_result *result, int64_t i) {
  return model->gate.norm == PMOE_NORM_BEFORE_DROP || result->slot[i] >= 0;
}

static double norm_sum(const oracle_model *model, const oracle_result *result, int64_t t) {
  if (model->gate.norm == PMOE_NORM_NONE) return 1.0;
  int32_t k = model->gate.top_k;
  double sum = 0.0;
  for (int64_t i = t * k; i < (t + 1) * k; i++)
    if (in_norm(model, result, i)) sum += result->score[i];
  return sum;
}

static double finished_scale(const oracle_model *model) {
  return model->gate.weight_scale == 0.0f ? 1.0 : (double)model->gate.weight_scale;
}

/* The rank that routes a token. */
static int32_t rank_of(const oracle_batch *batch, int64_t t) {
  int32_t rank = 0;
  for (int64_t end = 0; batch->rank_tokens && (end += batch->rank_tokens[rank]) <= t;) rank++;
  return rank;
}

static int32_t loss_group(const oracle_batch *batch, int32_t rank) {
  return batch->loss_group ? batch->loss_group[rank] : rank;
}

/* Tokens of a group of ranks (-1: of all) that count in the losses, and the fraction of choices that went to each
 * expert. */
static double loss_fractions(const oracle_model *model, const oracle_batch *batch, int32_t group,
                             const oracle_result *result, double *fraction) {
  int32_t e = model->gate.num_experts, k = model->gate.top_k, counted = model->gate.aux_first_choice_only ? 1 : k;
  double n = 0.0;
  for (int64_t t = 0; t < batch->tokens; t++) {
    if (group >= 0 && loss_group(batch, rank_of(batch, t)) != group) continue;
    if (!live(batch, t) || !finite_row(result->logits + t * e, e)) continue;
    n += 1.0;
    for (int32_t c = 0; c < counted; c++) fraction[result->expert[t * k + c]] += 1.0;
  }
  for (int32_t i = 0; i < e && n > 0.0; i++) fraction[i] /= n * counted;
  return n;
}

/* The slope of a rank's losses by a token's probabilities, and the number of tokens that the z-loss is the mean of. */
static double loss_slopes(const oracle_model *model, const oracle_batch *batch, int32_t rank,
                          const oracle_result *result, double *micro, double *global) {
  int32_t e = model->gate.num_experts;
  double n = loss_fractions(model, batch, loss_group(batch, rank), result, micro);
  double all = loss_fractions(model, batch, -1, result, global);
  for (int32_t i = 0; i < e; i++) {
    micro[i] *= n > 0.0 ? (double)model->gate.aux_coef * e / n : 0.0;
    global[i] *= all > 0.0 ? (double)model->gate.global_aux_coef * e / all : 0.0;
  }
  return n;
}

void oracle_losses(const oracle_model *model, const oracle_batch *batch, oracle_result *result) {
  int32_t e = model->gate.num_experts;
  for (int32_t rank = 0; rank < result->num_ranks; rank++) {
    double *micro = calloc(2 * (size_t)e, sizeof *micro), *global = micro + e;
    double n = loss_slopes(model, batch, rank, result, micro, global);
    for (int64_t t = 0; t < batch->tokens; t++) {
      if (rank_of(batch, t) != rank || !live(batch, t) || !finite_row(result->logits + t * e, e)) continue;
      double lse = log_sum_exp(result->logits + t * e, e);
      result->z_loss[rank] += (double)model->gate.z_coef * lse * lse / n;
      for (int32_t i = 0; i < e; i++) {
        result->aux_loss[rank] += micro[i] * result->prob[t * e + i];
        result->global_aux_loss[rank] += global[i] * result->prob[t * e + i];
      }
    }
    free(micro);
  }
}

void oracle_gate_forward(const oracle_model *model, const oracle_batch *batch, int32_t rank, int64_t first,
                         int64_t tokens, oracle_result *result) {
  const pmoe_gate_config *gate = &model->gate;
  int32_t e = gate->num_experts, k = gate->top_k;
  float factor = batch->training ? gate->capacity_factor : gate->eval_capacity_factor;
  result->capacity[rank] = oracle_capacity(tokens, e, k, (double)factor, gate->min_capacity);
  for (int64_t t = first; t < first + tokens; t++) {
    for (int64_t i = t * k; i < (t + 1) * k; i++) {
      result->expert[i] = -1;
      result->slot[i] = -1;
    }
    score_token(model, batch, t, result);
    if (!live(batch, t)) continue;
    choose(model, batch, t, result);
    score_choices(model, t, result);
  }
  give_slots(model, batch, first, tokens, result->capacity[rank], result);
  for (int64_t t = first; t < first + tokens; t++) {
    double sum = norm_sum(model, result, t);
    for (int64_t i = t * k; i < (t + 1) * k; i++) {
      if (result->expert[i] >= 0) result->count[rank * e + result->expert[i]]++;
      if (result->slot[i] < 0) continue;
      result->rows[rank * e + result->expert[i]]++;
      result->weight[i] = finished_scale(model) * result->score[i] / sum;
    }
  }
}

/* From the finished weights' gradient to the logits', through scale, normalisation and softmax. */
static void weights_backward(const oracle_model *model, int64_t t, const oracle_result *result, double *dlogits) {
  int32_t e = model->gate.num_experts, k = model->gate.top_k;
  const double *dweight = result->dweight + t * k, *score = result->score + t * k;
  const int32_t *expert = result->expert + t * k;
  double sum = norm_sum(model, result, t), scale = finished_scale(model), toward_sum = 0.0, along = 0.0;
  double *dscore = calloc((size_t)k, sizeof *dscore);
  for (int32_t c = 0; c < k; c++) {
    if (result->slot[t * k + c] < 0) continue;
    dscore[c] = dweight[c] * scale / sum;
    toward_sum -= dweight[c] * scale * score[c] / (sum * sum);
  }
  for (int32_t c = 0; c < k && model->gate.norm != PMOE_NORM_NONE; c++)
    if (in_norm(model, result, t * k + c)) dscore[c] += toward_sum;
  for (int32_t c = 0; c < k; c++) along += dscore[c] * score[c];
  if (model->gate.softmax_after_topk) {
    for (int32_t c = 0; c < k; c++) dlogits[expert[c]] += score[c] * (dscore[c] - along);
  } else {
    double *draw = calloc((size_t)e, sizeof *draw);
    for (int32_t c = 0; c < k; c++) draw[expert[c]] += dscore[c];
    scores_backward(model, result->logits + t * e, result->raw + t * e, draw, dlogits);
    free(draw);
  }
  free(dscore);
}

/* slope[i]: of the auxiliary losses by P_i, a score divided by the scores' sum. */
static void losses_backward(const oracle_model *model, double loss_scale, double n, const double *slope, int64_t t,
                            const oracle_result *result, double *dlogits) {
  int32_t e = model->gate.num_experts;
  const double *logits = result->logits + t * e, *prob = result->prob + t * e, *raw = result->raw + t * e;
  double *draw = calloc((size_t)e, sizeof *draw), along = 0.0, sum = 0.0, lse = log_sum_exp(logits, e);
  for (int32_t i = 0; i < e; i++) {
    along += slope[i] * prob[i];
    sum += raw[i];
  }
  for (int32_t i = 0; i < e; i++) draw[i] = loss_scale * (slope[i] - along) / sum;
  scores_backward(model, logits, raw, draw, dlogits);
  for (int32_t i = 0; i < e; i++)
    dlogits[i] += loss_scale * (double)model->gate.z_coef * 2.0 * lse * exp(logits[i] - lse) / n;
  free(draw);
}

void oracle_gate_backward(oracle_model *model, const oracle_batch *batch, int32_t rank, int64_t first, int64_t tokens,
                          oracle_result *result) {
  int64_t e = model->gate.num_experts, h = model->hidden;
  double *slope = calloc(2 * (size_t)e, sizeof *slope), *dlogits = calloc((size_t)e, sizeof *dlogits);
  double n = loss_slopes(model, batch, rank, result, slope, slope + e);
  for (int64_t i = 0; i < e; i++) slope[i] += slope[e + i];
  oracle_tensor *weight = &model->tensor[ORACLE_ROUTER_WEIGHT], *bias = &model->tensor[ORACLE_ROUTER_BIAS];
  for (int64_t t = first; t < first + tokens; t++) {
    if (!live(batch, t)) continue;
    for (int64_t i = 0; i < e; i++) dlogits[i] = 0.0;
    weights_backward(model, t, result, dlogits);
    if (finite_row(result->logits + t * e, e)) losses_backward(model, batch->loss_scale, n, slope, t, result, dlogits);
    for (int64_t i = 0; i < e; i++) {
      for (int64_t j = 0; j < h; j++) {
        result->dx[t * h + j] += dlogits[i] * weight->data[i * h + j];
        weight->grad[i * h + j] += dlogits[i] * batch->x[t * h + j];
      }
      if (model->gate.bias) bias->grad[i] += dlogits[i];
    }
  }
  free(slope);
  free(dlogits);
}
