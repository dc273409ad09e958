/* A model's activations. */
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

static void *typed(const struct lm_model *model, int64_t rows, int64_t cols) {
  return lm_alloc((size_t)(rows * cols), pmoe_dtype_size(model->cfg.dtype));
}

static struct lm_rows most_rows(const struct lm_model *model) {
  return layout_rows(&model->ranks->at, model->cfg.micro, model->cfg.context);
}

/* The keys that one micro-batch's attention sees: this rank's part of the sequences and those before it. */
static int64_t most_keys(const struct lm_model *model) {
  struct lm_rows rows = most_rows(model);
  return (int64_t)rows.sequences * (rows.first_position + rows.length);
}

/* ---- of one micro-batch ---- */

static pmoe_stash *make_stash(pmoe_layer *moe, int64_t tokens) {
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = tokens;
  pmoe_stash *stash;
  LM_TRY(pmoe_stash_create(moe, &cfg, NULL, 0, &stash));
  return stash;
}

static struct lm_layer_acts layer_acts(const struct lm_model *model, const struct lm_layer *layer) {
  const struct lm_layout *at = &model->ranks->at;
  struct lm_rows rows = most_rows(model);
  int64_t all = rows.all, held = rows.held, hidden = model->cfg.hidden, width = hidden / at->tp;
  struct lm_layer_acts a = {.x = floats(held, hidden), .x2 = floats(held, hidden)};
  a.norm1 = floats(held, hidden), a.mean1 = floats(held, 1), a.rstd1 = floats(held, 1);
  a.norm1_all = at->sp ? floats(all, hidden) : a.norm1;
  a.qkv = floats(all, 3 * width), a.logsum = floats(all, model->cfg.heads / at->tp), a.att = floats(all, width);
  if (at->cp > 1) a.kv = floats(most_keys(model), 2 * width);
  a.norm2 = floats(held, hidden), a.mean2 = floats(held, 1), a.rstd2 = floats(held, 1);
  a.mlp_x = model->cfg.dtype == PMOE_F32 ? a.norm2 : typed(model, held, hidden);
  a.mlp_x_all = at->sp && layer->mlp ? typed(model, all, hidden) : a.mlp_x;
  if (layer->mlp) a.mlp_pre = typed(model, all, config_inner(&model->cfg) / at->tp);
  else a.stash = make_stash(layer->moe, held);
  return a;
}

