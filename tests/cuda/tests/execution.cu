// Warps, memory, calls and the rest of the machine.
#include "check.h"
#include <cassert>
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <functional>
#include <numeric>
namespace cg = cooperative_groups;

// ---- Warp operations, with the values of every lane recomputed on the host

struct WarpResults {
  uint32_t up[32], down[32], butterfly[32], index[32], segment[32], ballot[32], any[32], all[32], match_any[32],
      match_all[32];
  uint32_t add[32], min_u[32], max_s[32], bit_and[32], bit_or[32], bit_xor[32], pred_all[32];
  uint64_t wide[32];
};

__global__ void warp_ops(const uint32_t *in, WarpResults *r) {
  int l = threadIdx.x;
  uint32_t v = in[l];
  const unsigned full = 0xffffffff;
  r->up[l] = __shfl_up_sync(full, v, 3);
  r->down[l] = __shfl_down_sync(full, v, 5, 16);
  r->butterfly[l] = __shfl_xor_sync(full, v, 9);
  r->index[l] = __shfl_sync(full, v, (l * 7) & 31);
  r->segment[l] = __shfl_sync(full, v, 2, 8);
  r->wide[l] = __shfl_xor_sync(full, (unsigned long long)v << 32 | l, 1);
  r->ballot[l] = __ballot_sync(full, v & 1);
  r->any[l] = __any_sync(full, v == in[13]);
  r->all[l] = __all_sync(full, v != 12345);
  r->match_any[l] = __match_any_sync(full, v & 3);
  int p;
  r->match_all[l] = __match_all_sync(full, l >> 5, &p);
  r->pred_all[l] = p;
  r->add[l] = __reduce_add_sync(full, v);
  r->min_u[l] = __reduce_min_sync(full, v);
  r->max_s[l] = __reduce_max_sync(full, (int)v);
  r->bit_and[l] = __reduce_and_sync(full, v | 0xff);
  r->bit_or[l] = __reduce_or_sync(full, v & 0xff00);
  r->bit_xor[l] = __reduce_xor_sync(full, v);
}

static void test_warp() {
  std::vector<uint32_t> v(32);
  for (auto &x : v) x = (uint32_t)random_bits();
  Device<uint32_t> in(v);
  Device<WarpResults> out(1);
  warp_ops<<<1, 32>>>(in, out);
  WarpResults r = out.host()[0];
  uint32_t ballot = 0, add = 0, lo = ~0u, band = ~0u, bor = 0, bxor = 0, match[4] = {};
  int32_t hi = INT32_MIN;
  for (int l = 0; l < 32; l++) {
    ballot |= (v[l] & 1) << l, add += v[l], lo = std::min(lo, v[l]), hi = std::max(hi, (int32_t)v[l]);
    band &= v[l] | 0xff, bor |= v[l] & 0xff00, bxor ^= v[l], match[v[l] & 3] |= 1u << l;
  }
  for (int l = 0; l < 32; l++) {
    CHECK_AT(r.up[l] == v[l < 3 ? l : l - 3], l);
    CHECK_AT(r.down[l] == v[l % 16 + 5 < 16 ? l + 5 : l], l);
    CHECK_AT(r.butterfly[l] == v[l ^ 9], l);
    CHECK_AT(r.index[l] == v[l * 7 & 31], l);
    CHECK_AT(r.segment[l] == v[(l & ~7) + 2], l);
    CHECK_AT(r.wide[l] == ((uint64_t)v[l ^ 1] << 32 | (l ^ 1)), l);
    CHECK_AT(r.ballot[l] == ballot && r.any[l] == 1 && r.all[l] == 1, l);
    CHECK_AT(r.match_any[l] == match[v[l] & 3] && r.match_all[l] == ~0u && r.pred_all[l] == 1, l);
    CHECK_AT(r.add[l] == add && r.min_u[l] == lo && r.max_s[l] == (uint32_t)hi, l);
    CHECK_AT(r.bit_and[l] == band && r.bit_or[l] == bor && r.bit_xor[l] == bxor, l);
  }
}

// Divergent code in which subsets of the warp meet.
__global__ void subsets(int *out) {
  int l = threadIdx.x;
  int sum;
  if (l < 12) {
    sum = __reduce_add_sync(0xfff, l);
  } else if (l % 2) {
    sum = __shfl_sync(0xaaaaa000, l, 13);
  } else {
    unsigned peers = __match_any_sync(0x55555000, l / 8);
    sum = __reduce_add_sync(peers, 1); // every lane has the mask of its own peers
  }
  for (int k = 0; k < l % 4; k++) sum += 100; // leave at different times
  __syncwarp();
  out[l] = sum + __shfl_xor_sync(0xffffffff, l, 16) * 1000;
}

