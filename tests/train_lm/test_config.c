/* Settings: what they accept, what they say about what they do not, and that they survive being written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "examples/train_lm/config.h"

static struct lm_config fresh(void) {
  struct lm_config cfg;
  config_init(&cfg);
  strcpy(cfg.data, "text");
  return cfg;
}

static void set(struct lm_config *cfg, const char *key, const char *value) {
  struct lm_error err;
  if (config_set(cfg, key, value, &err)) fail_msg("%s = %s: %s", key, value, err.text);
}

static void assert_says(int status, const struct lm_error *err, const char *part) {
  assert_int_equal(status, -1);
  if (!strstr(err->text, part)) fail_msg("\"%s\" does not say \"%s\"", err->text, part);
}

static void every_setting_is_read(void **state) {
  (void)state;
  struct lm_config cfg = fresh();
  set(&cfg, "layers", "3");
  set(&cfg, "experts", "0,4,0");
  set(&cfg, "ep", "1,auto,2");
  set(&cfg, "capacity", "1.25");
  set(&cfg, "residual", "gated");
  set(&cfg, "dtype", "bf16");
  set(&cfg, "seed", "18446744073709551615");
  set(&cfg, "out", "a folder");
  set(&cfg, "gemm-floor", "1");
  set(&cfg, "schedule", "gpipe");
  set(&cfg, "stages", "6,2");
  set(&cfg, "sp", "1");
  assert_int_equal(cfg.schedule, LM_GPIPE);
  assert_int_equal(cfg.stages.value[0], 6);
  assert_int_equal(cfg.sp, 1);
  assert_int_equal(cfg.layers, 3);
  assert_int_equal(cfg.experts.count, 3);
  assert_int_equal(cfg.experts.value[1], 4);
  assert_int_equal(cfg.ep.value[0], 1);
  assert_int_equal(cfg.ep.value[1], 0);
  assert_int_equal(cfg.ep.value[2], 2);
  assert_true(cfg.capacity == 1.25f);
  assert_int_equal(cfg.residual, PMOE_MIX_GATED_SUM);
  assert_int_equal(cfg.dtype, PMOE_BF16);
  assert_true(cfg.seed == UINT64_MAX);
  assert_string_equal(cfg.out, "a folder");
  assert_int_equal(cfg.gemm_floor, 1);
}

static void bad_values_are_named(void **state) {
  (void)state;
  static const struct {
    const char *key, *value, *says;
  } cases[] = {
      {"layers", "0", "layers is \"0\"; a whole number from 1 to 64 was expected"},
      {"layers", "65", "layers is \"65\""},
      {"layers", "2.5", "layers is \"2.5\""},
      {"layers", "", "layers is \"\""},
      {"hidden", "12x", "hidden is \"12x\""},
      {"lr", "nan", "lr is \"nan\""},
      {"lr", "-1", "lr is \"-1\"; a number from 0"},
      {"seed", "-1", "seed is \"-1\"; a whole number of 0 or more was expected"},
      {"seed", "18446744073709551616", "seed is"},
      {"experts", "0,,4", "experts is \"0,,4\"; up to 64 whole numbers with commas between, such as 0,4,0,8"},
      {"experts", "0,4,", "experts is \"0,4,\""},
      {"experts", "auto", "experts is \"auto\""},
      {"experts", "-1", "experts is \"-1\""},
      {"ep", "0", "ep is \"0\""},
      {"ep", "automatic", "or auto, were expected"},
      {"stages", "0,8", "stages is \"0,8\"; up to 64 whole numbers above 0 with commas between, such as 6,2, were"},
      {"tp", "0", "tp is \"0\"; a whole number from 1 to 1024 was expected"},
      {"sp", "yes", "sp is \"yes\"; a whole number from 0 to 1 was expected"},
      {"schedule", "1F1B", "schedule is \"1F1B\"; 1f1b, interleaved or gpipe was expected"},
      {"residual", "both", "residual is \"both\"; none, learned, sum or gated was expected"},
      {"dtype", "fp16", "dtype is \"fp16\"; fp32 or bf16 was expected"},
      {"colour", "red", "there is no setting \"colour\""},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct lm_config cfg = fresh(), before = cfg;
    struct lm_error err;
    assert_says(config_set(&cfg, cases[i].key, cases[i].value, &err), &err, cases[i].says);
    assert_memory_equal(&cfg, &before, sizeof cfg);
  }
}

static void what_does_not_go_together_is_named(void **state) {
  (void)state;
  static const struct {
    const char *text, *says;
    int nranks;
  } cases[] = {
      {"hidden = 30\nheads = 4", "hidden is 30; a multiple of the 4 heads was expected", 1},
      {"layers = 3\nexperts = 0,4", "experts has 2 numbers; one for each of the 3 layers", 1},
      {"layers = 2\nexperts = 4\nep = 1,1,1", "ep has 3 numbers", 1},
      {"layers = 2\nexperts = 0,4\ntopk = 5", "topk is 5; layer 1 has 4 experts only", 1},
      {"layers = 2\nexperts = 0,4\nep = 3", "ep is 3 in layer 1; a divisor of the 4 ranks was expected", 4},
      {"layers = 2\nexperts = 0,4\npp = 2\nep = 2\netp = 2",
       "ep is 2 in layer 1: ep x etp 4 was expected to divide the 2 ranks of a stage", 4},
      {"tp = 3", "tp x cp x pp is 3 x 1 x 1; a divisor of the 4 ranks was expected", 4},
      {"tp = 2\npp = 2\ncp = 2", "tp x cp x pp is 2 x 2 x 2; a divisor of the 4 ranks", 4},
      {"tp = 2\nheads = 1", "heads is 1; a multiple of tp 2 was expected", 2},
      {"tp = 2\ninner = 65", "inner is 65; a multiple of tp 2 was expected", 2},
      {"tp = 2\ncp = 2\ncontext = 30", "context is 30; a multiple of cp x tp 4 was expected", 4},
      {"sp = 1", "sp is set, and tp is 1; tp above 1 was expected", 2},
      {"etp = 3", "etp is 3; a divisor of the 4 ranks of a stage was expected", 4},
      {"pp = 4\nlayers = 3\nexperts = 0", "layers is 3; at least one for each of the 4 stages was expected", 4},
      {"pp = 2\nschedule = interleaved\nlayers = 3\nexperts = 0", "each of the 4 (twice pp) stages", 2},
      {"schedule = interleaved", "schedule is interleaved; pp above 1 was expected", 2},
      {"pp = 2\nstages = 1,1,2", "stages is 1,1,2, 3 numbers; as many as pp, 2, were expected", 2},
      {"pp = 2\nstages = 1,2", "stages is 1,2, 3 layers together; the model's 4 were expected", 2},
      {"pp = 2\nschedule = interleaved\nstages = 2,2",
       "stages is 2,2, 2 numbers; interleaved, twice, three times ... pp 2 were", 2},
      {"pp = 2\nschedule = interleaved\nstages = 1,1,2", "stages is 1,1,2, 3 numbers; interleaved, twice", 2},
      {"batch = 8\nmicro = 4\ntp = 2", "that is work for 2 of the 4 data-parallel ranks", 8},
      {"warmup = 11\nsteps = 10", "warmup is 11; at most the 10 steps were expected", 1},
      {"batch = 8\nmicro = 4", "batch is 8: in micro-batches of 4 sequences that is work for 2 of the 4 ranks", 4},
      {"data =", "data is missing", 1},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct lm_config cfg = fresh();
    struct lm_error err;
    assert_int_equal(config_set_text(&cfg, cases[i].text, "test", &err), 0);
    assert_says(config_check(&cfg, cases[i].nranks, &err), &err, cases[i].says);
  }
}

static void lists_of_one_stand_for_all_layers(void **state) {
  (void)state;
  struct lm_config cfg = fresh();
  struct lm_error err;
  set(&cfg, "layers", "5");
  set(&cfg, "experts", "6");
  set(&cfg, "ep", "auto");
  assert_int_equal(config_check(&cfg, 4, &err), 0);
  for (int l = 0; l < 5; l++) {
    assert_int_equal(cfg.experts.value[l], 6);
    assert_int_equal(config_layer_ep(&cfg, l, 4), 2); /* the largest divisor of 4 that divides 6 */
  }
  cfg.experts.value[0] = 5;
  assert_int_equal(config_layer_ep(&cfg, 0, 4), 1);
  cfg.ep.value[0] = 4;
  assert_int_equal(config_layer_ep(&cfg, 0, 4), 4);
}

