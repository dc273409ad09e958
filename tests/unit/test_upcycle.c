/* Layers that start as a dense MLP: their output is the MLP's wherever it must be, and the factors are those computed
 * elsewhere (tests/data/router-golden.json). */
#include <math.h>
#include <pmoe/pmoe.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "support/asserts.h"
#include "support/golden.h"

enum { H = 6, T = 20, MAX_PARAMS = 8 };

typedef struct bench {
  pmoe_ctx *ctx;
  pmoe_layer *layer;
  int32_t num_params;
  float *data[MAX_PARAMS];
  pmoe_gate_config gate;
  pmoe_experts_config experts;
} bench;

static void open_layer(bench *b) {
  assert_ok(pmoe_ctx_create(NULL, &b->ctx));
  pmoe_layer_config cfg = PMOE_CONFIG_INIT(pmoe_layer_config);
  cfg.hidden = H;
  cfg.gate = &b->gate;
  cfg.experts = &b->experts;
  assert_ok(pmoe_layer_create(b->ctx, NULL, &cfg, &b->layer));
  b->num_params = pmoe_layer_num_params(b->layer);
  for (int32_t i = 0; i < b->num_params; i++) {
    pmoe_param p = PMOE_CONFIG_INIT(pmoe_param);
    assert_ok(pmoe_layer_param(b->layer, i, &p));
    b->data[i] = malloc((size_t)p.numel * sizeof(float));
    memset(b->data[i], 0xff, (size_t)p.numel * sizeof(float));
    assert_ok(pmoe_layer_bind_param(b->layer, i, b->data[i], NULL));
  }
}

static void close_layer(bench *b) {
  pmoe_layer_destroy(b->layer);
  pmoe_ctx_destroy(b->ctx);
  for (int32_t i = 0; i < b->num_params; i++) free(b->data[i]);
}

static bench bench_of(int32_t experts, int32_t top_k, int32_t inner, pmoe_act act) {
  bench b = {.gate = PMOE_CONFIG_INIT(pmoe_gate_config), .experts = PMOE_CONFIG_INIT(pmoe_experts_config)};
  b.gate.num_experts = experts;
  b.gate.top_k = top_k;
  b.experts.inner = inner;
  b.experts.act = act;
  return b;
}

static double activate(pmoe_act act, double gate, double up) {
  if (act == PMOE_ACT_SWIGLU) return gate / (1 + exp(-gate)) * up;
  if (act == PMOE_ACT_RELU) return gate > 0 ? gate : 0;
  return 0.5 * gate * (1 + erf(gate / sqrt(2.0)));
}

typedef struct dense_mlp {
  int32_t inner, bias;
  pmoe_act act;
  float *fc1, *b1, *fc2, *b2;
} dense_mlp;

static float number(int i) { return (float)((i * 7919) % 211 - 105) / 150.0f; }

static dense_mlp dense_of(int32_t inner, pmoe_act act, int32_t bias) {
  dense_mlp d = {.inner = inner, .bias = bias, .act = act};
  int f1 = act == PMOE_ACT_SWIGLU ? 2 * inner : inner;
  d.fc1 = malloc((size_t)(f1 * H) * sizeof(float));
  d.fc2 = malloc((size_t)(inner * H) * sizeof(float));
  d.b1 = malloc((size_t)f1 * sizeof(float));
  d.b2 = malloc(H * sizeof(float));
  for (int i = 0; i < f1 * H; i++) d.fc1[i] = number(i);
  for (int i = 0; i < inner * H; i++) d.fc2[i] = number(i + 31);
  for (int i = 0; i < f1; i++) d.b1[i] = bias ? number(i + 77) : 0;
  for (int i = 0; i < H; i++) d.b2[i] = bias ? number(i + 5) : 0;
  return d;
}

static void dense_free(dense_mlp *d) {
  free(d->fc1);
  free(d->fc2);
  free(d->b1);
  free(d->b2);
}

