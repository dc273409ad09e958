#include "train_lm/program.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <cmocka.h>

int program_run(const struct folder *folder, const char *launcher, const char *arguments) {
  char command[2048];
  snprintf(command, sizeof command, "cd %s && %s %s %s >log 2>&1", folder->path, launcher, TRAIN_LM, arguments);
  int status = system(command);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void program_succeeds(const struct folder *folder, const char *launcher, const char *arguments) {
  program_says(folder, launcher, arguments, 0, "");
}

void program_says(const struct folder *folder, const char *launcher, const char *arguments, int status,
                  const char *says) {
  int got = program_run(folder, launcher, arguments);
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
