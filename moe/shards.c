/* Experts whose inner size is spread over an expert-tensor-parallel group: for the exchange each shard is an expert. */
#include "moe/layer.h"

/* Virtual ids are in the order of the ranks that hold them: block of experts, shard, expert in the block. */
typedef struct numbering {
  int32_t small, num_larger, shards; /* experts per block; blocks that have one more; shards per expert */
} numbering;

static int32_t virtual_id(const numbering *n, int32_t expert, int32_t shard) {
  int32_t in_larger = n->num_larger * (n->small + 1);
  bool larger = expert < in_larger;
  int32_t size = n->small + larger, before = larger ? 0 : in_larger;
  int32_t first = before + (expert - before) / size * size;
  return n->shards * first + shard * size + (expert - first);
}

void pmoei_shards_route(pmoe_stash *stash) {
  const pmoe_layer *layer = stash->layer;
  const pmoe_routing *from = &stash->routing;
  pmoe_routing *to = &stash->moved;
  int32_t etp = layer->groups.etp, ep = layer->groups.exchange->nranks / etp;
  if (etp == 1) {
    *to = *from;
    return;
  }
  const numbering n = {from->num_experts / ep, from->num_experts % ep, etp};
  to->tokens = from->tokens;
  to->num_experts = from->num_experts * etp;
  to->top_k = from->top_k * etp;
  to->capacity = from->capacity;
  for (int64_t i = 0; i < from->tokens * from->top_k; i++)
    for (int32_t shard = 0; shard < etp; shard++) {
      int64_t at = i * etp + shard;
      to->expert[at] = from->expert[i] < 0 ? -1 : virtual_id(&n, from->expert[i], shard);
      to->slot[at] = from->slot[i];
      to->weight[at] = from->weight[i];
    }
  for (int32_t e = 0; e < from->num_experts; e++)
    for (int32_t shard = 0; shard < etp; shard++) {
      int32_t at = virtual_id(&n, e, shard);
      to->expert_count[at] = from->expert_count[e];
      to->expert_rows[at] = from->expert_rows[e];
    }
}

void pmoei_shards_sum(const pmoe_stash *stash, const float *moved, float *dweight) {
  int32_t etp = stash->layer->groups.etp;
  for (int64_t i = 0; i < stash->routing.tokens * stash->routing.top_k; i++) {
    float sum = moved[i * etp];
    for (int32_t shard = 1; shard < etp; shard++) sum += moved[i * etp + shard];
    dweight[i] = sum;
  }
}
