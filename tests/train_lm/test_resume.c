/* Whole runs that are stopped, by hand and by force, and go on. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "train_lm/program.h"

enum { STEPS = 40, FEW_STEPS = 7, KILLS = 8 };

static struct folder f;
static char *data_path;

/* ---- runs ---- */

static void fail_with_log(const char *arguments, int status) {
  fail_msg("%s: exit status %d\n%s", arguments, status, folder_read(folder_path(&f, "log")));
}

static void run_to_end(const char *launcher, const char *arguments) {
  int status = program_finish(program_start(&f, launcher, arguments));
  if (status) fail_with_log(arguments, status);
}

static const char *in(const char *run, const char *file) {
  char name[128];
  snprintf(name, sizeof name, "%s/%s", run, file);
  return folder_path(&f, name);
}

static int shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int shell(const char *format, ...) {
  char command[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(command, sizeof command, format, args);
  va_end(args);
  return system(command);
}

/* Runs until a few steps are done and interrupts. A run that was faster than that is started anew. */
static void run_and_interrupt(const char *run, const char *arguments) {
  for (int tries = 0; tries < 20; tries++) {
    assert_int_equal(shell("rm -rf %s/%s", f.path, run), 0);
    pid_t child = program_start(&f, "", arguments);
    program_wait_for_steps(&f, child, run, FEW_STEPS);
    assert_int_equal(kill(child, SIGINT), 0);
    int status = program_finish(child), steps = program_steps(&f, run);
    if (status == 0) continue;
    if (status != 130) fail_with_log(arguments, status);
    assert_true(steps >= FEW_STEPS && steps < STEPS);
    return;
  }
  fail_msg("no interrupt came in time");
}

/* ---- comparing ---- */

static void assert_same_run(const char *run, const char *other) {
  char *a = folder_read(in(run, "metrics.csv")), *b = folder_read(in(other, "metrics.csv"));
  csv_drop_speed(a), csv_drop_speed(b);
  assert_string_equal(a, b);
  free(a), free(b);
  a = folder_read(in(run, "experts.csv")), b = folder_read(in(other, "experts.csv"));
  assert_string_equal(a, b);
  free(a), free(b);
  assert_int_equal(shell("cmp %s %s", in(run, "checkpoint.safetensors"), in(other, "checkpoint.safetensors")), 0);
}

static void assert_close_run(const char *run, const char *reference) {
  char *got = folder_read(in(run, "metrics.csv")), *expected = folder_read(in(reference, "metrics.csv"));
  int first = csv_assert_close(got, expected, run);
  assert_true(first > FEW_STEPS);
  assert_int_equal(first + csv_rows(got) - 1, STEPS);
  free(got), free(expected);
}

/* ---- tests ---- */

static const char model[] = "--layers 5 --experts 0,4,0,6,0 --topk 2 --batch 12 --residual learned --sample 0";
static const char split[] = "--ranks 2 --ep 2";

static const char *arguments_of(const char *run, const char *layout, const char *more) {
  static char text[1024];
  const char *preset = strstr(more, "--resume") ? "" : "--preset tiny";
  snprintf(text, sizeof text, "%s %s --steps %d --data %s --out %s %s %s", preset, model, STEPS, data_path, run, layout,
           more);
  return text;
}

static int setup(void **state) {
  (void)state;
  f = folder_make();
  data_path = strdup(folder_write_text(&f, "text", 8000));
  run_to_end("", arguments_of("straight", split, ""));
  return 0;
}

static int teardown(void **state) {
  (void)state;
  folder_remove(&f);
  free(data_path);
  return 0;
}

static void resume(const char *launcher, const char *run, const char *from, const char *more) {
  char arguments[512];
  snprintf(arguments, sizeof arguments, "--data %s --sample 0 --out %s --resume %s %s", data_path, run, from, more);
  run_to_end(launcher, arguments);
}

static void ctrl_c_saves_and_the_run_goes_on(void **state) {
  (void)state;
  run_and_interrupt("stopped", arguments_of("stopped", split, ""));
  char *log = folder_read(folder_path(&f, "log"));
  assert_non_null(strstr(log, "saved stopped/checkpoint.safetensors after step"));
  free(log);
  assert_int_equal(shell("cp -r %s/stopped %s/again", f.path, f.path), 0);
  resume("", "again", "again", split); /* settings come with the checkpoint */
  assert_same_run("again", "straight");
}

static void go_on_in(const char *launcher, const char *from, const char *layout) {
  assert_int_equal(shell("rm -rf %s/other", f.path), 0);
  resume(launcher, "other", from, layout);
  assert_close_run("other", "straight");
}

static const char *const layouts[] = {
    "--ranks 1",
    "--ranks 3 --ep auto",
    "--ranks 6 --ep 1,1,1,6,1",
    "--ranks 2 --tp 2 --sp",
    "--ranks 4 --pp 2 --cp 2 --schedule gpipe",
    "--ranks 3 --pp 3 --stages 1,3,1",
    "--ranks 2 --pp 2 --schedule interleaved --stages 1,2,1,1",
    "--ranks 8 --tp 2 --pp 2 --ep 2 --etp 2",
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

static void other_layouts_go_on(void **state) {
  (void)state;
  for (int i = 0; i < LAYOUTS; i++) go_on_in("", "stopped/checkpoint.safetensors", layouts[i]);
#ifdef TRAIN_LM_MPIEXEC
  go_on_in(TRAIN_LM_MPIEXEC " -np 4", "stopped", "--pp 2 --tp 2");
  go_on_in(TRAIN_LM_MPIEXEC " -np 2", "stopped", "--ep 2");
  assert_int_equal(shell("cmp %s %s", in("other", "checkpoint.safetensors"), in("straight", "checkpoint.safetensors")),
                   0);
#endif
}

/* Stopped in one layout, and on in another. */
static void any_layout_is_left(void **state) {
  (void)state;
  for (int i = 3; i < LAYOUTS; i++) {
    run_and_interrupt("left", arguments_of("left", layouts[i], ""));
    go_on_in("", "left", layouts[(i * 5 + 1) % LAYOUTS]);
  }
}

/* The same layout goes on bit for bit, with stages and shards too. */
static void shards_come_back_to_the_bit(void **state) {
  (void)state;
  static const char layout[] = "--ranks 8 --tp 2 --pp 2 --sp --ep 2 --etp 2";
  run_to_end("", arguments_of("whole", layout, ""));
  run_and_interrupt("halves", arguments_of("halves", layout, ""));
  resume("", "halves", "halves", layout);
  assert_same_run("halves", "whole");
}

/* Saves after every step, and is killed again and again: it must come through, and as if nothing had been. */
static void killed_runs_come_through(void **state) {
  (void)state;
  uint32_t random = 2024;
  int kills = 0, status = -1;
  while (status != 0) { /* a fast run may come through before its last kill */
    int saved = access(in("killed", "checkpoint.safetensors"), R_OK) == 0, done = program_steps(&f, "killed"),
        kill_it = kills < KILLS;
    const char *more = saved ? "--save-every 1 --resume killed" : "--save-every 1 --overwrite";
    pid_t child = program_start(&f, "", arguments_of("killed", split, more));
    if (kill_it) {
      random = random * 1664525u + 1013904223u;
      program_wait_for_steps(&f, child, "killed", done + (int)(random >> 16) % 4);
      usleep(random >> 8 & 0x1fff); /* somewhere between one save and the next */
      kill(child, SIGKILL);
    }
    status = program_finish(child);
    kills += status == -1;
    if (status > 0 || (status < 0 && !kill_it)) fail_msg("%s", folder_read(folder_path(&f, "log")));
  }
  assert_true(kills >= 3);
  assert_same_run("killed", "straight");
}

static void a_finished_run_has_nothing_left(void **state) {
  (void)state;
  assert_int_equal(shell("cp -r %s/straight %s/finished", f.path, f.path), 0);
  resume("", "finished", "finished", split);
  assert_same_run("finished", "straight");
  assert_true(access(in("finished", "loss.svg"), R_OK) == 0 && access(in("finished", "experts.svg"), R_OK) == 0);
}

static void what_cannot_resume_says_why(void **state) {
  (void)state;
  static const struct {
    const char *more;
    int status;
    const char *says;
  } cases[] = {
      {"--resume nowhere", 1, "nowhere: No such file or directory"},
      {"--resume text", 1, "text is no safetensors file"},
      {"--resume straight --inner 64", 1, "has shape"},
      {"--resume straight --save text", 1, "Not a directory"},
      {"--resume straight --steps 30", 1, "steps is 30, but straight has done 40 already; more were expected"},
      {"--resume straight --hidden 64", 64, "hidden is 64; the checkpoint's model has 32, which cannot change"},
      {"--resume straight --heads 4", 64, "heads is 4; the checkpoint's model has 2, which cannot change"},
      {"--resume straight --seed 2", 64, "seed is 2; the checkpoint's model has 1, which cannot change"},
      {"--resume straight --preset tiny", 64, "preset and resume are both set"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char arguments[512];
    snprintf(arguments, sizeof arguments, "--data text --out bad --ranks 2 --steps %d %s", STEPS + 1, cases[i].more);
    program_says(&f, "", arguments, cases[i].status, cases[i].says);
  }
}

/* What may change is said. */
static void changes_are_told(void **state) {
  (void)state;
  folder_write_text(&f, "longer", 9000);
  program_says(&f, "", "--data text --out more --resume straight --steps 41 --lr 0.005 --sample 0", 0,
               "resume   lr is 0.00499999989; until now it was 0.00999999978\n");
  char *log = folder_read(folder_path(&f, "log"));
  assert_non_null(strstr(log, "resume   steps is 41; until now it was 40\n"));
  assert_null(strstr(log, "text is another"));
  free(log);
  program_says(&f, "", "--data longer --out other-text --resume more --steps 42 --sample 0", 0,
               "resume   the text is another than until now\n");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(ctrl_c_saves_and_the_run_goes_on),
      cmocka_unit_test(other_layouts_go_on),
      cmocka_unit_test(any_layout_is_left),
      cmocka_unit_test(shards_come_back_to_the_bit),
      cmocka_unit_test(killed_runs_come_through),
      cmocka_unit_test(a_finished_run_has_nothing_left),
      cmocka_unit_test(what_cannot_resume_says_why),
      cmocka_unit_test(changes_are_told),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
