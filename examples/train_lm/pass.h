/* One micro-batch on its way through one chunk, for the files that take it there. */
#ifndef LM_PASS_H
#define LM_PASS_H
#include "layers.h"

struct lm_pass {
  struct lm_model *model;
  const struct lm_chunk *chunk;
  struct lm_slot *slot;
  const pmoe_step *step; /* NULL: no training */
  double since;          /* of the part that is being timed */
};

/* The time since the last lap goes to `part`. */
static inline void lap(struct lm_pass *pass, enum lm_part part) {
  double now = lm_now();
  pass->model->seconds[part] += now - pass->since;
  pass->since = now;
}

/* Both take layer `index` of the chunk from slot->layer[index].x to the next layer's x, or slot->x. */
void attention_half_forward(struct lm_pass *pass, int index);
void mlp_half_forward(struct lm_pass *pass, int index, float *next_x);
/* acts->dx is the gradient of what the half gives, and becomes that of what it takes. */
void mlp_half_backward(struct lm_pass *pass, int index);
void attention_half_backward(struct lm_pass *pass, int index);

/* slot->tokens to layer[0].x. */
void embed_forward(struct lm_pass *pass);
/* From acts->dx. */
void embed_backward(struct lm_pass *pass);
/* Sum of the own rows' losses; with `gradient` also acts->dx. */
double head_loss(struct lm_pass *pass, int gradient);
/* Logits [vocab] of an own row. */
void head_logits(struct lm_pass *pass, int64_t row, float *logits);

/* ---- shards ---- */

/* All rows of the TP group's ranks with sequence parallelism; otherwise held itself. room: [T, cols] of elements of
 * bytes_each. */
void *gather_rows(struct lm_pass *pass, void *held, void *room, int64_t cols, size_t bytes_each);
/* part [T,H] becomes the sum over the TP group; the result begins at this rank's held rows. */
float *sum_shards(struct lm_pass *pass, float *part);
/* The own rows of dx become known to the TP group: dx is of all held rows. */
void share_own_rows(struct lm_pass *pass, float *dx);
/* Keys and values of this rank's positions and those before, out of a->qkv: what attention reads. */
struct lm_qkv gather_keys(struct lm_pass *pass, struct lm_layer_acts *a);
/* acts->dkv, of all keys that this rank's queries see, is summed over the context's ranks into dqkv. */
void sum_keys(struct lm_pass *pass);

#endif
