#include "core/data.h"

#include <string.h>

#include "core/dtype.h"
#include "core/parallel.h"
#ifdef PMOE_WITH_CUDA
#include "core/cuda.h"
#endif

/* Calls the CUDA half where the context has one. A context without CUDA in the library has none. */
#ifdef PMOE_WITH_CUDA
#define ON_DEVICE(ctx, call)                                                                                           \
  do {                                                                                                                 \
    if (pmoei_on_device(ctx)) return call;                                                                             \
  } while (0)
#else
#define ON_DEVICE(ctx, call) (void)(ctx)
#endif

pmoe_status pmoei_ctx_enter(pmoe_ctx *ctx, pmoe_stream stream) {
  ctx->stream = stream;
  ON_DEVICE(ctx, pmoei_cuda_enter(ctx));
  return PMOE_OK;
}

pmoe_status pmoei_check_dtype(const pmoe_ctx *ctx, pmoe_dtype dtype, const char *what) {
  bool half = pmoei_on_device(ctx);
  PMOEI_REQUIRE(dtype == PMOE_F32 || dtype == PMOE_BF16 || (dtype == PMOE_F16 && half), "%s is %s; %s was expected",
                what, pmoe_dtype_name(dtype), half ? "float32, bfloat16 or float16" : "float32 or bfloat16");
  return PMOE_OK;
}

static pmoe_mem data_kind(const pmoe_ctx *ctx) { return pmoei_on_device(ctx) ? PMOE_MEM_DEVICE : PMOE_MEM_HOST; }
static pmoe_mem pinned_kind(const pmoe_ctx *ctx) { return pmoei_on_device(ctx) ? PMOE_MEM_PINNED : PMOE_MEM_HOST; }

pmoe_status pmoei_data_alloc(pmoe_ctx *ctx, size_t bytes, const char *what, void *out_pointer) {
  return pmoei_alloc_kind(ctx, bytes, data_kind(ctx), what, out_pointer);
}

void pmoei_data_free(pmoe_ctx *ctx, void *p, size_t bytes) { pmoei_free_kind(ctx, p, bytes, data_kind(ctx)); }

pmoe_status pmoei_pinned_alloc(pmoe_ctx *ctx, size_t bytes, const char *what, void *out_pointer) {
  return pmoei_alloc_kind(ctx, bytes, pinned_kind(ctx), what, out_pointer);
}

void pmoei_pinned_free(pmoe_ctx *ctx, void *p, size_t bytes) { pmoei_free_kind(ctx, p, bytes, pinned_kind(ctx)); }

pmoe_status pmoei_data_copy(pmoe_ctx *ctx, void *to, const void *from, size_t bytes) {
  if (bytes == 0) return PMOE_OK;
  ON_DEVICE(ctx, pmoei_cuda_copy(ctx, to, from, bytes));
  memcpy(to, from, bytes);
  return PMOE_OK;
}

typedef struct copy_job {
  const pmoe_mat *to, *from;
} copy_job;

static void copy_row(void *arg, int64_t row, int32_t thread) {
  (void)thread;
  const copy_job *job = arg;
  memcpy(pmoei_row(job->to, row), pmoei_row(job->from, row), (size_t)job->to->cols * pmoe_dtype_size(job->to->dtype));
}

pmoe_status pmoei_data_copy_rows(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *from) {
  if (from->rows == 0) return PMOE_OK;
  ON_DEVICE(ctx, pmoei_cuda_copy_rows(ctx, to, from));
  pmoei_parallel(ctx, from->rows, copy_row, &(copy_job){to, from});
  return PMOE_OK;
}

pmoe_status pmoei_data_zero(pmoe_ctx *ctx, void *p, size_t bytes) {
  if (bytes == 0) return PMOE_OK;
  ON_DEVICE(ctx, pmoei_cuda_zero(ctx, p, bytes));
  memset(p, 0, bytes);
  return PMOE_OK;
}

pmoe_status pmoei_data_zero_rows(pmoe_ctx *ctx, const pmoe_mat *mat, int64_t first, int64_t rows) {
  if (rows == 0) return PMOE_OK;
  ON_DEVICE(ctx, pmoei_cuda_zero_rows(ctx, mat, first, rows));
  for (int64_t r = first; r < first + rows; r++)
    memset(pmoei_row(mat, r), 0, (size_t)mat->cols * pmoe_dtype_size(mat->dtype));
  return PMOE_OK;
}

pmoe_status pmoei_data_wait(pmoe_ctx *ctx) {
  ON_DEVICE(ctx, pmoei_cuda_wait(ctx));
  (void)ctx;
  return PMOE_OK;
}

bool pmoei_is_capturing(const pmoe_ctx *ctx) {
  ON_DEVICE(ctx, pmoei_cuda_is_capturing(ctx));
  (void)ctx;
  return false;
}
