/* Element types in kernels: float32, bfloat16 and float16 to and from float32, one by one or 16 bytes at a time. */
#ifndef PMOEI_ELEMENTS_CUH
#define PMOEI_ELEMENTS_CUH
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

#include "core/cuda.h"

namespace pmoei {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <typename T> __device__ T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }

/* N neighbours, moved by one access of up to 16 bytes. */
template <typename T, int N> struct alignas(sizeof(T) * N) pack { T at[N]; };

/* What one thread takes of a row at a time: 16 bytes, or single elements where rows do not begin at multiples of that.
 */
template <typename T> constexpr int pack_of = 16 / (int)sizeof(T);

template <typename T, int N> __device__ inline void load(float *out, const T *from) {
  pack<T, N> p = *reinterpret_cast<const pack<T, N> *>(from);
#pragma unroll
  for (int i = 0; i < N; i++) out[i] = to_float(p.at[i]);
}

template <typename T, int N> __device__ inline void store(T *to, const float *in) {
  pack<T, N> p;
#pragma unroll
  for (int i = 0; i < N; i++) p.at[i] = from_float<T>(in[i]);
  *reinterpret_cast<pack<T, N> *>(to) = p;
}

/* A matrix as kernels see it. */
template <typename T> struct rows_of {
  T *data;
  int64_t ld;
  __device__ T *row(int64_t r) const { return data + r * ld; }
};
template <typename T> rows_of<T> view(const pmoe_mat *mat) { return {static_cast<T *>(mat->data), mat->ld}; }

/* Whether rows can be taken 16 bytes at a time: columns, distance and address are multiples. */
inline bool aligned(const pmoe_mat *mat) {
  size_t size = pmoe_dtype_size(mat->dtype);
  return reinterpret_cast<uintptr_t>(mat->data) % 16 == 0 && (size_t)mat->ld * size % 16 == 0 &&
         (size_t)mat->cols * size % 16 == 0;
}

/* f(T{}) with the element type that `dtype` names. */
template <typename F> pmoe_status with_type(pmoe_dtype dtype, F f) {
  switch (dtype) {
  case PMOE_BF16: return f(__nv_bfloat16{});
  case PMOE_F16: return f(__half{});
  default: return f(float{});
  }
}

/* Sum over the thread block, in one order whatever comes; in thread 0. `room` [32]; blocks of whole warps. */
template <typename T> __device__ inline T block_sum(T value, T *room) {
  int thread = (int)(threadIdx.x + threadIdx.y * blockDim.x), warps = (int)(blockDim.x * blockDim.y) / 32;
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
  __syncthreads(); /* the room may still be in use */
  if (thread % 32 == 0) room[thread / 32] = value;
  __syncthreads();
  for (int w = 1; w < warps && thread == 0; w++) value += room[w];
  return value;
}

/* Blocks for `count` items, `per_block` each: at least one, at most what a grid's first dimension should have. */
inline unsigned blocks_for(int64_t count, int64_t per_block) {
  int64_t blocks = (count + per_block - 1) / per_block;
  return (unsigned)(blocks < 1 ? 1 : blocks > 1 << 20 ? 1 << 20 : blocks);
}

} // namespace pmoei
#endif
