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
  char changes[LM_CONFIG_TEXT]; /* of a run that goes on: its settings that are new, a line each */
  int stopped_by;               /* comes out: the signal that stopped the run, or 0 */
};

/* One rank's part of a struct lm_run, for ranks_run. */
void train_rank(struct lm_ranks *ranks, void *run);

/* From now on SIGINT and SIGTERM end the run after the step that is under way; a second one ends it at once. */
void train_catch_signals(void);

#endif
