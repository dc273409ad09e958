/* Building a rank's part of a model: its list of parameters, their first values, its pmoe objects. */
#include "model.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bf16.h"
#include "layers.h"
#include "moe.h"

enum { MOST_PARAMS_PER_LAYER = 24, MOST_PARAMS_OUTSIDE = 5, FIRST_LAYER_ORDER = 64 };

static struct lm_param *add_param(struct lm_model *model, int order, pmoe_dtype dtype, int64_t rows, int64_t cols,
                                  const char *format, ...) __attribute__((format(printf, 6, 7)));

/* A dense parameter [rows, cols], or [rows] if cols is 0, whole on each rank of the stage. Matrices decay. */
static struct lm_param *add_param(struct lm_model *model, int order, pmoe_dtype dtype, int64_t rows, int64_t cols,
                                  const char *format, ...) {
  struct lm_param *p = &model->params[model->num_params++];
  *p = (struct lm_param){.order = order, .dtype = dtype, .ndim = cols ? 2 : 1, .shape = {rows, cols}};
  p->numel = rows * (cols ? cols : 1);
  p->first_expert = p->shard_dim = -1;
  p->counted = model->ranks->at.tp_rank == 0;
  p->decay = cols > 0;
  va_list args;
  va_start(args, format);
  vsnprintf(p->name, sizeof p->name, format, args);
  va_end(args);
  return p;
}

/* Spreads p over TP. */
static struct lm_param *spread(struct lm_model *model, struct lm_param *p, int dim, int blocks) {
  const struct lm_layout *at = &model->ranks->at;
  param_shard(p, dim, blocks, at->tp, at->tp_rank);
  p->sum = at->tp > 1 ? LM_SUM_DENSE_DP : LM_SUM_STAGE;
  p->counted = 1;
  return p;
}

/* The bias of a sum of shards: the first shard adds it. */
static struct lm_param *give_first(struct lm_model *model, struct lm_param *p) {
  const struct lm_layout *at = &model->ranks->at;
  if (at->tp_rank > 0) p->shape[0] = p->numel = 0;
  p->sum = at->tp > 1 ? LM_SUM_DENSE_DP : LM_SUM_STAGE;
  return p;
}

/* A layer norm's: without sequence parallelism the ranks of a TP group norm the same rows and have the same gradient.
 */
static struct lm_param *add_norm(struct lm_model *model, int order, int l, const char *name) {
  struct lm_param *p = add_param(model, order, PMOE_F32, model->cfg.hidden, 0, "layers.%d.%s", l, name);
  p->sum = model->ranks->at.tp > 1 && !model->ranks->at.sp ? LM_SUM_DENSE_DP : LM_SUM_STAGE;
  return p;
}

static int first_order(int l) { return FIRST_LAYER_ORDER * (l + 1); }

static void add_block_params(struct lm_model *model, int l) {
  struct lm_layer *layer = &model->layers[l];
  int hidden = model->cfg.hidden, at = first_order(l);
  layer->norm1_weight = add_norm(model, at, l, "norm1.weight");
  layer->norm1_bias = add_norm(model, at + 1, l, "norm1.bias");
  layer->qkv_weight =
      spread(model, add_param(model, at + 2, PMOE_F32, 3 * hidden, hidden, "layers.%d.attention.qkv.weight", l), 0, 3);
  layer->qkv_bias =
      spread(model, add_param(model, at + 3, PMOE_F32, 3 * hidden, 0, "layers.%d.attention.qkv.bias", l), 0, 3);
  layer->proj_weight =
      spread(model, add_param(model, at + 4, PMOE_F32, hidden, hidden, "layers.%d.attention.proj.weight", l), 1, 1);
  layer->proj_bias =
      give_first(model, add_param(model, at + 5, PMOE_F32, hidden, 0, "layers.%d.attention.proj.bias", l));
  layer->norm2_weight = add_norm(model, at + 6, l, "norm2.weight");
  layer->norm2_bias = add_norm(model, at + 7, l, "norm2.bias");
}

