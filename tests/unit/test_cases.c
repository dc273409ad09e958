/* Faults in routing that users of MoE layers have met, each with the small input that shows it. Elsewhere: experts,
 * branch and memory (test_cases_experts.c), exchange and layout over ranks (ranks/test_cases_ranks.c), allocation
 * (test_layer_memory.c), repeats and evaluation (test_layer_laws.c), odd and empty sizes (test_layer.c). */
#include "support/asserts.h"

#include <math.h>
#include <stdlib.h>

#include "support/rig.h"

static pmoe_ctx *ctx;

static int create_ctx(void **state) {
  (void)state;
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 2;
  return pmoe_ctx_create(&cfg, &ctx) == PMOE_OK ? 0 : -1;
}

static int destroy_ctx(void **state) {
  (void)state;
  pmoe_ctx_destroy(ctx);
  return 0;
}

static rig_spec spec_of(int32_t num_experts, int32_t top_k) {
  rig_spec spec = rig_spec_default();
  spec.gate.num_experts = num_experts;
  spec.gate.top_k = top_k;
  return spec;
}

static oracle_tensor *tensor_of(rig_bench *b, int which) { return &b->r.model->tensor[which]; }

/* Every token's K experts are distinct and exist. */
static void assert_distinct(const pmoe_routing *routing) {
  for (int64_t t = 0; t < routing->tokens; t++)
    for (int32_t a = 0; a < routing->top_k; a++) {
      const int32_t *expert = routing->expert + t * routing->top_k;
      assert_in_range(expert[a], 0, routing->num_experts - 1);
      for (int32_t c = 0; c < a; c++) assert_int_not_equal(expert[a], expert[c]);
    }
}

static void test_capacity_larger_than_the_token_count(void **state) {
  (void)state;
  const struct {
    int64_t tokens;
    int32_t e, k;
    float factor;
    int64_t capacity;
  } cases[] = {{8, 2, 2, 2.0f, 16}, {3, 4, 1, 8.0f, 6}, {3, 4, 4, 8.0f, 24}};
  for (int i = 0; i < 9; i++) {
    rig_bench b;
    rig_spec spec = spec_of(cases[i % 3].e, cases[i % 3].k);
    spec.gate.capacity_factor = cases[i % 3].factor;
    spec.gate.drop = (pmoe_drop)(i / 3);
    rig_plan plan = rig_plan_of("case", cases[i % 3].tokens, 40);
    rig_bench_create(&b, ctx, &spec, &plan);
    rig_bench_step(&b);
    assert_int_equal(b.routing.capacity, cases[i % 3].capacity);
    assert_int_equal(b.metrics.dropped, 0);
    assert_int_equal(b.metrics.routed, cases[i % 3].tokens * cases[i % 3].k);
    if (spec.gate.drop != PMOE_DROP_RANDOM) rig_bench_check(&b);
    rig_bench_destroy(&b);
  }
}

static void test_capacity_rounding(void **state) {
  (void)state;
  const struct {
    int64_t tokens;
    int32_t e, k;
    float factor;
    int32_t least;
    int64_t expected;
  } cases[] = {{50, 4, 1, 1.2f, 0, 15},      {1000, 3, 1, 1.2f, 0, 400},
               {90, 4, 1, 1.2f, 0, 27},      {20, 3, 1, 1.05f, 0, 7},
               {150, 3, 1, 1.1f, 0, 55},     {270, 3, 1, 1.1f, 0, 99},
               {300, 6, 1, 1.1f, 0, 55},     {350, 7, 1, 1.1f, 0, 55},
               {75, 3, 2, 1.1f, 0, 55},      {1, 4, 1, 0.5f, 0, 1},
               {1, 4, 1, 0.5f, 8, 8},        {0, 4, 2, 1.0f, 0, 1},
               {7, 3, 2, 0.0f, 5, 0},        {1, 1, 1, 1e-6f, 0, 1},
               {1000000, 1, 1, 1e-6f, 0, 1}, {INT64_C(1) << 40, 8, 8, 1.25f, 0, INT64_C(5) << 38}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    int64_t capacity = -1;
    assert_ok(pmoe_gate_capacity(cases[i].tokens, cases[i].e, cases[i].k, cases[i].factor, cases[i].least, &capacity));
    if (capacity != cases[i].expected) fail_msg("case %d: %lld", (int)i, (long long)capacity);
  }
}

