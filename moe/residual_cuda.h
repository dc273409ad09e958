/* The coefficients of a dense branch on CUDA: entries of pmoei_moe_cuda. */
#ifndef PMOEI_RESIDUAL_CUDA_H
#define PMOEI_RESIDUAL_CUDA_H
#include "moe/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

pmoe_status pmoei_mix_forward_cuda(const pmoei_mix_call *call, pmoe_stream stream);
pmoe_status pmoei_mix_backward_input_cuda(const pmoei_mix_call *call, pmoe_stream stream);
pmoe_status pmoei_mix_backward_weight_cuda(const pmoei_mix_call *call, pmoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
