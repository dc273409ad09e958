#include <string.h>

#include "core/gemm.h"
#include "core/parallel.h"
#include "gating/gate_cpu.h"

static void write_choices(const pmoei_gate_call *call, const pmoei_gate_tile *tile, int64_t block) {
  int64_t num_experts = call->gate->cfg.num_experts, top_k = call->gate->cfg.top_k;
  pmoei_gate_span span = pmoei_gate_block(call, block);
  int64_t *count = call->block_count + block * num_experts;
  memset(count, 0, (size_t)num_experts * sizeof *count);
  for (int64_t l = 0; l < span.rows; l++) {
    int64_t at = (span.first + l) * top_k;
    for (int64_t k = 0; k < top_k; k++) {
      int32_t expert = tile->masked[l] ? -1 : tile->expert[k * LANES + l];
      call->routing.expert[at + k] = expert;
      call->routing.slot[at + k] = expert < 0 ? -1 : 0;
      call->routing.weight[at + k] = expert < 0 ? 0 : tile->value[k * LANES + l];
      if (expert >= 0) count[expert]++;
    }
  }
}

static void route_block(void *arg, int64_t block, int32_t thread) {
  const pmoei_gate_call *call = arg;
  pmoei_gate_tile *tile = &call->tile[thread];
  pmoei_gate_span span = pmoei_gate_block(call, block);
  const uint8_t *mask = call->step.token_mask;
  for (int64_t l = 0; l < LANES; l++) tile->masked[l] = l >= span.rows || (mask && !mask[span.first + l]);
  pmoei_gate_logits(call, tile, block, thread);
  pmoei_gate_extremes(call, tile);
  if (pmoei_gate_has_gumbel(call)) pmoei_gate_gumbel(call, tile, block);
  pmoei_gate_select(call, tile);
  pmoei_gate_count_live(call, tile, block);
  if (pmoei_gate_needs_softmax(call->gate)) pmoei_gate_softmax(call, tile);
  if (pmoei_gate_has_losses(call->gate)) pmoei_gate_sum_losses(call, tile, block);
  pmoei_gate_scores(call, tile);
  write_choices(call, tile, block);
}

pmoe_status pmoei_gate_route(pmoei_gate_call *call) {
  pmoei_parallel(call->gate->ctx, call->blocks, route_block, call);
  return pmoei_gemm_take_error(call->gate->ctx->gemm);
}
