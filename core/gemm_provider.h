/* What stands behind core/gemm.h: one table entry per library. */
#ifndef PMOEI_GEMM_PROVIDER_H
#define PMOEI_GEMM_PROVIDER_H
#include <stdatomic.h>

#include "core/gemm.h"

typedef struct pmoei_gemm_provider {
  const char *name;
  /* Fills gemm's state, bf16 and strings. On failure destroy is still called. */
  pmoe_status (*create)(pmoe_ctx *ctx, pmoei_gemm *gemm);
  void (*destroy)(pmoe_ctx *ctx, pmoei_gemm *gemm);
  /* m, n, k > 0; float32 only unless gemm->takes_bf16. Returns 0, or the library's own error code. */
  int (*run)(pmoei_gemm *gemm, int32_t thread, const pmoei_product *product);
} pmoei_gemm_provider;

struct pmoei_gemm {
  const pmoei_gemm_provider *provider;
  int32_t threads;
  bool takes_bf16;     /* the provider multiplies bf16; otherwise gemm.c widens tiles of it to float32 */
  const char *bf16;    /* for the user: "native" or "widened to float32" */
  const char *warning; /* NULL, or warning_text */
  char library[64], isa[64], warning_text[256];
  void *state; /* the provider's */
  size_t state_bytes;
  float *tiles; /* [threads][PMOEI_GEMM_TILES] for widening; NULL if the provider takes bf16 */
  atomic_int error;
};

extern const pmoei_gemm_provider pmoei_gemm_onednn, pmoei_gemm_cblas, pmoei_gemm_plain;

#endif
