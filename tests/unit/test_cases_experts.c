/* Faults in experts, dense branch, gradients and memory that users of MoE layers have met, each with the small input
 * that shows it. */
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

static void test_coefficient_softmax_over_the_wrong_axis(void **state) {
  (void)state;
  rig_bench b;
  rig_spec spec = spec_of(1, 1);
  spec.hidden = 1;
  spec.experts.inner = spec.residual.inner = 1;
  spec.experts.bias = spec.residual.bias = 1;
  spec.residual.mix = PMOE_MIX_LEARNED;
  const double x[] = {1.0, 0.5, -1.0};
  rig_plan plan = rig_plan_of("case", 3, 40);
  plan.x = x;
  rig_bench_create(&b, ctx, &spec, &plan);
  for (int i = ORACLE_FC1_WEIGHT; i < ORACLE_TENSORS; i++)
    for (int64_t j = 0; j < tensor_of(&b, i)->numel; j++) tensor_of(&b, i)->data[j] = 0.0;
  tensor_of(&b, ORACLE_FC2_BIAS)->data[0] = 2.0;
  tensor_of(&b, ORACLE_MLP_FC2_BIAS)->data[0] = -1.0;
  tensor_of(&b, ORACLE_MIX_WEIGHT)->data[0] = .2;
  tensor_of(&b, ORACLE_MIX_WEIGHT)->data[1] = -.4;
  rig_load(&b.r);
  rig_bench_step(&b);
  assert_int_equal(test_compare_one("y", test_get(b.s.y.data, PMOE_F32, 0), .936969, 1e-6), 0);
  rig_bench_check(&b);
  rig_bench_destroy(&b);
}

static void test_expert_bias_outside_the_weighted_sum(void **state) {
  (void)state;
  rig_bench b;
  rig_spec spec = spec_of(2, 2);
  spec.hidden = 1;
  spec.experts.inner = 1;
  spec.experts.bias = 1;
  const double x[] = {1.0};
  rig_plan plan = rig_plan_of("case", 1, 40);
  plan.x = x;
  rig_bench_create(&b, ctx, &spec, &plan);
  for (int i = ORACLE_FC1_WEIGHT; i < ORACLE_TENSORS; i++)
    for (int64_t j = 0; j < tensor_of(&b, i)->numel; j++) tensor_of(&b, i)->data[j] = 0.0;
  tensor_of(&b, ORACLE_ROUTER_WEIGHT)->data[0] = log(.7);
  tensor_of(&b, ORACLE_ROUTER_WEIGHT)->data[1] = log(.3);
  tensor_of(&b, ORACLE_FC2_BIAS)->data[0] = 10.0;
  tensor_of(&b, ORACLE_FC2_BIAS)->data[1] = 100.0;
  rig_load(&b.r);
  rig_bench_step(&b);
  assert_int_equal(test_compare_one("y", test_get(b.s.y.data, PMOE_F32, 0), 37.0, 1e-4), 0);
  rig_bench_check(&b);
  rig_bench_destroy(&b);
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
  rig_bench whole, parts;
  rig_plan plan = rig_plan_of("case", 8, 40);
  plan.x = x;
  plan.dy = dy;
  rig_bench_create(&whole, ctx, &spec, &plan);
  rig_bench_step(&whole);
  plan.rank_tokens[0] = 4;
  plan.loss_scale = 0.5;
  rig_bench_create(&parts, ctx, &spec, &plan);
  rig_bench_step(&parts);
  rig_step_end(&parts.s);
  plan.x = x + 4 * H;
  plan.dy = dy + 4 * H;
  rig_step_begin(&parts.r, &parts.s, &plan);
  rig_bench_step(&parts);
  for (int32_t p = 0; p < whole.r.num_params; p++) {
    const pmoe_param *a = &whole.r.param[p], *c = &parts.r.param[p];
    for (int64_t i = 0; i < a->numel; i++)
      assert_int_equal(test_compare_one(a->name, test_get(c->grad, PMOE_F32, i), test_get(a->grad, PMOE_F32, i), 2e-5),
                       0);
  }
  rig_bench_destroy(&whole);
  rig_bench_destroy(&parts);
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
    rig_bench b;
    rig_spec spec = spec_of(E, 1);
    spec.experts.dtype = bf16 ? PMOE_BF16 : PMOE_F32;
    spec.experts.bias = 1;
    rig_bench_create_logits(&b, ctx, spec, logits, T);
    for (int32_t p = 0; p < b.r.num_params; p++) {
      const pmoe_param *param = &b.r.param[p];
      for (int64_t i = 0; i < param->numel && param->first_expert >= 0; i++)
        if (i / (param->numel / E) % 3 == 1) ((float *)param->grad)[i] = 3.25f; /* experts 1 and 4 */
    }
    rig_bench_step(&b);
    for (int e = 0; e < E; e++) assert_int_equal(b.routing.expert_rows[e], rows[e]);
    for (int32_t p = 0; p < b.r.num_params; p++) {
      const pmoe_param *param = &b.r.param[p];
      for (int64_t i = 0; i < param->numel && param->first_expert >= 0; i++)
        if (i / (param->numel / E) % 3 == 1) {
          assert_true(((float *)param->grad)[i] == 3.25f);
          ((float *)param->grad)[i] = 0.0f;
        }
    }
    rig_bench_check(&b);
    rig_bench_destroy(&b);
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
    rig_plan plan = rig_plan_of("case", tokens, 40);
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
    rig_bench b;
    rig_spec spec = spec_of(E, 1);
    spec.hidden = hidden;
    spec.experts.inner = 33;
    spec.experts.act = PMOE_ACT_SWIGLU;
    spec.experts.dtype = i % 2 ? PMOE_BF16 : PMOE_F32;
    rig_plan plan = rig_plan_of("case", T, 40);
    plan.x = x;
    rig_bench_create(&b, ctx, &spec, &plan);
    double *router = tensor_of(&b, ORACLE_ROUTER_WEIGHT)->data;
    for (int32_t j = 0; j < E * hidden; j++) router[j] = j / hidden == j % hidden;
    rig_load(&b.r);
    rig_bench_step(&b);
    for (int e = 0; e < E; e++) assert_int_equal(b.routing.expert_rows[e], rows[e]);
    rig_bench_check(&b);
    rig_bench_destroy(&b);
    free(x);
  }
}

/* Sums in bf16 would be off by several per cent here. */
static void test_bf16_sums_that_lose_accuracy(void **state) {
  (void)state;
  enum { H = 256, T = 6 };
  rig_bench b;
  rig_spec spec = spec_of(16, 8);
  spec.hidden = H;
  spec.experts.inner = 256;
  spec.experts.dtype = PMOE_BF16;
  rig_plan plan = rig_plan_of("case", T, 40);
  rig_bench_create(&b, ctx, &spec, &plan);
  rig_bench_step(&b);
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
  rig_bench_destroy(&b);
}

int main(void) {
  const struct CMUnitTest tests[] = {
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
