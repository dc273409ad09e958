/* Building a model: its list of parameters, their first values, its pmoe objects. */
#include "model.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bf16.h"
#include "layers.h"

enum { MOST_PARAMS_PER_LAYER = 24 };

static struct lm_param *add_param(struct lm_model *model, pmoe_dtype dtype, int64_t rows, int64_t cols,
                                  const char *format, ...) __attribute__((format(printf, 5, 6)));

/* A dense parameter [rows, cols], or [rows] if cols is 0. Matrices decay. */
static struct lm_param *add_param(struct lm_model *model, pmoe_dtype dtype, int64_t rows, int64_t cols,
                                  const char *format, ...) {
  struct lm_param *p = &model->params[model->num_params++];
  *p =
      (struct lm_param){.dtype = dtype, .ndim = cols ? 2 : 1, .shape = {rows, cols}, .numel = rows * (cols ? cols : 1)};
  p->first_expert = -1;
  p->first_copy = model->ranks->rank == 0;
  p->decay = cols > 0;
  va_list args;
  va_start(args, format);
  vsnprintf(p->name, sizeof p->name, format, args);
  va_end(args);
  return p;
}

static void add_block_params(struct lm_model *model, int l) {
  struct lm_layer *layer = &model->layers[l];
  int hidden = model->cfg.hidden;
  layer->norm1_weight = add_param(model, PMOE_F32, hidden, 0, "layers.%d.norm1.weight", l);
  layer->norm1_bias = add_param(model, PMOE_F32, hidden, 0, "layers.%d.norm1.bias", l);
  layer->qkv_weight = add_param(model, PMOE_F32, 3 * hidden, hidden, "layers.%d.attention.qkv.weight", l);
  layer->qkv_bias = add_param(model, PMOE_F32, 3 * hidden, 0, "layers.%d.attention.qkv.bias", l);
  layer->proj_weight = add_param(model, PMOE_F32, hidden, hidden, "layers.%d.attention.proj.weight", l);
  layer->proj_bias = add_param(model, PMOE_F32, hidden, 0, "layers.%d.attention.proj.bias", l);
  layer->norm2_weight = add_param(model, PMOE_F32, hidden, 0, "layers.%d.norm2.weight", l);
  layer->norm2_bias = add_param(model, PMOE_F32, hidden, 0, "layers.%d.norm2.bias", l);
}

static pmoe_experts_config experts_config(const struct lm_config *cfg) {
  pmoe_experts_config experts = PMOE_CONFIG_INIT(pmoe_experts_config);
  experts.inner = config_inner(cfg);
  experts.act = PMOE_ACT_GELU;
  experts.bias = 1;
  experts.dtype = cfg->dtype;
  experts.grad_dtype = PMOE_F32;
  return experts;
}

/* A dense MLP is a pmoe_experts with one expert, so that both kinds of layer run the same code. */
static void add_mlp(struct lm_model *model, int l) {
  struct lm_layer *layer = &model->layers[l];
  const struct lm_config *cfg = &model->cfg;
  int hidden = cfg->hidden, inner = config_inner(cfg);
  layer->fc1_weight = add_param(model, cfg->dtype, inner, hidden, "layers.%d.mlp.fc1.weight", l);
  layer->fc1_bias = add_param(model, cfg->dtype, inner, 0, "layers.%d.mlp.fc1.bias", l);
  layer->fc2_weight = add_param(model, cfg->dtype, hidden, inner, "layers.%d.mlp.fc2.weight", l);
  layer->fc2_bias = add_param(model, cfg->dtype, hidden, 0, "layers.%d.mlp.fc2.bias", l);
  pmoe_experts_config experts = experts_config(cfg);
  LM_TRY(pmoe_experts_create(model->ranks->ctx, hidden, 1, &experts, &layer->mlp));
}

