// How many thread instructions the engine executes a second. With an argument, that many millions are demanded of one
// core.
#include "check.h"
#include <ctime>

extern "C" unsigned long long ptxvm_instructions(void);

__global__ void arithmetic(float *out, int n) {
  float a = threadIdx.x, b = 1.0f;
  for (int k = 0; k < n; k++) a = a * 0.5f + b, b = b * 1.0001f - a;
  out[blockIdx.x * blockDim.x + threadIdx.x] = a + b;
}
__global__ void copy(const float4 *in, float4 *out, int n) {
  for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < n; k += gridDim.x * blockDim.x) out[k] = in[k];
}
__global__ void matmul(const float *a, const float *b, float *c, int n) {
  __shared__ float s[16][17], t[16][17];
  int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
  float sum = 0;
  for (int k = 0; k < n; k += 16) {
    s[threadIdx.y][threadIdx.x] = a[y * n + k + threadIdx.x];
    t[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + x];
    __syncthreads();
    for (int j = 0; j < 16; j++) sum += s[threadIdx.y][j] * t[j][threadIdx.x];
    __syncthreads();
  }
  c[y * n + x] = sum;
}
__global__ void divergence(int *out, int n) {
  int v = threadIdx.x * 2654435761u >> 7, steps = 0;
  for (int k = 0; k < n; k++) {
    if (v & 1) v = 3 * v + 1;
    else v >>= 1;
    steps += v & 3;
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = steps;
}

template <class F> static void measure(const char *name, double demanded, F launch) {
  launch(); // decoding and first touches
  CUDA(cudaDeviceSynchronize());
  unsigned long long before = ptxvm_instructions();
  timespec w0, w1;
  clock_t c0 = clock(); // processor time: other programs do not count
  clock_gettime(CLOCK_MONOTONIC, &w0);
  for (int k = 0; k < 3; k++) launch();
  CUDA(cudaDeviceSynchronize());
  clock_gettime(CLOCK_MONOTONIC, &w1);
  double n = (double)(ptxvm_instructions() - before) / 1e6, cpu = (double)(clock() - c0) / CLOCKS_PER_SEC;
  double wall = (double)(w1.tv_sec - w0.tv_sec) + 1e-9 * (double)(w1.tv_nsec - w0.tv_nsec);
  printf("%-12s %8.1f M instructions, %8.1f M/s a core, %8.1f M/s by the clock\n", name, n, n / cpu, n / wall);
  CHECK(n / cpu >= demanded);
}

int main(int argc, char **argv) {
  double demanded = argc > 1 ? atof(argv[1]) : 0;
  const int n = 128;
  Device<float> a(n * n), b(n * n), c(n * n);
  CUDA(cudaMemset(a, 0, n * n * 4));
  CUDA(cudaMemset(b, 0, n * n * 4));
  measure("arithmetic", demanded, [&] { arithmetic<<<16, 256>>>(c, 1000); });
  measure("copy", demanded, [&] {
    for (int k = 0; k < 100; k++) copy<<<8, 256>>>((const float4 *)a.data, (float4 *)c.data, n * n / 4);
  });
  measure("matmul", demanded, [&] { matmul<<<dim3(n / 16, n / 16), dim3(16, 16)>>>(a, b, c, n); });
  measure("divergence", demanded, [&] { divergence<<<16, 256>>>((int *)c.data, 1000); });
  return finish("speed");
}
