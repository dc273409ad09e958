#include "core/random.h"
#include "core/simd.h"
#include "core/vmath.h"
#include "gating/gate_cpu.h"

/* Every number is keyed by (seed, layer, step) and counted by (global token, position), so it depends neither on how
 * tokens are spread over ranks and calls nor on threads. */
static uint64_t noise_key(const pmoei_gate_call *call, pmoei_random_use use) {
  return pmoei_random_key(call->gate->ctx->seed, use, (uint64_t)call->gate->layer_id, call->step.step);
}

bool pmoei_gate_has_jitter(const pmoei_gate_call *call) { return call->step.training && call->gate->cfg.jitter > 0; }

bool pmoei_gate_has_gumbel(const pmoei_gate_call *call) { return call->step.training && call->gate->cfg.gumbel; }

PMOEI_VECTORISED static void jitter_row(float *restrict row, int64_t n, uint64_t key, uint64_t token, uint64_t group,
                                        float jitter) {
  float low = 1.0f - jitter, width = 2.0f * jitter;
  int64_t whole = n / 4 * 4;
  for (int64_t i = 0; i < whole; i += 4) {
    uint32_t word[4];
    pmoei_random4(key, token, group + (uint64_t)i / 4, word);
    for (int j = 0; j < 4; j++) row[i + j] *= low + width * pmoei_uniform(word[j]);
  }
  if (whole < n) {
    uint32_t word[4];
    pmoei_random4(key, token, group + (uint64_t)whole / 4, word);
    for (int64_t i = whole; i < n; i++) row[i] *= low + width * pmoei_uniform(word[i - whole]);
  }
}

void pmoei_gate_jitter(const pmoei_gate_call *call, int64_t token, int64_t col, float *row, int64_t n) {
  jitter_row(row, n, noise_key(call, PMOEI_RANDOM_JITTER), (uint64_t)(call->step.first_token + token),
             (uint64_t)col / 4, call->gate->cfg.jitter);
}

PMOEI_VECTORISED static void add_gumbel(float *restrict out, const float *restrict logits, int64_t num_experts,
                                        uint64_t key, uint64_t token) {
  for (int64_t e = 0; e < num_experts; e += 4) {
    int64_t n = num_experts - e < 4 ? num_experts - e : 4;
    uint32_t word[4][LANES];
    for (int l = 0; l < LANES; l++) {
      uint32_t one[4];
      pmoei_random4(key, token + (uint64_t)l, (uint64_t)e / 4, one);
      for (int j = 0; j < 4; j++) word[j][l] = one[j];
    }
    for (int64_t j = 0; j < n; j++)
      for (int l = 0; l < LANES; l++)
        out[(e + j) * LANES + l] = logits[(e + j) * LANES + l] - pmoei_logf(-pmoei_logf(pmoei_uniform(word[j][l])));
  }
}

void pmoei_gate_gumbel(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block) {
  add_gumbel(tile->selection, tile->logits, call->gate->cfg.num_experts, noise_key(call, PMOEI_RANDOM_GUMBEL),
             (uint64_t)(call->step.first_token + pmoei_gate_block(call, block).first));
}

void pmoei_gate_random_priority(const pmoei_gate_call *call, int64_t begin, int64_t end) {
  uint64_t key = noise_key(call, PMOEI_RANDOM_DROP);
  int32_t top_k = call->gate->cfg.top_k;
  for (int64_t i = begin; i < end; i++) {
    int64_t token = call->contender[i] / top_k, k = call->contender[i] % top_k;
    uint32_t word[4];
    pmoei_random4(key, (uint64_t)(call->step.first_token + token), (uint64_t)k, word);
    call->priority[i] = ~word[0]; /* the smallest stay */
  }
}
