#include "bf16.h"

#include <string.h>

#include "parallel.h"

enum { NUMBERS_PER_TASK = 1 << 15 };

struct job {
  float *f32;
  uint16_t *bf16;
  int64_t n;
  int widen;
};

LM_VECTORISED static void narrow(uint16_t *to, const float *from, int64_t n) {
  LM_SIMD
  for (int64_t i = 0; i < n; i++) {
    union {
      float f;
      uint32_t u;
    } x = {from[i]};
    uint32_t rounded = (x.u + 0x7fff + ((x.u >> 16) & 1)) >> 16;
    uint32_t nan = (x.u >> 16) | 0x40; /* rounding could carry a NaN's bits away */
    to[i] = (uint16_t)((x.u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
  }
}

LM_VECTORISED static void widen(float *to, const uint16_t *from, int64_t n) {
  LM_SIMD
  for (int64_t i = 0; i < n; i++) {
    union {
      uint32_t u;
      float f;
    } x = {(uint32_t)from[i] << 16};
    to[i] = x.f;
  }
}

static void convert_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct job *job = arg;
  struct lm_range range = lm_block(job->n, NUMBERS_PER_TASK, index);
  if (job->widen) widen(job->f32 + range.begin, job->bf16 + range.begin, range.end - range.begin);
  else narrow(job->bf16 + range.begin, job->f32 + range.begin, range.end - range.begin);
}

void from_f32(void *to, pmoe_dtype dtype, const float *from, int64_t n) {
  if (dtype == PMOE_F32) memcpy(to, from, (size_t)n * sizeof *from);
  else lm_parallel(lm_num_blocks(n, NUMBERS_PER_TASK), convert_task, &(struct job){(float *)from, to, n, 0});
}

void to_f32(float *to, const void *from, pmoe_dtype dtype, int64_t n) {
  if (dtype == PMOE_F32) memcpy(to, from, (size_t)n * sizeof *to);
  else lm_parallel(lm_num_blocks(n, NUMBERS_PER_TASK), convert_task, &(struct job){to, (uint16_t *)from, n, 1});
}