static void free_layer_acts(struct lm_layer_acts *a) {
  pmoe_stash_destroy(a->stash);
  if (a->mlp_x_all != a->mlp_x) free(a->mlp_x_all);
  if (a->mlp_x != a->norm2) free(a->mlp_x);
  if (a->norm1_all != a->norm1) free(a->norm1_all);
  void *all[] = {a->x,  a->x2,  a->norm1, a->mean1, a->rstd1, a->qkv,    a->logsum,
                 a->kv, a->att, a->norm2, a->mean2, a->rstd2, a->mlp_pre};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static struct lm_slot *slot_create(const struct lm_model *model, const struct lm_chunk *chunk) {
  struct lm_rows rows = most_rows(model);
  struct lm_slot *slot = lm_alloc(1, sizeof *slot);
  slot->tokens = lm_alloc((size_t)rows.held, sizeof *slot->tokens);
  slot->targets = lm_alloc((size_t)rows.held, sizeof *slot->targets);
  slot->x = floats(rows.held, model->cfg.hidden);
  slot->layer = lm_alloc((size_t)chunk->num_layers, sizeof *slot->layer);
  for (int i = 0; i < chunk->num_layers; i++)
    slot->layer[i] = layer_acts(model, &model->layers[chunk->first_layer + i]);
  return slot;
}

static void slot_destroy(const struct lm_chunk *chunk, struct lm_slot *slot) {
  for (int i = 0; i < chunk->num_layers; i++) free_layer_acts(&slot->layer[i]);
  free(slot->layer);
  free(slot->x);
  free(slot->tokens);
  free(slot->targets);
  free(slot);
}

void acts_grow(const struct lm_model *model, struct lm_chunk *chunk, int64_t slots) {
  if (slots <= chunk->num_slots) return;
  struct lm_slot **list = lm_alloc((size_t)slots, sizeof *list);
  for (int i = 0; i < slots; i++) list[i] = i < chunk->num_slots ? chunk->slot[i] : slot_create(model, chunk);
  free(chunk->slot);
  chunk->slot = list;
  chunk->num_slots = (int)slots;
}

/* ---- shared ---- */

/* Scratch for the largest of the layers at an even load twice over; a step that needs more takes the rest itself. */
static void *give_scratch(const struct lm_model *model, struct lm_rows rows) {
  size_t most = 0;
  for (int l = 0; l < model->cfg.layers; l++) {
    if (!model->layers[l].moe) continue;
    int spread = config_layer_ep(&model->cfg, l, model->ranks->nranks) * model->cfg.etp;
    pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
    cfg.max_tokens = rows.held;
    cfg.max_recv_rows = rows.own * model->cfg.topk * (spread < 2 ? spread : 2);
    size_t bytes;
    LM_TRY(pmoe_layer_scratch_bytes(model->layers[l].moe, &cfg, &bytes));
    if (bytes > most) most = bytes;
  }
  /* A dense MLP's backward keeps the pre-activation's gradient and the activation. */
  size_t mlp = (size_t)(rows.all * config_inner(&model->cfg) / model->ranks->at.tp) * 2 * sizeof(float) + 65536;
  if (mlp > most) most = mlp;
  void *scratch = lm_alloc(most, 1);
  LM_TRY(pmoe_ctx_set_scratch(model->ranks->ctx, scratch, most));
  return scratch;
}

struct lm_acts *acts_create(const struct lm_model *model) {
  const struct lm_layout *at = &model->ranks->at;
  struct lm_rows rows = most_rows(model);
  int64_t hidden = model->cfg.hidden, width = hidden / at->tp;
  struct lm_acts *a = lm_alloc(1, sizeof *a);
  a->max_tokens = rows.all;
  for (int c = 0; c < model->num_chunks; c++) acts_grow(model, &model->chunks[c], 1);
  a->norm = floats(rows.own, hidden), a->mean = floats(rows.own, 1), a->rstd = floats(rows.own, 1);
  a->head_rows = MOST_LOGITS / model->vocab < 64 ? 64 : MOST_LOGITS / model->vocab;
  if (a->head_rows > rows.own) a->head_rows = rows.own;
  a->logits = floats(a->head_rows, model->vocab), a->loss = floats(a->head_rows, 1);
  a->dx = floats(rows.held, hidden), a->dx_all = at->tp > 1 ? floats(rows.all, hidden) : a->dx;
  a->part = floats(rows.all, hidden);
  a->datt = floats(rows.all, width), a->dqkv = floats(rows.all, 3 * width);
  if (at->cp > 1) {
    a->kv_mine = floats(rows.all, 2 * width), a->kv_all = floats(at->cp * rows.all, 2 * width);
    a->dkv = floats(most_keys(model), 2 * width);
  }
  a->mlp_y = typed(model, rows.all, hidden), a->mlp_dx = typed(model, rows.all, hidden);
  a->zero_bias = typed(model, 1, hidden), a->zero_bias_grad = floats(1, hidden);
  struct lm_attention size = {rows.sequences, rows.length, rows.first_position, model->cfg.heads / at->tp, width};
  a->attention_scratch = floats((int64_t)attention_scratch(size, model->ranks->threads), 1);
  a->pmoe_scratch = give_scratch(model, rows);
  return a;
}

void acts_destroy(struct lm_model *model) {
  struct lm_acts *a = model->acts;
  for (int c = 0; c < model->num_chunks; c++) {
    struct lm_chunk *chunk = &model->chunks[c];
    for (int i = 0; i < chunk->num_slots; i++) slot_destroy(chunk, chunk->slot[i]);
    free(chunk->slot);
  }
  LM_TRY(pmoe_ctx_set_scratch(model->ranks->ctx, NULL, 0));
  if (a->dx_all != a->dx) free(a->dx_all);
  void *all[] = {a->norm,
                 a->mean,
                 a->rstd,
                 a->logits,
                 a->loss,
                 a->dx,
                 a->part,
                 a->datt,
                 a->dqkv,
                 a->kv_mine,
                 a->kv_all,
                 a->dkv,
                 a->mlp_y,
                 a->mlp_dx,
                 a->zero_bias,
                 a->zero_bias_grad,
                 a->attention_scratch,
                 a->pmoe_scratch};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  free(a);
}
