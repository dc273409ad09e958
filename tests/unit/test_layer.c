/* The layer on one rank against the reference: outputs, every gradient, routing, losses and metrics over the
 * combinations. */
#include "support/asserts.h"

#include <math.h>
#include <stdlib.h>

#include "support/rig.h"

static pmoe_ctx *ctx;

static int create_ctx(void **state) {
  (void)state;
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 2;
  cfg.seed = 3;
  return pmoe_ctx_create(&cfg, &ctx) == PMOE_OK ? 0 : -1;
}

static int destroy_ctx(void **state) {
  (void)state;
  pmoe_ctx_destroy(ctx);
  return 0;
}

static void run_spec(const rig_spec *spec, const rig_plan *plan, int split) {
  rig r;
  assert_ok(rig_create(&r, ctx, NULL, spec));
  assert_int_equal(rig_run(&r, plan, split, 0), 0);
  rig_destroy(&r);
}

static rig_plan plan_of(const char *label, int64_t tokens, uint64_t seed) {
  rig_plan plan = {.label = label, .rank_tokens = {tokens}, .training = 1, .loss_scale = 1.0, .seed = seed};
  return plan;
}

static void test_experts_and_branches(void **state) {
  (void)state;
  char label[96];
  for (int i = 0; i < 6 * 4 * 2 * 2 * 2; i++) {
    pmoe_act act = (pmoe_act)(i % 6);
    pmoe_mix mix = (pmoe_mix)(i / 6 % 4);
    int recompute = i / 24 % 2, split = i / 48 % 2;
    rig_spec spec = rig_spec_default();
    spec.experts.act = act;
    spec.experts.bias = (i / 6 + i) % 2;
    spec.experts.recompute_act = recompute;
    spec.experts.dtype = i / 96 ? PMOE_BF16 : PMOE_F32;
    spec.experts.grad_dtype = i / 96 && i % 4 == 1 ? PMOE_BF16 : PMOE_F32;
    spec.residual.mix = mix;
    spec.residual.act = (pmoe_act)((i + 1) % 6);
    spec.residual.bias = i % 2;
    snprintf(label, sizeof label, "act %d mix %d recompute %d split %d %s", act, mix, recompute, split,
             pmoe_dtype_name(spec.experts.dtype));
    rig_plan plan = plan_of(label, 13, 100 + (uint64_t)i);
    plan.pad = i % 3;
    plan.masked = i % 5 == 0;
    run_spec(&spec, &plan, split);
  }
}

typedef struct router_mode {
  int32_t after;
  pmoe_norm norm;
} router_mode;

static const router_mode router_modes[] = {{0, PMOE_NORM_NONE},
                                           {0, PMOE_NORM_BEFORE_DROP},
                                           {0, PMOE_NORM_AFTER_DROP},
                                           {1, PMOE_NORM_NONE},
                                           {1, PMOE_NORM_AFTER_DROP}};

/* capacity: 0 dropless, then one per drop policy. */
static void run_router(const router_mode *mode, int32_t top_k, int capacity, int masked, int training,
                       pmoe_dtype dtype) {
  char label[128];
  rig_spec spec = rig_spec_default();
  spec.gate.num_experts = 5;
  spec.gate.top_k = top_k;
  spec.gate.softmax_after_topk = mode->after;
  spec.gate.norm = mode->norm;
  spec.gate.aux_first_choice_only = capacity % 2;
  spec.gate.bias = masked;
  spec.gate.weight_scale = masked ? 1.7f : 0.0f;
  spec.experts.act = PMOE_ACT_SILU;
  spec.experts.dtype = dtype;
  spec.experts.bias = 1;
  spec.residual.mix = masked ? PMOE_MIX_LEARNED : PMOE_MIX_NONE;
  if (capacity > 0) {
    spec.gate.capacity_factor = 0.7f;
    spec.gate.eval_capacity_factor = 0.4f;
    spec.gate.min_capacity = 2;
    spec.gate.drop = (pmoe_drop)(capacity - 1);
  }
  snprintf(label, sizeof label, "after %d norm %d K %d capacity %d masked %d training %d %s", mode->after, mode->norm,
           top_k, capacity, masked, training, pmoe_dtype_name(dtype));
  rig_plan plan = plan_of(label, 17, 50 + (uint64_t)(top_k * 10 + capacity));
  plan.loss_scale = 0.75;
  plan.masked = masked;
  plan.training = training;
  plan.replay = capacity == 3 && training; /* random drops; evaluation drops by position instead */
  run_spec(&spec, &plan, 0);
}

