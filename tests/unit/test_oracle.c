/* The reference against values from elsewhere, and its gradients against its own finite differences. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oracle/oracle.h"

static void assert_near(double got, double expected, double tolerance) {
  if (!(fabs(got - expected) <= tolerance)) fail_msg("%.9g where %.9g +- %g was expected", got, expected, tolerance);
}

static pmoe_gate_config gate_of(int32_t num_experts, int32_t top_k) {
  pmoe_gate_config gate = PMOE_CONFIG_INIT(pmoe_gate_config);
  gate.num_experts = num_experts;
  gate.top_k = top_k;
  return gate;
}

static pmoe_experts_config experts_of(int32_t inner, pmoe_act act, int32_t bias) {
  pmoe_experts_config experts = PMOE_CONFIG_INIT(pmoe_experts_config);
  experts.inner = inner;
  experts.act = act;
  experts.bias = bias;
  return experts;
}

/* A model whose router's logits are its input. */
static oracle_model *logits_are_input(const pmoe_gate_config *gate) {
  pmoe_experts_config experts = experts_of(2, PMOE_ACT_RELU, 0);
  oracle_model *model = oracle_model_create(gate->num_experts, gate, &experts, NULL);
  for (int64_t i = 0; i < gate->num_experts; i++)
    model->tensor[ORACLE_ROUTER_WEIGHT].data[i * gate->num_experts + i] = 1.0;
  return model;
}

static oracle_result *route(const pmoe_gate_config *gate, const double *logits, int64_t tokens, const uint8_t *mask) {
  oracle_model *model = logits_are_input(gate);
  oracle_batch batch = {.tokens = tokens, .training = 1, .loss_scale = 1.0, .x = logits, .mask = mask};
  oracle_result *result = oracle_run(model, &batch);
  oracle_model_destroy(model);
  return result;
}

static const double top1_logits[] = {2, 1, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0, 2, 0, 0, 1.5, 1, 0, 0, 0, 0, 1, 0};

static void test_top1_with_capacity(void **state) {
  (void)state;
  pmoe_gate_config gate = gate_of(4, 1);
  gate.capacity_factor = 1.0f; /* ceil(6 / 4) = 2 */
  gate.aux_coef = 1.0f;
  oracle_result *r = route(&gate, top1_logits, 6, NULL);
  const int64_t count[] = {4, 1, 1, 0};
  const double weight[] = {.610296, .475367, 0, .711235, 0, .475367};
  assert_int_equal(r->capacity[0], 2);
  for (int i = 0; i < 4; i++) assert_int_equal(r->count[i], count[i]);
  for (int i = 0; i < 6; i++) assert_near(r->weight[i], weight[i], 1e-6);
  assert_near(r->aux_loss[0], 1.495704, 1e-6);
  oracle_result_destroy(r);
}

static void test_masked_tokens_count_in_no_loss(void **state) {
  (void)state;
  pmoe_gate_config gate = gate_of(4, 1);
  gate.aux_coef = 1.0f;
  const uint8_t mask[] = {1, 1, 1, 1, 0, 0};
  oracle_result *r = route(&gate, top1_logits, 6, mask);
  assert_near(r->aux_loss[0], 1.827461, 1e-6);
  assert_int_equal(r->expert[4], -1);
  oracle_result_destroy(r);
}

static void test_top2_weights_after_a_drop(void **state) {
  (void)state;
  const double logits[] = {.1, .9, .2, .8, .1, .3, .4, .6, .5, .7, .2, .1};
  pmoe_gate_config gate = gate_of(3, 2);
  gate.capacity_factor = 0.5f;
  gate.norm = PMOE_NORM_AFTER_DROP;
  oracle_result *r = route(&gate, logits, 4, NULL);
  const double after[] = {.668188, .331812, .622459, .377541, 1, 0, 1, 0};
  const int32_t expert[] = {1, 2, 0, 2, 1, 2, 0, 1};
  for (int i = 0; i < 8; i++) {
    assert_int_equal(r->expert[i], expert[i]);
    assert_near(r->weight[i], after[i], 1e-6);
  }
  oracle_result_destroy(r);
  gate.norm = PMOE_NORM_BEFORE_DROP;
  r = route(&gate, logits, 4, NULL);
  assert_near(r->weight[4], .524979, 1e-6);
  assert_near(r->weight[6], .622459, 1e-6);
  oracle_result_destroy(r);
}

