/* Activations: the functions inside them, and the pointwise sweeps, against double precision. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "core/dtype.h"
#include "core/vmath_act.h"
#include "moe/activation.h"
#include "support/experts_ref.h"

static void expect_relative(const char *what, double x, double got, double want, double limit) {
  if (!(fabs(got - want) <= limit * fabs(want) + 1e-37))
    fail_msg("%s(%g) is %.9g; %.9g was expected", what, x, got, want);
}

static void test_functions_are_accurate(void **state) {
  (void)state;
  for (int i = -860000; i <= 880000; i += 7) {
    float x = (float)i * 1e-4f;
    expect_relative("sigmoid", (double)x, (double)pmoei_sigmoid(x), 1 / (1 + exp(-(double)x)), 4e-7);
  }
  for (int i = -130000; i <= 130000; i++) {
    float x = (float)i * 1e-4f, density;
    double z = (double)x, square = z * z; /* x * x is rounded before exp: an error of half a unit of it, relative */
    double limit = 5e-7 + 4e-8 * square;
    expect_relative("normal", z, (double)pmoei_normal(x, &density), 0.5 * erfc(-z / sqrt(2.0)), limit);
    expect_relative("density", z, (double)density, exp(-0.5 * square) / sqrt(2 * 3.14159265358979323846), limit);
  }
}

static void test_functions_at_the_ends(void **state) {
  (void)state;
  float density;
  assert_true(isnan(pmoei_sigmoid(NAN)) && isnan(pmoei_normal(NAN, &density)) && isnan(density));
  assert_true(pmoei_sigmoid(INFINITY) == 1 && pmoei_sigmoid(-INFINITY) == 0 && pmoei_sigmoid(3e38f) == 1 &&
              pmoei_sigmoid(-3e38f) == 0);
  assert_true(pmoei_normal(INFINITY, &density) == 1 && density == 0 && pmoei_normal(-INFINITY, &density) == 0 &&
              density == 0);
  assert_true(pmoei_normal(3e38f, &density) == 1 && pmoei_normal(-3e38f, &density) == 0 && pmoei_sigmoid(0) == 0.5f);
}

enum { ROWS = 3 };

typedef struct sweep {
  pmoe_act act;
  pmoe_dtype dtype;
  int64_t inner, inner1, pad;
  bool bias;
  pmoe_mat pre, dpre, out, dact;
  void *bias_data;
  double *h; /* [ROWS,F1] pre + bias, in double, of the values as stored */
} sweep;

static double number(int64_t i) { return (double)((i * 7919 + 13) % 2003 - 1001) / 200.0; } /* in [-5, 5] */

static pmoe_mat make_mat(pmoe_dtype dtype, int64_t cols, int64_t pad) {
  pmoe_mat m = {malloc((size_t)(ROWS * (cols + pad)) * pmoe_dtype_size(dtype)), dtype, ROWS, cols, cols + pad};
  assert_non_null(m.data);
  memset(m.data, 0xff, (size_t)(ROWS * m.ld) * pmoe_dtype_size(dtype));
  return m;
}

static double put(void *p, pmoe_dtype dtype, int64_t i, double value) {
  float v = (float)value, back;
  char *at = (char *)p + (size_t)i * pmoe_dtype_size(dtype);
  pmoei_from_f32(at, dtype, &v, 1);
  pmoei_to_f32(&back, at, dtype, 1);
  return (double)back;
}

static double get(const pmoe_mat *m, int64_t r, int64_t c) {
  float v;
  pmoei_to_f32(&v, (char *)pmoei_row(m, r) + (size_t)c * pmoe_dtype_size(m->dtype), m->dtype, 1);
  return (double)v;
}

static sweep make_sweep(pmoe_act act, pmoe_dtype dtype, int64_t inner, bool bias, int64_t pad) {
  sweep s = {act, dtype, inner, pmoei_act_gated(act) ? 2 * inner : inner, pad, bias, .bias_data = NULL};
  s.pre = make_mat(dtype, s.inner1, pad);
  s.dpre = make_mat(dtype, s.inner1, pad);
  s.out = make_mat(dtype, inner, pad);
  s.dact = make_mat(PMOE_F32, inner, pad);
  s.h = malloc((size_t)(ROWS * s.inner1) * sizeof *s.h);
  s.bias_data = malloc((size_t)s.inner1 * pmoe_dtype_size(dtype));
  assert_true(s.h && s.bias_data);
  for (int64_t c = 0; c < s.inner1; c++) {
    double b = put(s.bias_data, dtype, c, number(c + 17) / 4);
    for (int64_t r = 0; r < ROWS; r++) {
      double h = put(s.pre.data, dtype, r * s.pre.ld + c, number(r * s.inner1 + c));
      s.h[r * s.inner1 + c] = bias ? (double)((float)h + (float)b) : h;
    }
  }
  for (int64_t i = 0; i < ROWS * inner; i++)
    put(s.dact.data, PMOE_F32, i / inner * s.dact.ld + i % inner, number(i + 5));
  return s;
}

