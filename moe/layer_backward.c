/* The layer's backward pass: the experts' parameter gradients run while the rows' gradients travel back. */
#include <inttypes.h>
#include <math.h>

#include "core/check.h"
#include "core/data.h"
#include "core/dtype.h"
#include "moe/layer.h"

/* Temporaries of one call. What a PMOE_BWD_WEIGHT of its own reads lies in the stash instead if that has room for it.
 */
typedef struct backward_scratch {
  pmoe_mat dy_rows, dx_rows; /* [R,H] */
  pmoe_mat pre, dpre;        /* [R,F1]; pre only if forward kept none */
  float *row_weight, *drow_weight;
  float *dweight;                /* [own,K] */
  float *dweight_moved;          /* [own, K * etp] the same before shards are summed */
  float *dscale, *dbranch_scale; /* [own] */
  pmoe_mat dx_branch;            /* [own,H] through the dense branch */
  pmoe_mat residual_dpre;
  pmoe_mat dx_sum; /* [own,H] float32: the sum of three parts is rounded once */
  pmoe_mat dx;     /* [own,H] if dx is gathered over the TP group */
  float *dlogits, *dmix;
  pmoei_branch_room branch;
} backward_scratch;

static pmoe_mat take(pmoei_arena *arena, pmoe_dtype dtype, int64_t rows, int64_t cols) {
  return (pmoe_mat){pmoei_take(arena, rows * cols, pmoe_dtype_size(dtype)), dtype, rows, cols, cols};
}

static void lay_out(pmoei_arena *arena, const pmoe_layer *layer, pmoei_tokens tokens, int64_t rows, bool split,
                    backward_scratch *s) {
  pmoe_dtype dtype = layer->experts_cfg.dtype;
  int64_t hidden = layer->cfg.hidden;
  *s = (backward_scratch){0};
  if (!split) {
    s->dy_rows = take(arena, dtype, rows, hidden);
    s->dpre = take(arena, dtype, rows, layer->pre_cols);
    if (layer->experts_cfg.recompute_act) s->pre = take(arena, dtype, rows, layer->pre_cols);
    s->row_weight = pmoei_take(arena, rows, sizeof(float));
    s->dlogits = pmoei_take(arena, tokens.own * layer->gate_cfg.num_experts, sizeof(float));
  }
  s->dx_rows = take(arena, dtype, rows, hidden);
  s->drow_weight = pmoei_take(arena, rows, sizeof(float));
  s->dweight = pmoei_take(arena, tokens.own * layer->gate_cfg.top_k, sizeof(float));
  s->dweight_moved = s->dweight;
  int32_t etp = layer->groups.etp;
  if (etp > 1) s->dweight_moved = pmoei_take(arena, tokens.own * layer->gate_cfg.top_k * etp, sizeof(float));
  if (dtype != PMOE_F32) s->dx_sum = take(arena, PMOE_F32, tokens.own, hidden);
  if (layer->replicated) s->dx = take(arena, dtype, tokens.own, hidden);
  if (!layer->residual) return;
  if (!split) {
    s->residual_dpre = take(arena, dtype, tokens.branch, layer->residual_pre_cols);
    s->dmix = pmoei_take(arena, 2 * tokens.own, sizeof(float));
  }
  s->dx_branch = take(arena, dtype, tokens.own, hidden);
  s->dscale = pmoei_take(arena, tokens.own, sizeof(float));
  s->dbranch_scale = pmoei_take(arena, tokens.own, sizeof(float));
  pmoei_branch_lay_out(arena, layer, tokens, true, split, &s->branch);
}

size_t pmoei_layer_backward_scratch(const pmoe_layer *layer, pmoei_tokens tokens, int64_t rows, bool split) {
  backward_scratch unused;
  pmoei_arena measure = {NULL, 0};
  lay_out(&measure, layer, tokens, rows, split, &unused);
  return pmoei_scratch_frame_bytes(measure.used) + pmoei_layer_parts_scratch(layer, tokens, rows);
}

/* A stash made for split passes keeps what others have in scratch. */
static void use_stash(pmoe_stash *stash, backward_scratch *s) {
  s->dy_rows = stash->dy_rows;
  s->dpre = stash->dpre;
  s->pre = stash->pre;
  s->row_weight = stash->row_weight;
  s->dlogits = stash->dlogits;
  s->residual_dpre = stash->residual_dpre;
  s->dmix = stash->dmix;
}

