/* Exchange: carries token rows to the ranks that own their experts, and back.
 *
 *   plan      one count exchange fixes who sends how many rows to whom
 *   dispatch  tokens [T,H] -> expert rows [R,H], ordered by local expert, then source rank, then slot
 *   combine   expert rows [R,H] -> tokens [T,H]
 *
 * The backward of each is the other's movement. All four start with one call and end with pmoe_plan_finish; work that
 * does not need the result may run in between. One movement per plan at a time; several plans may have one each (finish
 * in the order of starting). Row sums accumulate in float32 in the order k = 0..K-1, so results repeat bit for bit. */
#ifndef PMOE_A2A_H
#define PMOE_A2A_H
#include <pmoe/gate.h>
#include <pmoe/types.h>

/* EAGER: buffers of exactly the rows that came; plan_build waits for the counts. FIXED: every size is known at
 * creation, each pair of ranks moves the same padded block each step. On CUDA, with a capacity and without
 * max_recv_rows, FIXED exchanges no counts, waits for nothing and can be captured into a graph: every expert has the
 * rows of its capacity from every rank, padded with zeros, and plan_info says so. */
typedef enum pmoe_sizing { PMOE_SIZING_EAGER, PMOE_SIZING_FIXED } pmoe_sizing;

typedef struct pmoe_a2a_config {
  size_t size;
  pmoe_sizing sizing;
  /* The most rows this rank may receive; more is an error on every rank of the group (ERR_ARG), never an overflow.
   * EAGER: 0 for no bound. FIXED: split evenly over the source ranks; required if dropless, 0 means exactly what the
   * capacities allow otherwise. */
  int64_t max_recv_rows;
  int64_t max_tokens; /* FIXED only: largest T on any rank */
} pmoe_a2a_config;

/* What a plan settled. Arrays belong to the plan and hold until its next build. */
typedef struct pmoe_plan_info {
  size_t size;
  int64_t send_rows, recv_rows;      /* rows that leave this rank's tokens (to any rank, itself too); R */
  int32_t first_expert, num_experts; /* global id of the first local expert; number of local experts */
  const int64_t *expert_rows;        /* [num_experts] rows per local expert; sums to R */
  int64_t bytes_sent;                /* of row payload to other ranks, per movement, padding included */
} pmoe_plan_info;

#ifdef __cplusplus
extern "C" {
#endif

/* Not collective (the layer compares configurations across ranks). ep is borrowed. num_experts is E over all ranks;
 * hidden is H; dtype that of the rows. capacity_per_expert: the largest C (train and eval) at max_tokens, 0 if
 * dropless; used by FIXED. */
PMOE_API pmoe_status pmoe_a2a_create(pmoe_ctx *ctx, pmoe_comm *ep, int32_t hidden, pmoe_dtype dtype,
                                     int32_t num_experts, int64_t capacity_per_expert, const pmoe_a2a_config *cfg,
                                     pmoe_a2a **out);
PMOE_API void pmoe_a2a_destroy(pmoe_a2a *a2a);

PMOE_API pmoe_status pmoe_plan_create(pmoe_a2a *a2a, pmoe_plan **out);
PMOE_API void pmoe_plan_destroy(pmoe_plan *plan);

/* Collective over ep; waits for the counts. Reads routing's expert_rows. */
PMOE_API pmoe_status pmoe_plan_build(pmoe_plan *plan, const pmoe_routing *routing, pmoe_stream stream);
PMOE_API pmoe_status pmoe_plan_get_info(const pmoe_plan *plan, pmoe_plan_info *out);

/* Every buffer, the routing included, stays untouched by the caller until pmoe_plan_finish. Collective over ep. */
/* x [T,H] -> rows [R,H] */
PMOE_API pmoe_status pmoe_dispatch_forward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *x,
                                           pmoe_mat *rows, pmoe_stream stream);
/* y_t = scale_t (sum_k weight_tk row(t,k)) + branch_scale_t branch_t. scale [T], branch [T,H] and branch_scale [T] may
 * be NULL: 1, no branch, 1. */
typedef struct pmoe_branch {
  const float *scale, *branch_scale;
  const pmoe_mat *branch;
} pmoe_branch;
PMOE_API pmoe_status pmoe_combine_forward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *rows,
                                          const pmoe_branch *branch, pmoe_mat *y, pmoe_stream stream);
/* dy [T,H] -> drows [R,H] (the unweighted dy of each row's token) and row_weight [R] (scale_t weight_tk; scale may be
 * NULL) */
PMOE_API pmoe_status pmoe_combine_backward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *dy,
                                           const float *scale, pmoe_mat *drows, float *row_weight, pmoe_stream stream);
/* drows [R,H], drow_weight [R] -> dx_t = sum_k drow(t,k) [T,H] (written; float32 or the rows' dtype) and dweight [T,K]
 * (the gradient of scale_t weight_tk; 0 for choices without a slot) */
PMOE_API pmoe_status pmoe_dispatch_backward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *drows,
                                            const float *drow_weight, pmoe_mat *dx, float *dweight, pmoe_stream stream);
/* Ends the movement that was started on this plan: its outputs are complete. Collective over ep. ERR_STATE if none is
 * under way. */
PMOE_API pmoe_status pmoe_plan_finish(pmoe_plan *plan, pmoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