/* A dense MLP is a pmoe_experts with one expert, so that both kinds of layer run the same code. */
static void add_mlp(struct lm_model *model, int l) {
  struct lm_layer *layer = &model->layers[l];
  const struct lm_config *cfg = &model->cfg;
  int hidden = cfg->hidden, inner = config_inner(cfg), at = first_order(l) + 8;
  layer->fc1_weight =
      spread(model, add_param(model, at, cfg->dtype, inner, hidden, "layers.%d.mlp.fc1.weight", l), 0, 1);
  layer->fc1_bias = spread(model, add_param(model, at + 1, cfg->dtype, inner, 0, "layers.%d.mlp.fc1.bias", l), 0, 1);
  layer->fc2_weight =
      spread(model, add_param(model, at + 2, cfg->dtype, hidden, inner, "layers.%d.mlp.fc2.weight", l), 1, 1);
  layer->fc2_bias = give_first(model, add_param(model, at + 3, cfg->dtype, hidden, 0, "layers.%d.mlp.fc2.bias", l));
  pmoe_experts_config experts = mlp_config(cfg, inner / model->ranks->at.tp);
  LM_TRY(pmoe_experts_create(model->ranks->ctx, hidden, 1, &experts, &layer->mlp));
}

/* One of those that hold the same values. */
static int is_first_copy(struct lm_model *model, const pmoe_param *info, int ep) {
  pmoe_comm *experts, *copies = model->ranks->stage;
  LM_TRY(pmoe_topology_groups(model->ranks->topology, ep, NULL, &experts, NULL));
  if (info->reduce_group == PMOE_GROUP_EXPERT_DP) copies = experts;
  if (info->reduce_group == PMOE_GROUP_DENSE_DP) copies = model->ranks->dense_dp;
  return pmoe_comm_rank(copies) == 0;
}

static void add_moe(struct lm_model *model, int l) {
  struct lm_layer *layer = &model->layers[l];
  int ep = config_layer_ep(&model->cfg, l, model->ranks->nranks);
  struct lm_moe_config config;
  moe_config(&config, &model->cfg, l, ep);
  LM_TRY(pmoe_layer_create(model->ranks->ctx, model->ranks->topology, &config.layer, &layer->moe));
  for (int i = 0; i < pmoe_layer_num_params(layer->moe); i++) {
    pmoe_param info = PMOE_CONFIG_INIT(pmoe_param);
    LM_TRY(pmoe_layer_param(layer->moe, i, &info));
    struct lm_param *p = add_param(model, first_order(l) + 8 + i, info.dtype, 1, 0, "layers.%d.moe.%s", l, info.name);
    p->ndim = info.ndim;
    memcpy(p->shape, info.shape, sizeof p->shape);
    p->numel = info.numel;
    p->decay = strstr(info.name, ".weight") != NULL;
    p->sum = LM_SUM_LAYER;
    p->first_expert = info.first_expert;
    p->num_global_experts = info.first_expert < 0 ? 0 : layer->experts;
    p->shard_dim = info.shard_dim;
    p->shard_first = info.shard_first, p->shard_count = info.shard_count, p->shard_total = info.shard_total;
    p->first_copy = is_first_copy(model, &info, ep);
  }
}

/* Whether this stage is first or last; both when there is one. The table of the last is a copy of the first's. */
static void add_outside_params(struct lm_model *model) {
  const struct lm_config *cfg = &model->cfg;
  struct lm_chunk *first = &model->chunks[0], *last = &model->chunks[model->num_chunks - 1];
  if (first->stage > 0 && last->stage < last->num_stages - 1) return;
  struct lm_param *table = add_param(model, 0, PMOE_F32, model->vocab, cfg->hidden, "embedding.token.weight");
  if (first->stage == 0) {
    first->token_table = table;
    first->position_table = add_param(model, 1, PMOE_F32, cfg->context, cfg->hidden, "embedding.position.weight");
  } else table->counted = 0;
  if (last->stage < last->num_stages - 1) return;
  last->token_table = table;
  last->final_norm_weight = add_param(model, 2, PMOE_F32, cfg->hidden, 0, "final_norm.weight");
  last->final_norm_bias = add_param(model, 3, PMOE_F32, cfg->hidden, 0, "final_norm.bias");
}

