// Planted faults: each is run on its own, and its report is expected. The names are those of CMakeLists.txt.
#include "check.h"
#include <cassert>
#include <string>

__global__ void write_past(int *p, int n) { p[threadIdx.x + n] = 1; }
__global__ void read_past(const int *p, int *out) { out[threadIdx.x] = p[threadIdx.x * 2]; }
__global__ void touch(int *p) { p[threadIdx.x] = 1; }
__global__ void shared_past(int *out, int n) {
  __shared__ int s[32];
  s[threadIdx.x + n] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void misaligned(char *p) { *(int *)(p + threadIdx.x * 4 + 2) = 1; }
__global__ void unset(int *out) {
  __shared__ int s[64];
  if (threadIdx.x < 31) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void divergent_barrier(int *out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = 1;
    __syncthreads();
  } else {
    out[threadIdx.x] = 2;
    __syncthreads();
    out[threadIdx.x] = 3;
  }
}
__global__ void exited_lane(int *out) {
  if (threadIdx.x == 31) return;
  out[threadIdx.x] = __shfl_sync(0xffffffff, threadIdx.x, 0);
}
__global__ void foreign_mask(int *out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __ballot_sync(0xff, 1);
}
__global__ void bad_source(int *out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffff, threadIdx.x, 20);
}
__global__ void failed_assert(int n) { assert(threadIdx.x < n); }
__global__ void deadlock(int *out) {
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
  else asm volatile("bar.sync 2, 64;" ::: "memory");
  out[threadIdx.x] = 1;
}
__global__ void spin(volatile int *flag) {
  while (*flag == 0) {
  }
}
__global__ void missing_barrier(int *out) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = s[threadIdx.x ^ 32];
}
__global__ void missing_second_barrier(int *out) {
  __shared__ int s[64];
  for (int k = 0; k < 3; k++) {
    s[threadIdx.x] = k;
    __syncthreads();
    out[threadIdx.x] = s[63 - threadIdx.x]; // read while others already write the next round
  }
}
__global__ void missing_warp_barrier(int *out) {
  __shared__ int s[32];
  s[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}
__global__ void shared_count(int *out) {
  __shared__ int s;
  if (threadIdx.x == 0) s = 0;
  __syncthreads();
  s += 1;
  __syncthreads();
  out[0] = s;
}
__global__ void blocks_collide(int *out) { out[threadIdx.x] = blockIdx.x; }
__global__ void byte_collide(unsigned char *out) {
  if (threadIdx.x == 0) out[blockIdx.x / 2] = 1;
}
__global__ void no_fence(const int *in, int *partial, unsigned *ticket, int *out) {
  __shared__ bool last;
  partial[blockIdx.x * blockDim.x + threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(ticket, 1) == gridDim.x - 1;
  __syncthreads();
  if (last) out[threadIdx.x] = partial[threadIdx.x];
}
__global__ void same_value(int *out) { // two warps raise one flag
  __shared__ int raised;
  if (threadIdx.x == 0) raised = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 5) raised = 1;
  __syncthreads();
  out[threadIdx.x] = raised;
}
__device__ int guard;
template <bool kFence> __global__ void lock_without_fence(int *count) {
  for (bool done = false; !done;) {
    if (atomicCAS(&guard, 0, 1) != 0) continue;
    if (kFence) __threadfence();
    count[0]++;
    atomicExch(&guard, 0);
    done = true;
  }
}
__global__ void written_after_fence(int *data, volatile int *flag) { // the second word is not covered by the fence
  if (threadIdx.x == 0) {
    data[0] = 1;
    __threadfence();
    data[1] = 1;
    *flag = 1;
  } else if (threadIdx.x == 32) {
    while (*flag != 1) __nanosleep(100);
    data[2] = data[0] + data[1];
  }
}
__global__ void only_one_waits(int *data, volatile int *flag) { // the others of its block are not held back
  if (blockIdx.x == 0) {
    data[threadIdx.x] = 1;
    __threadfence();
    atomicAdd((int *)flag, 1);
  } else {
    if (threadIdx.x == 0)
      while (*flag != 32) __nanosleep(100);
    data[32 + threadIdx.x] = data[threadIdx.x];
  }
}
__global__ void unknown_instruction(int *out) {
  unsigned mask;
  asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(mask) : "r"(0));
  out[0] = mask;
}
__global__ void local_past(int *out, int n) {
  int local[4] = {1, 2, 3, 4};
  for (int k = 0; k < n; k++) local[(k * 5) % n] += k;
  out[threadIdx.x] = local[threadIdx.x & 3];
}

