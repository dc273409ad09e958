/* A layer's parameters: the list, binding, and the first values. */
#include "pmoe/params.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/config.h"
#include "core/data.h"
#include "core/dtype.h"
#include "core/parallel.h"
#include "core/random.h"
#include "moe/layer.h"

static const char *const param_names[PMOEI_NUM_PARAM_KINDS] = {
    [PMOEI_ROUTER_WEIGHT] = "router.weight",
    [PMOEI_ROUTER_BIAS] = "router.bias",
    [PMOEI_SELECTION_BIAS] = "router.selection_bias",
    [PMOEI_FC1_WEIGHT] = "experts.fc1.weight",
    [PMOEI_FC1_BIAS] = "experts.fc1.bias",
    [PMOEI_FC2_WEIGHT] = "experts.fc2.weight",
    [PMOEI_FC2_BIAS] = "experts.fc2.bias",
    [PMOEI_RESIDUAL_FC1_WEIGHT] = "residual.fc1.weight",
    [PMOEI_RESIDUAL_FC1_BIAS] = "residual.fc1.bias",
    [PMOEI_RESIDUAL_FC2_WEIGHT] = "residual.fc2.weight",
    [PMOEI_RESIDUAL_FC2_BIAS] = "residual.fc2.bias",
    [PMOEI_MIX_WEIGHT] = "residual.mix.weight",
    [PMOEI_MIX_BIAS] = "residual.mix.bias",
};

static bool is_bias(pmoei_param_kind kind) {
  return kind == PMOEI_ROUTER_BIAS || kind == PMOEI_SELECTION_BIAS || kind == PMOEI_FC1_BIAS ||
         kind == PMOEI_FC2_BIAS || kind == PMOEI_RESIDUAL_FC1_BIAS || kind == PMOEI_RESIDUAL_FC2_BIAS ||
         kind == PMOEI_MIX_BIAS;
}

static pmoe_param *add(pmoe_layer *layer, pmoei_param_kind kind, pmoe_dtype dtype, pmoe_dtype grad_dtype, int64_t out,
                       int64_t in) {
  layer->kind[layer->num_params] = kind;
  pmoe_param *p = &layer->param[layer->num_params++];
  *p = (pmoe_param){.size = sizeof *p, .name = param_names[kind], .dtype = dtype, .grad_dtype = grad_dtype};
  bool expert = kind >= PMOEI_FC1_WEIGHT && kind <= PMOEI_FC2_BIAS;
  bool branch = kind >= PMOEI_RESIDUAL_FC1_WEIGHT && kind <= PMOEI_RESIDUAL_FC2_BIAS;
  p->reduce_group = expert ? PMOE_GROUP_EXPERT_DP : branch ? PMOE_GROUP_DENSE_DP : PMOE_GROUP_STAGE;
  if (kind == PMOEI_SELECTION_BIAS) p->reduce_group = PMOE_GROUP_NONE;
  p->first_expert = expert ? layer->first_expert : -1;
  p->shard_dim = -1;
  if (expert) p->shape[p->ndim++] = layer->num_local;
  p->shape[p->ndim++] = out;
  if (in > 0) p->shape[p->ndim++] = in;
  p->numel = 1;
  for (int32_t d = 0; d < p->ndim; d++) p->numel *= p->shape[d];
  return p;
}

static void shard(pmoe_param *p, int32_t dim, pmoei_block inner) {
  p->shard_dim = dim;
  p->shard_first = inner.first;
  p->shard_count = inner.count;
  p->shard_total = inner.total;
}

