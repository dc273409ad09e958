#include "pmoe/upcycle.h"

#include <math.h>
#include <string.h>

#include "core/config.h"
#include "core/data.h"
#include "core/dtype.h"
#include "core/parallel.h"
#include "core/random.h"
#include "moe/layer.h"

typedef struct upcycle_job {
  const pmoe_layer *layer;
  const pmoe_param *param;
  const void *from;
  int64_t slices;      /* G */
  int64_t dense_inner; /* G F */
  float factor;
} upcycle_job;

static void copy_scaled(const upcycle_job *job, int64_t to, int64_t from, int64_t n) {
  enum { TILE = 256 };
  float tile[TILE];
  size_t size = pmoe_dtype_size(job->param->dtype);
  for (int64_t i = 0; i < n; i += TILE) {
    int64_t count = n - i < TILE ? n - i : TILE;
    pmoei_to_f32(tile, (const char *)job->from + (size_t)(from + i) * size, job->param->dtype, count);
    for (int64_t j = 0; j < count; j++) tile[j] *= job->factor;
    pmoei_from_f32((char *)job->param->data + (size_t)(to + i) * size, job->param->dtype, tile, count);
  }
}

/* Where entry i of F1 of a local expert lies in the dense MLP's. */
static int64_t dense_row(const upcycle_job *job, int64_t expert, int64_t i) {
  const pmoe_layer *layer = job->layer;
  int64_t half = i / layer->inner.count, slice = (layer->first_expert + expert) % job->slices;
  return half * job->dense_inner + slice * layer->experts_cfg.inner + layer->inner.first + i % layer->inner.count;
}

static void fill_fc1(void *arg, int64_t expert, int32_t thread) {
  (void)thread;
  const upcycle_job *job = arg;
  int64_t rows = job->param->shape[1], cols = job->param->ndim == 3 ? job->param->shape[2] : 1;
  for (int64_t i = 0; i < rows; i++)
    copy_scaled(job, (expert * rows + i) * cols, dense_row(job, expert, i) * cols, cols);
}

static void fill_fc2(void *arg, int64_t expert, int32_t thread) {
  (void)thread;
  const upcycle_job *job = arg;
  int64_t hidden = job->param->shape[1], inner = job->param->shape[2];
  for (int64_t h = 0; h < hidden; h++)
    copy_scaled(job, (expert * hidden + h) * inner, h * job->dense_inner + dense_row(job, expert, 0), inner);
}

static void fill_output_bias(void *arg, int64_t expert, int32_t thread) {
  (void)thread;
  const upcycle_job *job = arg;
  copy_scaled(job, expert * job->param->shape[1], 0, job->param->shape[1]);
}

/* One row of numbers per copy of the MLP. */
static void fill_router(const pmoe_layer *layer, const pmoe_param *p, const pmoe_upcycle *dense) {
  uint64_t key = pmoei_random_key(dense->seed, PMOEI_RANDOM_INIT, (uint64_t)(int64_t)layer->cfg.layer_id,
                                  (uint64_t)PMOEI_ROUTER_WEIGHT);
  int64_t hidden = p->shape[1];
  float *row = p->data;
  for (int64_t e = 0; e < p->shape[0]; e++, row += hidden) {
    for (int64_t h = 0; h < hidden; h++) {
      uint32_t word[4];
      float normal[2];
      pmoei_random4(key, (uint64_t)(e / dense->granularity), (uint64_t)h, word);
      pmoei_normal2(word[0], word[1], normal);
      row[h] = normal[0] * dense->router_std;
    }
  }
}

/* `p` is the layer's parameter as the host may write it. */
static void fill_param(const pmoe_layer *layer, int32_t index, const pmoe_param *p, const pmoe_upcycle *dense,
                       float factor) {
  const pmoe_experts_config *cfg = &layer->experts_cfg;
  float matrices = pmoei_act_gated(cfg->act) ? 3.0f : 2.0f;
  bool even = dense->scale == PMOE_UPCYCLE_EVEN;
  float each = even ? powf(factor, 1.0f / matrices) : 1, last = even ? each : factor;
  upcycle_job job = {.layer = layer,
                     .param = p,
                     .slices = dense->granularity,
                     .dense_inner = (int64_t)cfg->inner * dense->granularity};
  switch (layer->kind[index]) {
  case PMOEI_ROUTER_WEIGHT: fill_router(layer, p, dense); break;
  case PMOEI_ROUTER_BIAS:
  case PMOEI_SELECTION_BIAS: memset(p->data, 0, (size_t)p->numel * sizeof(float)); break;
  case PMOEI_FC1_WEIGHT:
  case PMOEI_FC1_BIAS:
    job.from = layer->kind[index] == PMOEI_FC1_WEIGHT ? dense->fc1_weight : dense->fc1_bias;
    job.factor = each;
    pmoei_parallel(layer->ctx, layer->num_local, fill_fc1, &job);
    break;
  case PMOEI_FC2_WEIGHT:
    job.from = dense->fc2_weight;
    job.factor = last;
    pmoei_parallel(layer->ctx, layer->num_local, fill_fc2, &job);
    break;
  case PMOEI_FC2_BIAS: /* every choice adds it whole, whatever slice it is */
    job.from = dense->fc2_bias;
    job.factor = factor / (float)dense->granularity;
    pmoei_parallel(layer->ctx, layer->num_local, fill_output_bias, &job);
    break;
  default: break;
  }
}