static void free_sweep(sweep *s) {
  void *all[] = {s->pre.data, s->dpre.data, s->out.data, s->dact.data, s->h, s->bias_data};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static void expect_padding(const pmoe_mat *m) {
  for (int64_t r = 0; r < ROWS; r++)
    for (int64_t c = m->cols; c < m->ld; c++) assert_true(isnan(get(m, r, c)));
}

/* `scale`: size of the terms that may cancel. */
static void expect_near(const char *what, double got, double want, double scale, pmoe_dtype dtype) {
  double limit = 1e-6 * (scale + fabs(want)) + (dtype == PMOE_BF16 ? fabs(want) * 0x1p-8 : 0);
  if (!(fabs(got - want) <= limit)) fail_msg("%s is %.9g; %.9g was expected", what, got, want);
}

static void check_sweep(sweep *s, bool weighted) {
  static const float weight[ROWS] = {0.75f, -1.5f, 0.0f};
  const ref_experts ref = {.inner = s->inner, .inner1 = s->inner1, .act = s->act};
  const void *bias = s->bias ? s->bias_data : NULL;
  float drow_weight[ROWS];
  pmoei_activation_forward(s->act, s->inner, &s->pre, bias, &s->out);
  pmoei_activation_grad grad = {s->act,  s->inner, ROWS,       bias, &s->dact, weighted ? weight : NULL,
                                &s->pre, &s->dpre, drow_weight};
  pmoei_activation_backward(&grad);
  for (int64_t r = 0; r < ROWS; r++) {
    double sum = 0, size = 0, w = weighted ? (double)weight[r] : 1.0;
    for (int64_t j = 0; j < s->inner; j++) {
      double to_gate, to_up, d = get(&s->dact, r, j), a = ref_act(&ref, s->h + r * s->inner1, j, &to_gate, &to_up);
      sum += d * a;
      size += fabs(d * a);
      expect_near("activation", get(&s->out, r, j), a, 0.1, s->dtype);
      expect_near("weighted activation", get(&s->pre, r, j), w * a, 0.1, s->dtype);
      expect_near("gradient", get(&s->dpre, r, j), w * d * to_gate,
                  2 * fabs(w * d * (s->inner1 == s->inner ? 1 : s->h[r * s->inner1 + s->inner + j])), s->dtype);
      if (s->inner1 != s->inner)
        expect_near("gradient of up", get(&s->dpre, r, s->inner + j), w * d * to_up, fabs(w * d), s->dtype);
    }
    if (!(fabs((double)drow_weight[r] - sum) <= 1e-6 * size + 1e-7))
      fail_msg("drow_weight is %g; %g was expected", (double)drow_weight[r], sum);
  }
  pmoe_mat *mats[] = {&s->pre, &s->dpre, &s->out};
  for (int i = 0; i < 3; i++) expect_padding(mats[i]);
}

static void test_sweeps(void **state) {
  (void)state;
  static const int64_t widths[] = {1, 3, 16, 511, 512, 513, 1500};
  for (int act = PMOE_ACT_GELU; act <= PMOE_ACT_GEGLU; act++)
    for (int dtype = PMOE_F32; dtype <= PMOE_BF16; dtype++)
      for (int bias = 0; bias < 2; bias++)
        for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
          sweep s = make_sweep((pmoe_act)act, (pmoe_dtype)dtype, widths[i], bias != 0, bias ? 3 : 0);
          check_sweep(&s, i % 2 == 0);
          free_sweep(&s);
        }
}

/* The slope of the value, taken from the sweeps themselves. */
static void test_slopes_match_values(void **state) {
  (void)state;
  for (int act = PMOE_ACT_GELU; act <= PMOE_ACT_GEGLU; act++) {
    for (int i = -40; i <= 40; i++) {
      float step = 1.0f / 64, center = (float)i / 8 + 0.03f, h[3][2], a[3], one = 1, dpre[2];
      for (int k = 0; k < 3; k++) h[k][0] = center + (float)(k - 1) * step, h[k][1] = 0.7f;
      int64_t cols = pmoei_act_gated((pmoe_act)act) ? 2 : 1;
      pmoe_mat pre = {h, PMOE_F32, 3, cols, 2}, out = {a, PMOE_F32, 3, 1, 1};
      pmoei_activation_forward((pmoe_act)act, 1, &pre, NULL, &out);
      pmoe_mat middle = {h[1], PMOE_F32, 1, cols, 2}, dact = {&one, PMOE_F32, 1, 1, 1},
               to = {dpre, PMOE_F32, 1, cols, 2};
      pmoei_activation_grad grad = {(pmoe_act)act, 1, 1, NULL, &dact, NULL, &middle, &to, NULL};
      pmoei_activation_backward(&grad);
      double slope = ((double)a[2] - (double)a[0]) / (2 * (double)step);
      assert_true(fabs(slope - (double)dpre[0]) < 2e-4);
      if (cols == 2) assert_true(fabs((double)a[1] / 0.7 - (double)dpre[1]) < 1e-5);
    }
  }
}

static void test_nan_and_infinity(void **state) {
  (void)state;
  for (int act = PMOE_ACT_GELU; act <= PMOE_ACT_SILU; act++) {
    float h[4] = {NAN, INFINITY, 1e30f, -1e30f}, a[4], d[4] = {1, 1, 1, 1}, dh[4];
    pmoe_mat pre = {h, PMOE_F32, 1, 4, 4}, out = {a, PMOE_F32, 1, 4, 4}, dact = {d, PMOE_F32, 1, 4, 4},
             dpre = {dh, PMOE_F32, 1, 4, 4};
    pmoei_activation_forward((pmoe_act)act, 4, &pre, NULL, &out);
    assert_true(isnan(a[0]) && isinf(a[1]) && a[2] == 1e30f && a[3] == 0);
    h[1] = 2;
    float drow_weight;
    pmoei_activation_grad grad = {(pmoe_act)act, 4, 1, NULL, &dact, NULL, &pre, &dpre, &drow_weight};
    pmoei_activation_backward(&grad);
    assert_true(isnan(dh[0]) && isnan(h[0]) && isnan(drow_weight) && !isnan(dh[1]));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_functions_are_accurate),
      cmocka_unit_test(test_functions_at_the_ends),
      cmocka_unit_test(test_sweeps),
      cmocka_unit_test(test_slopes_match_values),
      cmocka_unit_test(test_nan_and_infinity),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