/* The network of the experts (first PMOEI_FC1_WEIGHT) or of the branch. Its output bias is the first shard's. */
static void add_network(pmoe_layer *layer, int first, pmoe_dtype dtype, pmoe_dtype grad_dtype, bool bias,
                        int64_t pre_cols, pmoei_block inner) {
  int64_t hidden = layer->cfg.hidden;
  int32_t dim = first == PMOEI_FC1_WEIGHT ? 1 : 0;
  shard(add(layer, first, dtype, grad_dtype, pre_cols, hidden), dim, inner);
  if (bias) shard(add(layer, first + 1, dtype, grad_dtype, pre_cols, 0), dim, inner);
  shard(add(layer, first + 2, dtype, grad_dtype, hidden, inner.count), dim + 1, inner);
  if (!bias) return;
  pmoe_param *p = add(layer, first + 3, dtype, grad_dtype, hidden, 0);
  if (inner.first > 0) p->shape[0] = p->numel = 0;
}

void pmoei_layer_list_params(pmoe_layer *layer) {
  int64_t hidden = layer->cfg.hidden, experts = layer->gate_cfg.num_experts;
  const pmoe_experts_config *e = &layer->experts_cfg;
  layer->num_params = 0;
  if (layer->gate_cfg.router == PMOE_ROUTER_LINEAR)
    add(layer, PMOEI_ROUTER_WEIGHT, PMOE_F32, PMOE_F32, experts, hidden);
  if (layer->gate_cfg.bias) add(layer, PMOEI_ROUTER_BIAS, PMOE_F32, PMOE_F32, experts, 0);
  if (layer->gate_cfg.selection_bias) add(layer, PMOEI_SELECTION_BIAS, PMOE_F32, PMOE_F32, experts, 0);
  add_network(layer, PMOEI_FC1_WEIGHT, e->dtype, e->grad_dtype, e->bias, layer->pre_cols, layer->inner);
  if (!layer->cfg.residual) return;
  const pmoe_residual_config *r = &layer->residual_cfg;
  add_network(layer, PMOEI_RESIDUAL_FC1_WEIGHT, r->dtype, r->grad_dtype, r->bias, layer->residual_pre_cols,
              layer->residual_inner);
  if (r->mix == PMOE_MIX_LEARNED) {
    add(layer, PMOEI_MIX_WEIGHT, PMOE_F32, PMOE_F32, 2, hidden);
    add(layer, PMOEI_MIX_BIAS, PMOE_F32, PMOE_F32, 2, 0);
  }
  if (r->mix == PMOE_MIX_GATED_SUM) add(layer, PMOEI_MIX_WEIGHT, PMOE_F32, PMOE_F32, 1, hidden);
}

/* ---- binding ---- */

int32_t pmoe_layer_num_params(const pmoe_layer *layer) { return layer ? layer->num_params : 0; }

static pmoe_status check_index(const pmoe_layer *layer, int32_t index) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_REQUIRE(index >= 0 && index < layer->num_params, "index is %d; 0 to %d was expected", index,
                layer->num_params - 1);
  return PMOE_OK;
}

pmoe_status pmoe_layer_param(const pmoe_layer *layer, int32_t index, pmoe_param *out) {
  PMOEI_TRY(check_index(layer, index));
  return PMOEI_STRUCT_WRITE(out, &layer->param[index]);
}

pmoe_status pmoe_layer_bind_param(pmoe_layer *layer, int32_t index, void *data, void *grad) {
  PMOEI_TRY(check_index(layer, index));
  pmoe_param *p = &layer->param[index];
  PMOEI_REQUIRE((uintptr_t)data % pmoe_dtype_size(p->dtype) == 0, "data is %p; alignment for %s was expected", data,
                pmoe_dtype_name(p->dtype));
  PMOEI_REQUIRE((uintptr_t)grad % pmoe_dtype_size(p->grad_dtype) == 0, "grad is %p; alignment for %s was expected",
                grad, pmoe_dtype_name(p->grad_dtype));
  p->data = data;
  p->grad = grad;
  return PMOE_OK;
}

