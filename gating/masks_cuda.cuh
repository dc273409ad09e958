/* Which tokens of a block chose which expert, a bit each, in shared memory: a token's place among those of its block
 * that chose the same expert is a count of bits. No sum depends on the order in which threads come. */
#ifndef PMOEI_MASKS_CUDA_CUH
#define PMOEI_MASKS_CUDA_CUH
#include "gating/gate_cuda.cuh"

enum { MASKED_EXPERTS = 2048 }; /* at a time: 16 KiB */

static inline size_t mask_bytes(int32_t num_experts) {
  return 2 * sizeof(uint32_t) * (size_t)(num_experts < MASKED_EXPERTS ? num_experts : MASKED_EXPERTS);
}

/* Marks the thread's first `counted` choices among experts [first, first + n): masks [2,n], one row for each warp, so
 * that the atomics are of 32 bits. Bank conflicts come with the choices. */
__device__ static inline void mark_choices(uint32_t *masks, const int32_t *expert, int32_t counted, int32_t first,
                                           int32_t n) {
  for (int32_t i = (int32_t)threadIdx.x; i < 2 * n; i += LANES) masks[i] = 0;
  __syncthreads();
  uint32_t *own = masks + threadIdx.x / 32 * n;
  for (int32_t k = 0; k < counted; k++) {
    int32_t e = expert[k] - first;
    if (expert[k] >= 0 && e >= 0 && e < n) atomicOr(&own[e], 1u << threadIdx.x % 32);
  }
  __syncthreads();
}

__device__ static inline int32_t count_of(const uint32_t *masks, int32_t n, int32_t e) {
  return __popc(masks[e]) + __popc(masks[n + e]);
}

/* Tokens of the block before the thread's that chose e. */
__device__ static inline int32_t rank_of(const uint32_t *masks, int32_t n, int32_t e) {
  uint32_t before = (1u << threadIdx.x % 32) - 1;
  if (threadIdx.x < 32) return __popc(masks[e] & before);
  return __popc(masks[e]) + __popc(masks[n + e] & before);
}

#endif
