#include "train_lm/program.h"

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

enum { MOST_ARGUMENTS = 64 };

pid_t program_start(const struct folder *folder, const char *launcher, const char *arguments) {
  char words[2048], *list[MOST_ARGUMENTS];
  int count = 0;
  snprintf(words, sizeof words, "%s%s%s %s", launcher, *launcher ? " " : "", TRAIN_LM, arguments);
  for (char *word = strtok(words, " "); word; word = strtok(NULL, " ")) {
    assert_true(count < MOST_ARGUMENTS - 1);
    list[count++] = word;
  }
  list[count] = NULL;
  pid_t child = fork();
  assert_true(child >= 0);
  if (child > 0) return child;
  if (chdir(folder->path) || !freopen("log", "w", stdout) || dup2(1, 2) < 0) _exit(99);
  execv(list[0], list);
  _exit(99);
}

int program_finish(pid_t child) {
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int program_steps(const struct folder *folder, const char *run) {
  char name[128];
  snprintf(name, sizeof name, "%s/metrics.csv", run);
  if (access(folder_path(folder, name), R_OK) != 0) return 0;
  char *csv = folder_read(folder_path(folder, name));
  int rows = csv_rows(csv);
  free(csv);
  return rows;
}

void program_wait_for_steps(const struct folder *folder, pid_t child, const char *run, int steps) {
  siginfo_t info = {0};
  while (program_steps(folder, run) < steps && waitid(P_PID, (id_t)child, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         !info.si_pid)
    usleep(2000);
}

void program_succeeds(const struct folder *folder, const char *launcher, const char *arguments) {
  program_says(folder, launcher, arguments, 0, "");
}

void program_says(const struct folder *folder, const char *launcher, const char *arguments, int status,
                  const char *says) {
  int got = program_finish(program_start(folder, launcher, arguments));
  char *log = folder_read(folder_path(folder, "log"));
  if (got != status || !strstr(log, says))
    fail_msg("%s %s: exit status %d and\n%s\n%d and \"%s\" were expected", launcher, arguments, got, log, status, says);
  free(log);
}

int csv_rows(const char *csv) {
  int lines = 0;
  for (; (csv = strchr(csv, '\n')); csv++) lines++;
  return lines > 0 ? lines - 1 : 0;
}

double csv_number(const char *csv, int row, int column) {
  for (int i = 0; i < row; i++) csv = strchr(csv, '\n') + 1;
  assert_true(*csv);
  for (int i = 0; i < column; i++) csv = strchr(csv, ',') + 1;
  return *csv == ',' ? NAN : strtod(csv, NULL);
}

int csv_assert_close(const char *csv, const char *reference, const char *what) {
  /* Rounding can turn a tie between experts. The one choice that moves shows in the router's losses most of all. */
  static const struct {
    int column;
    double tolerance;
  } checks[] = {{LOSS, 2e-4}, {AUX, 5e-3}, {Z, 1e-3}, {HELD_OUT, 2e-4}, {NORM, 1e-2}};
  int first = (int)csv_number(csv, 1, STEP), rows = csv_rows(csv);
  for (int i = 0; i < rows; i++) {
    assert_true(csv_number(csv, i + 1, STEP) == first + i);
    for (size_t c = 0; c < sizeof checks / sizeof *checks; c++) {
      double got = csv_number(csv, i + 1, checks[c].column),
             expected = csv_number(reference, first + i, checks[c].column);
      if (isnan(got) && isnan(expected)) continue;
      if (!(fabs(got - expected) <= checks[c].tolerance * fabs(expected)))
        fail_msg("%s: step %d, column %d: %.9g; %.9g was expected", what, first + i, checks[c].column, got, expected);
    }
  }
  return first;
}

void csv_drop_speed(char *csv) {
  char *to = csv;
  for (int column = 0; *csv; csv++) {
    column = *csv == '\n' ? 0 : column + (*csv == ',');
    if (column != SPEED) *to++ = *csv;
  }
  *to = 0;
}
