/* The layer's forward pass: router, plan, dispatch with the dense branch under it, experts, combine. */
#include <inttypes.h>

#include "core/check.h"
#include "core/config.h"
#include "core/data.h"
#include "core/dtype.h"
#ifdef PMOE_WITH_CUDA
#include "core/cuda.h"
#endif
#include "moe/layer.h"

/* Temporaries by tokens, which live from the branch to the end, and by rows, from the plan on. */
typedef struct forward_scratch {
  pmoe_mat mlp; /* [own,H] dense branch's output */
  pmoe_mat y;   /* [own,H] if y is gathered over the TP group */
  pmoei_branch_room branch;
  int32_t frame;
  bool beside; /* the branch runs on a stream of its own */
} forward_scratch;

static void lay_out_tokens(pmoei_arena *arena, const pmoe_layer *layer, pmoei_tokens tokens, bool split,
                           forward_scratch *s) {
  pmoe_dtype dtype = layer->experts_cfg.dtype;
  int64_t hidden = layer->cfg.hidden;
  size_t row_bytes = (size_t)hidden * pmoe_dtype_size(dtype);
  s->mlp = (pmoe_mat){NULL, dtype, tokens.own, hidden, hidden};
  s->y = s->mlp;
  if (layer->residual) s->mlp.data = pmoei_take(arena, tokens.own, row_bytes);
  if (layer->replicated) s->y.data = pmoei_take(arena, tokens.own, row_bytes);
  pmoei_branch_lay_out(arena, layer, tokens, false, split, &s->branch);
}

/* Experts' output. */
static pmoe_mat lay_out_rows(pmoei_arena *arena, const pmoe_layer *layer, int64_t rows) {
  pmoe_dtype dtype = layer->experts_cfg.dtype;
  int64_t hidden = layer->cfg.hidden;
  return (pmoe_mat){pmoei_take(arena, rows * hidden, pmoe_dtype_size(dtype)), dtype, rows, hidden, hidden};
}

static size_t token_scratch(const pmoe_layer *layer, pmoei_tokens tokens, bool split) {
  forward_scratch unused;
  pmoei_arena measure = {NULL, 0};
  lay_out_tokens(&measure, layer, tokens, split, &unused);
  return pmoei_scratch_frame_bytes(measure.used);
}

static size_t row_scratch(const pmoe_layer *layer, int64_t rows) {
  pmoei_arena measure = {NULL, 0};
  (void)lay_out_rows(&measure, layer, rows);
  return pmoei_scratch_frame_bytes(measure.used);
}

/* On a device a branch on a stream of its own keeps its temporaries while the rows move. */
static size_t branch_beside(const pmoe_layer *layer, pmoei_tokens tokens) {
  if (!pmoei_on_device(layer->ctx) || !layer->residual) return 0;
  return pmoei_scratch_frame_bytes(pmoei_residual_scratch_bytes(layer->residual, tokens.branch)) +
         pmoei_scratch_frame_bytes(pmoei_tp_scratch_bytes(layer, tokens.own, tokens.branch)) * 2;
}

size_t pmoei_layer_forward_scratch(const pmoe_layer *layer, pmoei_tokens tokens, int64_t rows, bool split) {
  return token_scratch(layer, tokens, split) + row_scratch(layer, rows) + branch_beside(layer, tokens) +
         pmoei_layer_parts_scratch(layer, tokens, rows);
}

/* Where the TP group routes a slice each, the host's arrays are of all its tokens. */
static pmoe_status check_host_arrays(const pmoe_layer *layer, const pmoe_step *step, int64_t tokens) {
  PMOEI_REQUIRE(step->num_sequences <= layer->cfg.max_sequences || layer->cfg.max_sequences == 0,
                "step->num_sequences is %d; at most the layer's max_sequences (%d) was expected", step->num_sequences,
                layer->cfg.max_sequences);
  if (!layer->replicated) return PMOE_OK;
  PMOEI_REQUIRE(
      layer->cfg.max_sequences == 0 || step->sequence || tokens == 0,
      "step->sequence is NULL; each token's sequence was expected where the ranks of a TP group route a slice "
      "of their tokens each");
  const pmoe_mat *mats[] = {step->logits, step->dlogits};
  for (int i = 0; i < 2; i++)
    PMOEI_REQUIRE(!mats[i] || mats[i]->rows == tokens,
                  "step->%s->rows is %" PRId64 "; x->rows = %" PRId64 " was expected", i ? "dlogits" : "logits",
                  mats[i]->rows, tokens);
  return PMOE_OK;
}

