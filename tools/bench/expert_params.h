/* Parameters and gradients of a block of experts, and what their products cost. */
#ifndef BENCH_EXPERT_PARAMS_H
#define BENCH_EXPERT_PARAMS_H
#include "block.h"
#include "reference.h"

typedef struct bench_expert_params {
  const bench_options *options;
  int32_t first, num;
  pmoe_experts_params p;
  bench_block data[4], grad[4]; /* fc1 weight, fc1 bias, fc2 weight, fc2 bias; gradients are float32 */
  int64_t numel[4];
} bench_expert_params;

pmoe_experts_config bench_experts_config(const bench_options *o);
/* Experts first .. first+num-1 of the run's. */
pmoe_status bench_params_create(const bench_options *o, bench_device *device, int32_t first, int32_t num,
                                bench_expert_params *out);
void bench_params_destroy(bench_expert_params *params);
pmoe_status bench_params_zero_grads(bench_expert_params *params);
/* `local` counts from first. The largest relative deviation goes to error. */
pmoe_status bench_params_compare(const bench_expert_params *params, int32_t local, const bench_feature *want,
                                 bench_error *error);

/* Bytes: every operand and result of the six products once (what is added to, twice). */
typedef struct bench_expert_cost {
  double flops_forward, flops_backward, bytes_forward, bytes_backward;
} bench_expert_cost;
bench_expert_cost bench_expert_cost_of(const bench_options *o, int64_t rows, int32_t experts_with_rows);
int32_t bench_experts_with_rows(int32_t num, const int64_t *rows);

/* Largest deviation from the reference, relative to the largest value, that rounding explains. */
double bench_tolerance(const bench_options *o);

#endif
