/* The layer's inside. */
#ifndef PMOEI_LAYER_H
#define PMOEI_LAYER_H
#include <pmoe/layer.h>
#include <pmoe/metrics.h>
#include <pmoe/params.h>
#include <pmoe/topology.h>
#include <stdbool.h>

#include "a2a/a2a.h"
#include "a2a/topology.h"
#include "core/ctx.h"
#include "gating/gate_ops.h"
#include "moe/activation.h"
#include "moe/clock.h"
#include "moe/layer_ops.h"
#include "moe/ops.h"
#include "moe/tensor_parallel.h"

/* Every parameter a layer can have, in the order in which pmoe_layer_param lists those it has. */
typedef enum pmoei_param_kind {
  PMOEI_ROUTER_WEIGHT,
  PMOEI_ROUTER_BIAS,
  PMOEI_SELECTION_BIAS,
  PMOEI_FC1_WEIGHT,
  PMOEI_FC1_BIAS,
  PMOEI_FC2_WEIGHT,
  PMOEI_FC2_BIAS,
  PMOEI_RESIDUAL_FC1_WEIGHT,
  PMOEI_RESIDUAL_FC1_BIAS,
  PMOEI_RESIDUAL_FC2_WEIGHT,
  PMOEI_RESIDUAL_FC2_BIAS,
  PMOEI_MIX_WEIGHT,
  PMOEI_MIX_BIAS,
  PMOEI_NUM_PARAM_KINDS
} pmoei_param_kind;

/* What pmoe_layer_load reads. */
typedef struct pmoei_load {
  pmoe_load values;
  int64_t *count; /* [E] */
  float *share;   /* [E] */
} pmoei_load;

struct pmoe_layer {
  pmoe_ctx *ctx;
  const pmoei_layer_ops *ops;
  int32_t refs;              /* the creator and every stash */
  pmoei_layer_groups groups; /* retained */
  pmoe_layer_config cfg;     /* its pointers point at the four below, or are NULL */
  pmoe_gate_config gate_cfg;
  pmoe_a2a_config a2a_cfg;
  pmoe_experts_config experts_cfg;
  pmoe_residual_config residual_cfg;
  int32_t first_expert, num_local;
  char backward_name[48]; /* of its agreement: ranks in different layers notice */
  /* This rank's shards of F, and their F1; 0 without a branch. */
  pmoei_block inner, residual_inner;
  int64_t pre_cols, residual_pre_cols;
  bool replicated;     /* the ranks of the TP group bring the same tokens, and each routes a slice of them */
  bool sharded_branch; /* over the TP group */
  int64_t *tp_counts;  /* [2 * tp] for a branch whose ranks bring different tokens */
  int64_t *tp_lists;   /* [4 * tp] of an exchange over the TP group */
  pmoe_gate *gate;
  pmoe_a2a *a2a;
  pmoe_experts *experts;
  pmoe_residual *residual;
  pmoe_comm *micro_batch, *loss_global; /* retained; NULL: this rank alone */
  pmoei_load load;
  int32_t num_params;
  pmoe_param param[PMOEI_NUM_PARAM_KINDS]; /* the first num_params */
  pmoei_param_kind kind[PMOEI_NUM_PARAM_KINDS];
};

/* Where a stash is between forward and backward. */
typedef enum pmoei_stash_state { PMOEI_STASH_EMPTY, PMOEI_STASH_FORWARD, PMOEI_STASH_INPUT_DONE } pmoei_stash_state;

/* Numbers of tokens in one forward. */
typedef struct pmoei_tokens {
  int64_t given;  /* T: rows of x */
  int64_t own;    /* those this rank routes: T, or its slice of them */
  int64_t branch; /* those the dense branch sees: of the whole TP group if it is sharded, else own */
} pmoei_tokens;

/* What a dense branch that is sharded over the TP group holds of all its tokens. Of a stash for split passes the first
 * three are in the stash. */
typedef struct pmoei_branch_room {
  pmoe_mat x, dy;   /* [branch,H]; not where the host's matrices have all tokens */
  float *row_scale; /* [branch] */
  pmoe_mat out;     /* [branch,H] this rank's part of the branch's output, or of its dx */
  float *dscale;    /* [branch] */
} pmoei_branch_room;

struct pmoe_stash {
  pmoe_layer *layer; /* retained */
  pmoe_stash_config cfg;
  pmoei_stash_state state;
  bool has_run;
  pmoe_plan *plan;
  /* Two blocks: one sized by tokens, one by rows; a stash without a bound on rows grows the second. */
  void *token_block, *row_block;
  size_t token_bytes, row_bytes;
  bool owns_blocks;
  int64_t row_capacity;
  int64_t *tp_tokens;        /* [tp] tokens of each rank of the TP group; host memory, as all that follows by value */
  pmoei_gate_report *report; /* what the router found, in pinned memory */
  bool reported;             /* it has been taken into the load */
  pmoei_clock clock;
  /* by tokens */
  pmoe_routing routing; /* of the own tokens */
  pmoe_routing moved;   /* what the exchange is given: a choice of an expert is one of each of its shards */
  float *scale, *branch_scale;
  pmoe_mat residual_pre, residual_dpre;
  float *dlogits, *dmix;
  pmoei_branch_room branch;
  /* by rows */
  pmoe_mat x_rows, pre, dy_rows, dpre;
  float *row_weight;
  /* of the micro-batch in flight */
  pmoe_mat logits, dlogits_own; /* this rank's slice of the host's, where the TP group routes a slice each; */
  float *host_dweight;          /* and the host's whole gradients */
  pmoe_mat host_dlogits;
  pmoei_tokens tokens;
  pmoe_step step; /* of the own tokens */
  pmoe_mat x;     /* the own tokens, in the host's memory */
  pmoe_mat given; /* all that the host gave */
  pmoe_metrics metrics;
};

