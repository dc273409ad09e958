/* The second half of a layer: norm, an MLP or a pmoe layer, residual sum. */
#include "bf16.h"
#include "layernorm.h"
#include "linear.h"
#include "pass.h"

static pmoe_mat mat(const struct lm_pass *pass, void *data, int64_t rows, int64_t cols) {
  return (pmoe_mat){data, pass->model->cfg.dtype, rows, cols, cols};
}

/* The output bias is the first shard's; the others add zeros. */
static pmoe_experts_params mlp_params(const struct lm_pass *pass, const struct lm_layer *layer) {
  const struct lm_acts *acts = pass->model->acts;
  pmoe_experts_params p = PMOE_CONFIG_INIT(pmoe_experts_params);
  int mine = layer->fc2_bias->numel > 0;
  p.fc1_weight = layer->fc1_weight->data, p.fc1_weight_grad = layer->fc1_weight->grad;
  p.fc1_bias = layer->fc1_bias->data, p.fc1_bias_grad = layer->fc1_bias->grad;
  p.fc2_weight = layer->fc2_weight->data, p.fc2_weight_grad = layer->fc2_weight->grad;
  p.fc2_bias = mine ? layer->fc2_bias->data : acts->zero_bias;
  p.fc2_bias_grad = mine ? layer->fc2_bias->grad : acts->zero_bias_grad;
  return p;
}

static int64_t inner_of(const struct lm_pass *pass) {
  return config_inner(&pass->model->cfg) / pass->model->ranks->at.tp;
}

/* numbers of the model's dtype as float32: themselves, or in room. */
static float *widened(const struct lm_pass *pass, void *numbers, float *room, int64_t n) {
  if (pass->model->cfg.dtype == PMOE_F32) return numbers;
  to_f32(room, numbers, pass->model->cfg.dtype, n);
  return room;
}

static float *moe_forward(struct lm_pass *pass, const struct lm_layer *layer, struct lm_layer_acts *a) {
  const struct lm_acts *acts = pass->model->acts;
  int64_t hidden = pass->model->cfg.hidden, rows = pass->slot->rows.held;
  pmoe_mat x = mat(pass, a->mlp_x, rows, hidden), y = mat(pass, acts->mlp_y, rows, hidden);
  LM_TRY(pmoe_layer_forward(layer->moe, a->stash, pass->step, &x, &y, NULL));
  return widened(pass, y.data, acts->part, rows * hidden);
}

static float *mlp_forward(struct lm_pass *pass, const struct lm_layer *layer, struct lm_layer_acts *a) {
  const struct lm_acts *acts = pass->model->acts;
  int64_t hidden = pass->model->cfg.hidden, rows = pass->slot->rows.all;
  gather_rows(pass, a->mlp_x, a->mlp_x_all, hidden, pmoe_dtype_size(pass->model->cfg.dtype));
  pmoe_mat x = mat(pass, a->mlp_x_all, rows, hidden), y = mat(pass, acts->mlp_y, rows, hidden);
  pmoe_mat pre = mat(pass, a->mlp_pre, rows, inner_of(pass));
  pmoe_experts_params params = mlp_params(pass, layer);
  LM_TRY(pmoe_experts_forward(layer->mlp, &params, &rows, &x, &pre, &y, NULL));
  float *part = widened(pass, y.data, acts->part, rows * hidden);
  lap(pass, LM_PART_MLP);
  return sum_shards(pass, part);
}

void mlp_half_forward(struct lm_pass *pass, int index, float *next_x) {
  struct lm_model *model = pass->model;
  const struct lm_layer *layer = &model->layers[pass->chunk->first_layer + index];
  struct lm_layer_acts *a = &pass->slot->layer[index];
  int64_t hidden = model->cfg.hidden, held = pass->slot->rows.held;
  layernorm_forward(a->norm2, a->mean2, a->rstd2, a->x2, layer->norm2_weight->master, layer->norm2_bias->master, held,
                    hidden);
  if (a->mlp_x != a->norm2) from_f32(a->mlp_x, model->cfg.dtype, a->norm2, held * hidden);
  lap(pass, LM_PART_NORM);
  const float *y = layer->moe ? moe_forward(pass, layer, a) : mlp_forward(pass, layer, a);
  add(next_x, a->x2, y, held * hidden);
  lap(pass, layer->moe ? LM_PART_MOE : LM_PART_MLP);
}