static void test_subsets() {
  Device<int> out(32);
  subsets<<<1, 32>>>(out);
  auto r = out.host();
  int peers[4] = {};
  for (int l = 12; l < 32; l += 2) peers[l / 8]++;
  for (int l = 0; l < 32; l++) {
    int want = l < 12 ? 66 : l % 2 ? 13 : peers[l / 8];
    CHECK_AT(r[l] == want + 100 * (l % 4) + 1000 * (l ^ 16), l);
  }
}

__global__ void tiles(const int *in, int *out) {
  auto block = cg::this_thread_block();
  auto tile = cg::tiled_partition<8>(block);
  int v = in[block.thread_rank()];
  for (int d = tile.size() / 2; d > 0; d /= 2) v += tile.shfl_xor(v, d);
  tile.sync();
  if (tile.thread_rank() == 0) out[block.thread_rank() / 8] = v;
  auto active = cg::coalesced_threads();
  if (block.thread_rank() % 3 == 0) {
    auto third = cg::coalesced_threads();
    if (third.thread_rank() == 0) atomicAdd(out + 100, (int)third.size());
  }
  block.sync();
  if (block.thread_rank() == 0) out[101] = active.size();
}

static void test_tiles() {
  std::vector<int> v(96);
  for (int k = 0; k < 96; k++) v[k] = k * k;
  Device<int> in(v), out(102);
  CUDA(cudaMemset(out, 0, 102 * 4));
  tiles<<<1, 96>>>(in, out);
  auto r = out.host();
  for (int t = 0; t < 12; t++) CHECK_AT(r[t] == std::accumulate(v.begin() + 8 * t, v.begin() + 8 * t + 8, 0), t);
  const char *order = getenv("PTXVM_ORDER");
  if (!order || !strcmp(order, "lockstep")) CHECK(r[100] == 32 && r[101] == 32); // otherwise any grouping is legal
}

// ---- Atomics of every width and type

struct Atomics {
  unsigned add32, sub32, min32, max32, exch32, inc, dec, band, bor, bxor, cas32;
  int smin, smax;
  unsigned long long add64, min64, max64, exch64, cas64, and64;
  long long smin64;
  float addf;
  double addd;
  __half2 addh2;
  __nv_bfloat162 addb2;
  __half addh;
  __nv_bfloat16 addb;
  unsigned short cas16;
};

template <class T> __device__ void loop_cas(T *at, T add) {
  T old = *(volatile T *)at, seen;
  while ((seen = atomicCAS(at, old, (T)(old + add))) != old) old = seen;
}

__device__ void all_atomics(Atomics *a, unsigned t) {
  atomicAdd(&a->add32, t), atomicSub(&a->sub32, t), atomicMin(&a->min32, t + 5), atomicMax(&a->max32, t),
      atomicMin(&a->smin, -(int)t);
  atomicMax(&a->smax, -(int)t - 1), atomicInc(&a->inc, 9), atomicDec(&a->dec, 12), atomicAnd(&a->band, ~(1u << t % 32));
  atomicOr(&a->bor, 1u << t % 32), atomicXor(&a->bxor, t * 2654435761u), atomicExch(&a->exch32, 77u),
      atomicExch(&a->exch64, 88ull);
  atomicAdd(&a->add64, (unsigned long long)t << 33), atomicMin(&a->min64, (1ull << 40) + t),
      atomicMax(&a->max64, (1ull << 40) + t);
  atomicMin(&a->smin64, -(1ll << 40) - t), atomicAnd(&a->and64, ~(1ull << (t % 64)));
  atomicAdd(&a->addf, 0.5f), atomicAdd(&a->addd, 0.25), atomicAdd(&a->addh2, __floats2half2_rn(1, 2));
  atomicAdd(&a->addb2, __floats2bfloat162_rn(1, 2)), atomicAdd(&a->addh, __float2half(1)),
      atomicAdd(&a->addb, __float2bfloat16(1));
  loop_cas(&a->cas32, 3u), loop_cas(&a->cas64, 3ull), loop_cas(&a->cas16, (unsigned short)3);
}

