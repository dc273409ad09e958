#include "core/gemm.h"

#include <string.h>

#include "core/dtype.h"
#include "core/gemm_provider.h"

static const pmoei_gemm_provider *const built_in[] = {
#ifdef PMOE_WITH_ONEDNN
    &pmoei_gemm_onednn,
#endif
#ifdef PMOE_WITH_CBLAS
    &pmoei_gemm_cblas,
#endif
    &pmoei_gemm_plain,
};
enum { NUM_BUILT_IN = sizeof built_in / sizeof built_in[0] };

/* Tiles in which bf16 is widened for providers that cannot multiply it. */
enum { TILE_M = 128, TILE_N = 512, TILE_K = 256 };
enum { TILE_A = TILE_M * TILE_K, TILE_B = TILE_K * TILE_N, TILE_C = TILE_M * TILE_N, TILES = TILE_A + TILE_B + TILE_C };

static pmoe_status find_provider(const char *name, const pmoei_gemm_provider **out) {
  char list[64] = "";
  for (int i = 0; i < NUM_BUILT_IN; i++) {
    if (!name || strcmp(name, built_in[i]->name) == 0) {
      *out = built_in[i];
      return PMOE_OK;
    }
    strcat(strcat(list, i ? ", " : ""), built_in[i]->name);
  }
  if (strcmp(name, "onednn") == 0 || strcmp(name, "cblas") == 0)
    return pmoei_error(PMOE_ERR_UNSUPPORTED, "cfg->gemm is \"%s\", which was not built in; built in: %s", name, list);
  return pmoei_error(PMOE_ERR_ARG, "cfg->gemm is \"%.32s\"; one of these was expected: %s", name, list);
}

static pmoe_status open_provider(pmoe_ctx *ctx, pmoei_gemm *gemm) {
  PMOEI_TRY(gemm->provider->create(ctx, gemm));
  if (gemm->takes_bf16) return PMOE_OK;
  return pmoei_alloc_raw(ctx, (size_t)gemm->threads * TILES * sizeof(float), "gemm tiles", &gemm->tiles);
}

pmoe_status pmoei_gemm_create(pmoe_ctx *ctx, const char *name, pmoei_gemm **out) {
  const pmoei_gemm_provider *provider = NULL;
  PMOEI_TRY(find_provider(name, &provider));
  pmoei_gemm *gemm;
  PMOEI_TRY(pmoei_alloc(ctx, sizeof *gemm, "gemm", &gemm));
  gemm->provider = provider;
  gemm->threads = ctx->threads;
  pmoe_status status = open_provider(ctx, gemm);
  if (status != PMOE_OK) {
    pmoei_gemm_destroy(ctx, gemm);
    return status;
  }
  if (gemm->warning) pmoei_log(ctx, PMOE_LOG_WARN, "gemm: %s", gemm->warning);
  *out = gemm;
  return PMOE_OK;
}

void pmoei_gemm_destroy(pmoe_ctx *ctx, pmoei_gemm *gemm) {
  if (!gemm) return;
  gemm->provider->destroy(ctx, gemm);
  pmoei_free(ctx, gemm->tiles, (size_t)gemm->threads * TILES * sizeof(float));
  pmoei_free(ctx, gemm, sizeof *gemm);
}

void pmoei_gemm_get_info(const pmoei_gemm *gemm, pmoe_gemm_info *info) {
  info->provider = gemm->provider->name;
  info->library = gemm->library;
  info->isa = gemm->isa;
  info->bf16 = gemm->bf16;
  info->warning = gemm->warning;
}

static void keep_error(pmoei_gemm *gemm, int code) {
  int none = 0;
  if (code != 0) atomic_compare_exchange_strong(&gemm->error, &none, code);
}

static const char *element(const void *p, pmoe_dtype dtype, int64_t row, int64_t ld, int64_t col) {
  return (const char *)p + ((size_t)row * (size_t)ld + (size_t)col) * pmoe_dtype_size(dtype);
}

/* Rows [row, row + rows) and columns of a matrix, in float32 and dense. */
static void widen(float *tile, const void *p, pmoe_dtype dtype, int64_t ld, int64_t row, int64_t rows, int64_t col,
                  int64_t cols) {
  for (int64_t r = 0; r < rows; r++) pmoei_to_f32(tile + r * cols, element(p, dtype, row + r, ld, col), dtype, cols);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* C's block [i, i + m) x [j, j + n) from float32 tiles; the sum over k is complete before it is rounded to C's type. */
static void widened_block(pmoei_gemm *gemm, int32_t thread, const pmoei_product *p, int64_t i, int64_t m, int64_t j,
                          int64_t n) {
  float *a = gemm->tiles + (size_t)thread * TILES, *b = a + TILE_A, *c = b + TILE_B;
  pmoei_product part = {.trans_a = p->trans_a, .trans_b = p->trans_b, .m = m, .n = n, .a = a, .b = b, .c = c, .ldc = n};
  if (p->out == PMOE_F32) { /* no rounding: straight into place */
    part.c = (float *)p->c + i * p->ldc + j;
    part.ldc = p->ldc;
    part.accumulate = p->accumulate;
  } else if (p->accumulate) {
    widen(c, p->c, p->out, p->ldc, i, m, j, n);
    part.accumulate = true;
  }
  for (int64_t l = 0; l < p->k; l += TILE_K) {
    int64_t k = smaller(TILE_K, p->k - l);
    if (p->trans_a) widen(a, p->a, p->in, p->lda, l, k, i, m);
    else widen(a, p->a, p->in, p->lda, i, m, l, k);
    if (p->trans_b) widen(b, p->b, p->in, p->ldb, j, n, l, k);
    else widen(b, p->b, p->in, p->ldb, l, k, j, n);
    part.k = k;
    part.lda = p->trans_a ? m : k;
    part.ldb = p->trans_b ? k : n;
    keep_error(gemm, gemm->provider->run(gemm, thread, &part));
    part.accumulate = true;
  }
  for (int64_t r = 0; r < m && p->out != PMOE_F32; r++)
    pmoei_from_f32((void *)element(p->c, p->out, i + r, p->ldc, j), p->out, c + r * n, n);
}

static void write_zeros(const pmoei_product *p) {
  for (int64_t i = 0; i < p->m; i++)
    memset((void *)element(p->c, p->out, i, p->ldc, 0), 0, (size_t)p->n * pmoe_dtype_size(p->out));
}

void pmoei_gemm_run(pmoei_gemm *gemm, int32_t thread, const pmoei_product *p) {
  if (p->m == 0 || p->n == 0) return;
  if (p->k == 0) {
    if (!p->accumulate) write_zeros(p);
    return;
  }
  if (gemm->takes_bf16 || (p->in == PMOE_F32 && p->out == PMOE_F32)) {
    keep_error(gemm, gemm->provider->run(gemm, thread, p));
    return;
  }
  for (int64_t j = 0; j < p->n; j += TILE_N)
    for (int64_t i = 0; i < p->m; i += TILE_M)
      widened_block(gemm, thread, p, i, smaller(TILE_M, p->m - i), j, smaller(TILE_N, p->n - j));
}

pmoe_status pmoei_gemm_take_error(pmoei_gemm *gemm) {
  int code = atomic_exchange(&gemm->error, 0);
  if (code == 0) return PMOE_OK;
  return pmoei_error(PMOE_ERR_INTERNAL, "%s: a matrix product failed with the library's status %d", gemm->library,
                     code);
}
