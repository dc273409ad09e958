/* Whole runs of the program: the same curve for any layout, the same bits twice, and what it shows. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "train_lm/program.h"

enum { STEPS = 20 };

static struct folder f;
static char *data_path;

/* The tiny preset over fewer steps; metrics.csv of out "name". */
static char *train(const char *launcher, const char *name, const char *more) {
  char arguments[1024], csv[128];
  snprintf(arguments, sizeof arguments,
           "--preset tiny --steps %d --lr 0.02 --data %s --sample 0 --overwrite --out %s %s", STEPS, data_path, name,
           more);
  program_succeeds(&f, launcher, arguments);
  snprintf(csv, sizeof csv, "%s/metrics.csv", name);
  return folder_read(folder_path(&f, csv));
}

static void assert_same_curve(const char *csv, const char *reference, const char *what) {
  assert_int_equal(csv_assert_close(csv, reference, what), 1);
  assert_int_equal(csv_rows(csv), STEPS);
}

static const char model[] = "--layers 3 --experts 0,4,4 --topk 2 --residual learned";
static char *reference;

static int setup(void **state) {
  (void)state;
  f = folder_make();
  data_path = strdup(folder_write_text(&f, "text", 8000));
  reference = train("", "reference", model);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  folder_remove(&f);
  free(data_path);
  free(reference);
  return 0;
}

static void the_loss_falls(void **state) {
  (void)state;
  assert_true(csv_number(reference, 1, LOSS) > 5 && csv_number(reference, 1, LOSS) < 6.5);
  assert_true(csv_number(reference, STEPS, LOSS) < 0.6 * csv_number(reference, 1, LOSS));
  assert_true(csv_number(reference, STEPS, HELD_OUT) < 0.6 * csv_number(reference, 1, LOSS));
  assert_true(isnan(csv_number(reference, 9, HELD_OUT)) && !isnan(csv_number(reference, 10, HELD_OUT)));
}

static void any_split_gives_the_same_curve(void **state) {
  (void)state;
  static const char *const splits[] = {
      "--ranks 2 --ep 2",
      "--ranks 3 --ep 3",
      "--ranks 4 --ep 1,2,4",
      "--ranks 4 --ep auto",
      "--ranks 2 --ep auto --threads 2",
      "--ranks 4 --tp 2 --sp --etp 2",
      "--ranks 2 --cp 2",
      "--ranks 3 --pp 3",
      "--ranks 4 --pp 2 --stages 1,2 --ep 2 --schedule gpipe",
      "--ranks 8 --tp 2 --cp 2 --pp 2 --ep 2 --etp 2",
  };
  for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
    char more[256];
    snprintf(more, sizeof more, "%s %s", model, splits[i]);
    char *csv = train("", "split", more);
    assert_same_curve(csv, reference, splits[i]);
    free(csv);
  }
}

static void other_models_split_too(void **state) {
  (void)state;
  static const char *const models[] = {
      "--experts 0,4 --residual none --capacity 1.0",
      "--experts 5,2 --residual gated --aux 0.1",
      "--experts 4 --residual sum --batch 6 --micro 2",
  };
  for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
    char more[256];
    char *alone = train("", "alone", models[i]);
    snprintf(more, sizeof more, "%s --ranks 2 --ep 2", models[i]);
    char *split = train("", "split", more);
    assert_same_curve(split, alone, models[i]);
    free(alone), free(split);
  }
}

static void bf16_learns_the_same(void **state) {
  (void)state;
  char more[256];
  snprintf(more, sizeof more, "%s --dtype bf16 --ranks 2", model);
  char *csv = train("", "bf16", more);
  for (int row = 1; row <= STEPS; row++)
    assert_true(fabs(csv_number(csv, row, LOSS) / csv_number(reference, row, LOSS) - 1) < 0.05);
  assert_true(csv_number(csv, STEPS, LOSS) != csv_number(reference, STEPS, LOSS));
  free(csv);
}

static void twice_gives_the_same_bits(void **state) {
  (void)state;
  static const char *const ways[] = {"--ranks 4 --ep 2", "--ranks 2 --dtype bf16 --capacity 1.1", "--threads 3",
                                     "--ranks 8 --tp 2 --cp 2 --pp 2 --sp --etp 2"};
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
    char more[256];
    snprintf(more, sizeof more, "%s %s", model, ways[i]);
    char *first = train("", "first", more), *second = train("", "second", more);
    csv_drop_speed(first), csv_drop_speed(second);
    assert_string_equal(first, second);
    free(first), free(second);
  }
}

