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
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