static pmoe_status check_call(pmoe_layer *layer, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x,
                              const pmoe_mat *y, pmoe_step *step_out, pmoei_bound *bound) {
  PMOEI_REQUIRE_POINTER(stash);
  PMOEI_REQUIRE(stash->layer == layer, "stash was made for another layer");
  PMOEI_TRY(pmoei_check_mat(x, "x", layer->experts_cfg.dtype, -1, layer->cfg.hidden));
  PMOEI_REQUIRE(x->rows <= stash->cfg.max_tokens,
                "x->rows is %" PRId64 "; at most the stash's max_tokens (%" PRId64 ") was expected", x->rows,
                stash->cfg.max_tokens);
  PMOEI_TRY(pmoei_check_mat(y, "y", layer->experts_cfg.dtype, x->rows, layer->cfg.hidden));
  PMOEI_TRY(pmoei_check_apart(y, "y", x, "x"));
  PMOEI_TRY(pmoei_gate_check_step(step_out, step, x->rows));
  PMOEI_TRY(check_host_arrays(layer, step_out, x->rows));
  return pmoei_layer_bound(layer, false, bound);
}

/* This rank's part of what the host says about its tokens. */
static void take_own_part(pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x) {
  stash->step = *step;
  stash->given = *x;
  stash->x = pmoei_tp_own_rows(stash, x);
  if (!stash->layer->replicated) return;
  pmoe_step *own = &stash->step;
  int64_t first = pmoei_tp_own_first(stash), choices = first * stash->layer->gate_cfg.top_k;
  own->first_token += first;
  if (own->token_mask) {
    own->token_mask += first;
    own->token_mask_len = stash->tokens.own;
  }
  if (own->sequence) own->sequence += first;
  if (own->token_id) own->token_id += first;
  if (own->expert) own->expert += choices;
  if (own->weight) own->weight += choices;
  stash->host_dweight = own->dweight;
  if (own->dweight) own->dweight += choices;
  if (own->logits) {
    stash->logits = pmoei_tp_own_rows(stash, own->logits);
    own->logits = &stash->logits;
  }
  stash->host_dlogits = own->dlogits ? *own->dlogits : (pmoe_mat){0};
  if (own->dlogits) {
    stash->dlogits_own = pmoei_tp_own_rows(stash, own->dlogits);
    own->dlogits = &stash->dlogits_own;
  }
}

/* The router; arguments have been checked, and the TP group has agreed. Communicates only where ranks share a loss. */
static pmoe_status route(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound) {
  pmoe_status status = pmoei_gate_forward(layer->gate, &bound->gate, &stash->step, &stash->x, &stash->routing,
                                          stash->report, layer->ctx->stream);
  if (status != PMOE_OK) {
    pmoei_layer_fail_losses(layer, status);
    return status;
  }
  PMOEI_TRY(pmoei_shards_route(stash));
  return pmoei_clock_mark(layer->ctx, &stash->clock, PMOEI_MARK_ROUTED);
}

/* The stash made ready; the router's own checks, if ranks will wait for each other in it. */
static pmoe_status prepare(pmoe_layer *layer, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x,
                           const pmoei_bound *bound) {
  if (stash->has_run && !stash->reported && pmoei_clock_passed(layer->ctx, &stash->clock, PMOEI_MARK_ROUTED))
    pmoei_stash_take_report(stash);
  stash->state = PMOEI_STASH_EMPTY;
  stash->has_run = stash->reported = false;
  PMOEI_TRY(pmoei_clock_start(layer->ctx, &stash->clock));
  stash->metrics = (pmoe_metrics)PMOE_CONFIG_INIT(pmoe_metrics);
  take_own_part(stash, step, x);
  pmoei_stash_place_tokens(stash, stash->tokens);
  if (!pmoei_layer_shares_losses(layer)) return PMOE_OK;
  pmoei_gate_call unused = {0};
  return pmoei_gate_check_forward(&unused, layer->gate, &bound->gate, &stash->step, &stash->x, &stash->routing, NULL);
}

