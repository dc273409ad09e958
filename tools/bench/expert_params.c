#include "expert_params.h"

#include <stdlib.h>
#include <string.h>

#include "ranks.h"

static const bench_stream streams[4] = {BENCH_FC1_WEIGHT, BENCH_FC1_BIAS, BENCH_FC2_WEIGHT, BENCH_FC2_BIAS};

pmoe_experts_config bench_experts_config(const bench_options *o) {
  pmoe_experts_config cfg = PMOE_CONFIG_INIT(pmoe_experts_config);
  cfg.inner = o->inner;
  cfg.act = o->act;
  cfg.bias = o->bias;
  cfg.dtype = o->dtype;
  return cfg;
}

pmoe_status bench_params_create(const bench_options *o, bench_device *device, int32_t first, int32_t num,
                                bench_expert_params *out) {
  int64_t h = o->hidden, f = o->inner, f1 = bench_inner1(o);
  *out = (bench_expert_params){.options = o, .first = first, .num = num};
  const int64_t each[4] = {f1 * h, o->bias ? f1 : 0, h * f, o->bias ? h : 0};
  for (int i = 0; i < 4; i++) {
    if (each[i] == 0) continue;
    out->numel[i] = each[i] * num;
    pmoe_status status = bench_block_create(device, (size_t)out->numel[i] * pmoe_dtype_size(o->dtype), &out->data[i]);
    if (status == PMOE_OK) status = bench_block_create(device, (size_t)out->numel[i] * sizeof(float), &out->grad[i]);
    if (status < 0) return status;
    bench_fill(o, streams[i], each[i] * first, out->numel[i], out->data[i].host);
    status = bench_block_push(&out->data[i]);
    if (status < 0) return status;
  }
  out->p = (pmoe_experts_params){sizeof out->p,     out->data[0].data, out->data[1].data,
                                 out->data[2].data, out->data[3].data, out->grad[0].data,
                                 out->grad[1].data, out->grad[2].data, out->grad[3].data};
  return PMOE_OK;
}

void bench_params_destroy(bench_expert_params *params) {
  for (int i = 0; i < 4; i++) {
    bench_block_destroy(&params->data[i]);
    bench_block_destroy(&params->grad[i]);
  }
}

pmoe_status bench_params_zero_grads(bench_expert_params *params) {
  pmoe_status status = PMOE_OK;
  for (int i = 0; i < 4 && status == PMOE_OK; i++)
    if (params->grad[i].host) status = bench_block_zero(&params->grad[i]);
  return status;
}

pmoe_status bench_params_compare(const bench_expert_params *params, int32_t local, const bench_feature *want,
                                 bench_error *error) {
  const float *part[4] = {NULL, NULL, NULL, NULL};
  for (int i = 0; i < 4; i++) {
    if (!params->grad[i].host) continue;
    int64_t each = params->numel[i] / params->num;
    part[i] = (const float *)(void *)params->grad[i].host + each * local;
    pmoe_status status = bench_block_pull(&params->grad[i], part[i], (size_t)each * sizeof(float));
    if (status < 0) return status;
  }
  bench_feature_compare(want, part[0], part[1], part[2], error);
  return PMOE_OK;
}

bench_expert_cost bench_expert_cost_of(const bench_options *o, int64_t rows, int32_t experts_with_rows) {
  double r = (double)rows, h = o->hidden, f = o->inner, f1 = bench_inner1(o), size = (double)pmoe_dtype_size(o->dtype);
  double weights = experts_with_rows * h * (f + f1);
  bench_expert_cost cost;
  cost.flops_forward = 2 * r * h * (f + f1);
  cost.flops_backward = 2 * cost.flops_forward;
  double operands = r * (2 * h + f + f1);
  cost.bytes_forward = (operands + weights) * size;
  cost.bytes_backward = (2 * operands + weights) * size + 2 * weights * (double)sizeof(float);
  return cost;
}

int32_t bench_experts_with_rows(int32_t num, const int64_t *rows) {
  int32_t n = 0;
  for (int32_t e = 0; e < num; e++) n += rows[e] > 0;
  return n;
}

double bench_tolerance(const bench_options *o) {
  return o->dtype == PMOE_F32 ? 1e-4 : o->dtype == PMOE_BF16 ? 3e-2 : 4e-3;
}
