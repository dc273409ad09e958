#include <math.h>
#include <stdlib.h>

#include "oracle/oracle.h"

static oracle_ffn expert_ffn(oracle_model *model, int64_t expert) {
  oracle_tensor *w1 = &model->tensor[ORACLE_FC1_WEIGHT], *b1 = &model->tensor[ORACLE_FC1_BIAS];
  oracle_tensor *w2 = &model->tensor[ORACLE_FC2_WEIGHT], *b2 = &model->tensor[ORACLE_FC2_BIAS];
  oracle_ffn ffn = {
      model->experts.act, model->hidden, model->experts.inner, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
  ffn.w1 = w1->data + expert * w1->per_expert;
  ffn.dw1 = w1->grad + expert * w1->per_expert;
  ffn.w2 = w2->data + expert * w2->per_expert;
  ffn.dw2 = w2->grad + expert * w2->per_expert;
  if (!model->experts.bias) return ffn;
  ffn.b1 = b1->data + expert * b1->per_expert;
  ffn.db1 = b1->grad + expert * b1->per_expert;
  ffn.b2 = b2->data + expert * b2->per_expert;
  ffn.db2 = b2->grad + expert * b2->per_expert;
  return ffn;
}

static oracle_ffn branch_ffn(oracle_model *model) {
  oracle_tensor *w1 = &model->tensor[ORACLE_MLP_FC1_WEIGHT], *b1 = &model->tensor[ORACLE_MLP_FC1_BIAS];
  oracle_tensor *w2 = &model->tensor[ORACLE_MLP_FC2_WEIGHT], *b2 = &model->tensor[ORACLE_MLP_FC2_BIAS];
  oracle_ffn ffn = {model->residual.act,
                    model->hidden,
                    model->residual.inner,
                    w1->data,
                    NULL,
                    w2->data,
                    NULL,
                    w1->grad,
                    NULL,
                    w2->grad,
                    NULL};
  if (!model->residual.bias) return ffn;
  ffn.b1 = b1->data;
  ffn.db1 = b1->grad;
  ffn.b2 = b2->data;
  ffn.db2 = b2->grad;
  return ffn;
}

static double mix_logit(const oracle_model *model, const double *x, int64_t i) {
  double sum = model->residual.mix == PMOE_MIX_LEARNED ? model->tensor[ORACLE_MIX_BIAS].data[i] : 0.0;
  for (int64_t j = 0; j < model->hidden; j++)
    sum += model->tensor[ORACLE_MIX_WEIGHT].data[i * model->hidden + j] * x[j];
  return sum;
}

static void mix_forward(const oracle_model *model, const double *x, double mix[2]) {
  mix[0] = mix[1] = 1.0;
  if (model->residual.mix == PMOE_MIX_LEARNED) {
    double a = mix_logit(model, x, 0), b = mix_logit(model, x, 1);
    mix[0] = 1.0 / (1.0 + exp(b - a));
    mix[1] = 1.0 / (1.0 + exp(a - b));
  } else if (model->residual.mix == PMOE_MIX_GATED_SUM) {
    mix[1] = 1.0 / (1.0 + exp(-mix_logit(model, x, 0)));
  } else if (model->residual.mix == PMOE_MIX_NONE) {
    mix[1] = 0.0;
  }
}

static void mix_backward(oracle_model *model, const double *x, const double mix[2], double dscale, double dbranch,
                         double *dx) {
  double dlogit[2] = {0.0, 0.0};
  int64_t n = 0;
  if (model->residual.mix == PMOE_MIX_LEARNED) {
    double along = mix[0] * dscale + mix[1] * dbranch;
    dlogit[0] = mix[0] * (dscale - along);
    dlogit[1] = mix[1] * (dbranch - along);
    n = 2;
  } else if (model->residual.mix == PMOE_MIX_GATED_SUM) {
    dlogit[0] = mix[1] * (1.0 - mix[1]) * dbranch;
    n = 1;
  }
  oracle_tensor *weight = &model->tensor[ORACLE_MIX_WEIGHT], *bias = &model->tensor[ORACLE_MIX_BIAS];
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j < model->hidden; j++) {
      dx[j] += dlogit[i] * weight->data[i * model->hidden + j];
      weight->grad[i * model->hidden + j] += dlogit[i] * x[j];
    }
    if (n == 2) bias->grad[i] += dlogit[i];
  }
}

static void token_forward(oracle_model *model, const oracle_batch *batch, int64_t t, oracle_result *result) {
  int64_t h = model->hidden, k = model->gate.top_k;
  const double *x = batch->x + t * h;
  double *row = calloc((size_t)h, sizeof *row), *moe = result->moe + t * h, *mlp = result->mlp + t * h,
         *mix = result->mix + 2 * t;
  for (int64_t i = t * k; i < (t + 1) * k; i++) {
    if (result->slot[i] < 0) continue;
    oracle_ffn ffn = expert_ffn(model, result->expert[i]);
    oracle_ffn_forward(&ffn, x, row);
    for (int64_t j = 0; j < h; j++) moe[j] += result->weight[i] * row[j];
  }
  mix_forward(model, x, mix);
  if (batch->mask && !batch->mask[t]) mix[0] = mix[1] = 0.0; /* a masked token is not there */
  if (model->residual.mix != PMOE_MIX_NONE) {
    oracle_ffn ffn = branch_ffn(model);
    oracle_ffn_forward(&ffn, x, mlp);
  }
  for (int64_t j = 0; j < h; j++) result->y[t * h + j] = mix[0] * moe[j] + mix[1] * mlp[j];
  free(row);
}

