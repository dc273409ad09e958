/* Upcycling: a layer that starts as a trained dense MLP (Komatsuzaki et al. 2022, arXiv:2212.05055; fine-grained: He et
 * al. 2024, arXiv:2410.07524). */
#ifndef PMOE_UPCYCLE_H
#define PMOE_UPCYCLE_H
#include <pmoe/types.h>

/* Where the factor goes that makes up for weights that do not sum to 1, and for experts that are a slice of the MLP.
 * OUTPUT: into fc2 alone, which keeps the layer's first output exact for every activation. EVEN: its root into each
 * matrix (two, or three if gated), as Megatron-Core does; exact for positively homogeneous activations only. */
typedef enum pmoe_upcycle_scale { PMOE_UPCYCLE_OUTPUT, PMOE_UPCYCLE_EVEN } pmoe_upcycle_scale;

/* The dense MLP, with the layer's activation, biases and experts' dtype; inner size G F. Out-features first, as in
 * pmoe/experts.h; a gated fc1 has all gate rows, then all up rows. Borrowed during the call;
 * host memory on CUDA too. */
typedef struct pmoe_upcycle {
  size_t size;
  int32_t granularity; /* G: expert e is slice e mod G of the MLP; divides num_experts, and top_k if a token is to
                          take whole copies. 0: 1 */
  pmoe_upcycle_scale scale;
  uint64_t seed;    /* of the router's first values, */
  float router_std; /* normal(0, router_std): the G experts of one copy of the MLP have the same, so that a token that
                       takes one takes them all */
  const void *fc1_weight, *fc1_bias, *fc2_weight, *fc2_bias;
} pmoe_upcycle;

#ifdef __cplusplus
extern "C" {
#endif

/* The factor: G divided by what the K weights sum to when all logits are equal (1 where they are normalised or a
 * softmax follows the choice, else K times one score), and by weight_scale. */
PMOE_API pmoe_status pmoe_upcycle_factor(const pmoe_layer *layer, int32_t granularity, float *factor);

/* Fills the bound experts' and router's parameters; a dense branch is left as it is. The same for any layout. Not
 * collective. ERR_ARG for sizes that do not fit, ERR_STATE for parameters that are not bound. */
PMOE_API pmoe_status pmoe_layer_upcycle(pmoe_layer *layer, const pmoe_upcycle *dense);

#ifdef __cplusplus
}
#endif
#endif
