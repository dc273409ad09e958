/* Faults that users of MoE layers have met, each with the small input that shows it. Elsewhere: exchange and layout
 * over ranks (ranks/test_cases_ranks.c), allocation (test_layer_memory.c), repeats and evaluation (test_layer_laws.c),
 * odd and empty sizes (test_layer.c). */
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

/* A layer, one stash and one micro-batch. */
typedef struct bench {
  rig r;
  rig_step s;
  pmoe_stash *stash;
  pmoe_routing routing;
  pmoe_metrics metrics;
} bench;

static void set_up(bench *b, const rig_spec *spec, const rig_plan *plan) {
  assert_ok(rig_create(&b->r, ctx, NULL, spec));
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = plan->rank_tokens[0];
  assert_ok(pmoe_stash_create(b->r.layer, &cfg, NULL, 0, &b->stash));
  rig_step_begin(&b->r, &b->s, plan);
}

static void forward(bench *b) {
  assert_ok(rig_forward(&b->r, b->stash, &b->s));
  b->routing = (pmoe_routing)PMOE_CONFIG_INIT(pmoe_routing);
  b->metrics = (pmoe_metrics)PMOE_CONFIG_INIT(pmoe_metrics);
  assert_ok(pmoe_stash_routing(b->stash, &b->routing));
  assert_ok(pmoe_stash_metrics(b->stash, &b->metrics));
}

static void forward_and_back(bench *b) {
  forward(b);
  assert_ok(rig_backward(&b->r, b->stash, &b->s, PMOE_BWD_ALL));
}

/* Outputs and every gradient against the reference. */
static void check(bench *b) {
  assert_int_equal(rig_check(&b->r, b->stash, &b->s, 1) + rig_check_grads(&b->r, 1.0, "case"), 0);
}

static void take_down(bench *b) {
  rig_step_end(&b->s);
  pmoe_stash_destroy(b->stash);
  rig_destroy(&b->r);
}

static rig_plan plan_of(int64_t tokens) {
  rig_plan plan = {.label = "case", .rank_tokens = {tokens}, .training = 1, .loss_scale = 1.0, .seed = 40};
  return plan;
}

static rig_spec spec_of(int32_t num_experts, int32_t top_k) {
  rig_spec spec = rig_spec_default();
  spec.gate.num_experts = num_experts;
  spec.gate.top_k = top_k;
  return spec;
}

static oracle_tensor *tensor_of(bench *b, int which) { return &b->r.model->tensor[which]; }

/* H = E and the router's weight is the identity: the rows of x are the logits. */
static void set_up_logits(bench *b, rig_spec spec, const double *logits, int64_t tokens) {
  int32_t e = spec.gate.num_experts;
  spec.hidden = e;
  rig_plan plan = plan_of(tokens);
  plan.x = logits;
  set_up(b, &spec, &plan);
  double *router = tensor_of(b, ORACLE_ROUTER_WEIGHT)->data;
  for (int32_t i = 0; i < e * e; i++) router[i] = i / e == i % e;
  rig_load(&b->r);
}

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
    bench b;
    rig_spec spec = spec_of(cases[i % 3].e, cases[i % 3].k);
    spec.gate.capacity_factor = cases[i % 3].factor;
    spec.gate.drop = (pmoe_drop)(i / 3);
    rig_plan plan = plan_of(cases[i % 3].tokens);
    set_up(&b, &spec, &plan);
    forward_and_back(&b);
    assert_int_equal(b.routing.capacity, cases[i % 3].capacity);
    assert_int_equal(b.metrics.dropped, 0);
    assert_int_equal(b.metrics.routed, cases[i % 3].tokens * cases[i % 3].k);
    if (spec.gate.drop != PMOE_DROP_RANDOM) check(&b);
    take_down(&b);
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
    bench b;
    rig_spec spec = spec_of(E, 4);
    spec.gate.capacity_factor = 1.0f;
    spec.gate.drop = (pmoe_drop)drop;
    set_up_logits(&b, spec, logits, T);
    forward_and_back(&b);
    int64_t kept = 0;
    for (int e = 0; e < E; e++) kept += b.routing.expert_count[e] < 16 ? b.routing.expert_count[e] : 16;
    assert_int_equal(b.routing.capacity, 16);
    assert_int_equal(b.metrics.routed, kept);
    assert_int_equal(b.metrics.dropped, T * 4 - kept);
    check(&b);
    take_down(&b);
  }
}

