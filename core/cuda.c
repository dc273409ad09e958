/* The CUDA half of a context: device, streams, memory. */
#include "core/cuda.h"

#include <stdio.h>

pmoe_status pmoei_cuda_status(cudaError_t error, const char *call) {
  if (error == cudaSuccess) return PMOE_OK;
  return pmoei_error(error == cudaErrorMemoryAllocation ? PMOE_ERR_NOMEM : PMOE_ERR_DEVICE, "%s: %s: %s", call,
                     cudaGetErrorName(error), cudaGetErrorString(error));
}

pmoe_status pmoei_cuda_launched(const char *kernel) { return pmoei_cuda_status(cudaGetLastError(), kernel); }

pmoe_status pmoei_cublas_status(cublasStatus_t status, const char *call) {
  if (status == CUBLAS_STATUS_SUCCESS) return PMOE_OK;
  return pmoei_error(status == CUBLAS_STATUS_ALLOC_FAILED ? PMOE_ERR_NOMEM : PMOE_ERR_DEVICE, "%s: %s", call,
                     cublasGetStatusName(status));
}

/* ---- memory ---- */

/* cudaFree waits for the device, so memory is never taken away under a kernel. */
void *pmoei_cuda_default_alloc(void *user, size_t bytes, size_t align, pmoe_mem kind, pmoe_stream stream) {
  void *p = NULL;
  if (kind == PMOE_MEM_HOST) return pmoei_default_alloc(user, bytes, align, kind, stream);
  cudaError_t error = kind == PMOE_MEM_PINNED ? cudaMallocHost(&p, bytes) : cudaMalloc(&p, bytes);
  if (error == cudaSuccess) return p;
  (void)cudaGetLastError(); /* reported by the caller; not the next launch's */
  return NULL;
}

void pmoei_cuda_default_release(void *user, void *p, size_t bytes, pmoe_mem kind, pmoe_stream stream) {
  if (kind == PMOE_MEM_HOST) pmoei_default_release(user, p, bytes, kind, stream);
  else if (kind == PMOE_MEM_PINNED) (void)cudaFreeHost(p);
  else (void)cudaFree(p);
}

pmoe_status pmoei_cuda_copy(pmoe_ctx *ctx, void *to, const void *from, size_t bytes) {
  PMOEI_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, pmoei_cuda_stream(ctx)));
  return PMOE_OK;
}

pmoe_status pmoei_cuda_copy_rows(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *from) {
  size_t size = pmoe_dtype_size(from->dtype), width = (size_t)from->cols * size;
  PMOEI_CUDA_TRY(cudaMemcpy2DAsync(to->data, (size_t)to->ld * size, from->data, (size_t)from->ld * size, width,
                                   (size_t)from->rows, cudaMemcpyDefault, pmoei_cuda_stream(ctx)));
  return PMOE_OK;
}

pmoe_status pmoei_cuda_zero(pmoe_ctx *ctx, void *p, size_t bytes) {
  PMOEI_CUDA_TRY(cudaMemsetAsync(p, 0, bytes, pmoei_cuda_stream(ctx)));
  return PMOE_OK;
}

pmoe_status pmoei_cuda_zero_rows(pmoe_ctx *ctx, const pmoe_mat *mat, int64_t first, int64_t rows) {
  size_t size = pmoe_dtype_size(mat->dtype);
  PMOEI_CUDA_TRY(cudaMemset2DAsync(pmoei_row(mat, first), (size_t)mat->ld * size, 0, (size_t)mat->cols * size,
                                   (size_t)rows, pmoei_cuda_stream(ctx)));
  return PMOE_OK;
}

pmoe_status pmoei_cuda_wait(pmoe_ctx *ctx) {
  PMOEI_CUDA_TRY(cudaStreamSynchronize(pmoei_cuda_stream(ctx)));
  return PMOE_OK;
}

bool pmoei_cuda_is_capturing(const pmoe_ctx *ctx) {
  enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  (void)cudaStreamIsCapturing(pmoei_cuda_stream(ctx), &status);
  return status != cudaStreamCaptureStatusNone;
}

/* ---- streams ---- */

pmoe_status pmoei_cuda_fork(pmoe_ctx *ctx, pmoei_cuda_lane *lane) {
  PMOEI_CUDA_TRY(cudaEventRecord(lane->begun, pmoei_cuda_stream(ctx)));
  PMOEI_CUDA_TRY(cudaStreamWaitEvent(lane->stream, lane->begun, 0));
  return PMOE_OK;
}

pmoe_status pmoei_cuda_join(pmoe_ctx *ctx, pmoei_cuda_lane *lane) {
  PMOEI_CUDA_TRY(cudaEventRecord(lane->done, lane->stream));
  PMOEI_CUDA_TRY(cudaStreamWaitEvent(pmoei_cuda_stream(ctx), lane->done, 0));
  return PMOE_OK;
}

static pmoe_status open_lane(pmoe_ctx *ctx, pmoei_cuda_lane *lane, bool products) {
  PMOEI_CUDA_TRY(cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking));
  PMOEI_CUDA_TRY(cudaEventCreateWithFlags(&lane->begun, cudaEventDisableTiming));
  PMOEI_CUDA_TRY(cudaEventCreateWithFlags(&lane->done, cudaEventDisableTiming));
  if (!products) return PMOE_OK;
  return pmoei_alloc_kind(ctx, ctx->cuda->workspace_bytes, PMOE_MEM_DEVICE, "cuBLAS workspace", &lane->workspace);
}