static pmoe_status check_call(const pmoe_layer *layer, const pmoe_stash *stash, float loss_scale, const pmoe_mat *dy,
                              const pmoe_mat *dx, pmoe_bwd which, pmoei_bound *bound) {
  PMOEI_REQUIRE_POINTER(stash);
  PMOEI_REQUIRE(stash->layer == layer, "stash was made for another layer");
  PMOEI_REQUIRE((int)which >= PMOE_BWD_ALL && (int)which <= PMOE_BWD_WEIGHT, "which is %d; a pmoe_bwd was expected",
                (int)which);
  if (which == PMOE_BWD_WEIGHT && stash->state != PMOEI_STASH_INPUT_DONE)
    return pmoei_error(PMOE_ERR_STATE,
                       "pmoe_layer_backward: PMOE_BWD_WEIGHT comes after PMOE_BWD_INPUT on the same stash");
  if (which != PMOE_BWD_WEIGHT && stash->state != PMOEI_STASH_FORWARD)
    return pmoei_error(PMOE_ERR_STATE, "pmoe_layer_backward: this stash holds no forward to go back from");
  if (which == PMOE_BWD_INPUT && !stash->cfg.split_backward)
    return pmoei_error(PMOE_ERR_STATE, "pmoe_layer_backward: PMOE_BWD_INPUT needs a stash made with split_backward");
  PMOEI_REQUIRE(which == PMOE_BWD_WEIGHT || isfinite(loss_scale), "loss_scale is %g; a finite number was expected",
                (double)loss_scale);
  PMOEI_TRY(pmoei_check_mat(dy, "dy", layer->experts_cfg.dtype, stash->given.rows, layer->cfg.hidden));
  if (which != PMOE_BWD_WEIGHT)
    PMOEI_TRY(pmoei_check_mat(dx, "dx", layer->experts_cfg.dtype, stash->given.rows, layer->cfg.hidden));
  if (which != PMOE_BWD_WEIGHT) {
    PMOEI_TRY(pmoei_check_apart(dx, "dx", dy, "dy"));
    PMOEI_TRY(pmoei_check_apart(dx, "dx", &stash->given, "the x of forward"));
  }
  return pmoei_layer_bound(layer, which != PMOE_BWD_INPUT, bound);
}

/* ---- the parts ---- */

static pmoe_status branch_backward(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, const pmoe_mat *dy,
                                   backward_scratch *s, pmoe_bwd which) {
  pmoei_branch_grad grad = {dy, &s->residual_dpre, &s->dx_branch, s->dbranch_scale};
  return pmoei_branch_backward(layer, stash, bound, &s->branch, &grad, which);
}

static pmoe_status experts_backward(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, backward_scratch *s,
                                    pmoe_bwd which) {
  pmoe_mat *pre = s->pre.data ? &s->pre : &stash->pre;
  return pmoe_experts_backward(layer->experts, &bound->experts, stash->plan->expert_rows, &stash->x_rows, pre,
                               s->row_weight, &s->dy_rows, &s->dpre, &s->dx_rows, s->drow_weight, which,
                               layer->ctx->stream);
}

/* Where the TP group routes a slice each, the host's gradients are zero elsewhere, so that their sum over TP is whole.
 */
static pmoe_status clear_other_slices(const pmoe_stash *stash) {
  pmoe_ctx *ctx = stash->layer->ctx;
  int64_t first = pmoei_tp_own_first(stash), end = first + stash->tokens.own, all = stash->given.rows;
  int64_t top_k = stash->layer->gate_cfg.top_k;
  const pmoe_mat *dlogits = &stash->host_dlogits;
  const pmoe_mat dweight = {stash->host_dweight, PMOE_F32, all, top_k, top_k};
  const pmoe_mat *both[] = {dlogits->data ? dlogits : NULL, stash->host_dweight ? &dweight : NULL};
  for (int i = 0; i < 2; i++) {
    if (!both[i]) continue;
    PMOEI_TRY(pmoei_data_zero_rows(ctx, both[i], 0, first));
    PMOEI_TRY(pmoei_data_zero_rows(ctx, both[i], end, all - end));
  }
  return PMOE_OK;
}

/* Gradients that reach x: through the experts (there already), the branch, its coefficients and the router. */
static pmoe_status token_backward(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, float loss_scale,
                                  backward_scratch *s, pmoe_mat *dx, pmoe_bwd which) {
  if (layer->residual && which != PMOE_BWD_WEIGHT) {
    PMOEI_TRY(layer->ops->split_scale(layer->ctx, &stash->routing, stash->scale, s->dweight, s->dscale));
    PMOEI_TRY(layer->ops->add_rows(layer->ctx, dx, &s->dx_branch));
  }
  if (layer->residual)
    PMOEI_TRY(pmoe_residual_mix_backward(layer->residual, &bound->residual, &stash->x, stash->scale,
                                         stash->branch_scale, s->dscale, s->dbranch_scale, s->dmix, dx, which,
                                         layer->ctx->stream));
  if (layer->replicated && which != PMOE_BWD_WEIGHT) PMOEI_TRY(clear_other_slices(stash));
  return pmoe_gate_backward(layer->gate, &bound->gate, &stash->step, &stash->x, &stash->routing, s->dweight, loss_scale,
                            s->dlogits, dx, which, layer->ctx->stream);
}

