/* The kernels around the experts' products. */
#ifndef PMOEI_EXPERTS_CUDA_H
#define PMOEI_EXPERTS_CUDA_H
#include "moe/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* a [R,F] = act(pre + b1); a may be pre's first columns. */
pmoe_status pmoei_cuda_activate(const pmoei_experts_call *call, const pmoe_mat *pre, const pmoe_mat *a);
/* dpre's first F columns hold the gradient of the unweighted activation. Leaves what pmoei_activation_grad says, and
 * adds dy . b2 to drow_weight. */
pmoe_status pmoei_cuda_activate_backward(const pmoei_experts_call *call, const pmoe_mat *pre, const pmoe_mat *dpre);
/* y = b2 in every row. */
pmoe_status pmoei_cuda_fill_bias(const pmoei_experts_call *call);
/* grad [E,cols] += the sum of each expert's rows, each times its weight (NULL: 1). */
pmoe_status pmoei_cuda_sum_rows(const pmoei_experts_call *call, const pmoe_mat *rows, const float *weight, void *grad);

#ifdef __cplusplus
}
#endif
#endif