static void test_ranking_by_raw_negative_logits(void **state) {
  (void)state;
  enum { T = 64, E = 16 };
  double logits[T * E];
  oracle_fill(logits, T * E, 4, 0.01);
  for (int i = 0; i < T * E; i++) logits[i] -= 5.0;
  for (int drop = 0; drop < 2; drop++) {
    rig_bench b;
    rig_spec spec = spec_of(E, 4);
    spec.gate.capacity_factor = 1.0f;
    spec.gate.drop = (pmoe_drop)drop;
    rig_bench_create_logits(&b, ctx, spec, logits, T);
    rig_bench_step(&b);
    int64_t kept = 0;
    for (int e = 0; e < E; e++) kept += b.routing.expert_count[e] < 16 ? b.routing.expert_count[e] : 16;
    assert_int_equal(b.routing.capacity, 16);
    assert_int_equal(b.metrics.routed, kept);
    assert_int_equal(b.metrics.dropped, T * 4 - kept);
    rig_bench_check(&b);
    rig_bench_destroy(&b);
  }
}

static void test_capacity_of_a_tiny_batch(void **state) {
  (void)state;
  rig_bench b;
  rig_spec spec = spec_of(4, 1);
  spec.gate.capacity_factor = 0.5f;
  rig_plan plan = rig_plan_of("case", 1, 40);
  rig_bench_create(&b, ctx, &spec, &plan);
  rig_bench_step(&b);
  assert_int_equal(b.routing.capacity, 1);
  assert_int_equal(b.metrics.routed, 1);
  rig_bench_check(&b);
  rig_bench_destroy(&b);
}

static const double top1_logits[] = {2, 1, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0, 2, 0, 0, 1.5, 1, 0, 0, 0, 0, 1, 0};

static void test_top1_with_capacity(void **state) {
  (void)state;
  rig_bench b;
  rig_spec spec = spec_of(4, 1);
  spec.gate.capacity_factor = 1.0f;
  spec.gate.aux_coef = 1.0f;
  spec.gate.z_coef = 0.0f;
  rig_bench_create_logits(&b, ctx, spec, top1_logits, 6);
  rig_bench_step(&b);
  const int64_t count[] = {4, 1, 1, 0}, rows[] = {2, 1, 1, 0};
  const double weight[] = {.610296, .475367, 0, .711235, 0, .475367};
  assert_int_equal(b.routing.capacity, 2);
  assert_memory_equal(b.routing.expert_count, count, sizeof count);
  assert_memory_equal(b.routing.expert_rows, rows, sizeof rows);
  for (int i = 0; i < 6; i++)
    assert_int_equal(test_compare_one("weight", (double)b.routing.weight[i], weight[i], 1e-6), 0);
  assert_int_equal(test_compare_one("aux", (double)b.metrics.aux_loss, 1.495704, 2e-6), 0);
  for (int j = 0; j < 4; j++) {
    assert_true(test_get(b.s.y.data, PMOE_F32, 2 * 4 + j) == 0.0);
    assert_true(test_get(b.s.y.data, PMOE_F32, 4 * 4 + j) == 0.0);
  }
  rig_bench_check(&b);
  rig_bench_destroy(&b);
}

static void test_top2_weights_after_a_drop(void **state) {
  (void)state;
  const double logits[] = {.1, .9, .2, .8, .1, .3, .4, .6, .5, .7, .2, .1};
  const double after[] = {.668188, .331812, .622459, .377541, 1, 0, 1, 0};
  const double before[] = {.668188, .331812, .622459, .377541, .524979, 0, .622459, 0};
  for (int i = 0; i < 2; i++) {
    rig_bench b;
    rig_spec spec = spec_of(3, 2);
    spec.gate.capacity_factor = 0.5f;
    spec.gate.norm = i ? PMOE_NORM_BEFORE_DROP : PMOE_NORM_AFTER_DROP;
    rig_bench_create_logits(&b, ctx, spec, logits, 4);
    rig_bench_step(&b);
    assert_int_equal(b.routing.capacity, 2);
    for (int c = 0; c < 8; c++)
      assert_int_equal(test_compare_one("weight", (double)b.routing.weight[c], i ? before[c] : after[c], 1e-6), 0);
    rig_bench_check(&b);
    rig_bench_destroy(&b);
  }
}

