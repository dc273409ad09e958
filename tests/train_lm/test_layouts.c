/* Training in any layout gives what one rank gets: losses, the gradient of every parameter and its norm at each step,
 * and the parameters in the end, with different tokens on every data-parallel rank. `test_layouts CASES [SEED]` runs as
 * many random layouts as asked. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "examples/train_lm/batches.h"
#include "examples/train_lm/layers.h"
#include "examples/train_lm/model.h"
#include "examples/train_lm/optimizer.h"

enum { VOCAB = 13, TOKENS = 2000, STEPS = 3, MOST_PARAMS = 256, MOST_EXPERTS = 64 };
static const float rate = 0.5f;

/* What one rank gets. */
struct reference {
  double loss[STEPS], aux[STEPS], norm[STEPS], held_out;
  double expert_count[STEPS][MOST_EXPERTS];
  int count;
  struct whole {
    char name[64];
    int64_t numel;
    float *grad[STEPS], *value; /* value: after the last step */
  } param[MOST_PARAMS];
};

struct job {
  const struct lm_config *cfg;
  const char *what;
  const struct lm_data *data;
  struct reference *reference;
  int record; /* 1: this run is the reference */
};

/* Tokens of which each depends on those before it. */
static struct lm_data make_data(uint8_t *text) {
  for (uint32_t i = 0, x = 7; i < TOKENS; i++) {
    x = x * 1664525u + 1013904223u;
    text[i] = (uint8_t)(i > 1 && x >> 30 ? (text[i - 1] + text[i - 2]) % VOCAB : (x >> 20) % VOCAB);
  }
  struct lm_data data = {.num_files = 1, .bytes = 1, .vocab = VOCAB, .tokens = TOKENS, .train = 1500, .held_out = 500};
  data.files = lm_alloc(1, sizeof *data.files);
  data.files[0].map = text;
  return data;
}

/* ---- comparing ---- */

static struct whole *find(struct reference *reference, const char *name) {
  for (int i = 0; i < reference->count; i++)
    if (strcmp(reference->param[i].name, name) == 0) return &reference->param[i];
  lm_fatal("%s is no parameter of the reference", name);
}

static void compare_number(const struct job *job, int step, const char *name, double got, double expected) {
  if (!(fabs(got - expected) <= 2e-5 * fabs(expected)))
    lm_fatal("%s: step %d: %s is %.9g; %.9g was expected", job->what, step, name, got, expected);
}

/* A rank's part against its place in the whole, in units of the whole's root mean square. */
static void compare_part(const struct job *job, int step, const struct lm_param *p, const float *got,
                         const float *expected, int64_t numel, const char *kind) {
  double square = 0;
  for (int64_t i = 0; i < numel; i++) square += (double)expected[i] * (double)expected[i];
  double allowed = 3e-4 * sqrt(square / (double)numel) + 1e-7;
  struct lm_runs runs = param_runs(p);
  int64_t unit = runs.count * runs.length, whole = runs.count * runs.stride;
  int64_t first = p->num_global_experts > 0 ? p->first_expert * whole : 0;
  for (int64_t i = 0; i < p->numel; i++) {
    int64_t place = first + i / unit * whole + runs_place(&runs, i % unit);
    if (!(fabs((double)got[i] - (double)expected[place]) <= allowed))
      lm_fatal("%s: step %d: %s of %s at %lld is %.9g; %.9g was expected within %.3g", job->what, step, kind, p->name,
               (long long)place, (double)got[i], (double)expected[place], allowed);
  }
}

static float *copy(const float *from, int64_t n) {
  return memcpy(lm_alloc((size_t)n, sizeof *from), from, (size_t)n * sizeof *from);
}

