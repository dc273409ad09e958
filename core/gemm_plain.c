/* Portable products: packed panels and a small block of C in registers, which compilers vectorise. Runs where no
 * library is, and under sanitizers. */
#include <stdio.h>
#include <string.h>

#include "core/dtype.h"
#include "core/gemm_provider.h"
#include "core/simd.h"

enum { ROWS = 6, COLS = 16 };                        /* of C in registers */
enum { BLOCK_M = 96, BLOCK_N = 128, BLOCK_K = 256 }; /* packed at a time; multiples of the above */

typedef struct workspace {
  float a[BLOCK_M * BLOCK_K], b[BLOCK_K * BLOCK_N], c[BLOCK_M * BLOCK_N];
} workspace;

static pmoe_status create(pmoe_ctx *ctx, pmoei_gemm *gemm) {
  snprintf(gemm->library, sizeof gemm->library, "pmoe %d.%d.%d", PMOE_VERSION_MAJOR, PMOE_VERSION_MINOR,
           PMOE_VERSION_PATCH);
  snprintf(gemm->isa, sizeof gemm->isa, "portable C");
  snprintf(gemm->warning_text, sizeof gemm->warning_text,
           "products run in portable C, several times slower than a matrix library; build with oneDNN or CBLAS");
  gemm->warning = gemm->warning_text;
  gemm->bf16 = "widened to float32";
  gemm->takes_bf16 = true; /* widened while packing */
  gemm->state_bytes = (size_t)gemm->threads * sizeof(workspace);
  return pmoei_alloc_raw(ctx, gemm->state_bytes, "gemm panels", &gemm->state);
}

static void destroy(pmoe_ctx *ctx, pmoei_gemm *gemm) { pmoei_free(ctx, gemm->state, gemm->state_bytes); }

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static float element(const void *p, pmoe_dtype dtype, int64_t i) {
  return dtype == PMOE_F32 ? ((const float *)p)[i] : pmoei_bf16_to_f32(((const pmoei_bf16 *)p)[i]);
}

/* `count` lines of a matrix, `k` long, as panels of `width` lines whose elements at the same place lie together;
 * missing lines are zero. Line i's element l is at i * line + l * step. */
static void pack(float *out, const void *p, pmoe_dtype dtype, int64_t count, int64_t k, int64_t width, int64_t line,
                 int64_t step) {
  for (int64_t first = 0; first < count; first += width)
    for (int64_t l = 0; l < k; l++)
      for (int64_t i = first; i < first + width; i++)
        *out++ = i < count ? element(p, dtype, i * line + l * step) : 0.0f;
}

PMOEI_VECTORISED static void multiply_panels(int64_t k, const float *restrict a, const float *restrict b,
                                             float *restrict c) {
  float sum[ROWS][COLS];
  memcpy(sum, c, sizeof sum);
  for (int64_t l = 0; l < k; l++)
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < COLS; j++) sum[i][j] += a[l * ROWS + i] * b[l * COLS + j];
  memcpy(c, sum, sizeof sum);
}

/* c holds blocks of ROWS x COLS, those of one panel of b after another. */
static float *block_of(workspace *w, int64_t m, int64_t i, int64_t j) {
  int64_t panels = (m + ROWS - 1) / ROWS;
  return w->c + ((j / COLS) * panels + i / ROWS) * ROWS * COLS;
}

static void store(const pmoei_product *p, workspace *w, int64_t i0, int64_t m, int64_t j0, int64_t n) {
  for (int64_t i = 0; i < m; i++) {
    for (int64_t j = 0; j < n; j++) {
      float sum = block_of(w, m, i, j)[(i % ROWS) * COLS + j % COLS];
      int64_t at = (i0 + i) * p->ldc + j0 + j;
      if (p->accumulate) sum += element(p->c, p->out, at);
      if (p->out == PMOE_F32) ((float *)p->c)[at] = sum;
      else ((pmoei_bf16 *)p->c)[at] = pmoei_f32_to_bf16(sum);
    }
  }
}

static void multiply_block(const pmoei_product *p, workspace *w, int64_t i0, int64_t m, int64_t j0, int64_t n) {
  size_t size = pmoe_dtype_size(p->in);
  int64_t a_line = p->trans_a ? 1 : p->lda, a_step = p->trans_a ? p->lda : 1;
  int64_t b_line = p->trans_b ? p->ldb : 1, b_step = p->trans_b ? 1 : p->ldb;
  memset(w->c, 0, sizeof w->c);
  for (int64_t l = 0; l < p->k; l += BLOCK_K) {
    int64_t k = smaller(BLOCK_K, p->k - l);
    pack(w->a, (const char *)p->a + (size_t)(i0 * a_line + l * a_step) * size, p->in, m, k, ROWS, a_line, a_step);
    pack(w->b, (const char *)p->b + (size_t)(j0 * b_line + l * b_step) * size, p->in, n, k, COLS, b_line, b_step);
    for (int64_t j = 0; j < n; j += COLS)
      for (int64_t i = 0; i < m; i += ROWS) multiply_panels(k, w->a + i * k, w->b + j * k, block_of(w, m, i, j));
  }
  store(p, w, i0, m, j0, n);
}

static int run(pmoei_gemm *gemm, int32_t thread, const pmoei_product *p) {
  workspace *w = (workspace *)gemm->state + thread;
  for (int64_t j = 0; j < p->n; j += BLOCK_N)
    for (int64_t i = 0; i < p->m; i += BLOCK_M)
      multiply_block(p, w, i, smaller(BLOCK_M, p->m - i), j, smaller(BLOCK_N, p->n - j));
  return 0;
}

const pmoei_gemm_provider pmoei_gemm_plain = {"plain", create, destroy, run};