static void test_aux_loss_of_first_choices_or_all(void **state) {
  (void)state;
  const double logits[] = {.11, .2, .1, .3, .3, .4, .11, .1, .11, .1, .6, .5, .1, .11, .7, .8};
  for (int first = 0; first < 2; first++) {
    rig_bench b;
    rig_spec spec = spec_of(4, 2);
    spec.gate.aux_coef = 1.0f;
    spec.gate.z_coef = 0.0f;
    spec.gate.aux_first_choice_only = first;
    rig_bench_create_logits(&b, ctx, spec, logits, 4);
    rig_bench_step(&b);
    assert_int_equal(test_compare_one("aux", (double)b.metrics.aux_loss, first ? 1.066840 : 1.033420, 2e-6), 0);
    rig_bench_check(&b);
    rig_bench_destroy(&b);
  }
}

static void test_padded_tokens_counted_in_the_loss(void **state) {
  (void)state;
  const uint8_t mask[] = {1, 1, 1, 1, 0, 0};
  rig_bench b;
  rig_spec spec = spec_of(4, 1);
  spec.gate.aux_coef = 1.0f;
  spec.gate.z_coef = 0.0f;
  rig_bench_create_logits(&b, ctx, spec, top1_logits, 6);
  b.s.step.token_mask = mask;
  b.s.step.token_mask_len = 6;
  rig_bench_forward(&b);
  const int64_t count[] = {3, 1, 0, 0};
  assert_int_equal(test_compare_one("aux", (double)b.metrics.aux_loss, 1.827461, 2e-6), 0);
  assert_int_equal(b.metrics.masked, 2);
  assert_memory_equal(b.routing.expert_count, count, sizeof count);
  for (int i = 4; i < 6; i++) {
    assert_int_equal(b.routing.expert[i], -1);
    assert_int_equal(b.routing.slot[i], -1);
    assert_true(b.routing.weight[i] == 0.0f);
    for (int j = 0; j < 4; j++) assert_true(test_get(b.s.y.data, PMOE_F32, i * 4 + j) == 0.0);
  }
  rig_bench_destroy(&b);
}

/* One token with NaN, +Inf or -Inf among its logits poisons itself alone. */
static void poison_one_token(int kind, float capacity_factor) {
  enum { T = 6, E = 128, K = 8, BAD = 2 };
  double logits[T * E];
  oracle_fill(logits, T * E, 8, 1.0);
  rig_bench b, clean;
  rig_spec spec = spec_of(E, K);
  spec.gate.capacity_factor = capacity_factor;
  spec.a2a.max_tokens = T;
  rig_bench_create_logits(&clean, ctx, spec, logits, T);
  rig_bench_create_logits(&b, ctx, spec, logits, T);
  if (kind > 0) { /* finite inputs whose product overflows */
    float *router = b.r.param[rig_param(&b.r, "router.weight")].data;
    for (int i = 0; i < E; i++) router[i * E + i] = i == 5 ? 4.0f : 1.0f;
    float *same = clean.r.param[rig_param(&clean.r, "router.weight")].data;
    same[5 * E + 5] = 4.0f;
  }
  for (int e = 0; e < E && kind == 0; e++) ((float *)b.s.x.data)[BAD * E + e] = NAN;
  if (kind > 0) ((float *)b.s.x.data)[BAD * E + 5] = kind == 1 ? 3e38f : -3e38f;
  rig_bench_forward(&b);
  rig_bench_forward(&clean);
  assert_int_equal(b.metrics.nonfinite, 1);
  assert_int_equal(clean.metrics.nonfinite, 0);
  assert_true(isfinite(b.metrics.aux_loss) && isfinite(b.metrics.z_loss));
  assert_distinct(&b.routing);
  for (int t = 0; t < T && capacity_factor == 0.0f; t++)
    for (int e = 0; e < E && t != BAD; e++)
      assert_int_equal(test_compare_one("y beside a poisoned token", test_get(b.s.y.data, PMOE_F32, t * E + e),
                                        test_get(clean.s.y.data, PMOE_F32, t * E + e), 1e-5),
                       0);
  int poisoned = 0;
  for (int e = 0; e < E && kind == 0; e++) poisoned += isnan(test_get(b.s.y.data, PMOE_F32, BAD * E + e));
  if (kind == 0) assert_int_equal(poisoned, E);
  assert_ok(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_ALL));
  assert_ok(rig_backward(&clean.r, clean.stash, &clean.s, PMOE_BWD_ALL));
  for (int t = 0; t < T; t++)
    for (int e = 0; e < E && t != BAD; e++) assert_true(isfinite(test_get(b.s.dx.data, PMOE_F32, t * E + e)));
  rig_bench_destroy(&b);
  rig_bench_destroy(&clean);
}

