/* Whole runs of train_lm in a folder. */
#ifndef TRAIN_LM_PROGRAM_H
#define TRAIN_LM_PROGRAM_H
#include "train_lm/folder.h"

/* Columns of metrics.csv. */
enum { STEP = 0, LOSS = 2, AUX = 3, Z = 4, HELD_OUT = 5, NORM = 7, SPEED = 8 };

/* Runs `launcher train_lm arguments` in a shell, what it says in the folder's "log". Returns the exit status; -1 if a
 * signal ended it. */
int program_run(const struct folder *folder, const char *launcher, const char *arguments);
/* Fails the test unless the status is 0. */
void program_succeeds(const struct folder *folder, const char *launcher, const char *arguments);
/* Fails the test unless the status is that and the log holds `says`. */
void program_says(const struct folder *folder, const char *launcher, const char *arguments, int status,
                  const char *says);

/* Rows after the header. */
int csv_rows(const char *csv);
/* Column `column` (from 0) of row `row` (from 1) of a csv; NaN if empty. */
double csv_number(const char *csv, int row, int column);
/* Every row of one metrics.csv against the reference's row of the same step, up to rounding. Returns the first step. */
int csv_assert_close(const char *csv, const char *reference, const char *what);
/* Cuts out metrics.csv's tokens_per_second, the one column that may differ between equal runs. */
void csv_drop_speed(char *csv);

#endif
