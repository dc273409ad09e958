/* Gradients across ranks: sums over the right groups, and the norm. */
#include <inttypes.h>
#include <math.h>

#include "core/data.h"
#include "moe/layer.h"

static pmoe_status check_grads(const pmoe_layer *layer) {
  for (int32_t i = 0; i < layer->num_params; i++)
    if (pmoei_param_has_grad(&layer->param[i]) && !layer->param[i].grad)
      return pmoei_error(PMOE_ERR_STATE, "parameter %s has no gradient; bind it with pmoe_layer_bind_param first",
                         layer->param[i].name);
  return PMOE_OK;
}

static pmoe_comm *group_of(const pmoe_layer *layer, const pmoe_param *p) {
  if (p->reduce_group == PMOE_GROUP_EXPERT_DP) return layer->groups.expert_dp;
  return p->reduce_group == PMOE_GROUP_DENSE_DP ? layer->groups.dense_dp : layer->groups.stage;
}

static pmoe_status reduce(pmoe_layer *layer, float scale) {
  for (int32_t i = 0; i < layer->num_params; i++) {
    const pmoe_param *p = &layer->param[i];
    if (p->reduce_group == PMOE_GROUP_NONE) continue;
    PMOEI_TRY(pmoei_allreduce(group_of(layer, p), p->name, p->grad, p->numel, pmoei_sum_of(p->grad_dtype)));
    if (scale != 1.0f) PMOEI_TRY(layer->ops->scale_grad(layer->ctx, p->grad, p->grad_dtype, p->numel, scale));
  }
  return PMOE_OK;
}

pmoe_status pmoe_layer_reduce_grads(pmoe_layer *layer, float scale, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_TRY(pmoei_ctx_enter(layer->ctx, stream));
  pmoe_status status = check_grads(layer);
  if (status == PMOE_OK && !isfinite(scale))
    status = pmoei_error(PMOE_ERR_ARG, "scale is %g; a finite number was expected", (double)scale);
  PMOEI_TRY(pmoei_comm_agree_in_step(layer->groups.stage, "pmoe_layer_reduce_grads", status));
  status = reduce(layer, scale);
  return status == PMOE_OK ? PMOE_OK : pmoei_comm_fail(layer->groups.stage, status, NULL);
}

/* Sums of squares of this rank's own parts, by the group over which they make a whole. Gradients of whole parameters
 * are the same on every rank: the first counts them. */
typedef struct square_sums {
  double exchange; /* experts, and what the stage has in common */
  double tp;       /* shards of dense parameters */
} square_sums;

/* `sums` is data memory. */
static pmoe_status local_sumsq(pmoe_layer *layer, square_sums *sums) {
  PMOEI_TRY(pmoei_data_zero(layer->ctx, sums, sizeof *sums));
  for (int32_t i = 0; i < layer->num_params; i++) {
    const pmoe_param *p = &layer->param[i];
    bool sharded = p->reduce_group == PMOE_GROUP_DENSE_DP && layer->sharded_branch;
    bool mine = sharded || p->reduce_group == PMOE_GROUP_EXPERT_DP || layer->groups.exchange->rank == 0;
    if (!mine || !pmoei_param_has_grad(p)) continue;
    PMOEI_TRY(
        layer->ops->add_squares(layer->ctx, p->grad, p->grad_dtype, p->numel, sharded ? &sums->tp : &sums->exchange));
  }
  return PMOE_OK;
}

static pmoe_status add_up(pmoe_layer *layer, square_sums *sums) {
  PMOEI_TRY(pmoei_allreduce(layer->groups.exchange, "pmoe_layer_grad_sumsq", &sums->exchange, 1, PMOEI_SUM_F64));
  if (!layer->sharded_branch) return PMOE_OK;
  return pmoei_allreduce(layer->groups.tp, "pmoe_layer_grad_sumsq", &sums->tp, 1, PMOEI_SUM_F64);
}

pmoe_status pmoe_layer_grad_sumsq(pmoe_layer *layer, double *out, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_TRY(pmoei_ctx_enter(layer->ctx, stream));
  square_sums *sums, values;
  int32_t frame = -1;
  pmoe_status status = out ? check_grads(layer) : pmoei_error(PMOE_ERR_ARG, "out is NULL; a pointer was expected");
  if (status == PMOE_OK) status = pmoei_scratch_open(layer->ctx, sizeof *sums, (void **)&sums, &frame);
  if (status == PMOE_OK) status = local_sumsq(layer, sums);
  status = pmoei_layer_agree(layer, "pmoe_layer_grad_sumsq", status);
  if (status == PMOE_OK) status = add_up(layer, sums);
  if (status == PMOE_OK) status = pmoei_data_copy(layer->ctx, &values, sums, sizeof values);
  if (status == PMOE_OK) status = pmoei_data_wait(layer->ctx);
  if (frame >= 0) pmoei_scratch_close(layer->ctx, frame);
  PMOEI_TRY(status);
  *out = values.exchange + values.tp;
  return PMOE_OK;
}
