#include <string.h>

#include "core/random.h"
#include "gating/gate_cpu.h"

void pmoei_gate_gather(const pmoei_gate_call *call, pmoei_gate_tile *tile) {
  for (int64_t i = 0; i < (int64_t)call->gate->cfg.top_k * LANES; i++)
    tile->value[i] = tile->expert[i] < 0 ? -INFINITY : tile->logits[(int64_t)tile->expert[i] * LANES + i % LANES];
}

static void round_robin(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  uint64_t top_k = (uint64_t)call->gate->cfg.top_k, num_experts = (uint64_t)call->gate->cfg.num_experts;
  uint64_t first = (uint64_t)(call->step.first_token + pmoei_gate_block(call, block).first) % num_experts;
  for (uint64_t k = 0; k < top_k; k++)
    for (uint64_t l = 0; l < LANES; l++)
      tile->expert[k * LANES + l] = (int32_t)(((first + l) * top_k + k) % num_experts);
}

/* Of the experts left after k choices, the one at a random place. `sorted` holds the choices so far in order. */
static int32_t draw_another(int32_t place, int32_t *sorted, int32_t k) {
  int32_t at = 0;
  while (at < k && sorted[at] <= place + at) at++;
  int32_t expert = place + at;
  memmove(sorted + at + 1, sorted + at, (size_t)(k - at) * sizeof *sorted);
  sorted[at] = expert;
  return expert;
}

static void hash(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  const pmoe_gate *gate = call->gate;
  uint64_t key = pmoei_random_key(gate->ctx->seed, PMOEI_RANDOM_HASH, (uint64_t)gate->layer_id, 0);
  pmoei_gate_span span = pmoei_gate_block(call, block);
  for (int64_t l = 0; l < span.rows; l++) {
    uint32_t word[4];
    for (int32_t k = 0; k < gate->cfg.top_k; k++) {
      if (k % 4 == 0)
        pmoei_random4(key, (uint64_t)(uint32_t)call->step.token_id[span.first + l], (uint64_t)k / 4, word);
      uint32_t left = (uint32_t)(gate->cfg.num_experts - k);
      int32_t place = (int32_t)((uint64_t)word[k % 4] * left >> 32);
      tile->expert[k * LANES + l] = draw_another(place, (int32_t *)tile->key, k);
    }
  }
}

static void given(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  int64_t top_k = call->gate->cfg.top_k;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  for (int64_t l = 0; l < span.rows; l++)
    for (int64_t k = 0; k < top_k; k++) tile->expert[k * LANES + l] = call->step.expert[(span.first + l) * top_k + k];
}

static void top_k(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  if (pmoei_gate_has_gumbel(call)) {
    pmoei_gate_gumbel(call, tile, block);
    pmoei_gate_sample(call, tile);
  } else if (pmoei_gate_limits_choice(call->gate)) {
    pmoei_gate_limit(call, tile);
    pmoei_gate_best(tile->selection, cfg->num_experts, cfg->top_k, tile->expert, tile->value, tile->open, tile);
    pmoei_gate_gather(call, tile);
  } else {
    pmoei_gate_best(tile->logits, cfg->num_experts, cfg->top_k, tile->expert, tile->value, tile->open, tile);
  }
}

void pmoei_gate_choose(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  pmoe_choice choice = call->gate->cfg.choice;
  if (choice == PMOE_CHOICE_TOPK || (choice == PMOE_CHOICE_SINKHORN && !call->all_logits)) {
    top_k(call, tile, block);
    return;
  }
  memset(tile->expert, 0xff, (size_t)call->gate->cfg.top_k * LANES * sizeof *tile->expert);
  switch (choice) {
  case PMOE_CHOICE_SINKHORN: pmoei_gate_sinkhorn_select(call, tile, block); break;
  case PMOE_CHOICE_ROUND_ROBIN: round_robin(call, tile, block); break;
  case PMOE_CHOICE_HASH: hash(call, tile, block); break;
  case PMOE_CHOICE_EXPERT_CHOICE: pmoei_gate_expert_choice_select(call, tile, block); break;
  default: given(call, tile, block); break;
  }
  pmoei_gate_gather(call, tile);
}
