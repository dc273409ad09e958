// Kernels whose counts can be worked out by hand; CMakeLists.txt holds the expected ones.
#include "check.h"

__global__ void coalesced(const float *in, float *out) {
  out[threadIdx.x] = in[threadIdx.x];
} // 4 + 4 requests of 4 sectors
__global__ void strided(const float *in, float *out) { out[threadIdx.x] = in[threadIdx.x * 32]; } // reads of 32 sectors
__global__ void wide(const float4 *in, float4 *out) { out[threadIdx.x] = in[threadIdx.x]; }       // 16 sectors each
__global__ void conflicts(float *out) {
  __shared__ float s[32 * 33];
  s[threadIdx.x * 32] = 1; // one bank: 31 conflicts
  s[threadIdx.x * 33] = 2; // all banks: none
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x * 32 / 2 * 0] + s[threadIdx.x * 33]; // a broadcast, and all banks
}
__global__ void divergent(int *out) {
  int v = 0;
  if (threadIdx.x & 1)
    for (int k = 0; k < out[0]; k++) v += k; // half of the lanes loop
  out[threadIdx.x + 1] = v;
}

int main() {
  Device<float> in(4096), out(512);
  Device<int> ints(std::vector<int>(64, 3));
  CUDA(cudaMemset(in, 0, 4096 * 4));
  coalesced<<<1, 128>>>(in, out);
  coalesced<<<1, 128>>>(in, out);
  strided<<<1, 128>>>(in, out);
  wide<<<1, 32>>>((const float4 *)in.data, (float4 *)out.data);
  conflicts<<<1, 32>>>(out);
  divergent<<<1, 32>>>(ints);
  CUDA(cudaDeviceSynchronize());
}
