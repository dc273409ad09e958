/* Models whose layers are spread over pipeline stages, in the orders of calls of the usual schedules, against the same
 * model computed layer after layer. Layers are a pyramid: they differ in experts and in expert-parallel size. Some do
 * nothing, and stages that have only those make no collective call. Activations go from stage to stage through memory
 * that the ranks share, so the ranks are threads. */
#include "ranks/layout.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { LAYERS = 8, BATCHES = 4, MOST_CHUNKS = 8, HIDDEN = 12, TOKENS = 5, PLACES = 8 };

typedef enum schedule { GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE } schedule;

typedef struct pipe_case {
  const char *name;
  layout layout;
  schedule schedule;
  int32_t chunks;           /* of layers in each stage */
  int32_t cut[MOST_CHUNKS]; /* layers of chunk 0, 1, ...; chunk i is on stage i % pp */
  uint32_t moe;             /* bit l: layer l is a layer of experts */
} pipe_case;

/* ---- what ranks hand each other ---- */

typedef struct mailbox {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  bool full[2][MOST_CHUNKS + 1][BATCHES][PLACES]; /* activations and their gradients, before each chunk */
  float rows[2][MOST_CHUNKS + 1][BATCHES][PLACES][PLACES * TOKENS * HIDDEN];
} mailbox;

static void post(mailbox *box, int way, int chunk, int batch, int32_t place, const float *rows, size_t n) {
  pthread_mutex_lock(&box->mutex);
  memcpy(box->rows[way][chunk][batch][place], rows, n * sizeof *rows);
  box->full[way][chunk][batch][place] = true;
  pthread_cond_broadcast(&box->changed);
  pthread_mutex_unlock(&box->mutex);
}

/* Number of failures: 1 if nothing comes. */
static int receive(mailbox *box, int way, int chunk, int batch, int32_t place, float *rows, size_t n) {
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += 30;
  int failures = 0;
  pthread_mutex_lock(&box->mutex);
  while (!box->full[way][chunk][batch][place] && !failures)
    CHECK(failures, pthread_cond_timedwait(&box->changed, &box->mutex, &end) == 0, "chunk %d, batch %d", chunk, batch);
  memcpy(rows, box->rows[way][chunk][batch][place], n * sizeof *rows);
  pthread_mutex_unlock(&box->mutex);
  return failures;
}

typedef struct pipe_run {
  pipe_case c;
  mailbox box;
} pipe_run;

/* ---- the model ---- */

static bool is_moe(const pipe_case *c, int layer) { return (c->moe >> layer & 1) != 0; }

static rig_spec spec_of(const pipe_case *c, int layer) {
  rig_spec spec = rig_spec_default();
  spec.layer_id = layer;
  spec.gate.num_experts = 2 + layer;
  spec.experts.act = layer % 2 ? PMOE_ACT_SWIGLU : PMOE_ACT_GELU;
  spec.residual.mix = layer % 3 ? PMOE_MIX_SUM : PMOE_MIX_LEARNED;
  spec.residual.inner = 8;
  spec.ep = layer < LAYERS / 2 ? 1 : c->layout.ep;
  return spec;
}

typedef struct stage {
  pipe_run *run;
  const pipe_case *c;
  layout_place place;
  int32_t here;             /* index of this stage */
  int32_t replicas, tokens; /* ranks that are handed the same tokens; how many this rank is handed */
  rig rig[LAYERS];
  pmoe_stash *stash[LAYERS][BATCHES];
  float *x[LAYERS + 1][BATCHES];
  float *dy[LAYERS + 1][BATCHES]; /* of the output of layer l - 1 */
} stage;

static int first_layer(const pipe_case *c, int chunk) {
  int first = 0;
  for (int i = 0; i < chunk; i++) first += c->cut[i];
  return first;
}

static pmoe_mat mat_of(const stage *s, float *data) { return (pmoe_mat){data, PMOE_F32, s->tokens, HIDDEN, HIDDEN}; }
static size_t numbers(const stage *s) { return (size_t)(s->tokens * HIDDEN); }

/* The tokens of the whole stage, of which each rank is handed some. */
static void random_rows(const stage *s, uint64_t seed, int batch, double *all) {
  oracle_fill(all, s->place.sources * TOKENS * HIDDEN, seed * 100 + (uint64_t)batch, 1.0);
  for (int64_t i = 0; i < s->place.sources * TOKENS * HIDDEN; i++) all[i] = test_round(all[i], PMOE_F32);
}

static int64_t first_row(const stage *s) { return s->place.source / s->replicas * s->replicas * TOKENS; }

