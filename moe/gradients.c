/* Gradients across ranks: sums over the right groups, and the norm. */
#include <inttypes.h>
#include <math.h>

#include "core/dtype.h"
#include "core/parallel.h"
#include "moe/layer.h"

enum { NUMBERS_PER_TASK = 1 << 14 };

typedef struct grad_job {
  const pmoe_param *param;
  float scale;
  double *partial; /* sums of squares, one a task: added in order afterwards, whoever computed them */
} grad_job;

static int64_t task_length(const grad_job *job, int64_t index) {
  int64_t left = job->param->numel - index * NUMBERS_PER_TASK;
  return left < NUMBERS_PER_TASK ? left : NUMBERS_PER_TASK;
}

static void *task_start(const grad_job *job, int64_t index) {
  return (char *)job->param->grad + (size_t)(index * NUMBERS_PER_TASK) * pmoe_dtype_size(job->param->grad_dtype);
}

static int64_t num_tasks(const pmoe_param *p) { return (p->numel + NUMBERS_PER_TASK - 1) / NUMBERS_PER_TASK; }

static void scale_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const grad_job *job = arg;
  float tile[256];
  char *grad = task_start(job, index);
  pmoe_dtype dtype = job->param->grad_dtype;
  for (int64_t n = task_length(job, index), i = 0; i < n; i += 256) {
    int64_t count = n - i < 256 ? n - i : 256;
    char *at = grad + (size_t)i * pmoe_dtype_size(dtype);
    pmoei_to_f32(tile, at, dtype, count);
    for (int64_t j = 0; j < count; j++) tile[j] *= job->scale;
    pmoei_from_f32(at, dtype, tile, count);
  }
}

static void square_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const grad_job *job = arg;
  float tile[256];
  const char *grad = task_start(job, index);
  pmoe_dtype dtype = job->param->grad_dtype;
  double sum = 0;
  for (int64_t n = task_length(job, index), i = 0; i < n; i += 256) {
    int64_t count = n - i < 256 ? n - i : 256;
    pmoei_to_f32(tile, grad + (size_t)i * pmoe_dtype_size(dtype), dtype, count);
    for (int64_t j = 0; j < count; j++) sum += (double)tile[j] * (double)tile[j];
  }
  job->partial[index] = sum;
}

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
    PMOEI_TRY(pmoei_allreduce(group_of(layer, p), p->name, p->grad, p->numel,
                              p->grad_dtype == PMOE_F32 ? PMOEI_SUM_F32 : PMOEI_SUM_BF16));
    if (scale != 1.0f) pmoei_parallel(layer->ctx, num_tasks(p), scale_task, &(grad_job){p, scale, NULL});
  }
  return PMOE_OK;
}

pmoe_status pmoe_layer_reduce_grads(pmoe_layer *layer, float scale, pmoe_stream stream) {
  (void)stream;
  PMOEI_REQUIRE_POINTER(layer);
  pmoe_status status = check_grads(layer);
  if (status == PMOE_OK && !isfinite(scale))
    status = pmoei_error(PMOE_ERR_ARG, "scale is %g; a finite number was expected", (double)scale);
  PMOEI_TRY(pmoei_comm_agree(layer->groups.stage, "pmoe_layer_reduce_grads", status));
  status = reduce(layer, scale);
  return status == PMOE_OK ? PMOE_OK : pmoei_comm_fail(layer->groups.stage, status, NULL);
}

/* Sums of squares of this rank's own parts, by the group over which they make a whole. Gradients of whole parameters
 * are the same on every rank: the first counts them. */
typedef struct square_sums {
  double exchange; /* experts, and what the stage has in common */
  double tp;       /* shards of dense parameters */
} square_sums;

static pmoe_status local_sumsq(pmoe_layer *layer, square_sums *sums) {
  int64_t most = 0;
  for (int32_t i = 0; i < layer->num_params; i++)
    if (num_tasks(&layer->param[i]) > most) most = num_tasks(&layer->param[i]);
  void *base;
  int32_t scratch;
  PMOEI_TRY(pmoei_scratch_open(layer->ctx, (size_t)most * sizeof(double), &base, &scratch));
  double *partial = base;
  for (int32_t i = 0; i < layer->num_params; i++) {
    const pmoe_param *p = &layer->param[i];
    bool sharded = p->reduce_group == PMOE_GROUP_DENSE_DP && layer->sharded_branch;
    bool mine = sharded || p->reduce_group == PMOE_GROUP_EXPERT_DP || layer->groups.exchange->rank == 0;
    if (!mine || !pmoei_param_has_grad(p)) continue;
    pmoei_parallel(layer->ctx, num_tasks(p), square_task, &(grad_job){p, 1, partial});
    double *sum = sharded ? &sums->tp : &sums->exchange;
    for (int64_t task = 0; task < num_tasks(p); task++) *sum += partial[task];
  }
  pmoei_scratch_close(layer->ctx, scratch);
  return PMOE_OK;
}

static pmoe_status add_up(pmoe_layer *layer, square_sums *sums) {
  PMOEI_TRY(pmoei_allreduce(layer->groups.exchange, "pmoe_layer_grad_sumsq", &sums->exchange, 1, PMOEI_SUM_F64));
  if (!layer->sharded_branch) return PMOE_OK;
  return pmoei_allreduce(layer->groups.tp, "pmoe_layer_grad_sumsq", &sums->tp, 1, PMOEI_SUM_F64);
}

pmoe_status pmoe_layer_grad_sumsq(pmoe_layer *layer, double *out, pmoe_stream stream) {
  (void)stream;
  PMOEI_REQUIRE_POINTER(layer);
  square_sums sums = {0, 0};
  pmoe_status status = out ? check_grads(layer) : pmoei_error(PMOE_ERR_ARG, "out is NULL; a pointer was expected");
  if (status == PMOE_OK) status = local_sumsq(layer, &sums);
  PMOEI_TRY(pmoei_layer_agree(layer, "pmoe_layer_grad_sumsq", status));
  PMOEI_TRY(add_up(layer, &sums));
  *out = sums.exchange + sums.tp;
  return PMOE_OK;
}
