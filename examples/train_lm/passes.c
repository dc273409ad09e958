/* Running a model: forward, loss and backward of one micro-batch. */
#include <string.h>

#include "bf16.h"
#include "embedding.h"
#include "layernorm.h"
#include "layers.h"
#include "linear.h"
#include "loss.h"

/* One micro-batch on its way. step NULL: no training. */
struct pass {
  struct lm_model *model;
  const struct lm_batch *batch;
  const pmoe_step *step;
  int64_t tokens;
  double since; /* of the part that is being timed */
};

static struct pass pass_begin(struct lm_model *model, const struct lm_batch *batch, const pmoe_step *step) {
  return (struct pass){model, batch, step, (int64_t)batch->sequences * batch->length, lm_now()};
}

/* The time since the last lap goes to `part`. */
static void lap(struct pass *pass, enum lm_part part) {
  double now = lm_now();
  pass->model->seconds[part] += now - pass->since;
  pass->since = now;
}

static struct lm_linear linear_size(const struct pass *pass, int64_t in, int64_t out) {
  return (struct lm_linear){pass->tokens, in, out};
}

static struct lm_attention attention_size(const struct pass *pass) {
  const struct lm_config *cfg = &pass->model->cfg;
  return (struct lm_attention){pass->batch->sequences, pass->batch->length, cfg->heads, cfg->hidden};
}

static pmoe_mat mat(const struct pass *pass, void *data, int64_t cols) {
  return (pmoe_mat){data, pass->model->cfg.dtype, pass->tokens, cols, cols};
}

static pmoe_experts_params mlp_params(const struct lm_layer *layer) {
  pmoe_experts_params p = PMOE_CONFIG_INIT(pmoe_experts_params);
  p.fc1_weight = layer->fc1_weight->data, p.fc1_weight_grad = layer->fc1_weight->grad;
  p.fc1_bias = layer->fc1_bias->data, p.fc1_bias_grad = layer->fc1_bias->grad;
  p.fc2_weight = layer->fc2_weight->data, p.fc2_weight_grad = layer->fc2_weight->grad;
  p.fc2_bias = layer->fc2_bias->data, p.fc2_bias_grad = layer->fc2_bias->grad;
  return p;
}

/* ---- forward ---- */

static void attention_half_forward(struct pass *pass, const struct lm_layer *layer, struct lm_layer_acts *a) {
  int64_t hidden = pass->model->cfg.hidden;
  layernorm_forward(a->norm1, a->mean1, a->rstd1, a->x, layer->norm1_weight->master, layer->norm1_bias->master,
                    pass->tokens, hidden);
  lap(pass, LM_PART_NORM);
  linear_forward(linear_size(pass, hidden, 3 * hidden), a->qkv, a->norm1, layer->qkv_weight->master,
                 layer->qkv_bias->master);
  lap(pass, LM_PART_LINEAR);
  attention_forward(attention_size(pass), a->att, a->logsum, a->qkv, pass->model->acts->attention_scratch);
  lap(pass, LM_PART_ATTENTION);
  linear_forward(linear_size(pass, hidden, hidden), a->x2, a->att, layer->proj_weight->master,
                 layer->proj_bias->master);
  add(a->x2, a->x2, a->x, pass->tokens * hidden);
  lap(pass, LM_PART_LINEAR);
}

static void mlp_half_forward(struct pass *pass, const struct lm_layer *layer, struct lm_layer_acts *a, float *next_x) {
  struct lm_model *model = pass->model;
  int64_t hidden = model->cfg.hidden, n = pass->tokens * hidden;
  layernorm_forward(a->norm2, a->mean2, a->rstd2, a->x2, layer->norm2_weight->master, layer->norm2_bias->master,
                    pass->tokens, hidden);
  if (a->mlp_x != a->norm2) from_f32(a->mlp_x, model->cfg.dtype, a->norm2, n);
  lap(pass, LM_PART_NORM);
  pmoe_mat x = mat(pass, a->mlp_x, hidden), y = mat(pass, model->acts->mlp_y, hidden);
  if (layer->moe) {
    LM_TRY(pmoe_layer_forward(layer->moe, layer->stash, pass->step, &x, &y, NULL));
  } else {
    pmoe_mat pre = mat(pass, a->mlp_pre, config_inner(&model->cfg));
    pmoe_experts_params params = mlp_params(layer);
    LM_TRY(pmoe_experts_forward(layer->mlp, &params, &pass->tokens, &x, &pre, &y, NULL));
  }
  /* Backward has not begun: its float32 buffers are free for a widened y. */
  float *wide = model->cfg.dtype == PMOE_F32 ? y.data : model->acts->dnorm;
  if (y.data != wide) to_f32(wide, y.data, model->cfg.dtype, n);
  add(next_x, a->x2, wide, n);
  lap(pass, layer->moe ? LM_PART_MOE : LM_PART_MLP);
}

