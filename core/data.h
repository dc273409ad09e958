/* Data memory: where tokens, rows and parameters are, and where kernels run. The host's own memory on the CPU, the
 * device's on CUDA. Everything here is enqueued on the context's stream; on the CPU it is done at once. */
#ifndef PMOEI_DATA_H
#define PMOEI_DATA_H
#include "core/ctx.h"

static inline bool pmoei_on_device(const pmoe_ctx *ctx) { return ctx->cuda != NULL; }

/* At the start of a public call that works on data: its stream (NULL on the CPU), and the context's device current. */
pmoe_status pmoei_ctx_enter(pmoe_ctx *ctx, pmoe_stream stream);

/* Whether tokens and rows can be of that type: float32, bfloat16, and on CUDA float16. ERR_ARG names `what`. */
pmoe_status pmoei_check_dtype(const pmoe_ctx *ctx, pmoe_dtype dtype, const char *what);

/* Unset, PMOEI_ALIGN-aligned (256 bytes on CUDA). ERR_NOMEM names `what`. bytes == 0 gives *out = NULL. */
pmoe_status pmoei_data_alloc(pmoe_ctx *ctx, size_t bytes, const char *what, void *out_pointer);
void pmoei_data_free(pmoe_ctx *ctx, void *p, size_t bytes);
/* Host memory that the device copies from and to without staging. */
pmoe_status pmoei_pinned_alloc(pmoe_ctx *ctx, size_t bytes, const char *what, void *out_pointer);
void pmoei_pinned_free(pmoe_ctx *ctx, void *p, size_t bytes);

/* Either side may be data or host memory. Host memory stays in place until the stream has passed. */
pmoe_status pmoei_data_copy(pmoe_ctx *ctx, void *to, const void *from, size_t bytes);
/* All rows of `from`, of the same shape and type. */
pmoe_status pmoei_data_copy_rows(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *from);
pmoe_status pmoei_data_zero(pmoe_ctx *ctx, void *p, size_t bytes);
/* Rows [first, first + rows) of a matrix. */
pmoe_status pmoei_data_zero_rows(pmoe_ctx *ctx, const pmoe_mat *mat, int64_t first, int64_t rows);

/* Whether the context's stream is being captured into a graph. */
bool pmoei_is_capturing(const pmoe_ctx *ctx);

/* The host waits for what the context's stream holds. */
pmoe_status pmoei_data_wait(pmoe_ctx *ctx);

#endif
