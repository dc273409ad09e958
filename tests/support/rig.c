#include "support/rig.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

rig_spec rig_spec_default(void) {
  rig_spec spec = {.hidden = 12,
                   .gate = PMOE_CONFIG_INIT(pmoe_gate_config),
                   .a2a = PMOE_CONFIG_INIT(pmoe_a2a_config),
                   .experts = PMOE_CONFIG_INIT(pmoe_experts_config),
                   .residual = PMOE_CONFIG_INIT(pmoe_residual_config)};
  spec.gate.num_experts = 4;
  spec.gate.top_k = 2;
  spec.gate.aux_coef = 0.1f;
  spec.gate.z_coef = 0.05f;
  spec.experts.inner = 10;
  spec.residual.inner = 7;
  return spec;
}

static pmoe_status find_params(rig *r) {
  r->num_params = pmoe_layer_num_params(r->layer);
  int32_t wanted = 0;
  for (int i = 0; i < ORACLE_TENSORS; i++) wanted += r->model->tensor[i].numel > 0;
  if (r->num_params != wanted) {
    fprintf(stderr, "rig: %d parameters, expected %d\n", r->num_params, wanted);
    return PMOE_ERR_INTERNAL;
  }
  for (int32_t p = 0; p < r->num_params; p++) {
    r->param[p].size = sizeof r->param[p];
    pmoe_status status = pmoe_layer_param(r->layer, p, &r->param[p]);
    if (status != PMOE_OK) return status;
    for (int i = 0; i < ORACLE_TENSORS; i++)
      if (r->model->tensor[i].numel > 0 && strcmp(r->model->tensor[i].name, r->param[p].name) == 0)
        r->tensor[p] = &r->model->tensor[i];
    if (!r->tensor[p]) {
      fprintf(stderr, "rig: parameter %s is not the reference's\n", r->param[p].name);
      return PMOE_ERR_INTERNAL;
    }
    size_t n = (size_t)r->param[p].numel;
    r->param[p].data = calloc(n + 1, pmoe_dtype_size(r->param[p].dtype));
    r->param[p].grad = calloc(n + 1, pmoe_dtype_size(r->param[p].grad_dtype));
    status = pmoe_layer_bind_param(r->layer, p, r->param[p].data, r->param[p].grad);
    if (status != PMOE_OK) return status;
  }
  return PMOE_OK;
}

pmoe_status rig_create(rig *r, pmoe_ctx *ctx, pmoe_topology *topology, const rig_spec *spec) {
  memset(r, 0, sizeof *r);
  r->spec = *spec;
  r->ctx = ctx;
  pmoe_layer_config cfg = PMOE_CONFIG_INIT(pmoe_layer_config);
  cfg.hidden = spec->hidden;
  cfg.ep = spec->ep;
  cfg.layer_id = spec->layer_id;
  cfg.max_sequences = spec->max_sequences;
  cfg.gate = &spec->gate;
  cfg.a2a = &spec->a2a;
  cfg.experts = &spec->experts;
  cfg.residual = spec->residual.mix == PMOE_MIX_NONE ? NULL : &spec->residual;
  pmoe_status status = pmoe_layer_create(ctx, topology, &cfg, &r->layer);
  if (status != PMOE_OK) return status;
  r->model = oracle_model_create(spec->hidden, &spec->gate, &spec->experts, cfg.residual);
  status = find_params(r);
  if (status != PMOE_OK) {
    rig_destroy(r);
    return status;
  }
  oracle_model_fill(r->model, 7 + (uint64_t)spec->layer_id);
  rig_load(r);
  return PMOE_OK;
}

void rig_destroy(rig *r) {
  pmoe_layer_destroy(r->layer);
  oracle_model_destroy(r->model);
  for (int32_t p = 0; p < r->num_params; p++) {
    free(r->param[p].data);
    free(r->param[p].grad);
  }
  memset(r, 0, sizeof *r);
}

