/* A step's sequences, and those of an evaluation, in micro-batches that the data-parallel ranks share out in order. */
#ifndef LM_BATCHES_H
#define LM_BATCHES_H
#include "data.h"
#include "model.h"

struct lm_batches {
  const struct lm_config *cfg;
  const struct lm_data *data;
  int32_t *tokens, *targets; /* of one micro-batch */
  int held_out;
  uint64_t step;
  int64_t sequences;    /* of all ranks */
  int64_t begin, count; /* this rank's micro-batches */
};

void batches_create(struct lm_batches *batches, const struct lm_config *cfg, const struct lm_data *data);
void batches_destroy(struct lm_batches *batches);

/* Those of a step (from 0), or `sequences` evenly spread held-out sequences: as many micro-batches for every rank, the
 * last one perhaps empty. What was handed out before is void. */
struct lm_feed batches_of_step(struct lm_batches *batches, const struct lm_layout *at, uint64_t step);
struct lm_feed batches_held_out(struct lm_batches *batches, const struct lm_layout *at, int64_t sequences);

#endif
