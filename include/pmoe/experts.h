/* Experts: a feed-forward network per local expert, over rows that lie expert after expert.
 *
 *   h = x W1ᵀ + b1,  a = act(h),  y = a W2ᵀ + b2
 * Gated activations split h into halves [gate, up]: a = act(gate) * up. Shapes per expert, out-features first:
 * W1 [F1,H], b1 [F1], W2 [H,F], b2 [H] with F1 = F, or 2F if gated. Parameters of all local experts lie back to back.
 */
#ifndef PMOE_EXPERTS_H
#define PMOE_EXPERTS_H
#include <pmoe/types.h>

typedef enum pmoe_act {
  PMOE_ACT_GELU,
  PMOE_ACT_GELU_TANH,
  PMOE_ACT_RELU,
  PMOE_ACT_SILU,
  PMOE_ACT_SWIGLU,
  PMOE_ACT_GEGLU
} pmoe_act;

typedef struct pmoe_experts_config {
  size_t size;
  int32_t inner;    /* F */
  pmoe_act act;     /* GEGLU gates with the erf GELU */
  int32_t bias;     /* 1: b1 and b2 */
  pmoe_dtype dtype; /* parameters, rows, pre-activations: PMOE_F32, PMOE_BF16, on CUDA PMOE_F16; products accumulate in
                       float32 */
  pmoe_dtype grad_dtype; /* parameter gradients: PMOE_F32, or dtype */
  int32_t recompute_act; /* 1: forward keeps no pre-activation; backward computes x W1ᵀ again (one more GEMM) */
} pmoe_experts_config;

/* Data in cfg.dtype, gradients (added to) in cfg.grad_dtype. Biases are NULL unless cfg.bias. Gradients may be NULL in
 * forward and in PMOE_BWD_INPUT. With no local expert all may be NULL. */
typedef struct pmoe_experts_params {
  size_t size;
  const void *fc1_weight, *fc1_bias, *fc2_weight, *fc2_bias;
  void *fc1_weight_grad, *fc1_bias_grad, *fc2_weight_grad, *fc2_bias_grad;
} pmoe_experts_params;

#ifdef __cplusplus
extern "C" {
#endif

PMOE_API pmoe_status pmoe_experts_create(pmoe_ctx *ctx, int32_t hidden, int32_t num_local_experts,
                                         const pmoe_experts_config *cfg, pmoe_experts **out);
PMOE_API void pmoe_experts_destroy(pmoe_experts *experts);

/* x [R,H] -> y [R,H]; rows [num_local_experts] sums to R. pre [R,F1] keeps x W1ᵀ (the pre-activation
 * without its bias) for backward; NULL when no backward follows, and always with recompute_act. Not collective. */
PMOE_API pmoe_status pmoe_experts_forward(pmoe_experts *experts, const pmoe_experts_params *params, const int64_t *rows,
                                          const pmoe_mat *x, pmoe_mat *pre, pmoe_mat *y, pmoe_stream stream);

/* Gradients for row outputs that were used with weight row_weight [R] (NULL: all 1): loss gradient of y_r is
 * row_weight_r dy_r. ALL     everything below INPUT   dx [R,H] (may be dy's memory only in ALL), drow_weight [R] = dy_r
 * . y_r (NULL: not wanted); leaves dpre [R,F1] and, in pre, what WEIGHT needs: pre is overwritten (with recompute_act,
 * pre [R,F1] is scratch that need not hold anything before) WEIGHT  parameter gradients, from x, dy, row_weight, dpre
 * and pre as INPUT left them In ALL dpre may be NULL and comes from scratch then; with recompute_act so may pre. Not
 * collective. */
PMOE_API pmoe_status pmoe_experts_backward(pmoe_experts *experts, const pmoe_experts_params *params,
                                           const int64_t *rows, const pmoe_mat *x, pmoe_mat *pre,
                                           const float *row_weight, const pmoe_mat *dy, pmoe_mat *dpre, pmoe_mat *dx,
                                           float *drow_weight, pmoe_bwd which, pmoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
