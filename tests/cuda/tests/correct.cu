// Correct kernels of the kinds that a careless detector complains about. Any report fails the test.
#include "check.h"
#include <cuda/atomic>

// Partial results, a fence, a ticket; the last block to draw one adds everything up.
__global__ void last_block(const int *in, int *partial, unsigned *ticket, int *out) {
  __shared__ int s[64];
  __shared__ bool last;
  s[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
  for (int d = 32; d > 0; d /= 2) {
    __syncthreads();
    if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];
  }
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = s[0];
    __threadfence();
    last = atomicAdd(ticket, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last || threadIdx.x != 0) return;
  int sum = 0;
  for (int b = 0; b < gridDim.x; b++) sum += partial[b];
  *out = sum;
}

// The same with every thread writing and fencing, and one drawing the ticket after the barrier.
__global__ void last_block_all(const int *in, int *copy, unsigned *ticket, int *out) {
  __shared__ bool last;
  copy[blockIdx.x * 64 + threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(ticket, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  int sum = 0;
  for (int k = threadIdx.x; k < gridDim.x * 64; k += 64) sum += copy[k];
  atomicAdd(out, sum);
}

// Each block waits for its predecessor: a chain through flags with release and acquire.
__global__ void chain(int *values, unsigned *flags) {
  if (threadIdx.x != 0) return;
  int before = 0;
  if (blockIdx.x > 0) {
    cuda::atomic_ref<unsigned, cuda::thread_scope_device> flag(flags[blockIdx.x - 1]);
    while (flag.load(cuda::memory_order_acquire) == 0) __nanosleep(100);
    before = values[blockIdx.x - 1];
  }
  values[blockIdx.x] = before + blockIdx.x;
  cuda::atomic_ref<unsigned, cuda::thread_scope_device> mine(flags[blockIdx.x]);
  mine.store(1, cuda::memory_order_release);
}

__global__ void warp_exchange(int *out) {
  __shared__ int s[64];
  int t = threadIdx.x, v = t;
  for (int k = 0; k < 5; k++) {
    s[t] = v;
    __syncwarp();
    v += s[t ^ (1 << k)];
    __syncwarp();
  }
  out[t] = v;
}

__global__ void double_buffer(const int *in, int *out, int rounds) {
  __shared__ int s[2][64];
  int t = threadIdx.x, sum = 0;
  for (int r = 0; r < rounds; r++) {
    s[r & 1][t] = in[r * 64 + t];
    __syncthreads(); // one barrier a round is enough with two buffers
    sum += s[r & 1][63 - t];
  }
  out[t] = sum;
}

__global__ void producers_and_consumers(int *out) { // named barriers, each side arriving where it does not wait
  __shared__ int s[32];
  int t = threadIdx.x;
  if (t < 32) {
    for (int r = 0; r < 4; r++) {
      if (r) asm volatile("bar.sync 2, 64;" ::: "memory");
      s[t] = r * 100 + t;
      asm volatile("bar.arrive 1, 64;" ::: "memory");
    }
  } else {
    int sum = 0;
    for (int r = 0; r < 4; r++) {
      asm volatile("bar.sync 1, 64;" ::: "memory");
      sum += s[63 - t];
      if (r < 3) asm volatile("bar.arrive 2, 64;" ::: "memory");
    }
    out[t - 32] = sum;
  }
}

__global__ void histogram(const unsigned char *in, int n, int *out) {
  __shared__ int bins[16];
  if (threadIdx.x < 16) bins[threadIdx.x] = 0;
  __syncthreads();
  for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < n; k += gridDim.x * blockDim.x)
    atomicAdd(&bins[in[k] & 15], 1);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&out[threadIdx.x], bins[threadIdx.x]);
}

__global__ void neighbours(unsigned char *bytes, unsigned short *halves) { // next to each other is not the same
  int k = blockIdx.x * blockDim.x + threadIdx.x;
  bytes[k] = (unsigned char)k;
  halves[k] = (unsigned short)k;
}