static void forward(struct pass *pass) {
  struct lm_model *model = pass->model;
  struct lm_acts *acts = model->acts;
  int layers = model->cfg.layers;
  struct lm_embedding size = {pass->batch->sequences, pass->batch->length, model->cfg.hidden, pass->batch->tokens};
  embedding_forward(size, acts->layer[0].x, model->params[LM_TOKEN_TABLE].master,
                    model->params[LM_POSITION_TABLE].master);
  lap(pass, LM_PART_EMBEDDING);
  for (int l = 0; l < layers; l++) {
    attention_half_forward(pass, &model->layers[l], &acts->layer[l]);
    mlp_half_forward(pass, &model->layers[l], &acts->layer[l], l + 1 < layers ? acts->layer[l + 1].x : acts->x);
  }
  layernorm_forward(acts->norm, acts->mean, acts->rstd, acts->x, model->params[LM_FINAL_NORM_WEIGHT].master,
                    model->params[LM_FINAL_NORM_BIAS].master, pass->tokens, model->cfg.hidden);
  lap(pass, LM_PART_NORM);
}

/* Sum of the losses. With gradient, also dnorm and the table's gradient; the logits exist for some rows at a time. */
static double head(struct pass *pass, int gradient) {
  struct lm_model *model = pass->model;
  struct lm_acts *acts = model->acts;
  struct lm_param *table = &model->params[LM_TOKEN_TABLE];
  int64_t hidden = model->cfg.hidden;
  double sum = 0;
  for (int64_t first = 0; first < pass->tokens; first += acts->head_rows) {
    int64_t rows = pass->tokens - first < acts->head_rows ? pass->tokens - first : acts->head_rows;
    struct lm_linear size = {rows, hidden, model->vocab};
    const float *x = acts->norm + first * hidden;
    linear_forward(size, acts->logits, x, table->master, NULL);
    loss_forward_backward(acts->logits, acts->loss, pass->batch->targets + first, rows, model->vocab, gradient);
    for (int64_t r = 0; r < rows; r++) sum += (double)acts->loss[r];
    if (!gradient) continue;
    linear_backward_input(size, acts->dnorm + first * hidden, acts->logits, table->master);
    linear_backward_weight(size, table->grad, NULL, acts->logits, x);
  }
  lap(pass, LM_PART_HEAD);
  return sum;
}

/* ---- backward: acts->dx is the gradient of a layer's output, and becomes that of its input ---- */

static void mlp_half_backward(struct pass *pass, const struct lm_layer *layer, struct lm_layer_acts *a) {
  struct lm_model *model = pass->model;
  struct lm_acts *acts = model->acts;
  int64_t hidden = model->cfg.hidden, n = pass->tokens * hidden;
  int wide = model->cfg.dtype == PMOE_F32;
  if (!wide) from_f32(acts->mlp_y, model->cfg.dtype, acts->dx, n);
  pmoe_mat x = mat(pass, a->mlp_x, hidden), dy = mat(pass, wide ? (void *)acts->dx : acts->mlp_y, hidden);
  pmoe_mat dx = mat(pass, wide ? (void *)acts->dnorm : acts->mlp_dx, hidden);
  if (layer->moe) {
    /* The routers' losses are means over this micro-batch, dy belongs to a sum over its tokens. */
    LM_TRY(pmoe_layer_backward(layer->moe, layer->stash, (float)pass->tokens, &dy, &dx, PMOE_BWD_ALL, NULL));
  } else {
    pmoe_mat pre = mat(pass, a->mlp_pre, config_inner(&model->cfg));
    pmoe_experts_params params = mlp_params(layer);
    LM_TRY(pmoe_experts_backward(layer->mlp, &params, &pass->tokens, &x, &pre, NULL, &dy, NULL, &dx, NULL, PMOE_BWD_ALL,
                                 NULL));
  }
  if (!wide) to_f32(acts->dnorm, dx.data, model->cfg.dtype, n);
  lap(pass, layer->moe ? LM_PART_MOE : LM_PART_MLP);
  layernorm_backward(acts->dx, layer->norm2_weight->grad, layer->norm2_bias->grad, acts->dnorm, a->x2,
                     layer->norm2_weight->master, a->mean2, a->rstd2, pass->tokens, hidden);
  lap(pass, LM_PART_NORM);
}

