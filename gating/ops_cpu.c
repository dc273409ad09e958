#include "gating/gate_cpu.h"

static pmoei_gate_tile take_tile(const pmoei_gate_call *call, pmoei_arena *arena) {
  const pmoe_gate *gate = call->gate;
  const pmoe_gate_config *cfg = &gate->cfg;
  int64_t input = (int64_t)LANES * gate->hidden, least = WEIGHT_GRAD_ROWS * WEIGHT_GRAD_COLS;
  int64_t experts = (int64_t)LANES * cfg->num_experts, choices = (int64_t)LANES * cfg->top_k;
  int64_t most = cfg->groups_kept > cfg->top_k ? cfg->groups_kept : cfg->top_k;
  if (call->backward && input < least) input = least;
  pmoei_gate_tile tile = {0};
  tile.logits = pmoei_take(arena, experts, sizeof *tile.logits);
  tile.input = pmoei_take(arena, input, sizeof *tile.input);
  tile.expert = pmoei_take(arena, choices, sizeof *tile.expert);
  tile.value = pmoei_take(arena, choices, sizeof *tile.value);
  if (call->backward) {
    tile.chosen = pmoei_take(arena, choices, sizeof *tile.chosen);
    tile.ratio = pmoei_take(arena, cfg->top_k, sizeof *tile.ratio);
    if (pmoei_gate_has_losses(gate) && cfg->score != PMOE_SCORE_SOFTMAX)
      tile.kept = pmoei_take(arena, experts, sizeof *tile.kept);
    if (cfg->seq_aux_coef > 0) tile.slope = pmoei_take(arena, experts, sizeof *tile.slope);
    return tile;
  }
  tile.key = pmoei_take(arena, cfg->num_experts, sizeof *tile.key);
  tile.order = pmoei_take(arena, 2 * most, sizeof *tile.order);
  if (cfg->gumbel || pmoei_gate_limits_choice(gate) || pmoei_gate_looks_at_all(call))
    tile.selection = pmoei_take(arena, experts, sizeof *tile.selection);
  if (most > LEVELS) tile.open = pmoei_take(arena, experts, sizeof *tile.open);
  if (pmoei_gate_counts_plain(gate)) tile.plain = pmoei_take(arena, choices, sizeof *tile.plain);
  if (cfg->num_groups > 1) {
    tile.group = pmoei_take(arena, (int64_t)LANES * cfg->num_groups, sizeof *tile.group);
    tile.in_group = pmoei_take(arena, (int64_t)LANES * cfg->num_groups, sizeof *tile.in_group);
  }
  if (cfg->num_groups > 1 || pmoei_gate_counts_plain(gate) || pmoei_gate_looks_at_all(call)) {
    tile.best = pmoei_take(arena, LANES * most, sizeof *tile.best);
    tile.which = pmoei_take(arena, LANES * most, sizeof *tile.which);
  }
  return tile;
}

/* For choices that look at all tokens. */
static void plan_all(pmoei_gate_call *call, pmoei_arena *arena) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  int64_t cells = call->blocks * cfg->num_experts;
  call->all_logits = pmoei_take(arena, cells * LANES, sizeof *call->all_logits);
  call->all_scores = pmoei_take(arena, cells * LANES, sizeof *call->all_scores);
  if (cfg->choice == PMOE_CHOICE_SINKHORN) {
    call->token_factor = pmoei_take(arena, call->blocks * LANES, sizeof *call->token_factor);
    call->expert_factor = pmoei_take(arena, cfg->num_experts, sizeof *call->expert_factor);
    call->column_sum = pmoei_take(arena, cells, sizeof *call->column_sum);
  } else {
    call->picked = pmoei_take(arena, cells, sizeof *call->picked);
    call->pick_key = pmoei_take(arena, call->gate->ctx->threads * call->blocks * LANES, sizeof *call->pick_key);
  }
}

static void plan(pmoei_gate_call *call, pmoei_arena *arena) {
  const pmoe_gate *gate = call->gate;
  const pmoe_gate_config *cfg = &gate->cfg;
  int32_t threads = gate->ctx->threads;
  int64_t experts = cfg->num_experts, cells = call->blocks * experts, choices = call->tokens * cfg->top_k;
  call->tile = pmoei_take(arena, threads, sizeof *call->tile);
  for (int32_t i = 0; i < threads; i++) {
    pmoei_gate_tile tile = take_tile(call, arena);
    if (call->tile) call->tile[i] = tile;
  }
  call->expert_sum = pmoei_take(arena, experts, sizeof *call->expert_sum);
  if (call->backward) {
    call->slope = pmoei_take(arena, experts, sizeof *call->slope);
    if (call->num_sequences > 0)
      call->seq_slope = pmoei_take(arena, call->num_sequences * experts, sizeof *call->seq_slope);
    if (!call->dlogits) call->dlogits = pmoei_take(arena, call->tokens * experts, sizeof *call->dlogits);
    return;
  }
  call->result = pmoei_take(arena, 1, sizeof *call->result);
  call->tally = pmoei_take(arena, call->blocks, sizeof *call->tally);
  call->block_count = pmoei_take(arena, cells, sizeof *call->block_count);
  if (pmoei_gate_has_aux(gate)) {
    call->loss_count = pmoei_take(arena, cells, sizeof *call->loss_count);
    call->prob_sum = pmoei_take(arena, cells, sizeof *call->prob_sum);
    call->prob_total = pmoei_take(arena, experts, sizeof *call->prob_total);
  }
  if (call->num_sequences > 0) {
    call->probability = pmoei_take(arena, call->tokens * experts, sizeof *call->probability);
    call->seq_prob_total = pmoei_take(arena, call->num_sequences * experts, sizeof *call->seq_prob_total);
  }
  if (call->capacity > 0) {
    call->contested = pmoei_take(arena, experts + 1, sizeof *call->contested);
    call->contender = pmoei_take(arena, choices, sizeof *call->contender);
    call->priority = pmoei_take(arena, choices, sizeof *call->priority);
  }
  if (pmoei_gate_looks_at_all(call)) plan_all(call, arena);
}

static pmoe_status update_bias(pmoe_ctx *ctx, int32_t num_experts, const int64_t *count, float rate, int32_t centred,
                               float *bias) {
  (void)ctx;
  int64_t total = 0, signs = 0;
  for (int32_t e = 0; e < num_experts; e++) total += count[e];
  for (int32_t e = 0; e < num_experts; e++) signs += pmoei_sign_below_mean(total, num_experts, count[e]);
  double mean = centred ? (double)signs / num_experts : 0;
  for (int32_t e = 0; e < num_experts; e++)
    bias[e] = pmoei_moved_bias(bias[e], rate, pmoei_sign_below_mean(total, num_experts, count[e]), mean);
  return PMOE_OK;
}

const pmoei_gate_ops pmoei_gate_ops_cpu = {
    .plan = plan,
    .route = pmoei_gate_route,
    .total = pmoei_gate_total,
    .add_to_step = pmoei_gate_add_to_step,
    .losses = pmoei_gate_losses_value,
    .drop = pmoei_gate_drop,
    .place = pmoei_gate_place,
    .input_grad = pmoei_gate_input_grad,
    .weight_grad = pmoei_gate_weight_grad,
    .update_bias = update_bias,
};
