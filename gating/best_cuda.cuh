/* Going through a token's keys from the best down, ties: lower index; NaN below all. A few a pass, by insertion into a
 * sorted list in registers; the next pass takes what comes after the last. */
#ifndef PMOEI_BEST_CUDA_CUH
#define PMOEI_BEST_CUDA_CUH
#include "gating/gate_cuda.cuh"

/* Above 0, which is "none yet", even for NaN. */
__device__ static inline uint32_t key_of(float value) { return pmoei_gate_order_key(value) + 1u; }

template <int levels> struct best_list {
  uint32_t key[levels];
  int32_t index[levels];
};

/* Before the first pass: everything comes after it. */
template <int levels> __device__ static inline best_list<levels> no_best(void) {
  best_list<levels> list;
#pragma unroll
  for (int k = 0; k < levels; k++) {
    list.key[k] = UINT32_MAX;
    list.index[k] = -1;
  }
  return list;
}

/* The next `levels` of n keys that lie `stride` apart; where there are fewer, the rest has key 0 and index -1. */
template <int levels>
__device__ static inline void next_best(best_list<levels> *list, const float *keys, int64_t stride, int32_t n) {
  uint32_t last_key = list->key[levels - 1];
  int32_t last = list->index[levels - 1];
#pragma unroll
  for (int k = 0; k < levels; k++) {
    list->key[k] = 0;
    list->index[k] = -1;
  }
#pragma unroll 4
  for (int32_t e = 0; e < n; e++) {
    uint32_t key = key_of(keys[e * stride]);
    bool open = key < last_key || (key == last_key && e > last);
    uint32_t carried = open ? key : 0; /* the key, then what it pushed down */
    int32_t index = e;
    key = carried;
#pragma unroll
    for (int k = 0; k < levels; k++) {
      bool better = key > list->key[k];
      uint32_t old_key = list->key[k];
      int32_t old_index = list->index[k];
      list->key[k] = better ? carried : old_key;
      list->index[k] = better ? index : old_index;
      carried = better ? old_key : carried;
      index = better ? old_index : index;
    }
  }
}

#endif
