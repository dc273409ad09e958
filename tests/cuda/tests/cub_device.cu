// Real CUB over whole arrays, at sizes from none to many tiles. An argument limits the largest size.
#include "check.h"
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_segmented_sort.cuh>
#include <cub/device/device_select.cuh>
#include <numeric>

// Calls twice, as CUB wants: for the size of its workspace, then for the work.
template <class F> static void with_workspace(F call) {
  size_t bytes = 0;
  CUDA(call(nullptr, bytes));
  Device<char> workspace(bytes ? bytes : 1);
  CUDA(call(workspace.data, bytes));
}

struct Even {
  __device__ bool operator()(int x) const { return x % 2 == 0; }
};

static std::vector<int> numbers(int n, int limit) {
  std::vector<int> v(n);
  for (auto &x : v) x = (int)(random_bits() % limit);
  return v;
}

static void test_scan_and_reduce(int n) {
  auto v = numbers(n, 100);
  Device<int> in(v), out(n), sum(1);
  with_workspace([&](void *w, size_t &b) { return cub::DeviceScan::ExclusiveSum(w, b, in.data, out.data, n); });
  with_workspace([&](void *w, size_t &b) { return cub::DeviceReduce::Sum(w, b, in.data, sum.data, n); });
  auto r = out.host();
  int expected = 0;
  for (int k = 0; k < n; k++) {
    CHECK_AT(r[k] == expected, k);
    expected += v[k];
  }
  CHECK(sum.host()[0] == expected);
}

static void test_sort(int n) {
  auto v = numbers(n, 1 << 30);
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  Device<unsigned> keys(std::vector<unsigned>(v.begin(), v.end())), sorted(n);
  Device<int> values(order), moved(n);
  with_workspace([&](void *w, size_t &b) {
    return cub::DeviceRadixSort::SortPairs(w, b, keys.data, sorted.data, values.data, moved.data, n);
  });
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return v[a] < v[b]; });
  if (n) CHECK(moved.host() == order);
}

static void test_segments(int n) {
  auto v = numbers(n, 1 << 30);
  std::vector<int> offsets{0};
  while (offsets.back() < n)
    offsets.push_back(
        std::min<int>(n, offsets.back() + (int)(random_bits() % 3 ? random_bits() % 40 : random_bits() % 3000)));
  Device<int> keys(v), sorted(n), begin(offsets);
  int segments = (int)offsets.size() - 1;
  with_workspace([&](void *w, size_t &b) {
    return cub::DeviceSegmentedSort::SortKeys(w, b, keys.data, sorted.data, n, segments, begin.data, begin.data + 1);
  });
  for (int s = 0; s < segments; s++) std::sort(v.begin() + offsets[s], v.begin() + offsets[s + 1]);
  if (n) CHECK(sorted.host() == v);
}

static void test_select(int n) {
  auto v = numbers(n, 1000);
  Device<int> in(v), out(n), count(1);
  with_workspace(
      [&](void *w, size_t &b) { return cub::DeviceSelect::If(w, b, in.data, out.data, count.data, n, Even()); });
  v.erase(std::remove_if(v.begin(), v.end(), [](int x) { return x % 2; }), v.end());
  int found = count.host()[0];
  CHECK(found == (int)v.size());
  auto r = out.host();
  r.resize(found);
  CHECK(r == v);
}

int main(int argc, char **argv) {
  int limit = argc > 1 ? atoi(argv[1]) : 200000;
  for (int n : {0, 1, 31, 1000, 5000, 33333, 200000}) {
    if (n > limit) continue;
    test_scan_and_reduce(n), test_sort(n), test_segments(n), test_select(n);
  }
  return finish("cub_device");
}