__global__ void atomics(Atomics *global, Atomics *from_shared, const Atomics *initial) {
  __shared__ Atomics shared;
  if (threadIdx.x == 0) shared = *initial;
  __syncthreads();
  all_atomics(global, blockIdx.x * blockDim.x + threadIdx.x);
  all_atomics(&shared, threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) from_shared[blockIdx.x] = shared;
}

static void check_atomics(const Atomics &a, unsigned n) {
  unsigned sum = n * (n - 1) / 2, x = 0;
  for (unsigned t = 0; t < n; t++) x ^= t * 2654435761u;
  CHECK(a.add32 == sum && a.sub32 == 0u - sum && a.min32 == 5 && a.max32 == n - 1 && a.smin == -(int)(n - 1) &&
        a.smax == -1);
  CHECK(a.inc == n % 10 && a.dec == (13 - n % 13) % 13 && a.band == 0 && a.bor == ~0u && a.bxor == x &&
        a.exch32 == 77 && a.exch64 == 88);
  CHECK(a.add64 == (unsigned long long)sum << 33 && a.min64 == 1ull << 40 && a.max64 == (1ull << 40) + n - 1);
  CHECK(a.smin64 == -(1ll << 40) - (n - 1) && a.and64 == 0 && a.addf == n * 0.5f && a.addd == n * 0.25);
  CHECK(__low2float(a.addh2) == n && __high2float(a.addh2) == 2 * n && __low2float(a.addb2) == n &&
        __high2float(a.addb2) == 2 * n);
  CHECK(__half2float(a.addh) == n && __bfloat162float(a.addb) == n && a.cas32 == 3 * n && a.cas64 == 3ull * n &&
        a.cas16 == 3 * n);
}

static void test_atomics() {
  Atomics zero;
  memset(&zero, 0, sizeof zero);
  zero.min32 = zero.band = ~0u, zero.min64 = zero.and64 = ~0ull, zero.smax = -1000;
  Device<Atomics> initial(std::vector<Atomics>{zero}), global(std::vector<Atomics>{zero}), shared(2);
  atomics<<<2, 64>>>(global, shared, initial);
  check_atomics(global.host()[0], 128);
  check_atomics(shared.host()[0], 64);
  check_atomics(shared.host()[1], 64);
}

// What compute capability 9.0 adds: 128 bits, and vectors.
struct __align__(16) Wide {
  unsigned long long low, high;
};
__global__ void wide_atomics(Wide *w, Wide *old, float2 *two, float4 *four, float4 *before) {
#if __CUDA_ARCH__ >= 900
  int t = threadIdx.x;
  Wide seen{5, 7};
  for (;;) { // adds 1 and 2 to the halves together
    Wide found = atomicCAS(w, seen, Wide{seen.low + 1, seen.high + 2});
    if (found.low == seen.low && found.high == seen.high) break;
    seen = found;
  }
  old[t] = atomicExch(w + 1, Wide{(unsigned long long)t, ~0ull - t});
  atomicAdd(two, make_float2(1, 2));
  before[t] = atomicAdd(four, make_float4(1, 2, 3, 4));
#endif
}

static void test_wide_atomics() {
  cudaFuncAttributes attributes;
  CUDA(cudaFuncGetAttributes(&attributes, wide_atomics));
  if (attributes.ptxVersion < 90) return;
  Device<Wide> w(std::vector<Wide>(2, Wide{5, 7})), old(64);
  Device<float2> two(std::vector<float2>(1, make_float2(0, 0)));
  Device<float4> four(std::vector<float4>(1, make_float4(0, 0, 0, 0))), before(64);
  wide_atomics<<<1, 64>>>(w, old, two, four, before);
  Wide sum = w.host()[0], last = w.host()[1];
  CHECK(sum.low == 5 + 64 && sum.high == 7 + 128);
  int seen = 0; // everybody's value is either found by another or left at the end
  for (Wide x : old.host()) seen += x.low == 5 && x.high == 7 ? 1 : x.high == ~0ull - x.low;
  CHECK(seen == 64 && last.high == ~0ull - last.low);
  CHECK(two.host()[0].x == 64 && two.host()[0].y == 128 && four.host()[0].x == 64 && four.host()[0].w == 256);
  int zero = 0;
  for (float4 x : before.host()) zero += x.x == 0 && x.w == 0;
  CHECK(zero == 1);
}

// ---- cp.async, shared memory, parameters, calls

