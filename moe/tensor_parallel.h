/* What the ranks of a tensor-parallel group do together in a layer: agree on their tokens, gather rows, sum rows. */
#ifndef PMOEI_TENSOR_PARALLEL_H
#define PMOEI_TENSOR_PARALLEL_H
#include <pmoe/layer.h>
#include <stdbool.h>

/* A part of `total` in contiguous parts whose sizes differ by at most one, larger ones first. */
typedef struct pmoei_block {
  int64_t first, count, total;
} pmoei_block;

static inline pmoei_block pmoei_block_of(int64_t total, int32_t parts, int32_t part) {
  int64_t small = total / parts, larger = total % parts;
  return (pmoei_block){part * small + (part < larger ? part : larger), small + (part < larger), total};
}

struct pmoei_tokens;

/* Whether forward and backward communicate over the TP group. */
bool pmoei_tp_used(const pmoe_layer *layer);

/* Most of each kind of token for a stash of max_tokens, and this rank's among `given` ones that every rank has. */
struct pmoei_tokens pmoei_tp_most_tokens(const pmoe_layer *layer, int64_t max_tokens);

/* The TP group's agreement at the start of a forward: `mine` is the outcome of this rank's checks, and stash only
 * looked at if that is PMOE_OK. Sets stash->tp_tokens and stash->tokens. */
pmoe_status pmoei_tp_meet(pmoe_layer *layer, pmoe_stash *stash, int64_t given, pmoe_status mine);
/* After all ranks of the exchange group have agreed on `mine`: those of the TP group do, unless they have. */
pmoe_status pmoei_tp_settle(pmoe_layer *layer, const char *what, pmoe_status mine);
/* Before the first exchange of a call: all ranks of the exchange group and of the TP group agree. */
pmoe_status pmoei_layer_agree(pmoe_layer *layer, const char *what, pmoe_status mine);
/* pmoei_comm_fail for every group that forward and backward use. */
pmoe_status pmoei_layer_fail(pmoe_layer *layer, pmoe_status status);

/* Index of this rank's first token among those of its TP group. */
int64_t pmoei_tp_own_first(const pmoe_stash *stash);
/* This rank's rows among those of its TP group: a part of `mat` that has them all. */
pmoe_mat pmoei_tp_own_rows(const pmoe_stash *stash, const pmoe_mat *mat);

/* Collective over the TP group. Rows [own,cols] and a number beside each, in rank order, to every rank: all
 * [sum of own,cols]. Either pair may be NULL. */
typedef struct pmoei_tp_rows {
  const char *what;
  pmoe_mat *own, *all;
  float *own_value, *all_value;
} pmoei_tp_rows;
pmoe_status pmoei_tp_gather(pmoe_stash *stash, const pmoei_tp_rows *rows);
/* The other way, from different rows on every rank: own is their sum, in float32 and in rank order. */
pmoe_status pmoei_tp_sum(pmoe_stash *stash, const pmoei_tp_rows *rows);
/* Scratch that either needs at most. */
size_t pmoei_tp_scratch_bytes(const pmoe_layer *layer, int64_t own, int64_t all);

#endif
