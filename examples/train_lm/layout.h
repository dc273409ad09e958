/* Where a rank stands: the world is a grid of tensor, context, data and pipeline coordinates, of which the first varies
 * fastest (pmoe's "tp-cp-ep-dp-pp"). */
#ifndef LM_LAYOUT_H
#define LM_LAYOUT_H
#include <stdint.h>

#include "config.h"

struct lm_layout {
  int tp, cp, dp, pp; /* sizes */
  int tp_rank, cp_rank, dp_rank, pp_rank;
  int sp; /* whether the ranks of a TP group share out the tokens between matrix products */
};

/* cfg is checked for nranks ranks. */
struct lm_layout layout_of(const struct lm_config *cfg, int nranks, int rank);
/* The rank beside this one in pipeline stage `stage`. */
int layout_rank_in_stage(const struct lm_layout *at, int stage);

/* The tokens of one micro-batch on one rank. Context parallelism leaves it a contiguous part of each sequence; these
 * `all` tokens lie sequence after sequence. The ranks of a TP group have the same: with sequence parallelism each holds
 * a share of the rows between matrix products, without it all. A rank's own rows are its share in either case: those
 * that it alone embeds and predicts. */
struct lm_rows {
  int sequences, length; /* of each sequence's part here */
  int first_position;    /* of that part in its sequence */
  int64_t all;
  int64_t first, held;    /* the held rows are [first, first + held) of all */
  int64_t own_first, own; /* the own rows are [own_first, own_first + own) of the held ones */
};

/* Sequences of `length` tokens, a multiple of CP x TP. */
struct lm_rows layout_rows(const struct lm_layout *at, int sequences, int length);

/* Where held row `row` is among the [sequences, length] tokens of the whole micro-batch. */
static inline int64_t layout_token(const struct lm_layout *at, const struct lm_rows *rows, int64_t row) {
  int64_t place = rows->first + row, sequence = place / rows->length;
  return sequence * rows->length * at->cp + rows->first_position + place % rows->length;
}

#endif
