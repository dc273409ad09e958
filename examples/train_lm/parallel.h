/* Threads of a rank, and loops that vectorise. */
#ifndef LM_PARALLEL_H
#define LM_PARALLEL_H
#include <stdint.h>

/* Task `index`, run by thread `thread` in [0, lm_threads()). Which thread gets which task varies: results must not
 * depend on it. Matrix products inside a task stay on its thread. */
typedef void (*lm_task)(void *arg, int64_t index, int thread);

/* The calling rank's number of threads; 1 without OpenMP. */
void lm_set_threads(int threads);
int lm_threads(void);
int lm_cores(void);

void lm_parallel(int64_t num_tasks, lm_task task, void *arg);

/* A task over [begin, end) of n things, `block` to a task. */
struct lm_range {
  int64_t begin, end;
};
static inline int64_t lm_num_blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }
static inline struct lm_range lm_block(int64_t n, int64_t block, int64_t index) {
  struct lm_range range = {index * block, (index + 1) * block};
  if (range.end > n) range.end = n;
  return range;
}

/* A function marked LM_VECTORISED is compiled for several instruction sets and chosen when the program starts. */
#if defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__) &&     \
    !defined(LM_NO_CLONES)
#define LM_VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define LM_VECTORISED
#endif

#ifdef _OPENMP
#define LM_PRAGMA(text) _Pragma(#text)
#define LM_SIMD LM_PRAGMA(omp simd)
#define LM_SIMD_SUM(variable) LM_PRAGMA(omp simd reduction(+ : variable))
#else
#define LM_SIMD
#define LM_SIMD_SUM(variable)
#endif
#if defined(_OPENMP) && !defined(__clang__) /* clang 14 cannot, and warns */
#define LM_SIMD_MAX(variable) LM_PRAGMA(omp simd reduction(max : variable))
#else
#define LM_SIMD_MAX(variable)
#endif

/* e^x with relative error below 2e-7 in the normal range; 0 below it. Only additions and multiplications, so that loops
 * over it vectorise. */
static inline float lm_exp(float x) {
  x = x < -87.3f ? -87.3f : x > 88.3f ? 88.3f : x;
  float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 2^23: the sum's last bits are the rounded quotient */
  float n = shifted - 12582912.0f;
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  union {
    float f;
    int32_t i;
  } power = {.i = ((int32_t)n + 127) * (1 << 23)};
  return p * power.f;
}

#endif
