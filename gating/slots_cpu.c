#include <float.h>

#include "core/parallel.h"
#include "core/simd.h"
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
  int64_t num_experts = call->gate->cfg.num_experts, top_k = call->gate->cfg.top_k;
  int64_t choices_per_block = PMOEI_GATE_BLOCK * top_k;
  set_priorities(call, begin, end);
  uint32_t threshold = pmoei_gate_threshold(call->priority + begin, end - begin, call->capacity, &ties);
  for (int64_t i = begin; i < end; i++) {
    uint32_t priority = call->priority[i];
    if (priority > threshold || (priority == threshold && ties-- > 0)) continue;
    int64_t choice = call->contender[i];
    call->has_slot[choice / choices_per_block * num_experts + expert] &=
        ~(UINT64_C(1) << choice / top_k % PMOEI_GATE_BLOCK);
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

PMOEI_VECTORISED static void add_block(int64_t *restrict rows, int64_t *restrict first,
                                       const uint64_t *restrict has_slot, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    first[i] = rows[i];
    rows[i] += __builtin_popcountll(has_slot[i]);
  }
}

/* Each block's first slots. */
static void first_slots(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const pmoei_gate_call *call = arg;
  int64_t num_experts = call->gate->cfg.num_experts, begin = index * EXPERTS_PER_TASK;
  int64_t n = num_experts - begin < EXPERTS_PER_TASK ? num_experts - begin : EXPERTS_PER_TASK;
  int64_t *rows = call->routing.expert_rows + begin;
  for (int64_t i = 0; i < n; i++) rows[i] = 0;
  for (int64_t at = begin; at < call->blocks * num_experts; at += num_experts)
    add_block(rows, call->first_slot + at, call->has_slot + at, n);
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

/* A choice's slot is the number of the expert's earlier tokens in the block, after those of earlier blocks. */
PMOEI_VECTORISED static void number_slots(int64_t *restrict slot, const int32_t *restrict expert, int64_t rows,
                                          int64_t top_k, const uint64_t *restrict has_slot,
                                          const int64_t *restrict first) {
  for (int64_t l = 0, i = 0; l < rows; l++) {
    uint64_t own = UINT64_C(1) << l;
    for (int64_t k = 0; k < top_k; k++, i++) {
      int64_t e = expert[i] < 0 ? 0 : expert[i];
      uint64_t mask = expert[i] < 0 ? 0 : has_slot[e];
      slot[i] = mask & own ? first[e] + __builtin_popcountll(mask & (own - 1)) : -1;
    }
  }
}

static void place_block(void *arg, int64_t block, int32_t thread) {
  (void)thread;
  const pmoei_gate_call *call = arg;
  const pmoe_gate_config *cfg = &call->gate->cfg;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  int64_t at = block * cfg->num_experts, choice = span.first * cfg->top_k;
  number_slots(call->routing.slot + choice, call->routing.expert + choice, span.rows, cfg->top_k, call->has_slot + at,
               call->first_slot + at);
  if (call->capacity == 0 && cfg->norm == PMOE_NORM_NONE && cfg->weight_scale == 1) return;
  for (int64_t t = span.first; t < span.first + span.rows; t++) finish_weights(call, t);
}

pmoe_status pmoei_gate_place(pmoei_gate_call *call) {
  int64_t num_experts = call->gate->cfg.num_experts;
  pmoei_parallel(call->gate->ctx, (num_experts + EXPERTS_PER_TASK - 1) / EXPERTS_PER_TASK, first_slots, call);
  pmoei_parallel(call->gate->ctx, call->blocks, place_block, call);
  return PMOE_OK;
}
