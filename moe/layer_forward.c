/* The layer's forward pass: router, plan, dispatch with the dense branch under it, experts, combine. */
#include <inttypes.h>

#include "core/check.h"
#include "core/config.h"
#include "core/dtype.h"
#include "moe/layer.h"

/* Temporaries that live from dispatch to combine. */
typedef struct forward_scratch {
  pmoe_mat y_rows; /* [R,H] experts' output */
  pmoe_mat mlp;    /* [T,H] dense branch's output */
} forward_scratch;

static void lay_out(pmoei_arena *arena, const pmoe_layer *layer, int64_t tokens, int64_t rows, forward_scratch *s) {
  pmoe_dtype dtype = layer->experts_cfg.dtype;
  int64_t hidden = layer->cfg.hidden;
  size_t row_bytes = (size_t)hidden * pmoe_dtype_size(dtype);
  s->y_rows = (pmoe_mat){pmoei_take(arena, rows, row_bytes), dtype, rows, hidden, hidden};
  s->mlp = (pmoe_mat){pmoei_take(arena, layer->residual ? tokens : 0, row_bytes), dtype, tokens, hidden, hidden};
}

size_t pmoei_layer_forward_scratch(const pmoe_layer *layer, int64_t tokens, int64_t rows) {
  forward_scratch unused;
  pmoei_arena measure = {NULL, 0};
  lay_out(&measure, layer, tokens, rows, &unused);
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

static void note(pmoe_stash *stash, const pmoe_gate_stats *stats) {
  pmoe_metrics *m = &stash->metrics;
  m->tokens = stats->tokens;
  m->masked = stats->masked;
  m->routed = stats->routed;
  m->dropped = stats->dropped;
  m->nonfinite = stats->nonfinite;
  m->aux_loss = stats->aux_loss;
  m->z_loss = stats->z_loss;
  m->seq_aux_loss = stats->seq_aux_loss;
  m->global_aux_loss = stats->global_aux_loss;
  m->load_max_over_mean = stats->load_max_over_mean;
  m->load_cv = stats->load_cv;
  m->entropy = stats->entropy;
}

/* Checks that need no other rank, and the stash made ready. */
static pmoe_status begin(pmoe_layer *layer, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x,
                         const pmoe_mat *y, pmoei_bound *bound) {
  pmoe_step checked;
  PMOEI_TRY(check_call(layer, stash, step, x, y, &checked, bound));
  PMOEI_REQUIRE(checked.num_sequences <= layer->cfg.max_sequences || layer->cfg.max_sequences == 0,
                "step->num_sequences is %d; at most the layer's max_sequences (%d) was expected", checked.num_sequences,
                layer->cfg.max_sequences);
  stash->state = PMOEI_STASH_EMPTY;
  stash->has_run = false;
  stash->step = checked;
  stash->x = *x;
  stash->metrics = (pmoe_metrics)PMOE_CONFIG_INIT(pmoe_metrics);
  pmoei_stash_place_tokens(stash, x->rows);
  if (!pmoei_layer_shares_losses(layer)) return PMOE_OK;
  pmoei_gate_call unused = {0};
  return pmoei_gate_check_forward(&unused, layer->gate, &bound->gate, &stash->step, x, &stash->routing, NULL);
}

/* Everything up to the plan. Communicates only where ranks share a loss. */
static pmoe_status route(pmoe_layer *layer, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x,
                         const pmoe_mat *y, pmoei_bound *bound) {
  uint64_t start = pmoei_now_ns();
  PMOEI_TRY(pmoei_layer_agree_on_losses(layer, begin(layer, stash, step, x, y, bound)));
  pmoe_gate_stats stats = PMOE_CONFIG_INIT(pmoe_gate_stats);
  pmoe_status status = pmoe_gate_forward(layer->gate, &bound->gate, &stash->step, x, &stash->routing, &stats, NULL);
  if (status != PMOE_OK) {
    pmoei_layer_fail_losses(layer, status);
    return status;
  }
  note(stash, &stats);
  pmoei_layer_note_load(layer, &stash->step, &stats, &stash->routing);
  stash->metrics.ms_gate = pmoei_ms_since(&start);
  return PMOE_OK;
}

/* A masked token gives zero, and zero coefficients keep it out of the branch's gradients too. */
static void mask_branch(pmoe_stash *stash) {
  const uint8_t *mask = stash->step.token_mask;
  for (int64_t t = 0; mask && t < stash->x.rows; t++)
    if (!mask[t]) stash->scale[t] = stash->branch_scale[t] = 0;
}

static pmoe_status run_branch(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, pmoe_mat *mlp) {
  if (!layer->residual) return PMOE_OK;
  PMOEI_TRY(pmoe_residual_forward(layer->residual, &bound->residual, &stash->x, &stash->residual_pre, stash->scale,
                                  stash->branch_scale, mlp, NULL));
  mask_branch(stash);
  return PMOE_OK;
}

/* From the plan to y. The dense branch runs while the rows travel. */
static pmoe_status move_and_compute(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, forward_scratch *s,
                                    pmoe_mat *y) {
  pmoe_metrics *m = &stash->metrics;
  uint64_t clock = pmoei_now_ns();
  PMOEI_TRY(pmoe_dispatch_forward(stash->plan, &stash->routing, &stash->x, &stash->x_rows, NULL));
  m->ms_dispatch = pmoei_ms_since(&clock);
  pmoe_status branch = run_branch(layer, stash, bound, &s->mlp);
  m->ms_residual = pmoei_ms_since(&clock);
  PMOEI_TRY(pmoe_plan_finish(stash->plan, NULL));
  PMOEI_TRY(branch);
  m->ms_dispatch += pmoei_ms_since(&clock);
  pmoe_mat *pre = stash->pre.data && !layer->experts_cfg.recompute_act ? &stash->pre : NULL;
  PMOEI_TRY(pmoe_experts_forward(layer->experts, &bound->experts, stash->plan->expert_rows, &stash->x_rows, pre,
                                 &s->y_rows, NULL));
  m->ms_experts = pmoei_ms_since(&clock);
  pmoe_branch mix = {stash->scale, stash->branch_scale, &s->mlp};
  PMOEI_TRY(pmoe_combine_forward(stash->plan, &stash->routing, &s->y_rows, layer->residual ? &mix : NULL, y, NULL));
  PMOEI_TRY(pmoe_plan_finish(stash->plan, NULL));
  m->ms_combine = pmoei_ms_since(&clock);
  return PMOE_OK;
}

static pmoe_status forward_rows(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound, pmoe_mat *y) {
  int64_t tokens = stash->x.rows, rows = stash->plan->recv_rows;
  PMOEI_TRY(pmoei_stash_place_rows(stash, rows));
  forward_scratch s;
  pmoei_arena arena = {NULL, 0};
  lay_out(&arena, layer, tokens, rows, &s);
  void *base;
  int32_t scratch;
  PMOEI_TRY(pmoei_scratch_reserve(layer->ctx, pmoei_layer_forward_scratch(layer, tokens, rows)));
  PMOEI_TRY(pmoei_scratch_open(layer->ctx, arena.used, &base, &scratch));
  arena = (pmoei_arena){base, 0};
  lay_out(&arena, layer, tokens, rows, &s);
  pmoe_status status = move_and_compute(layer, stash, bound, &s, y);
  pmoei_scratch_close(layer->ctx, scratch);
  stash->metrics.recv_rows = rows;
  stash->metrics.bytes_sent = stash->plan->bytes_sent + stash->plan->bytes_returned;
  stash->metrics.saved_bytes = (int64_t)pmoei_stash_saved_bytes(stash, tokens, rows);
  return status;
}

pmoe_status pmoe_layer_forward(pmoe_layer *layer, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x,
                               pmoe_mat *y, pmoe_stream stream) {
  (void)stream;
  PMOEI_REQUIRE_POINTER(layer);
  pmoei_bound bound;
  pmoe_status status = route(layer, stash, step, x, y, &bound);
  if (!stash || stash->layer != layer) return pmoei_a2a_refuse(layer->a2a, status);
  uint64_t clock = pmoei_now_ns();
  PMOEI_TRY(pmoei_plan_settle(stash->plan, &stash->routing, status));
  stash->metrics.ms_plan = pmoei_ms_since(&clock);
  status = forward_rows(layer, stash, &bound, y);
  if (status != PMOE_OK) return pmoei_comm_fail(layer->ep, status, NULL);
  stash->state = PMOEI_STASH_FORWARD;
  stash->has_run = true;
  return PMOE_OK;
}