/* Gradients outside pmoe layers lie in blocks, each of which one sum over the ranks serves. */
static void give_memory(struct lm_model *model) {
  int64_t total = 0;
  for (int i = 0; i < model->num_params; i++) {
    if (model->params[i].sum == LM_SUM_LAYER) continue;
    model->dense_numel[model->params[i].sum] += model->params[i].numel;
    total += model->params[i].numel;
  }
  model->dense_grad = lm_alloc((size_t)total, sizeof(float));
  float *next[LM_SUM_LAYER] = {model->dense_grad, model->dense_grad + model->dense_numel[LM_SUM_STAGE]};
  for (int i = 0; i < model->num_params; i++) {
    struct lm_param *p = &model->params[i];
    size_t n = (size_t)p->numel;
    p->master = lm_alloc(n, sizeof(float));
    p->adam_m = lm_alloc(n, sizeof(float));
    p->adam_v = lm_alloc(n, sizeof(float));
    p->data = p->dtype == PMOE_F32 ? p->master : lm_alloc(n, pmoe_dtype_size(p->dtype));
    p->grad = p->sum == LM_SUM_LAYER ? lm_alloc(n, sizeof(float)) : next[p->sum];
    if (p->sum == LM_SUM_LAYER) continue;
    next[p->sum] += p->numel;
    p->first_copy = p->counted && pmoe_comm_rank(model->ranks->dense_dp) == 0;
  }
}

/* The parameters of a moe follow one another in the list. */
static void bind_moe(struct lm_model *model, int first, pmoe_layer *moe) {
  for (int i = 0; i < pmoe_layer_num_params(moe); i++)
    LM_TRY(pmoe_layer_bind_param(moe, i, model->params[first + i].data, model->params[first + i].grad));
}

/* ---- first values ---- */

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
    if (p->sum == LM_SUM_LAYER) to_f32(p->master, p->data, p->dtype, p->numel);
    else if (p->decay) param_fill_normal(p, cfg->seed, std);
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

static void cut_into_chunks(struct lm_model *model) {
  const struct lm_list *stages = &model->cfg.stages;
  int pp = model->ranks->at.pp;
  model->num_chunks = stages->count / pp;
  model->chunks = lm_alloc((size_t)model->num_chunks, sizeof *model->chunks);
  for (int v = 0, first = 0; v < stages->count; first += stages->value[v++])
    if (v % pp == model->ranks->at.pp_rank)
      model->chunks[v / pp] = (struct lm_chunk){
          .stage = v, .num_stages = stages->count, .first_layer = first, .num_layers = stages->value[v]};
}

static void list_experts(struct lm_model *model) {
  for (int l = 0; l < model->cfg.layers; l++) {
    model->layers[l].experts = model->cfg.experts.value[l];
    model->layers[l].first_listed = model->num_experts_listed;
    model->num_experts_listed += model->layers[l].experts;
  }
}

static void add_layers(struct lm_model *model, int *first_moe_param) {
  for (int c = 0; c < model->num_chunks; c++)
    for (int i = 0; i < model->chunks[c].num_layers; i++) {
      int l = model->chunks[c].first_layer + i;
      add_block_params(model, l);
      first_moe_param[l] = model->num_params;
      if (model->layers[l].experts > 0) add_moe(model, l);
      else add_mlp(model, l);
    }
}

struct lm_model *model_create(const struct lm_config *cfg, int vocab, struct lm_ranks *ranks) {
  struct lm_model *model = lm_alloc(1, sizeof *model);
  model->cfg = *cfg;
  model->vocab = vocab;
  model->ranks = ranks;
  model->layers = lm_alloc((size_t)cfg->layers, sizeof *model->layers);
  model->params = lm_alloc((size_t)(cfg->layers * MOST_PARAMS_PER_LAYER + MOST_PARAMS_OUTSIDE), sizeof *model->params);
  int first_moe_param[LM_MAX_LAYERS];
  cut_into_chunks(model);
  list_experts(model);
  add_outside_params(model);
  add_layers(model, first_moe_param);
  give_memory(model);
  for (int l = 0; l < cfg->layers; l++)
    if (model->layers[l].moe) bind_moe(model, first_moe_param[l], model->layers[l].moe);
  catalog_make(&model->catalog, model->params, model->num_params, ranks);
  init_params(model);
  model->acts = acts_create(model);
  return model;
}

void model_destroy(struct lm_model *model) {
  acts_destroy(model);
  for (int l = 0; l < model->cfg.layers; l++) {
    pmoe_layer_destroy(model->layers[l].moe);
    pmoe_experts_destroy(model->layers[l].mlp);
  }
  for (int i = 0; i < model->num_params; i++) {
    struct lm_param *p = &model->params[i];
    if (p->data != p->master) free(p->data);
    if (p->sum == LM_SUM_LAYER) free(p->grad);
    free(p->master);
    free(p->adam_m);
    free(p->adam_v);
  }
  catalog_free(&model->catalog);
  free(model->dense_grad);
  free(model->params);
  free(model->chunks);
  free(model->layers);
  free(model);
}
