#include "gating/gate_cuda.h"

/* Whether some product takes its rows from call->input, or leaves them there. */
static bool needs_input(const pmoei_gate_call *call) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  if (cfg->router != PMOE_ROUTER_LINEAR) return false;
  bool narrow = call->x.dtype != PMOE_F32 || (call->backward && call->dx.dtype != PMOE_F32);
  return narrow || cfg->jitter > 0 || (call->backward && call->step.token_mask);
}

static int64_t input_rows(const pmoei_gate_call *call) {
  int64_t most = PMOEI_GATE_INPUT_BYTES / (int64_t)sizeof(float) / call->gate->hidden;
  most = most < PMOEI_GATE_BLOCK ? PMOEI_GATE_BLOCK : most / PMOEI_GATE_BLOCK * PMOEI_GATE_BLOCK;
  return call->padded < most ? call->padded : most;
}

static void plan_backward(pmoei_gate_call *call, pmoei_arena *arena) {
  int64_t experts = call->gate->cfg.num_experts;
  call->slope = pmoei_take(arena, experts + 1, sizeof *call->slope);
  if (call->num_sequences > 0)
    call->seq_slope = pmoei_take(arena, call->num_sequences * experts, sizeof *call->seq_slope);
  if (!call->dlogits) call->dlogits = pmoei_take(arena, call->tokens * experts, sizeof *call->dlogits);
  int64_t slices = (call->tokens + PMOEI_GATE_SLICE - 1) / PMOEI_GATE_SLICE;
  if (call->gate->cfg.bias) call->partial_sum = pmoei_take(arena, slices * experts, sizeof *call->partial_sum);
}

static void plan_choice(pmoei_gate_call *call, pmoei_arena *arena) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  int64_t experts = cfg->num_experts;
  if (pmoei_gate_limits_choice(call->gate) || pmoei_gate_looks_at_all(call))
    call->selection = pmoei_take(arena, experts * call->padded, sizeof *call->selection);
  if (cfg->num_groups > 1) call->group = pmoei_take(arena, cfg->num_groups * call->padded, sizeof *call->group);
  if (pmoei_gate_counts_plain(call->gate))
    call->plain = pmoei_take(arena, call->tokens * cfg->top_k, sizeof *call->plain);
  if (cfg->choice == PMOE_CHOICE_HASH) call->drawn = pmoei_take(arena, cfg->top_k * call->padded, sizeof *call->drawn);
  if (cfg->choice == PMOE_CHOICE_SINKHORN) {
    call->token_factor = pmoei_take(arena, call->padded, sizeof *call->token_factor);
    call->expert_factor = pmoei_take(arena, experts, sizeof *call->expert_factor);
    call->column_sum = pmoei_take(arena, call->blocks * experts, sizeof *call->column_sum);
    call->iteration = pmoei_take(arena, 2, sizeof *call->iteration);
  }
  if (cfg->choice == PMOE_CHOICE_EXPERT_CHOICE) call->picks = pmoei_take(arena, experts, sizeof *call->picks);
}

static void plan(pmoei_gate_call *call, pmoei_arena *arena) {
  const pmoe_gate *gate = call->gate;
  const pmoe_gate_config *cfg = &gate->cfg;
  int64_t experts = cfg->num_experts, cells = call->blocks * experts, choices = call->tokens * cfg->top_k;
  call->padded = call->blocks * PMOEI_GATE_BLOCK;
  if (cfg->router != PMOE_ROUTER_HOST_ROUTING)
    call->logits = pmoei_take(arena, experts * call->padded, sizeof *call->logits);
  call->input_rows = input_rows(call);
  if (needs_input(call)) call->input = pmoei_take(arena, call->input_rows * gate->hidden, sizeof *call->input);
  if (call->backward) {
    plan_backward(call, arena);
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
  if (call->num_sequences > 0)
    call->seq_prob = pmoei_take(arena, call->num_sequences * experts, sizeof *call->seq_prob);
  if (call->capacity > 0 && cfg->choice != PMOE_CHOICE_EXPERT_CHOICE) {
    call->contested = pmoei_take(arena, experts + 1, sizeof *call->contested);
    call->contender = pmoei_take(arena, choices, sizeof *call->contender);
    call->priority = pmoei_take(arena, choices, sizeof *call->priority);
  }
  plan_choice(call, arena);
}

static pmoe_status choose_best(pmoei_gate_call *call) {
  const float *keys = call->logits;
  if (call->step.training && call->gate->cfg.gumbel) return pmoei_gate_cuda_sample(call);
  if (pmoei_gate_limits_choice(call->gate)) {
    PMOEI_TRY(pmoei_gate_cuda_limit(call));
    keys = call->selection;
  }
  return pmoei_gate_cuda_best(call, keys, call->routing.expert, false);
}

static pmoe_status choose(pmoei_gate_call *call) {
  switch (call->gate->cfg.choice) {
  case PMOE_CHOICE_SINKHORN:
    if (!pmoei_gate_looks_at_all(call)) return choose_best(call);
    PMOEI_TRY(pmoei_gate_cuda_sinkhorn(call));
    return pmoei_gate_cuda_best(call, call->selection, call->routing.expert, false);
  case PMOE_CHOICE_EXPERT_CHOICE:
    PMOEI_TRY(pmoei_gate_cuda_expert_choice(call));
    return pmoei_gate_cuda_best(call, call->selection, call->routing.expert, true);
  case PMOE_CHOICE_ROUND_ROBIN: return pmoei_gate_cuda_round_robin(call);
  case PMOE_CHOICE_HASH: return pmoei_gate_cuda_hash(call);
  case PMOE_CHOICE_GIVEN: return pmoei_gate_cuda_given(call);
  default: return choose_best(call);
  }
}

static pmoe_status route(pmoei_gate_call *call) {
  const pmoe_gate *gate = call->gate;
  const pmoe_gate_config *cfg = &gate->cfg;
  if (call->num_sequences > 0 && call->tokens > PMOEI_GATE_FIXED_TOKENS)
    return pmoei_error(PMOE_ERR_UNSUPPORTED,
                       "x->rows is %lld; on CUDA the sequence loss takes up to %lld tokens a call",
                       (long long)call->tokens, (long long)PMOEI_GATE_FIXED_TOKENS);
  if (call->num_sequences > 0) {
    size_t cells = (size_t)call->num_sequences * (size_t)cfg->num_experts;
    PMOEI_TRY(pmoei_data_zero(gate->ctx, pmoei_gate_seq_sums(call, 0),
                              (cells + (size_t)call->num_sequences) * sizeof *call->routing.loss_sums));
    PMOEI_TRY(pmoei_data_zero(gate->ctx, call->seq_prob, cells * sizeof *call->seq_prob));
  }
  if (cfg->router != PMOE_ROUTER_HOST_ROUTING) PMOEI_TRY(pmoei_gate_cuda_logits(call));
  PMOEI_TRY(choose(call));
  if (call->plain) PMOEI_TRY(pmoei_gate_cuda_best(call, call->logits, call->plain, false));
  return pmoei_gate_cuda_score(call);
}

const pmoei_gate_ops pmoei_gate_ops_cuda = {
    .plan = plan,
    .route = route,
    .total = pmoei_gate_cuda_total,
    .add_to_step = pmoei_gate_cuda_add_to_step,
    .losses = pmoei_gate_cuda_losses,
    .drop = pmoei_gate_cuda_drop,
    .place = pmoei_gate_cuda_place,
    .input_grad = pmoei_gate_cuda_input_grad,
    .weight_grad = pmoei_gate_cuda_weight_grad,
    .update_bias = pmoei_gate_cuda_update_bias,
};