pmoe_status pmoei_layer_bound(const pmoe_layer *layer, bool need_grad, pmoei_bound *out) {
  *out = (pmoei_bound){PMOE_CONFIG_INIT(pmoe_gate_params), PMOE_CONFIG_INIT(pmoe_experts_params),
                       PMOE_CONFIG_INIT(pmoe_residual_params)};
  out->residual.mlp.size = sizeof out->residual.mlp;
  void *data[PMOEI_NUM_PARAM_KINDS] = {NULL}, *grad[PMOEI_NUM_PARAM_KINDS] = {NULL};
  for (int32_t i = 0; i < layer->num_params; i++) {
    const pmoe_param *p = &layer->param[i];
    if (p->numel > 0 && !p->data)
      return pmoei_error(PMOE_ERR_STATE, "parameter %s has no data; bind it with pmoe_layer_bind_param first", p->name);
    if (pmoei_param_has_grad(p) && need_grad && !p->grad)
      return pmoei_error(PMOE_ERR_STATE, "parameter %s has no gradient; bind it with pmoe_layer_bind_param first",
                         p->name);
    data[layer->kind[i]] = p->data;
    grad[layer->kind[i]] = p->grad;
  }
  out->gate.weight = data[PMOEI_ROUTER_WEIGHT], out->gate.weight_grad = grad[PMOEI_ROUTER_WEIGHT];
  out->gate.bias = data[PMOEI_ROUTER_BIAS], out->gate.bias_grad = grad[PMOEI_ROUTER_BIAS];
  out->gate.selection_bias = data[PMOEI_SELECTION_BIAS];
  pmoe_experts_params *of[2] = {&out->experts, &out->residual.mlp};
  for (int branch = 0; branch < 2; branch++) {
    int first = branch == 0 ? PMOEI_FC1_WEIGHT : PMOEI_RESIDUAL_FC1_WEIGHT;
    of[branch]->fc1_weight = data[first], of[branch]->fc1_weight_grad = grad[first];
    of[branch]->fc1_bias = data[first + 1], of[branch]->fc1_bias_grad = grad[first + 1];
    of[branch]->fc2_weight = data[first + 2], of[branch]->fc2_weight_grad = grad[first + 2];
    of[branch]->fc2_bias = data[first + 3], of[branch]->fc2_bias_grad = grad[first + 3];
  }
  out->residual.mix_weight = data[PMOEI_MIX_WEIGHT], out->residual.mix_weight_grad = grad[PMOEI_MIX_WEIGHT];
  out->residual.mix_bias = data[PMOEI_MIX_BIAS], out->residual.mix_bias_grad = grad[PMOEI_MIX_BIAS];
  return PMOE_OK;
}

/* ---- first values ---- */

/* A weight of one expert (or a dense one) is `rows` runs of `length` numbers that are neighbours in the whole weight,
 * of which run i begins at number first + i * stride there. With gated activations the two halves of fc1 are a run
 * each. */
typedef struct runs {
  int64_t rows, length, first, stride;
} runs;

static runs runs_of(const pmoe_layer *layer, const pmoe_param *p, int64_t per_expert) {
  if (p->shard_dim < 0 || p->shard_count == p->shard_total) return (runs){1, per_expert, 0, 0};
  int64_t hidden = layer->cfg.hidden;
  bool inputs = p->shard_dim == p->ndim - 1; /* fc2: columns are spread; fc1: rows */
  if (inputs) return (runs){hidden, p->shard_count, p->shard_first, p->shard_total};
  int64_t length = p->shard_count * hidden;
  return (runs){per_expert / length, length, p->shard_first * hidden, p->shard_total * hidden};
}

typedef struct init_job {
  const pmoe_param *param;
  runs runs;
  uint64_t key;
  float std;
} init_job;

/* Numbers [first, first + count) of the whole weight; a counter gives four. */
static void fill_run(const init_job *job, uint64_t expert, int64_t first, int64_t count, char *to) {
  pmoe_dtype dtype = job->param->dtype;
  for (int64_t block = first / 4; block * 4 < first + count; block++) {
    uint32_t word[4];
    float normal[4];
    pmoei_random4(job->key, expert, (uint64_t)block, word);
    pmoei_normal2(word[0], word[1], normal);
    pmoei_normal2(word[2], word[3], normal + 2);
    for (int j = 0; j < 4; j++) normal[j] *= job->std;
    int64_t begin = block * 4 < first ? first - block * 4 : 0;
    int64_t end = first + count - block * 4 < 4 ? first + count - block * 4 : 4;
    pmoei_from_f32(to + (size_t)(block * 4 + begin - first) * pmoe_dtype_size(dtype), dtype, normal + begin,
                   end - begin);
  }
}