static void meet_params(const struct job *job, const struct lm_model *model, int step) {
  struct reference *reference = job->reference;
  for (int i = 0; i < model->num_params; i++) {
    const struct lm_param *p = &model->params[i];
    if (!job->record) {
      const struct whole *whole = find(reference, p->name);
      if (step < STEPS) compare_part(job, step, p, p->grad, whole->grad[step], whole->numel, "gradient");
      else compare_part(job, step, p, p->master, whole->value, whole->numel, "value");
      continue;
    }
    struct whole *whole = &reference->param[i];
    snprintf(whole->name, sizeof whole->name, "%s", p->name);
    whole->numel = p->numel;
    *(step < STEPS ? &whole->grad[step] : &whole->value) = copy(step < STEPS ? p->grad : p->master, p->numel);
    reference->count = model->num_params;
  }
}

/* ---- a run: a few steps of gradient descent with clipping ---- */

static void step(const struct job *job, struct lm_model *model, struct lm_batches *batches, int n) {
  struct reference *reference = job->reference;
  double wire[3 + MOST_EXPERTS] = {0};
  struct lm_sums sums = {.expert_count = wire + 3};
  struct lm_feed feed = batches_of_step(batches, &model->ranks->at, (uint64_t)n);
  gradients_zero(model);
  model_train(model, &feed, (uint64_t)n, 0, &sums);
  wire[0] = sums.loss, wire[1] = sums.aux + sums.z, wire[2] = sums.tokens;
  ranks_sum(model->ranks->world, wire, 3 + model->num_experts_listed);
  if (wire[2] != (double)job->cfg->batch * job->cfg->context) lm_fatal("%s: %g tokens", job->what, wire[2]);
  gradients_reduce(model, (float)(1 / wire[2]));
  double norm = gradients_norm(model);
  if (job->record) {
    reference->loss[n] = wire[0], reference->aux[n] = wire[1], reference->norm[n] = norm;
    memcpy(reference->expert_count[n], sums.expert_count, sizeof reference->expert_count[n]);
  }
  compare_number(job, n, "loss", wire[0], reference->loss[n]);
  compare_number(job, n, "aux loss", wire[1], reference->aux[n]);
  compare_number(job, n, "gradient norm", norm, reference->norm[n]);
  for (int e = 0; e < model->num_experts_listed; e++)
    compare_number(job, n, "load", sums.expert_count[e], reference->expert_count[n][e]);
  meet_params(job, model, n);
  float clip = norm > 0.1 ? (float)(0.1 / norm) : 1.0f; /* clips, so that a wrong norm shows in the values too */
  for (int i = 0; i < model->num_params; i++)
    for (int64_t j = 0; j < model->params[i].numel; j++)
      model->params[i].master[j] -= rate * clip * model->params[i].grad[j];
  model_round_params(model);
}

static void body(struct lm_ranks *ranks, void *arg) {
  const struct job *job = arg;
  struct lm_model *model = model_create(job->cfg, VOCAB, ranks);
  struct lm_batches batches;
  batches_create(&batches, job->cfg, job->data);
  for (int n = 0; n < STEPS; n++) step(job, model, &batches, n);
  meet_params(job, model, STEPS);
  struct lm_feed feed = batches_held_out(&batches, &ranks->at, 7);
  double held_out = model_loss(model, &feed);
  ranks_sum(ranks->world, &held_out, 1);
  if (job->record) job->reference->held_out = held_out;
  compare_number(job, STEPS, "held-out loss", held_out, job->reference->held_out);
  batches_destroy(&batches);
  model_destroy(model);
}

static void free_reference(struct reference *reference) {
  for (int i = 0; i < reference->count; i++) {
    free(reference->param[i].value);
    for (int n = 0; n < STEPS; n++) free(reference->param[i].grad[n]);
  }
  free(reference);
}

static const char common[] = "hidden = 16\nheads = 4\ncontext = 24\ninner = 24\nthreads = 1\ndata = x\nwarmup = 0\n";