static void test_capacity_of_a_tiny_batch(void **state) {
  (void)state;
  bench b;
  rig_spec spec = spec_of(4, 1);
  spec.gate.capacity_factor = 0.5f;
  rig_plan plan = plan_of(1);
  set_up(&b, &spec, &plan);
  forward_and_back(&b);
  assert_int_equal(b.routing.capacity, 1);
  assert_int_equal(b.metrics.routed, 1);
  check(&b);
  take_down(&b);
}

static const double top1_logits[] = {2, 1, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0, 2, 0, 0, 1.5, 1, 0, 0, 0, 0, 1, 0};

static void test_top1_with_capacity(void **state) {
  (void)state;
  bench b;
  rig_spec spec = spec_of(4, 1);
  spec.gate.capacity_factor = 1.0f;
  spec.gate.aux_coef = 1.0f;
  spec.gate.z_coef = 0.0f;
  set_up_logits(&b, spec, top1_logits, 6);
  forward_and_back(&b);
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
  check(&b);
  take_down(&b);
}

static void test_top2_weights_after_a_drop(void **state) {
  (void)state;
  const double logits[] = {.1, .9, .2, .8, .1, .3, .4, .6, .5, .7, .2, .1};
  const double after[] = {.668188, .331812, .622459, .377541, 1, 0, 1, 0};
  const double before[] = {.668188, .331812, .622459, .377541, .524979, 0, .622459, 0};
  for (int i = 0; i < 2; i++) {
    bench b;
    rig_spec spec = spec_of(3, 2);
    spec.gate.capacity_factor = 0.5f;
    spec.gate.norm = i ? PMOE_NORM_BEFORE_DROP : PMOE_NORM_AFTER_DROP;
    set_up_logits(&b, spec, logits, 4);
    forward_and_back(&b);
    assert_int_equal(b.routing.capacity, 2);
    for (int c = 0; c < 8; c++)
      assert_int_equal(test_compare_one("weight", (double)b.routing.weight[c], i ? before[c] : after[c], 1e-6), 0);
    check(&b);
    take_down(&b);
  }
}

static void test_aux_loss_of_first_choices_or_all(void **state) {
  (void)state;
  const double logits[] = {.11, .2, .1, .3, .3, .4, .11, .1, .11, .1, .6, .5, .1, .11, .7, .8};
  for (int first = 0; first < 2; first++) {
    bench b;
    rig_spec spec = spec_of(4, 2);
    spec.gate.aux_coef = 1.0f;
    spec.gate.z_coef = 0.0f;
    spec.gate.aux_first_choice_only = first;
    set_up_logits(&b, spec, logits, 4);
    forward_and_back(&b);
    assert_int_equal(test_compare_one("aux", (double)b.metrics.aux_loss, first ? 1.066840 : 1.033420, 2e-6), 0);
    check(&b);
    take_down(&b);
  }
}

static void test_padded_tokens_counted_in_the_loss(void **state) {
  (void)state;
  const uint8_t mask[] = {1, 1, 1, 1, 0, 0};
  bench b;
  rig_spec spec = spec_of(4, 1);
  spec.gate.aux_coef = 1.0f;
  spec.gate.z_coef = 0.0f;
  set_up_logits(&b, spec, top1_logits, 6);
  b.s.step.token_mask = mask;
  b.s.step.token_mask_len = 6;
  forward(&b);
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
  take_down(&b);
}

/* One token with NaN, +Inf or -Inf among its logits poisons itself alone. */
static void poison_one_token(int kind, float capacity_factor) {
  enum { T = 6, E = 128, K = 8, BAD = 2 };
  double logits[T * E];
  oracle_fill(logits, T * E, 8, 1.0);
  bench b, clean;
  rig_spec spec = spec_of(E, K);
  spec.gate.capacity_factor = capacity_factor;
  spec.a2a.max_tokens = T;
  set_up_logits(&clean, spec, logits, T);
  set_up_logits(&b, spec, logits, T);
  if (kind > 0) { /* finite inputs whose product overflows */
    float *router = b.r.param[rig_param(&b.r, "router.weight")].data;
    for (int i = 0; i < E; i++) router[i * E + i] = i == 5 ? 4.0f : 1.0f;
    float *same = clean.r.param[rig_param(&clean.r, "router.weight")].data;
    same[5 * E + 5] = 4.0f;
  }
  for (int e = 0; e < E && kind == 0; e++) ((float *)b.s.x.data)[BAD * E + e] = NAN;
  if (kind > 0) ((float *)b.s.x.data)[BAD * E + 5] = kind == 1 ? 3e38f : -3e38f;
  forward(&b);
  forward(&clean);
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
  take_down(&b);
  take_down(&clean);
}

