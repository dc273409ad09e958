/* A layer's parameters and gradients. Data and gradients belong to the host: it binds them at any time between calls
 * (just before use, for ZeRO-3 or FSDP) and runs its own optimizer. */
#ifndef PMOE_PARAMS_H
#define PMOE_PARAMS_H
#include <pmoe/types.h>

/* Over which ranks a gradient is summed. */
typedef enum pmoe_group {
  PMOE_GROUP_NONE,
  PMOE_GROUP_EP,        /* ranks that together hold all experts (EP x ETP) */
  PMOE_GROUP_EXPERT_DP, /* ranks that hold the same shards of the same experts */
  PMOE_GROUP_DENSE_DP,  /* ranks that hold the same shard of dense parameters; without TP all of the stage */
  PMOE_GROUP_STAGE      /* all ranks of the stage */
} pmoe_group;

typedef struct pmoe_param {
  size_t size;
  const char *name; /* "router.weight", "experts.fc1.weight", "residual.mix.weight", ... ; lives as long as the layer */
  pmoe_dtype dtype, grad_dtype;
  int32_t ndim;
  int64_t shape[3]; /* this rank's part; experts: [local experts, out, in] */
  int64_t numel;
  void *data, *grad; /* as bound; NULL before */
  /* EXPERT_DP for experts, DENSE_DP for the dense branch, STAGE for the router and the branch's coefficients, NONE for
   * what has no gradient (router.selection_bias) */
  pmoe_group reduce_group;
  int32_t first_expert; /* global id of shape[0]'s first entry; -1 if dense */
  /* Where the inner size F is spread over ETP (experts) or TP (dense branch): entry i of shape[shard_dim] is entry
   * i / shard_count * shard_total + shard_first + i % shard_count of the whole parameter's (with a gated activation fc1
   * has the same part of both halves). shard_dim -1: not spread. Output biases (fc2.bias) belong to the first shard,
   * and have numel 0 on the others. */
  int32_t shard_dim;
  int64_t shard_first, shard_count, shard_total;
} pmoe_param;

#ifdef __cplusplus
extern "C" {
#endif

/* 0 for NULL. */
PMOE_API int32_t pmoe_layer_num_params(const pmoe_layer *layer);
PMOE_API pmoe_status pmoe_layer_param(const pmoe_layer *layer, int32_t index, pmoe_param *out);
/* Borrowed until bound again. NULL unbinds; a call that needs an unbound pointer returns ERR_STATE and names it. */
PMOE_API pmoe_status pmoe_layer_bind_param(pmoe_layer *layer, int32_t index, void *data, void *grad);

/* Fills the bound data: weights normal(0, std), biases 0. A number depends on seed, layer_id, parameter, global expert
 * id and place alone, so that any layout starts with the same model. */
PMOE_API pmoe_status pmoe_layer_init_params(pmoe_layer *layer, uint64_t seed, float std);

/* One step of loss-free balancing (pmoe_selection_bias_update): the choices of this layer's training forwards since the
 * last update, recomputed ones left out, are summed over the stage and update the bound
 * router.selection_bias. Call it once per optimizer step on every rank. Collective over the stage. ERR_STATE for a
 * router without selection bias. */
PMOE_API pmoe_status pmoe_layer_update_selection_bias(pmoe_layer *layer, float rate, int32_t centred,
                                                      pmoe_stream stream);

/* Sums each bound gradient over its reduce_group and multiplies it by scale (the same for dense and experts: 1/global
 * tokens, or 1/(dp cp micro-batches) for mean losses). Collective over the stage. */
PMOE_API pmoe_status pmoe_layer_reduce_grads(pmoe_layer *layer, float scale, pmoe_stream stream);

/* Sum of squares of the whole layer's gradient after reduce_grads: every expert once, dense parameters once; the same
 * on all ranks of the stage. Add it over layers (and pipeline stages), take the root. Collective over EP x ETP, and
 * over TP as pmoe_layer_forward is. */
PMOE_API pmoe_status pmoe_layer_grad_sumsq(pmoe_layer *layer, double *out, pmoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