static void take_rows(const stage *s, uint64_t seed, int batch, float *to) {
  double *all = malloc((size_t)s->place.sources * TOKENS * HIDDEN * sizeof *all);
  random_rows(s, seed, batch, all);
  for (size_t i = 0; i < numbers(s); i++) to[i] = (float)all[first_row(s) * HIDDEN + (int64_t)i];
  free(all);
}

/* ---- calls ---- */

static int forward(stage *s, int chunk, int m) {
  int failures = 0, first = first_layer(s->c, chunk), end = first + s->c->cut[chunk];
  if (chunk == 0) take_rows(s, 1, m, s->x[0][m]);
  else failures += receive(&s->run->box, 0, chunk, m, s->place.source, s->x[first][m], numbers(s));
  for (int l = first; l < end && !failures; l++) {
    pmoe_mat x = mat_of(s, s->x[l][m]), y = mat_of(s, s->x[l + 1][m]);
    pmoe_step step = PMOE_CONFIG_INIT(pmoe_step);
    step.training = 1;
    pmoe_status status = PMOE_OK;
    if (is_moe(s->c, l)) status = pmoe_layer_forward(s->rig[l].layer, s->stash[l][m], &step, &x, &y, NULL);
    else memcpy(y.data, x.data, numbers(s) * sizeof(float));
    CHECK(failures, status == PMOE_OK, "layer %d: %s", l, pmoe_last_error());
  }
  if (end < LAYERS) post(&s->run->box, 0, chunk + 1, m, s->place.source, s->x[end][m], numbers(s));
  return failures;
}

static int backward(stage *s, int chunk, int m, pmoe_bwd which) {
  int failures = 0, first = first_layer(s->c, chunk), end = first + s->c->cut[chunk];
  bool weight = which == PMOE_BWD_WEIGHT;
  if (end == LAYERS) take_rows(s, 2, m, s->dy[LAYERS][m]);
  else if (!weight) failures += receive(&s->run->box, 1, chunk + 1, m, s->place.source, s->dy[end][m], numbers(s));
  for (int l = end - 1; l >= first && !failures; l--) {
    pmoe_mat dy = mat_of(s, s->dy[l + 1][m]), dx = mat_of(s, s->dy[l][m]);
    pmoe_status status = PMOE_OK;
    if (is_moe(s->c, l))
      status = pmoe_layer_backward(s->rig[l].layer, s->stash[l][m], 1.0f, &dy, weight ? NULL : &dx, which, NULL);
    else if (!weight) memcpy(dx.data, dy.data, numbers(s) * sizeof(float));
    CHECK(failures, status == PMOE_OK, "layer %d: %s", l, pmoe_last_error());
  }
  if (chunk > 0 && !weight) post(&s->run->box, 1, chunk, m, s->place.source, s->dy[first][m], numbers(s));
  return failures;
}

/* ---- schedules ---- */

static int all_then_all(stage *s) {
  int failures = 0;
  for (int m = 0; m < BATCHES && !failures; m++) failures += forward(s, s->here, m);
  for (int m = 0; m < BATCHES && !failures; m++) failures += backward(s, s->here, m, PMOE_BWD_ALL);
  return failures;
}

/* One forward, one backward; with `split` parameter gradients wait until as many are left over as stages came before.
 */
static int one_and_one(stage *s, bool split) {
  int failures = 0, done = 0, warm = s->c->layout.pp - 1 - s->here;
  if (warm > BATCHES) warm = BATCHES;
  for (int m = 0; m < BATCHES + warm && !failures; m++) {
    if (m < BATCHES) failures += forward(s, s->here, m);
    int back = m - warm;
    if (back < 0) continue;
    if (!failures) failures += backward(s, s->here, back, split ? PMOE_BWD_INPUT : PMOE_BWD_ALL);
    if (split && !failures && back - done >= s->here) failures += backward(s, s->here, done++, PMOE_BWD_WEIGHT);
  }
  for (; split && done < BATCHES && !failures; done++) failures += backward(s, s->here, done, PMOE_BWD_WEIGHT);
  return failures;
}

/* Virtual micro-batches: pp micro-batches of one chunk, then of the next. */
static int call_virtual(stage *s, int v, bool back) {
  int pp = s->c->layout.pp, chunks = s->c->chunks, local = v / pp % chunks, m = v / (pp * chunks) * pp + v % pp;
  if (back) return backward(s, (chunks - 1 - local) * pp + s->here, m, PMOE_BWD_ALL);
  return forward(s, local * pp + s->here, m);
}

