/* The launchers of the router's kernels: each enqueues on the context's stream. */
#ifndef PMOEI_GATE_CUDA_H
#define PMOEI_GATE_CUDA_H
#ifdef __cplusplus
extern "C" {
#endif
#include "gating/gate_ops.h"

/* logits_cuda.cu */

/* Fills call->logits, but for columns past the last token. */
pmoe_status pmoei_gate_cuda_logits(pmoei_gate_call *call);
/* Tokens [first, first + rows) as the router sees them, in float32, to call->input; `zeros`: masked ones as zeros. */
pmoe_status pmoei_gate_cuda_widen(const pmoei_gate_call *call, int64_t first, int64_t rows, bool zeros);
/* dx += dlogits Wg. */
pmoe_status pmoei_gate_cuda_add_to_dx(pmoei_gate_call *call);

/* scores_cuda.cu. From the choices: weights before normalisation, and each block's share of counts and losses. */
pmoe_status pmoei_gate_cuda_score(pmoei_gate_call *call);

/* Choices, [T,K]; -1: none. */

/* topk_cuda.cu. From keys [E,padded]; `picked`: keys of -inf are none. */
pmoe_status pmoei_gate_cuda_best(pmoei_gate_call *call, const float *keys, int32_t *expert, bool picked);
pmoe_status pmoei_gate_cuda_sample(pmoei_gate_call *call);
/* selection_cuda.cu: fills call->selection by selection bias and groups. */
pmoe_status pmoei_gate_cuda_limit(pmoei_gate_call *call);
/* choose_cuda.cu, as pmoei_gate_cuda_update_bias */
pmoe_status pmoei_gate_cuda_round_robin(pmoei_gate_call *call);
pmoe_status pmoei_gate_cuda_hash(pmoei_gate_call *call);
pmoe_status pmoei_gate_cuda_given(pmoei_gate_call *call);
/* sinkhorn_cuda.cu, expert_choice_cuda.cu: fill call->selection. */
pmoe_status pmoei_gate_cuda_sinkhorn(pmoei_gate_call *call);
pmoe_status pmoei_gate_cuda_expert_choice(pmoei_gate_call *call);

/* The table's entries. */
pmoe_status pmoei_gate_cuda_total(pmoei_gate_call *call);
pmoe_status pmoei_gate_cuda_add_to_step(pmoei_gate_call *call, bool anew);
pmoe_status pmoei_gate_cuda_losses(pmoei_gate_call *call);
pmoe_status pmoei_gate_cuda_drop(pmoei_gate_call *call);
pmoe_status pmoei_gate_cuda_place(pmoei_gate_call *call);
pmoe_status pmoei_gate_cuda_input_grad(pmoei_gate_call *call);
pmoe_status pmoei_gate_cuda_weight_grad(pmoei_gate_call *call);
pmoe_status pmoei_gate_cuda_update_bias(pmoe_ctx *ctx, int32_t num_experts, const int64_t *count, float rate,
                                        int32_t centred, float *bias);

/* losses_cuda.cu: call->slope [E], and behind it the z-loss's factor of logsumexp; call->seq_slope. */
pmoe_status pmoei_gate_cuda_slopes(pmoei_gate_call *call);
/* drop_cuda.cu: of the choices that call->contender lists, takes the slot from those beyond the capacity and numbers
 * the others. */
pmoe_status pmoei_gate_cuda_drop_contenders(pmoei_gate_call *call);

/* Fixed point for sums that must not depend on their order: 36 bits behind the point leave 27 before it. */
#define PMOEI_GATE_FIXED 0x1p36
#define PMOEI_GATE_FIXED_TOKENS (INT64_C(1) << 27)
enum {
  PMOEI_GATE_SLICE = 1024,           /* rows whose column sums one thread block takes */
  PMOEI_GATE_INPUT_BYTES = 32 << 20, /* of call->input at most: what stays in the second-level cache */
};

#ifdef __cplusplus
}
#endif
#endif
