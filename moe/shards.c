/* Experts whose inner size is spread over an expert-tensor-parallel group: for the exchange each shard is an expert. */
#include "moe/layer.h"

pmoe_status pmoei_shards_route(pmoe_stash *stash) {
  const pmoe_layer *layer = stash->layer;
  const pmoe_routing *from = &stash->routing;
  pmoe_routing *to = &stash->moved;
  int32_t etp = layer->groups.etp, ep = layer->groups.exchange->nranks / etp;
  if (etp == 1) {
    *to = *from;
    return PMOE_OK;
  }
  to->tokens = from->tokens;
  to->num_experts = from->num_experts * etp;
  to->top_k = from->top_k * etp;
  to->capacity = from->capacity;
  const pmoei_numbering numbering = {from->num_experts / ep, from->num_experts % ep, etp};
  return layer->ops->shards_route(layer->ctx, &numbering, from, to);
}

pmoe_status pmoei_shards_sum(const pmoe_stash *stash, const float *moved, float *dweight) {
  const pmoe_layer *layer = stash->layer;
  int64_t choices = stash->routing.tokens * stash->routing.top_k;
  return layer->ops->shards_sum(layer->ctx, choices, layer->groups.etp, moved, dweight);
}
