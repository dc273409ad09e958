/* A Mixture-of-Experts layer: router, exchange, experts and dense branch behind one forward and one backward.
 *
 * layer: parameters and configuration, long-lived. stash: what one forward keeps for its backward, one per micro-batch
 * in flight; forward of the next micro-batch may come before backward of this one as long as each has its own stash. */
#ifndef PMOE_LAYER_H
#define PMOE_LAYER_H
#include <pmoe/a2a.h>
#include <pmoe/experts.h>
#include <pmoe/gate.h>
#include <pmoe/residual.h>
#include <pmoe/types.h>

typedef struct pmoe_layer_config {
  size_t size;
  int32_t hidden;                       /* H */
  int32_t layer_id;                     /* keys random numbers and initial values; unique in the model */
  int32_t ep;                           /* expert-parallel size of this layer; 0: the topology's */
  const pmoe_gate_config *gate;         /* required */
  const pmoe_a2a_config *a2a;           /* NULL: eager, no bound */
  const pmoe_experts_config *experts;   /* required; inner is over all ETP ranks, of which each has a part */
  const pmoe_residual_config *residual; /* NULL: none; inner is over all TP ranks */
  /* Whose tokens the losses are taken over (retained): micro_batch the ranks that share one micro-batch (NULL: the
   * topology's TP x CP), loss_global those of global_aux_coef (NULL: all ranks of the stage). */
  pmoe_comm *micro_batch, *loss_global;
  int32_t max_sequences; /* seq_aux_coef: the most sequences of a micro-batch; 1 or more is required then */
  float load_decay;      /* of the moving averages in pmoe_load; 0: 0.99 */
} pmoe_layer_config;

typedef struct pmoe_stash_config {
  size_t size;
  /* Largest T this stash serves. With sequence parallelism and a dense branch, TP times as many is the most that the
   * ranks of the TP group bring together. */
  int64_t max_tokens;
  /* Largest R; more is an error on every rank of the group (ERR_ARG). 0: the a2a's bound, or (eager without a bound)
   * grow with what comes, up to a sixteenth beyond it. */
  int64_t max_recv_rows;
  int32_t split_backward; /* 1: room for backward in two parts (PMOE_BWD_INPUT, then PMOE_BWD_WEIGHT) */
} pmoe_stash_config;

#ifdef __cplusplus
extern "C" {
#endif

/* Collective over the topology's stage: the configuration is compared, and a difference refused on every rank with the
 * field and the two ranks (ERR_MISMATCH). topology NULL: this rank alone. */
PMOE_API pmoe_status pmoe_layer_create(pmoe_ctx *ctx, pmoe_topology *topology, const pmoe_layer_config *cfg,
                                       pmoe_layer **out);
/* Not collective; NULL is allowed. Stashes keep what they need of the layer. */
PMOE_API void pmoe_layer_destroy(pmoe_layer *layer);

/* Bytes of memory a stash needs. ERR_ARG if R has no bound (eager with neither bound given). */
PMOE_API pmoe_status pmoe_stash_bytes(const pmoe_layer *layer, const pmoe_stash_config *cfg, size_t *bytes);
/* mem (64-byte aligned, `bytes` of it) is borrowed; NULL: from the context's allocator. A stash without a bound on R
 * takes its row memory in forward, from the allocator, when more rows come than ever before; every other stash
 * allocates here only. */
PMOE_API pmoe_status pmoe_stash_create(pmoe_layer *layer, const pmoe_stash_config *cfg, void *mem, size_t bytes,
                                       pmoe_stash **out);
PMOE_API void pmoe_stash_destroy(pmoe_stash *stash);
/* Scratch that forward and backward of this stash's sizes need at most (see pmoe_ctx_set_scratch); layers share one
 * scratch. */
PMOE_API pmoe_status pmoe_layer_scratch_bytes(const pmoe_layer *layer, const pmoe_stash_config *cfg, size_t *bytes);

/* Collective over the ranks that together hold all experts, and over the TP group if its ranks bring the same tokens or
 * share a dense branch. Without sequence parallelism the ranks of a TP group give the same x and step (another T is
 * ERR_MISMATCH) and get the same y; each routes a slice of the tokens, larger slices first, and metrics, capacity and
 * the stash's routing are of the slice. x, y [T,H] in the experts' dtype, T <= max_tokens, different T on
 * each rank and T = 0 included. x is borrowed until the backward of this stash is done and must keep its values; y must
 * not overlap x. step NULL: evaluation, no mask. A masked token's y is zero; with a dense branch its x must be finite.
 * An argument error on one rank is returned there and makes the peers' call fail with ERR_COMM; outputs stay untouched
 * then. */
PMOE_API pmoe_status pmoe_layer_forward(pmoe_layer *layer, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x,
                                        pmoe_mat *y, pmoe_stream stream);

/* Collective as forward is (WEIGHT: local). dy, dx [T,H]; dx is written. Without sequence parallelism dy is the same on
 * the ranks of a TP group, and so is dx. Parameter gradients are added to:
 * unscaled sums over this rank's tokens (experts: over all tokens that reached them). loss_scale multiplies the
 * gradients of the aux and z losses; use what turns this rank's mean losses into the units of dy. WEIGHT needs dy
 * unchanged since INPUT and ignores dx (may be NULL). ERR_STATE without a forward to go back from. */
PMOE_API pmoe_status pmoe_layer_backward(pmoe_layer *layer, pmoe_stash *stash, float loss_scale, const pmoe_mat *dy,
                                         pmoe_mat *dx, pmoe_bwd which, pmoe_stream stream);

/* The routing of the latest forward; arrays are borrowed until the next one. */
PMOE_API pmoe_status pmoe_stash_routing(const pmoe_stash *stash, pmoe_routing *out);

#ifdef __cplusplus
}
#endif
#endif
