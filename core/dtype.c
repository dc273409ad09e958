#include "core/dtype.h"

#include "core/simd.h"

const char *pmoe_dtype_name(pmoe_dtype dtype) {
  switch (dtype) {
  case PMOE_F32: return "float32";
  case PMOE_BF16: return "bfloat16";
  case PMOE_F16: return "float16";
  }
  return "unknown";
}

size_t pmoe_dtype_size(pmoe_dtype dtype) {
  switch (dtype) {
  case PMOE_F32: return 4;
  case PMOE_BF16: return 2;
  case PMOE_F16: return 2;
  }
  return 0;
}

PMOEI_VECTORISED static void bf16_to_f32(float *restrict out, const pmoei_bf16 *restrict in, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = pmoei_bf16_to_f32(in[i]);
}

PMOEI_VECTORISED static void f32_to_bf16(pmoei_bf16 *restrict out, const float *restrict in, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = pmoei_f32_to_bf16(in[i]);
}

/* Only where the host makes parameters of a device. */
static void f16_to_f32(float *out, const pmoei_f16 *in, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = pmoei_f16_to_f32(in[i]);
}

static void f32_to_f16(pmoei_f16 *out, const float *in, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = pmoei_f32_to_f16(in[i]);
}

void pmoei_to_f32(float *out, const void *in, pmoe_dtype dtype, int64_t n) {
  if (n == 0) return;
  if (dtype == PMOE_BF16) bf16_to_f32(out, in, n);
  else if (dtype == PMOE_F16) f16_to_f32(out, in, n);
  else memmove(out, in, (size_t)n * sizeof(float));
}

void pmoei_from_f32(void *out, pmoe_dtype dtype, const float *in, int64_t n) {
  if (n == 0) return;
  if (dtype == PMOE_BF16) f32_to_bf16(out, in, n);
  else if (dtype == PMOE_F16) f32_to_f16(out, in, n);
  else memmove(out, in, (size_t)n * sizeof(float));
}