static void close_lane(pmoe_ctx *ctx, pmoei_cuda_lane *lane) {
  if (lane->stream) (void)cudaStreamSynchronize(lane->stream);
  pmoei_free_kind(ctx, lane->workspace, ctx->cuda->workspace_bytes, PMOE_MEM_DEVICE);
  if (lane->begun) (void)cudaEventDestroy(lane->begun);
  if (lane->done) (void)cudaEventDestroy(lane->done);
  if (lane->stream) (void)cudaStreamDestroy(lane->stream);
}

/* ---- the context's half ---- */

pmoe_status pmoei_cuda_enter(pmoe_ctx *ctx) {
  int current = -1;
  PMOEI_CUDA_TRY(cudaGetDevice(&current));
  if (current != ctx->cuda->device) PMOEI_CUDA_TRY(cudaSetDevice(ctx->cuda->device));
  return PMOE_OK;
}

/* A library may be loaded where there is no driver, or no device; that is no failure of a device. */
static pmoe_status find_device(int32_t device) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    return pmoei_error(PMOE_ERR_UNSUPPORTED, "cfg->backend is PMOE_BACKEND_CUDA, but there is no CUDA device: %s",
                       error == cudaSuccess ? "the driver found none" : cudaGetErrorString(error));
  }
  PMOEI_REQUIRE(device >= 0 && device < count, "cfg->device is %d; 0 to %d was expected", device, count - 1);
  return PMOE_OK;
}

static pmoe_status describe(struct pmoei_cuda *cuda) {
  struct cudaDeviceProp properties;
  PMOEI_CUDA_TRY(cudaGetDeviceProperties(&properties, cuda->device));
  snprintf(cuda->name, sizeof cuda->name, "%.72s (sm_%d%d)", properties.name, properties.major, properties.minor);
  if (properties.major < 8)
    return pmoei_error(PMOE_ERR_UNSUPPORTED, "cfg->device %d is %s; compute capability 8.0 or more was expected",
                       cuda->device, cuda->name);
  /* What NVIDIA's manual recommends for cuBLAS. */
  cuda->workspace_bytes = (size_t)(properties.major >= 9 ? 32 : 4) << 20;
  snprintf(cuda->library, sizeof cuda->library, "cuBLAS %d.%d", CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR);
  return PMOE_OK;
}

static pmoe_status choose_products(struct pmoei_cuda *cuda, const char *gemm) {
  cuda->grouped = gemm && strcmp(gemm, "cublas-grouped") == 0;
  PMOEI_REQUIRE(!gemm || cuda->grouped || strcmp(gemm, "cublas") == 0,
                "cfg->gemm is \"%.32s\"; \"cublas\" or \"cublas-grouped\" was expected on CUDA", gemm);
  return PMOE_OK;
}

pmoe_status pmoei_cuda_create(pmoe_ctx *ctx, const pmoe_ctx_config *cfg) {
  PMOEI_TRY(find_device(cfg->device));
  PMOEI_TRY(pmoei_alloc(ctx, sizeof *ctx->cuda, "CUDA context", &ctx->cuda));
  struct pmoei_cuda *cuda = ctx->cuda;
  cuda->device = cfg->device;
  PMOEI_TRY(choose_products(cuda, cfg->gemm));
  PMOEI_CUDA_TRY(cudaSetDevice(cuda->device));
  PMOEI_TRY(describe(cuda));
  PMOEI_TRY(pmoei_cublas_status(cublasCreate(&cuda->cublas), "cublasCreate"));
  PMOEI_TRY(pmoei_alloc_kind(ctx, cuda->workspace_bytes, PMOE_MEM_DEVICE, "cuBLAS workspace", &cuda->workspace));
  PMOEI_CUDA_TRY(cudaEventCreateWithFlags(&cuda->reached, cudaEventDisableTiming));
  for (int i = 0; i < PMOEI_SIDE_STREAMS; i++) PMOEI_TRY(open_lane(ctx, &cuda->side[i], true));
  PMOEI_TRY(open_lane(ctx, &cuda->branch, true));
  return open_lane(ctx, &cuda->exchange, false);
}

void pmoei_cuda_destroy(pmoe_ctx *ctx) {
  struct pmoei_cuda *cuda = ctx->cuda;
  if (!cuda) return;
  (void)pmoei_cuda_enter(ctx);
  for (int i = 0; i < PMOEI_SIDE_STREAMS; i++) close_lane(ctx, &cuda->side[i]);
  close_lane(ctx, &cuda->branch);
  close_lane(ctx, &cuda->exchange);
  if (cuda->reached) (void)cudaEventDestroy(cuda->reached);
  if (cuda->cublas) (void)cublasDestroy(cuda->cublas);
  pmoei_free_kind(ctx, cuda->workspace, cuda->workspace_bytes, PMOE_MEM_DEVICE);
  ctx->cuda = NULL;
  pmoei_free(ctx, cuda, sizeof *cuda);
}

void pmoei_cuda_gemm_info(const pmoe_ctx *ctx, pmoe_gemm_info *info) {
  info->provider = ctx->cuda->grouped ? "cublas-grouped" : "cublas";
  info->library = ctx->cuda->library;
  info->isa = ctx->cuda->name;
  info->bf16 = "native";
  info->threads = 1;
}
