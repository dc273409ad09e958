/* What the files of the CUDA back end share: C files that call the run time, and .cu files with kernels. The only
 * internal header that knows CUDA's and cuBLAS's types.
 *
 * Kernels are launched on pmoei_cuda_stream(ctx), by functions with C linkage that the operation tables name. */
#ifndef PMOEI_CUDA_H
#define PMOEI_CUDA_H
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "core/ctx.h"
#include "core/dtype.h"
#include "core/gemm.h"

enum { PMOEI_SIDE_STREAMS = 3 }; /* beside the main one, for products that need not wait for each other */

/* One of the back end's own streams, with what it needs to run beside the context's. */
typedef struct pmoei_cuda_lane {
  cudaStream_t stream;
  cudaEvent_t begun, done;
  void *workspace; /* cuBLAS's: one a stream, so that results repeat */
} pmoei_cuda_lane;

struct pmoei_cuda {
  int device;
  cublasHandle_t cublas;
  size_t workspace_bytes;
  void *workspace;
  pmoei_cuda_lane side[PMOEI_SIDE_STREAMS]; /* products of single experts */
  pmoei_cuda_lane branch;                   /* the dense branch */
  pmoei_cuda_lane exchange;                 /* rows on their way */
  cudaEvent_t reached;                      /* by the host, where it waits */
  bool grouped;                             /* ragged products by cublasGemmGroupedBatchedEx */
  char library[48], name[96];
};

static inline cudaStream_t pmoei_cuda_stream(const pmoe_ctx *ctx) { return (cudaStream_t)ctx->stream; }

/* PMOE_OK, or an error with the call's name and CUDA's own words: NOMEM for cudaErrorMemoryAllocation, else DEVICE. */
pmoe_status pmoei_cuda_status(cudaError_t error, const char *call);
pmoe_status pmoei_cublas_status(cublasStatus_t status, const char *call);
/* After a launch. */
pmoe_status pmoei_cuda_launched(const char *kernel);
#define PMOEI_CUDA_TRY(call) PMOEI_TRY(pmoei_cuda_status((call), #call))

/* cfg has been checked. */
pmoe_status pmoei_cuda_create(pmoe_ctx *ctx, const pmoe_ctx_config *cfg);
void pmoei_cuda_destroy(pmoe_ctx *ctx);
void *pmoei_cuda_default_alloc(void *user, size_t bytes, size_t align, pmoe_mem kind, pmoe_stream stream);
void pmoei_cuda_default_release(void *user, void *p, size_t bytes, pmoe_mem kind, pmoe_stream stream);
void pmoei_cuda_gemm_info(const pmoe_ctx *ctx, pmoe_gemm_info *info);

/* What core/data.h says. */
pmoe_status pmoei_cuda_enter(pmoe_ctx *ctx);
pmoe_status pmoei_cuda_copy(pmoe_ctx *ctx, void *to, const void *from, size_t bytes);
pmoe_status pmoei_cuda_copy_rows(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *from);
pmoe_status pmoei_cuda_zero(pmoe_ctx *ctx, void *p, size_t bytes);
pmoe_status pmoei_cuda_zero_rows(pmoe_ctx *ctx, const pmoe_mat *mat, int64_t first, int64_t rows);
pmoe_status pmoei_cuda_wait(pmoe_ctx *ctx);
bool pmoei_cuda_is_capturing(const pmoe_ctx *ctx);

/* The lane's stream goes on from here: waits for what the context's stream holds. */
pmoe_status pmoei_cuda_fork(pmoe_ctx *ctx, pmoei_cuda_lane *lane);
/* The context's stream waits for what the lane holds. */
pmoe_status pmoei_cuda_join(pmoe_ctx *ctx, pmoei_cuda_lane *lane);

/* Pointers that travel to the device as a kernel's argument: no host memory has to stay for them. */
enum { PMOEI_MAX_POINTERS = 384 };
typedef struct pmoei_pointers {
  const void *at[PMOEI_MAX_POINTERS];
} pmoei_pointers;
pmoe_status pmoei_cuda_store_pointers(pmoe_ctx *ctx, const pmoei_pointers *pointers, void *to);

/* core/gemm.h's product, enqueued. Types: float32; or bfloat16 or float16 with a result of that type or float32. */
pmoe_status pmoei_cuda_product(pmoe_ctx *ctx, const pmoei_product *product);
/* n products that do not depend on each other. Those of one shape at equal distances run as one batch; others side by
 * side on several streams, or grouped where the context was made so. */
pmoe_status pmoei_cuda_products(pmoe_ctx *ctx, const pmoei_product *products, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