/* ---- backward ---- */

/* dx rounded to the model's dtype: itself, or in room. */
static void *rounded(const struct lm_pass *pass, float *dx, void *room) {
  if (pass->model->cfg.dtype == PMOE_F32) return dx;
  from_f32(room, pass->model->cfg.dtype, dx, pass->slot->rows.held * pass->model->cfg.hidden);
  return room;
}

static float *moe_backward(struct lm_pass *pass, const struct lm_layer *layer, const struct lm_layer_acts *a) {
  const struct lm_acts *acts = pass->model->acts;
  const struct lm_rows *rows = &pass->slot->rows;
  int64_t hidden = pass->model->cfg.hidden;
  pmoe_mat dy = mat(pass, rounded(pass, acts->dx, acts->mlp_y), rows->held, hidden);
  pmoe_mat dx = mat(pass, acts->mlp_dx, rows->held, hidden);
  /* The routers' losses are means over the micro-batch, dy belongs to a sum over its tokens. */
  float tokens = (float)(rows->all * pass->model->ranks->at.cp);
  LM_TRY(pmoe_layer_backward(layer->moe, a->stash, tokens, &dy, &dx, PMOE_BWD_ALL, NULL));
  return widened(pass, dx.data, acts->part, rows->held * hidden);
}

static float *mlp_backward(struct lm_pass *pass, const struct lm_layer *layer, const struct lm_layer_acts *a) {
  const struct lm_acts *acts = pass->model->acts;
  size_t bytes = pmoe_dtype_size(pass->model->cfg.dtype);
  int64_t hidden = pass->model->cfg.hidden, rows = pass->slot->rows.all;
  /* Rounded first, so that the gathered rows are the dtype's; mlp_dx is free until the products. */
  void *held = rounded(pass, acts->dx, pass->model->ranks->at.sp ? acts->mlp_dx : acts->mlp_y);
  pmoe_mat dy = mat(pass, gather_rows(pass, held, acts->mlp_y, hidden, bytes), rows, hidden);
  pmoe_mat x = mat(pass, a->mlp_x_all, rows, hidden), dx = mat(pass, acts->mlp_dx, rows, hidden);
  pmoe_mat pre = mat(pass, a->mlp_pre, rows, inner_of(pass));
  pmoe_experts_params params = mlp_params(pass, layer);
  LM_TRY(pmoe_experts_backward(layer->mlp, &params, &rows, &x, &pre, NULL, &dy, NULL, &dx, NULL, PMOE_BWD_ALL, NULL));
  float *part = widened(pass, dx.data, acts->part, rows * hidden);
  lap(pass, LM_PART_MLP);
  return sum_shards(pass, part);
}

void mlp_half_backward(struct lm_pass *pass, int index) {
  struct lm_model *model = pass->model;
  const struct lm_layer *layer = &model->layers[pass->chunk->first_layer + index];
  const struct lm_layer_acts *a = &pass->slot->layer[index];
  const float *dnorm = layer->moe ? moe_backward(pass, layer, a) : mlp_backward(pass, layer, a);
  lap(pass, layer->moe ? LM_PART_MOE : LM_PART_MLP);
  layernorm_backward(model->acts->dx, layer->norm2_weight->grad, layer->norm2_bias->grad, dnorm, a->x2,
                     layer->norm2_weight->master, a->mean2, a->rstd2, pass->slot->rows.held, model->cfg.hidden);
  lap(pass, LM_PART_NORM);
}