static void test_aux_loss_of_all_or_first_choices(void **state) {
  (void)state;
  const double logits[] = {.11, .2, .1, .3, .3, .4, .11, .1, .11, .1, .6, .5, .1, .11, .7, .8};
  pmoe_gate_config gate = gate_of(4, 2);
  gate.aux_coef = 1.0f;
  oracle_result *r = route(&gate, logits, 4, NULL);
  assert_near(r->aux_loss[0], 1.033420, 1e-6);
  oracle_result_destroy(r);
  gate.aux_first_choice_only = 1;
  r = route(&gate, logits, 4, NULL);
  assert_near(r->aux_loss[0], 1.066840, 1e-6);
  oracle_result_destroy(r);
}

/* y = w_e x, loss = mean over two tokens a rank; every token's first feature leads it to its expert. */
static void test_expert_gradients_sum_over_ranks(void **state) {
  (void)state;
  pmoe_gate_config gate = gate_of(2, 1);
  pmoe_experts_config experts = experts_of(1, PMOE_ACT_RELU, 0);
  oracle_model *model = oracle_model_create(2, &gate, &experts, NULL);
  double *router = model->tensor[ORACLE_ROUTER_WEIGHT].data;
  router[0] = 1000.0; /* saturates: the weight is 1 */
  router[2] = -1000.0;
  for (int e = 0; e < 2; e++) { /* fc1 reads the second feature, fc2 writes it */
    model->tensor[ORACLE_FC1_WEIGHT].data[e * 2 + 1] = 1.0;
    model->tensor[ORACLE_FC2_WEIGHT].data[e * 2 + 1] = 1.0;
  }
  const double x[] = {1, 1, -1, 2, 1, 3, 1, 4}, dy[] = {0, .5, 0, .5, 0, .5, 0, .5};
  const int64_t rank_tokens[] = {2, 2};
  oracle_batch batch = {.tokens = 4, .num_ranks = 2, .rank_tokens = rank_tokens, .training = 1, .x = x, .dy = dy};
  oracle_result *r = oracle_run(model, &batch);
  /* summed over ranks and divided by their number: the mean of means */
  assert_near(model->tensor[ORACLE_FC2_WEIGHT].grad[1] / 2, 2.0, 1e-12);
  assert_near(model->tensor[ORACLE_FC2_WEIGHT].grad[3] / 2, 0.5, 1e-12);
  oracle_result_destroy(r);
  oracle_model_destroy(model);
}

static void test_residual_coefficients(void **state) {
  (void)state;
  pmoe_gate_config gate = gate_of(1, 1);
  pmoe_experts_config experts = experts_of(1, PMOE_ACT_RELU, 1);
  pmoe_residual_config residual = PMOE_CONFIG_INIT(pmoe_residual_config);
  residual.mix = PMOE_MIX_LEARNED;
  residual.inner = 1;
  residual.bias = 1;
  oracle_model *model = oracle_model_create(1, &gate, &experts, &residual);
  model->tensor[ORACLE_FC2_BIAS].data[0] = 2.0;
  model->tensor[ORACLE_MLP_FC2_BIAS].data[0] = -1.0;
  model->tensor[ORACLE_MIX_WEIGHT].data[0] = .2;
  model->tensor[ORACLE_MIX_WEIGHT].data[1] = -.4;
  const double x[] = {1.0};
  oracle_batch batch = {.tokens = 1, .x = x};
  oracle_result *r = oracle_run(model, &batch);
  assert_near(r->y[0], .936969, 1e-6);
  oracle_result_destroy(r);
  oracle_model_destroy(model);
}

static void test_expert_bias_is_weighted(void **state) {
  (void)state;
  pmoe_gate_config gate = gate_of(2, 2);
  pmoe_experts_config experts = experts_of(1, PMOE_ACT_RELU, 1);
  oracle_model *model = oracle_model_create(1, &gate, &experts, NULL);
  model->tensor[ORACLE_ROUTER_WEIGHT].data[0] = log(.7);
  model->tensor[ORACLE_ROUTER_WEIGHT].data[1] = log(.3);
  model->tensor[ORACLE_FC2_BIAS].data[0] = 10.0;
  model->tensor[ORACLE_FC2_BIAS].data[1] = 100.0;
  const double x[] = {1.0};
  oracle_batch batch = {.tokens = 1, .x = x};
  oracle_result *r = oracle_run(model, &batch);
  assert_near(r->y[0], 37.0, 1e-12);
  oracle_result_destroy(r);
  oracle_model_destroy(model);
}

