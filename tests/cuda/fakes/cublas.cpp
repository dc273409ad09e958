// The part of cuBLAS that computes matrix products, on the CPU: against the real header, in stream order, and as strict
// as the library about arguments and type combinations. Sums are formed in f32, in order of k.
#include "../ptxvm/runtime.h"
#include "half.h"
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <cublas_v2.h>
#include <vector>

using namespace ptxvm;

struct cublasContext {
  cudaStream_t stream = nullptr;
  cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
  cublasMath_t math_mode = CUBLAS_DEFAULT_MATH;
  int sm_count_target = 0;
  int device = 0;
};

namespace {

size_t size_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }
bool is_known(cudaDataType type) { return type == CUDA_R_32F || type == CUDA_R_16F || type == CUDA_R_16BF; }

float read(const void *p, int64_t k, cudaDataType type) {
  if (type == CUDA_R_32F) return static_cast<const float *>(p)[k];
  uint16_t bits = static_cast<const uint16_t *>(p)[k];
  return type == CUDA_R_16F ? half_value(bits) : brain_value(bits);
}
void write(void *p, int64_t k, cudaDataType type, float value) {
  if (type == CUDA_R_32F) static_cast<float *>(p)[k] = value;
  else static_cast<uint16_t *>(p)[k] = type == CUDA_R_16F ? half_bits(value) : brain_bits(value);
}

struct Shape {
  cublasOperation_t transa, transb;
  int m, n, k, lda, ldb, ldc;
  cudaDataType a, b, c;
};

bool is_transposed(cublasOperation_t op) { return op != CUBLAS_OP_N; }

cublasStatus_t check(const Shape &s, cublasComputeType_t compute) {
  if (s.m < 0 || s.n < 0 || s.k < 0) return CUBLAS_STATUS_INVALID_VALUE;
  int rows_a = is_transposed(s.transa) ? s.k : s.m, rows_b = is_transposed(s.transb) ? s.n : s.k;
  if (s.lda < std::max(1, rows_a) || s.ldb < std::max(1, rows_b) || s.ldc < std::max(1, s.m))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (!is_known(s.a) || !is_known(s.b) || !is_known(s.c)) return CUBLAS_STATUS_NOT_SUPPORTED;
  bool computes_f32 = compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_PEDANTIC ||
                      compute == CUBLAS_COMPUTE_32F_FAST_TF32 || compute == CUBLAS_COMPUTE_32F_FAST_16BF ||
                      compute == CUBLAS_COMPUTE_32F_FAST_16F;
  if (!computes_f32 || s.a != s.b || (s.c != s.a && s.c != CUDA_R_32F)) return CUBLAS_STATUS_NOT_SUPPORTED;
  return CUBLAS_STATUS_SUCCESS;
}

size_t extent(int rows, int columns, int ld, cudaDataType type) {
  return rows && columns
             ? (static_cast<size_t>(columns - 1) * static_cast<size_t>(ld) + static_cast<size_t>(rows)) * size_of(type)
             : 0;
}

// One product. With beta = 0, C is not read; with m or n zero nothing happens, with k zero C is only scaled.
void multiply(const Shape &s, float alpha, const void *a, const void *b, float beta, void *c, const char *who) {
  if (!s.m || !s.n) return;
  int rows_a = is_transposed(s.transa) ? s.k : s.m, columns_a = is_transposed(s.transa) ? s.m : s.k;
  int rows_b = is_transposed(s.transb) ? s.n : s.k, columns_b = is_transposed(s.transb) ? s.k : s.n;
  bool uses = s.k && alpha != 0;
  if (uses) {
    a = device_read(a, extent(rows_a, columns_a, s.lda, s.a), who);
    b = device_read(b, extent(rows_b, columns_b, s.ldb, s.b), who);
  }
  if (beta != 0) device_read(c, extent(s.m, s.n, s.ldc, s.c), who);
  c = device_write(c, extent(s.m, s.n, s.ldc, s.c), who);
  std::vector<float> left(uses ? static_cast<size_t>(s.m) * static_cast<size_t>(s.k) : 0),
      sum(static_cast<size_t>(s.m));
  for (int64_t k = 0; uses && k < s.k; k++)
    for (int64_t i = 0; i < s.m; i++)
      left[static_cast<size_t>(k * s.m + i)] = read(a, is_transposed(s.transa) ? i * s.lda + k : k * s.lda + i, s.a);
  for (int64_t j = 0; j < s.n; j++) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t k = 0; uses && k < s.k; k++) {
      float factor = read(b, is_transposed(s.transb) ? k * s.ldb + j : j * s.ldb + k, s.b);
      const float *column = left.data() + k * s.m;
      for (int i = 0; i < s.m; i++) sum[static_cast<size_t>(i)] += column[i] * factor;
    }
    for (int64_t i = 0; i < s.m; i++) {
      float value = alpha * sum[static_cast<size_t>(i)];
      if (beta != 0) value += beta * read(c, j * s.ldc + i, s.c);
      write(c, j * s.ldc + i, s.c, value);
    }
  }
}