static void test_nan_logits_choose_one_expert_many_times(void **state) {
  (void)state;
  for (int kind = 0; kind < 3; kind++)
    for (int capped = 0; capped < 2; capped++) poison_one_token(kind, capped ? 1.0f : 0.0f);
}

static void test_many_experts_and_many_choices(void **state) {
  (void)state;
  bench b;
  rig_spec spec = spec_of(512, 4);
  spec.gate.bias = 1;
  rig_plan plan = plan_of(20);
  set_up(&b, &spec, &plan);
  tensor_of(&b, ORACLE_ROUTER_BIAS)->data[338] = 30.0;
  rig_load(&b.r);
  forward_and_back(&b);
  for (int t = 0; t < 20; t++) assert_int_equal(b.routing.expert[t * 4], 338);
  check(&b);
  take_down(&b);

  spec = spec_of(2048, 64);
  spec.hidden = 16;
  spec.experts.inner = 4;
  plan = plan_of(5);
  set_up(&b, &spec, &plan);
  forward_and_back(&b);
  assert_distinct(&b.routing);
  check(&b);
  take_down(&b);
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

static void test_coefficient_softmax_over_the_wrong_axis(void **state) {
  (void)state;
  bench b;
  rig_spec spec = spec_of(1, 1);
  spec.hidden = 1;
  spec.experts.inner = spec.residual.inner = 1;
  spec.experts.bias = spec.residual.bias = 1;
  spec.residual.mix = PMOE_MIX_LEARNED;
  const double x[] = {1.0, 0.5, -1.0};
  rig_plan plan = plan_of(3);
  plan.x = x;
  set_up(&b, &spec, &plan);
  for (int i = ORACLE_FC1_WEIGHT; i < ORACLE_TENSORS; i++)
    for (int64_t j = 0; j < tensor_of(&b, i)->numel; j++) tensor_of(&b, i)->data[j] = 0.0;
  tensor_of(&b, ORACLE_FC2_BIAS)->data[0] = 2.0;
  tensor_of(&b, ORACLE_MLP_FC2_BIAS)->data[0] = -1.0;
  tensor_of(&b, ORACLE_MIX_WEIGHT)->data[0] = .2;
  tensor_of(&b, ORACLE_MIX_WEIGHT)->data[1] = -.4;
  rig_load(&b.r);
  forward_and_back(&b);
  assert_int_equal(test_compare_one("y", test_get(b.s.y.data, PMOE_F32, 0), .936969, 1e-6), 0);
  check(&b);
  take_down(&b);
}

static void test_expert_bias_outside_the_weighted_sum(void **state) {
  (void)state;
  bench b;
  rig_spec spec = spec_of(2, 2);
  spec.hidden = 1;
  spec.experts.inner = 1;
  spec.experts.bias = 1;
  const double x[] = {1.0};
  rig_plan plan = plan_of(1);
  plan.x = x;
  set_up(&b, &spec, &plan);
  for (int i = ORACLE_FC1_WEIGHT; i < ORACLE_TENSORS; i++)
    for (int64_t j = 0; j < tensor_of(&b, i)->numel; j++) tensor_of(&b, i)->data[j] = 0.0;
  tensor_of(&b, ORACLE_ROUTER_WEIGHT)->data[0] = log(.7);
  tensor_of(&b, ORACLE_ROUTER_WEIGHT)->data[1] = log(.3);
  tensor_of(&b, ORACLE_FC2_BIAS)->data[0] = 10.0;
  tensor_of(&b, ORACLE_FC2_BIAS)->data[1] = 100.0;
  rig_load(&b.r);
  forward_and_back(&b);
  assert_int_equal(test_compare_one("y", test_get(b.s.y.data, PMOE_F32, 0), 37.0, 1e-4), 0);
  check(&b);
  take_down(&b);
}

/* 1 x 8 tokens against 2 x 4: halves with the same load, so that the mean of the parts' losses is the loss of the
 * whole. */
static void test_aux_gradient_depends_on_micro_batches(void **state) {
  (void)state;
  enum { H = 12 };
  double x[8 * H], dy[8 * H];
  oracle_fill(x, 4 * H, 5, 1.0);
  oracle_fill(dy, 8 * H, 6, 1.0);
  for (int t = 0; t < 4; t++) memcpy(x + (4 + (t + 1) % 4) * H, x + t * H, H * sizeof *x);
  rig_spec spec = spec_of(4, 2);
  bench whole, parts;
  rig_plan plan = plan_of(8);
  plan.x = x;
  plan.dy = dy;
  set_up(&whole, &spec, &plan);
  forward_and_back(&whole);
  plan.rank_tokens[0] = 4;
  plan.loss_scale = 0.5;
  set_up(&parts, &spec, &plan);
  forward_and_back(&parts);
  rig_step_end(&parts.s);
  plan.x = x + 4 * H;
  plan.dy = dy + 4 * H;
  rig_step_begin(&parts.r, &parts.s, &plan);
  forward_and_back(&parts);
  for (int32_t p = 0; p < whole.r.num_params; p++) {
    const pmoe_param *a = &whole.r.param[p], *c = &parts.r.param[p];
    for (int64_t i = 0; i < a->numel; i++)
      assert_int_equal(test_compare_one(a->name, test_get(c->grad, PMOE_F32, i), test_get(a->grad, PMOE_F32, i), 2e-5),
                       0);
  }
  take_down(&whole);
  take_down(&parts);
}

/* Weight gradients of experts without rows keep what the host put there, and are left alone whatever lies in memory. */
static void test_weight_gradient_of_an_empty_expert(void **state) {
  (void)state;
  enum { E = 6, H = 6, T = 125 };
  const int rows[E] = {16, 0, 57, 44, 0, 8};
  double logits[T * H];
  oracle_fill(logits, T * H, 3, 0.1);
  for (int e = 0, t = 0; e < E; e++)
    for (int i = 0; i < rows[e]; i++, t++) logits[t * H + e] += 5.0;
  for (int bf16 = 0; bf16 < 2; bf16++) {
    bench b;
    rig_spec spec = spec_of(E, 1);
    spec.experts.dtype = bf16 ? PMOE_BF16 : PMOE_F32;
    spec.experts.bias = 1;
    set_up_logits(&b, spec, logits, T);
    for (int32_t p = 0; p < b.r.num_params; p++) {
      const pmoe_param *param = &b.r.param[p];
      for (int64_t i = 0; i < param->numel && param->first_expert >= 0; i++)
        if (i / (param->numel / E) % 3 == 1) ((float *)param->grad)[i] = 3.25f; /* experts 1 and 4 */
    }
    forward_and_back(&b);
    for (int e = 0; e < E; e++) assert_int_equal(b.routing.expert_rows[e], rows[e]);
    for (int32_t p = 0; p < b.r.num_params; p++) {
      const pmoe_param *param = &b.r.param[p];
      for (int64_t i = 0; i < param->numel && param->first_expert >= 0; i++)
        if (i / (param->numel / E) % 3 == 1) {
          assert_true(((float *)param->grad)[i] == 3.25f);
          ((float *)param->grad)[i] = 0.0f;
        }
    }
    check(&b);
    take_down(&b);
  }
}

/* Fixed sizing with most slots empty, in memory that is NaN before every step. */
static void poisoned_steps(rig_spec spec, int64_t max_tokens, int64_t tokens, int steps) {
  spec.a2a.sizing = PMOE_SIZING_FIXED;
  spec.a2a.max_tokens = max_tokens;
  rig r;
  assert_ok(rig_create(&r, ctx, NULL, &spec));
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = max_tokens;
  size_t bytes, scratch_bytes;
  assert_ok(pmoe_stash_bytes(r.layer, &cfg, &bytes));
  assert_ok(pmoe_layer_scratch_bytes(r.layer, &cfg, &scratch_bytes));
  void *mem = NULL, *scratch = NULL;
  assert_int_equal(posix_memalign(&mem, 64, bytes), 0);
  assert_int_equal(posix_memalign(&scratch, 64, scratch_bytes), 0);
  pmoe_stash *stash;
  assert_ok(pmoe_stash_create(r.layer, &cfg, mem, bytes, &stash));
  assert_ok(pmoe_ctx_set_scratch(ctx, scratch, scratch_bytes));
  for (int i = 0; i < steps; i++) {
    rig_plan plan = plan_of(tokens);
    plan.seed += (uint64_t)i;
    rig_step s;
    rig_step_begin(&r, &s, &plan);
    rig_zero_grads(&r);
    test_poison(mem, bytes);
    test_poison(scratch, scratch_bytes);
    assert_ok(rig_forward(&r, stash, &s));
    test_poison(scratch, scratch_bytes);
    assert_ok(rig_backward(&r, stash, &s, PMOE_BWD_ALL));
    assert_int_equal(rig_check(&r, stash, &s, 1) + rig_check_grads(&r, 1.0, "poisoned"), 0);
    rig_step_end(&s);
  }
  assert_ok(pmoe_ctx_set_scratch(ctx, NULL, 0));
  pmoe_stash_destroy(stash);
  rig_destroy(&r);
  free(mem);
  free(scratch);
}

static void test_rows_past_the_last_offset_poison_the_next_step(void **state) {
  (void)state;
  rig_spec spec = spec_of(4, 2);
  spec.hidden = 4;
  spec.gate.capacity_factor = 2.0f;
  spec.residual.mix = PMOE_MIX_LEARNED;
  poisoned_steps(spec, 8, 8, 3);
  spec.experts.dtype = PMOE_BF16;
  poisoned_steps(spec, 8, 8, 3);
}

static void test_a_padded_tail_that_is_contracted_over(void **state) {
  (void)state;
  rig_spec spec = spec_of(1, 1);
  spec.gate.capacity_factor = 1.0f;
  spec.experts.bias = 1;
  poisoned_steps(spec, 128, 100, 2);
  spec.experts.dtype = PMOE_BF16;
  poisoned_steps(spec, 128, 100, 2);
}

static void test_group_bounds_rounded_to_a_tile(void **state) {
  (void)state;
  enum { E = 3, T = 128 + 130 + 65 };
  const int rows[E] = {128, 130, 65};
  for (int i = 0; i < 4; i++) {
    int32_t hidden = i / 2 ? 40 : E;
    double *x = calloc((size_t)(T * hidden), sizeof *x);
    oracle_fill(x, T * hidden, 3, 0.1);
    for (int e = 0, t = 0; e < E; e++)
      for (int n = 0; n < rows[e]; n++, t++) x[t * hidden + e] += 3.0;
    bench b;
    rig_spec spec = spec_of(E, 1);
    spec.hidden = hidden;
    spec.experts.inner = 33;
    spec.experts.act = PMOE_ACT_SWIGLU;
    spec.experts.dtype = i % 2 ? PMOE_BF16 : PMOE_F32;
    rig_plan plan = plan_of(T);
    plan.x = x;
    set_up(&b, &spec, &plan);
    double *router = tensor_of(&b, ORACLE_ROUTER_WEIGHT)->data;
    for (int32_t j = 0; j < E * hidden; j++) router[j] = j / hidden == j % hidden;
    rig_load(&b.r);
    forward_and_back(&b);
    for (int e = 0; e < E; e++) assert_int_equal(b.routing.expert_rows[e], rows[e]);
    check(&b);
    take_down(&b);
    free(x);
  }
}

/* Sums in bf16 would be off by several per cent here. */
static void test_bf16_sums_that_lose_accuracy(void **state) {
  (void)state;
  enum { H = 256, T = 6 };
  bench b;
  rig_spec spec = spec_of(16, 8);
  spec.hidden = H;
  spec.experts.inner = 256;
  spec.experts.dtype = PMOE_BF16;
  rig_plan plan = plan_of(T);
  set_up(&b, &spec, &plan);
  forward_and_back(&b);
  oracle_batch batch = {.tokens = T, .training = 1, .loss_scale = 1.0, .x = b.s.x_all, .dy = b.s.dy_all};
  oracle_result *expected = oracle_run(b.r.model, &batch);
  const double *values[] = {expected->y, expected->dx};
  const pmoe_mat *got[] = {&b.s.y, &b.s.dx};
  for (int m = 0; m < 2; m++) {
    double error = 0.0, square = 0.0;
    for (int i = 0; i < T * H; i++) {
      error += pow(test_get(got[m]->data, PMOE_BF16, i) - values[m][i], 2.0);
      square += pow(values[m][i], 2.0);
    }
    assert_int_equal(test_compare_one(m ? "dx" : "y", sqrt(error / square), 0.0, 6e-3), 0);
  }
  oracle_result_destroy(expected);
  take_down(&b);
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
      cmocka_unit_test(test_coefficient_softmax_over_the_wrong_axis),
      cmocka_unit_test(test_expert_bias_outside_the_weighted_sum),
      cmocka_unit_test(test_aux_gradient_depends_on_micro_batches),
      cmocka_unit_test(test_weight_gradient_of_an_empty_expert),
      cmocka_unit_test(test_rows_past_the_last_offset_poison_the_next_step),
      cmocka_unit_test(test_a_padded_tail_that_is_contracted_over),
      cmocka_unit_test(test_group_bounds_rounded_to_a_tile),
      cmocka_unit_test(test_bf16_sums_that_lose_accuracy),
  };
  return cmocka_run_group_tests(tests, create_ctx, destroy_ctx);
}