enum { NUMBERS_PER_TASK = 1 << 14 };

static int64_t tasks_per_run(const runs *r) { return (r->length + NUMBERS_PER_TASK - 1) / NUMBERS_PER_TASK; }

static void init_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const init_job *job = arg;
  const pmoe_param *p = job->param;
  const runs *r = &job->runs;
  int64_t begin = index % tasks_per_run(r) * NUMBERS_PER_TASK, run = index / tasks_per_run(r);
  int64_t count = r->length - begin < NUMBERS_PER_TASK ? r->length - begin : NUMBERS_PER_TASK;
  int64_t expert = run / r->rows, row = run % r->rows;
  uint64_t global_expert = p->first_expert < 0 ? 0 : (uint64_t)(p->first_expert + expert);
  char *to = (char *)p->data + (size_t)(run * r->length + begin) * pmoe_dtype_size(p->dtype);
  fill_run(job, global_expert, r->first + row * r->stride + begin, count, to);
}

pmoe_status pmoei_param_open(const pmoe_layer *layer, const pmoe_param *p, pmoe_param *on_host) {
  *on_host = *p;
  if (!pmoei_on_device(layer->ctx)) return PMOE_OK;
  return pmoei_alloc_raw(layer->ctx, (size_t)p->numel * pmoe_dtype_size(p->dtype), p->name, &on_host->data);
}

pmoe_status pmoei_param_close(const pmoe_layer *layer, const pmoe_param *p, pmoe_param *on_host) {
  pmoe_ctx *ctx = layer->ctx;
  if (!pmoei_on_device(ctx)) return PMOE_OK;
  size_t bytes = (size_t)p->numel * pmoe_dtype_size(p->dtype);
  pmoe_status status = pmoei_data_copy(ctx, p->data, on_host->data, bytes);
  if (status == PMOE_OK) status = pmoei_data_wait(ctx);
  pmoei_free(ctx, on_host->data, bytes);
  return status;
}

static void init_param(const pmoe_layer *layer, pmoei_param_kind kind, const pmoe_param *p, uint64_t seed, float std) {
  if (is_bias(kind)) {
    memset(p->data, 0, (size_t)p->numel * pmoe_dtype_size(p->dtype));
    return;
  }
  int64_t experts = p->first_expert < 0 ? 1 : p->shape[0];
  init_job job = {.param = p, .runs = runs_of(layer, p, p->numel / experts), .std = std};
  job.key = pmoei_random_key(seed, PMOEI_RANDOM_INIT, (uint64_t)(int64_t)layer->cfg.layer_id, (uint64_t)kind);
  pmoei_parallel(layer->ctx, experts * job.runs.rows * tasks_per_run(&job.runs), init_task, &job);
}

pmoe_status pmoe_layer_init_params(pmoe_layer *layer, uint64_t seed, float std) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_REQUIRE(isfinite(std) && std >= 0, "std is %g; a finite number of 0 or more was expected", (double)std);
  pmoei_bound unused;
  PMOEI_TRY(pmoei_layer_bound(layer, false, &unused));
  PMOEI_TRY(pmoei_ctx_enter(layer->ctx, layer->ctx->stream));
  for (int32_t i = 0; i < layer->num_params; i++) {
    const pmoe_param *p = &layer->param[i];
    if (p->numel == 0) continue;
    pmoe_param on_host;
    PMOEI_TRY(pmoei_param_open(layer, p, &on_host));
    init_param(layer, layer->kind[i], &on_host, seed, std);
    PMOEI_TRY(pmoei_param_close(layer, p, &on_host));
  }
  return PMOE_OK;
}
