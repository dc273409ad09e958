/* The k largest of many keys, by one thread block: radix selection fixes the smallest of them byte by byte from the
 * top. */
#ifndef PMOEI_RADIX_CUDA_CUH
#define PMOEI_RADIX_CUDA_CUH
#include "gating/gate_cuda.cuh"

enum { RADIX_THREADS = 256 }; /* one for each value of a byte */

typedef struct radix_room {
  uint32_t histogram[RADIX_THREADS];
  uint32_t warp[RADIX_THREADS / 32];
  uint32_t digit;
  int64_t left;
} radix_room;

/* Sum of the values of this thread and those above. */
__device__ static inline uint32_t sum_upwards(uint32_t value, radix_room *room) {
  unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int distance = 1; distance < 32; distance *= 2) {
    uint32_t other = __shfl_down_sync(0xffffffffu, value, distance);
    if (lane + distance < 32) value += other;
  }
  if (lane == 0) room->warp[warp] = value;
  __syncthreads();
  for (unsigned w = warp + 1; w < RADIX_THREADS / 32; w++) value += room->warp[w];
  return value;
}

/* The threshold for keeping the k largest of n keys (1 <= k <= n < 2^32): every key above it, and the first *ties that
 * equal it. key(i) gives a key. Keys with a byte in common meet in one counter: that is the only bank conflict. */
template <typename Key>
__device__ static inline uint32_t radix_threshold(const Key &key, int64_t n, int64_t k, int64_t *ties,
                                                  radix_room *room) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    room->histogram[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += RADIX_THREADS) {
      uint32_t here = key(i);
      if ((here & mask) == prefix) atomicAdd(&room->histogram[here >> shift & 255u], 1u);
    }
    __syncthreads();
    uint32_t count = room->histogram[threadIdx.x];
    int64_t upwards = sum_upwards(count, room), above = upwards - count;
    if (above < k && k <= upwards) {
      room->digit = threadIdx.x;
      room->left = k - above;
    }
    __syncthreads();
    prefix |= room->digit << shift;
    mask |= 255u << shift;
    k = room->left;
    __syncthreads();
  }
  *ties = k;
  return prefix;
}

/* How many of the threads before this one have the flag; *all gets how many of the block. */
__device__ static inline uint32_t flags_before(bool flag, uint32_t *all, radix_room *room) {
  unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t votes = __ballot_sync(0xffffffffu, flag), before = __popc(votes & ((1u << lane) - 1)), sum = 0;
  if (lane == 0) room->warp[warp] = (uint32_t)__popc(votes);
  __syncthreads();
  for (unsigned w = 0; w < RADIX_THREADS / 32; w++) {
    before += w < warp ? room->warp[w] : 0;
    sum += room->warp[w];
  }
  __syncthreads();
  *all = sum;
  return before;
}

#endif