static int interleaved(stage *s) {
  int failures = 0, pp = s->c->layout.pp, total = BATCHES * s->c->chunks;
  int warm = (pp - s->here - 1) * 2 + (s->c->chunks - 1) * pp;
  if (warm > total) warm = total;
  for (int v = 0; v < total + warm && !failures; v++) {
    if (v < total) failures += call_virtual(s, v, false);
    if (v >= warm && !failures) failures += call_virtual(s, v - warm, true);
  }
  return failures;
}

static int run_schedule(stage *s) {
  switch (s->c->schedule) {
  case GPIPE: return all_then_all(s);
  case ONE_F_ONE_B: return one_and_one(s, false);
  case ZERO_BUBBLE: return one_and_one(s, true);
  default: return interleaved(s);
  }
}

/* ---- reference ---- */

/* One micro-batch through all layers and back, by every rank for itself. */
static void reference_batch(const stage *s, oracle_model **model, int m) {
  int64_t n = s->place.sources * TOKENS;
  int64_t rank_tokens[PLACES];
  for (int32_t i = 0; i < s->place.sources; i++) rank_tokens[i] = TOKENS;
  double *x[LAYERS + 1], *dy = malloc((size_t)(n * HIDDEN) * sizeof *dy);
  for (int l = 0; l <= LAYERS; l++) x[l] = malloc((size_t)(n * HIDDEN) * sizeof **x);
  random_rows(s, 1, m, x[0]);
  random_rows(s, 2, m, dy);
  oracle_batch batch = {.tokens = n,
                        .num_ranks = s->place.sources,
                        .rank_tokens = rank_tokens,
                        .loss_group = s->place.loss_group,
                        .training = 1,
                        .loss_scale = 1.0};
  for (int pass = 0; pass < 2; pass++)
    for (int i = 0; i < LAYERS; i++) {
      int l = pass == 0 ? i : LAYERS - 1 - i;
      batch.x = x[l];
      batch.dy = pass == 0 ? NULL : dy;
      oracle_result *result = model[l] ? oracle_run(model[l], &batch) : NULL;
      if (pass == 0) memcpy(x[l + 1], result ? result->y : x[l], (size_t)(n * HIDDEN) * sizeof **x);
      else if (result) memcpy(dy, result->dx, (size_t)(n * HIDDEN) * sizeof *dy);
      oracle_result_destroy(result);
    }
  for (int l = 0; l <= LAYERS; l++) free(x[l]);
  free(dy);
}

/* Takes the reference's gradients into this rank's layers, and compares them there. */
static int check_gradients(stage *s) {
  int failures = 0;
  oracle_model *model[LAYERS] = {NULL};
  for (int l = 0; l < LAYERS; l++) {
    rig_spec spec = spec_of(s->c, l);
    if (!is_moe(s->c, l)) continue;
    model[l] = oracle_model_create(HIDDEN, &spec.gate, &spec.experts, &spec.residual);
    oracle_model_fill(model[l], 7 + (uint64_t)l);
    for (int t = 0; t < ORACLE_TENSORS; t++)
      for (int64_t i = 0; i < model[l]->tensor[t].numel; i++)
        model[l]->tensor[t].data[i] = test_round(model[l]->tensor[t].data[i], PMOE_F32);
  }
  for (int m = 0; m < BATCHES; m++) reference_batch(s, model, m);
  for (int l = 0; l < LAYERS; l++) {
    char label[64];
    snprintf(label, sizeof label, "%s, layer %d", s->c->name, l);
    rig *r = &s->rig[l];
    for (int t = 0; r->layer && t < ORACLE_TENSORS; t++)
      memcpy(r->model->tensor[t].grad, model[l]->tensor[t].grad, (size_t)r->model->tensor[t].numel * sizeof(double));
    if (r->layer) failures += rig_check_grads(r, 0.125, label) + rig_check_sumsq(r, 0.125);
    oracle_model_destroy(model[l]);
  }
  return failures;
}

/* ---- a rank ---- */

static int open_layers(stage *s, world *w, pmoe_topology *topology) {
  int failures = 0;
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = s->tokens;
  cfg.split_backward = s->c->schedule == ZERO_BUBBLE;
  for (int chunk = s->here; chunk < s->c->layout.pp * s->c->chunks; chunk += s->c->layout.pp)
    for (int l = first_layer(s->c, chunk); l < first_layer(s->c, chunk + 1) && !failures; l++) {
      if (!is_moe(s->c, l)) continue;
      rig_spec spec = spec_of(s->c, l);
      spec.slack = 4.0; /* errors grow from layer to layer */
      CHECK(failures, rig_create(&s->rig[l], w->ctx, topology, &spec) == PMOE_OK, "%s", pmoe_last_error());
      for (int m = 0; m < BATCHES && !failures; m++)
        CHECK(failures, pmoe_stash_create(s->rig[l].layer, &cfg, NULL, 0, &s->stash[l][m]) == PMOE_OK, "%s",
              pmoe_last_error());
    }
  for (int l = 0; l <= LAYERS; l++)
    for (int m = 0; m < BATCHES; m++) {
      s->x[l][m] = malloc(numbers(s) * sizeof(float));
      s->dy[l][m] = malloc(numbers(s) * sizeof(float));
    }
  return failures;
}