/* Everything up to the first communication over the exchange group. */
static pmoe_status begin(pmoe_layer *layer, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x,
                         const pmoe_mat *y, pmoei_bound *bound) {
  pmoe_step checked;
  pmoe_status status = check_call(layer, stash, step, x, y, &checked, bound);
  status = pmoei_tp_meet(layer, stash, status == PMOE_OK ? x->rows : 0, status);
  if (status == PMOE_OK) status = prepare(layer, stash, &checked, x, bound);
  PMOEI_TRY(pmoei_layer_agree_on_losses(layer, status));
  return route(layer, stash, bound);
}

/* ---- the dense branch ---- */

/* On a device it begins before the host has the counts, on a stream of its own. */
static pmoe_status start_branch(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, forward_scratch *s) {
#ifdef PMOE_WITH_CUDA
  pmoe_ctx *ctx = layer->ctx;
  if (pmoei_on_device(ctx) && layer->residual) {
    pmoe_stream main = ctx->stream;
    PMOEI_TRY(pmoei_cuda_fork(ctx, &ctx->cuda->branch));
    pmoei_scratch_hold(ctx);
    s->beside = true;
    ctx->stream = ctx->cuda->branch.stream;
    pmoe_status status = pmoei_branch_forward(layer, stash, bound, &s->branch, &s->mlp);
    ctx->stream = main;
    return status;
  }
#endif
  (void)layer, (void)stash, (void)bound, (void)s;
  return PMOE_OK;
}

/* Elsewhere it runs while the rows travel. */
static pmoe_status run_branch(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, forward_scratch *s) {
  return s->beside ? PMOE_OK : pmoei_branch_forward(layer, stash, bound, &s->branch, &s->mlp);
}

/* Whatever has become of the call, the branch's stream is joined. */
static pmoe_status join_branch(pmoe_layer *layer, forward_scratch *s) {
  if (!s->beside) return PMOE_OK;
  s->beside = false;
  pmoe_status status = PMOE_OK;
#ifdef PMOE_WITH_CUDA
  status = pmoei_cuda_join(layer->ctx, &layer->ctx->cuda->branch);
#endif
  pmoei_scratch_release(layer->ctx);
  return status;
}

/* ---- rows ---- */

/* From the plan to y. */
static pmoe_status move_and_compute(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, forward_scratch *s,
                                    pmoe_mat *y_rows, pmoe_mat *y) {
  pmoe_ctx *ctx = layer->ctx;
  pmoei_clock *clock = &stash->clock;
  PMOEI_TRY(pmoe_dispatch_forward(stash->plan, &stash->moved, &stash->x, &stash->x_rows, ctx->stream));
  PMOEI_TRY(pmoei_clock_mark(ctx, clock, PMOEI_MARK_DISPATCHING));
  pmoe_status branch = run_branch(layer, stash, bound, s);
  PMOEI_TRY(pmoei_clock_mark(ctx, clock, PMOEI_MARK_BRANCH));
  PMOEI_TRY(pmoe_plan_finish(stash->plan, ctx->stream));
  PMOEI_TRY(branch);
  PMOEI_TRY(pmoei_clock_mark(ctx, clock, PMOEI_MARK_DISPATCHED));
  pmoe_mat *pre = stash->pre.data && !layer->experts_cfg.recompute_act ? &stash->pre : NULL;
  PMOEI_TRY(pmoe_experts_forward(layer->experts, &bound->experts, stash->plan->expert_rows, &stash->x_rows, pre, y_rows,
                                 ctx->stream));
  PMOEI_TRY(pmoei_clock_mark(ctx, clock, PMOEI_MARK_EXPERTS));
  PMOEI_TRY(join_branch(layer, s));
  pmoe_branch mix = {stash->scale, stash->branch_scale, &s->mlp};
  pmoe_mat *own = layer->replicated ? &s->y : y;
  PMOEI_TRY(pmoe_combine_forward(stash->plan, &stash->moved, y_rows, layer->residual ? &mix : NULL, own, ctx->stream));
  PMOEI_TRY(pmoe_plan_finish(stash->plan, ctx->stream));
  if (layer->replicated) PMOEI_TRY(pmoei_tp_gather(stash, &(pmoei_tp_rows){"pmoe: gather of y", own, y, NULL, NULL}));
  return pmoei_clock_mark(ctx, clock, PMOEI_MARK_COMBINED);
}

