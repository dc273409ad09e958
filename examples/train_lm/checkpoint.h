/* Checkpoints: parameters, optimizer state and progress in one safetensors file that any number of ranks can read. */
#ifndef LM_CHECKPOINT_H
#define LM_CHECKPOINT_H
#include "data.h"
#include "model.h"
#include "ranks.h"

/* Progress of a run beside its parameters. Random numbers are functions of (seed, step, place), so that these two are
 * all the generator's state. */
struct lm_state {
  uint64_t seed;
  int64_t step; /* steps done */
  int64_t tokens_seen;
  double held_out_loss;             /* latest, NaN before the first */
  char config_text[LM_CONFIG_TEXT]; /* config_write */
  char data_text[LM_DATA_TEXT];     /* data_describe; empty in checkpoints that do not tell */
};

/* path is a file; for checkpoint_load and checkpoint_config it may be a folder that holds CHECKPOINT_NAME. */
#define CHECKPOINT_NAME "checkpoint.safetensors"

/* Collective over all ranks. The file appears whole or not at all: a file of that name stays until the new one is on
 * the disk. Returns 0, or -1 on every rank with a sentence in err. */
int checkpoint_save(const char *path, const struct lm_model *model, const struct lm_state *state,
                    struct lm_ranks *ranks, struct lm_error *err);

/* Not collective: whether a checkpoint could be begun at path. Makes the folder. */
int checkpoint_try(const char *path, struct lm_error *err);

/* Collective over all ranks. Fills the master values and optimizer state of every parameter of this rank (and data,
 * through model_round_params) and the state. Returns 0, or -1 on every rank. */
int checkpoint_load(const char *path, struct lm_model *model, struct lm_state *state, struct lm_ranks *ranks,
                    struct lm_error *err);

/* Not collective: the settings alone, so that a model can be made that fits the file. */
int checkpoint_config(const char *path, char text[LM_CONFIG_TEXT], struct lm_error *err);

#endif
