/* What the program says, and returns, when it cannot run, when it is stopped, and when its output cannot be written. */
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

#include "train_lm/program.h"

enum { FAILED = 1, USAGE = 64 };

static struct folder f;

static int setup(void **state) {
  (void)state;
  f = folder_make();
  folder_write_text(&f, "text", 20000);
  folder_write(&f, "full/nothing", "", 0);
  assert_int_equal(symlink("/dev/full", folder_path(&f, "full/metrics.csv")), 0);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  folder_remove(&f);
  return 0;
}

static void says(const char *arguments, int status, const char *part) { program_says(&f, "", arguments, status, part); }

static void wrong_settings_are_usage(void **state) {
  (void)state;
  folder_write(&f, "settings", "layers = 2\nexperts = 1,2,3\n", 27);
  static const struct {
    const char *arguments, *says;
  } cases[] = {
      {"--nonsense", "nonsense"},
      {"nonsense", "\"nonsense\" is no option"},
      {"--layers", "requires an argument"},
      {"--preset tiny", "data is missing"},
      {"--data text --layers 0", "layers is \"0\""},
      {"--data text --preset tiny --config settings", "experts has 3 numbers"},
      {"--data text --config nowhere", "config file nowhere: No such file"},
      {"--data text --preset huge", "preset is \"huge\""},
      {"--data text --preset tiny --ranks 8", "of the 8 ranks"},
      {"--data text --preset tiny --out=", "out is empty; a path was expected"},
      {"--data text --preset tiny --warmup 51", "warmup is 51; at most the 50 steps were expected"},
      {"--data text --preset tiny --ranks 4 --tp 3", "tp x cp x pp is 3 x 1 x 1; a divisor of the 4 ranks"},
      {"--data text --preset tiny --ranks 2 --schedule zero", "1f1b, interleaved or gpipe was expected"},
      {"--data text --preset tiny --ranks 2 --pp 2 --stages 2,1", "stages is 2,1, 3 layers together; the model's 2"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) says(cases[i].arguments, USAGE, cases[i].says);
}

static void what_fails_is_failure(void **state) {
  (void)state;
  folder_write(&f, "empty", "", 0);
  folder_write(&f, "short", "too short", 9);
  static const struct {
    const char *arguments, *says;
  } cases[] = {
      {"--data nowhere", "data nowhere: No such file or directory"},
      {"--data empty", "data empty is empty"},
      {"--data short", "data short has 9 bytes; at least 1290 were expected"},
      {"--data text --preset tiny --out text", "Not a directory"},
      {"--data text --preset tiny --save text --out s1", "text/checkpoint.safetensors.part: Not a directory"},
      {"--data text --preset tiny --save a/b --out s2", "a/b: No such file or directory"},
      {"--data text --preset tiny --vocab 50", "; vocab is 50"},
      {"--data text --preset tiny --lr 1000 --clip 0 --warmup 0 --out s3", "a lower lr was expected"},
      {"--data text --preset tiny --lr 1000 --clip 0 --warmup 0 --out s4 --ranks 4 --tp 2 --pp 2", "a lower lr"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) says(cases[i].arguments, FAILED, cases[i].says);
  assert_int_not_equal(access(folder_path(&f, "s1/metrics.csv"), F_OK), 0); /* before anything was trained */
}

static void a_finished_run_is_kept(void **state) {
  (void)state;
  says("--data text --preset tiny --steps 2 --sample 0 --out kept", 0, "");
  char *before = folder_read(folder_path(&f, "kept/metrics.csv"));
  says("--data text --preset tiny --steps 2 --sample 0 --out kept", FAILED,
       "kept/checkpoint.safetensors is another run's; --resume, --overwrite or another folder was expected");
  says("--data text --preset tiny --steps 2 --sample 0 --out kept --save elsewhere", FAILED,
       "kept/metrics.csv is another run's; --resume, --overwrite or another --out was expected");
  char *after = folder_read(folder_path(&f, "kept/metrics.csv"));
  assert_string_equal(before, after);
  free(before), free(after);
  says("--data text --preset tiny --steps 3 --sample 0 --out kept --overwrite", 0, "step 3/3");
}

/* A full disk under the files, and under what is printed. */
static void lost_output_is_failure(void **state) {
  (void)state;
  says("--data text --preset tiny --out full --overwrite", FAILED, "full/metrics.csv: No space left on device");
  says("--data text --preset tiny --out full --overwrite --ranks 4 --tp 2 --pp 2", FAILED,
       "full/metrics.csv: No space left on device"); /* the others wait for the one that writes */
  char command[512];
  snprintf(command, sizeof command, "cd %s && %s --data text --preset tiny --steps 2 --out printed >/dev/full 2>log",
           f.path, TRAIN_LM);
  int status = system(command);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == FAILED);
  char *log = folder_read(folder_path(&f, "log"));
  assert_non_null(strstr(log, "standard output: No space left on device"));
  free(log);
}

/* Starts a run that would take hours, stops it once it has steps behind it, and returns its status. */
static int stop_with(const char *launcher, int number, const char *out) {
  char arguments[256], before[64];
  snprintf(before, sizeof before, "%s/metrics.csv", out);
  unlink(folder_path(&f, before));
  snprintf(arguments, sizeof arguments,
           "--preset tiny --data text --out %s --overwrite --ranks 2 --pp 2 --steps 1000000 --eval-every 0", out);
  pid_t child = program_start(&f, launcher, arguments);
  program_wait_for_steps(&f, child, out, 10);
  assert_int_equal(kill(child, number), 0);
  return program_finish(child);
}

static void signals_end_a_run(void **state) {
  (void)state;
  static const struct { int number, status; } cases[] = {{SIGINT, 130}, {SIGTERM, 143}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(stop_with("", cases[i].number, "stopped"), cases[i].status);
    char *log = folder_read(folder_path(&f, "log"));
    assert_true(strstr(log, "stopped after step") && strstr(log, "checkpoint.safetensors after step"));
    free(log);
  }
}

static void help_tells_all(void **state) {
  (void)state;
  static const char *const parts[] = {"--tp=N",   "--pp=N",      "--cp=N",   "--ep=LIST",    "--etp=N",
                                      "--sp",     "--schedule",  "--stages", "Exit status:", "--overwrite",
                                      "--config", "interleaved", "--resume"};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) says("--help", 0, parts[i]);
}