static void test_nan_logits_choose_one_expert_many_times(void **state) {
  (void)state;
  for (int kind = 0; kind < 3; kind++)
    for (int capped = 0; capped < 2; capped++) poison_one_token(kind, capped ? 1.0f : 0.0f);
}

static void test_many_experts_and_many_choices(void **state) {
  (void)state;
  rig_bench b;
  rig_spec spec = spec_of(512, 4);
  spec.gate.bias = 1;
  rig_plan plan = rig_plan_of("case", 20, 40);
  rig_bench_create(&b, ctx, &spec, &plan);
  tensor_of(&b, ORACLE_ROUTER_BIAS)->data[338] = 30.0;
  rig_load(&b.r);
  rig_bench_step(&b);
  for (int t = 0; t < 20; t++) assert_int_equal(b.routing.expert[t * 4], 338);
  rig_bench_check(&b);
  rig_bench_destroy(&b);

  spec = spec_of(2048, 64);
  spec.hidden = 16;
  spec.experts.inner = 4;
  plan = rig_plan_of("case", 5, 40);
  rig_bench_create(&b, ctx, &spec, &plan);
  rig_bench_step(&b);
  assert_distinct(&b.routing);
  rig_bench_check(&b);
  rig_bench_destroy(&b);
}

static void test_router_that_cannot_learn_is_refused(void **state) {
  (void)state;
  for (int i = 0; i < 3; i++) {
    rig_spec spec = spec_of(4, 1);
    if (i == 0) spec.gate.softmax_after_topk = 1;
    if (i == 1) spec.gate.norm = PMOE_NORM_BEFORE_DROP;
    if (i == 2) spec.gate.norm = PMOE_NORM_AFTER_DROP;
    rig r;
    assert_refused(rig_create(&r, ctx, NULL, &spec), PMOE_ERR_ARG, i == 0 ? "softmax_after_topk" : "norm");
  }
}

static void test_experts_that_all_start_equal(void **state) {
  (void)state;
  rig_spec spec = spec_of(4, 2);
  spec.experts.bias = 1;
  rig r;
  assert_ok(rig_create(&r, ctx, NULL, &spec));
  assert_ok(pmoe_layer_init_params(r.layer, 1, 0.5f));
  const pmoe_param *w1 = &r.param[rig_param(&r, "experts.fc1.weight")],
                   *b1 = &r.param[rig_param(&r, "experts.fc1.bias")];
  int64_t n = w1->numel / 4;
  double square = 0.0;
  for (int64_t i = 0; i < w1->numel; i++) square += pow(test_get(w1->data, PMOE_F32, i), 2.0);
  assert_int_equal(test_compare_one("std", sqrt(square / (double)w1->numel), 0.5, 0.08), 0);
  for (int a = 0; a < 4; a++)
    for (int c = 0; c < a; c++)
      assert_memory_not_equal((float *)w1->data + a * n, (float *)w1->data + c * n, (size_t)n * sizeof(float));
  for (int64_t i = 0; i < b1->numel; i++) assert_true(((float *)b1->data)[i] == 0.0f);
  rig_destroy(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_capacity_larger_than_the_token_count),
      cmocka_unit_test(test_capacity_rounding),
      cmocka_unit_test(test_ranking_by_raw_negative_logits),
      cmocka_unit_test(test_capacity_of_a_tiny_batch),
      cmocka_unit_test(test_top1_with_capacity),
      cmocka_unit_test(test_top2_weights_after_a_drop),
      cmocka_unit_test(test_aux_loss_of_first_choices_or_all),
      cmocka_unit_test(test_padded_tokens_counted_in_the_loss),
      cmocka_unit_test(test_nan_logits_choose_one_expert_many_times),
      cmocka_unit_test(test_many_experts_and_many_choices),
      cmocka_unit_test(test_router_that_cannot_learn_is_refused),
      cmocka_unit_test(test_experts_that_all_start_equal),
  };
  return cmocka_run_group_tests(tests, create_ctx, destroy_ctx);
}