__global__ void whole_warps_leave(int *out) { // a warp that has ended is no longer waited for
  if (threadIdx.x >= 32) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

__device__ int lock = 0;
__global__ void critical(int *count) { // a lock taken by every thread of a warp in turn
  bool done = false;
  while (!done) {
    if (atomicCAS(&lock, 0, 1) == 0) {
      __threadfence();
      *(volatile int *)count = *(volatile int *)count + 1;
      __threadfence();
      atomicExch(&lock, 0);
      done = true;
    }
  }
}

// The same between warps as well, and for a plain counter: taking the lock orders what was done under it.
__global__ void plain_critical(int *count, int *in_shared) {
  __shared__ int guard, protected_by_it;
  if (threadIdx.x == 0) guard = 0, protected_by_it = 0;
  __syncthreads();
  for (bool done = false; !done;) {
    if (atomicCAS(&lock, 0, 1) != 0) continue;
    __threadfence();
    count[0]++;
    __threadfence();
    atomicExch(&lock, 0);
    done = true;
  }
  for (bool done = false; !done;) {
    if (atomicCAS_block(&guard, 0, 1) != 0) continue;
    __threadfence_block();
    protected_by_it++;
    __threadfence_block();
    atomicExch_block(&guard, 0);
    done = true;
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(in_shared, protected_by_it);
}

template <cuda::thread_scope kScope> __global__ void acquire_release(unsigned *guard, int *count) {
  cuda::atomic_ref<unsigned, kScope> mine(*guard);
  for (bool done = false; !done;) {
    if (mine.exchange(1, cuda::memory_order_acquire) != 0) continue;
    count[0]++;
    mine.store(0, cuda::memory_order_release);
    done = true;
  }
}

// One thread waits for the others' word and passes it on by a barrier, by a warp's, or by a flag of its own.
__global__ void relay(int *values, unsigned *flags, int *out) {
  __shared__ volatile int passed;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) passed = 0;
  __syncthreads();
  if (blockIdx.x == 0) {
    values[threadIdx.x] = threadIdx.x;
    __threadfence();
    atomicAdd(flags, 1);
    return;
  }
  if (warp == 0) {
    if (threadIdx.x == 0)
      while (*(volatile unsigned *)flags < blockDim.x) __nanosleep(100);
    __syncwarp();
    out[threadIdx.x] = values[threadIdx.x];
    if (threadIdx.x == 0) {
      __threadfence_block();
      passed = 1;
    }
  } else {
    if (threadIdx.x % 32 == 0)
      while (!passed) __nanosleep(100);
    __syncwarp();
    out[threadIdx.x] = values[threadIdx.x];
  }
}

// Threads that have returned are not waited for (since Volta; before, at least one of a warp had to stay).
__global__ void some_leave(int *out, int n) {
  __shared__ int s[64];
  if (threadIdx.x >= n) return;
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[n - 1 - threadIdx.x];
}

int main() {
  const int blocks = 9, n = blocks * 64;
  std::vector<int> v(n);
  int total = 0;
  for (auto &x : v) total += x = (int)(random_bits() % 1000);
  Device<int> in(v), scratch(n), out(64);
  Device<unsigned> words(std::vector<unsigned>(64, 0));
  CUDA(cudaMemset(out, 0, 256));
  last_block<<<blocks, 64>>>(in, scratch, words, out);
  CHECK(out.host()[0] == total);
  CUDA(cudaMemset(words, 0, 256));
  CUDA(cudaMemset(out, 0, 256));
  last_block_all<<<blocks, 64>>>(in, scratch, words, out);
  CHECK(out.host()[0] == total);
  CUDA(cudaMemset(words, 0, 256));
  chain<<<20, 32>>>(out, words);
  CHECK(out.host()[19] == 190);
  warp_exchange<<<1, 64>>>(out);
  auto r = out.host();
  for (int t = 0; t < 64; t++) CHECK_AT(r[t] == (t < 32 ? 496 : 1520), t);
  double_buffer<<<1, 64>>>(in, out, blocks);
  r = out.host();
  for (int t = 0; t < 64; t++) {
    int sum = 0;
    for (int k = 0; k < blocks; k++) sum += v[k * 64 + 63 - t];
    CHECK_AT(r[t] == sum, t);
  }
  producers_and_consumers<<<1, 64>>>(out);
  r = out.host();
  for (int t = 0; t < 32; t++) CHECK_AT(r[t] == 600 + 4 * (31 - t), t);
  std::vector<unsigned char> bytes(1000);
  int bins[16] = {};
  for (auto &b : bytes) bins[(b = (unsigned char)random_bits()) & 15]++;
  Device<unsigned char> db(bytes), written(512);
  Device<unsigned short> halves(512);
  CUDA(cudaMemset(out, 0, 256));
  histogram<<<3, 64>>>(db, 1000, out);
  r = out.host();
  for (int k = 0; k < 16; k++) CHECK_AT(r[k] == bins[k], k);
  neighbours<<<8, 64>>>(written, halves);
  auto w = written.host();
  for (int k = 0; k < 512; k++) CHECK_AT(w[k] == (unsigned char)k, k);
  whole_warps_leave<<<1, 64>>>(out);
  CHECK(out.host()[31] == 1);
  CUDA(cudaMemset(out, 0, 256));
  critical<<<2, 40>>>(out);
  CHECK(out.host()[0] == 80);
  for (int blocks_of_lock = 1; blocks_of_lock <= 3; blocks_of_lock++) {
    CUDA(cudaMemset(out, 0, 256));
    plain_critical<<<blocks_of_lock, 96>>>(out, out + 1);
    r = out.host();
    CHECK(r[0] == 96 * blocks_of_lock && r[1] == 96 * blocks_of_lock);
  }
  CUDA(cudaMemset(out, 0, 256));
  CUDA(cudaMemset(words, 0, 256));
  acquire_release<cuda::thread_scope_block><<<1, 96>>>(words, out);
  acquire_release<cuda::thread_scope_device><<<3, 64>>>(words, out);
  acquire_release<cuda::thread_scope_system><<<2, 64>>>(words, out);
  CHECK(out.host()[0] == 96 + 192 + 128);
  CUDA(cudaMemset(words, 0, 256));
  relay<<<2, 64>>>(scratch, words, out);
  r = out.host();
  for (int t = 0; t < 64; t++) CHECK_AT(r[t] == t, t);
  some_leave<<<1, 64>>>(out, 40);
  r = out.host();
  for (int t = 0; t < 40; t++) CHECK_AT(r[t] == 39 - t, t);
  return finish("correct");
}
