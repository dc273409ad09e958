#include <float.h>

#include "core/parallel.h"
#include "gating/gate_cpu.h"

/* Larger stays; among equals the earlier token stays. */
static void set_priorities(const pmoei_gate_call *call, int64_t begin, int64_t end) {
  pmoe_drop drop = call->gate->cfg.drop;
  if (drop == PMOE_DROP_RANDOM && call->step.training) {
    pmoei_gate_random_priority(call, begin, end);
    return;
  }
  int64_t top_k = call->gate->cfg.top_k;
  for (int64_t i = begin; i < end; i++) {
    int64_t choice = call->contender[i];
    call->priority[i] = drop == PMOE_DROP_PROBS         ? pmoei_gate_order_key(call->routing.weight[choice])
                        : drop == PMOE_DROP_TOKEN_ORDER ? 0
                                                        : (uint32_t)(top_k - choice % top_k);
  }
}

/* Takes the slot from all but `capacity` choices of one overfull expert. */
static void drop_expert(void *arg, int64_t expert, int32_t thread) {
  (void)thread;
  const pmoei_gate_call *call = arg;
  int64_t begin = call->contested[expert], end = call->contested[expert + 1], ties;
  if (begin == end) return;
  int64_t num_experts = call->gate->cfg.num_experts,
          choices_per_block = (int64_t)PMOEI_GATE_BLOCK * call->gate->cfg.top_k;
  set_priorities(call, begin, end);
  uint32_t threshold = pmoei_gate_threshold(call->priority + begin, end - begin, call->capacity, &ties);
  for (int64_t i = begin; i < end; i++) {
    uint32_t priority = call->priority[i];
    if (priority > threshold || (priority == threshold && ties-- > 0)) continue;
    int64_t choice = call->contender[i];
    call->routing.slot[choice] = -1;
    call->block_count[choice / choices_per_block * num_experts + expert]--;
  }
}

pmoe_status pmoei_gate_drop(pmoei_gate_call *call) {
  int64_t num_experts = call->gate->cfg.num_experts, choices = call->tokens * call->gate->cfg.top_k;
  int64_t *start = call->contested;
  start[0] = 0;
  for (int64_t e = 0; e < num_experts; e++) {
    int64_t count = call->routing.expert_count[e];
    start[e + 1] = start[e] + (count > call->capacity ? count : 0);
  }
  if (start[num_experts] == 0) return PMOE_OK;
  int64_t *next = call->routing.expert_rows; /* free until pmoei_gate_place */
  for (int64_t e = 0; e < num_experts; e++) next[e] = start[e];
  for (int64_t i = 0; i < choices; i++) {
    int32_t e = call->routing.expert[i];
    if (e >= 0 && start[e] != start[e + 1]) call->contender[next[e]++] = i;
  }
  pmoei_parallel(call->gate->ctx, num_experts, drop_expert, call);
  return PMOE_OK;
}

/* Turns each block's counts into its first slots. */
static void first_slots(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const pmoei_gate_call *call = arg;
  int64_t num_experts = call->gate->cfg.num_experts, begin = index * EXPERTS_PER_TASK;
  int64_t n = num_experts - begin < EXPERTS_PER_TASK ? num_experts - begin : EXPERTS_PER_TASK;
  int64_t *rows = call->routing.expert_rows + begin;
  for (int64_t i = 0; i < n; i++) rows[i] = 0;
  for (int64_t b = 0; b < call->blocks; b++) {
    int64_t *count = call->block_count + b * num_experts + begin;
    for (int64_t i = 0; i < n; i++) {
      int64_t here = count[i];
      count[i] = rows[i];
      rows[i] += here;
    }
  }
}

static void finish_weights(const pmoei_gate_call *call, int64_t token) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  const int64_t *slot = call->routing.slot + token * cfg->top_k;
  float *weight = call->routing.weight + token * cfg->top_k, sum = 0;
  for (int32_t k = 0; k < cfg->top_k; k++)
    if (slot[k] >= 0 || cfg->norm == PMOE_NORM_BEFORE_DROP) sum += weight[k];
  if (cfg->norm == PMOE_NORM_NONE) sum = 1;
  /* Survivors whose scores vanish beside the dropped ones weigh nothing, rather than 0/0. */
  for (int32_t k = 0; k < cfg->top_k; k++)
    weight[k] = slot[k] < 0 || sum < FLT_MIN ? 0 : weight[k] / sum * cfg->weight_scale;
}

static void place_block(void *arg, int64_t block, int32_t thread) {
  (void)thread;
  const pmoei_gate_call *call = arg;
  const pmoe_gate_config *cfg = &call->gate->cfg;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  int64_t *next = call->block_count + block * cfg->num_experts, *slot = call->routing.slot;
  const int32_t *expert = call->routing.expert;
  bool drops = call->capacity > 0;
  int64_t begin = span.first * cfg->top_k, end = begin + span.rows * cfg->top_k;
  for (int64_t i = begin; i < end && !drops; i++) slot[i] = expert[i] < 0 ? -1 : next[expert[i]]++;
  for (int64_t i = begin; i < end && drops; i++) slot[i] = expert[i] < 0 || slot[i] < 0 ? -1 : next[expert[i]]++;
  if (!drops && cfg->norm == PMOE_NORM_NONE && cfg->weight_scale == 1) return;
  for (int64_t t = span.first; t < span.first + span.rows; t++) finish_weights(call, t);
}

pmoe_status pmoei_gate_place(pmoei_gate_call *call) {
  int64_t num_experts = call->gate->cfg.num_experts;
  pmoei_parallel(call->gate->ctx, (num_experts + EXPERTS_PER_TASK - 1) / EXPERTS_PER_TASK, first_slots, call);
  pmoei_parallel(call->gate->ctx, call->blocks, place_block, call);
  return PMOE_OK;
}