// Scalars on the host are read at the call, those on the device when the work runs.
struct Scalar {
  const void *device = nullptr;
  float value = 0;
  float get(const char *who) const {
    return device ? *static_cast<const float *>(device_read(device, sizeof(float), who)) : value;
  }
};
Scalar scalar(cublasHandle_t handle, const void *p) {
  Scalar s;
  if (handle->pointer_mode == CUBLAS_POINTER_MODE_DEVICE) s.device = p;
  else s.value = *static_cast<const float *>(p);
  return s;
}

cublasStatus_t submit(cublasHandle_t handle, const char *name, Work work) {
  return enqueue(handle->stream, name, std::move(work)) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                                       : CUBLAS_STATUS_EXECUTION_FAILED;
}

// Pointers to matrices that lie in device memory themselves, read when the work runs.
const void *const *pointers(const void *const *list, size_t count, const char *who) {
  return static_cast<const void *const *>(device_read(list, count * sizeof(void *), who));
}

cublasStatus_t batched(cublasHandle_t handle, const char *name, Shape shape, const void *alpha, const void *const *a,
                       const void *const *b, const void *beta, void *const *c, int count, cublasComputeType_t compute) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!alpha || !beta || count < 0) return CUBLAS_STATUS_INVALID_VALUE;
  if (cublasStatus_t status = check(shape, compute)) return status;
  if (!count) return CUBLAS_STATUS_SUCCESS;
  Scalar sa = scalar(handle, alpha), sb = scalar(handle, beta);
  size_t n = static_cast<size_t>(count);
  return submit(handle, name, [=] {
    const void *const *pa = pointers(a, n, name), *const *pb = pointers(b, n, name), *const *pc = pointers(c, n, name);
    for (size_t k = 0; k < n; k++)
      multiply(shape, sa.get(name), pa[k], pb[k], sb.get(name), const_cast<void *>(pc[k]), name);
  });
}

cublasStatus_t strided(cublasHandle_t handle, const char *name, Shape shape, const void *alpha, const void *a,
                       long long stride_a, const void *b, long long stride_b, const void *beta, void *c,
                       long long stride_c, int count, cublasComputeType_t compute) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!alpha || !beta || count < 0) return CUBLAS_STATUS_INVALID_VALUE;
  if (cublasStatus_t status = check(shape, compute)) return status;
  if (!count || !shape.m || !shape.n) return CUBLAS_STATUS_SUCCESS;
  Scalar sa = scalar(handle, alpha), sb = scalar(handle, beta);
  return submit(handle, name, [=] {
    for (long long k = 0; k < count; k++)
      multiply(shape, sa.get(name),
               static_cast<const char *>(a) + k * stride_a * static_cast<long long>(size_of(shape.a)),
               static_cast<const char *>(b) + k * stride_b * static_cast<long long>(size_of(shape.b)), sb.get(name),
               static_cast<char *>(c) + k * stride_c * static_cast<long long>(size_of(shape.c)), name);
  });
}

} // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
  PTXVM_ENTER(cublasCreate, CUBLAS_STATUS_ALLOC_FAILED);
  if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
  if (refuse_under_capture("cublasCreate")) return CUBLAS_STATUS_NOT_INITIALIZED; // it allocates
  *handle = new cublasContext;
  (*handle)->device = current_device();
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  PTXVM_ENTER(cublasDestroy, CUBLAS_STATUS_INTERNAL_ERROR);
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int *version) {
  return *version = CUBLAS_VERSION, CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  PTXVM_ENTER(cublasSetStream, CUBLAS_STATUS_INTERNAL_ERROR);
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!is_known_stream(stream)) return CUBLAS_STATUS_INVALID_VALUE;
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  return *stream = handle->stream, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t size) {
  PTXVM_ENTER(cublasSetWorkspace, CUBLAS_STATUS_INTERNAL_ERROR);
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (size && reinterpret_cast<uintptr_t>(workspace) % 256) return CUBLAS_STATUS_INVALID_VALUE;
  if (size) view(workspace, size, "cublasSetWorkspace");
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  return handle->pointer_mode = mode, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  return *mode = handle->pointer_mode, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  return handle->math_mode = mode, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  return *mode = handle->math_mode, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetSmCountTarget(cublasHandle_t handle, int count) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (count < 0) return CUBLAS_STATUS_INVALID_VALUE;
  return handle->sm_count_target = count, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetSmCountTarget(cublasHandle_t handle, int *count) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  return *count = handle->sm_count_target, CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m,
                                          int n, int k, const void *alpha, const void *a, cudaDataType type_a, int lda,
                                          long long stride_a, const void *b, cudaDataType type_b, int ldb,
                                          long long stride_b, const void *beta, void *c, cudaDataType type_c, int ldc,
                                          long long stride_c, int count, cublasComputeType_t compute,
                                          cublasGemmAlgo_t) {
  PTXVM_ENTER(cublasGemmStridedBatchedEx, CUBLAS_STATUS_EXECUTION_FAILED);
  return strided(handle, "cublasGemmStridedBatchedEx", {ta, tb, m, n, k, lda, ldb, ldc, type_a, type_b, type_c}, alpha,
                 a, stride_a, b, stride_b, beta, c, stride_c, count, compute);
}
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType type_a, int lda, const void *b,
                            cudaDataType type_b, int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t) {
  PTXVM_ENTER(cublasGemmEx, CUBLAS_STATUS_EXECUTION_FAILED);
  return strided(handle, "cublasGemmEx", {ta, tb, m, n, k, lda, ldb, ldc, type_a, type_b, type_c}, alpha, a, 0, b, 0,
                 beta, c, 0, 1, compute);
}
cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                              const float *alpha, const float *a, int lda, const float *b, int ldb, const float *beta,
                              float *c, int ldc) {
  PTXVM_ENTER(cublasSgemm, CUBLAS_STATUS_EXECUTION_FAILED);
  return strided(handle, "cublasSgemm", {ta, tb, m, n, k, lda, ldb, ldc, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F}, alpha, a,
                 0, b, 0, beta, c, 0, 1, CUBLAS_COMPUTE_32F);
}
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m,
                                         int n, int k, const float *alpha, const float *a, int lda, long long stride_a,
                                         const float *b, int ldb, long long stride_b, const float *beta, float *c,
                                         int ldc, long long stride_c, int count) {
  PTXVM_ENTER(cublasSgemmStridedBatched, CUBLAS_STATUS_EXECUTION_FAILED);
  return strided(handle, "cublasSgemmStridedBatched",
                 {ta, tb, m, n, k, lda, ldb, ldc, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F}, alpha, a, stride_a, b, stride_b,
                 beta, c, stride_c, count, CUBLAS_COMPUTE_32F);
}
cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                                   int k, const void *alpha, const void *const a[], cudaDataType type_a, int lda,
                                   const void *const b[], cudaDataType type_b, int ldb, const void *beta,
                                   void *const c[], cudaDataType type_c, int ldc, int count,
                                   cublasComputeType_t compute, cublasGemmAlgo_t) {
  PTXVM_ENTER(cublasGemmBatchedEx, CUBLAS_STATUS_EXECUTION_FAILED);
  return batched(handle, "cublasGemmBatchedEx", {ta, tb, m, n, k, lda, ldb, ldc, type_a, type_b, type_c}, alpha, a, b,
                 beta, c, count, compute);
}

