/* The router's inside: its handle, what one call works on, and the table of operations that a back end fills. */
#ifndef PMOEI_GATE_OPS_H
#define PMOEI_GATE_OPS_H
#include <pmoe/gate.h>
#include <stdbool.h>

#include "core/arena.h"
#include "core/ctx.h"
#include "core/data.h"
#include "gating/gate_math.h"

typedef struct pmoei_gate_ops pmoei_gate_ops;

struct pmoe_gate {
  pmoe_ctx *ctx;
  const pmoei_gate_ops *ops;
  pmoe_gate_config cfg; /* weight_scale and min_capacity with their defaults filled in */
  int32_t hidden, layer_id;
  pmoe_loss_sum micro_batch, global;
  /* Data memory, as all that follows but `report`. */
  int64_t *choice_count; /* [E] of training forwards since pmoe_gate_take_counts */
  /* What the global loss divides: counted choices [E] and live tokens of the micro-batches of step `global_step`; NULL
   * without that loss. */
  int64_t *global_sums;
  double *global_prob; /* [E] this rank's probabilities, summed over the same micro-batches */
  uint64_t global_step;
  struct pmoei_gate_report *report; /* for pmoe_gate_forward's statistics */
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
} pmoei_gate_totals;

/* Losses with their coefficients; this rank's share. */
typedef struct pmoei_gate_losses {
  double aux, seq_aux, global_aux, z;
} pmoei_gate_losses;

/* What a forward's statistics are made of. */
typedef struct pmoei_gate_report {
  pmoei_gate_totals totals;
  pmoei_gate_losses losses;
  int64_t tokens;
  int64_t count[]; /* expert_count [E], expert_rows [E] */
} pmoei_gate_report;

struct pmoei_gate_tile;

/* One forward or backward after its arguments were checked. The last part is scratch. */
typedef struct pmoei_gate_call {
  const pmoe_gate *gate;
  pmoe_gate_params params;
  pmoe_step step;
  pmoe_mat x;
  pmoe_routing routing; /* the caller's arrays */
  int64_t tokens, blocks, capacity;
  int32_t num_sequences; /* 0 without the sequence loss */
  bool backward;

  const float *dweight;
  float loss_scale;
  float *dlogits; /* [T,E] */
  pmoe_mat dx;

  bool counts_for_later; /* training, and not repeated */

  pmoei_gate_report *result;    /* totals and losses */
  struct pmoei_gate_tile *tile; /* [threads] */
  pmoei_gate_tally *tally;      /* [blocks] */
  int64_t *block_count;         /* [blocks,E] choices with a slot; then the first slot of the block */
  int32_t *loss_count;          /* [blocks,E] choices that the aux losses count */
  float *prob_sum;              /* [blocks,E] of probabilities over live tokens */
  double *prob_total;           /* [E] */
  float *probability;           /* [T,E] of live tokens, else 0: for the sequence loss */
  double *seq_prob_total;       /* [num_sequences,E] */
  float *slope;                 /* [E] gradient of the losses by a token's probability of each expert */
  float z_factor;               /* gradient of the z-loss by logsumexp, divided by logsumexp */
  float *seq_slope;             /* [num_sequences,E] the sequence loss's part of that */
  double *expert_sum;           /* [E] */
  int64_t *contested;           /* [E+1] where the choices of each overfull expert lie in the next two */
  int64_t *contender;           /* [T K] choice t K + k */
  uint32_t *priority;           /* [T K] */
  float *all_logits;            /* [blocks,E,PMOEI_GATE_BLOCK] where a choice looks at all tokens */
  float *all_scores;            /* the same of what it compares */
  double *token_factor;         /* [blocks,PMOEI_GATE_BLOCK] of Sinkhorn's iteration */
  double *expert_factor;        /* [E] */
  double *column_sum;           /* [blocks,E] */
  uint64_t *picked;             /* [blocks,E] a bit for each token that the expert picked */
  uint32_t *pick_key;           /* [threads, blocks PMOEI_GATE_BLOCK] */

  /* On CUDA, where `padded` is the number of tokens rounded up to whole blocks, and rows are of experts: */
  int64_t padded;
  float *logits;       /* [E,padded] */
  float *selection;    /* [E,padded] what the choice compares, if not the logits */
  float *group;        /* [num_groups,padded] group scores */
  int32_t *plain;      /* [T,K] choices that the losses count, if not the choices */
  int32_t *drawn;      /* [K,padded] a token's choices so far, in order: for the hash */
  float *input;        /* [input_rows,H] x in float32 */
  int64_t input_rows;  /* a multiple of PMOEI_GATE_BLOCK */
  int64_t *seq_prob;   /* [num_sequences,E] sums of probabilities in fixed point */
  int64_t *picks;      /* [E] tokens that the expert picked */
  int64_t *iteration;  /* Sinkhorn's: tokens that take part, and whether it has converged */
  double *partial_sum; /* [slices,E] column sums of dlogits */
} pmoei_gate_call;

/* In forward: route, total, (sums over ranks), add_to_step (with a global loss, if it counts for later), losses, drop
 * (if there is a capacity), place. In backward: input_grad, weight_grad, or one of them. On CUDA everything is enqueued
 * on the context's stream. */
