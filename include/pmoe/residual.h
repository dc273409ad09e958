/* The dense branch beside the experts: an MLP over every token, and how it is mixed with the experts' output.
 *
 *   LEARNED    y = c0 moe + c1 mlp, (c0, c1) = softmax(x Wcᵀ + bc), Wc [2,H], bc [2]     (residual MoE)
 *   SUM        y = moe + mlp                                                            (shared expert)
 *   GATED_SUM  y = moe + sigmoid(x Wcᵀ) mlp, Wc [1,H], no bias                            (gated shared expert)
 * The mixing itself happens in pmoe_combine_forward; here are the branch and the coefficients. */
#ifndef PMOE_RESIDUAL_H
#define PMOE_RESIDUAL_H
#include <pmoe/experts.h>
#include <pmoe/types.h>

typedef enum pmoe_mix { PMOE_MIX_NONE, PMOE_MIX_LEARNED, PMOE_MIX_SUM, PMOE_MIX_GATED_SUM } pmoe_mix;

typedef struct pmoe_residual_config {
  size_t size;
  pmoe_mix mix;
  int32_t inner;
  pmoe_act act;
  int32_t bias;
  pmoe_dtype dtype, grad_dtype; /* inside a layer: taken from the experts, leave 0 or equal */
} pmoe_residual_config;

/* mlp as in pmoe_experts_params for one expert. mix_weight, mix_bias and their gradients are float32. */
typedef struct pmoe_residual_params {
  size_t size;
  pmoe_experts_params mlp;
  const float *mix_weight, *mix_bias;
  float *mix_weight_grad, *mix_bias_grad;
} pmoe_residual_params;

#ifdef __cplusplus
extern "C" {
#endif

PMOE_API pmoe_status pmoe_residual_create(pmoe_ctx *ctx, int32_t hidden, const pmoe_residual_config *cfg,
                                          pmoe_residual **out);
PMOE_API void pmoe_residual_destroy(pmoe_residual *residual);

/* x [T,H] -> mlp [T,H]; pre [T,F1] as in pmoe_experts_forward; scale [T] and branch_scale [T]: c0 and c1 of every token
 * (all 1 for SUM; scale all 1 for GATED_SUM). Not collective. */
PMOE_API pmoe_status pmoe_residual_forward(pmoe_residual *residual, const pmoe_residual_params *params,
                                           const pmoe_mat *x, pmoe_mat *pre, float *scale, float *branch_scale,
                                           pmoe_mat *mlp, pmoe_stream stream);

/* The MLP's half: as pmoe_experts_backward with row_weight = branch_scale. dx is *written*; dbranch_scale [T] = dy_t .
 * mlp_t. */
PMOE_API pmoe_status pmoe_residual_backward(pmoe_residual *residual, const pmoe_residual_params *params,
                                            const pmoe_mat *x, pmoe_mat *pre, const float *branch_scale,
                                            const pmoe_mat *dy, pmoe_mat *dpre, pmoe_mat *dx, float *dbranch_scale,
                                            pmoe_bwd which, pmoe_stream stream);

/* The coefficients' half, which needs dscale [T] = dy_t . moe_t (known once the experts' backward is back): dx is
 * *added to* (float32 or x's dtype). dmix [T,2] float32 is written by INPUT and ALL and read by WEIGHT; NULL is allowed
 * for ALL. Does nothing for SUM. */
PMOE_API pmoe_status pmoe_residual_mix_backward(pmoe_residual *residual, const pmoe_residual_params *params,
                                                const pmoe_mat *x, const float *scale, const float *branch_scale,
                                                const float *dscale, const float *dbranch_scale, float *dmix,
                                                pmoe_mat *dx, pmoe_bwd which, pmoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
