/* expf and logf as straight-line code, so that loops over them vectorise. Within 1.1 (exp) and 0.9 (log) units in the
 * last place. Coefficients: minimax fits of relative error on the reduced range, made for this library. */
#ifndef PMOEI_VMATH_H
#define PMOEI_VMATH_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "core/device.h"

PMOEI_SHARED float pmoei_float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

PMOEI_SHARED uint32_t pmoei_bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* exp(x) = 2^n exp(r), |r| <= ln(2)/2. Overflows to infinity, underflows through denormals to 0; exp(-inf) is 0,
 * exp(NaN) NaN. */
PMOEI_SHARED float pmoei_expf(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  float shifted = x * 0x1.715476p0f + 0x1.8p23f; /* rounds x/ln(2) to an integer in the low bits */
  float n = shifted - 0x1.8p23f;
  float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f; /* ln(2) in two parts, the first times n exact */
  float q = 0x1.6a23dp-10f;
  q = q * r + 0x1.123a2p-7f;
  q = q * r + 0x1.5558f2p-5f;
  q = q * r + 0x1.555492p-3f;
  q = q * r + 0x1.fffffcp-2f;
  float y = (q * r) * r + r + 1.0f;
  uint32_t k = pmoei_bits_of(shifted) - 0x4b400000u; /* n as an integer, -150 .. 128 */
  uint32_t half = (uint32_t)((int32_t)k >> 1);       /* two factors: 2^n itself may be no normal number */
  return y * pmoei_float_of((half + 127u) << 23) * pmoei_float_of((k - half + 127u) << 23);
}

/* log(x) = e ln(2) + log(1 + f), 1 + f in [sqrt(1/2), sqrt(2)). log(0) is -inf, log(x < 0) NaN, log(inf) inf. */
PMOEI_SHARED float pmoei_logf(float x) {
  float scaled = x < 0x1p-126f ? x * 0x1p23f : x;
  float shift = x < 0x1p-126f ? -23.0f : 0.0f;
  uint32_t bits = pmoei_bits_of(scaled);
  int32_t exponent = (int32_t)(bits - 0x3f3504f3u) >> 23;
  float e = (float)exponent + shift;
  float f = pmoei_float_of(bits - ((uint32_t)exponent << 23)) - 1.0f;
  float q = 0x1.145796p-4f;
  q = q * f - 0x1.de3c04p-4f;
  q = q * f + 0x1.e6f06ap-4f;
  q = q * f - 0x1.fc220ap-4f;
  q = q * f + 0x1.233768p-3f;
  q = q * f - 0x1.555c4ep-3f;
  q = q * f + 0x1.99a4b6p-3f;
  q = q * f - 0x1.000006p-2f;
  q = q * f + 0x1.555548p-2f;
  float square = f * f;
  float y = (square * f) * q + e * 0x1.7f7d1cp-20f;
  y = (y - 0.5f * square) + f;
  y = y + e * 0x1.62e4p-1f;
  y = x > 0 ? y : (x == 0 ? -INFINITY : NAN);
  return x < INFINITY ? y : x; /* infinity and NaN */
}

#endif
