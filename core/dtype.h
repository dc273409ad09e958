/* Element types and their conversions. */
#ifndef PMOEI_DTYPE_H
#define PMOEI_DTYPE_H
#include <pmoe/types.h>
#include <string.h>

#include "core/device.h"

typedef uint16_t pmoei_bf16;

PMOEI_SHARED float pmoei_bf16_to_f32(pmoei_bf16 value) {
  uint32_t bits = (uint32_t)value << 16;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}

/* Round to nearest, ties to even; every NaN stays a (quiet) NaN. Branch-free, so that loops over it vectorise. */
PMOEI_SHARED pmoei_bf16 pmoei_f32_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  uint32_t nan = (bits >> 16) | 0x40u;
  return (pmoei_bf16)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

typedef uint16_t pmoei_f16;

static inline float pmoei_f16_to_f32(pmoei_f16 value) {
  uint32_t sign = (uint32_t)(value & 0x8000u) << 16, magnitude = value & 0x7fffu;
  float scaled, out;
  uint32_t bits = magnitude << 13; /* exponent and fraction in their places, the exponent 112 too small */
  memcpy(&scaled, &bits, sizeof scaled);
  scaled *= 0x1p112f;
  memcpy(&bits, &scaled, sizeof bits);
  if (magnitude >= 0x7c00u) bits |= 0x7f800000u; /* infinity and NaN */
  bits |= sign;
  memcpy(&out, &bits, sizeof out);
  return out;
}

/* Round to nearest, ties to even; beyond the largest number infinity, every NaN a (quiet) NaN. */
static inline pmoei_f16 pmoei_f32_to_f16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (pmoei_f16)(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return (pmoei_f16)(sign | 0x7c00u);
  if (magnitude < 0x38800000u) { /* below the smallest normal number: adding 0.5 rounds to multiples of 2^-24 */
    float small;
    memcpy(&small, &magnitude, sizeof small);
    small += 0.5f;
    memcpy(&bits, &small, sizeof bits);
    return (pmoei_f16)(sign | (bits - 0x3f000000u));
  }
  return (pmoei_f16)(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}

/* out[i] = (float)in[i] and back, n elements. */
void pmoei_to_f32(float *out, const void *in, pmoe_dtype dtype, int64_t n);
void pmoei_from_f32(void *out, pmoe_dtype dtype, const float *in, int64_t n);

/* Address of element [row, 0]. 64-bit arithmetic whatever the argument types. */
static inline void *pmoei_row(const pmoe_mat *mat, int64_t row) {
  return (char *)mat->data + (size_t)row * (size_t)mat->ld * pmoe_dtype_size(mat->dtype);
}

#endif
