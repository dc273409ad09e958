/* Whole runs of train_lm in a folder. */
#ifndef TRAIN_LM_PROGRAM_H
#define TRAIN_LM_PROGRAM_H
#include <sys/types.h>

#include "train_lm/folder.h"

/* Columns of metrics.csv. */
enum { STEP = 0, LOSS = 2, AUX = 3, Z = 4, HELD_OUT = 5, NORM = 7, SPEED = 8 };

/* Starts `launcher train_lm arguments` in the folder, what it says in "log". Both are words with one space between,
 * launcher a path first, or empty. */
pid_t program_start(const struct folder *folder, const char *launcher, const char *arguments);
/* Waits for its end and returns the exit status; -1 if a signal ended it. */
int program_finish(pid_t child);

/* Steps in metrics.csv of the run's folder, so far. */
int program_steps(const struct folder *folder, const char *run);
/* Waits until the run has done that many, or has ended. */
void program_wait_for_steps(const struct folder *folder, pid_t child, const char *run, int steps);

/* Runs it to its end and fails the test unless the status is 0. */
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
