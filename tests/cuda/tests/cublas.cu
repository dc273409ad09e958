// The fake cuBLAS against products computed here, its strictness, and its place in streams.
#include "check.h"
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" void ptxvm_fail_call(const char *name, int n);

template <class T> struct Kind;
template <> struct Kind<float> { static constexpr cudaDataType type = CUDA_R_32F; };
template <> struct Kind<__half> { static constexpr cudaDataType type = CUDA_R_16F; };
template <> struct Kind<__nv_bfloat16> { static constexpr cudaDataType type = CUDA_R_16BF; };

template <class T> static std::vector<T> numbers(size_t n) {
  std::vector<T> v(n);
  for (auto &x : v) x = T((float)((int)(random_bits() % 17) - 8) / 4);
  return v;
}

static cublasHandle_t handle;
static const float one = 1, zero = 0, half_of = 0.5f, two = 2;

// C = alpha op(A) op(B) + beta C in double.
template <class T, class C>
static void expect(bool ta, bool tb, int m, int n, int k, float alpha, const T *a, int lda, const T *b, int ldb,
                   float beta, const C *before, const C *after, int ldc) {
  for (int j = 0; j < n; j++)
    for (int i = 0; i < m; i++) {
      double sum = 0;
      for (int p = 0; p < k; p++)
        sum += (double)(float)a[ta ? i * lda + p : p * lda + i] * (double)(float)b[tb ? p * ldb + j : j * ldb + p];
      double want = alpha * sum + (beta ? beta * (double)(float)before[j * ldc + i] : 0),
             got = (double)(float)after[j * ldc + i];
      CHECK_AT(std::fabs(got - want) <= (sizeof(C) == 2 ? 8e-3 : 1e-6) * (std::fabs(want) + 1), j * ldc + i);
    }
}