static void test_capacity_in_integers(void **state) {
  (void)state;
  assert_int_equal(oracle_capacity(50, 4, 1, (double)1.2f, 0), 15);
  assert_int_equal(oracle_capacity(1000, 3, 1, (double)1.2f, 0), 400);
  assert_int_equal(oracle_capacity(90, 4, 1, (double)1.2f, 0), 27);
  assert_int_equal(oracle_capacity(20, 3, 1, (double)1.05f, 0), 7);
  assert_int_equal(oracle_capacity(1, 4, 1, 0.5, 0), 1);
  assert_int_equal(oracle_capacity(1, 4, 1, 0.5, 4), 4);
  assert_int_equal(oracle_capacity(8, 2, 2, 2.0, 0), 16);
}

static int64_t flatten(const cJSON *node, double *out, int64_t n) {
  if (cJSON_IsNumber(node)) {
    out[n] = node->valuedouble;
    return n + 1;
  }
  for (const cJSON *child = node->child; child; child = child->next) n = flatten(child, out, n);
  return n;
}

static cJSON *read_golden(void) {
  FILE *file = fopen(TEST_DATA_DIR "/router-golden.json", "rb");
  assert_non_null(file);
  assert_int_equal(fseek(file, 0, SEEK_END), 0);
  size_t bytes = (size_t)ftell(file);
  rewind(file);
  char *text = calloc(bytes + 1, 1);
  assert_int_equal(fread(text, 1, bytes, file), bytes);
  fclose(file);
  cJSON *golden = cJSON_Parse(text);
  free(text);
  assert_non_null(golden);
  return golden;
}

static void assert_golden(const cJSON *set, const char *key, const double *got, int64_t n) {
  double expected[256];
  assert_int_equal(flatten(cJSON_GetObjectItem(set, key), expected, 0), n);
  for (int64_t i = 0; i < n; i++) assert_near(got[i], expected[i], 1e-12 + 1e-10 * fabs(expected[i]));
}

static void test_golden_swiglu_layer(void **state) {
  (void)state;
  cJSON *golden = read_golden();
  const cJSON *tiny = cJSON_GetObjectItem(golden, "tiny_swiglu_layer");
  pmoe_gate_config gate = gate_of(4, 2);
  gate.softmax_after_topk = 1;
  pmoe_experts_config experts = experts_of(3, PMOE_ACT_SWIGLU, 0);
  oracle_model *model = oracle_model_create(4, &gate, &experts, NULL);
  double x[20], dy[20];
  flatten(cJSON_GetObjectItem(tiny, "x"), x, 0);
  flatten(cJSON_GetObjectItem(tiny, "grad_y"), dy, 0);
  flatten(cJSON_GetObjectItem(tiny, "router_w"), model->tensor[ORACLE_ROUTER_WEIGHT].data, 0);
  flatten(cJSON_GetObjectItem(tiny, "w1"), model->tensor[ORACLE_FC1_WEIGHT].data, 0);
  flatten(cJSON_GetObjectItem(tiny, "w2"), model->tensor[ORACLE_FC2_WEIGHT].data, 0);
  oracle_batch batch = {.tokens = 5, .training = 1, .loss_scale = 1.0, .x = x, .dy = dy};
  oracle_result *r = oracle_run(model, &batch);
  assert_golden(tiny, "logits", r->logits, 20);
  assert_golden(tiny, "weights", r->weight, 10);
  assert_golden(tiny, "y", r->y, 20);
  assert_golden(tiny, "grad_x", r->dx, 20);
  assert_golden(tiny, "grad_router_w", model->tensor[ORACLE_ROUTER_WEIGHT].grad, 16);
  assert_golden(tiny, "grad_w1", model->tensor[ORACLE_FC1_WEIGHT].grad, 4 * 6 * 4);
  assert_golden(tiny, "grad_w2", model->tensor[ORACLE_FC2_WEIGHT].grad, 4 * 4 * 3);
  oracle_result_destroy(r);
  oracle_model_destroy(model);
  cJSON_Delete(golden);
}

/* Five-point differences of the objective with the choices held still. */
static void assert_slope(oracle_model *model, const oracle_batch *batch, double *at, double gradient,
                         const char *what) {
  const double h = 1e-3, kept = *at;
  double value[4];
  const double step[] = {-2 * h, -h, h, 2 * h};
  for (int i = 0; i < 4; i++) {
    *at = kept + step[i];
    value[i] = oracle_objective(model, batch);
  }
  *at = kept;
  double numeric = (value[0] - 8 * value[1] + 8 * value[2] - value[3]) / (12 * h);
  if (!(fabs(numeric - gradient) <= 1e-7 * (1.0 + fabs(numeric))))
    fail_msg("%s: %.12g against %.12g", what, gradient, numeric);
}