static pmoe_status backward_input(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, float loss_scale,
                                  const pmoe_mat *dy, backward_scratch *s, pmoe_mat *dx, pmoe_bwd which) {
  const float *scale = layer->residual ? stash->scale : NULL;
  pmoe_mat own_dy = pmoei_tp_own_rows(stash, dy);
  PMOEI_TRY(pmoe_combine_backward(stash->plan, &stash->moved, &own_dy, scale, &s->dy_rows, s->row_weight,
                                  layer->ctx->stream));
  pmoe_status under = branch_backward(layer, stash, bound, dy, s, which);
  PMOEI_TRY(pmoe_plan_finish(stash->plan, layer->ctx->stream));
  PMOEI_TRY(under);
  PMOEI_TRY(experts_backward(layer, stash, bound, s, PMOE_BWD_INPUT));
  pmoe_mat *own = layer->replicated ? &s->dx : dx, *sum = s->dx_sum.data ? &s->dx_sum : own;
  PMOEI_TRY(pmoe_dispatch_backward(stash->plan, &stash->moved, &s->dx_rows, s->drow_weight, sum, s->dweight_moved,
                                   layer->ctx->stream));
  if (which == PMOE_BWD_ALL) under = experts_backward(layer, stash, bound, s, PMOE_BWD_WEIGHT);
  PMOEI_TRY(pmoe_plan_finish(stash->plan, layer->ctx->stream));
  PMOEI_TRY(under);
  if (layer->groups.etp > 1) PMOEI_TRY(pmoei_shards_sum(stash, s->dweight_moved, s->dweight));
  PMOEI_TRY(token_backward(layer, stash, bound, loss_scale, s, sum, which));
  if (sum != own) PMOEI_TRY(layer->ops->round_rows(layer->ctx, own, sum));
  if (!layer->replicated) return PMOE_OK;
  return pmoei_tp_gather(stash, &(pmoei_tp_rows){"pmoe: gather of dx", own, dx, NULL, NULL});
}

static pmoe_status backward_weight(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, const pmoe_mat *dy,
                                   backward_scratch *s) {
  PMOEI_TRY(experts_backward(layer, stash, bound, s, PMOE_BWD_WEIGHT));
  PMOEI_TRY(branch_backward(layer, stash, bound, dy, s, PMOE_BWD_WEIGHT));
  return token_backward(layer, stash, bound, 0, s, NULL, PMOE_BWD_WEIGHT);
}

static pmoe_status run(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, float loss_scale,
                       const pmoe_mat *dy, pmoe_mat *dx, pmoe_bwd which) {
  bool split = stash->cfg.split_backward;
  int64_t rows = stash->plan->recv_rows;
  backward_scratch s;
  pmoei_arena arena = {NULL, 0};
  lay_out(&arena, layer, stash->tokens, rows, split, &s);
  void *base;
  int32_t scratch;
  PMOEI_TRY(pmoei_scratch_reserve(layer->ctx, pmoei_layer_backward_scratch(layer, stash->tokens, rows, split)));
  PMOEI_TRY(pmoei_scratch_open(layer->ctx, arena.used, &base, &scratch));
  arena = (pmoei_arena){base, 0};
  lay_out(&arena, layer, stash->tokens, rows, split, &s);
  if (split) use_stash(stash, &s);
  pmoe_status status = which == PMOE_BWD_WEIGHT ? backward_weight(layer, stash, bound, dy, &s)
                                                : backward_input(layer, stash, bound, loss_scale, dy, &s, dx, which);
  pmoei_scratch_close(layer->ctx, scratch);
  return status;
}

pmoe_status pmoe_layer_backward(pmoe_layer *layer, pmoe_stash *stash, float loss_scale, const pmoe_mat *dy,
                                pmoe_mat *dx, pmoe_bwd which, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_TRY(pmoei_ctx_enter(layer->ctx, stream));
  pmoei_bound bound;
  pmoe_status status = check_call(layer, stash, loss_scale, dy, dx, which, &bound);
  bool collective = which != PMOE_BWD_WEIGHT;
  if (collective) status = pmoei_layer_agree(layer, layer->backward_name, status);
  PMOEI_TRY(status);
  (void)pmoei_clock_mark(layer->ctx, &stash->clock, collective ? PMOEI_MARK_BACKWARD : PMOEI_MARK_WEIGHT);
  status = run(layer, stash, &bound, loss_scale, dy, dx, which);
  if (status != PMOE_OK) {
    stash->state = PMOEI_STASH_EMPTY;
    return collective ? pmoei_layer_fail(layer, status) : status;
  }
  if (collective) stash->metrics.bytes_sent += stash->plan->bytes_sent + stash->plan->bytes_returned;
  stash->state = which == PMOE_BWD_INPUT ? PMOEI_STASH_INPUT_DONE : PMOEI_STASH_EMPTY;
  return pmoei_clock_mark(layer->ctx, &stash->clock, collective ? PMOEI_MARK_BACKWARD_DONE : PMOEI_MARK_WEIGHT_DONE);
}
