/* Whole runs of the program: the same curve for any split, the same bits twice, and what it says when it cannot run. */
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "train_lm/folder.h"

enum { STEPS = 50 };

static struct folder f;
static char *data_path;

/* Runs `launcher train_lm arguments` in a shell, its output in the folder's "log". Returns the exit status. */
static int run_with(const char *launcher, const char *arguments) {
  char command[2048];
  snprintf(command, sizeof command, "cd %s && %s %s %s >log 2>&1", f.path, launcher, TRAIN_LM, arguments);
  int status = system(command);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void run_or_fail(const char *launcher, const char *arguments) {
  int status = run_with(launcher, arguments);
  if (status == 0) return;
  char *log = folder_read(folder_path(&f, "log"));
  fail_msg("%s %s: exit status %d\n%s", launcher, arguments, status, log);
}

/* The tiny preset over 50 steps; metrics.csv of out "name". */
static char *train(const char *launcher, const char *name, const char *more) {
  char arguments[1024], csv[128];
  snprintf(arguments, sizeof arguments, "--preset tiny --steps %d --data %s --sample 0 --out %s %s", STEPS, data_path,
           name, more);
  run_or_fail(launcher, arguments);
  snprintf(csv, sizeof csv, "%s/metrics.csv", name);
  return folder_read(folder_path(&f, csv));
}

/* Column `column` (from 0) of row `row` (from 1) of a csv; NaN if empty. */
static double number_at(const char *csv, int row, int column) {
  for (int i = 0; i < row; i++) csv = strchr(csv, '\n') + 1;
  assert_true(*csv);
  for (int i = 0; i < column; i++) csv = strchr(csv, ',') + 1;
  return *csv == ',' ? NAN : strtod(csv, NULL);
}

enum { STEP = 0, LOSS = 2, AUX = 3, HELD_OUT = 5, NORM = 7 };

static void assert_same_curve(const char *csv, const char *reference, double tolerance, const char *what) {
  for (int row = 1; row <= STEPS; row++) {
    assert_true(number_at(csv, row, STEP) == row);
    static const int columns[] = {LOSS, AUX, HELD_OUT, NORM};
    for (int i = 0; i < 4; i++) {
      double got = number_at(csv, row, columns[i]), expected = number_at(reference, row, columns[i]);
      if (isnan(got) && isnan(expected)) continue;
      double allowed = columns[i] == NORM ? 100 * tolerance : tolerance; /* a norm is the most sensitive of them */
      if (!(fabs(got - expected) <= allowed * fabs(expected)))
        fail_msg("%s: step %d, column %d: %.9g; %.9g was expected", what, row, columns[i], got, expected);
    }
  }
}

static const char model[] = "--layers 3 --experts 0,4,4 --topk 2 --residual learned";
static char *reference;

static int setup(void **state) {
  (void)state;
  f = folder_make();
  data_path = strdup(folder_write_text(&f, "text", 20000));
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
  assert_true(number_at(reference, 1, LOSS) > 5 && number_at(reference, 1, LOSS) < 6.5);
  assert_true(number_at(reference, STEPS, LOSS) < 0.6 * number_at(reference, 1, LOSS));
  assert_true(number_at(reference, STEPS, HELD_OUT) < 0.6 * number_at(reference, 1, LOSS));
  assert_true(isnan(number_at(reference, 9, HELD_OUT)) && !isnan(number_at(reference, 10, HELD_OUT)));
}

static void any_split_gives_the_same_curve(void **state) {
  (void)state;
  static const char *const splits[] = {
      "--ranks 2 --ep 1",     "--ranks 2 --ep 2",    "--ranks 3 --ep 3",
      "--ranks 4 --ep 1",     "--ranks 4 --ep 2",    "--ranks 4 --ep 4",
      "--ranks 4 --ep 1,2,4", "--ranks 4 --ep auto", "--ranks 2 --ep auto --threads 2"};
  for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
    char more[256];
    snprintf(more, sizeof more, "%s %s", model, splits[i]);
    char *csv = train("", "split", more);
    assert_same_curve(csv, reference, 1e-4, splits[i]);
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
    assert_same_curve(split, alone, 1e-4, models[i]);
    free(alone), free(split);
  }
}

static void bf16_learns_the_same(void **state) {
  (void)state;
  char more[256];
  snprintf(more, sizeof more, "%s --dtype bf16 --ranks 2", model);
  char *csv = train("", "bf16", more);
  for (int row = 1; row <= STEPS; row++)
    assert_true(fabs(number_at(csv, row, LOSS) / number_at(reference, row, LOSS) - 1) < 0.05);
  assert_true(number_at(csv, STEPS, LOSS) != number_at(reference, STEPS, LOSS));
  free(csv);
}

/* Cuts out tokens_per_second, the one column that may differ. */
static void drop_speed(char *csv) {
  char *to = csv;
  for (int column = 0; *csv; csv++) {
    column = *csv == '\n' ? 0 : column + (*csv == ',');
    if (column != 8) *to++ = *csv;
  }
  *to = 0;
}

static void twice_gives_the_same_bits(void **state) {
  (void)state;
  static const char *const ways[] = {"--ranks 4 --ep 2", "--ranks 2 --dtype bf16 --capacity 1.1", "--threads 3"};
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
    char more[256];
    snprintf(more, sizeof more, "%s %s", model, ways[i]);
    char *first = train("", "first", more), *second = train("", "second", more);
    drop_speed(first), drop_speed(second);
    assert_string_equal(first, second);
    free(first), free(second);
  }
}

