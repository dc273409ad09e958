#include <math.h>
#include <stdlib.h>

#include "oracle/oracle.h"

static const char *const tensor_names[ORACLE_TENSORS] = {
    "router.weight",       "router.bias",       "experts.fc1.weight",  "experts.fc1.bias",
    "experts.fc2.weight",  "experts.fc2.bias",  "residual.fc1.weight", "residual.fc1.bias",
    "residual.fc2.weight", "residual.fc2.bias", "residual.mix.weight", "residual.mix.bias",
};

static void set_tensor(oracle_model *model, int index, int64_t numel, int64_t per_expert) {
  oracle_tensor *tensor = &model->tensor[index];
  tensor->name = tensor_names[index];
  tensor->numel = numel;
  tensor->per_expert = per_expert;
  tensor->data = calloc((size_t)numel + 1, sizeof(double));
  tensor->grad = calloc((size_t)numel + 1, sizeof(double));
}

oracle_model *oracle_model_create(int32_t hidden, const pmoe_gate_config *gate, const pmoe_experts_config *experts,
                                  const pmoe_residual_config *residual) {
  oracle_model *model = calloc(1, sizeof *model);
  model->hidden = hidden;
  model->gate = *gate;
  model->experts = *experts;
  if (residual) model->residual = *residual;
  int64_t h = hidden, e = gate->num_experts, f = experts->inner, f1 = oracle_act_gated(experts->act) ? 2 * f : f;
  int64_t eb = experts->bias ? e : 0;
  set_tensor(model, ORACLE_ROUTER_WEIGHT, e * h, 0);
  set_tensor(model, ORACLE_ROUTER_BIAS, gate->bias ? e : 0, 0);
  set_tensor(model, ORACLE_FC1_WEIGHT, e * f1 * h, f1 * h);
  set_tensor(model, ORACLE_FC1_BIAS, eb * f1, f1);
  set_tensor(model, ORACLE_FC2_WEIGHT, e * h * f, h * f);
  set_tensor(model, ORACLE_FC2_BIAS, eb * h, h);
  int64_t branch = residual && residual->mix != PMOE_MIX_NONE;
  int64_t rf = branch ? residual->inner : 0, rf1 = branch && oracle_act_gated(residual->act) ? 2 * rf : rf;
  int64_t rb = branch && residual->bias;
  set_tensor(model, ORACLE_MLP_FC1_WEIGHT, rf1 * h, 0);
  set_tensor(model, ORACLE_MLP_FC1_BIAS, rb * rf1, 0);
  set_tensor(model, ORACLE_MLP_FC2_WEIGHT, rf * h, 0);
  set_tensor(model, ORACLE_MLP_FC2_BIAS, rb * h, 0);
  int64_t coefficients = 0;
  if (branch && residual->mix == PMOE_MIX_LEARNED) coefficients = 2;
  if (branch && residual->mix == PMOE_MIX_GATED_SUM) coefficients = 1;
  set_tensor(model, ORACLE_MIX_WEIGHT, coefficients * h, 0);
  set_tensor(model, ORACLE_MIX_BIAS, coefficients == 2 ? 2 : 0, 0);
  return model;
}

void oracle_model_destroy(oracle_model *model) {
  if (!model) return;
  for (int i = 0; i < ORACLE_TENSORS; i++) {
    free(model->tensor[i].data);
    free(model->tensor[i].grad);
  }
  free(model);
}

void oracle_zero_grads(oracle_model *model) {
  for (int i = 0; i < ORACLE_TENSORS; i++)
    for (int64_t j = 0; j < model->tensor[i].numel; j++) model->tensor[i].grad[j] = 0.0;
}

static double next_uniform(uint64_t *state) { /* xorshift64* */
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  return ((double)((*state * 2685821657736338717u) >> 11) + 0.5) / 9007199254740992.0;
}

void oracle_fill(double *out, int64_t n, uint64_t seed, double std) {
  uint64_t state = (seed + 1) * 6364136223846793005u + 1442695040888963407u;
  for (int i = 0; i < 8; i++) next_uniform(&state);
  for (int64_t i = 0; i < n; i++) {
    double radius = sqrt(-2.0 * log(next_uniform(&state)));
    out[i] = std * radius * cos(6.283185307179586 * next_uniform(&state));
  }
}

void oracle_model_fill(oracle_model *model, uint64_t seed) {
  double wide = 1.0 / sqrt((double)model->hidden), narrow = 1.0 / sqrt((double)model->experts.inner);
  for (int i = 0; i < ORACLE_TENSORS; i++) {
    double std = wide;
    if (i == ORACLE_FC2_WEIGHT || i == ORACLE_MLP_FC2_WEIGHT) std = narrow;
    if (i == ORACLE_ROUTER_BIAS || i == ORACLE_FC1_BIAS || i == ORACLE_FC2_BIAS || i == ORACLE_MLP_FC1_BIAS ||
        i == ORACLE_MLP_FC2_BIAS || i == ORACLE_MIX_BIAS)
      std = 0.1;
    oracle_fill(model->tensor[i].data, model->tensor[i].numel, seed * ORACLE_TENSORS + (uint64_t)i, std);
  }
}
