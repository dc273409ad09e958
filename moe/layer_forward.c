/* The layer's forward pass: router, plan, dispatch with the dense branch under it, experts, combine. */
#include <inttypes.h>

#include "core/check.h"
#include "core/config.h"
#include "core/dtype.h"
#include "moe/layer.h"

/* Temporaries that live from dispatch to combine. */
typedef struct forward_scratch {
  pmoe_mat y_rows; /* [R,H] experts' output */
  pmoe_mat mlp;    /* [own,H] dense branch's output */
  pmoe_mat y;      /* [own,H] if y is gathered over the TP group */
  pmoei_branch_room branch;
} forward_scratch;

static void lay_out(pmoei_arena *arena, const pmoe_layer *layer, pmoei_tokens tokens, int64_t rows, bool split,
                    forward_scratch *s) {
  pmoe_dtype dtype = layer->experts_cfg.dtype;
  int64_t hidden = layer->cfg.hidden;
  size_t row_bytes = (size_t)hidden * pmoe_dtype_size(dtype);
  s->y_rows = (pmoe_mat){pmoei_take(arena, rows, row_bytes), dtype, rows, hidden, hidden};
  s->mlp = (pmoe_mat){NULL, dtype, tokens.own, hidden, hidden};
  s->y = s->mlp;
  if (layer->residual) s->mlp.data = pmoei_take(arena, tokens.own, row_bytes);
  if (layer->replicated) s->y.data = pmoei_take(arena, tokens.own, row_bytes);
  pmoei_branch_lay_out(arena, layer, tokens, false, split, &s->branch);
}

size_t pmoei_layer_forward_scratch(const pmoe_layer *layer, pmoei_tokens tokens, int64_t rows, bool split) {
  forward_scratch unused;
  pmoei_arena measure = {NULL, 0};
  lay_out(&measure, layer, tokens, rows, split, &unused);
  return pmoei_scratch_frame_bytes(measure.used) + pmoei_layer_parts_scratch(layer, tokens, rows);
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
  return pmoei_layer_bound(layer, false, bound);
}

/* This rank's part of what the host says about its tokens. */
static void take_own_part(pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x) {
  stash->step = *step;
  stash->given = *x;
  stash->x = pmoei_tp_own_rows(stash, x);
  if (!stash->layer->replicated) return;
  int64_t first = pmoei_tp_own_first(stash);
  stash->step.first_token += first;
  if (!step->token_mask) return;
  stash->step.token_mask += first;
  stash->step.token_mask_len = stash->tokens.own;
}

/* The router; arguments have been checked, and the TP group has agreed. */
static pmoe_status route(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound) {
  uint64_t start = pmoei_now_ns();
  pmoe_gate_stats stats = PMOE_CONFIG_INIT(pmoe_gate_stats);
  PMOEI_TRY(pmoe_gate_forward(layer->gate, &bound->gate, &stash->step, &stash->x, &stash->routing, &stats, NULL));
  pmoei_shards_route(stash);
  pmoe_metrics *m = &stash->metrics;
  m->tokens = stats.tokens;
  m->masked = stats.masked;
  m->routed = stats.routed;
  m->dropped = stats.dropped;
  m->nonfinite = stats.nonfinite;
  m->aux_loss = stats.aux_loss;
  m->z_loss = stats.z_loss;
  m->load_max_over_mean = stats.load_max_over_mean;
  m->entropy = stats.entropy;
  m->ms_gate = pmoei_ms_since(&start);
  return PMOE_OK;
}

/* Everything up to the first communication over the exchange group. */
static pmoe_status begin(pmoe_layer *layer, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x,
                         const pmoe_mat *y, pmoei_bound *bound) {
  pmoe_step checked;
  pmoe_status status = check_call(layer, stash, step, x, y, &checked, bound);
  PMOEI_TRY(pmoei_tp_meet(layer, stash, status == PMOE_OK ? x->rows : 0, status));
  stash->state = PMOEI_STASH_EMPTY;
  stash->has_run = false;
  stash->metrics = (pmoe_metrics)PMOE_CONFIG_INIT(pmoe_metrics);
  take_own_part(stash, &checked, x);
  pmoei_stash_place_tokens(stash, stash->tokens);
  return route(layer, stash, bound);
}

