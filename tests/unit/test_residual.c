/* The residual branch: its MLP, its coefficients, and their gradients. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "moe/ops.h"
#include "support/experts_ref.h"
#include "support/residual_problem.h"

/* c0 and c1 of token t, with weights and x in double. */
static void coefficients(const problem *p, const double *x64, const double *weight, const double *bias, int64_t t,
                         double c[2]) {
  double l[2] = {0, 0};
  for (int64_t o = 0; o < p->outputs; o++) {
    l[o] = p->outputs == 2 ? bias[o] : 0;
    for (int64_t i = 0; i < p->hidden; i++) l[o] += x64[t * p->hidden + i] * weight[o * p->hidden + i];
  }
  c[0] = p->outputs == 2 ? exp(l[0]) / (exp(l[0]) + exp(l[1])) : 1;
  c[1] = p->outputs == 2 ? exp(l[1]) / (exp(l[0]) + exp(l[1])) : p->outputs == 1 ? 1 / (1 + exp(-l[0])) : 1;
}

/* The part of the loss sum dy.y that depends on the coefficients, with the branch outputs held. */
static double mix_loss(const problem *p, const double *x64, const double *weight, const double *bias,
                       const double *dmoe, const double *dmlp) {
  double sum = 0;
  for (int64_t t = 0; t < p->tokens; t++) {
    double c[2];
    coefficients(p, x64, weight, bias, t, c);
    sum += c[0] * dmoe[t] + c[1] * dmlp[t];
  }
  return sum;
}

typedef struct mix64 {
  double *weight, bias[2], *dmoe, *dmlp;
} mix64;

static mix64 widen_mix(const problem *p) {
  mix64 m = {take((size_t)(2 * p->hidden) * 8),
             {(double)p->bias[0], (double)p->bias[1]},
             take((size_t)p->tokens * 8),
             take((size_t)p->tokens * 8)};
  for (int64_t i = 0; i < 2 * p->hidden; i++) m.weight[i] = (double)p->weight[i];
  for (int64_t t = 0; t < p->tokens; t++) m.dmoe[t] = (double)p->dscale[t], m.dmlp[t] = (double)p->dbranch_scale[t];
  return m;
}

static void free_mix(mix64 *m) {
  free(m->weight);
  free(m->dmoe);
  free(m->dmlp);
}

static double slope(const problem *p, const mix64 *m, double *value) {
  double kept = *value, step = 1e-6;
  *value = kept + step;
  double up = mix_loss(p, p->x64, m->weight, m->bias, m->dmoe, m->dmlp);
  *value = kept - step;
  double down = mix_loss(p, p->x64, m->weight, m->bias, m->dmoe, m->dmlp);
  *value = kept;
  return (up - down) / (2 * step);
}

static void expect_near(const char *what, double got, double want, double limit) {
  if (!(fabs(got - want) <= limit * fmax(1, fabs(want)))) fail_msg("%s is %.9g; %.9g was expected", what, got, want);
}

static void set_dscale(problem *p) { /* dy . moe, as the layer learns it from the experts */
  for (int64_t t = 0; t < p->tokens; t++) {
    double sum = 0;
    for (int64_t i = 0; i < p->hidden; i++) sum += p->dy64[t * p->hidden + i] * p->moe64[t * p->hidden + i];
    p->dscale[t] = (float)sum;
  }
}

static void check_forward(problem *p) {
  int64_t rows[] = {p->tokens};
  ref_experts ref = {p->hidden,    p->inner,     p->inner,     1,           p->tokens, PMOE_ACT_SILU, rows, p->x64,
                     p->mlp64[W1], p->mlp64[B1], p->mlp64[W2], p->mlp64[B2]};
  double *y = take((size_t)(p->tokens * p->hidden) * 8), c[2], limit = p->dtype == PMOE_BF16 ? 2e-2 : 2e-6;
  ref_forward(&ref, y);
  mix64 m = widen_mix(p);
  for (int64_t t = 0; t < p->tokens; t++) {
    coefficients(p, p->x64, m.weight, m.bias, t, c);
    double rounding = 1e-6 + 2e-8 * (double)p->hidden; /* of the logits' sums */
    expect_near("scale", (double)p->scale[t], c[0], rounding);
    expect_near("branch_scale", (double)p->branch_scale[t], c[1], rounding);
    for (int64_t i = 0; i < p->hidden; i++) expect_near("mlp", get(&p->y, t, i), y[t * p->hidden + i], limit);
  }
  free_mix(&m);
  free(y);
}

