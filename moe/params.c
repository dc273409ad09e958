/* A layer's parameters: the list, binding, and the first values. */
#include "pmoe/params.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/config.h"
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

static void add(pmoe_layer *layer, pmoei_param_kind kind, pmoe_dtype dtype, pmoe_dtype grad_dtype, int64_t out,
                int64_t in) {
  layer->kind[layer->num_params] = kind;
  pmoe_param *p = &layer->param[layer->num_params++];
  *p = (pmoe_param){.size = sizeof *p, .name = param_names[kind], .dtype = dtype, .grad_dtype = grad_dtype};
  bool expert = kind >= PMOEI_FC1_WEIGHT && kind <= PMOEI_FC2_BIAS;
  p->reduce_group = expert ? PMOE_GROUP_EXPERT_DP : PMOE_GROUP_DENSE_DP;
  if (kind == PMOEI_SELECTION_BIAS) p->reduce_group = PMOE_GROUP_NONE;
  p->first_expert = expert ? layer->first_expert : -1;
  if (expert) p->shape[p->ndim++] = layer->num_local;
  p->shape[p->ndim++] = out;
  if (in > 0) p->shape[p->ndim++] = in;
  p->numel = 1;
  for (int32_t d = 0; d < p->ndim; d++) p->numel *= p->shape[d];
}

void pmoei_layer_list_params(pmoe_layer *layer) {
  int64_t hidden = layer->cfg.hidden, experts = layer->gate_cfg.num_experts;
  const pmoe_experts_config *e = &layer->experts_cfg;
  layer->num_params = 0;
  if (layer->gate_cfg.router == PMOE_ROUTER_LINEAR)
    add(layer, PMOEI_ROUTER_WEIGHT, PMOE_F32, PMOE_F32, experts, hidden);
  if (layer->gate_cfg.bias) add(layer, PMOEI_ROUTER_BIAS, PMOE_F32, PMOE_F32, experts, 0);
  if (layer->gate_cfg.selection_bias) add(layer, PMOEI_SELECTION_BIAS, PMOE_F32, PMOE_F32, experts, 0);
  add(layer, PMOEI_FC1_WEIGHT, e->dtype, e->grad_dtype, layer->pre_cols, hidden);
  if (e->bias) add(layer, PMOEI_FC1_BIAS, e->dtype, e->grad_dtype, layer->pre_cols, 0);
  add(layer, PMOEI_FC2_WEIGHT, e->dtype, e->grad_dtype, hidden, e->inner);
  if (e->bias) add(layer, PMOEI_FC2_BIAS, e->dtype, e->grad_dtype, hidden, 0);
  if (!layer->cfg.residual) return;
  const pmoe_residual_config *r = &layer->residual_cfg;
  add(layer, PMOEI_RESIDUAL_FC1_WEIGHT, r->dtype, r->grad_dtype, layer->residual_pre_cols, hidden);
  if (r->bias) add(layer, PMOEI_RESIDUAL_FC1_BIAS, r->dtype, r->grad_dtype, layer->residual_pre_cols, 0);
  add(layer, PMOEI_RESIDUAL_FC2_WEIGHT, r->dtype, r->grad_dtype, hidden, r->inner);
  if (r->bias) add(layer, PMOEI_RESIDUAL_FC2_BIAS, r->dtype, r->grad_dtype, hidden, 0);
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

enum { NUMBERS_PER_TASK = 1 << 14 }; /* a multiple of the four numbers that one counter gives */

typedef struct init_job {
  const pmoe_param *param;
  uint64_t key;
  int64_t per_expert; /* numbers of one expert; of the whole parameter if it is dense */
  int64_t tasks_per_expert;
  float std;
} init_job;

static void init_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const init_job *job = arg;
  const pmoe_param *p = job->param;
  int64_t expert = index / job->tasks_per_expert;
  int64_t begin = index % job->tasks_per_expert * NUMBERS_PER_TASK;
  int64_t end = begin + NUMBERS_PER_TASK < job->per_expert ? begin + NUMBERS_PER_TASK : job->per_expert;
  uint64_t global_expert = p->first_expert < 0 ? 0 : (uint64_t)(p->first_expert + expert);
  for (int64_t i = begin; i < end; i += 4) {
    uint32_t word[4];
    float normal[4];
    pmoei_random4(job->key, global_expert, (uint64_t)i / 4, word);
    pmoei_normal2(word[0], word[1], normal);
    pmoei_normal2(word[2], word[3], normal + 2);
    for (int64_t j = 0; j < 4 && i + j < end; j++) normal[j] *= job->std;
    char *to = (char *)p->data + (size_t)(expert * job->per_expert + i) * pmoe_dtype_size(p->dtype);
    pmoei_from_f32(to, p->dtype, normal, end - i < 4 ? end - i : 4);
  }
}

pmoe_status pmoe_layer_init_params(pmoe_layer *layer, uint64_t seed, float std) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_REQUIRE(isfinite(std) && std >= 0, "std is %g; a finite number of 0 or more was expected", (double)std);
  pmoei_bound unused;
  PMOEI_TRY(pmoei_layer_bound(layer, false, &unused));
  for (int32_t i = 0; i < layer->num_params; i++) {
    const pmoe_param *p = &layer->param[i];
    if (p->numel == 0) continue;
    if (is_bias(layer->kind[i])) {
      memset(p->data, 0, (size_t)p->numel * pmoe_dtype_size(p->dtype));
      continue;
    }
    int64_t experts = p->first_expert < 0 ? 1 : p->shape[0];
    init_job job = {.param = p, .per_expert = p->numel / experts, .std = std};
    job.key =
        pmoei_random_key(seed, PMOEI_RANDOM_INIT, (uint64_t)(int64_t)layer->cfg.layer_id, (uint64_t)layer->kind[i]);
    job.tasks_per_expert = (job.per_expert + NUMBERS_PER_TASK - 1) / NUMBERS_PER_TASK;
    pmoei_parallel(layer->ctx, experts * job.tasks_per_expert, init_task, &job);
  }
  return PMOE_OK;
}
