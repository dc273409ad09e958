// Real CUB inside kernels: block and warp collectives.
#include "check.h"
#include <algorithm>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <numeric>

template <int kThreads, cub::BlockScanAlgorithm kAlgorithm> __global__ void scan(const int *in, int *out, int *total) {
  using Scan = cub::BlockScan<int, kThreads, kAlgorithm>;
  __shared__ typename Scan::TempStorage temp;
  int items[3], sum;
  for (int k = 0; k < 3; k++) items[k] = in[blockIdx.x * 3 * kThreads + threadIdx.x * 3 + k];
  Scan(temp).ExclusiveSum(items, items, sum);
  for (int k = 0; k < 3; k++) out[blockIdx.x * 3 * kThreads + threadIdx.x * 3 + k] = items[k];
  if (threadIdx.x == 0) total[blockIdx.x] = sum;
}

template <int kThreads, cub::BlockReduceAlgorithm kAlgorithm>
__global__ void reduce(const int *in, int *out, int valid) {
  using Reduce = cub::BlockReduce<int, kThreads, kAlgorithm>;
  __shared__ typename Reduce::TempStorage temp;
  int sum = Reduce(temp).Sum(in[threadIdx.x], valid);
  if (threadIdx.x == 0) *out = sum;
}

__global__ void sort(unsigned *keys, int *values, int begin_bit, int end_bit) {
  using Sort = cub::BlockRadixSort<unsigned, 128, 4, int>;
  __shared__ typename Sort::TempStorage temp;
  unsigned k[4];
  int v[4];
  for (int j = 0; j < 4; j++) k[j] = keys[threadIdx.x * 4 + j], v[j] = values[threadIdx.x * 4 + j];
  Sort(temp).Sort(k, v, begin_bit, end_bit);
  for (int j = 0; j < 4; j++) keys[threadIdx.x * 4 + j] = k[j], values[threadIdx.x * 4 + j] = v[j];
}

template <int kWidth> __global__ void warp_reduce(const float *in, float *out, int valid) {
  using Reduce = cub::WarpReduce<float, kWidth>;
  __shared__ typename Reduce::TempStorage temp[64 / kWidth];
  int w = threadIdx.x / kWidth;
  float sum = Reduce(temp[w]).Sum(in[threadIdx.x], valid);
  if (threadIdx.x % kWidth == 0) out[w] = sum;
}

template <int kThreads, cub::BlockScanAlgorithm kAlgorithm> static void test_scan() {
  const int blocks = 2, n = blocks * 3 * kThreads;
  std::vector<int> v(n);
  for (auto &x : v) x = (int)(random_bits() % 100);
  Device<int> in(v), out(n), total(blocks);
  scan<kThreads, kAlgorithm><<<blocks, kThreads>>>(in, out, total);
  auto r = out.host(), t = total.host();
  for (int b = 0, k = 0; b < blocks; b++) {
    int sum = 0;
    for (int j = 0; j < 3 * kThreads; j++, k++) {
      CHECK_AT(r[k] == sum, k);
      sum += v[k];
    }
    CHECK(t[b] == sum);
  }
}

template <int kThreads, cub::BlockReduceAlgorithm kAlgorithm> static void test_reduce() {
  std::vector<int> v(kThreads);
  for (auto &x : v) x = (int)(random_bits() % 1000);
  Device<int> in(v), out(1);
  for (int valid : {1, kThreads / 2 + 1, kThreads}) {
    reduce<kThreads, kAlgorithm><<<1, kThreads>>>(in, out, valid);
    CHECK(out.host()[0] == std::accumulate(v.begin(), v.begin() + valid, 0));
  }
}

template <int kWidth> static void test_warp_reduce() {
  std::vector<float> v(64);
  for (int k = 0; k < 64; k++) v[k] = (float)k;
  Device<float> in(v), out(64 / kWidth);
  for (int valid : {1, kWidth - 1, kWidth}) {
    warp_reduce<kWidth><<<1, 64>>>(in, out, valid);
    auto r = out.host();
    for (int w = 0; w < 64 / kWidth; w++)
      CHECK_AT(r[w] == std::accumulate(v.begin() + w * kWidth, v.begin() + w * kWidth + valid, 0.0f), w);
  }
}

static void test_sort() {
  std::vector<unsigned> keys(512);
  std::vector<int> values(512), order(512);
  for (auto &k : keys) k = (unsigned)random_bits();
  for (int begin : {0, 5}) {
    std::iota(values.begin(), values.end(), 0), order = values;
    Device<unsigned> dk(keys);
    Device<int> dv(values);
    sort<<<1, 128>>>(dk, dv, begin, begin ? 17 : 32);
    auto digit = [&](int k) { return begin ? keys[k] >> 5 & 0xfff : keys[k]; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return digit(a) < digit(b); });
    auto rk = dk.host();
    CHECK(dv.host() == order);
    for (int k = 0; k < 512; k++) CHECK_AT(rk[k] == keys[order[k]], k);
  }
}

int main() {
  test_scan<64, cub::BLOCK_SCAN_RAKING>(), test_scan<96, cub::BLOCK_SCAN_WARP_SCANS>(),
      test_scan<128, cub::BLOCK_SCAN_RAKING_MEMOIZE>();
  test_reduce<96, cub::BLOCK_REDUCE_WARP_REDUCTIONS>(), test_reduce<100, cub::BLOCK_REDUCE_RAKING>(),
      test_reduce<128, cub::BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY>();
  test_warp_reduce<32>(), test_warp_reduce<8>(), test_warp_reduce<16>();
  test_sort();
  return finish("cub_block");
}