static pmoe_status forward_rows(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, forward_scratch *s,
                                pmoe_mat *y) {
  pmoei_tokens tokens = stash->tokens;
  int64_t rows = stash->plan->recv_rows;
  PMOEI_TRY(pmoei_clock_mark(layer->ctx, &stash->clock, PMOEI_MARK_PLANNED));
  PMOEI_TRY(pmoei_stash_place_rows(stash, rows));
  void *base;
  int32_t frame;
  size_t bytes = row_scratch(layer, rows);
  PMOEI_TRY(pmoei_scratch_reserve(layer->ctx, bytes + pmoei_layer_parts_scratch(layer, tokens, rows)));
  PMOEI_TRY(pmoei_scratch_open(layer->ctx, bytes, &base, &frame));
  pmoe_mat y_rows = lay_out_rows(&(pmoei_arena){base, 0}, layer, rows);
  pmoe_status status = move_and_compute(layer, stash, bound, s, &y_rows, y);
  pmoei_scratch_close(layer->ctx, frame);
  stash->metrics.recv_rows = rows;
  stash->metrics.bytes_sent += stash->plan->bytes_sent + stash->plan->bytes_returned;
  stash->metrics.saved_bytes = (int64_t)pmoei_stash_saved_bytes(stash, rows);
  return status;
}

/* Before the exchange begins, so that a rank without memory can say so. */
static pmoe_status open_tokens(pmoe_layer *layer, pmoe_stash *stash, forward_scratch *s) {
  bool split = stash->cfg.split_backward != 0;
  void *base;
  PMOEI_TRY(pmoei_scratch_open(layer->ctx, token_scratch(layer, stash->tokens, split), &base, &s->frame));
  lay_out_tokens(&(pmoei_arena){base, 0}, layer, stash->tokens, split, s);
  return PMOE_OK;
}

/* The exchange of counts, and what can be enqueued while they are on their way. */
static pmoe_status settle(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, forward_scratch *s,
                          pmoe_status mine) {
  mine = pmoei_plan_send_counts(stash->plan, &stash->moved, mine);
  pmoe_status branch = mine == PMOE_OK ? start_branch(layer, stash, bound, s) : PMOE_OK;
  pmoe_status status = pmoei_plan_take_counts(stash->plan, &stash->moved, mine);
  /* The report came before the counts, unless nobody waited for those. */
  if (status == PMOE_OK && !layer->a2a->constant) pmoei_stash_take_report(stash);
  return status != PMOE_OK ? status : branch;
}

pmoe_status pmoe_layer_forward(pmoe_layer *layer, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x,
                               pmoe_mat *y, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_TRY(pmoei_ctx_enter(layer->ctx, stream));
  pmoei_bound bound;
  forward_scratch s = {.frame = -1};
  pmoe_status status = begin(layer, stash, step, x, y, &bound);
  if (status == PMOE_OK) status = open_tokens(layer, stash, &s);
  bool usable = stash && stash->layer == layer;
  status = usable ? settle(layer, stash, &bound, &s, status) : pmoei_a2a_refuse(layer->a2a, status);
  status = pmoei_tp_settle(layer, "pmoe_layer_forward", status);
  bool settled = status == PMOE_OK;
  if (settled) status = forward_rows(layer, stash, &bound, &s, y);
  pmoe_status joined = join_branch(layer, &s);
  if (status == PMOE_OK) status = joined;
  if (s.frame >= 0) pmoei_scratch_close(layer->ctx, s.frame);
  if (status != PMOE_OK) return settled ? pmoei_layer_fail(layer, status) : status;
  stash->state = PMOEI_STASH_FORWARD;
  stash->has_run = true;
  return PMOE_OK;
}
