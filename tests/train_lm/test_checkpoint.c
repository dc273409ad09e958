/* Checkpoints of a model: saved by some ranks and read by others, every number keeps its place and its bits. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "examples/train_lm/checkpoint.h"
#include "examples/train_lm/safetensors.h"
#include "train_lm/folder.h"

enum { VOCAB = 11 };

static struct folder f;

static int setup(void **state) {
  (void)state;
  f = folder_make();
  return 0;
}

static int teardown(void **state) {
  (void)state;
  folder_remove(&f);
  return 0;
}

static struct lm_config make_config(int ranks, const char *more) {
  struct lm_config cfg;
  struct lm_error err;
  config_init(&cfg);
  assert_int_equal(config_set_text(&cfg,
                                   "layers = 3\nhidden = 12\nheads = 2\ncontext = 8\nexperts = 0,5,6\ntopk = 2\n"
                                   "batch = 8\nmicro = 1\nresidual = gated\ndata = x\nthreads = 1",
                                   "test", &err),
                   0);
  assert_int_equal(config_set_text(&cfg, more, "test", &err), 0);
  if (config_check(&cfg, ranks, &err)) fail_msg("%s", err.text);
  return cfg;
}

/* The number that belongs at a place of the whole model, whichever ranks it is spread over. All bit patterns occur:
 * NaNs, infinities, denormals and zeros of both signs too. */
static uint32_t bits_at(const char *name, int kind, int64_t place) {
  uint64_t x = (uint64_t)place * 0x9e3779b97f4a7c15u + (uint64_t)kind;
  for (; *name; name++) x = (x ^ (unsigned char)*name) * 0x100000001b3u;
  x ^= x >> 29;
  static const uint32_t special[] = {0x80000000, 0, 0x7fc00001, 0xff800000, 1, 0x807fffff, 0x7f800000, 0x7fa00000};
  return x % 16 < 8 ? special[x % 16] : (uint32_t)(x >> 16);
}

static int64_t place_of(const struct lm_param *p, int64_t i) {
  struct lm_runs runs = param_runs(p);
  int64_t unit = runs.count * runs.length, first = p->num_global_experts > 0 ? p->first_expert : 0;
  return (first + i / unit) * runs.count * runs.stride + runs_place(&runs, i % unit);
}

static float *numbers_of(const struct lm_param *p, int kind) {
  return kind == 0 ? p->master : kind == 1 ? p->adam_m : p->adam_v;
}

static void fill(const struct lm_model *model) {
  for (int i = 0; i < model->num_params; i++)
    for (int kind = 0; kind < 3; kind++)
      for (int64_t j = 0; j < model->params[i].numel; j++) {
        uint32_t bits = bits_at(model->params[i].name, kind, place_of(&model->params[i], j));
        memcpy(&numbers_of(&model->params[i], kind)[j], &bits, sizeof bits);
      }
}

static void assert_filled(const struct lm_model *model) {
  for (int i = 0; i < model->num_params; i++)
    for (int kind = 0; kind < 3; kind++)
      for (int64_t j = 0; j < model->params[i].numel; j++) {
        uint32_t expected = bits_at(model->params[i].name, kind, place_of(&model->params[i], j)), got;
        memcpy(&got, &numbers_of(&model->params[i], kind)[j], sizeof got);
        if (got != expected)
          lm_fatal("%s, state %d, number %lld: bits %08x; %08x were expected", model->params[i].name, kind,
                   (long long)j, got, expected);
      }
}

struct job {
  const struct lm_config *cfg;
  const char *path, *says; /* says: NULL, or part of the sentence that loading must fail with */
};

static void save_body(struct lm_ranks *ranks, void *arg) {
  const struct job *job = arg;
  struct lm_model *model = model_create(job->cfg, VOCAB, ranks);
  struct lm_state state = {.seed = UINT64_MAX, .step = 1234567890123, .tokens_seen = 98765, .held_out_loss = 1.0 / 3};
  struct lm_error err;
  fill(model);
  config_write(job->cfg, state.config_text);
  int status = checkpoint_save(job->path, model, &state, ranks, &err);
  if (!job->says && status) lm_fatal("%s", err.text);
  if (job->says && (status == 0 || !strstr(err.text, job->says))) lm_fatal("saving says \"%s\"", err.text);
  model_destroy(model);
}

static void load_body(struct lm_ranks *ranks, void *arg) {
  const struct job *job = arg;
  struct lm_model *model = model_create(job->cfg, VOCAB, ranks);
  static const struct lm_state zero;
  struct lm_state state = zero;
  struct lm_error err;
  int status = checkpoint_load(job->path, model, &state, ranks, &err);
  if (job->says) {
    if (status == 0 || !strstr(err.text, job->says)) lm_fatal("\"%s\" was expected to say \"%s\"", err.text, job->says);
  } else {
    if (status) lm_fatal("%s", err.text);
    assert_filled(model);
    if (state.seed != UINT64_MAX || state.step != 1234567890123 || state.tokens_seen != 98765)
      lm_fatal("the state came back as seed %llu, step %lld", (unsigned long long)state.seed, (long long)state.step);
    if (fabs(state.held_out_loss - 1.0 / 3) > 0) lm_fatal("held-out loss %.17g", state.held_out_loss);
    if (!strstr(state.config_text, "experts = 0,5,6\n")) lm_fatal("settings %s", state.config_text);
  }
  model_destroy(model);
}

static void save(int ranks, const char *more, const char *path, const char *says) {
  struct lm_config cfg = make_config(ranks, more);
  ranks_run(&cfg, ranks, save_body, &(struct job){&cfg, path, says});
}

