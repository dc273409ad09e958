// For ptxvm-run: a race that shows only in some thread orders. The argument is the exit status.
#include <cstdio>
#include <cstdlib>

__global__ void sum_neighbours(int *out) {
  __shared__ int s[32];
  s[threadIdx.x] = -1;
  __syncwarp();
  s[threadIdx.x] = threadIdx.x;
  int v = s[(threadIdx.x + 1) % 32]; // no __syncwarp before
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);
  if (threadIdx.x == 0) *out = v < 0 || v < 496 ? -1 : v;
}

int main(int argc, char **argv) {
  int *d, h = 0;
  cudaMalloc(&d, 4);
  sum_neighbours<<<1, 32>>>(d);
  cudaMemcpy(&h, d, 4, cudaMemcpyDeviceToHost);
  printf("sum %d, argument %s\n", h, argv[1]);
  return atoi(argv[1]);
}
