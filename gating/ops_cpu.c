#include "gating/gate_cpu.h"

static pmoei_gate_tile take_tile(const pmoei_gate_call *call, pmoei_arena *arena) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  int64_t input = (int64_t)LANES * call->gate->hidden, least = WEIGHT_GRAD_ROWS * WEIGHT_GRAD_COLS;
  if (call->backward && input < least) input = least;
  pmoei_gate_tile tile = {0};
  tile.logits = pmoei_take(arena, (int64_t)LANES * cfg->num_experts, sizeof *tile.logits);
  if (cfg->gumbel || cfg->top_k > LEVELS)
    tile.selection = pmoei_take(arena, (int64_t)LANES * cfg->num_experts, sizeof *tile.selection);
  tile.input = pmoei_take(arena, input, sizeof *tile.input);
  tile.expert = pmoei_take(arena, (int64_t)LANES * cfg->top_k, sizeof *tile.expert);
  tile.value = pmoei_take(arena, (int64_t)LANES * cfg->top_k, sizeof *tile.value);
  tile.key = pmoei_take(arena, cfg->num_experts, sizeof *tile.key);
  tile.order = pmoei_take(arena, 2 * (int64_t)cfg->top_k, sizeof *tile.order);
  return tile;
}

static void plan(pmoei_gate_call *call, pmoei_arena *arena) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  int32_t threads = call->gate->ctx->threads;
  int64_t cells = call->blocks * cfg->num_experts, choices = call->tokens * cfg->top_k;
  call->tile = pmoei_take(arena, threads, sizeof *call->tile);
  for (int32_t i = 0; i < threads; i++) {
    pmoei_gate_tile tile = take_tile(call, arena);
    if (call->tile) call->tile[i] = tile;
  }
  call->tally = pmoei_take(arena, call->blocks, sizeof *call->tally);
  if (cfg->aux_coef > 0) call->loss_count = pmoei_take(arena, cells, sizeof *call->loss_count);
  call->fraction = pmoei_take(arena, cfg->num_experts, sizeof *call->fraction);
  call->expert_sum = pmoei_take(arena, cfg->num_experts, sizeof *call->expert_sum);
  if (call->backward) {
    if (!call->dlogits) call->dlogits = pmoei_take(arena, call->tokens * cfg->num_experts, sizeof *call->dlogits);
    return;
  }
  call->block_count = pmoei_take(arena, cells, sizeof *call->block_count);
  if (cfg->aux_coef > 0) call->prob_sum = pmoei_take(arena, cells, sizeof *call->prob_sum);
  if (call->capacity > 0) {
    call->contested = pmoei_take(arena, (int64_t)cfg->num_experts + 1, sizeof *call->contested);
    call->contender = pmoei_take(arena, choices, sizeof *call->contender);
    call->priority = pmoei_take(arena, choices, sizeof *call->priority);
  }
}

const pmoei_gate_ops pmoei_gate_ops_cpu = {
    .plan = plan,
    .route = pmoei_gate_route,
    .total = pmoei_gate_total,
    .drop = pmoei_gate_drop,
    .place = pmoei_gate_place,
    .input_grad = pmoei_gate_input_grad,
    .weight_grad = pmoei_gate_weight_grad,
};