static void load(int ranks, const char *more, const char *path, const char *says) {
  struct lm_config cfg = make_config(ranks, more);
  ranks_run(&cfg, ranks, load_body, &(struct job){&cfg, path, says});
}

static const struct {
  int ranks;
  const char *more;
} splits[] = {
    {1, "ep = 1"},
    {2, "ep = 2"},
    {3, "ep = 3"},
    {4, "ep = 1"},
    {4, "ep = 2"},
    {4, "ep = 4"},
    {4, "ep = 1,4,2"},
    {8, "ep = 8"},
    {6, "ep = 6"},
    {8, "ep = 1,8,4"},
    {2, "tp = 2\nsp = 1"},
    {2, "pp = 2\nstages = 1,2"},
    {2, "cp = 2"},
    {2, "etp = 2"},
    {3, "pp = 3"},
    {4, "tp = 2\npp = 2\netp = 2"},
    {8, "tp = 2\ncp = 2\npp = 2\nep = 2\netp = 2"},
    {8, "tp = 2\nep = 4\netp = 2"},
    {6, "pp = 3\nep = 2"},
    {6, "etp = 3\nep = 2"},
};
enum { SPLITS = sizeof splits / sizeof *splits };

/* Files are equal whoever saved them (below), so each one has two readers. */
static void any_ranks_read_what_others_saved(void **state) {
  (void)state;
  for (int s = 0; s < SPLITS; s++) {
    int l = (s * 7 + 3) % SPLITS;
    const char *path = folder_path(&f, "split/" CHECKPOINT_NAME); /* the folder is made */
    save(splits[s].ranks, splits[s].more, path, NULL);
    load(splits[l].ranks, splits[l].more, folder_path(&f, "split"), NULL);
    load(splits[s].ranks, splits[s].more, path, NULL);
  }
}

static void the_file_does_not_depend_on_the_ranks(void **state) {
  (void)state;
  const char *first = folder_path(&f, "first"), *other = folder_path(&f, "other");
  save(1, "", first, NULL);
  for (int s = 1; s < SPLITS; s++) {
    char command[600];
    save(splits[s].ranks, splits[s].more, other, NULL);
    snprintf(command, sizeof command, "cmp '%s' '%s'", first, other);
    assert_int_equal(system(command), 0);
  }
}

static void bf16_has_float32_values(void **state) {
  (void)state;
  const char *path = folder_path(&f, "bf16");
  save(2, "dtype = bf16\nep = 2", path, NULL);
  load(1, "dtype = bf16", path, NULL);
  load(2, "dtype = fp32\nep = 1", path, NULL);
}

static void other_models_are_refused(void **state) {
  (void)state;
  const char *path = folder_path(&f, "model");
  save(1, "", path, NULL);
  load(1, "hidden = 16\n", path, "tensor embedding.token.weight has shape [11,12]; this model's is [11,16]");
  load(2, "context = 9\n", path, "embedding.position.weight has shape [8,12]; this model's is [9,12]");
  load(2, "experts = 0,5,8\n", path, "layers.2.moe.router.weight has shape [6,12]; this model's is [8,12]");
  load(1, "experts = 0,0,6\n", path, "has no tensor layers.1.mlp.fc1.weight");
  load(1, "residual = none\n", path, "this model has");
  load(2, "layers = 2\nexperts = 0,5\n", path, "this model has");
}

static void what_cannot_be_read_says_why(void **state) {
  (void)state;
  char text[LM_CONFIG_TEXT];
  struct lm_error err;
  const char *path = folder_path(&f, "good");
  save(1, "", path, NULL);
  assert_int_equal(checkpoint_config(path, text, &err), 0);
  assert_non_null(strstr(text, "hidden = 12\n"));
  load(3, "", folder_path(&f, "nowhere"), "nowhere: No such file or directory");
  load(2, "", f.path, CHECKPOINT_NAME ": No such file or directory");
  assert_int_equal(checkpoint_config(folder_path(&f, "nowhere"), text, &err), -1);

  FILE *file = fopen(path, "r+");
  fseek(file, -1, SEEK_END);
  int last = fgetc(file);
  fseek(file, -1, SEEK_END);
  fputc(last ^ 1, file);
  fclose(file);
  load(2, "", path, "good is damaged");

  struct safetensors held = {0};
  safetensors_add(&held, "a", 0, NULL);
  struct safetensors_writer *writer = safetensors_begin(path, &held, &err);
  assert_int_equal(safetensors_write(writer, &(float){0}, 1, &err) || safetensors_end(writer, &err), 0);
  safetensors_free(&held);
  load(1, "", path, "its step is \"missing\"");
  assert_int_equal(checkpoint_config(path, text, &err), -1);
  assert_non_null(strstr(err.text, "holds no settings"));
}

static void what_cannot_be_written_says_why(void **state) {
  (void)state;
  folder_write(&f, "file", "", 0);
  save(2, "ep = 2", folder_path(&f, "file/" CHECKPOINT_NAME), "Not a directory");
  save(1, "", folder_path(&f, "a/b/c"), "No such file or directory");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(any_ranks_read_what_others_saved), cmocka_unit_test(the_file_does_not_depend_on_the_ranks),
      cmocka_unit_test(bf16_has_float32_values),          cmocka_unit_test(other_models_are_refused),
      cmocka_unit_test(what_cannot_be_read_says_why),     cmocka_unit_test(what_cannot_be_written_says_why),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