static struct lm_config settings(const char *model, const char *layout, int ranks) {
  struct lm_config cfg;
  struct lm_error err;
  config_init(&cfg);
  int status = config_set_text(&cfg, common, "common", &err) || config_set_text(&cfg, model, model, &err) ||
               config_set_text(&cfg, layout, layout, &err) || config_check(&cfg, ranks, &err);
  if (status) fail_msg("%s", err.text);
  return cfg;
}

static struct reference *make_reference(const char *model, const struct lm_data *data) {
  struct lm_config cfg = settings(model, "", 1);
  struct job job = {&cfg, "one rank", data, lm_alloc(1, sizeof *job.reference), 1};
  ranks_run(&cfg, 1, body, &job);
  return job.reference;
}

static void run_layout(const char *model, const char *layout, int ranks, const struct lm_data *data,
                       struct reference *reference) {
  struct lm_config cfg = settings(model, layout, ranks);
  char what[1100];
  snprintf(what, sizeof what, "%d ranks, %s, %s", ranks, layout, model);
  for (char *c = what; *c; c++) *c = *c == '\n' ? ' ' : *c;
  ranks_run(&cfg, ranks, body, &(struct job){&cfg, what, data, reference, 0});
}

/* ---- tests ---- */

static const struct {
  int ranks;
  const char *layout;
} layouts[] = {
    {2, "tp = 2"},
    {2, "tp = 2\nsp = 1"},
    {2, "cp = 2"},
    {3, "cp = 3"},
    {2, "pp = 2"},
    {2, "etp = 2"},
    {2, "ep = 2"},
    {4, "tp = 2\ncp = 2"},
    {4, "tp = 4\nsp = 1\netp = 2"},
    {4, "cp = 4\nep = 4"},
    {4, "pp = 4\nschedule = gpipe"},
    {4, "pp = 4"},
    {4, "pp = 2\nep = 2\nstages = 4,1"},
    {4, "pp = 2\nschedule = interleaved"},
    {2, "pp = 2\nschedule = interleaved\nstages = 1,2,1,1"},
    {6, "tp = 2\ncp = 3\nsp = 1"},
    {8, "tp = 2\ncp = 2\npp = 2\nsp = 1\nep = 2\netp = 2"},
    {8, "tp = 2\npp = 2\nep = 2\netp = 2"},
    {8, "tp = 4\nep = 4\netp = 2"},
    {8, "cp = 2\npp = 2\nep = 1,4,1,2,1\nschedule = gpipe"},
    {8, "pp = 4\ntp = 2\nsp = 1\netp = 2"},
    {4, "ep = 1,2,4,4,1"},
};

static void every_layout(const char *model) {
  static uint8_t text[TOKENS];
  struct lm_data data = make_data(text);
  struct reference *reference = make_reference(model, &data);
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
    run_layout(model, layouts[i].layout, layouts[i].ranks, &data, reference);
  free_reference(reference);
  free(data.files);
}

static void a_pyramid_with_residuals(void **state) {
  (void)state;
  every_layout("layers = 5\nexperts = 0,5,0,4,0\ntopk = 2\nresidual = learned\nbatch = 16\nmicro = 2\naux = 0.1");
}

/* The last micro-batch is smaller, and some ranks have none for it. */
static void all_experts_and_uneven_batches(void **state) {
  (void)state;
  every_layout("layers = 5\nexperts = 4\ntopk = 1\nresidual = none\nbatch = 13\nmicro = 3\nseed = 5");
}

static void no_experts(void **state) {
  (void)state;
  every_layout("layers = 5\nexperts = 0\nbatch = 8\nmicro = 1\nseed = 3");
}

/* ---- random ones ---- */

static uint32_t draw(uint64_t *state, uint32_t below) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 33) % below;
}

static int draw_divisor(uint64_t *state, int of) {
  int d;
  do d = 1 + (int)draw(state, (uint32_t)of);
  while (of % d);
  return d;
}

