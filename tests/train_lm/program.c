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

double csv_number(const char *csv, int row, int column) {
  for (int i = 0; i < row; i++) csv = strchr(csv, '\n') + 1;
  assert_true(*csv);
  for (int i = 0; i < column; i++) csv = strchr(csv, ',') + 1;
  return *csv == ',' ? NAN : strtod(csv, NULL);
}

void csv_drop_speed(char *csv) {
  char *to = csv;
  for (int column = 0; *csv; csv++) {
    column = *csv == '\n' ? 0 : column + (*csv == ',');
    if (column != 8) *to++ = *csv;
  }
  *to = 0;
}