struct pmoei_gate_ops {
  /* Takes the call's scratch from the arena; run twice, to measure and to carve. */
  void (*plan)(pmoei_gate_call *call, pmoei_arena *arena);
  /* Choices, their scores (as weights, before normalisation) and each block's share of counts and losses. */
  pmoe_status (*route)(pmoei_gate_call *call);
  /* Sums over blocks: expert_count, totals, loss_sums. */
  pmoe_status (*total)(pmoei_gate_call *call);
  /* Adds what the global loss divides to the gate's sums, which start anew if `anew`. */
  pmoe_status (*add_to_step)(pmoei_gate_call *call, bool anew);
  /* The losses' values, once loss_sums hold what all ranks counted. */
  pmoe_status (*losses)(pmoei_gate_call *call);
  /* Takes the slot from choices beyond the capacity. */
  pmoe_status (*drop)(pmoei_gate_call *call);
  /* Numbers the choices that have a slot, in token order within each expert; expert_rows; finished weights; the gate's
   * choice_count if it counts for later. */
  pmoe_status (*place)(pmoei_gate_call *call);
  /* dlogits, and dx += dlogits Wg. */
  pmoe_status (*input_grad)(pmoei_gate_call *call);
  /* weight_grad += dlogitsᵀ x, bias_grad += column sums of dlogits. */
  pmoe_status (*weight_grad)(pmoei_gate_call *call);
  /* What pmoei_selection_bias_update does. */
  pmoe_status (*update_bias)(pmoe_ctx *ctx, int32_t num_experts, const int64_t *count, float rate, int32_t centred,
                             float *bias);
};

extern const pmoei_gate_ops pmoei_gate_ops_cpu, pmoei_gate_ops_cuda;

static inline bool pmoei_gate_has_aux(const pmoe_gate *gate) {
  return gate->cfg.aux_coef > 0 || gate->cfg.seq_aux_coef > 0 || gate->cfg.global_aux_coef > 0;
}

static inline bool pmoei_gate_has_losses(const pmoe_gate *gate) {
  return pmoei_gate_has_aux(gate) || gate->cfg.z_coef > 0;
}

/* Whether the choice is made on values other than the logits. */
static inline bool pmoei_gate_limits_choice(const pmoe_gate *gate) {
  return gate->cfg.selection_bias || gate->cfg.num_groups > 1;
}

/* Whether the losses count other choices than those that were made. */
static inline bool pmoei_gate_counts_plain(const pmoe_gate *gate) {
  return gate->cfg.aux_plain_topk && (gate->cfg.choice != PMOE_CHOICE_TOPK || pmoei_gate_limits_choice(gate));
}

static inline bool pmoei_gate_looks_at_all(const pmoei_gate_call *call) {
  pmoe_choice choice = call->gate->cfg.choice;
  return choice == PMOE_CHOICE_EXPERT_CHOICE || (choice == PMOE_CHOICE_SINKHORN && call->step.training);
}

/* Counted choices per token, for the aux losses. */
static inline int32_t pmoei_gate_counted(const pmoe_gate *gate) {
  return gate->cfg.aux_first_choice_only ? 1 : gate->cfg.top_k;
}

/* Rows of routing.loss_sums, and the first number of each kind. */
static inline int64_t pmoei_gate_loss_rows(const pmoe_gate *gate, int32_t num_sequences) {
  if (!pmoei_gate_has_losses(gate)) return 0;
  return 1 + (gate->cfg.seq_aux_coef > 0 ? num_sequences : 0) + (gate->cfg.global_aux_coef > 0 ? 1 : 0);
}
static inline int64_t *pmoei_gate_micro_sums(const pmoei_gate_call *call) { return call->routing.loss_sums; }
static inline int64_t *pmoei_gate_seq_sums(const pmoei_gate_call *call, int64_t sequence) {
  return call->routing.loss_sums + (1 + sequence) * (call->gate->cfg.num_experts + 1);
}
static inline int64_t *pmoei_gate_global_sums(const pmoei_gate_call *call) {
  return pmoei_gate_seq_sums(call, call->num_sequences);
}
static inline int32_t pmoei_gate_sequence_of(const pmoei_gate_call *call, int64_t token) {
  if (call->step.sequence) return call->step.sequence[token];
  return (int32_t)(token / (call->tokens / call->num_sequences));
}

/* Whether the global loss is taken over all micro-batches of the step so far, if they had live tokens, or, where this
 * call does not belong to them, over this call alone. */
static inline bool pmoei_gate_is_of_step(const pmoei_gate_call *call) {
  return call->step.training && call->gate->global_step == call->step.step;
}

/* ---- what a layer uses ---- */

size_t pmoei_gate_report_bytes(const pmoe_gate *gate);
/* pmoe_gate_forward that does not wait. `report` (host memory, pinned on CUDA; may be NULL) is filled when the stream
 * has passed. */
pmoe_status pmoei_gate_forward(pmoe_gate *gate, const pmoe_gate_params *params, const pmoe_step *step,
                               const pmoe_mat *x, pmoe_routing *routing, pmoei_gate_report *report, pmoe_stream stream);
pmoe_gate_stats pmoei_gate_statistics(const pmoe_gate *gate, const pmoei_gate_report *report);
/* The counts that pmoe_gate_take_counts takes, in data memory, and setting them to zero on the context's stream. */
static inline const int64_t *pmoei_gate_counts(const pmoe_gate *gate) { return gate->choice_count; }
pmoe_status pmoei_gate_clear_counts(pmoe_gate *gate);
/* pmoe_selection_bias_update on data memory. The counts are not looked at first. */
pmoe_status pmoei_selection_bias_update(pmoe_ctx *ctx, int32_t num_experts, const int64_t *count, float rate,
                                        int32_t centred, float *bias);

/* Scratch that forward and backward of up to `tokens` tokens need at most, with dlogits given or not. */
size_t pmoei_gate_scratch_bytes(const pmoe_gate *gate, int64_t tokens, int32_t num_sequences);

/* Slots per expert of a call with that many tokens; 0: dropless. Experts that choose count tokens, not choices. */
pmoe_status pmoei_gate_slots(const pmoe_gate_config *cfg, int64_t tokens, bool training, int64_t *capacity);

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