#ifdef TRAIN_LM_MPIEXEC
static void processes_give_the_same_curve(void **state) {
  (void)state;
  static const struct {
    const char *launcher, *layout;
  } runs[] = {{TRAIN_LM_MPIEXEC " -np 2", "--ep 2"},
              {TRAIN_LM_MPIEXEC " -np 4", "--tp 2 --pp 2 --etp 2 --stages 2,1"},
              {TRAIN_LM_MPIEXEC " -np 2", "--pp 2 --batch 16 --layers 4 --experts 0,4,4,0 --schedule interleaved"}};
  for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
    char more[256];
    snprintf(more, sizeof more, "%s %s", model, runs[i].layout);
    char *csv = train(runs[i].launcher, "mpi", more), *alone = NULL;
    if (strstr(runs[i].layout, "--layers")) {
      snprintf(more, sizeof more, "%s --batch 16 --layers 4 --experts 0,4,4,0", model);
      alone = train("", "alone", more);
    }
    assert_same_curve(csv, alone ? alone : reference, runs[i].layout);
    free(csv), free(alone);
  }
}
#endif

static void a_run_shows_what_it_did(void **state) {
  (void)state;
  char arguments[512];
  snprintf(arguments, sizeof arguments,
           "--preset tiny --data %s --out shown --sample 40 --gemm-floor --ranks 4 --tp 2 --cp 2", data_path);
  program_succeeds(&f, "", arguments);
  char *log = folder_read(folder_path(&f, "log"));
  static const char *const parts[] = {"layer 0  dense MLP",
                                      "layer 1  4 experts, top 1, learned residual",
                                      "layout   data 1, tensor 2, context 2, pipeline 1",
                                      "step 1/50  loss",
                                      "step 50/50  loss",
                                      "bits per byte",
                                      "unigram entropy",
                                      "bigram entropy",
                                      "time per part",
                                      "MoE layers (pmoe)",
                                      "sums over tp and cp",
                                      "its matrix products alone",
                                      "sample, after"};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
    if (!strstr(log, parts[i])) fail_msg("no \"%s\" in\n%s", parts[i], log);
  free(log);
  char *experts = folder_read(folder_path(&f, "shown/experts.csv"));
  double sum = 0;
  for (int row = 1; row <= 4; row++) sum += csv_number(experts, row, 3);
  assert_true(fabs(sum - 1) < 1e-4 && csv_number(experts, 1, 1) == 1);
  free(experts);
}

static void token_files_train(void **state) {
  (void)state;
  enum { HEADER = 256 * sizeof(int32_t), COUNT = 3000 };
  static uint8_t file[HEADER + 2 * COUNT];
  const int32_t header[] = {20240520, 1, COUNT};
  memcpy(file, header, sizeof header);
  for (int i = 0; i < COUNT; i++) {
    uint16_t token = (uint16_t)(50000 + i * i % 200);
    memcpy(file + HEADER + 2 * i, &token, sizeof token);
  }
  folder_write(&f, "tokens.bin", file, sizeof file);
  program_succeeds(&f, "", "--preset tiny --data tokens.bin --steps 3 --sample 2 --out tokens");
  char *log = folder_read(folder_path(&f, "log")), *csv = folder_read(folder_path(&f, "tokens/metrics.csv"));
  assert_non_null(strstr(log, "bits per token"));
  assert_null(strstr(log, "bigram"));
  assert_true(fabs(csv_number(csv, 1, LOSS) - 10.825) < 0.5); /* ln 50257 */
  free(log), free(csv);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_loss_falls),
      cmocka_unit_test(any_split_gives_the_same_curve),
      cmocka_unit_test(other_models_split_too),
      cmocka_unit_test(bf16_learns_the_same),
      cmocka_unit_test(twice_gives_the_same_bits),
#ifdef TRAIN_LM_MPIEXEC
      cmocka_unit_test(processes_give_the_same_curve),
#endif
      cmocka_unit_test(a_run_shows_what_it_did),
      cmocka_unit_test(token_files_train),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
