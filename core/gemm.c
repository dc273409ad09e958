#include "core/gemm.h"

#include <string.h>

#include "core/dtype.h"

struct pmoei_gemm {
  int32_t threads;
};

pmoe_status pmoei_gemm_create(pmoe_ctx *ctx, const char *provider, pmoei_gemm **out) {
  PMOEI_REQUIRE(!provider || strcmp(provider, "plain") == 0, "cfg->gemm is \"%s\"; \"plain\" was expected", provider);
  PMOEI_TRY(pmoei_alloc(ctx, sizeof **out, "gemm", out));
  (*out)->threads = ctx->threads;
  return PMOE_OK;
}

void pmoei_gemm_destroy(pmoe_ctx *ctx, pmoei_gemm *gemm) { pmoei_free(ctx, gemm, sizeof *gemm); }

void pmoei_gemm_get_info(const pmoei_gemm *gemm, pmoe_gemm_info *info) {
  (void)gemm;
  info->provider = "plain";
  info->library = "pmoe";
  info->isa = "portable C";
  info->bf16 = "widened to float32";
}

static float load(const void *p, pmoe_dtype dtype, int64_t i) {
  return dtype == PMOE_F32 ? ((const float *)p)[i] : pmoei_bf16_to_f32(((const pmoei_bf16 *)p)[i]);
}

void pmoei_gemm_run(pmoei_gemm *gemm, int32_t thread, const pmoei_product *p) {
  (void)gemm, (void)thread;
  for (int64_t i = 0; i < p->m; i++) {
    for (int64_t j = 0; j < p->n; j++) {
      float sum = 0;
      for (int64_t l = 0; l < p->k; l++)
        sum += load(p->a, p->in, p->trans_a ? l * p->lda + i : i * p->lda + l) *
               load(p->b, p->in, p->trans_b ? j * p->ldb + l : l * p->ldb + j);
      int64_t at = i * p->ldc + j;
      if (p->accumulate) sum += load(p->c, p->out, at);
      if (p->out == PMOE_F32) ((float *)p->c)[at] = sum;
      else ((pmoei_bf16 *)p->c)[at] = pmoei_f32_to_bf16(sum);
    }
  }
}

pmoe_status pmoei_gemm_take_error(pmoei_gemm *gemm) {
  (void)gemm;
  return PMOE_OK;
}