/* From the plan to y. The dense branch runs while the rows travel. */
static pmoe_status move_and_compute(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, forward_scratch *s,
                                    pmoe_mat *y) {
  pmoe_metrics *m = &stash->metrics;
  uint64_t clock = pmoei_now_ns();
  PMOEI_TRY(pmoe_dispatch_forward(stash->plan, &stash->moved, &stash->x, &stash->x_rows, NULL));
  m->ms_dispatch = pmoei_ms_since(&clock);
  pmoe_status branch = pmoei_branch_forward(layer, stash, bound, &s->branch, &s->mlp);
  m->ms_residual = pmoei_ms_since(&clock);
  PMOEI_TRY(pmoe_plan_finish(stash->plan, NULL));
  PMOEI_TRY(branch);
  m->ms_dispatch += pmoei_ms_since(&clock);
  pmoe_mat *pre = stash->pre.data && !layer->experts_cfg.recompute_act ? &stash->pre : NULL;
  PMOEI_TRY(pmoe_experts_forward(layer->experts, &bound->experts, stash->plan->expert_rows, &stash->x_rows, pre,
                                 &s->y_rows, NULL));
  m->ms_experts = pmoei_ms_since(&clock);
  pmoe_branch mix = {stash->scale, stash->branch_scale, &s->mlp};
  pmoe_mat *own = layer->replicated ? &s->y : y;
  PMOEI_TRY(pmoe_combine_forward(stash->plan, &stash->moved, &s->y_rows, layer->residual ? &mix : NULL, own, NULL));
  PMOEI_TRY(pmoe_plan_finish(stash->plan, NULL));
  if (layer->replicated) PMOEI_TRY(pmoei_tp_gather(stash, &(pmoei_tp_rows){"pmoe: gather of y", own, y, NULL, NULL}));
  m->ms_combine = pmoei_ms_since(&clock);
  return PMOE_OK;
}

static pmoe_status forward_rows(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, pmoe_mat *y) {
  bool split = stash->cfg.split_backward != 0;
  pmoei_tokens tokens = stash->tokens;
  int64_t rows = stash->plan->recv_rows;
  PMOEI_TRY(pmoei_stash_place_rows(stash, rows));
  forward_scratch s;
  pmoei_arena arena = {NULL, 0};
  lay_out(&arena, layer, tokens, rows, split, &s);
  void *base;
  int32_t scratch;
  PMOEI_TRY(pmoei_scratch_reserve(layer->ctx, pmoei_layer_forward_scratch(layer, tokens, rows, split)));
  PMOEI_TRY(pmoei_scratch_open(layer->ctx, arena.used, &base, &scratch));
  arena = (pmoei_arena){base, 0};
  lay_out(&arena, layer, tokens, rows, split, &s);
  pmoe_status status = move_and_compute(layer, stash, bound, &s, y);
  pmoei_scratch_close(layer->ctx, scratch);
  stash->metrics.recv_rows = rows;
  stash->metrics.bytes_sent += stash->plan->bytes_sent + stash->plan->bytes_returned;
  stash->metrics.saved_bytes = (int64_t)pmoei_stash_saved_bytes(stash, rows);
  return status;
}

pmoe_status pmoe_layer_forward(pmoe_layer *layer, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x,
                               pmoe_mat *y, pmoe_stream stream) {
  (void)stream;
  PMOEI_REQUIRE_POINTER(layer);
  pmoei_bound bound;
  pmoe_status status = begin(layer, stash, step, x, y, &bound);
  bool usable = stash && stash->layer == layer;
  uint64_t clock = pmoei_now_ns();
  status = usable ? pmoei_plan_settle(stash->plan, &stash->moved, status) : pmoei_a2a_refuse(layer->a2a, status);
  PMOEI_TRY(pmoei_tp_settle(layer, "pmoe_layer_forward", status));
  stash->metrics.ms_plan = pmoei_ms_since(&clock);
  status = forward_rows(layer, stash, &bound, y);
  if (status != PMOE_OK) return pmoei_layer_fail(layer, status);
  stash->state = PMOEI_STASH_FORWARD;
  stash->has_run = true;
  return PMOE_OK;
}
