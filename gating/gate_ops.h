/* The router's inside: its handle, what one call works on, and the table of operations that a back end fills. */
#ifndef PMOEI_GATE_OPS_H
#define PMOEI_GATE_OPS_H
#include <pmoe/gate.h>
#include <stdbool.h>

#include "core/arena.h"
#include "core/ctx.h"

typedef struct pmoei_gate_ops pmoei_gate_ops;

struct pmoe_gate {
  pmoe_ctx *ctx;
  const pmoei_gate_ops *ops;
  pmoe_gate_config cfg; /* weight_scale and min_capacity with their defaults filled in */
  int32_t hidden, layer_id;
};

/* Tokens are worked on in blocks of this many, whatever the number of threads. */
enum { PMOEI_GATE_BLOCK = 64 };

/* What one block of tokens adds to the losses and statistics. A live token is unmasked and has finite logits. */
typedef struct pmoei_gate_tally {
  int32_t masked, nonfinite, live;
  double z_sum; /* of logsumexp² over live tokens */
} pmoei_gate_tally;

typedef struct pmoei_gate_totals {
  int64_t masked, nonfinite, live;
  double z_sum;
  double aux_sum; /* sum_e f_e P_e */
} pmoei_gate_totals;

struct pmoei_gate_tile;

/* One forward or backward after its arguments were checked. The second half is scratch. */
typedef struct pmoei_gate_call {
  const pmoe_gate *gate;
  pmoe_gate_params params;
  pmoe_step step;
  pmoe_mat x;
  pmoe_routing routing; /* the caller's arrays */
  int64_t tokens, blocks, capacity;
  bool backward;

  const float *dweight;
  float loss_scale;
  float *dlogits; /* [T,E] */
  pmoe_mat dx;

  pmoei_gate_totals totals;
  struct pmoei_gate_tile *tile; /* [threads] */
  pmoei_gate_tally *tally;      /* [blocks] */
  int64_t *block_count;         /* [blocks,E] choices with a slot; then the first slot of the block */
  int32_t *loss_count;          /* [blocks,E] choices that the aux loss counts */
  float *prob_sum;              /* [blocks,E] of softmax probabilities over live tokens */
  float *fraction;              /* [E] f_e; zeros without aux loss */
  double *expert_sum;           /* [E] */
  int64_t *contested;           /* [E+1] where the choices of each overfull expert lie in the next two */
  int64_t *contender;           /* [T K] choice t K + k */
  uint32_t *priority;           /* [T K] */
} pmoei_gate_call;

/* In forward: route, total, drop (if there is a capacity), place. In backward: input_grad, weight_grad, or one of them.
 */
struct pmoei_gate_ops {
  /* Takes the call's scratch from the arena; run twice, to measure and to carve. */
  void (*plan)(pmoei_gate_call *call, pmoei_arena *arena);
  /* Choices, their scores (as weights, before normalisation) and each block's share of counts and losses. */
  pmoe_status (*route)(pmoei_gate_call *call);
  /* Sums over blocks: expert_count, totals, fraction. */
  pmoe_status (*total)(pmoei_gate_call *call);
  /* Takes the slot from choices beyond the capacity. */
  pmoe_status (*drop)(pmoei_gate_call *call);
  /* Numbers the choices that have a slot, in token order within each expert; expert_rows; finished weights. */
  pmoe_status (*place)(pmoei_gate_call *call);
  /* dlogits, and dx += dlogits Wg. */
  pmoe_status (*input_grad)(pmoei_gate_call *call);
  /* weight_grad += dlogitsᵀ x, bias_grad += column sums of dlogits. */
  pmoe_status (*weight_grad)(pmoei_gate_call *call);
};

extern const pmoei_gate_ops pmoei_gate_ops_cpu;

static inline bool pmoei_gate_has_losses(const pmoe_gate *gate) {
  return gate->cfg.aux_coef > 0 || gate->cfg.z_coef > 0;
}

/* Scratch that forward and backward of up to `tokens` tokens need at most, with dlogits given or not. */
size_t pmoei_gate_scratch_bytes(const pmoe_gate *gate, int64_t tokens);

/* gate_check.c */
pmoe_status pmoei_gate_check_config(int32_t hidden, int32_t layer_id, const pmoe_gate_config *cfg);
/* A step for `tokens` tokens; NULL: evaluation, no mask. */
pmoe_status pmoei_gate_check_step(pmoe_step *out, const pmoe_step *step, int64_t tokens);
pmoe_status pmoei_gate_check_forward(pmoei_gate_call *call, const pmoe_gate *gate, const pmoe_gate_params *params,
                                     const pmoe_step *step, const pmoe_mat *x, const pmoe_routing *routing,
                                     const pmoe_gate_stats *stats);
pmoe_status pmoei_gate_check_backward(pmoei_gate_call *call, const pmoe_gate *gate, const pmoe_gate_params *params,
                                      const pmoe_step *step, const pmoe_mat *x, const pmoe_routing *routing,
                                      const float *dweight, float loss_scale, float *dlogits, const pmoe_mat *dx,
                                      pmoe_bwd which);

#endif