/* Gradients of the MLP against the reference, dbranch_scale against dy . mlp. */
static void check_backward(problem *p) {
  int64_t rows[] = {p->tokens};
  double sums = 3e-6 * (1 + (double)(p->tokens * p->hidden) / 4000);
  double limit = p->dtype == PMOE_BF16 ? 3e-2 : sums, *weight = take((size_t)p->tokens * 8);
  ref_experts ref = {p->hidden,    p->inner,     p->inner,     1,           p->tokens, PMOE_ACT_SILU, rows, p->x64,
                     p->mlp64[W1], p->mlp64[B1], p->mlp64[W2], p->mlp64[B2]};
  ref_grads g = {
      calloc((size_t)(p->tokens * p->hidden + 1), 8), calloc((size_t)p->tokens + 1, 8), NULL, NULL, NULL, NULL};
  double **grads[NUM_MLP] = {&g.dw1, &g.db1, &g.dw2, &g.db2};
  for (int i = 0; i < NUM_MLP; i++) {
    *grads[i] = take((size_t)p->count[i] * 8);
    for (int64_t j = 0; j < p->count[i]; j++) (*grads[i])[j] = (double)(float)number(j, 40 + i);
  }
  for (int64_t t = 0; t < p->tokens; t++) weight[t] = (double)p->branch_scale[t];
  ref_backward(&ref, p->dy64, weight, &g);
  for (int64_t t = 0; t < p->tokens; t++) {
    expect_near("dbranch_scale", (double)p->dbranch_scale[t], g.drow_weight[t], limit);
    for (int64_t i = 0; i < p->hidden; i++) expect_near("dx", get(&p->dx, t, i), g.dx[t * p->hidden + i], limit);
  }
  for (int i = 0; i < NUM_MLP; i++) {
    for (int64_t j = 0; j < p->count[i]; j++)
      expect_near("mlp gradient", (double)((float *)p->mlp_grad[i])[j], (*grads[i])[j], 2 * limit);
    free(*grads[i]);
  }
  free(g.dx);
  free(g.drow_weight);
  free(weight);
}

/* The coefficients' gradients by finite differences of their part of the loss. */
static void check_mix_backward(problem *p) {
  mix64 m = widen_mix(p);
  double sums = 1e-5 * (1 + (double)(p->tokens * p->hidden) / 4000), limit = p->dx_dtype == PMOE_BF16 ? 8e-3 : sums;
  for (int64_t i = 0; i < p->tokens * p->hidden; i += 1 + p->tokens * p->hidden / 100) {
    float before = (float)number(i, 3);
    if (p->dx_dtype == PMOE_BF16) before = pmoei_bf16_to_f32(pmoei_f32_to_bf16(before));
    expect_near("mix dx", get(&p->mix_dx, i / p->hidden, i % p->hidden), (double)before + slope(p, &m, &p->x64[i]),
                limit);
  }
  for (int64_t i = 0; i < p->outputs * p->hidden; i += 1 + p->hidden / 50)
    expect_near("mix weight", (double)p->weight_grad[i], (double)(float)number(i, 7) + slope(p, &m, &m.weight[i]),
                sums);
  for (int64_t i = p->outputs * p->hidden; i < 2 * p->hidden; i++)
    assert_true(p->weight_grad[i] == (float)number(i, 7));
  for (int o = 0; o < 2; o++) {
    double want = (double)(float)number(o, 8) + (p->outputs == 2 ? slope(p, &m, &m.bias[o]) : 0);
    expect_near("mix bias", (double)p->bias_grad[o], want, sums);
  }
  free_mix(&m);
}

static void test_against_reference(void **state) {
  (void)state;
  static const int64_t sizes[][2] = {{9, 6}, {70, 5}, {0, 4}, {1, 1}, {130, 300}};
  static const pmoe_dtype types[][2] = {{PMOE_F32, PMOE_F32}, {PMOE_BF16, PMOE_F32}, {PMOE_BF16, PMOE_BF16}};
  pmoe_ctx *ctx = make_ctx(2);
  for (int mix = PMOE_MIX_LEARNED; mix <= PMOE_MIX_GATED_SUM; mix++) {
    for (int type = 0; type < 3; type++) {
      for (size_t s = 0; s < (type == 0 ? 5u : 3u); s++) {
        problem p = make_problem(ctx, (pmoe_mix)mix, types[type][0], types[type][1], sizes[s][0], sizes[s][1]);
        assert_int_equal(forward(&p), PMOE_OK);
        check_forward(&p);
        set_dscale(&p);
        assert_int_equal(backward(&p, PMOE_BWD_ALL), PMOE_OK);
        check_backward(&p);
        assert_int_equal(mix_backward(&p, NULL, &p.mix_dx, PMOE_BWD_ALL), PMOE_OK);
        check_mix_backward(&p);
        free_problem(&p);
      }
    }
  }
  pmoe_ctx_destroy(ctx);
}

