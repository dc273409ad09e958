/* What the layer itself does with tokens, rows and gradients, beside its parts: one table a back end. Everything is
 * enqueued on the context's stream. */
#ifndef PMOEI_LAYER_OPS_H
#define PMOEI_LAYER_OPS_H
#include <pmoe/gate.h>

#include "core/ctx.h"
#include "core/device.h"

/* Numbers experts by shards: virtual ids are in the order of the ranks that hold them: block of experts, shard, expert
 * in the block. */
typedef struct pmoei_numbering {
  int32_t small, num_larger, shards; /* experts per block; blocks that have one more; shards per expert */
} pmoei_numbering;

typedef struct pmoei_layer_ops {
  /* scale[t] = branch_scale[t] = 0 where mask[t] is 0 */
  pmoe_status (*mask)(pmoe_ctx *ctx, int64_t tokens, const uint8_t *mask, float *scale, float *branch_scale);
  /* dweight holds the gradient of scale_t weight_tk: dscale_t = sum_k weight_tk dweight_tk, dweight_tk *= scale_t */
  pmoe_status (*split_scale)(pmoe_ctx *ctx, const pmoe_routing *routing, const float *scale, float *dweight,
                             float *dscale);
  /* to (float32) += from */
  pmoe_status (*add_rows)(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *from);
  /* to = from (float32), rounded */
  pmoe_status (*round_rows)(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *from);
  /* Row t of `to` = the sum of rows t, t + n, t + 2n, ... of parts, in float32 and in that order; n = to->rows */
  pmoe_status (*sum_parts)(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *parts);
  pmoe_status (*shards_route)(pmoe_ctx *ctx, const pmoei_numbering *n, const pmoe_routing *from, pmoe_routing *to);
  /* dweight[i] = the sum of moved[i * shards + s] over s */
  pmoe_status (*shards_sum)(pmoe_ctx *ctx, int64_t choices, int32_t shards, const float *moved, float *dweight);
  /* grad *= scale, n numbers of that type */
  pmoe_status (*scale_grad)(pmoe_ctx *ctx, void *grad, pmoe_dtype dtype, int64_t n, float scale);
  /* *sum (data memory) += the sum of squares in double, in an order that depends on n alone */
  pmoe_status (*add_squares)(pmoe_ctx *ctx, const void *grad, pmoe_dtype dtype, int64_t n, double *sum);
} pmoei_layer_ops;

extern const pmoei_layer_ops pmoei_layer_ops_cpu, pmoei_layer_ops_cuda;

PMOEI_SHARED int32_t pmoei_virtual_id(const pmoei_numbering *n, int32_t expert, int32_t shard) {
  int32_t in_larger = n->num_larger * (n->small + 1), larger = expert < in_larger;
  int32_t size = n->small + larger, before = larger ? 0 : in_larger;
  int32_t first = before + (expert - before) / size * size;
  return n->shards * first + shard * size + (expert - first);
}

#endif
