/* The back end table of this folder, and what its operations are given: calls whose arguments have been checked. */
#ifndef PMOEI_MOE_OPS_H
#define PMOEI_MOE_OPS_H
#include <pmoe/experts.h>
#include <pmoe/residual.h>
#include <stdbool.h>

#include "core/ctx.h"

typedef struct pmoei_moe_ops pmoei_moe_ops;

struct pmoe_experts {
  pmoe_ctx *ctx;
  const pmoei_moe_ops *ops;
  pmoe_experts_config cfg;
  int64_t hidden, inner, inner1; /* H, F, F1 */
  int32_t num_experts;
  struct pmoei_product *product; /* [num_experts] for calls to work with, on a device */
  bool no_output_bias;           /* of shards after the first, which would add it again */
};

/* Pointers as in pmoe/experts.h. drow_weight and row_weight may be NULL, pre and dpre too where the header says so. */
typedef struct pmoei_experts_call {
  const pmoe_experts *experts;
  pmoe_experts_params params;
  const int64_t *rows;
  const pmoe_mat *x, *dy;
  pmoe_mat *pre, *y, *dpre, *dx;
  const float *row_weight;
  float *drow_weight;
} pmoei_experts_call;

/* The coefficients of a residual branch: `outputs` logits per token from x, weight [outputs,H] and bias [outputs]
 * (NULL: none). Two outputs: softmax over them gives scale and branch_scale [T]; one: branch_scale is its sigmoid and
 * scale is 1; none: both are 1. Forward writes them; the rest is for backward, where dmix [T,2] is the gradient of the
 * logits. */
typedef struct pmoei_mix_call {
  pmoe_ctx *ctx;
  int64_t hidden;
  int32_t outputs;
  const pmoe_mat *x;
  const float *weight, *bias;
  float *scale, *branch_scale;
  const float *dscale, *dbranch_scale;
  float *dmix;
  pmoe_mat *dx;
  float *weight_grad, *bias_grad;
} pmoei_mix_call;

struct pmoei_moe_ops {
  pmoe_status (*experts_forward)(const pmoei_experts_call *call, pmoe_stream stream);
  pmoe_status (*experts_backward)(const pmoei_experts_call *call, pmoe_bwd which, pmoe_stream stream);
  /* Scratch bytes that forward and backward need at most for `rows` rows, however they fall on the experts. */
  size_t (*experts_scratch)(const pmoe_experts *experts, int64_t rows);
  pmoe_status (*mix_forward)(const pmoei_mix_call *call, pmoe_stream stream);
  pmoe_status (*mix_backward_input)(const pmoei_mix_call *call, pmoe_stream stream);
  pmoe_status (*mix_backward_weight)(const pmoei_mix_call *call, pmoe_stream stream);
};

extern const pmoei_moe_ops pmoei_moe_cpu; /* experts_cpu.c, with these from residual_cpu.c */
pmoe_status pmoei_mix_forward_cpu(const pmoei_mix_call *call, pmoe_stream stream);
pmoe_status pmoei_mix_backward_input_cpu(const pmoei_mix_call *call, pmoe_stream stream);
pmoe_status pmoei_mix_backward_weight_cpu(const pmoei_mix_call *call, pmoe_stream stream);
extern const pmoei_moe_ops pmoei_moe_cuda; /* experts_cuda.c */

/* The two halves of pmoe_residual_forward, and a branch that is one shard of several, not the first. */
pmoe_status pmoei_residual_mlp_forward(pmoe_residual *residual, const pmoe_residual_params *params, const pmoe_mat *x,
                                       pmoe_mat *pre, pmoe_mat *mlp, pmoe_stream stream);
pmoe_status pmoei_residual_mix_forward(pmoe_residual *residual, const pmoe_residual_params *params, const pmoe_mat *x,
                                       float *scale, float *branch_scale, pmoe_stream stream);
void pmoei_residual_drop_output_bias(pmoe_residual *residual);

/* For the layer's scratch: what forward and backward of these objects open at most. */
size_t pmoei_experts_scratch_bytes(const pmoe_experts *experts, int64_t rows);
size_t pmoei_residual_scratch_bytes(const pmoe_residual *residual, int64_t tokens);

#endif
