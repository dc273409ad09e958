/* The first half of a layer: norm, attention, residual sum. */
#include "layernorm.h"
#include "linear.h"
#include "pass.h"

static struct lm_attention attention_size(const struct lm_pass *pass) {
  const struct lm_config *cfg = &pass->model->cfg;
  const struct lm_rows *rows = &pass->slot->rows;
  int tp = pass->model->ranks->at.tp;
  return (struct lm_attention){rows->sequences, rows->length, rows->first_position, cfg->heads / tp, cfg->hidden / tp};
}

static const float *bias_of(const struct lm_param *bias) { return bias->numel > 0 ? bias->master : NULL; }

void attention_half_forward(struct lm_pass *pass, int index) {
  struct lm_model *model = pass->model;
  const struct lm_layer *layer = &model->layers[pass->chunk->first_layer + index];
  struct lm_layer_acts *a = &pass->slot->layer[index];
  const struct lm_rows *rows = &pass->slot->rows;
  int64_t hidden = model->cfg.hidden, width = hidden / model->ranks->at.tp;
  layernorm_forward(a->norm1, a->mean1, a->rstd1, a->x, layer->norm1_weight->master, layer->norm1_bias->master,
                    rows->held, hidden);
  lap(pass, LM_PART_NORM);
  gather_rows(pass, a->norm1, a->norm1_all, hidden, sizeof(float));
  linear_forward((struct lm_linear){rows->all, hidden, 3 * width}, a->qkv, a->norm1_all, layer->qkv_weight->master,
                 layer->qkv_bias->master);
  lap(pass, LM_PART_LINEAR);
  struct lm_qkv in = gather_keys(pass, a);
  attention_forward(attention_size(pass), a->att, a->logsum, in, model->acts->attention_scratch);
  lap(pass, LM_PART_ATTENTION);
  linear_forward((struct lm_linear){rows->all, width, hidden}, model->acts->part, a->att, layer->proj_weight->master,
                 bias_of(layer->proj_bias));
  lap(pass, LM_PART_LINEAR);
  const float *y = sum_shards(pass, model->acts->part);
  add(a->x2, y, a->x, rows->held * hidden);
  lap(pass, LM_PART_LINEAR);
}

/* The keys of the latest gather may be another micro-batch's: with context parallelism the layer kept its own. */
static struct lm_qkv kept_qkv(const struct lm_pass *pass, const struct lm_layer_acts *a, int64_t width) {
  if (pass->model->ranks->at.cp > 1) return (struct lm_qkv){a->qkv, a->kv, 3 * width, 2 * width};
  return (struct lm_qkv){a->qkv, a->qkv + width, 3 * width, 3 * width};
}

void attention_half_backward(struct lm_pass *pass, int index) {
  struct lm_model *model = pass->model;
  struct lm_acts *acts = model->acts;
  const struct lm_layer *layer = &model->layers[pass->chunk->first_layer + index];
  const struct lm_layer_acts *a = &pass->slot->layer[index];
  const struct lm_rows *rows = &pass->slot->rows;
  int64_t hidden = model->cfg.hidden, width = hidden / model->ranks->at.tp;
  struct lm_linear proj = {rows->all, width, hidden}, qkv = {rows->all, hidden, 3 * width};
  const float *dy = gather_rows(pass, acts->dx, acts->dx_all, hidden, sizeof(float));
  linear_backward_weight(proj, layer->proj_weight->grad, layer->proj_bias->numel > 0 ? layer->proj_bias->grad : NULL,
                         dy, a->att);
  linear_backward_input(proj, acts->datt, dy, layer->proj_weight->master);
  lap(pass, LM_PART_LINEAR);
  float *dkv = model->ranks->at.cp > 1 ? acts->dkv : acts->dqkv + width;
  attention_backward(attention_size(pass), acts->dqkv, dkv, acts->datt, kept_qkv(pass, a, width), a->att, a->logsum,
                     acts->attention_scratch);
  lap(pass, LM_PART_ATTENTION);
  sum_keys(pass);
  linear_backward_weight(qkv, layer->qkv_weight->grad, layer->qkv_bias->grad, acts->dqkv, a->norm1_all);
  linear_backward_input(qkv, acts->part, acts->dqkv, layer->qkv_weight->master);
  lap(pass, LM_PART_LINEAR);
  const float *dnorm = sum_shards(pass, acts->part);
  layernorm_backward(acts->dx, layer->norm1_weight->grad, layer->norm1_bias->grad, dnorm, a->x,
                     layer->norm1_weight->master, a->mean1, a->rstd1, rows->held, hidden);
  lap(pass, LM_PART_NORM);
}
