/* CBLAS: float32 products of whatever BLAS is linked, with OpenBLAS's own account of itself where it is that. */
#include <cblas.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "core/gemm_provider.h"

/* OpenBLAS only; other libraries leave them NULL. cblas.h may declare them with other qualifiers, so they get names of
 * their own. */
extern char *corename(void) __asm__("openblas_get_corename") __attribute__((weak));
extern char *config(void) __asm__("openblas_get_config") __attribute__((weak));
extern int parallel(void) __asm__("openblas_get_parallel") __attribute__((weak));

static bool one_of(const char *name, const char *const *names) {
  while (*names && strcmp(name, *names) != 0) names++;
  return *names != NULL;
}

/* OpenBLAS takes processors newer than itself for old ones, silently, at a fifth of the speed. */
static void check_core(pmoei_gemm *gemm, const char *core) {
#if defined(__x86_64__) && defined(__GNUC__)
  static const char *const avx512[] = {"SkylakeX", "Cooperlake", "SapphireRapids", NULL};
  static const char *const avx2[] = {"Haswell", "Zen", "Excavator", NULL};
  bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  bool fits = one_of(core, avx512) || (one_of(core, avx2) && (!has_avx512 || strcmp(core, "Zen") == 0));
  if (fits || !__builtin_cpu_supports("avx2")) return;
  snprintf(gemm->warning_text, sizeof gemm->warning_text,
           "OpenBLAS runs its \"%s\" kernels although this processor has %s; set OPENBLAS_CORETYPE=%s before the "
           "program starts",
           core, has_avx512 ? "AVX-512" : "AVX2", has_avx512 ? "SkylakeX" : "Haswell");
  gemm->warning = gemm->warning_text;
#else
  (void)gemm, (void)core;
#endif
}

static pmoe_status create(pmoe_ctx *ctx, pmoei_gemm *gemm) {
  (void)ctx;
  snprintf(gemm->library, sizeof gemm->library, "CBLAS");
  snprintf(gemm->isa, sizeof gemm->isa, "unknown");
  gemm->bf16 = "widened to float32";
  if (config) { /* "OpenBLAS 0.3.21 NO_LAPACKE ..." */
    const char *text = config(), *space = strchr(text, ' ');
    size_t length = space ? (size_t)(space - text) + 1 + strcspn(space + 1, " ") : strlen(text);
    snprintf(gemm->library, sizeof gemm->library, "%.*s", (int)length, text);
  }
  if (corename) {
    snprintf(gemm->isa, sizeof gemm->isa, "%s", corename());
    check_core(gemm, gemm->isa);
  }
  if (parallel && parallel() == 1 && !gemm->warning) { /* its own threads, which know nothing of ours */
    snprintf(gemm->warning_text, sizeof gemm->warning_text,
             "this OpenBLAS starts threads of its own in every product; use its OpenMP or serial build, or "
             "OPENBLAS_NUM_THREADS=1");
    gemm->warning = gemm->warning_text;
  }
  return PMOE_OK;
}

static void destroy(pmoe_ctx *ctx, pmoei_gemm *gemm) { (void)ctx, (void)gemm; }

static int run(pmoei_gemm *gemm, int32_t thread, const pmoei_product *p) {
  (void)gemm, (void)thread;
  const int64_t sizes[] = {p->m, p->n, p->k, p->lda, p->ldb, p->ldc};
  for (int i = 0; i < 6; i++)
    if (sizes[i] > INT_MAX) return -1;
  cblas_sgemm(CblasRowMajor, p->trans_a ? CblasTrans : CblasNoTrans, p->trans_b ? CblasTrans : CblasNoTrans, (int)p->m,
              (int)p->n, (int)p->k, 1.0f, p->a, (int)p->lda, p->b, (int)p->ldb, p->accumulate ? 1.0f : 0.0f, p->c,
              (int)p->ldc);
  return 0;
}

const pmoei_gemm_provider pmoei_gemm_cblas = {"cblas", create, destroy, run};