static void token_backward(oracle_model *model, const oracle_batch *batch, int64_t t, oracle_result *result) {
  int64_t h = model->hidden, k = model->gate.top_k;
  const double *x = batch->x + t * h, *dy = batch->dy + t * h, *mix = result->mix + 2 * t;
  double *row = calloc((size_t)h, sizeof *row), *drow = calloc((size_t)h, sizeof *drow), *dx = result->dx + t * h;
  double dscale = 0.0, dbranch = 0.0;
  for (int64_t i = t * k; i < (t + 1) * k; i++) {
    if (result->slot[i] < 0) continue;
    oracle_ffn ffn = expert_ffn(model, result->expert[i]);
    oracle_ffn_forward(&ffn, x, row);
    for (int64_t j = 0; j < h; j++) {
      result->dweight[i] += mix[0] * dy[j] * row[j];
      drow[j] = mix[0] * result->weight[i] * dy[j];
    }
    oracle_ffn_backward(&ffn, x, drow, dx);
  }
  if (model->residual.mix != PMOE_MIX_NONE) {
    oracle_ffn ffn = branch_ffn(model);
    for (int64_t j = 0; j < h; j++) drow[j] = mix[1] * dy[j];
    oracle_ffn_backward(&ffn, x, drow, dx);
  }
  for (int64_t j = 0; j < h; j++) {
    dscale += dy[j] * result->moe[t * h + j];
    dbranch += dy[j] * result->mlp[t * h + j];
  }
  mix_backward(model, x, mix, dscale, dbranch, dx);
  free(row);
  free(drow);
}

static void *zeros(int64_t n, size_t size) { return calloc((size_t)n + 1, size); }

static oracle_result *result_create(const oracle_model *model, const oracle_batch *batch) {
  oracle_result *r = zeros(1, sizeof *r);
  int64_t t = batch->tokens, h = model->hidden, e = model->gate.num_experts, k = model->gate.top_k;
  r->tokens = t;
  r->num_ranks = batch->rank_tokens ? batch->num_ranks : 1;
  r->y = zeros(t * h, sizeof(double));
  r->dx = zeros(t * h, sizeof(double));
  r->moe = zeros(t * h, sizeof(double));
  r->mlp = zeros(t * h, sizeof(double));
  r->mix = zeros(t * 2, sizeof(double));
  r->logits = zeros(t * e, sizeof(double));
  r->prob = zeros(t * e, sizeof(double));
  r->raw = zeros(t * e, sizeof(double));
  r->expert = zeros(t * k, sizeof(int32_t));
  r->slot = zeros(t * k, sizeof(int64_t));
  r->score = zeros(t * k, sizeof(double));
  r->weight = zeros(t * k, sizeof(double));
  r->dweight = zeros(t * k, sizeof(double));
  r->count = zeros(r->num_ranks * e, sizeof(int64_t));
  r->rows = zeros(r->num_ranks * e, sizeof(int64_t));
  r->capacity = zeros(r->num_ranks, sizeof(int64_t));
  r->aux_loss = zeros(r->num_ranks, sizeof(double));
  r->z_loss = zeros(r->num_ranks, sizeof(double));
  r->global_aux_loss = zeros(r->num_ranks, sizeof(double));
  return r;
}

oracle_result *oracle_run(oracle_model *model, const oracle_batch *batch) {
  oracle_result *result = result_create(model, batch);
  int64_t first = 0;
  for (int32_t rank = 0; rank < result->num_ranks; rank++) {
    int64_t tokens = batch->rank_tokens ? batch->rank_tokens[rank] : batch->tokens;
    oracle_gate_forward(model, batch, rank, first, tokens, result);
    for (int64_t t = first; t < first + tokens; t++) token_forward(model, batch, t, result);
    first += tokens;
  }
  oracle_losses(model, batch, result);
  first = 0;
  for (int32_t rank = 0; rank < result->num_ranks && batch->dy; rank++) {
    int64_t tokens = batch->rank_tokens ? batch->rank_tokens[rank] : batch->tokens;
    for (int64_t t = first; t < first + tokens; t++) token_backward(model, batch, t, result);
    oracle_gate_backward(model, batch, rank, first, tokens, result);
    first += tokens;
  }
  return result;
}

void oracle_result_destroy(oracle_result *r) {
  if (!r) return;
  void *arrays[] = {r->y,     r->dx,     r->moe,      r->mlp,      r->mix,    r->logits,
                    r->prob,  r->expert, r->slot,     r->score,    r->weight, r->dweight,
                    r->count, r->rows,   r->capacity, r->aux_loss, r->z_loss, r->global_aux_loss,
                    r->raw};
  for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
  free(r);
}

double oracle_objective(oracle_model *model, const oracle_batch *batch) {
  oracle_batch forward = *batch;
  forward.dy = NULL;
  oracle_result *result = oracle_run(model, &forward);
  double sum = 0.0;
  for (int64_t i = 0; i < batch->tokens * model->hidden; i++) sum += batch->dy[i] * result->y[i];
  for (int32_t r = 0; r < result->num_ranks; r++)
    sum += batch->loss_scale * (result->aux_loss[r] + result->z_loss[r] + result->global_aux_loss[r]);
  oracle_result_destroy(result);
  return sum;
}
