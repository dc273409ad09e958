#include "support/compare.h"

#include <math.h>
#include <string.h>

test_tolerance test_tolerance_of(pmoe_dtype dtype) {
  static const test_tolerance table[] = {
      [PMOE_F32] = {2e-5, 1e-5, 0.5}, [PMOE_BF16] = {3e-2, 1.2e-2, 1.0}, [PMOE_F16] = {6e-3, 2e-3, 1.0}};
  return table[dtype];
}

/* float16 from its definition: sign, 5 bits of exponent, 10 of fraction. */
static double half_get(uint16_t bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double magnitude = exponent == 0    ? ldexp(fraction, -24)
                     : exponent == 31 ? (fraction ? (double)NAN : (double)INFINITY)
                                      : ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

/* The nearest, of two the even one: numbers of one exponent are whole multiples of a power of two. */
static uint16_t half_put(double value) {
  uint16_t sign = signbit(value) ? 0x8000u : 0;
  double magnitude = fabs(value);
  if (value != value) return 0x7e00u;
  int exponent = magnitude < 0x1p-14 ? -14 : ilogb(magnitude);
  if (magnitude >= 65520.0) return (uint16_t)(sign | 0x7c00u);
  double units = nearbyint(ldexp(magnitude, 10 - exponent)); /* 1024 to 2048; fewer below the normal numbers */
  return (uint16_t)(sign | (uint16_t)((exponent + 14) * 1024 + (int)units));
}

double test_get(const void *data, pmoe_dtype dtype, int64_t i) {
  if (dtype == PMOE_F32) return (double)((const float *)data)[i];
  if (dtype == PMOE_F16) return half_get(((const uint16_t *)data)[i]);
  uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return (double)value;
}

void test_put(void *data, pmoe_dtype dtype, int64_t i, double value) {
  float single = (float)value;
  if (dtype == PMOE_F32) {
    ((float *)data)[i] = single;
    return;
  }
  if (dtype == PMOE_F16) {
    ((uint16_t *)data)[i] = half_put(value);
    return;
  }
  uint32_t bits;
  memcpy(&bits, &single, sizeof bits);
  uint32_t low = bits & 0xffffu, high = bits >> 16;
  if (low > 0x8000u || (low == 0x8000u && (high & 1u))) high++;
  if (single != single) high = 0x7fc0u;
  ((uint16_t *)data)[i] = (uint16_t)high;
}

double test_round(double value, pmoe_dtype dtype) {
  uint32_t place;
  test_put(&place, dtype, 0, value);
  return test_get(&place, dtype, 0);
}

void test_poison(void *data, size_t bytes) { memset(data, 0xff, bytes); }

test_tolerance test_tolerance_wide(pmoe_dtype dtype, double slack) {
  test_tolerance t = test_tolerance_of(dtype);
  return slack == 0.0 ? t : (test_tolerance){slack * t.max, slack * t.rms, t.least};
}

int test_compare_within(const char *what, const pmoe_mat *got, const double *expected, double scale,
                        test_tolerance tolerance) {
  double least = tolerance.least * fabs(scale), top = least, worst = 0.0, error_square = 0.0, square = least * least;
  int64_t at = -1;
  for (int64_t i = 0; i < got->rows * got->cols; i++) {
    double want = scale * expected[i],
           error = fabs(test_get(got->data, got->dtype, i / got->cols * got->ld + i % got->cols) - want);
    top = fmax(top, fabs(want));
    if (at < 0 || error > worst || error != error) {
      worst = error;
      at = i;
    }
    if (error != error) break;
    error_square += error * error;
    square += want * want;
  }
  if (at < 0 || (worst <= tolerance.max * top && sqrt(error_square) <= tolerance.rms * sqrt(square))) return 0;
  int64_t row = at / got->cols, col = at % got->cols;
  fprintf(stderr,
          "%s [%lld,%lld] of [%lld,%lld]: %.9g, expected %.9g (largest %.3g; error %.2e, root mean square %.2e)\n",
          what, (long long)row, (long long)col, (long long)got->rows, (long long)got->cols,
          test_get(got->data, got->dtype, row * got->ld + col), scale * expected[at], top, worst / top,
          sqrt(error_square / square));
  return 1;
}

int test_compare_mat(const char *what, const pmoe_mat *got, const double *expected, double scale,
                     pmoe_dtype precision) {
  return test_compare_within(what, got, expected, scale, test_tolerance_of(precision));
}

int test_compare(const char *what, const void *got, pmoe_dtype dtype, const double *expected, double scale, int64_t n,
                 pmoe_dtype precision) {
  pmoe_mat mat = {(void *)got, dtype, 1, n, n};
  return n == 0 ? 0 : test_compare_mat(what, &mat, expected, scale, precision);
}

int test_compare_one(const char *what, double got, double expected, double tolerance) {
  if (fabs(got - expected) <= tolerance) return 0;
  fprintf(stderr, "%s: %.9g, expected %.9g within %.2g\n", what, got, expected, tolerance);
  return 1;
}
