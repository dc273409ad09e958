/* A model's activations: one micro-batch at a time, so one set. */
#include <stdlib.h>
#include <time.h>

#include "layers.h"

enum { MOST_LOGITS = 1 << 22 };

static double read_clock(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double lm_now(void) { return read_clock(CLOCK_MONOTONIC); }

double lm_cpu_now(void) { return read_clock(CLOCK_PROCESS_CPUTIME_ID); }

static float *floats(int64_t rows, int64_t cols) { return lm_alloc((size_t)(rows * cols), sizeof(float)); }

static struct lm_layer_acts layer_acts(const struct lm_model *model, const struct lm_layer *layer, int64_t tokens) {
  int64_t hidden = model->cfg.hidden;
  struct lm_layer_acts a = {.x = floats(tokens, hidden), .x2 = floats(tokens, hidden)};
  a.norm1 = floats(tokens, hidden), a.mean1 = floats(tokens, 1), a.rstd1 = floats(tokens, 1);
  a.qkv = floats(tokens, 3 * hidden), a.logsum = floats(tokens, model->cfg.heads), a.att = floats(tokens, hidden);
  a.norm2 = floats(tokens, hidden), a.mean2 = floats(tokens, 1), a.rstd2 = floats(tokens, 1);
  size_t bytes = pmoe_dtype_size(model->cfg.dtype);
  a.mlp_x = model->cfg.dtype == PMOE_F32 ? a.norm2 : lm_alloc((size_t)(tokens * hidden), bytes);
  if (layer->mlp) a.mlp_pre = lm_alloc((size_t)(tokens * config_inner(&model->cfg)), bytes);
  return a;
}

/* Scratch for the largest of the layers at an even load twice over; a step that needs more takes the rest itself. */
static void *give_scratch(const struct lm_model *model, int64_t tokens) {
  size_t most = 0;
  for (int l = 0; l < model->cfg.layers; l++) {
    if (!model->layers[l].moe) continue;
    int ep = config_layer_ep(&model->cfg, l, model->ranks->nranks);
    pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
    cfg.max_tokens = tokens;
    cfg.max_recv_rows = tokens * model->cfg.topk * (ep < 2 ? ep : 2);
    size_t bytes;
    LM_TRY(pmoe_layer_scratch_bytes(model->layers[l].moe, &cfg, &bytes));
    if (bytes > most) most = bytes;
  }
  /* A dense MLP's backward keeps the pre-activation's gradient and the activation. */
  size_t mlp = (size_t)(tokens * config_inner(&model->cfg)) * 2 * sizeof(float) + 65536;
  if (mlp > most) most = mlp;
  void *scratch = lm_alloc(most, 1);
  LM_TRY(pmoe_ctx_set_scratch(model->ranks->ctx, scratch, most));
  return scratch;
}

struct lm_acts *acts_create(const struct lm_model *model) {
  const struct lm_config *cfg = &model->cfg;
  int64_t tokens = (int64_t)cfg->micro * cfg->context, hidden = cfg->hidden;
  struct lm_acts *a = lm_alloc(1, sizeof *a);
  a->max_tokens = tokens;
  a->layer = lm_alloc((size_t)cfg->layers, sizeof *a->layer);
  for (int l = 0; l < cfg->layers; l++) a->layer[l] = layer_acts(model, &model->layers[l], tokens);
  a->x = floats(tokens, hidden), a->norm = floats(tokens, hidden);
  a->mean = floats(tokens, 1), a->rstd = floats(tokens, 1);
  a->head_rows = MOST_LOGITS / model->vocab < 64 ? 64 : MOST_LOGITS / model->vocab;
  if (a->head_rows > tokens) a->head_rows = tokens;
  a->logits = floats(a->head_rows, model->vocab), a->loss = floats(a->head_rows, 1);
  a->dx = floats(tokens, hidden), a->dnorm = floats(tokens, hidden), a->datt = floats(tokens, hidden);
  a->dqkv = floats(tokens, 3 * hidden);
  a->mlp_y = lm_alloc((size_t)(tokens * hidden), sizeof(float));
  a->mlp_dx = lm_alloc((size_t)(tokens * hidden), sizeof(float));
  struct lm_attention size = {cfg->micro, cfg->context, cfg->heads, hidden};
  a->attention_scratch = floats((int64_t)attention_scratch(size, model->ranks->threads), 1);
  a->pmoe_scratch = give_scratch(model, tokens);
  return a;
}

void acts_destroy(struct lm_model *model) {
  struct lm_acts *a = model->acts;
  for (int l = 0; l < model->cfg.layers; l++) {
    struct lm_layer_acts *of = &a->layer[l];
    if (of->mlp_x != of->norm2) free(of->mlp_x);
    void *all[] = {of->x,      of->x2,  of->norm1, of->mean1, of->rstd1, of->qkv,
                   of->logsum, of->att, of->norm2, of->mean2, of->rstd2, of->mlp_pre};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  }
  LM_TRY(pmoe_ctx_set_scratch(model->ranks->ctx, NULL, 0));
  void *all[] = {a->layer,       a->x,     a->norm, a->mean, a->rstd,  a->logits, a->loss,
                 a->dx,          a->dnorm, a->datt, a->dqkv, a->mlp_y, a->mlp_dx, a->attention_scratch,
                 a->pmoe_scratch};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  free(a);
}