__global__ void copies(const float *in, float *out, int n) {
  extern __shared__ float4 buffer[];
  float *f = (float *)buffer;
  int t = threadIdx.x, stages = n / (4 * blockDim.x);
  for (int s = 0; s < 2; s++) {
    __pipeline_memcpy_async(buffer + s * blockDim.x + t, (const float4 *)in + s * blockDim.x + t, 16);
    __pipeline_commit();
  }
  for (int s = 0; s < stages; s++) {
    __pipeline_wait_prior(1);
    __syncthreads();
    for (int k = 0; k < 4; k++) {
      int at = k * blockDim.x + t;
      out[s * 4 * blockDim.x + at] = f[(s & 1) * 4 * blockDim.x + at] * 2;
    }
    __syncthreads();
    if (s + 2 < stages)
      __pipeline_memcpy_async(buffer + (s & 1) * blockDim.x + t, (const float4 *)in + (s + 2) * blockDim.x + t, 16);
    __pipeline_commit();
  }
}

__global__ void zero_fill(const int *in, int *out) { // 8 of 16 bytes, the rest zero
  __shared__ int4 s[32];
  __pipeline_memcpy_async(s + threadIdx.x, (const int4 *)in + threadIdx.x, 16, 8);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  ((int4 *)out)[threadIdx.x] = s[threadIdx.x];
}

static void test_copies() {
  const int n = 64 * 4 * 5;
  std::vector<float> v(n);
  for (int k = 0; k < n; k++) v[k] = (float)k;
  Device<float> in(v), out(n);
  copies<<<1, 64, 2 * 64 * 16>>>(in, out, n);
  auto r = out.host();
  for (int k = 0; k < n; k++) CHECK_AT(r[k] == 2.0f * k, k);
  std::vector<int> w(128);
  for (int k = 0; k < 128; k++) w[k] = k + 1;
  Device<int> iw(w), ow(128);
  zero_fill<<<1, 32>>>(iw, ow);
  auto z = ow.host();
  for (int k = 0; k < 128; k++) CHECK_AT(z[k] == (k % 4 < 2 ? k + 1 : 0), k);
}

struct Nested {
  char c;
  double d;
  short s[3];
  struct {
    float x, y;
  } p[2];
};
struct Pair {
  long long a;
  int b;
};
__device__ __noinline__ Pair pack(Nested n, int k) { return {(long long)(n.d * 10) + n.c, n.s[k] + (int)n.p[1].y}; }
__device__ __noinline__ int depth(int n) { return n <= 0 ? 0 : 1 + depth(n - 1 - (n & 1)); }
__device__ __noinline__ int twice(int x) { return 2 * x; }
__device__ __noinline__ int square(int x) { return x * x; }
typedef int (*Operation)(int);
__device__ Operation operations[2] = {twice, square};
__constant__ int table[4];
__device__ int counter = 41;

struct Shape {
  __device__ virtual int area(int x) { return x; }
};
struct Square : Shape {
  __device__ int area(int x) override { return x * x; }
};

__global__ void calls(Nested n, Pair *pairs, int *ints) {
  int t = threadIdx.x;
  n.s[t % 3] += t;
  pairs[t] = pack(n, t % 3);
  Shape plain;
  Square square_shape;
  Shape *shape = t % 2 ? &plain : &square_shape;
  int local[8];
  for (int k = 0; k < 8; k++) local[k] = k * t;
  ints[t] = depth(t) + 1000 * operations[t & 1](t) + local[t & 7] + table[t & 3] + shape->area(t);
  if (t == 0) atomicAdd(&counter, 1);
}

static void test_calls() {
  Nested n = {'A', 2.5, {10, 20, 30}, {{1, 2}, {3, 4}}};
  Device<Pair> pairs(64);
  Device<int> ints(64);
  int values[4] = {7, 8, 9, 10};
  CUDA(cudaMemcpyToSymbol(table, values, sizeof values));
  calls<<<1, 64>>>(n, pairs, ints);
  auto p = pairs.host();
  auto r = ints.host();
  for (int t = 0; t < 64; t++) {
    CHECK_AT(p[t].a == 25 + 'A' && p[t].b == 10 * (t % 3 + 1) + t + 4, t);
    int d = 0;
    for (int k = t; k > 0; k = k - 1 - (k & 1)) d++;
    int want = d + 1000 * (t & 1 ? t * t : 2 * t) + (t & 7) * t + 7 + (t & 3) + (t % 2 ? t : t * t);
    CHECK_AT(r[t] == want, t);
  }
  int c;
  CUDA(cudaMemcpyFromSymbol(&c, counter, sizeof c));
  CHECK(c == 42);
}