int64_t rig_element(const rig *r, int32_t param, int64_t i) {
  const pmoe_param *p = &r->param[param];
  bool expert = p->first_expert >= 0;
  int64_t local = expert ? p->numel / p->shape[0] : p->numel, within = i % local, inner = 1;
  int64_t base = expert ? (p->first_expert + i / local) * r->tensor[param]->per_expert : 0;
  if (p->shard_dim < 0) return base + within;
  for (int32_t d = p->shard_dim + 1; d < p->ndim; d++) inner *= p->shape[d];
  int64_t size = p->shape[p->shard_dim], at = within / inner % size, outer = within / inner / size;
  int64_t whole = at / p->shard_count * p->shard_total + p->shard_first + at % p->shard_count;
  return base + (outer * (size / p->shard_count * p->shard_total) + whole) * inner + within % inner;
}

void rig_load(rig *r) {
  for (int32_t p = 0; p < r->num_params; p++) {
    oracle_tensor *tensor = r->tensor[p];
    for (int64_t i = 0; i < tensor->numel; i++) tensor->data[i] = test_round(tensor->data[i], r->param[p].dtype);
    for (int64_t i = 0; i < r->param[p].numel; i++)
      test_put(r->param[p].data, r->param[p].dtype, i, tensor->data[rig_element(r, p, i)]);
  }
}

void rig_zero_grads(rig *r) {
  oracle_zero_grads(r->model);
  for (int32_t p = 0; p < r->num_params; p++)
    memset(r->param[p].grad, 0, (size_t)r->param[p].numel * pmoe_dtype_size(r->param[p].grad_dtype));
}

int32_t rig_param(const rig *r, const char *name) {
  for (int32_t p = 0; p < r->num_params; p++)
    if (strcmp(r->param[p].name, name) == 0) return p;
  return -1;
}

int rig_check_grads(const rig *r, double scale, const char *label) {
  int failures = 0;
  char what[160];
  for (int32_t p = 0; p < r->num_params; p++) {
    snprintf(what, sizeof what, "%s: gradient of %s", label, r->param[p].name);
    int64_t n = r->param[p].numel;
    double *expected = calloc((size_t)n + 1, sizeof *expected);
    for (int64_t i = 0; i < n; i++) expected[i] = r->tensor[p]->grad[rig_element(r, p, i)];
    pmoe_mat grad = {r->param[p].grad, r->param[p].grad_dtype, 1, n, n};
    failures +=
        test_compare_within(what, &grad, expected, scale, test_tolerance_wide(r->spec.experts.dtype, r->spec.slack));
    free(expected);
  }
  return failures;
}

int rig_check_sumsq(const rig *r, double scale) {
  int failures = 0;
  double expected = 0.0, got = -1.0;
  for (int i = 0; i < ORACLE_TENSORS; i++)
    for (int64_t j = 0; j < r->model->tensor[i].numel; j++) expected += pow(scale * r->model->tensor[i].grad[j], 2.0);
  pmoe_status status = pmoe_layer_grad_sumsq(r->layer, &got, NULL);
  CHECK(failures, status == PMOE_OK, "%s", pmoe_last_error());
  double tolerance = r->spec.experts.dtype == PMOE_F32 ? 1e-4 : 3e-2;
  return failures + test_compare_one("grad_sumsq", got, expected, tolerance * (1e-6 + expected));
}

void rig_descend(rig *r, double rate, double grad_scale) {
  for (int32_t p = 0; p < r->num_params; p++) {
    const pmoe_param *param = &r->param[p];
    for (int64_t i = 0; i < r->tensor[p]->numel; i++)
      r->tensor[p]->data[i] -= rate * grad_scale * r->tensor[p]->grad[i];
    for (int64_t i = 0; i < param->numel; i++)
      test_put(param->data, param->dtype, i,
               test_get(param->data, param->dtype, i) - rate * test_get(param->grad, param->grad_dtype, i));
  }
}
