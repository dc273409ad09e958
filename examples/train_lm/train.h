/* A run: steps, evaluations, checkpoints, and what is said about them. */
#ifndef LM_TRAIN_H
#define LM_TRAIN_H
#include "config.h"
#include "data.h"
#include "ranks.h"

struct lm_run {
  struct lm_config cfg; /* checked */
  struct lm_data data;
  int vocab;
  int interrupted; /* comes out: whether the run was stopped on the way */
};

/* One rank's part of a struct lm_run, for ranks_run. */
void train_rank(struct lm_ranks *ranks, void *run);

/* From now on SIGINT and SIGTERM end the run after the step that is under way; a second one ends it at once. */
void train_catch_signals(void);

#endif
