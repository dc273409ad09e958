/* The layer's inside. */
#ifndef PMOEI_LAYER_H
#define PMOEI_LAYER_H
#include <pmoe/layer.h>
#include <pmoe/metrics.h>
#include <pmoe/params.h>
#include <pmoe/topology.h>
#include <stdbool.h>

#include "a2a/a2a.h"
#include "core/ctx.h"
#include "gating/gate_ops.h"
#include "moe/activation.h"
#include "moe/ops.h"

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
  int32_t refs;                         /* the creator and every stash */
  pmoe_comm *ep, *expert_dp, *dense_dp; /* retained */
  pmoe_layer_config cfg;                /* its pointers point at the four below, or are NULL */
  pmoe_gate_config gate_cfg;
  pmoe_a2a_config a2a_cfg;
  pmoe_experts_config experts_cfg;
  pmoe_residual_config residual_cfg;
  int32_t first_expert, num_local;
  char backward_name[48];              /* of its agreement: ranks in different layers notice */
  int64_t pre_cols, residual_pre_cols; /* F, or 2F if gated; 0 without a branch */
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
  /* by tokens */
  pmoe_routing routing;
  float *scale, *branch_scale;
  pmoe_mat residual_pre, residual_dpre;
  float *dlogits, *dmix;
  /* by rows */
  pmoe_mat x_rows, pre, dy_rows, dpre;
  float *row_weight;
  /* of the micro-batch in flight */
  pmoe_step step;
  pmoe_mat x;
  pmoe_metrics metrics;
};

/* balance.c */
pmoe_status pmoei_layer_create_balance(pmoe_layer *layer); /* once the groups are there */
void pmoei_layer_destroy_balance(pmoe_layer *layer);
/* Whether a loss is taken over several ranks, so that the router's forward communicates. */
bool pmoei_layer_shares_losses(const pmoe_layer *layer);
/* Before such a forward: every rank brings the outcome of its checks, as in pmoei_comm_agree. */
pmoe_status pmoei_layer_agree_on_losses(pmoe_layer *layer, pmoe_status mine);
/* This rank failed after that. */
void pmoei_layer_fail_losses(pmoe_layer *layer, pmoe_status status);
void pmoei_layer_note_load(pmoe_layer *layer, const pmoe_step *step, const pmoe_gate_stats *stats,
                           const pmoe_routing *routing);

void pmoei_layer_retain(pmoe_layer *layer);
void pmoei_layer_release(pmoe_layer *layer);

static inline bool pmoei_param_has_grad(const pmoe_param *p) {
  return p->numel > 0 && p->reduce_group != PMOE_GROUP_NONE;
}

/* Fills layer->param. */
void pmoei_layer_list_params(pmoe_layer *layer);

/* The bound pointers in the form the parts take. ERR_STATE names the first that is missing. */
typedef struct pmoei_bound {
  pmoe_gate_params gate;
  pmoe_experts_params experts;
  pmoe_residual_params residual;
} pmoei_bound;
pmoe_status pmoei_layer_bound(const pmoe_layer *layer, bool need_grad, pmoei_bound *out);

/* Places the stash's arrays for T tokens and R rows. ERR_NOMEM if the row block has to grow and cannot; ERR_ARG past a
 * bound. */
void pmoei_stash_place_tokens(pmoe_stash *stash, int64_t tokens);
pmoe_status pmoei_stash_place_rows(pmoe_stash *stash, int64_t rows);
/* Bytes that backward needs of the stash at this T and R. */
size_t pmoei_stash_saved_bytes(const pmoe_stash *stash, int64_t tokens, int64_t rows);

/* Temporaries of the two passes, their parts' included. */
size_t pmoei_layer_forward_scratch(const pmoe_layer *layer, int64_t tokens, int64_t rows);
size_t pmoei_layer_backward_scratch(const pmoe_layer *layer, int64_t tokens, int64_t rows, bool split);

/* What the parts open at most at a time, inside the layer's own frame. */
size_t pmoei_layer_parts_scratch(const pmoe_layer *layer, int64_t tokens, int64_t rows);

#endif
