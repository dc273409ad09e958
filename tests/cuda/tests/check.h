// What the test programs share: checks that count failures, and buffers on the device.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <vector>

static int failures = 0;

#define CHECK(condition)                                                                                               \
  do {                                                                                                                 \
    if (!(condition) && ++failures <= 20) printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);               \
  } while (0)
#define CHECK_AT(condition, index)                                                                                     \
  do {                                                                                                                 \
    if (!(condition) && ++failures <= 20)                                                                              \
      printf("%s:%d: failed at %lld: %s\n", __FILE__, __LINE__, (long long)(index), #condition);                       \
  } while (0)
#define CUDA(call)                                                                                                     \
  do {                                                                                                                 \
    cudaError_t error_ = (call);                                                                                       \
    if (error_ != cudaSuccess) {                                                                                       \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_));                                \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

template <class T> struct Device {
  T *data = nullptr;
  size_t count;
  explicit Device(size_t n) : count(n) { CUDA(cudaMalloc(&data, n * sizeof(T))); }
  explicit Device(const std::vector<T> &host) : Device(host.size()) {
    CUDA(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  Device(const Device &) = delete;
  ~Device() { cudaFree(data); }
  operator T *() { return data; }
  std::vector<T> host() {
    std::vector<T> copy(count);
    CUDA(cudaMemcpy(copy.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return copy;
  }
};

static uint64_t random_state = 88172645463325252ull;
static inline uint64_t random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

static inline int finish(const char *name) {
  CUDA(cudaDeviceSynchronize());
  printf("%s: %s\n", name, failures ? "FAILED" : "ok");
  return failures != 0;
}