static void test_router_modes(void **state) {
  (void)state;
  const int32_t top_k[] = {1, 2, 5};
  for (size_t m = 0; m < sizeof router_modes / sizeof router_modes[0]; m++)
    for (int i = 0; i < 3 * 4 * 2 * 2 * 2; i++) {
      int32_t k = top_k[i % 3];
      if (k == 1 && (router_modes[m].after || router_modes[m].norm != PMOE_NORM_NONE))
        continue; /* refused: constant weights */
      run_router(&router_modes[m], k, i / 3 % 4, i / 12 % 2, i / 24 % 2, i / 48 ? PMOE_BF16 : PMOE_F32);
    }
}

static void test_odd_and_large_sizes(void **state) {
  (void)state;
  const int32_t sizes[][5] = {/* H F E K T */ {5, 3, 3, 2, 11},
                              {1, 1, 1, 1, 1},
                              {1001, 17, 4, 2, 9},
                              {64, 33, 16, 8, 70},
                              {16, 8, 512, 4, 40},
                              {33, 129, 2, 1, 300}};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
    for (int bf16 = 0; bf16 < 2; bf16++) {
      char label[64];
      rig_spec spec = rig_spec_default();
      spec.hidden = sizes[i][0];
      spec.experts.inner = sizes[i][1];
      spec.experts.act = PMOE_ACT_SWIGLU;
      spec.experts.dtype = bf16 ? PMOE_BF16 : PMOE_F32;
      spec.gate.num_experts = sizes[i][2];
      spec.gate.top_k = sizes[i][3];
      snprintf(label, sizeof label, "H%d F%d E%d K%d T%d %s", sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3],
               sizes[i][4], pmoe_dtype_name(spec.experts.dtype));
      rig_plan plan = plan_of(label, sizes[i][4], 900 + i);
      run_spec(&spec, &plan, (int)i % 2);
    }
}

/* The objective through the library's own forward. */
static double objective(rig *r, pmoe_stash *stash, rig_step *s) {
  assert_ok(rig_forward(r, stash, s));
  double sum = 0.0;
  for (int64_t i = 0; i < s->tokens * r->spec.hidden; i++) sum += s->dy_all[i] * test_get(s->y.data, PMOE_F32, i);
  pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
  assert_ok(pmoe_stash_metrics(stash, &m));
  return sum + s->plan.loss_scale * ((double)m.aux_loss + (double)m.z_loss);
}

typedef struct slope_count {
  int64_t checked, skipped;
} slope_count;

/* Differences around one float; passed over when a choice flips. */
static void check_slope(rig *r, pmoe_stash *stash, rig_step *s, float *at, double gradient, const int32_t *choices,
                        const char *what, slope_count *count) {
  const double step[] = {-0.04, -0.02, 0.02, 0.04};
  double value[4], kept = (double)*at;
  int flipped = 0;
  pmoe_routing routing = PMOE_CONFIG_INIT(pmoe_routing);
  for (int i = 0; i < 4; i++) {
    *at = (float)(kept + step[i]);
    value[i] = objective(r, stash, s);
    assert_ok(pmoe_stash_routing(stash, &routing));
    flipped |= memcmp(choices, routing.expert, (size_t)(s->tokens * routing.top_k) * sizeof *choices) != 0;
  }
  *at = (float)kept;
  count->skipped += flipped;
  if (flipped) return;
  count->checked++;
  double slope = (value[0] - 8 * value[1] + 8 * value[2] - value[3]) / (12 * 0.02);
  if (!(fabs(slope - gradient) <= 2e-3 * (1.0 + fabs(slope))))
    fail_msg("%s: %.8g, differences give %.8g", what, gradient, slope);
}