static void attention_half_backward(struct pass *pass, const struct lm_layer *layer, struct lm_layer_acts *a) {
  struct lm_acts *acts = pass->model->acts;
  int64_t hidden = pass->model->cfg.hidden;
  struct lm_linear proj = linear_size(pass, hidden, hidden), qkv = linear_size(pass, hidden, 3 * hidden);
  linear_backward_weight(proj, layer->proj_weight->grad, layer->proj_bias->grad, acts->dx, a->att);
  linear_backward_input(proj, acts->datt, acts->dx, layer->proj_weight->master);
  lap(pass, LM_PART_LINEAR);
  attention_backward(attention_size(pass), acts->dqkv, acts->datt, a->qkv, a->att, a->logsum, acts->attention_scratch);
  lap(pass, LM_PART_ATTENTION);
  linear_backward_weight(qkv, layer->qkv_weight->grad, layer->qkv_bias->grad, acts->dqkv, a->norm1);
  linear_backward_input(qkv, acts->dnorm, acts->dqkv, layer->qkv_weight->master);
  lap(pass, LM_PART_LINEAR);
  layernorm_backward(acts->dx, layer->norm1_weight->grad, layer->norm1_bias->grad, acts->dnorm, a->x,
                     layer->norm1_weight->master, a->mean1, a->rstd1, pass->tokens, hidden);
  lap(pass, LM_PART_NORM);
}

static void backward(struct pass *pass) {
  struct lm_model *model = pass->model;
  struct lm_acts *acts = model->acts;
  int64_t hidden = model->cfg.hidden;
  memset(acts->dx, 0, (size_t)(pass->tokens * hidden) * sizeof(float));
  layernorm_backward(acts->dx, model->params[LM_FINAL_NORM_WEIGHT].grad, model->params[LM_FINAL_NORM_BIAS].grad,
                     acts->dnorm, acts->x, model->params[LM_FINAL_NORM_WEIGHT].master, acts->mean, acts->rstd,
                     pass->tokens, hidden);
  lap(pass, LM_PART_NORM);
  for (int l = model->cfg.layers - 1; l >= 0; l--) {
    mlp_half_backward(pass, &model->layers[l], &acts->layer[l]);
    attention_half_backward(pass, &model->layers[l], &acts->layer[l]);
  }
  struct lm_embedding size = {pass->batch->sequences, pass->batch->length, hidden, pass->batch->tokens};
  embedding_backward(size, model->params[LM_TOKEN_TABLE].grad, model->params[LM_POSITION_TABLE].grad, acts->dx);
  lap(pass, LM_PART_EMBEDDING);
}

/* ---- what the headers promise ---- */

static void add_layer_sums(const struct lm_layer *layer, struct lm_sums *sums) {
  pmoe_metrics metrics = PMOE_CONFIG_INIT(pmoe_metrics);
  pmoe_routing routing = PMOE_CONFIG_INIT(pmoe_routing);
  LM_TRY(pmoe_stash_metrics(layer->stash, &metrics));
  LM_TRY(pmoe_stash_routing(layer->stash, &routing));
  sums->aux += (double)metrics.aux_loss * (double)metrics.tokens;
  sums->z += (double)metrics.z_loss * (double)metrics.tokens;
  sums->routed += (double)metrics.routed;
  sums->dropped += (double)metrics.dropped;
  for (int e = 0; e < layer->experts; e++)
    sums->expert_count[layer->first_listed + e] += (double)routing.expert_count[e];
}

void model_train(struct lm_model *model, const struct lm_batch *batch, uint64_t step, int64_t first_token,
                 struct lm_sums *sums) {
  pmoe_step info = PMOE_CONFIG_INIT(pmoe_step);
  info.training = 1;
  info.step = step;
  info.first_token = first_token;
  struct pass pass = pass_begin(model, batch, &info);
  forward(&pass);
  sums->loss += head(&pass, 1);
  sums->tokens += (double)pass.tokens;
  for (int l = 0; l < model->cfg.layers; l++)
    if (model->layers[l].moe) add_layer_sums(&model->layers[l], sums);
  backward(&pass);
}

double model_loss(struct lm_model *model, const struct lm_batch *batch) {
  struct pass pass = pass_begin(model, batch, NULL);
  forward(&pass);
  return head(&pass, 0);
}

void model_logits(struct lm_model *model, const struct lm_batch *batch, float *logits) {
  struct pass pass = pass_begin(model, batch, NULL);
  forward(&pass);
  if (pass.tokens == 0) return;
  struct lm_linear size = {1, model->cfg.hidden, model->vocab};
  linear_forward(size, logits, model->acts->norm + (pass.tokens - 1) * model->cfg.hidden,
                 model->params[LM_TOKEN_TABLE].master, NULL);
  lap(&pass, LM_PART_HEAD);
}
