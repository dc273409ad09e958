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

/* out[i] = (float)in[i] and back, n elements, `dtype` PMOE_F32 or PMOE_BF16. */
void pmoei_to_f32(float *out, const void *in, pmoe_dtype dtype, int64_t n);
void pmoei_from_f32(void *out, pmoe_dtype dtype, const float *in, int64_t n);

/* Address of element [row, 0]. 64-bit arithmetic whatever the argument types. */
static inline void *pmoei_row(const pmoe_mat *mat, int64_t row) {
  return (char *)mat->data + (size_t)row * (size_t)mat->ld * pmoe_dtype_size(mat->dtype);
}

#endif