static void test_gradients_by_finite_differences(void **state) {
  (void)state;
  rig_spec spec = rig_spec_default();
  spec.hidden = 4;
  spec.experts.inner = 3;
  spec.experts.act = PMOE_ACT_SWIGLU;
  spec.experts.bias = 1;
  spec.gate.bias = 1;
  spec.gate.norm = PMOE_NORM_AFTER_DROP;
  spec.residual.mix = PMOE_MIX_LEARNED;
  spec.residual.bias = 1;
  rig r;
  assert_ok(rig_create(&r, ctx, NULL, &spec));
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = 6;
  pmoe_stash *stash;
  assert_ok(pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash));
  rig_plan plan = plan_of("differences", 6, 77);
  rig_step s;
  rig_step_begin(&r, &s, &plan);
  assert_ok(rig_forward(&r, stash, &s));
  rig_replay(&r, stash, &s);
  assert_ok(rig_backward(&r, stash, &s, PMOE_BWD_ALL));
  slope_count count = {0, 0};
  for (int32_t p = 0; p < r.num_params; p++)
    for (int64_t i = 0; i < r.param[p].numel; i++)
      check_slope(&r, stash, &s, (float *)r.param[p].data + i, test_get(r.param[p].grad, PMOE_F32, i), s.given_expert,
                  r.param[p].name, &count);
  for (int64_t i = 0; i < s.tokens * spec.hidden; i++)
    check_slope(&r, stash, &s, (float *)s.x.data + i, test_get(s.dx.data, PMOE_F32, i), s.given_expert, "dx", &count);
  assert_true(count.skipped * 10 < count.checked);
  rig_step_end(&s);
  pmoe_stash_destroy(stash);
  rig_destroy(&r);
}

static void test_sizes_change_from_step_to_step(void **state) {
  (void)state;
  for (int i = 0; i < 4; i++) {
    rig_spec spec = rig_spec_default();
    spec.experts.dtype = i % 2 ? PMOE_BF16 : PMOE_F32;
    spec.a2a.sizing = i / 2 ? PMOE_SIZING_FIXED : PMOE_SIZING_EAGER;
    spec.a2a.max_tokens = i / 2 ? 24 : 0;
    spec.a2a.max_recv_rows = i / 2 ? 48 : 0;
    spec.residual.mix = PMOE_MIX_GATED_SUM;
    rig r;
    assert_ok(rig_create(&r, ctx, NULL, &spec));
    pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
    cfg.max_tokens = 24;
    pmoe_stash *stash;
    assert_ok(pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash));
    const int64_t sizes[] = {16, 24, 16, 0, 1, 0, 24};
    for (int n = 0; n < 7; n++) {
      rig_plan plan = plan_of("changing sizes", sizes[n], 400 + (uint64_t)n);
      rig_step s;
      rig_step_begin(&r, &s, &plan);
      rig_zero_grads(&r);
      assert_ok(rig_forward(&r, stash, &s));
      assert_ok(rig_backward(&r, stash, &s, PMOE_BWD_ALL));
      assert_int_equal(rig_check(&r, stash, &s, 1) + rig_check_grads(&r, 1.0, "changing sizes"), 0);
      rig_step_end(&s);
    }
    pmoe_stash_destroy(stash);
    rig_destroy(&r);
  }
}

static void test_no_tokens_at_all(void **state) {
  (void)state;
  for (int split = 0; split < 2; split++) {
    rig_spec spec = rig_spec_default();
    spec.residual.mix = PMOE_MIX_LEARNED;
    spec.gate.capacity_factor = split ? 1.0f : 0.0f;
    rig_plan plan = plan_of("no tokens", 0, 1);
    run_spec(&spec, &plan, split);
  }
}

static void test_every_token_masked(void **state) {
  (void)state;
  rig_spec spec = rig_spec_default();
  spec.residual.mix = PMOE_MIX_SUM;
  rig r;
  assert_ok(rig_create(&r, ctx, NULL, &spec));
  rig_plan plan = plan_of("all masked", 5, 1);
  plan.masked = 1;
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = 5;
  pmoe_stash *stash;
  assert_ok(pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash));
  rig_step s;
  rig_step_begin(&r, &s, &plan);
  memset(s.mask_all, 0, 5);
  assert_ok(rig_forward(&r, stash, &s));
  assert_ok(rig_backward(&r, stash, &s, PMOE_BWD_ALL));
  assert_int_equal(rig_check(&r, stash, &s, 1) + rig_check_grads(&r, 1.0, "all masked"), 0);
  rig_step_end(&s);
  pmoe_stash_destroy(stash);
  rig_destroy(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_experts_and_branches),
      cmocka_unit_test(test_router_modes),
      cmocka_unit_test(test_odd_and_large_sizes),
      cmocka_unit_test(test_gradients_by_finite_differences),
      cmocka_unit_test(test_sizes_change_from_step_to_step),
      cmocka_unit_test(test_no_tokens_at_all),
      cmocka_unit_test(test_every_token_masked),
  };
  return cmocka_run_group_tests(tests, create_ctx, destroy_ctx);
}
