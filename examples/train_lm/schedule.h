/* The order in which a pipeline stage runs its micro-batches. The model's layers are cut into stages x chunks virtual
 * stages; virtual stage v is chunk v / stages of stage v mod stages. */
#ifndef LM_SCHEDULE_H
#define LM_SCHEDULE_H
#include <stdint.h>

#include "config.h"

struct lm_op {
  int backward, chunk;
  int64_t micro;
};

struct lm_ops {
  int64_t count;
  struct lm_op *op; /* free() it */
};

/* The micro-batches that a schedule runs for `micros` of them: interleaved, a multiple of the stages (the rest are
 * empty). */
int64_t schedule_micros(enum lm_schedule schedule, int stages, int64_t micros);

/* Of one stage: every micro-batch forward in each chunk, and backward too if training. Within a chunk both directions
 * take the micro-batches in order. */
struct lm_ops schedule_ops(enum lm_schedule schedule, int stages, int stage, int chunks, int64_t micros, int training);

/* The most micro-batches of a chunk whose backward is still to come. */
int64_t schedule_in_flight(const struct lm_ops *ops, int chunk);

#endif
