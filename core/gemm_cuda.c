/* Matrix products by cuBLAS. A row-major C = A B is a column-major Cᵀ = Bᵀ Aᵀ: operands change places. */
#include <limits.h>

#include "core/cuda.h"
#include "core/data.h"

static cudaDataType_t type_of(pmoe_dtype dtype) {
  return dtype == PMOE_F32 ? CUDA_R_32F : dtype == PMOE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

static cublasOperation_t op(bool trans) { return trans ? CUBLAS_OP_T : CUBLAS_OP_N; }

static const float one = 1, none = 0;

/* What cuBLAS's 32-bit sizes can say. */
static pmoe_status check_sizes(const pmoei_product *p) {
  int64_t most = p->m;
  const int64_t others[] = {p->n, p->k, p->lda, p->ldb, p->ldc};
  for (int i = 0; i < 5; i++) most = others[i] > most ? others[i] : most;
  if (most > INT_MAX)
    return pmoei_error(PMOE_ERR_UNSUPPORTED, "a matrix product has a size of %lld; cuBLAS takes up to %d",
                       (long long)most, INT_MAX);
  return PMOE_OK;
}

static pmoe_status use_stream(pmoe_ctx *ctx, cudaStream_t stream, void *workspace) {
  struct pmoei_cuda *cuda = ctx->cuda;
  PMOEI_TRY(pmoei_cublas_status(cublasSetStream(cuda->cublas, stream), "cublasSetStream"));
  /* Setting the stream has taken the workspace away. */
  return pmoei_cublas_status(cublasSetWorkspace(cuda->cublas, workspace, cuda->workspace_bytes), "cublasSetWorkspace");
}

static pmoe_status use_main(pmoe_ctx *ctx) {
  const struct pmoei_cuda *cuda = ctx->cuda;
  bool branch = pmoei_cuda_stream(ctx) == cuda->branch.stream;
  return use_stream(ctx, pmoei_cuda_stream(ctx), branch ? cuda->branch.workspace : cuda->workspace);
}

/* Whether there is nothing to multiply; cuBLAS refuses such sizes. */
static bool trivial(const pmoei_product *p) { return p->m == 0 || p->n == 0 || p->k == 0; }

static pmoe_status finish_trivial(pmoe_ctx *ctx, const pmoei_product *p) {
  if (p->m == 0 || p->n == 0 || p->accumulate) return PMOE_OK;
  pmoe_mat c = {p->c, p->out, p->m, p->n, p->ldc};
  return pmoei_data_zero_rows(ctx, &c, 0, p->m);
}

/* On the handle's present stream. */
static pmoe_status multiply(pmoe_ctx *ctx, const pmoei_product *p) {
  const float *beta = p->accumulate ? &one : &none;
  return pmoei_cublas_status(cublasGemmEx(ctx->cuda->cublas, op(p->trans_b), op(p->trans_a), (int)p->n, (int)p->m,
                                          (int)p->k, &one, p->b, type_of(p->in), (int)p->ldb, p->a, type_of(p->in),
                                          (int)p->lda, beta, p->c, type_of(p->out), (int)p->ldc, CUBLAS_COMPUTE_32F,
                                          CUBLAS_GEMM_DEFAULT),
                             "cublasGemmEx");
}

pmoe_status pmoei_cuda_product(pmoe_ctx *ctx, const pmoei_product *product) {
  if (trivial(product)) return finish_trivial(ctx, product);
  PMOEI_TRY(check_sizes(product));
  PMOEI_TRY(use_main(ctx));
  return multiply(ctx, product);
}

/* ---- several at once ---- */

static int64_t distance(const void *a, const void *b, pmoe_dtype dtype) {
  return ((const char *)b - (const char *)a) / (int64_t)pmoe_dtype_size(dtype);
}

static bool same_shape(const pmoei_product *p, const pmoei_product *q) {
  return p->trans_a == q->trans_a && p->trans_b == q->trans_b && p->accumulate == q->accumulate && p->in == q->in &&
         p->out == q->out && p->m == q->m && p->n == q->n && p->k == q->k && p->lda == q->lda && p->ldb == q->ldb &&
         p->ldc == q->ldc;
}

/* One shape, and operands at equal distances. */
static bool is_batch(const pmoei_product *p, int64_t n) {
  for (int64_t i = 1; i < n; i++) {
    if (!same_shape(&p[0], &p[i])) return false;
    if ((const char *)p[i].a - (const char *)p[i - 1].a != (const char *)p[1].a - (const char *)p[0].a ||
        (const char *)p[i].b - (const char *)p[i - 1].b != (const char *)p[1].b - (const char *)p[0].b ||
        (char *)p[i].c - (char *)p[i - 1].c != (char *)p[1].c - (char *)p[0].c)
      return false;
  }
  return n > 1 && n <= INT_MAX;
}

static pmoe_status multiply_batch(pmoe_ctx *ctx, const pmoei_product *p, int64_t n) {
  const float *beta = p->accumulate ? &one : &none;
  PMOEI_TRY(use_main(ctx));
  return pmoei_cublas_status(cublasGemmStridedBatchedEx(ctx->cuda->cublas, op(p->trans_b), op(p->trans_a), (int)p->n,
                                                        (int)p->m, (int)p->k, &one, p->b, type_of(p->in), (int)p->ldb,
                                                        distance(p[0].b, p[1].b, p->in), p->a, type_of(p->in),
                                                        (int)p->lda, distance(p[0].a, p[1].a, p->in), beta, p->c,
                                                        type_of(p->out), (int)p->ldc, distance(p[0].c, p[1].c, p->out),
                                                        (int)n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                             "cublasGemmStridedBatchedEx");
}

static pmoe_status product_on(pmoe_ctx *ctx, cudaStream_t stream, void *workspace, const pmoei_product *p) {
  if (trivial(p)) return finish_trivial(ctx, p);
  PMOEI_TRY(use_stream(ctx, stream, workspace));
  return multiply(ctx, p);
}

/* Each to the stream that has the least to do so far. */
static pmoe_status multiply_side_by_side(pmoe_ctx *ctx, const pmoei_product *p, int64_t n) {
  struct pmoei_cuda *cuda = ctx->cuda;
  double load[PMOEI_SIDE_STREAMS + 1] = {0};
  for (int s = 0; s < PMOEI_SIDE_STREAMS; s++) PMOEI_TRY(pmoei_cuda_fork(ctx, &cuda->side[s]));
  pmoe_status status = PMOE_OK;
  for (int64_t i = 0; i < n && status == PMOE_OK; i++) {
    int least = 0;
    for (int s = 1; s <= PMOEI_SIDE_STREAMS; s++) least = load[s] < load[least] ? s : least;
    load[least] += (double)p[i].m * (double)p[i].n * (double)p[i].k;
    const pmoei_cuda_lane *lane = least > 0 ? &cuda->side[least - 1] : NULL;
    status =
        product_on(ctx, lane ? lane->stream : pmoei_cuda_stream(ctx), lane ? lane->workspace : cuda->workspace, &p[i]);
  }
  /* Joined in any case: a stream that is being captured must not end with others open. */
  for (int s = 0; s < PMOEI_SIDE_STREAMS; s++) {
    pmoe_status joined = pmoei_cuda_join(ctx, &cuda->side[s]);
    if (status == PMOE_OK) status = joined;
  }
  return status;
}

enum { MAX_GROUPS = PMOEI_MAX_POINTERS / 3 };

/* The sizes are read at the call, the pointers on the device: they lie in scratch. */
static pmoe_status multiply_group(pmoe_ctx *ctx, const pmoei_product *p, int n) {
  cublasOperation_t trans_a[MAX_GROUPS], trans_b[MAX_GROUPS];
  int m[MAX_GROUPS], cols[MAX_GROUPS], k[MAX_GROUPS], lda[MAX_GROUPS], ldb[MAX_GROUPS], ldc[MAX_GROUPS],
      size[MAX_GROUPS];
  float alpha[MAX_GROUPS], beta[MAX_GROUPS];
  pmoei_pointers pointers;
  const void **pointer = pointers.at;
  int groups = 0;
  for (int i = 0; i < n; i++) {
    if (trivial(&p[i])) {
      PMOEI_TRY(finish_trivial(ctx, &p[i]));
      continue;
    }
    trans_a[groups] = op(p[i].trans_a), trans_b[groups] = op(p[i].trans_b);
    m[groups] = (int)p[i].m, cols[groups] = (int)p[i].n, k[groups] = (int)p[i].k;
    lda[groups] = (int)p[i].lda, ldb[groups] = (int)p[i].ldb, ldc[groups] = (int)p[i].ldc;
    size[groups] = 1, alpha[groups] = 1, beta[groups] = p[i].accumulate ? 1 : 0;
    pointer[groups] = p[i].b, pointer[MAX_GROUPS + groups] = p[i].a, pointer[2 * MAX_GROUPS + groups] = p[i].c;
    groups++;
  }
  if (groups == 0) return PMOE_OK;
  void *device;
  int32_t frame;
  PMOEI_TRY(pmoei_scratch_open(ctx, sizeof pointers, &device, &frame));
  pmoe_status status = pmoei_cuda_store_pointers(ctx, &pointers, device);
  void **array = device;
  if (status == PMOE_OK) status = use_main(ctx);
  if (status == PMOE_OK)
    status = pmoei_cublas_status(cublasGemmGroupedBatchedEx(ctx->cuda->cublas, trans_b, trans_a, cols, m, k, alpha,
                                                            (const void *const *)array, type_of(p->in), ldb,
                                                            (const void *const *)(array + MAX_GROUPS), type_of(p->in),
                                                            lda, beta, array + 2 * (size_t)MAX_GROUPS, type_of(p->out),
                                                            ldc, groups, size, CUBLAS_COMPUTE_32F),
                                 "cublasGemmGroupedBatchedEx");
  pmoei_scratch_close(ctx, frame);
  return status;
}

pmoe_status pmoei_cuda_products(pmoe_ctx *ctx, const pmoei_product *products, int64_t n) {
  if (n == 1) return pmoei_cuda_product(ctx, products);
  for (int64_t i = 0; i < n; i++) PMOEI_TRY(check_sizes(&products[i]));
  if (is_batch(products, n) && !trivial(products)) return multiply_batch(ctx, products, n);
  if (!ctx->cuda->grouped) return n > 0 ? multiply_side_by_side(ctx, products, n) : PMOE_OK;
  for (int64_t i = 0; i < n; i += MAX_GROUPS)
    PMOEI_TRY(multiply_group(ctx, products + i, (int)(n - i < MAX_GROUPS ? n - i : MAX_GROUPS)));
  return PMOE_OK;
}
