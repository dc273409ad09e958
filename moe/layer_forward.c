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
  uint64_t start = pmoei_now_ns();
  pmoe_gate_stats stats = PMOE_CONFIG_INIT(pmoe_gate_stats);
  pmoe_status status =
      pmoe_gate_forward(layer->gate, &bound->gate, &stash->step, &stash->x, &stash->routing, &stats, NULL);
  if (status != PMOE_OK) {
    pmoei_layer_fail_losses(layer, status);
    return status;
  }
  pmoei_shards_route(stash);
  note(stash, &stats);
  pmoei_layer_note_load(layer, &stash->step, &stats, &stash->routing);
  stash->metrics.ms_gate = pmoei_ms_since(&start);
  return PMOE_OK;
}

/* The stash made ready; the router's own checks, if ranks will wait for each other in it. */
static pmoe_status prepare(pmoe_layer *layer, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x,
                           const pmoei_bound *bound) {
  stash->state = PMOEI_STASH_EMPTY;
  stash->has_run = false;
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