static double dense_output(const dense_mlp *d, const float *x, int h) {
  double sum = (double)d->b2[h];
  for (int f = 0; f < d->inner; f++) {
    double gate = (double)d->b1[f], up = 0;
    for (int j = 0; j < H; j++) gate += (double)d->fc1[f * H + j] * (double)x[j];
    if (d->act == PMOE_ACT_SWIGLU) {
      up = (double)d->b1[d->inner + f];
      for (int j = 0; j < H; j++) up += (double)d->fc1[(d->inner + f) * H + j] * (double)x[j];
    }
    sum += (double)d->fc2[h * d->inner + f] * activate(d->act, gate, up);
  }
  return sum;
}

static pmoe_upcycle upcycle_of(const dense_mlp *d, int32_t granularity, float std) {
  pmoe_upcycle up = PMOE_CONFIG_INIT(pmoe_upcycle);
  up.granularity = granularity;
  up.router_std = std;
  up.seed = 3;
  up.fc1_weight = d->fc1;
  up.fc2_weight = d->fc2;
  if (d->bias) up.fc1_bias = d->b1, up.fc2_bias = d->b2;
  return up;
}

static void check_output(bench *b, const dense_mlp *d) {
  float x[T * H], y[T * H];
  for (int i = 0; i < T * H; i++) x[i] = number(3 * i + 1);
  pmoe_mat xm = {x, PMOE_F32, T, H, H}, ym = {y, PMOE_F32, T, H, H};
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = T;
  pmoe_stash *stash;
  assert_ok(pmoe_stash_create(b->layer, &cfg, NULL, 0, &stash));
  assert_ok(pmoe_layer_forward(b->layer, stash, NULL, &xm, &ym, NULL));
  for (int t = 0; t < T; t++)
    for (int h = 0; h < H; h++) {
      double want = dense_output(d, x + t * H, h);
      if (!(fabs((double)y[t * H + h] - want) <= 2e-5 * (1 + fabs(want))))
        fail_msg("token %d: got %.9g, want %.9g", t, (double)y[t * H + h], want);
    }
  pmoe_stash_destroy(stash);
}

static void check(bench b, int32_t granularity, float std, pmoe_upcycle_scale scale) {
  dense_mlp d = dense_of(b.experts.inner * granularity, b.experts.act, b.experts.bias);
  pmoe_upcycle up = upcycle_of(&d, granularity, std);
  up.scale = scale;
  open_layer(&b);
  assert_ok(pmoe_layer_upcycle(b.layer, &up));
  check_output(&b, &d);
  close_layer(&b);
  dense_free(&d);
}

/* Weights that sum to 1: exact whatever the router chooses, for whole and sliced experts, every activation. */
static void test_exact(void **state) {
  (void)state;
  static const pmoe_act acts[] = {PMOE_ACT_GELU, PMOE_ACT_SWIGLU, PMOE_ACT_RELU};
  for (int a = 0; a < 3; a++) {
    for (int32_t g = 1; g <= 4; g *= 2) {
      for (int32_t bias = 0; bias <= 1; bias++) {
        bench b = bench_of(8, 4, 5, acts[a]);
        b.experts.bias = bias;
        b.gate.softmax_after_topk = 1;
        check(b, g, 0.8f, PMOE_UPCYCLE_OUTPUT);
        b.gate.softmax_after_topk = 0;
        b.gate.norm = PMOE_NORM_AFTER_DROP;
        b.gate.weight_scale = 2.5f;
        b.gate.score = PMOE_SCORE_SIGMOID;
        check(b, g, 0.8f, PMOE_UPCYCLE_OUTPUT);
        b.gate.norm = PMOE_NORM_NONE; /* exact where all scores are equal */
        check(b, g, 0, PMOE_UPCYCLE_OUTPUT);
        b.gate.score = PMOE_SCORE_SQRT_SOFTPLUS;
        check(b, g, 0, PMOE_UPCYCLE_OUTPUT);
        b.gate.score = PMOE_SCORE_SOFTMAX;
        check(b, g, 0, PMOE_UPCYCLE_OUTPUT);
      }
    }
  }
  bench b = bench_of(8, 2, 5, PMOE_ACT_RELU); /* positively homogeneous: exact with even scales, too */
  check(b, 2, 0, PMOE_UPCYCLE_EVEN);
}