#ifdef TRAIN_LM_MPIEXEC
/* mpirun kills what has not ended within a second or so, which a busy machine may need. */
static void mpirun_ends_a_run(void **state) {
  (void)state;
  const char *checkpoint = folder_path(&f, "processes/checkpoint.safetensors");
  for (int tries = 0; tries < 5 && access(checkpoint, R_OK) != 0; tries++)
    assert_int_not_equal(stop_with(TRAIN_LM_MPIEXEC " -np 2", SIGTERM, "processes"), 0);
  assert_int_equal(access(checkpoint, R_OK), 0);
}

static void assert_once(const char *part) {
  char *log = folder_read(folder_path(&f, "log"));
  const char *first = strstr(log, part);
  if (!first || strstr(first + 1, part)) fail_msg("not once \"%s\" in\n%s", part, log);
  free(log);
}

/* When one process fails, the others do not wait for it. */
static void one_process_fails(void **state) {
  (void)state;
  static const char launcher[] = TRAIN_LM_MPIEXEC " -np 1", first[] = "--preset tiny --data text --out one --overwrite";
  static const struct {
    const char *first, *second;
    int status;
    const char *says;
  } cases[] = {
      {"--pp 2", "--pp 2 --data nowhere", FAILED, "train_lm: data nowhere: No such file or directory"},
      {"--pp 2", "--pp 2 --stages 2", USAGE, "train_lm: stages is 2, 1 numbers; as many as pp, 2, were expected"},
      {"--pp 2", "--pp 2 --nonsense", USAGE, "train_lm: the options of a process beside the first are wrong"},
      {"--pp 2", "--tp 2", FAILED, "train_lm: rank 0 is in pmoe_topology_create(tp 1, cp 1, pp 2"},
      {"--out full", "", FAILED, "train_lm: full/metrics.csv: No space left on device"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char arguments[1024];
    snprintf(arguments, sizeof arguments, "%s %s : -np 1 %s %s %s", first, cases[i].first, TRAIN_LM, first,
             cases[i].second);
    program_says(&f, launcher, arguments, cases[i].status, cases[i].says);
    assert_once("train_lm: ");
  }
}

/* One of several processes speaks. */
static void processes_speak_once(void **state) {
  (void)state;
  static const char launcher[] = TRAIN_LM_MPIEXEC " -np 2";
  program_says(&f, launcher, "--help", 0, "");
  assert_once("Usage:");
  program_says(&f, launcher, "--nonsense", USAGE, "");
  assert_once("unrecognized option");
  program_says(&f, launcher, "--data nowhere", FAILED, "");
  assert_once("train_lm: data nowhere: No such file or directory");
  program_says(&f, launcher, "--preset tiny --data text --ranks=3 --out mpi", USAGE, "");
  assert_once("ranks is 3; mpirun started 2 processes, which are the ranks");
  program_succeeds(&f, launcher, "--preset tiny --data text --ranks=2 --steps 2 --out mpi");
}
#endif

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(wrong_settings_are_usage), cmocka_unit_test(what_fails_is_failure),
      cmocka_unit_test(a_finished_run_is_kept),   cmocka_unit_test(lost_output_is_failure),
      cmocka_unit_test(signals_end_a_run),        cmocka_unit_test(help_tells_all),
#ifdef TRAIN_LM_MPIEXEC
      cmocka_unit_test(processes_speak_once),     cmocka_unit_test(one_process_fails),
      cmocka_unit_test(mpirun_ends_a_run),
#endif
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
