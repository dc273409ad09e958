/* The functions inside activations, in float32, written without branches so that loops over them vectorise. NaN propagates.
 * Coefficients: interpolation at Chebyshev nodes of the function each comment names. */
#ifndef PMOEI_VMATH_ACT_H
#define PMOEI_VMATH_ACT_H
#include <stdint.h>
#include <string.h>

/* Relative error below 2e-7; 0 below -87.3, infinity above 88.3. */
static inline float pmoei_act_exp(float x) {
  const float magic = 0x1.8p23f; /* adding it rounds to an integer, which its low bits then hold */
  float limited = x < -87.3f ? -87.3f : x;
  limited = limited > 89.0f ? 89.0f : limited;
  float shifted = limited * 0x1.715476p0f + magic;
  float n = shifted - magic;
  float r = limited - n * 0x1.62e4p-1f; /* log 2 in two parts; the first has few bits, so the product is exact */
  r -= n * 0x1.7f7d1cp-20f;
  float q = 5.000000000e-01f + r * (1.666657667e-01f + r * (4.166655421e-02f + r * (8.363232884e-03f + r * 1.392625083e-03f)));
  uint32_t bits, magic_bits;
  memcpy(&bits, &shifted, sizeof bits);
  memcpy(&magic_bits, &magic, sizeof magic_bits);
  bits = (bits - magic_bits + 127u) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  float y = (1.0f + (r + r * r * q)) * scale;
  return x < -87.3f ? 0.0f : y;
}

/* 1 / (1 + exp(-x)) */
static inline float pmoei_sigmoid(float x) { return 1.0f / (1.0f + pmoei_act_exp(-x)); }

/* The normal distribution's density and distribution function, relative error below 5e-7 in the distribution's lower tail too down to
 * x = -8. Below zero it is the density times Mills' ratio, a polynomial in 1 / (1 + 0.35 |x|). */
static inline float pmoei_normal(float x, float *density) {
  float z = x < 0.0f ? -x : x;
  float e = pmoei_act_exp(-0.5f * x * x);
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