typedef struct slope_case {
  int32_t after, top_k, first_only;
  pmoe_norm norm;
  pmoe_drop drop;
  float capacity_factor;
  pmoe_act act;
  pmoe_mix mix;
} slope_case;

static void check_slopes(const slope_case *c) {
  enum { H = 3, E = 4, F = 2, T = 7 };
  pmoe_gate_config gate = gate_of(E, c->top_k);
  gate.softmax_after_topk = c->after;
  gate.norm = c->norm;
  gate.drop = c->drop;
  gate.capacity_factor = c->capacity_factor;
  gate.aux_coef = 0.3f;
  gate.z_coef = 0.2f;
  gate.weight_scale = 1.5f;
  gate.aux_first_choice_only = c->first_only;
  gate.bias = 1;
  pmoe_experts_config experts = experts_of(F, c->act, 1);
  pmoe_residual_config residual = PMOE_CONFIG_INIT(pmoe_residual_config);
  residual.mix = c->mix;
  residual.inner = F + 1;
  residual.act = c->act;
  residual.bias = 1;
  oracle_model *model = oracle_model_create(H, &gate, &experts, &residual);
  oracle_model_fill(model, 5);
  double x[T * H], dy[T * H];
  oracle_fill(x, T * H, 11, 1.0);
  oracle_fill(dy, T * H, 12, 1.0);
  const uint8_t mask[T] = {1, 1, 0, 1, 1, 1, 1};
  const int64_t rank_tokens[] = {4, 0, 3};
  oracle_batch batch = {.tokens = T,
                        .num_ranks = 3,
                        .rank_tokens = rank_tokens,
                        .training = 1,
                        .loss_scale = 0.7,
                        .x = x,
                        .dy = dy,
                        .mask = mask};
  oracle_result *r = oracle_run(model, &batch);
  batch.given_expert = r->expert;
  batch.given_slot = r->slot;
  for (int i = 0; i < ORACLE_TENSORS; i++)
    for (int64_t j = 0; j < model->tensor[i].numel; j++)
      assert_slope(model, &batch, &model->tensor[i].data[j], model->tensor[i].grad[j], model->tensor[i].name);
  for (int i = 0; i < T * H; i++) assert_slope(model, &batch, &x[i], r->dx[i], "dx");
  oracle_result_destroy(r);
  oracle_model_destroy(model);
}

static void test_gradients_by_finite_differences(void **state) {
  (void)state;
  const slope_case cases[] = {
      {0, 1, 0, PMOE_NORM_NONE, PMOE_DROP_POSITION, 0.0f, PMOE_ACT_GELU, PMOE_MIX_NONE},
      {0, 2, 0, PMOE_NORM_NONE, PMOE_DROP_PROBS, 0.8f, PMOE_ACT_GELU_TANH, PMOE_MIX_LEARNED},
      {0, 2, 1, PMOE_NORM_BEFORE_DROP, PMOE_DROP_POSITION, 0.8f, PMOE_ACT_SILU, PMOE_MIX_SUM},
      {0, 3, 0, PMOE_NORM_AFTER_DROP, PMOE_DROP_POSITION, 0.6f, PMOE_ACT_SWIGLU, PMOE_MIX_GATED_SUM},
      {1, 2, 0, PMOE_NORM_NONE, PMOE_DROP_POSITION, 0.8f, PMOE_ACT_GEGLU, PMOE_MIX_LEARNED},
      {1, 4, 1, PMOE_NORM_AFTER_DROP, PMOE_DROP_PROBS, 0.7f, PMOE_ACT_GELU, PMOE_MIX_GATED_SUM},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) check_slopes(&cases[i]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_top1_with_capacity),
      cmocka_unit_test(test_masked_tokens_count_in_no_loss),
      cmocka_unit_test(test_top2_weights_after_a_drop),
      cmocka_unit_test(test_aux_loss_of_all_or_first_choices),
      cmocka_unit_test(test_expert_gradients_sum_over_ranks),
      cmocka_unit_test(test_residual_coefficients),
      cmocka_unit_test(test_expert_bias_is_weighted),
      cmocka_unit_test(test_capacity_in_integers),
      cmocka_unit_test(test_golden_swiglu_layer),
      cmocka_unit_test(test_gradients_by_finite_differences),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