int main(int argc, char **argv) {
  std::string name = argc > 1 ? argv[1] : "";
  int *p;
  CUDA(cudaMalloc(&p, 64 * sizeof(int)));
  if (name == "write_past") write_past<<<1, 32>>>(p, 33);
  else if (name == "read_past") read_past<<<1, 64>>>(p, p);
  else if (name == "use_after_free") {
    CUDA(cudaFree(p));
    touch<<<1, 32>>>(p);
  } else if (name == "unsynchronised") { // found although nobody waits for it
    write_past<<<1, 32>>>(p, 33);
    return 0;
  } else if (name == "host_pointer") {
    static int host[32];
    touch<<<1, 32>>>(host);
  } else if (name == "write_before") { // the nearest allocation is named, not the one that lies below
    int *next;
    CUDA(cudaMalloc(&next, 64));
    touch<<<1, 1>>>(next - 2);
  } else if (name == "pinned_after_free" || name == "pinned_host_after_free" || name == "pinned_copy_after_free") {
    int *pinned;
    CUDA(cudaMallocHost(&pinned, 128));
    CUDA(cudaFreeHost(pinned));
    if (name == "pinned_after_free") touch<<<1, 32>>>(pinned);
    else if (name == "pinned_host_after_free") pinned[2] = 1;
    else CUDA(cudaMemcpy(p, pinned, 128, cudaMemcpyHostToDevice));
  } else if (name == "shared_past") shared_past<<<1, 32>>>(p, 1);
  else if (name == "local_past") local_past<<<1, 32>>>(p, 7);
  else if (name == "misaligned") misaligned<<<1, 8>>>((char *)p);
  else if (name == "unset") unset<<<1, 32>>>(p);
  else if (name == "divergent_barrier") divergent_barrier<<<1, 32>>>(p);
  else if (name == "exited_lane") exited_lane<<<1, 32>>>(p);
  else if (name == "foreign_mask") foreign_mask<<<1, 32>>>(p);
  else if (name == "bad_source") bad_source<<<1, 32>>>(p);
  else if (name == "failed_assert") failed_assert<<<1, 32>>>(5);
  else if (name == "deadlock") deadlock<<<1, 64>>>(p);
  else if (name == "livelock") {
    CUDA(cudaMemset(p, 0, 4));
    spin<<<1, 32>>>(p);
  } else if (name == "missing_barrier") missing_barrier<<<1, 64>>>(p);
  else if (name == "missing_second_barrier") missing_second_barrier<<<1, 64>>>(p);
  else if (name == "missing_warp_barrier") missing_warp_barrier<<<1, 32>>>(p);
  else if (name == "same_value") same_value<<<1, 64>>>(p);
  else if (name == "shared_count") shared_count<<<1, 32>>>(p);
  else if (name == "blocks_collide") blocks_collide<<<2, 32>>>(p);
  else if (name == "byte_collide") byte_collide<<<4, 32>>>((unsigned char *)p);
  else if (name == "lock_without_fence") {
    CUDA(cudaMemset(p, 0, 4));
    lock_without_fence<false><<<1, 64>>>(p);
  } else if (name == "unlock_without_fence") {
    CUDA(cudaMemset(p, 0, 4));
    lock_without_fence<true><<<1, 64>>>(p);
  } else if (name == "written_after_fence" || name == "only_one_waits") {
    int *flag;
    CUDA(cudaMalloc(&flag, 4));
    CUDA(cudaMemset(flag, 0, 4));
    if (name == "written_after_fence") written_after_fence<<<1, 64>>>(p, flag);
    else only_one_waits<<<2, 32>>>(p, flag);
  } else if (name == "no_fence") {
    CUDA(cudaMemset(p, 0, 256));
    int *partial, *out;
    CUDA(cudaMalloc(&partial, 1024));
    CUDA(cudaMalloc(&out, 1024));
    no_fence<<<4, 32>>>(p, partial, (unsigned *)p + 40, out);
  } else if (name == "host_read") {
    volatile int v = *p;
    (void)v;
  } else if (name == "host_write") {
    *(volatile int *)(p + 3) = 1;
  } else if (name == "copy_past") {
    int host[65];
    CUDA(cudaMemcpy(host, p, sizeof host, cudaMemcpyDeviceToHost));
  } else if (name == "unknown_instruction") unknown_instruction<<<1, 1>>>(p);
  else return 1;
  CUDA(cudaDeviceSynchronize());
  printf("nothing was noticed\n");
}
