#include "floor.h"

#include <stdlib.h>
#include <string.h>

#include "layers.h"
#include "linear.h"

enum { RUNS = 5 };

struct operands {
  float *x, *weight, *y;
};

static void fill(float *to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = (float)(i % 13 - 6) / 64;
}

static void products(const struct operands *o, int64_t rows, int64_t in, int64_t out) {
  struct lm_linear size = {rows, in, out};
  linear_forward(size, o->y, o->x, o->weight, NULL);
  linear_backward_input(size, o->x, o->y, o->weight);
  linear_backward_weight(size, o->weight, NULL, o->y, o->x);
}

/* Rows and columns are this rank's shares. */
static void layer_products(const struct lm_model *model, const struct operands *o, int layer, int64_t tokens) {
  const struct lm_config *cfg = &model->cfg;
  int tp = model->ranks->at.tp, experts = cfg->experts.value[layer];
  int64_t hidden = cfg->hidden, inner = config_inner(cfg), width = hidden / tp;
  products(o, tokens, hidden, 3 * width);
  products(o, tokens, width, hidden);
  int64_t rows = experts ? tokens / tp * cfg->topk : tokens, part = experts ? inner / cfg->etp : inner / tp;
  int local = experts ? experts / config_layer_ep(cfg, layer, model->ranks->nranks) : 1;
  if (experts) rows *= cfg->etp; /* from the neighbours that hold the other shards */
  for (int e = 0; e < local; e++) {
    int64_t share = rows * (e + 1) / local - rows * e / local;
    products(o, share, hidden, part);
    products(o, share, part, hidden);
  }
  if (!experts || cfg->residual == PMOE_MIX_NONE) return;
  products(o, tokens, hidden, inner / tp);
  products(o, tokens, inner / tp, hidden);
}

static void run(const struct lm_model *model, const struct operands *o, int64_t tokens) {
  for (int c = 0; c < model->num_chunks; c++) {
    const struct lm_chunk *chunk = &model->chunks[c];
    for (int i = 0; i < chunk->num_layers; i++) layer_products(model, o, chunk->first_layer + i, tokens);
    if (chunk->final_norm_weight) products(o, tokens / model->ranks->at.tp, model->cfg.hidden, model->vocab);
  }
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

struct lm_floor gemm_floor(struct lm_model *model, int micro_batches) {
  const struct lm_config *cfg = &model->cfg;
  int64_t tokens = model->acts->max_tokens, hidden = cfg->hidden, widest = config_inner(cfg);
  if (widest < 3 * hidden) widest = 3 * hidden;
  if (widest < model->vocab) widest = model->vocab;
  int64_t rows = tokens * cfg->topk * cfg->etp;
  struct operands o = {lm_alloc((size_t)(rows * widest), sizeof(float)),
                       lm_alloc((size_t)(hidden * widest), sizeof(float)),
                       lm_alloc((size_t)(rows * widest), sizeof(float))};
  double seconds[RUNS], cpu_seconds[RUNS];
  for (int i = -1; i < RUNS; i++) { /* one to warm up */
    fill(o.x, rows * widest);
    fill(o.weight, hidden * widest);
    LM_TRY(pmoe_comm_barrier(model->ranks->world));
    double since = lm_now(), cpu_since = lm_cpu_now();
    run(model, &o, tokens);
    if (i < 0) continue;
    seconds[i] = lm_now() - since;
    cpu_seconds[i] = lm_cpu_now() - cpu_since;
  }
  qsort(seconds, RUNS, sizeof *seconds, compare);
  qsort(cpu_seconds, RUNS, sizeof *cpu_seconds, compare);
  free(o.x);
  free(o.weight);
  free(o.y);
  return (struct lm_floor){seconds[RUNS / 2] * micro_batches, cpu_seconds[RUNS / 2] * micro_batches};
}