/* balance.c */
pmoe_status pmoei_layer_create_balance(pmoe_layer *layer); /* once the groups are there */
void pmoei_layer_destroy_balance(pmoe_layer *layer);
/* Whether a loss is taken over several ranks, so that the router's forward communicates. */
bool pmoei_layer_shares_losses(const pmoe_layer *layer);
/* Before such a forward: every rank brings the outcome of its checks, as in pmoei_comm_agree. */
pmoe_status pmoei_layer_agree_on_losses(pmoe_layer *layer, pmoe_status mine);
/* Scratch of the sums over ranks. */
size_t pmoei_layer_loss_scratch(const pmoe_layer *layer);
/* This rank failed after that. */
void pmoei_layer_fail_losses(pmoe_layer *layer, pmoe_status status);
void pmoei_layer_note_load(pmoe_layer *layer, const pmoe_step *step, const pmoe_gate_stats *stats,
                           const int64_t *expert_count);

void pmoei_layer_retain(pmoe_layer *layer);
void pmoei_layer_release(pmoe_layer *layer);

static inline bool pmoei_param_has_grad(const pmoe_param *p) {
  return p->numel > 0 && p->reduce_group != PMOE_GROUP_NONE;
}

/* Takes what the router reported into metrics and, once a forward, into the load. The report must have come. */
void pmoei_stash_take_report(pmoe_stash *stash);

/* Fills layer->param. */
void pmoei_layer_list_params(pmoe_layer *layer);

/* A parameter that the host may write: itself, or on a device a copy, which closing carries over. */
pmoe_status pmoei_param_open(const pmoe_layer *layer, const pmoe_param *p, pmoe_param *on_host);
pmoe_status pmoei_param_close(const pmoe_layer *layer, const pmoe_param *p, pmoe_param *on_host);

/* The bound pointers in the form the parts take. ERR_STATE names the first that is missing. */
typedef struct pmoei_bound {
  pmoe_gate_params gate;
  pmoe_experts_params experts;
  pmoe_residual_params residual;
} pmoei_bound;
pmoe_status pmoei_layer_bound(const pmoe_layer *layer, bool need_grad, pmoei_bound *out);

/* Places the stash's arrays for these tokens and R rows. ERR_NOMEM if the row block has to grow and cannot; ERR_ARG
 * past a bound. */
void pmoei_stash_place_tokens(pmoe_stash *stash, pmoei_tokens tokens);
pmoe_status pmoei_stash_place_rows(pmoe_stash *stash, int64_t rows);
/* Bytes that backward needs of the stash for its present tokens and R. */
size_t pmoei_stash_saved_bytes(const pmoe_stash *stash, int64_t rows);

/* Temporaries of the two passes, their parts' included. */
size_t pmoei_layer_forward_scratch(const pmoe_layer *layer, pmoei_tokens tokens, int64_t rows, bool split);
size_t pmoei_layer_backward_scratch(const pmoe_layer *layer, pmoei_tokens tokens, int64_t rows, bool split);

/* What the parts open at most at a time, inside the layer's own frame. */
size_t pmoei_layer_parts_scratch(const pmoe_layer *layer, pmoei_tokens tokens, int64_t rows);

/* ---- expert shards (shards.c) ---- */

/* From the router's choices to the exchange's: shard s of expert e is a virtual expert of its own, so numbered that
 * pmoe_expert_block over EP x ETP gives each rank its shard of its block of experts. Fills stash->moved. */
pmoe_status pmoei_shards_route(pmoe_stash *stash);
/* dweight [T,K] from the gradients of the exchange's choices [T, K * etp]. */
pmoe_status pmoei_shards_sum(const pmoe_stash *stash, const float *moved, float *dweight);

/* ---- dense branch (layer_branch.c) ---- */

void pmoei_branch_lay_out(pmoei_arena *arena, const pmoe_layer *layer, pmoei_tokens tokens, bool backward, bool split,
                          pmoei_branch_room *room);
/* What a stash for split passes keeps. */
void pmoei_branch_lay_out_kept(pmoei_arena *arena, const pmoe_layer *layer, int64_t branch_tokens,
                               pmoei_branch_room *room);
/* mlp [own,H], and stash->scale and branch_scale. */
pmoe_status pmoei_branch_forward(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound,
                                 pmoei_branch_room *room, pmoe_mat *mlp);
/* dy is what the host gave; dx [own,H] and dscale [own] are written. */
typedef struct pmoei_branch_grad {
  const pmoe_mat *dy;
  pmoe_mat *dpre, *dx;
  float *dscale;
} pmoei_branch_grad;
pmoe_status pmoei_branch_backward(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound,
                                  pmoei_branch_room *room, const pmoei_branch_grad *grad, pmoe_bwd which);

#endif
