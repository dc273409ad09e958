// mma.sync and ldmatrix against plain matrix products, with small whole numbers so that every sum is exact.
#include "check.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// One warp computes C[16x8] = A[16x16] B[16x8] + C; A is row major, B is given row major and transposed on the way in.
template <class T> __global__ void product16(const T *a, const T *b, float *c) {
  __shared__ __align__(16) T sa[16 * 16], sb[16 * 8];
  int l = threadIdx.x, g = l / 4, t = l % 4;
  for (int k = l; k < 256; k += 32) sa[k] = a[k];
  for (int k = l; k < 128; k += 32) sb[k] = b[k];
  __syncwarp();
  unsigned ra[4], rb[2];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3])
               : "r"(shared_address(sa + (l % 16) * 16 + l / 16 * 8)));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(rb[0]), "=r"(rb[1])
               : "r"(shared_address(sb + (l % 16) * 8)));
  float d[4] = {c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1]};
  if (sizeof(T) == 2 && __is_same(T, __nv_bfloat16))
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
                 "%1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
  c[g * 8 + 2 * t] = d[0], c[g * 8 + 2 * t + 1] = d[1], c[(g + 8) * 8 + 2 * t] = d[2],
                c[(g + 8) * 8 + 2 * t + 1] = d[3];
}

// Half precision sums, and depth 8.
__global__ void product8(const __half *a, const __half *b, __half *c) {
  int l = threadIdx.x, g = l / 4, t = l % 4;
  auto two = [](__half x, __half y) { return (unsigned)__half_as_ushort(y) << 16 | __half_as_ushort(x); };
  unsigned a0 = two(a[g * 8 + 2 * t], a[g * 8 + 2 * t + 1]),
           a1 = two(a[(g + 8) * 8 + 2 * t], a[(g + 8) * 8 + 2 * t + 1]);
  unsigned b0 = two(b[2 * t * 8 + g], b[(2 * t + 1) * 8 + g]), d0 = 0, d1 = 0;
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
               : "+r"(d0), "+r"(d1)
               : "r"(a0), "r"(a1), "r"(b0));
  *(unsigned *)(c + g * 8 + 2 * t) = d0, *(unsigned *)(c + (g + 8) * 8 + 2 * t) = d1;
}

__global__ void product_tf32(const float *a, const float *b, float *c) { // 16x8 by 8x8
  int l = threadIdx.x, g = l / 4, t = l % 4;
  auto tf32 = [](float x) {
    unsigned r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
  };
  unsigned ra[4] = {tf32(a[g * 8 + t]), tf32(a[(g + 8) * 8 + t]), tf32(a[g * 8 + t + 4]), tf32(a[(g + 8) * 8 + t + 4])};
  unsigned rb[2] = {tf32(b[t * 8 + g]), tf32(b[(t + 4) * 8 + g])};
  float d[4] = {};
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
               "%1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
  c[g * 8 + 2 * t] = d[0], c[g * 8 + 2 * t + 1] = d[1], c[(g + 8) * 8 + 2 * t] = d[2],
                c[(g + 8) * 8 + 2 * t + 1] = d[3];
}

template <class T> static std::vector<T> small(int n) {
  std::vector<T> v(n);
  for (auto &x : v) x = T((float)(int)(random_bits() % 9) - 4);
  return v;
}

template <class A, class C>
static void check(const std::vector<A> &a, const std::vector<A> &b, const std::vector<C> &c,
                  const std::vector<C> &start, int depth) {
  for (int r = 0; r < 16; r++)
    for (int n = 0; n < 8; n++) {
      float sum = (float)start[r * 8 + n];
      for (int k = 0; k < depth; k++) sum += (float)a[r * depth + k] * (float)b[k * 8 + n];
      CHECK_AT((float)c[r * 8 + n] == sum, r * 8 + n);
    }
}

template <class T> static void test16() {
  auto a = small<T>(256), b = small<T>(128);
  auto c = small<float>(128);
  Device<T> da(a), db(b);
  Device<float> dc(c);
  product16<T><<<1, 32>>>(da, db, dc);
  check(a, b, dc.host(), c, 16);
}

int main() {
  test16<__nv_bfloat16>(), test16<__half>();
  auto a = small<__half>(128), b = small<__half>(64);
  Device<__half> da(a), db(b), dc(128);
  product8<<<1, 32>>>(da, db, dc);
  check(a, b, dc.host(), std::vector<__half>(128, __half(0.0f)), 8);
  auto fa = small<float>(128), fb = small<float>(64);
  Device<float> dfa(fa), dfb(fb), dfc(128);
  product_tf32<<<1, 32>>>(dfa, dfb, dfc);
  check(fa, fb, dfc.host(), std::vector<float>(128, 0.0f), 8);
  return finish("matrix");
}
