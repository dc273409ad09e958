#include <string.h>

#include "core/gemm.h"
#include "core/parallel.h"
#include "core/simd.h"
#include "gating/gate_cpu.h"

/* A patch of weight_grad: some experts by some columns, over all tokens in order, so that the sum does not depend on
 * threads. */
static void weight_patch(void *arg, int64_t index, int32_t thread) {
  const pmoei_gate_call *call = arg;
  const pmoe_gate *gate = call->gate;
  int64_t num_experts = gate->cfg.num_experts, hidden = gate->hidden;
  int64_t patches = (hidden + WEIGHT_GRAD_COLS - 1) / WEIGHT_GRAD_COLS;
  int64_t col = index % patches * WEIGHT_GRAD_COLS, expert = index / patches * WEIGHT_GRAD_EXPERTS;
  int64_t cols = hidden - col < WEIGHT_GRAD_COLS ? hidden - col : WEIGHT_GRAD_COLS;
  int64_t experts = num_experts - expert < WEIGHT_GRAD_EXPERTS ? num_experts - expert : WEIGHT_GRAD_EXPERTS;
  for (int64_t first = 0; first < call->tokens; first += WEIGHT_GRAD_ROWS) {
    int64_t rows = call->tokens - first < WEIGHT_GRAD_ROWS ? call->tokens - first : WEIGHT_GRAD_ROWS, ld;
    /* A masked token's x may be anything, NaN too, and 0 times that must stay 0. */
    uint8_t masked[WEIGHT_GRAD_ROWS];
    bool any_masked = false;
    for (int64_t r = 0; r < rows; r++) {
      masked[r] = call->step.token_mask && !call->step.token_mask[first + r];
      any_masked |= masked[r] != 0;
    }
    const float *input =
        pmoei_gate_input(call, call->tile[thread].input, first, rows, col, cols, any_masked ? masked : NULL, &ld);
    pmoei_product product = {.trans_a = true,
                             .accumulate = true,
                             .in = PMOE_F32,
                             .out = PMOE_F32,
                             .m = experts,
                             .n = cols,
                             .k = rows,
                             .a = call->dlogits + first * num_experts + expert,
                             .lda = num_experts,
                             .b = input,
                             .ldb = ld,
                             .c = call->params.weight_grad + expert * hidden + col,
                             .ldc = hidden};
    pmoei_gemm_run(gate->ctx->gemm, thread, &product);
  }
}

PMOEI_VECTORISED static void add_columns(double *restrict sum, const float *restrict dlogits, int64_t rows,
                                         int64_t num_experts) {
  for (int64_t t = 0; t < rows; t++)
    for (int64_t e = 0; e < num_experts; e++) sum[e] += (double)dlogits[t * num_experts + e];
}

pmoe_status pmoei_gate_weight_grad(pmoei_gate_call *call) {
  if (call->gate->cfg.router != PMOE_ROUTER_LINEAR) return PMOE_OK;
  int64_t num_experts = call->gate->cfg.num_experts, hidden = call->gate->hidden;
  int64_t patches = (hidden + WEIGHT_GRAD_COLS - 1) / WEIGHT_GRAD_COLS *
                    ((num_experts + WEIGHT_GRAD_EXPERTS - 1) / WEIGHT_GRAD_EXPERTS);
  if (call->tokens > 0) pmoei_parallel(call->gate->ctx, patches, weight_patch, call);
  if (call->gate->cfg.bias) {
    memset(call->expert_sum, 0, (size_t)num_experts * sizeof *call->expert_sum);
    add_columns(call->expert_sum, call->dlogits, call->tokens, num_experts);
    for (int64_t e = 0; e < num_experts; e++) call->params.bias_grad[e] += (float)call->expert_sum[e];
  }
  return pmoei_gemm_take_error(call->gate->ctx->gemm);
}
