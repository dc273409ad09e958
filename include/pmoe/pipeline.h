/* Pipeline stages: which layers go where. A layer lives in one stage and needs nothing of the others; activations and
 * schedules are the host's. */
#ifndef PMOE_PIPELINE_H
#define PMOE_PIPELINE_H
#include <pmoe/layer.h>
#include <pmoe/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Cuts layers into contiguous runs of at least one, so that the costliest stage is as cheap as possible; of such cuts
 * the one with the fullest early stages. cost [num_layers], 0 or more, in any unit: measured milliseconds, or
 * pmoe_layer_cost plus what the host adds to it. layers [num_stages]: how many each stage gets. For interleaved
 * schedules give stages times chunks. num_stages <= num_layers. */
PMOE_API pmoe_status pmoe_partition_stages(int32_t num_layers, const double *cost, int32_t num_stages, int32_t *layers);

/* Floating-point operations of forward and backward of one token, over all ranks: three times the products of router,
 * K experts, dense branch and coefficients, and one more x W1ᵀ with recompute_act. Takes no loss of capacity, padding
 * or communication into account. */
PMOE_API pmoe_status pmoe_layer_cost(const pmoe_layer_config *cfg, double *flops);

#ifdef __cplusplus
}
#endif
#endif