static void files_are_read(void **state) {
  (void)state;
  char path[] = "/tmp/train_lm_config_XXXXXX";
  int fd = mkstemp(path);
  static const char text[] = "# a comment\n\n  steps =  7 # another\r\nout=some where\n";
  assert_int_equal(write(fd, text, sizeof text - 1), sizeof text - 1);
  close(fd);
  struct lm_config cfg = fresh();
  struct lm_error err;
  assert_int_equal(config_set_file(&cfg, path, &err), 0);
  assert_int_equal(cfg.steps, 7);
  assert_string_equal(cfg.out, "some where");
  unlink(path);
  assert_says(config_set_file(&cfg, path, &err), &err, "No such file");
  assert_says(config_set_text(&cfg, "steps = 1\nsteps 2\n", "f", &err), &err, "f:2: \"steps 2\" is not of the form");
  assert_says(config_set_text(&cfg, "\nsteps = x\n", "f", &err), &err, "f:2: steps is \"x\"");
}

static void layers_are_cut_by_cost(void **state) {
  (void)state;
  struct lm_config cfg = fresh();
  struct lm_error err;
  set(&cfg, "layers", "8");
  set(&cfg, "experts", "0,0,0,0,0,0,8,8");
  set(&cfg, "topk", "4");
  set(&cfg, "pp", "2");
  assert_int_equal(config_check(&cfg, 2, &err), 0);
  assert_int_equal(cfg.stages.count, 2);
  assert_int_equal(cfg.stages.value[0], 6); /* the last two do the work of 4 MLPs and a dense branch each */
  assert_int_equal(cfg.stages.value[1], 2);
}