template <class T, class C> static void test_gemm() {
  const int m = 5, n = 7, k = 9;
  for (int form = 0; form < 4; form++) {
    bool ta = form & 1, tb = form & 2;
    int lda = (ta ? k : m) + 2, ldb = (tb ? n : k) + 1, ldc = m + 3;
    auto a = numbers<T>(lda * (ta ? m : k)), b = numbers<T>(ldb * (tb ? k : n));
    auto c = numbers<C>(ldc * n);
    Device<T> da(a), db(b);
    Device<C> dc(c), fresh(ldc * n);
    CHECK(cublasGemmEx(handle, ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb ? CUBLAS_OP_T : CUBLAS_OP_N, m, n, k, &two, da,
                       Kind<T>::type, lda, db, Kind<T>::type, ldb, &half_of, dc, Kind<C>::type, ldc, CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
    expect(ta, tb, m, n, k, 2, a.data(), lda, b.data(), ldb, 0.5f, c.data(), dc.host().data(), ldc);
    // beta = 0 does not read C, which holds NaN here.
    CHECK(cublasGemmEx(handle, ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb ? CUBLAS_OP_T : CUBLAS_OP_N, m, n, k, &one, da,
                       Kind<T>::type, lda, db, Kind<T>::type, ldb, &zero, fresh, Kind<C>::type, ldc, CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
    expect(ta, tb, m, n, k, 1, a.data(), lda, b.data(), ldb, 0, c.data(), fresh.host().data(), ldc);
  }
}

template <class T, class C> static void test_batches() {
  const int m = 4, n = 3, k = 6, count = 3;
  auto a = numbers<T>(m * k * count), b = numbers<T>(k * n * count);
  auto c = numbers<C>(m * n * count);
  Device<T> da(a), db(b);
  Device<C> dc(c), dd(c);
  CHECK(cublasGemmStridedBatchedEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &one, da, Kind<T>::type, m, m * k, db,
                                   Kind<T>::type, k, k * n, &one, dc, Kind<C>::type, m, m * n, count,
                                   CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
  std::vector<void *> pa, pb, pc;
  for (int g = 0; g < count; g++)
    pa.push_back(da.data + g * m * k), pb.push_back(db.data + g * k * n), pc.push_back(dd.data + g * m * n);
  Device<void *> la(pa), lb(pb), lc(pc);
  CHECK(cublasGemmBatchedEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &one, la, Kind<T>::type, m, lb, Kind<T>::type, k,
                            &one, lc, Kind<C>::type, m, count, CUBLAS_COMPUTE_32F,
                            CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
  auto x = dc.host(), y = dd.host();
  for (int g = 0; g < count; g++) {
    expect(false, false, m, n, k, 1, &a[g * m * k], m, &b[g * k * n], k, 1, &c[g * m * n], &x[g * m * n], m);
    expect(false, false, m, n, k, 1, &a[g * m * k], m, &b[g * k * n], k, 1, &c[g * m * n], &y[g * m * n], m);
  }
}

template <class T> static void test_grouped() { // sizes by group, one of them empty
  const int groups = 3;
  const int m[groups] = {4, 2, 5}, n[groups] = {3, 4, 2}, k[groups] = {6, 0, 3}, size[groups] = {2, 1, 1};
  const float alpha[groups] = {1, 2, 0.5f}, beta[groups] = {0, 0, 1};
  const cublasOperation_t none[groups] = {CUBLAS_OP_N, CUBLAS_OP_N, CUBLAS_OP_N};
  const int ldb[groups] = {6, 1, 3};
  std::vector<std::vector<T>> a, b, c;
  std::vector<Device<T> *> hold;
  std::vector<void *> pa, pb, pc;
  for (int g = 0; g < groups; g++)
    for (int j = 0; j < size[g]; j++) {
      a.push_back(numbers<T>(m[g] * k[g] + 1)), b.push_back(numbers<T>(k[g] * n[g] + 1)),
          c.push_back(numbers<T>(m[g] * n[g]));
      hold.push_back(new Device<T>(a.back())), pa.push_back(hold.back()->data);
      hold.push_back(new Device<T>(b.back())), pb.push_back(hold.back()->data);
      hold.push_back(new Device<T>(c.back())), pc.push_back(hold.back()->data);
    }
  Device<void *> la(pa), lb(pb), lc(pc);
  CHECK(cublasGemmGroupedBatchedEx(handle, none, none, m, n, k, alpha, la, Kind<T>::type, m, lb, Kind<T>::type, ldb,
                                   beta, lc, Kind<T>::type, m, groups, size,
                                   CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_SUCCESS);
  for (int g = 0, at = 0; g < groups; g++)
    for (int j = 0; j < size[g]; j++, at++) {
      auto after = hold[3 * at + 2]->host();
      expect(false, false, m[g], n[g], k[g], alpha[g], a[at].data(), m[g], b[at].data(), ldb[g], beta[g], c[at].data(),
             after.data(), m[g]);
    }
  for (auto *d : hold) delete d;
}

static void test_strictness() {
  Device<float> f(64);
  auto gemm = [&](int m, int lda, cudaDataType ta, cudaDataType tb, cudaDataType tc, cublasComputeType_t compute) {
    return cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, 2, 2, &one, f, ta, lda, f, tb, 2, &zero, f, tc, 4, compute,
                        CUBLAS_GEMM_DEFAULT);
  };
  CHECK(gemm(-1, 4, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(gemm(4, 3, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(gemm(4, 4, CUDA_R_16F, CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_NOT_SUPPORTED);
  CHECK(gemm(4, 4, CUDA_R_32F, CUDA_R_32F, CUDA_R_16F, CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_NOT_SUPPORTED);
  CHECK(gemm(4, 4, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_64F) == CUBLAS_STATUS_NOT_SUPPORTED);
  CHECK(cublasSgemm(nullptr, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, f, 1, f, 1, &zero, f, 1) ==
        CUBLAS_STATUS_NOT_INITIALIZED);
  CHECK(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 0, 1, 1, &one, f, 1, f, 1, &zero, f, 1) == CUBLAS_STATUS_SUCCESS);
  ptxvm_fail_call("cublasSgemm", 1);
  CHECK(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, f, 1, f, 1, &zero, f, 1) ==
        CUBLAS_STATUS_EXECUTION_FAILED);
  Device<float> scaled(std::vector<float>(4, 3.0f));
  CHECK(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 0, &one, f, 2, f, 1, &zero, scaled, 2) ==
        CUBLAS_STATUS_SUCCESS); // k = 0: zero
  for (float x : scaled.host()) CHECK(x == 0);
}

__global__ void fill(float *p, float value) { p[threadIdx.x] = value; }

static void test_stream_and_scalars() { // late: after the kernel before it in the stream; device scalars read then
  cudaStream_t s;
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  Device<float> a(1), b(1), c(1), scalars(2);
  CHECK(cublasSetStream(handle, s) == CUBLAS_STATUS_SUCCESS);
  CHECK(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_DEVICE) == CUBLAS_STATUS_SUCCESS);
  fill<<<1, 1, 0, s>>>(a, 3), fill<<<1, 1, 0, s>>>(b, 5), fill<<<1, 1, 0, s>>>(c, 100),
      fill<<<1, 2, 0, s>>>(scalars, 2);
  CHECK(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, scalars, a, 1, b, 1, scalars.data + 1, c, 1) ==
        CUBLAS_STATUS_SUCCESS);
  CUDA(cudaStreamSynchronize(s));
  CHECK(c.host()[0] == 230);
  cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_HOST), cublasSetStream(handle, 0);
}

int main(int argc, char **argv) {
  CHECK(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
  if (argc > 1) { // planted fault: C is one element too short
    Device<float> a(4), c(3);
    CUDA(cudaMemset(a, 0, 16));
    cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, a, 2, a, 2, &zero, c, 2);
    return finish("nothing was noticed");
  }
  test_gemm<float, float>(), test_gemm<__half, __half>(), test_gemm<__half, float>(),
      test_gemm<__nv_bfloat16, __nv_bfloat16>(), test_gemm<__nv_bfloat16, float>();
  test_batches<float, float>(), test_batches<__nv_bfloat16, float>(), test_batches<__half, __half>();
  test_grouped<float>(), test_grouped<__nv_bfloat16>();
  test_strictness(), test_stream_and_scalars();
  CHECK(cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS);
  return finish("cublas");
}