// Sizes, strides and scalars are host arrays read at the call; only the pointers to the matrices lie on the device.
cublasStatus_t cublasGemmGroupedBatchedEx(cublasHandle_t handle, const cublasOperation_t ta[],
                                          const cublasOperation_t tb[], const int m[], const int n[], const int k[],
                                          const void *alpha, const void *const a[], cudaDataType type_a,
                                          const int lda[], const void *const b[], cudaDataType type_b, const int ldb[],
                                          const void *beta, void *const c[], cudaDataType type_c, const int ldc[],
                                          int group_count, const int group_size[], cublasComputeType_t compute) {
  PTXVM_ENTER(cublasGemmGroupedBatchedEx, CUBLAS_STATUS_EXECUTION_FAILED);
  static const char *name = "cublasGemmGroupedBatchedEx";
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (group_count < 0 || handle->pointer_mode != CUBLAS_POINTER_MODE_HOST) return CUBLAS_STATUS_INVALID_VALUE;
  if (type_a != type_c) return CUBLAS_STATUS_NOT_SUPPORTED; // mixed output is not in the table of the documentation
  struct Group {
    Shape shape;
    float alpha, beta;
    int size;
  };
  std::vector<Group> groups;
  size_t total = 0;
  for (int g = 0; g < group_count; g++) {
    Shape shape{ta[g], tb[g], m[g], n[g], k[g], lda[g], ldb[g], ldc[g], type_a, type_b, type_c};
    if (group_size[g] < 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (cublasStatus_t status = check(shape, compute)) return status;
    groups.push_back({shape, static_cast<const float *>(alpha)[g], static_cast<const float *>(beta)[g], group_size[g]});
    total += static_cast<size_t>(group_size[g]);
  }
  if (!total) return CUBLAS_STATUS_SUCCESS;
  return submit(handle, name, [=] {
    const void *const *pa = pointers(a, total, name), *const *pb = pointers(b, total, name),
                      *const *pc = pointers(c, total, name);
    size_t at = 0;
    for (const Group &g : groups)
      for (int j = 0; j < g.size; j++, at++)
        multiply(g.shape, g.alpha, pa[at], pb[at], g.beta, const_cast<void *>(pc[at]), name);
  });
}

const char *cublasGetStatusName(cublasStatus_t status) {
  switch (status) {
  case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
  case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
  case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
  case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
  case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
  case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
  case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
  default: return "CUBLAS_STATUS_UNKNOWN";
  }
}
const char *cublasGetStatusString(cublasStatus_t status) { return cublasGetStatusName(status); }

} // extern "C"