static void files_are_strict(void **state) {
  (void)state;
  char path[] = "/tmp/train_lm_config_XXXXXX";
  int fd = mkstemp(path);
  static const char text[] = "\xef\xbb\xbfpreset = tiny\nsteps = 7\n";
  assert_int_equal(write(fd, text, sizeof text - 1), sizeof text - 1);
  struct lm_config cfg = fresh();
  struct lm_error err;
  assert_int_equal(config_set_file(&cfg, path, &err), 0);
  assert_int_equal(cfg.steps, 7);
  assert_string_equal(cfg.preset, "tiny");
  assert_int_equal(write(fd, "\0lr = 1\n", 8), 8);
  assert_says(config_set_file(&cfg, path, &err), &err, ": a zero byte after 27 bytes");
  assert_says(config_set_text(&cfg, "steps = 1\nlr=1\n\n steps =2\n", "f", &err), &err,
              "f:4: steps is set in line 1 already");
  close(fd);
  unlink(path);
}

static void another_model_is_not_gone_on_with(void **state) {
  (void)state;
  struct lm_config saved = fresh(), cfg = saved;
  static char changes[LM_CONFIG_TEXT];
  struct lm_error err;
  assert_int_equal(config_compare(&cfg, &saved, changes, &err), 0);
  assert_string_equal(changes, "");
  set(&cfg, "steps", "7"), set(&cfg, "dtype", "bf16"), set(&cfg, "out", "elsewhere"), set(&cfg, "tp", "4");
  assert_int_equal(config_compare(&cfg, &saved, changes, &err), 0);
  assert_string_equal(changes, "dtype is bf16; until now it was fp32\nsteps is 7; until now it was 900\n");
  static const char *const fixed[][2] = {{"layers", "5"}, {"hidden", "64"},      {"heads", "2"},  {"context", "64"},
                                         {"seed", "2"},   {"residual", "gated"}, {"experts", "4"}};
  for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
    cfg = saved;
    set(&cfg, fixed[i][0], fixed[i][1]);
    assert_says(config_compare(&cfg, &saved, changes, &err), &err, "which cannot change");
    assert_int_equal(strncmp(err.text, fixed[i][0], strlen(fixed[i][0])), 0);
  }
}

static void what_is_written_reads_the_same(void **state) {
  (void)state;
  static char text[LM_CONFIG_TEXT], again[LM_CONFIG_TEXT];
  struct lm_config cfg = fresh(), other;
  struct lm_error err;
  set(&cfg, "lr", "0.0012345678");
  set(&cfg, "layers", "64");
  set(&cfg, "experts", "65536");
  set(&cfg, "residual", "sum");
  set(&cfg, "seed", "12345678901234567890");
  assert_int_equal(config_check(&cfg, 1, &err), 0);
  config_write(&cfg, text);
  config_init(&other);
  assert_int_equal(config_set_text(&other, text, "test", &err), 0);
  config_write(&other, again);
  assert_string_equal(text, again);
  assert_true(other.lr == cfg.lr && other.seed == cfg.seed && other.residual == cfg.residual);
  assert_int_equal(other.experts.count, 64);
  assert_null(strstr(text, "data =")); /* of one run alone */
}

static void presets_are_whole(void **state) {
  (void)state;
  static const char *const names[] = {"tiny", "demo", "small"};
  for (int i = 0; i < 3; i++) {
    struct lm_config cfg = fresh();
    struct lm_error err;
    assert_int_equal(config_set_preset(&cfg, names[i], &err), 0);
    assert_int_equal(config_check(&cfg, 1, &err), 0);
    assert_int_equal(cfg.experts.count, cfg.layers);
  }
  struct lm_config cfg = fresh();
  struct lm_error err;
  assert_says(config_set_preset(&cfg, "huge", &err), &err, "preset is \"huge\"; tiny, demo or small was expected");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_setting_is_read),
      cmocka_unit_test(bad_values_are_named),
      cmocka_unit_test(what_does_not_go_together_is_named),
      cmocka_unit_test(lists_of_one_stand_for_all_layers),
      cmocka_unit_test(files_are_read),
      cmocka_unit_test(what_is_written_reads_the_same),
      cmocka_unit_test(presets_are_whole),
      cmocka_unit_test(layers_are_cut_by_cost),
      cmocka_unit_test(files_are_strict),
      cmocka_unit_test(another_model_is_not_gone_on_with),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
