/* core/vmath.h against the C library in double, and the selection of a threshold. */
#include "test_gate_case.h"

#include "core/vmath.h"
#include "gating/gate_cpu.h"

static double units_off(float got, double want) { /* in units of the last place of a float near `want` */
  int exponent;
  frexp(want, &exponent);
  return fabs((double)got - want) / ldexp(1, (exponent < -125 ? -125 : exponent) - 24);
}

static void test_exp_and_log(void **state) {
  (void)state;
  double worst_exp = 0, worst_log = 0;
  for (uint64_t bits = 0; bits < UINT64_C(1) << 32; bits += 2003) {
    float x = pmoei_float_of((uint32_t)bits), exp_x = pmoei_expf(x), log_x = pmoei_logf(x);
    double want_exp = exp((double)x), want_log = log((double)x);
    if (isnan(x)) assert_true(isnan(exp_x) && isnan(log_x));
    else if (want_exp > (double)FLT_MAX) assert_true(exp_x == INFINITY);
    else worst_exp = fmax(worst_exp, units_off(exp_x, want_exp));
    if (x < 0) assert_true(isnan(log_x));
    else if (x > 0 && x < INFINITY) worst_log = fmax(worst_log, units_off(log_x, want_log));
  }
  assert_true(worst_exp < 1.1);
  assert_true(worst_log < 0.9);
}

static void test_special_values(void **state) {
  (void)state;
  assert_true(pmoei_expf(0) == 1 && pmoei_expf(-0.0f) == 1);
  assert_true(pmoei_expf(-INFINITY) == 0 && pmoei_expf(INFINITY) == INFINITY && pmoei_expf(-1000) == 0);
  assert_true(pmoei_expf(88.7f) < INFINITY && pmoei_expf(88.8f) == INFINITY);
  assert_true(pmoei_expf(-103) > 0);
  assert_true(isnan(pmoei_expf(NAN)) && isnan(pmoei_logf(NAN)) && isnan(pmoei_logf(-1)) &&
              isnan(pmoei_logf(-INFINITY)));
  assert_true(pmoei_logf(0) == -INFINITY && pmoei_logf(-0.0f) == -INFINITY && pmoei_logf(INFINITY) == INFINITY);
  assert_true(pmoei_logf(1) == 0);
  assert_true(fabsf(pmoei_logf(0x1p-149f) + 103.27893f) < 1e-5f);
}

static void test_order_of_keys(void **state) {
  (void)state;
  const float ordered[] = {-INFINITY, -FLT_MAX, -1, -FLT_MIN, -0x1p-149f, 0, 0x1p-149f, FLT_MIN, 1, FLT_MAX, INFINITY};
  for (size_t i = 0; i + 1 < sizeof ordered / sizeof *ordered; i++)
    assert_true(pmoei_gate_order_key(ordered[i]) < pmoei_gate_order_key(ordered[i + 1]));
  assert_true(pmoei_gate_order_key(-0.0f) == pmoei_gate_order_key(0.0f));
  assert_true(pmoei_gate_order_key(NAN) == 0 && pmoei_gate_order_key(-NAN) == 0);
  assert_true(pmoei_gate_order_key(-INFINITY) > 0);
}

static int descending(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return x < y ? 1 : x > y ? -1 : 0;
}

static void test_threshold(void **state) {
  (void)state;
  uint64_t seed = 1;
  for (int64_t n = 1; n <= 300; n += 23) {
    for (int shift = 0; shift <= 32; shift += 4) { /* from all different to all equal */
      uint32_t key[300], sorted[300];
      for (int64_t i = 0; i < n; i++) {
        seed = pmoei_mix64(seed + 1);
        key[i] = sorted[i] = (uint32_t)((seed & UINT32_MAX) >> shift);
      }
      qsort(sorted, (size_t)n, 4, descending);
      for (int64_t k = 1; k <= n; k++) {
        int64_t ties, above = 0;
        uint32_t threshold = pmoei_gate_threshold(key, n, k, &ties);
        for (int64_t i = 0; i < n; i++) above += key[i] > threshold;
        assert_true(threshold == sorted[k - 1]);
        assert_int_equal(above + ties, k);
      }
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_exp_and_log),
      cmocka_unit_test(test_special_values),
      cmocka_unit_test(test_order_of_keys),
      cmocka_unit_test(test_threshold),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