static void create_moe(struct lm_model *model, int l, int ep) {
  const struct lm_config *cfg = &model->cfg;
  pmoe_gate_config gate = PMOE_CONFIG_INIT(pmoe_gate_config);
  gate.num_experts = cfg->experts.value[l];
  gate.top_k = cfg->topk;
  gate.norm = cfg->topk > 1 ? PMOE_NORM_AFTER_DROP : PMOE_NORM_NONE;
  gate.capacity_factor = gate.eval_capacity_factor = cfg->capacity;
  gate.aux_coef = cfg->aux;
  gate.z_coef = cfg->z;
  pmoe_experts_config experts = experts_config(cfg);
  pmoe_residual_config residual = PMOE_CONFIG_INIT(pmoe_residual_config);
  residual.mix = cfg->residual;
  residual.inner = experts.inner;
  residual.act = experts.act;
  residual.bias = experts.bias;
  pmoe_layer_config layer = PMOE_CONFIG_INIT(pmoe_layer_config);
  layer.hidden = cfg->hidden;
  layer.layer_id = l;
  layer.ep = ep;
  layer.gate = &gate;
  layer.experts = &experts;
  layer.residual = cfg->residual == PMOE_MIX_NONE ? NULL : &residual;
  LM_TRY(pmoe_layer_create(model->ranks->ctx, model->ranks->topology, &layer, &model->layers[l].moe));
  pmoe_stash_config stash = PMOE_CONFIG_INIT(pmoe_stash_config);
  stash.max_tokens = (int64_t)cfg->micro * cfg->context;
  LM_TRY(pmoe_stash_create(model->layers[l].moe, &stash, NULL, 0, &model->layers[l].stash));
}

static void add_moe(struct lm_model *model, int l) {
  struct lm_layer *layer = &model->layers[l];
  int ep = config_layer_ep(&model->cfg, l, model->ranks->nranks);
  create_moe(model, l, ep);
  layer->experts = model->cfg.experts.value[l];
  layer->first_listed = model->num_experts_listed;
  model->num_experts_listed += layer->experts;
  pmoe_comm *copies;
  LM_TRY(pmoe_topology_groups(model->ranks->topology, ep, NULL, &copies, NULL));
  for (int i = 0; i < pmoe_layer_num_params(layer->moe); i++) {
    pmoe_param info = PMOE_CONFIG_INIT(pmoe_param);
    LM_TRY(pmoe_layer_param(layer->moe, i, &info));
    struct lm_param *p = add_param(model, info.dtype, 1, 0, "layers.%d.moe.%s", l, info.name);
    p->ndim = info.ndim;
    memcpy(p->shape, info.shape, sizeof p->shape);
    p->numel = info.numel;
    p->decay = strstr(info.name, ".weight") != NULL;
    p->in_moe = 1;
    p->first_expert = info.first_expert;
    if (info.first_expert < 0) continue;
    p->num_global_experts = layer->experts;
    p->first_copy = pmoe_comm_rank(copies) == 0;
  }
}

/* Gradients outside pmoe layers lie in one block, which one sum over the ranks serves. */
static void give_memory(struct lm_model *model) {
  for (int i = 0; i < model->num_params; i++)
    if (!model->params[i].in_moe) model->dense_numel += model->params[i].numel;
  model->dense_grad = lm_alloc((size_t)model->dense_numel, sizeof(float));
  float *next = model->dense_grad;
  for (int i = 0; i < model->num_params; i++) {
    struct lm_param *p = &model->params[i];
    size_t n = (size_t)p->numel;
    p->master = lm_alloc(n, sizeof(float));
    p->adam_m = lm_alloc(n, sizeof(float));
    p->adam_v = lm_alloc(n, sizeof(float));
    p->data = p->dtype == PMOE_F32 ? p->master : lm_alloc(n, pmoe_dtype_size(p->dtype));
    p->grad = p->in_moe ? lm_alloc(n, sizeof(float)) : next;
    if (!p->in_moe) next += p->numel;
  }
}

/* The parameters of a moe follow one another in the list. */
static void bind_moe(struct lm_model *model, int first, pmoe_layer *moe) {
  for (int i = 0; i < pmoe_layer_num_params(moe); i++)
    LM_TRY(pmoe_layer_bind_param(moe, i, model->params[first + i].data, model->params[first + i].grad));
}

/* ---- first values ---- */

static uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* normal(0, std) by Box and Muller; a number depends on seed, parameter and place alone. */
static void fill_normal(float *to, int64_t n, uint64_t key, float std) {
  for (int64_t i = 0; i < n; i++) {
    uint64_t word = mix(key + 0x9e3779b97f4a7c15u * (uint64_t)(i + 1));
    double radius = sqrt(-2.0 * log(((double)(word >> 32) + 0.5) / 4294967296.0));
    to[i] = std * (float)(radius * cos(6.283185307179586 * (double)(word & 0xffffffff) / 4294967296.0));
  }
}

static int ends_with(const char *text, const char *end) {
  size_t length = strlen(text), tail = strlen(end);
  return length >= tail && strcmp(text + length - tail, end) == 0;
}

static void init_params(struct lm_model *model) {
  const struct lm_config *cfg = &model->cfg;
  float std = sqrtf(0.4f / (float)cfg->hidden);
  for (int l = 0; l < cfg->layers; l++)
    if (model->layers[l].moe) LM_TRY(pmoe_layer_init_params(model->layers[l].moe, cfg->seed, std));
  for (int i = 0; i < model->num_params; i++) {
    struct lm_param *p = &model->params[i];
    if (p->in_moe) to_f32(p->master, p->data, p->dtype, p->numel);
    else if (p->decay) fill_normal(p->master, p->numel, mix(mix(cfg->seed + 1) + (uint64_t)i), std);
    else if (ends_with(p->name, ".weight"))
      for (int64_t j = 0; j < p->numel; j++) p->master[j] = 1.0f;
    /* What is added to the residual stream starts smaller, so that the stream's variance does not grow with depth. */
    if (ends_with(p->name, "fc2.weight") || ends_with(p->name, "proj.weight"))
      for (int64_t j = 0; j < p->numel; j++) p->master[j] /= sqrtf(2.0f * (float)cfg->layers);
  }
  model_round_params(model);
}

void model_round_params(struct lm_model *model) {
  for (int i = 0; i < model->num_params; i++) {
    struct lm_param *p = &model->params[i];
    if (p->data != p->master) from_f32(p->data, p->dtype, p->master, p->numel);
  }
}

/* ---- life ---- */

struct lm_model *model_create(const struct lm_config *cfg, int vocab, struct lm_ranks *ranks) {
  struct lm_model *model = lm_alloc(1, sizeof *model);
  model->cfg = *cfg;
  model->vocab = vocab;
  model->ranks = ranks;
  model->layers = lm_alloc((size_t)cfg->layers, sizeof *model->layers);
  model->params = lm_alloc((size_t)(cfg->layers * MOST_PARAMS_PER_LAYER + 4), sizeof *model->params);
  add_param(model, PMOE_F32, vocab, cfg->hidden, "embedding.token.weight");
  add_param(model, PMOE_F32, cfg->context, cfg->hidden, "embedding.position.weight");
  add_param(model, PMOE_F32, cfg->hidden, 0, "final_norm.weight");
  add_param(model, PMOE_F32, cfg->hidden, 0, "final_norm.bias");
  int first_moe_param[LM_MAX_LAYERS];
  for (int l = 0; l < cfg->layers; l++) {
    add_block_params(model, l);
    first_moe_param[l] = model->num_params;
    if (cfg->experts.value[l] > 0) add_moe(model, l);
    else add_mlp(model, l);
  }
  give_memory(model);
  for (int l = 0; l < cfg->layers; l++)
    if (model->layers[l].moe) bind_moe(model, first_moe_param[l], model->layers[l].moe);
  init_params(model);
  model->acts = acts_create(model);
  return model;
}

void model_destroy(struct lm_model *model) {
  acts_destroy(model);
  for (int l = 0; l < model->cfg.layers; l++) {
    pmoe_stash_destroy(model->layers[l].stash);
    pmoe_layer_destroy(model->layers[l].moe);
    pmoe_experts_destroy(model->layers[l].mlp);
  }
  for (int i = 0; i < model->num_params; i++) {
    struct lm_param *p = &model->params[i];
    if (p->data != p->master) free(p->data);
    if (p->in_moe) free(p->grad);
    free(p->master);
    free(p->adam_m);
    free(p->adam_v);
  }
  free(model->dense_grad);
  free(model->params);
  free(model->layers);
  free(model);
}
