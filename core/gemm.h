/* Matrix products. A provider computes one product on the calling thread; spreading work over threads is the caller's
 * task. */
#ifndef PMOEI_GEMM_H
#define PMOEI_GEMM_H
#include <stdbool.h>

#include "core/ctx.h"

/* C[m,n] = op(A)[m,k] op(B)[k,n] + (accumulate ? C : 0), row-major with leading dimensions in elements; float32
 * accumulation. A and B have type `in`, C has type `out`. m, n or k may be 0 (k = 0 writes zeros, or leaves C when
 * accumulating). */
typedef struct pmoei_product {
  bool trans_a, trans_b, accumulate;
  pmoe_dtype in, out;
  int64_t m, n, k;
  const void *a, *b;
  void *c;
  int64_t lda, ldb, ldc;
} pmoei_product;

/* One per context; thread-safe for distinct `thread` numbers. */
typedef struct pmoei_gemm pmoei_gemm;

pmoe_status pmoei_gemm_create(pmoe_ctx *ctx, const char *provider_or_null, pmoei_gemm **out);
void pmoei_gemm_destroy(pmoe_ctx *ctx, pmoei_gemm *gemm);
void pmoei_gemm_get_info(const pmoei_gemm *gemm, pmoe_gemm_info *info);

/* Called inside a task of pmoei_parallel, with that task's thread number. Allocates nothing of the context's once a
 * shape has been seen (libraries keep their own code caches). A library's failure is kept and reported by
 * pmoei_gemm_take_error after the parallel region. */
void pmoei_gemm_run(pmoei_gemm *gemm, int32_t thread, const pmoei_product *product);
/* PMOE_OK, or ERR_INTERNAL with the first failure since the last call. */
pmoe_status pmoei_gemm_take_error(pmoei_gemm *gemm);

#endif