/* Known values: logits (.2, -.4), expert output 2, MLP output -1 give .936969; permuted tokens give permuted
 * coefficients. */
static void test_softmax_runs_over_the_two_branches(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(1);
  problem p = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 3, 1);
  const float x[3] = {1, -2, 0.5f};
  p.weight[0] = 0.3f, p.weight[1] = -0.6f, p.bias[0] = -0.1f, p.bias[1] = 0.2f;
  for (int t = 0; t < 3; t++) ((float *)p.x.data)[t * p.x.ld] = x[t];
  assert_int_equal(forward(&p), PMOE_OK);
  assert_true(fabs((double)p.scale[0] * 2 - (double)p.branch_scale[0] - 0.936969) < 1e-6);
  float kept[3] = {p.scale[0], p.scale[1], p.scale[2]};
  for (int t = 0; t < 3; t++) ((float *)p.x.data)[t * p.x.ld] = x[(t + 1) % 3];
  assert_int_equal(forward(&p), PMOE_OK);
  for (int t = 0; t < 3; t++) {
    assert_true(p.scale[t] == kept[(t + 1) % 3]);
    assert_true(fabsf(p.scale[t] + p.branch_scale[t] - 1) < 2e-7f);
  }
  free_problem(&p);
  pmoe_ctx_destroy(ctx);
}

static void run_whole(problem *p) {
  assert_int_equal(forward(p), PMOE_OK);
  set_dscale(p);
  assert_int_equal(backward(p, PMOE_BWD_ALL), PMOE_OK);
  assert_int_equal(mix_backward(p, NULL, &p->mix_dx, PMOE_BWD_ALL), PMOE_OK);
}

static void test_halves_and_threads_give_the_same_bits(void **state) {
  (void)state;
  for (int mix = PMOE_MIX_LEARNED; mix <= PMOE_MIX_GATED_SUM; mix++) {
    pmoe_ctx *one = make_ctx(1);
    problem whole = make_problem(one, (pmoe_mix)mix, PMOE_F32, PMOE_F32, 150, 300);
    run_whole(&whole);
    for (int32_t threads = 1; threads <= 3; threads++) {
      pmoe_ctx *ctx = make_ctx(threads);
      problem p = make_problem(ctx, (pmoe_mix)mix, PMOE_F32, PMOE_F32, 150, 300);
      run_whole(&p);
      expect_same(&whole, &p);
      free_problem(&p);
      p = make_problem(ctx, (pmoe_mix)mix, PMOE_F32, PMOE_F32, 150, 300);
      assert_int_equal(forward(&p), PMOE_OK);
      set_dscale(&p);
      assert_int_equal(backward(&p, PMOE_BWD_INPUT), PMOE_OK);
      assert_int_equal(mix_backward(&p, p.dmix, &p.mix_dx, PMOE_BWD_INPUT), PMOE_OK);
      assert_int_equal(backward(&p, PMOE_BWD_WEIGHT), PMOE_OK);
      assert_int_equal(mix_backward(&p, p.dmix, NULL, PMOE_BWD_WEIGHT), PMOE_OK);
      expect_same(&whole, &p);
      free_problem(&p);
      pmoe_ctx_destroy(ctx);
    }
    free_problem(&whole);
    pmoe_ctx_destroy(one);
  }
}

static void test_scratch_is_bounded(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(2);
  problem p = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 300, 2);
  size_t bytes = pmoei_residual_scratch_bytes(p.residual, p.tokens);
  void *mem = NULL;
  assert_int_equal(posix_memalign(&mem, 64, bytes), 0);
  assert_int_equal(pmoe_ctx_set_scratch(ctx, mem, bytes), PMOE_OK);
  pmoe_memory before = PMOE_CONFIG_INIT(pmoe_memory), after = before;
  pmoe_ctx_memory(ctx, &before);
  run_whole(&p);
  pmoe_ctx_memory(ctx, &after);
  assert_int_equal(before.allocations, after.allocations);
  free_problem(&p);
  pmoe_ctx_destroy(ctx);
  free(mem);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_against_reference),
      cmocka_unit_test(test_softmax_runs_over_the_two_branches),
      cmocka_unit_test(test_halves_and_threads_give_the_same_bits),
      cmocka_unit_test(test_scratch_is_bounded),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