static void close_layers(stage *s) {
  for (int l = 0; l <= LAYERS; l++)
    for (int m = 0; m < BATCHES; m++) {
      free(s->x[l][m]);
      free(s->dy[l][m]);
      if (l < LAYERS) pmoe_stash_destroy(s->stash[l][m]);
    }
  for (int l = 0; l < LAYERS; l++)
    if (s->rig[l].layer) rig_destroy(&s->rig[l]);
}

static int run_rank(world *w) {
  stage *s = calloc(1, sizeof *s);
  s->run = (pipe_run *)w->arg;
  s->c = &s->run->c;
  pmoe_topology *topology = NULL;
  int failures = layout_topology(w, &s->c->layout, &topology, &s->place);
  s->here = s->place.stage_of_pipeline;
  s->replicas = s->place.tp > 1 && !s->c->layout.sp ? s->place.tp : 1;
  s->tokens = TOKENS * s->replicas;
  if (!failures) failures += open_layers(s, w, topology);
  if (!failures) failures += run_schedule(s);
  for (int l = 0; l < LAYERS && !failures; l++)
    if (s->rig[l].layer)
      CHECK(failures, pmoe_layer_reduce_grads(s->rig[l].layer, 0.125f, NULL) == PMOE_OK, "%s", pmoe_last_error());
  if (!failures) failures += check_gradients(s);
  close_layers(s);
  pmoe_topology_destroy(topology);
  free(s);
  return failures;
}

#define ALL 0xffu
static const pipe_case cases[] = {
    {"6 + 2, gpipe", {4, 1, 1, 2, 2, 1, 0, NULL}, GPIPE, 1, {6, 2}, 0xaa},
    {"6 + 2, 1F1B", {4, 1, 1, 2, 2, 1, 0, NULL}, ONE_F_ONE_B, 1, {6, 2}, 0xaa},
    {"6 + 2, zero bubble", {4, 1, 1, 2, 2, 1, 0, NULL}, ZERO_BUBBLE, 1, {6, 2}, 0xaa},
    {"5 + 1 + 1 + 1, 1F1B", {4, 1, 1, 4, 1, 1, 0, NULL}, ONE_F_ONE_B, 1, {5, 1, 1, 1}, ALL},
    {"a stage without experts, 1F1B", {8, 2, 1, 4, 2, 1, 0, NULL}, ONE_F_ONE_B, 1, {2, 2, 2, 2}, 0xcf},
    {"a stage without experts, zero bubble", {8, 1, 2, 4, 2, 1, 0, NULL}, ZERO_BUBBLE, 1, {2, 2, 2, 2}, 0xcf},
    {"TP and ETP, zero bubble", {8, 2, 1, 2, 2, 2, 0, NULL}, ZERO_BUBBLE, 1, {3, 5}, 0xb6},
    {"TP with SP, 1F1B", {8, 2, 1, 2, 2, 2, 1, NULL}, ONE_F_ONE_B, 1, {3, 5}, 0xb6},
    {"two chunks, interleaved", {4, 1, 1, 2, 2, 1, 0, NULL}, INTERLEAVED, 2, {3, 1, 2, 2}, 0xdb},
    {"two chunks of four stages, interleaved",
     {8, 2, 1, 4, 2, 1, 1, NULL},
     INTERLEAVED,
     2,
     {1, 1, 1, 1, 1, 1, 1, 1},
     0x5a},
    {"four chunks, interleaved", {4, 2, 1, 2, 1, 2, 0, NULL}, INTERLEAVED, 4, {1, 1, 1, 1, 1, 1, 1, 1}, 0xed},
};

static void test_schedules(void **state) {
  (void)state;
  if (ranks_are_processes()) return;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    pipe_run *run = calloc(1, sizeof *run);
    run->c = cases[i];
    pthread_mutex_init(&run->box.mutex, NULL);
    pthread_cond_init(&run->box.changed, NULL);
    world_run(run->c.layout.world, run_rank, run);
    pthread_mutex_destroy(&run->box.mutex);
    pthread_cond_destroy(&run->box.changed);
    free(run);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_schedules)};
  return world_main("pipelines", tests, 1);
}