#ifdef TRAIN_LM_MPIEXEC
static void processes_give_the_same_curve(void **state) {
  (void)state;
  char more[256];
  snprintf(more, sizeof more, "%s --ep 2", model);
  char *csv = train(TRAIN_LM_MPIEXEC " -np 2", "mpi", more);
  assert_same_curve(csv, reference, 1e-4, "mpirun -np 2");
  free(csv);
  assert_int_not_equal(run_with(TRAIN_LM_MPIEXEC " -np 2", "--data nowhere"), 0);
  char *log = folder_read(folder_path(&f, "log"));
  assert_non_null(strstr(log, "train_lm: data nowhere: No such file or directory"));
  assert_null(strstr(strstr(log, "nowhere") + 1, "nowhere")); /* said once */
  free(log);
}
#endif

static void what_cannot_run_says_why(void **state) {
  (void)state;
  folder_write(&f, "empty", "", 0);
  folder_write(&f, "short", "too short", 9);
  folder_write(&f, "settings", "layers = 2\nexperts = 1,2,3\n", 27);
  static const struct {
    const char *arguments, *says;
  } cases[] = {
      {"--preset tiny", "data is missing"},
      {"--data nowhere", "data nowhere: No such file or directory"},
      {"--data empty", "data empty is empty"},
      {"--data short", "data short has 9 bytes; at least 1290 were expected"},
      {"--data text --layers 0", "layers is \"0\""},
      {"--data text --preset tiny --config settings", "experts has 3 numbers"},
      {"--data text --config nowhere", "config file nowhere: No such file"},
      {"--data text --preset huge", "preset is \"huge\""},
      {"--data text --preset tiny --ranks 8", "of the 8 ranks"},
      {"--data text --preset tiny --out text", "text/metrics.csv: Not a directory"},
      {"--data text --preset tiny --vocab 50", "; vocab is 50"},
      {"--data text --preset tiny --lr 1000 --clip 0 --warmup 0", "a lower lr was expected"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(run_with("", cases[i].arguments), 1);
    char *log = folder_read(folder_path(&f, "log"));
    if (!strstr(log, cases[i].says)) fail_msg("%s says \"%s\", not \"%s\"", cases[i].arguments, log, cases[i].says);
    free(log);
  }
  assert_int_equal(run_with("", "--nonsense"), 64);
}

static void a_run_shows_what_it_did(void **state) {
  (void)state;
  char arguments[512];
  snprintf(arguments, sizeof arguments, "--preset tiny --data %s --out shown --sample 40 --gemm-floor", data_path);
  run_or_fail("", arguments);
  char *log = folder_read(folder_path(&f, "log"));
  static const char *const parts[] = {"layer 0  dense MLP", "layer 1  4 experts, top 1, learned residual",
                                      "step 1/50  loss",    "step 50/50  loss",
                                      "bits per byte",      "unigram entropy",
                                      "bigram entropy",     "time per part",
                                      "MoE layers (pmoe)",  "its matrix products alone",
                                      "sample, after"};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
    if (!strstr(log, parts[i])) fail_msg("no \"%s\" in\n%s", parts[i], log);
  free(log);
  char *experts = folder_read(folder_path(&f, "shown/experts.csv"));
  double sum = 0;
  for (int row = 1; row <= 4; row++) sum += number_at(experts, row, 3);
  assert_true(fabs(sum - 1) < 1e-4 && number_at(experts, 1, 1) == 1);
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
  run_or_fail("", "--preset tiny --data tokens.bin --steps 3 --sample 2 --out tokens");
  char *log = folder_read(folder_path(&f, "log")), *csv = folder_read(folder_path(&f, "tokens/metrics.csv"));
  assert_non_null(strstr(log, "bits per token"));
  assert_null(strstr(log, "bigram"));
  assert_true(fabs(number_at(csv, 1, LOSS) - 10.825) < 0.5); /* ln 50257 */
  free(log), free(csv);
}

/* Starts a run that would take hours, interrupts it once it has steps behind it. */
static void ctrl_c_ends_a_run(void **state) {
  (void)state;
  char *csv = NULL;
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    if (chdir(f.path) || !freopen("log", "w", stdout)) _exit(99);
    execl(TRAIN_LM, "train_lm", "--preset", "tiny", "--data", data_path, "--out", "long", "--ranks", "2", "--steps",
          "1000000", "--eval-every", "0", (char *)NULL);
    _exit(99);
  }
  for (int tries = 0; tries < 600 && !csv; tries++) {
    usleep(100000);
    if (access(folder_path(&f, "long/metrics.csv"), R_OK)) continue;
    csv = folder_read(folder_path(&f, "long/metrics.csv"));
    if (strlen(csv) > 1000) break;
    free(csv);
    csv = NULL;
  }
  assert_non_null(csv);
  free(csv);
  assert_int_equal(kill(child, SIGINT), 0);
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 130);
  char *log = folder_read(folder_path(&f, "log"));
  assert_non_null(strstr(log, "stopped after step"));
  assert_non_null(strstr(log, "saved long/checkpoint.safetensors after step"));
  assert_int_equal(access(folder_path(&f, "long/checkpoint.safetensors"), R_OK), 0);
  free(log);
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
      cmocka_unit_test(what_cannot_run_says_why),
      cmocka_unit_test(a_run_shows_what_it_did),
      cmocka_unit_test(token_files_train),
      cmocka_unit_test(ctrl_c_ends_a_run),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