pmoe_status pmoe_upcycle_factor(const pmoe_layer *layer, int32_t granularity, float *factor) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_REQUIRE_POINTER(factor);
  const pmoe_gate_config *gate = &layer->gate_cfg;
  PMOEI_REQUIRE(granularity >= 1 && gate->num_experts % granularity == 0,
                "granularity is %d; a divisor of num_experts (%d) was expected", granularity, gate->num_experts);
  PMOEI_REQUIRE(gate->router != PMOE_ROUTER_HOST_ROUTING,
                "the layer's router is PMOE_ROUTER_HOST_ROUTING; one whose weights are known was expected");
  double score = gate->score == PMOE_SCORE_SIGMOID         ? 0.5
                 : gate->score == PMOE_SCORE_SQRT_SOFTPLUS ? sqrt(log(2.0))
                                                           : 1.0 / gate->num_experts;
  bool normalised = gate->softmax_after_topk || gate->norm != PMOE_NORM_NONE;
  double sum = normalised ? 1 : score * gate->top_k, scale = gate->weight_scale > 0 ? (double)gate->weight_scale : 1;
  *factor = (float)(granularity / (sum * scale));
  return PMOE_OK;
}

static pmoe_status check_dense(const pmoe_layer *layer, const pmoe_upcycle *dense) {
  PMOEI_REQUIRE((int)dense->scale >= 0 && dense->scale <= PMOE_UPCYCLE_EVEN,
                "dense->scale is %d; a pmoe_upcycle_scale was expected", (int)dense->scale);
  PMOEI_REQUIRE(isfinite(dense->router_std) && dense->router_std >= 0,
                "dense->router_std is %g; a finite number, 0 or more, was expected", (double)dense->router_std);
  PMOEI_REQUIRE(dense->fc1_weight && dense->fc2_weight,
                "dense->fc1_weight or fc2_weight is NULL; two matrices were expected");
  bool bias = layer->experts_cfg.bias != 0;
  PMOEI_REQUIRE((dense->fc1_bias != NULL) == bias && (dense->fc2_bias != NULL) == bias,
                "dense->fc1_bias and fc2_bias do not fit; %s expected", bias ? "both were" : "NULL was");
  return PMOE_OK;
}

pmoe_status pmoe_layer_upcycle(pmoe_layer *layer, const pmoe_upcycle *config) {
  PMOEI_REQUIRE_POINTER(layer);
  pmoe_upcycle dense;
  PMOEI_TRY(pmoei_config_read(&dense, sizeof dense, config, "dense"));
  if (dense.granularity == 0) dense.granularity = 1;
  PMOEI_TRY(check_dense(layer, &dense));
  float factor;
  PMOEI_TRY(pmoe_upcycle_factor(layer, dense.granularity, &factor));
  for (int32_t i = 0; i < layer->num_params; i++) {
    const pmoe_param *p = &layer->param[i];
    bool filled = layer->kind[i] < PMOEI_RESIDUAL_FC1_WEIGHT;
    if (filled && p->numel > 0 && !p->data)
      return pmoei_error(PMOE_ERR_STATE, "parameter %s has no data; bind it with pmoe_layer_bind_param first", p->name);
  }
  PMOEI_TRY(pmoei_ctx_enter(layer->ctx, layer->ctx->stream));
  for (int32_t i = 0; i < layer->num_params; i++) {
    const pmoe_param *p = &layer->param[i];
    pmoe_param on_host;
    if (p->numel == 0 || layer->kind[i] >= PMOEI_RESIDUAL_FC1_WEIGHT) continue;
    PMOEI_TRY(pmoei_param_open(layer, p, &on_host));
    fill_param(layer, i, &on_host, &dense, factor);
    PMOEI_TRY(pmoei_param_close(layer, p, &on_host));
  }
  return PMOE_OK;
}