__global__ void control(const int *in, int *out) {
  int v = in[threadIdx.x], r = 0;
  switch (v % 9) {
  case 0: r = 5; break;
  case 1: r = v * 3; break;
  case 2: r = 17;
  case 3: r += 4; break;
  case 4:
    for (int k = 0; k < v % 20; k++) {
      if (k == 13) break;
      r += k;
    }
    break;
  case 5: {
    int x = v;
    while (x > 1) x = x % 2 ? 3 * x + 1 : x / 2, r++;
    break;
  }
  case 6: return;
  case 7:
    if (v % 2) {
      if (v % 3) r = 1;
      else r = 2;
    } else r = 3;
    break;
  default: r = -1;
  }
  out[threadIdx.x] = r;
}

static int control_host(int v) {
  int r = 0;
  switch (v % 9) {
  case 0: return 5;
  case 1: return v * 3;
  case 2: return 21;
  case 3: return 4;
  case 4:
    for (int k = 0; k < v % 20 && k < 13; k++) r += k;
    return r;
  case 5:
    for (int x = v; x > 1; r++) x = x % 2 ? 3 * x + 1 : x / 2;
    return r;
  case 6: return -7;
  case 7: return v % 2 ? (v % 3 ? 1 : 2) : 3;
  default: return -1;
  }
}

static void test_control() {
  std::vector<int> v(512), minus(512, -7);
  for (auto &x : v) x = 1 + (int)(random_bits() % 997);
  Device<int> in(v), out(minus);
  control<<<1, 512>>>(in, out);
  auto r = out.host();
  for (int t = 0; t < 512; t++) CHECK_AT(r[t] == control_host(v[t]), t);
}

__global__ void barriers(int *out) {
  __shared__ int s[96];
  int t = threadIdx.x;
  s[t] = t;
  int n = __syncthreads_count(t % 3 == 0), all = __syncthreads_and(t < 96), any = __syncthreads_or(t == 95);
  out[t] = s[95 - t] + 1000 * n + 100000 * all + 1000000 * any;
  __syncthreads();
  if (t < 64) { // a barrier of two of the three warps
    s[t] = -t;
    asm volatile("bar.sync 1, 64;" ::: "memory");
    out[t] += s[63 - t] * 10000000;
  }
}

static void test_barriers() {
  Device<int> out(96);
  barriers<<<1, 96>>>(out);
  auto r = out.host();
  for (int t = 0; t < 96; t++) CHECK_AT(r[t] == 95 - t + 32000 + 1100000 - (t < 64 ? (63 - t) * 10000000 : 0), t);
}

__global__ void shapes(int *out, const __grid_constant__ dim3 d) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y,
      z = blockIdx.z * blockDim.z + threadIdx.z;
  const dim3 *p = &d;
  out[(z * p->y + y) * p->x + x] = x + 100 * y + 10000 * z;
}

static void test_shapes() {
  dim3 d(9, 10, 8);
  Device<int> out(9 * 10 * 8);
  shapes<<<dim3(3, 5, 2), dim3(3, 2, 4)>>>(out, d);
  auto r = out.host();
  for (int k = 0; k < 720; k++) CHECK_AT(r[k] == k % 9 + 100 * (k / 9 % 10) + 10000 * (k / 90), k);
}

// printf returns how many arguments it has read, and a width may be one of them.
__global__ void say_widths(int *out) {
  out[0] = printf("[%*d|%-*d|%.3f|%*s]\n", 5, 42, -4, 7, 1.0, 3, "x");
  out[1] = printf("none%%\n");
  out[2] = printf("%lld %hhd %.2e\n", -1ll, 300, 12345.0);
}
__global__ void say(const char *word, int n) {
  if (threadIdx.x == 0) printf("%s %d %5.2f %lld %c %x%%\n", word, n, 3.14159, 1ll << 40, 'z', 255u);
}
__global__ void asserted(int n) { assert(n == 1 && "never seen"); }

static void test_output() {
  Device<char> word(std::vector<char>{'h', 'i', 0});
  say<<<1, 32>>>(word, 5);
  asserted<<<1, 32>>>(1);
  Device<int> counts(3);
  say_widths<<<1, 1>>>(counts);
  auto c = counts.host();
  CHECK(c[0] == 7 && c[1] == 0 && c[2] == 3);
  CUDA(cudaDeviceSynchronize());
}

int main() {
  test_warp(), test_subsets(), test_tiles(), test_atomics(), test_wide_atomics(), test_copies(), test_calls(),
      test_control(), test_barriers();
  test_shapes(), test_output();
  return finish("execution");
}
