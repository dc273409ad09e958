/* Cutting layers into pipeline stages, and the modelled cost of a layer. */
#include "support/asserts.h"

#include <math.h>
#include <pmoe/pmoe.h>
#include <stdlib.h>

static double largest(const double *cost, const int32_t *layers, int32_t stages) {
  double worst = 0.0;
  for (int32_t s = 0, at = 0; s < stages; s++) {
    double load = 0.0;
    for (int32_t i = 0; i < layers[s]; i++) load += cost[at++];
    worst = fmax(worst, load);
  }
  return worst;
}

/* The best of all cuts. */
static double best_of(const double *cost, int32_t layers, int32_t stages) {
  if (stages == 1) {
    double load = 0.0;
    for (int32_t i = 0; i < layers; i++) load += cost[i];
    return load;
  }
  double best = INFINITY, first = 0.0;
  for (int32_t i = 1; i <= layers - stages + 1; i++) {
    first += cost[i - 1];
    best = fmin(best, fmax(first, best_of(cost + i, layers - i, stages - 1)));
  }
  return best;
}

static void test_against_all_cuts(void **state) {
  (void)state;
  uint32_t random = 7;
  for (int trial = 0; trial < 3000; trial++) {
    double cost[10];
    int32_t layers = 1 + trial % 10, stages = 1 + trial / 10 % layers, cut[10];
    for (int32_t i = 0; i < layers; i++) {
      random = random * 1664525u + 1013904223u;
      cost[i] = trial % 3 == 0 ? (double)(random >> 28) : (double)(random >> 8) / 1e6;
    }
    assert_ok(pmoe_partition_stages(layers, cost, stages, cut));
    int32_t sum = 0;
    for (int32_t s = 0; s < stages; s++) {
      assert_true(cut[s] >= 1);
      sum += cut[s];
    }
    assert_int_equal(sum, layers);
    assert_true(fabs(largest(cost, cut, stages) - best_of(cost, layers, stages)) <= 1e-12 * largest(cost, cut, stages));
  }
}

static void test_known_cuts(void **state) {
  (void)state;
  int32_t cut[4];
  static const double pyramid[] = {1, 1, 1, 1, 1, 1, 3, 3}, even[] = {1, 1, 1, 1, 1, 1, 1, 1}, zero[] = {0, 0, 0};
  assert_ok(pmoe_partition_stages(8, pyramid, 2, cut));
  assert_memory_equal(cut, ((int32_t[]){6, 2}), 2 * sizeof *cut);
  assert_ok(pmoe_partition_stages(8, even, 3, cut));
  assert_memory_equal(cut, ((int32_t[]){3, 3, 2}), 3 * sizeof *cut);
  assert_ok(pmoe_partition_stages(4, pyramid + 4, 4, cut));
  assert_memory_equal(cut, ((int32_t[]){1, 1, 1, 1}), 4 * sizeof *cut);
  assert_ok(pmoe_partition_stages(3, zero, 2, cut));
  assert_memory_equal(cut, ((int32_t[]){2, 1}), 2 * sizeof *cut);
}

static void test_many_layers(void **state) {
  (void)state;
  enum { LAYERS = 4000 };
  double *cost = malloc(LAYERS * sizeof *cost), total = 0.0;
  int32_t cut[64];
  for (int i = 0; i < LAYERS; i++) total += cost[i] = 1.0 + (double)(i * 7919 % 1000) / 1000.0;
  assert_ok(pmoe_partition_stages(LAYERS, cost, 64, cut));
  assert_true(largest(cost, cut, 64) < total / 64 + 2.0);
  free(cost);
}

static void test_bad_arguments(void **state) {
  (void)state;
  double cost[3] = {1, 2, 3};
  int32_t cut[3] = {-5, -5, -5};
  assert_refused(pmoe_partition_stages(3, cost, 0, cut), PMOE_ERR_ARG, "num_stages is 0");
  assert_refused(pmoe_partition_stages(1, cost, 2, cut), PMOE_ERR_ARG, "num_layers is 1");
  assert_refused(pmoe_partition_stages(3, NULL, 2, cut), PMOE_ERR_ARG, "cost is NULL");
  assert_refused(pmoe_partition_stages(3, cost, 2, NULL), PMOE_ERR_ARG, "layers is NULL");
  static const double wrong[] = {-1, NAN, INFINITY};
  for (int i = 0; i < 3; i++) {
    cost[1] = wrong[i];
    assert_refused(pmoe_partition_stages(3, cost, 2, cut), PMOE_ERR_ARG, "cost[1] is");
  }
  assert_true(cut[0] == -5 && cut[2] == -5);
}

static void test_cost(void **state) {
  (void)state;
  pmoe_gate_config gate = PMOE_CONFIG_INIT(pmoe_gate_config);
  pmoe_experts_config experts = PMOE_CONFIG_INIT(pmoe_experts_config);
  pmoe_residual_config residual = PMOE_CONFIG_INIT(pmoe_residual_config);
  pmoe_layer_config cfg = PMOE_CONFIG_INIT(pmoe_layer_config);
  gate.num_experts = 8;
  gate.top_k = 2;
  experts.inner = 20;
  cfg.hidden = 10;
  cfg.gate = &gate;
  cfg.experts = &experts;
  double flops = -1.0;
  assert_ok(pmoe_layer_cost(&cfg, &flops));
  assert_true(flops == 6.0 * (80 + 2 * 400));
  experts.act = PMOE_ACT_SWIGLU;
  experts.recompute_act = 1;
  assert_ok(pmoe_layer_cost(&cfg, &flops));
  assert_true(flops == 6.0 * (80 + 2 * 600) + 2.0 * 2 * 400);
  residual.mix = PMOE_MIX_LEARNED;
  residual.inner = 5;
  cfg.residual = &residual;
  experts.recompute_act = 0;
  assert_ok(pmoe_layer_cost(&cfg, &flops));
  assert_true(flops == 6.0 * (80 + 2 * 600 + 100 + 20));
  residual.mix = PMOE_MIX_GATED_SUM;
  assert_ok(pmoe_layer_cost(&cfg, &flops));
  assert_true(flops == 6.0 * (80 + 2 * 600 + 100 + 10));
  flops = -1.0;
  assert_refused(pmoe_layer_cost(NULL, &flops), PMOE_ERR_ARG, "config is NULL");
  assert_refused(pmoe_layer_cost(&cfg, NULL), PMOE_ERR_ARG, "flops is NULL");
  cfg.hidden = 0;
  assert_refused(pmoe_layer_cost(&cfg, &flops), PMOE_ERR_ARG, "hidden is 0");
  cfg.hidden = 10;
  cfg.gate = NULL;
  assert_refused(pmoe_layer_cost(&cfg, &flops), PMOE_ERR_ARG, "config->gate is NULL");
  cfg.gate = &gate;
  cfg.experts = NULL;
  assert_refused(pmoe_layer_cost(&cfg, &flops), PMOE_ERR_ARG, "config->experts is NULL");
  assert_true(flops == -1.0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_all_cuts), cmocka_unit_test(test_known_cuts),
                                     cmocka_unit_test(test_many_layers), cmocka_unit_test(test_bad_arguments),
                                     cmocka_unit_test(test_cost)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
