/* The functions inside activations, in float32, written without branches so that loops over them vectorise. NaN
 * propagates. Coefficients made for this library: interpolation at Chebyshev nodes. */
#ifndef PMOEI_VMATH_ACT_H
#define PMOEI_VMATH_ACT_H
#include "core/vmath.h"

/* 1 / (1 + exp(-x)) */
PMOEI_SHARED float pmoei_sigmoid(float x) { return 1.0f / (1.0f + pmoei_expf(-x)); }

/* log(1 + y) / y for 0 <= y <= 1, also where 1 + y rounds to 1 (the ratio corrects the rounding of 1 + y; W. Kahan). */
PMOEI_SHARED float pmoei_log1p_ratio(float y) {
  float u = 1.0f + y, d = u - 1.0f;
  float ratio = pmoei_logf(u) / d;
  return d == 0.0f ? 1.0f : ratio;
}

/* sqrt(log(1 + exp(x))). Below zero by way of exp(x/2), which is still there when exp(x) has vanished. */
PMOEI_SHARED float pmoei_sqrt_softplus(float x) {
  float z = x < 0.0f ? x : -x;
  float y = pmoei_expf(z), ratio = pmoei_log1p_ratio(y);
  float low = pmoei_expf(0.5f * z) * sqrtf(ratio), high = sqrtf(x + y * ratio);
  return x <= 0.0f ? low : high;
}

/* Its derivative divided by itself: 1 / ((1 + exp(-x)) 2 log(1 + exp(x))). */
PMOEI_SHARED float pmoei_sqrt_softplus_slope(float x) {
  float z = x < 0.0f ? x : -x;
  float y = pmoei_expf(z), ratio = pmoei_log1p_ratio(y);
  float softplus = x <= 0.0f ? ratio : x + y * ratio;
  return 0.5f / ((1.0f + y) * softplus);
}

/* The normal distribution's density and distribution function, relative error below 5e-7 in the distribution's lower
 * tail too down to x = -8. Below zero it is the density times Mills' ratio, a polynomial in 1 / (1 + 0.35 |x|). */
PMOEI_SHARED float pmoei_normal(float x, float *density) {
  float z = x < 0.0f ? -x : x;
  float e = pmoei_expf(-0.5f * x * x);
  float t = 1.0f / (1.0f + 0.35f * z);
  float p = 1.465458303e-01f + t * -2.967952200e-02f;
  p = -2.609612283e-01f + t * p;
  p = 1.650509959e-01f + t * p;
  p = -2.704660827e-02f + t * p;
  p = 1.071145876e-01f + t * p;
  p = 1.194449168e-01f + t * p;
  p = 1.399122981e-01f + t * p;
  p = 1.396187126e-01f + t * p;
  float tail = e * t * p;
  *density = e * 3.989422804e-01f;
  return x < 0.0f ? tail : 1.0f - tail;
}

#endif