static void test_golden_factors(void **state) {
  (void)state;
  const cJSON *item;
  int cases = 0;
  cJSON_ArrayForEach(item, get(golden, "upcycling_weight_scale")) {
    int granularity = cJSON_GetObjectItem(item, "granularity")->valueint;
    int gated = cJSON_IsTrue(cJSON_GetObjectItem(item, "gated"));
    int experts = cJSON_GetObjectItem(item, "experts")->valueint, top_k = cJSON_GetObjectItem(item, "topk")->valueint;
    bench b = bench_of(experts, top_k, 3, gated ? PMOE_ACT_SWIGLU : PMOE_ACT_GELU);
    b.gate.softmax_after_topk = !cJSON_IsTrue(cJSON_GetObjectItem(item, "pre_softmax"));
    open_layer(&b);
    float factor = 0;
    assert_ok(pmoe_upcycle_factor(b.layer, granularity, &factor));
    assert_true(fabs((double)factor - cJSON_GetObjectItem(item, "activation_scale")->valuedouble) < 1e-6);
    dense_mlp d = dense_of(3 * granularity, b.experts.act, 0);
    pmoe_upcycle up = upcycle_of(&d, granularity, 0.1f);
    up.scale = PMOE_UPCYCLE_EVEN;
    assert_ok(pmoe_layer_upcycle(b.layer, &up));
    double each = cJSON_GetObjectItem(item, "per_matrix_scale")->valuedouble;
    assert_true(fabs((double)b.data[1][0] - each * (double)d.fc1[0]) < 1e-6);
    assert_true(fabs((double)b.data[2][0] - each * (double)d.fc2[0]) < 1e-6);
    dense_free(&d);
    close_layer(&b);
    cases++;
  }
  assert_int_equal(cases, 24);
}

static void test_bad_input(void **state) {
  (void)state;
  bench b = bench_of(8, 4, 5, PMOE_ACT_GELU);
  dense_mlp d = dense_of(10, PMOE_ACT_GELU, 1);
  open_layer(&b);
  pmoe_upcycle good = upcycle_of(&d, 2, 0.1f), up;
  good.fc1_bias = good.fc2_bias = NULL;
  float before = b.data[0][0];
  assert_refused(pmoe_layer_upcycle(NULL, &good), PMOE_ERR_ARG, "layer");
  assert_refused(pmoe_layer_upcycle(b.layer, NULL), PMOE_ERR_ARG, "dense");
  up = good, up.granularity = 3;
  assert_refused(pmoe_layer_upcycle(b.layer, &up), PMOE_ERR_ARG, "granularity is 3");
  up = good, up.router_std = NAN;
  assert_refused(pmoe_layer_upcycle(b.layer, &up), PMOE_ERR_ARG, "router_std");
  up = good, up.scale = (pmoe_upcycle_scale)7;
  assert_refused(pmoe_layer_upcycle(b.layer, &up), PMOE_ERR_ARG, "scale is 7");
  up = good, up.fc2_weight = NULL;
  assert_refused(pmoe_layer_upcycle(b.layer, &up), PMOE_ERR_ARG, "fc2_weight");
  up = good, up.fc1_bias = d.b1;
  assert_refused(pmoe_layer_upcycle(b.layer, &up), PMOE_ERR_ARG, "fc1_bias");
  assert_ok(pmoe_layer_bind_param(b.layer, 1, NULL, NULL));
  assert_refused(pmoe_layer_upcycle(b.layer, &good), PMOE_ERR_STATE, "experts.fc1.weight");
  assert_memory_equal(&before, &b.data[0][0], sizeof before);
  close_layer(&b);
  dense_free(&d);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_exact), cmocka_unit_test(test_golden_factors),
                                     cmocka_unit_test(test_bad_input)};
  return cmocka_run_group_tests(tests, load_golden, free_golden);
}