static void draw_list(uint64_t *state, char *text, int count, int least, int most) {
  for (int i = 0; i < count; i++)
    text += sprintf(text, "%s%d", i ? "," : "", least + (int)draw(state, (uint32_t)(most - least + 1)));
}

/* Layers of each of `count` stages. */
static void draw_stages(uint64_t *state, char *text, int layers, int count) {
  for (int i = 0; i < count; i++) {
    int left = layers - (count - 1 - i), mine = i + 1 < count ? 1 + (int)draw(state, (uint32_t)left) : layers;
    text += sprintf(text, "%s%d", i ? "," : "", mine);
    layers -= mine;
  }
}

static void random_layout(uint64_t seed, const struct lm_data *data) {
  static const char *const mixes[] = {"none", "learned", "sum", "gated"}, *const orders[] = {"1f1b", "gpipe"};
  static const int widths[] = {1, 2, 4}, contexts[] = {1, 1, 2, 3};
  char model[512], layout[512], list[64];
  uint64_t state = seed * 2654435761u + 12345;
  int layers = 1 + (int)draw(&state, 5), tp = widths[draw(&state, 3)], cp = contexts[draw(&state, 4)], topk;
  int pp = 1 + (int)draw(&state, (uint32_t)(layers < 3 ? layers : 3)), ranks = tp * cp * pp, dp = 1;
  while (ranks * (dp + 1) <= 8 && draw(&state, 3)) dp++;
  ranks *= dp;
  int etp = draw_divisor(&state, ranks / pp), micro = 1 + (int)draw(&state, 3);
  draw_list(&state, list, layers, 3, 8);
  for (char *c = list; *c; c++) /* some layers without experts */
    if (*c != ',' && draw(&state, 3) == 0) *c = '0';
  topk = 1 + (int)draw(&state, 3);
  snprintf(model, sizeof model,
           "layers = %d\nexperts = %s\ntopk = %d\nresidual = %s\nmicro = %d\nbatch = %d\nseed = %u", layers, list, topk,
           mixes[draw(&state, 4)], micro, micro * dp + (int)draw(&state, 6), draw(&state, 1000));
  int length = snprintf(layout, sizeof layout, "tp = %d\ncp = %d\npp = %d\netp = %d\nep = %d\nsp = %d\n", tp, cp, pp,
                        etp, draw_divisor(&state, ranks / pp / etp), tp > 1 && draw(&state, 2));
  int chunks = pp > 1 && layers >= 2 * pp && draw(&state, 2) ? 2 : 1;
  draw_stages(&state, list, layers, pp * chunks);
  snprintf(layout + length, sizeof layout - (size_t)length, "stages = %s\nschedule = %s", list,
           chunks > 1 ? "interleaved" : orders[draw(&state, 2)]);
  struct reference *reference = make_reference(model, data);
  run_layout(model, layout, ranks, data, reference);
  free_reference(reference);
}

static int random_cases = 12;
static uint64_t random_seed = 1;

static void random_layouts(void **unused) {
  (void)unused;
  static uint8_t text[TOKENS];
  struct lm_data data = make_data(text);
  for (int i = 0; i < random_cases; i++) random_layout(random_seed + (uint64_t)i, &data);
  free(data.files);
  printf("%d random layouts, seeds %llu to %llu\n", random_cases, (unsigned long long)random_seed,
         (unsigned long long)random_seed + (unsigned long long)random_cases - 1);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_pyramid_with_residuals),
      cmocka_unit_test(all_experts_and_uneven_batches),
      cmocka_unit_test(no_experts),
      cmocka_unit_test(random_layouts),
  };
  if (argc > 1) random_cases = atoi(argv[1]);
  if (argc > 2) random_seed = strtoull(argv[2], NULL, 10);
  const struct CMUnitTest random[] = {cmocka_unit_test(random_layouts)};
  if (argc > 1) return cmocka_run_group_tests(random, NULL, NULL);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
