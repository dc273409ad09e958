/* The layer's backward pass: the experts' parameter gradients run while the rows' gradients travel back. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "core/dtype.h"
#include "core/parallel.h"
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
                               s->row_weight, &s->dy_rows, &s->dpre, &s->dx_rows, s->drow_weight, which, NULL);
}

/* The exchange returns the gradient of scale_t weight_tk: split it into those of the weight and of the scale. */
static void split_scale(const pmoe_stash *stash, backward_scratch *s) {
  const pmoe_routing *r = &stash->routing;
  for (int64_t t = 0; t < r->tokens; t++) {
    float sum = 0;
    for (int64_t i = t * r->top_k; i < (t + 1) * r->top_k; i++) {
      sum += r->weight[i] * s->dweight[i];
      s->dweight[i] *= stash->scale[t];
    }
    s->dscale[t] = sum;
  }
}

typedef struct add_job {
  const pmoe_mat *from;
  pmoe_mat *to;
} add_job;

/* `to` is float32. */
static void add_row(void *arg, int64_t row, int32_t thread) {
  (void)thread;
  const add_job *job = arg;
  enum { CHUNK = 256 };
  float part[CHUNK], *to = pmoei_row(job->to, row);
  const char *from = pmoei_row(job->from, row);
  for (int64_t i = 0; i < job->to->cols; i += CHUNK) {
    int64_t n = job->to->cols - i < CHUNK ? job->to->cols - i : CHUNK;
    pmoei_to_f32(part, from + (size_t)i * pmoe_dtype_size(job->from->dtype), job->from->dtype, n);
    for (int64_t j = 0; j < n; j++) to[i + j] += part[j];
  }
}

static void round_row(void *arg, int64_t row, int32_t thread) {
  (void)thread;
  const add_job *job = arg;
  pmoei_from_f32(pmoei_row(job->to, row), job->to->dtype, pmoei_row(job->from, row), job->to->cols);
}

/* Where the TP group routes a slice each, the host's gradients are zero elsewhere, so that their sum over TP is whole.
 */
static void clear_other_slices(const pmoe_stash *stash) {
  int64_t top_k = stash->layer->gate_cfg.top_k, first = pmoei_tp_own_first(stash);
  int64_t end = first + stash->tokens.own;
  const pmoe_mat *dlogits = &stash->host_dlogits;
  for (int64_t t = 0; t < stash->given.rows; t++) {
    if (t >= first && t < end) continue;
    if (stash->host_dweight) memset(stash->host_dweight + t * top_k, 0, (size_t)top_k * sizeof(float));
    if (dlogits->data) memset(pmoei_row(dlogits, t), 0, (size_t)dlogits->cols * sizeof(float));
  }
}

/* Gradients that reach x: through the experts (there already), the branch, its coefficients and the router. */
static pmoe_status token_backward(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, float loss_scale,
                                  backward_scratch *s, pmoe_mat *dx, pmoe_bwd which) {
  if (layer->residual && which != PMOE_BWD_WEIGHT) {
    split_scale(stash, s);
    pmoei_parallel(layer->ctx, dx->rows, add_row, &(add_job){&s->dx_branch, dx});
  }
  if (layer->residual)
    PMOEI_TRY(pmoe_residual_mix_backward(layer->residual, &bound->residual, &stash->x, stash->scale,
                                         stash->branch_scale, s->dscale, s->dbranch_scale, s->dmix, dx, which, NULL));
  if (layer->replicated && which != PMOE_BWD_WEIGHT) clear_other_slices(stash);
  return pmoe_gate_backward(layer->gate, &bound->gate, &stash->step, &stash->x, &stash->routing, s->dweight, loss_scale,
                            s->dlogits, dx, which, NULL);
}

static pmoe_status backward_input(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, float loss_scale,
                                  const pmoe_mat *dy, backward_scratch *s, pmoe_mat *dx, pmoe_bwd which) {
  const float *scale = layer->residual ? stash->scale : NULL;
  pmoe_mat own_dy = pmoei_tp_own_rows(stash, dy);
  PMOEI_TRY(pmoe_combine_backward(stash->plan, &stash->moved, &own_dy, scale, &s->dy_rows, s->row_weight, NULL));
  pmoe_status under = branch_backward(layer, stash, bound, dy, s, which);
  PMOEI_TRY(pmoe_plan_finish(stash->plan, NULL));
  PMOEI_TRY(under);
  PMOEI_TRY(experts_backward(layer, stash, bound, s, PMOE_BWD_INPUT));
  pmoe_mat *own = layer->replicated ? &s->dx : dx, *sum = s->dx_sum.data ? &s->dx_sum : own;
  PMOEI_TRY(
      pmoe_dispatch_backward(stash->plan, &stash->moved, &s->dx_rows, s->drow_weight, sum, s->dweight_moved, NULL));
  if (which == PMOE_BWD_ALL) under = experts_backward(layer, stash, bound, s, PMOE_BWD_WEIGHT);
  PMOEI_TRY(pmoe_plan_finish(stash->plan, NULL));
  PMOEI_TRY(under);
  if (layer->groups.etp > 1) pmoei_shards_sum(stash, s->dweight_moved, s->dweight);
  PMOEI_TRY(token_backward(layer, stash, bound, loss_scale, s, sum, which));
  if (sum != own) pmoei_parallel(layer->ctx, own->rows, round_row, &(add_job){sum, own});
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
  (void)stream;
  PMOEI_REQUIRE_POINTER(layer);
  uint64_t clock = pmoei_now_ns();
  pmoei_bound bound;
  pmoe_status status = check_call(layer, stash, loss_scale, dy, dx, which, &bound);
  bool collective = which != PMOE_BWD_WEIGHT;
  if (collective) status = pmoei_layer_agree(layer, layer->backward_name, status);
  PMOEI_TRY(status);
  status = run(layer, stash, &bound, loss_scale, dy, dx, which);
  if (status != PMOE_OK) {
    stash->state = PMOEI_STASH_EMPTY;
    return collective ? pmoei_layer_fail(layer, status) : status;
  }
  if (collective) stash->metrics.bytes_sent += stash->plan->bytes_sent + stash->plan->bytes_returned;
  stash->metrics.ms_backward += pmoei_ms_since(&clock);
  stash->state = which == PMOE_BWD_INPUT ? PMOEI_STASH_INPUT_DONE : PMOEI_STASH_EMPTY;
  return PMOE_OK;
}
