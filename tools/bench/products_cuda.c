/* The experts' six products by cuBLAS and nothing else, over rows that lie sorted in memory of their own. A row-major
 * C = A B is a column-major Cᵀ = Bᵀ Aᵀ: operands change places. */
#include <cublas_v2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"
#include "device_cuda.h"

enum { NUM_SETS = 6, FORWARD_SETS = 2, NUM_STREAMS = 4, NUM_BUFFERS = 8, WORKSPACE = 32 << 20 };

/* One product of each expert with rows: C[m,n] = op(A)[m,k] op(B)[k,n], or added to C. */
typedef struct product_set {
  cublasOperation_t trans_a, trans_b;
  cudaDataType_t in, out;
  float beta;
  int *m, *n, *k; /* [count] of the arrays that cuBLAS's grouped call reads */
  int *lda, *ldb, *ldc, *ones;
  float *alphas, *betas;
  cublasOperation_t *trans_as, *trans_bs;
  const void **a, **b;
  void **c;
  void **pointers; /* the device's copy: b, a, c */
  bool grouped;    /* whether cuBLAS takes these types grouped */
} product_set;

struct bench_products {
  bench_device *device;
  cublasHandle_t cublas;
  int count;
  bool can[BENCH_NUM_WAYS];
  product_set set[NUM_SETS];
  void *buffer[NUM_BUFFERS];
  void *workspace[NUM_STREAMS];
  cudaStream_t stream[NUM_STREAMS]; /* the first is the device's */
  cudaEvent_t begun, done[NUM_STREAMS];
  bench_way best;
};

static pmoe_status cublas_status(cublasStatus_t status, const char *call) {
  if (status == CUBLAS_STATUS_SUCCESS) return PMOE_OK;
  fprintf(stderr, "pmoe-bench: %s: %s\n", call, cublasGetStatusName(status));
  return PMOE_ERR_DEVICE;
}

static pmoe_status use_stream(const bench_products *p, int i) {
  pmoe_status status = cublas_status(cublasSetStream(p->cublas, p->stream[i]), "cublasSetStream");
  if (status < 0) return status;
  return cublas_status(cublasSetWorkspace(p->cublas, p->workspace[i], WORKSPACE), "cublasSetWorkspace");
}

/* ---- the ways ---- */
static const float one = 1;

static pmoe_status single(const bench_products *p, const product_set *s, int i) {
  return cublas_status(cublasGemmEx(p->cublas, s->trans_b, s->trans_a, s->n[i], s->m[i], s->k[i], &one, s->b[i], s->in,
                                    s->ldb[i], s->a[i], s->in, s->lda[i], &s->beta, s->c[i], s->out, s->ldc[i],
                                    CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                       "cublasGemmEx");
}

static pmoe_status run_one_by_one(bench_products *p, const product_set *s) {
  int streams = p->count < NUM_STREAMS ? p->count : NUM_STREAMS;
  if (streams > 1) BENCH_CUDA_TRY(cudaEventRecord(p->begun, p->stream[0]));
  for (int j = 1; j < streams; j++) BENCH_CUDA_TRY(cudaStreamWaitEvent(p->stream[j], p->begun, 0));
  for (int i = 0; i < p->count; i++) {
    pmoe_status status = use_stream(p, i % NUM_STREAMS);
    if (status == PMOE_OK) status = single(p, s, i);
    if (status < 0) return status;
  }
  for (int j = 1; j < streams; j++) {
    BENCH_CUDA_TRY(cudaEventRecord(p->done[j], p->stream[j]));
    BENCH_CUDA_TRY(cudaStreamWaitEvent(p->stream[0], p->done[j], 0));
  }
  return PMOE_OK;
}

static long long distance(const void *first, const void *second, cudaDataType_t type) {
  return (long long)((const char *)second - (const char *)first) / (type == CUDA_R_32F ? 4 : 2);
}

static int equal_run(const bench_products *p, const product_set *s, int first) {
  int next = first + 1;
  while (next < p->count && s->m[next] == s->m[first] && s->k[next] == s->k[first]) next++;
  return next - first;
}

/* A batch of each run of equal products: of the experts, and of a dense branch behind them. */
static pmoe_status run_batched(bench_products *p, const product_set *s) {
  pmoe_status status = use_stream(p, 0);
  for (int i = 0, n; i < p->count && status == PMOE_OK; i += n) {
    n = equal_run(p, s, i);
    if (n == 1) status = single(p, s, i);
    else
      status = cublas_status(cublasGemmStridedBatchedEx(
                                 p->cublas, s->trans_b, s->trans_a, s->n[i], s->m[i], s->k[i], &one, s->b[i], s->in,
                                 s->ldb[i], distance(s->b[i], s->b[i + 1], s->in), s->a[i], s->in, s->lda[i],
                                 distance(s->a[i], s->a[i + 1], s->in), &s->beta, s->c[i], s->out, s->ldc[i],
                                 distance(s->c[i], s->c[i + 1], s->out), n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                             "cublasGemmStridedBatchedEx");
  }
  return status;
}

static cublasStatus_t call_grouped(const bench_products *p, const product_set *s) {
  size_t n = (size_t)p->count;
  return cublasGemmGroupedBatchedEx(p->cublas, s->trans_bs, s->trans_as, s->n, s->m, s->k, s->alphas,
                                    (const void *const *)s->pointers, s->in, s->ldb,
                                    (const void *const *)(s->pointers + n), s->in, s->lda, s->betas,
                                    s->pointers + 2 * n, s->out, s->ldc, p->count, s->ones, CUBLAS_COMPUTE_32F);
}

/* Sets that cuBLAS does not take, those of the gradients maybe, run one by one. */
static pmoe_status run_grouped(bench_products *p, const product_set *s) {
  if (!s->grouped) return run_one_by_one(p, s);
  pmoe_status status = use_stream(p, 0);
  return status < 0 ? status : cublas_status(call_grouped(p, s), "cublasGemmGroupedBatchedEx");
}

static pmoe_status run_sets(const bench_ways *w, int first, int last) {
  pmoe_status (*const runs[])(bench_products *, const product_set *) = {run_one_by_one, run_batched, run_grouped};
  pmoe_status status = PMOE_OK;
  for (int i = first; i < last && status == PMOE_OK && w->products->count > 0; i++)
    status = runs[w->way](w->products, &w->products->set[i]);
  return status;
}

pmoe_status bench_products_forward(void *arg) { return run_sets(arg, 0, FORWARD_SETS); }
pmoe_status bench_products_backward(void *arg) { return run_sets(arg, FORWARD_SETS, NUM_SETS); }
bool bench_products_can(const bench_products *products, bench_way way) { return products->can[way]; }
int bench_products_grouped(const bench_products *products) {
  int n = 0;
  for (int i = 0; i < NUM_SETS; i++) n += products->set[i].grouped;
  return n;
}
bench_way bench_products_best(const bench_products *products) { return products->best; }

/* ---- building ---- */

/* Numbers of ordinary size with an odd period: zeros, infinities and denormals have speeds of their own. */
static pmoe_status take_numbers(bench_products *p, int buffer, pmoe_dtype dtype, int64_t n) {
  enum { PERIOD = 4099, REPEATS = 64 };
  size_t size = pmoe_dtype_size(dtype), bytes = (size_t)n * size, chunk = (size_t)PERIOD * REPEATS * size;
  pmoe_status status = p->device->take(p->device, bytes, &p->buffer[buffer]);
  if (status < 0) return status;
  void *numbers = NULL;
  BENCH_TRY(bench_alloc(chunk, &numbers));
  uint32_t state = 1;
  for (int64_t i = 0; i < PERIOD * REPEATS; i++) {
    if (i % PERIOD == 0) state = 1;
    state = state * 1664525u + 1013904223u;
    bench_store(dtype, numbers, i, ((float)(state >> 8) * 0x1p-23f - 1.0f) * 0.05f);
  }
  size_t filled = bytes < chunk ? bytes : chunk;
  status = p->device->copy(p->device, p->buffer[buffer], numbers, filled);
  free(numbers);
  while (status == PMOE_OK && filled < bytes) {
    size_t more = bytes - filled < filled ? bytes - filled : filled;
    status = p->device->move(p->device, (char *)p->buffer[buffer] + filled, p->buffer[buffer], more);
    filled += more;
  }
  return status == PMOE_OK ? p->device->wait(p->device) : status;
}

static void *array(void **at, size_t n, size_t size) {
  void *p = *at;
  *at = (char *)*at + (n * size + 15) / 16 * 16;
  return p;
}

/* Room for the arrays of one set, in one block that p->m begins. */
static pmoe_status make_set(bench_products *p, product_set *s) {
  size_t n = (size_t)p->count;
  void *at;
  BENCH_TRY(bench_alloc(n * (9 * 16 + 2 * 16 + 3 * 16), &at));
  s->m = array(&at, n, sizeof(int)), s->n = array(&at, n, sizeof(int)), s->k = array(&at, n, sizeof(int));
  s->lda = array(&at, n, sizeof(int)), s->ldb = array(&at, n, sizeof(int)), s->ldc = array(&at, n, sizeof(int));
  s->ones = array(&at, n, sizeof(int));
  s->alphas = array(&at, n, sizeof(float)), s->betas = array(&at, n, sizeof(float));
  s->trans_as = array(&at, n, sizeof *s->trans_as), s->trans_bs = array(&at, n, sizeof *s->trans_bs);
  s->b = array(&at, n, sizeof(void *)), s->a = array(&at, n, sizeof(void *)), s->c = array(&at, n, sizeof(void *));
  return PMOE_OK;
}

/* Where a matrix lies: buffer, first element, leading dimension. */
typedef struct place {
  int buffer;
  int64_t first, ld;
} place;

static void *at_place(const bench_products *p, place where, cudaDataType_t type) {
  return (char *)p->buffer[where.buffer] + where.first * (type == CUDA_R_32F ? 4 : 2);
}

static void set_product(bench_products *p, int set, int i, int64_t m, int64_t n, int64_t k, place a, place b, place c) {
  product_set *s = &p->set[set];
  s->m[i] = (int)m, s->n[i] = (int)n, s->k[i] = (int)k;
  s->lda[i] = (int)a.ld, s->ldb[i] = (int)b.ld, s->ldc[i] = (int)c.ld;
  s->ones[i] = 1, s->alphas[i] = 1, s->betas[i] = s->beta;
  s->trans_as[i] = s->trans_a, s->trans_bs[i] = s->trans_b;
  s->a[i] = at_place(p, a, s->in), s->b[i] = at_place(p, b, s->in), s->c[i] = at_place(p, c, s->out);
}

enum { X, PRE, Y, DPRE, W1, W2, G1, G2 };

/* The six products of expert e, which has n rows from `first` on, as the i-th of their sets. Gated activations hand fc2
 * the first half of pre's columns. */
static void set_expert(bench_products *p, const bench_floor_shape *s, int i, int64_t e, int64_t first, int64_t n) {
  int64_t h = s->hidden, f = s->inner, f1 = s->inner1;
  place x = {X, first * h, h}, pre = {PRE, first * f1, f1}, y = {Y, first * h, h}, dpre = {DPRE, first * f1, f1},
        w1 = {W1, e * f1 * h, h}, w2 = {W2, e * h * f, f}, g1 = {G1, e * f1 * h, h}, g2 = {G2, e * h * f, f};
  set_product(p, 0, i, n, f1, h, x, w1, pre);
  set_product(p, 1, i, n, h, f, pre, w2, y);
  set_product(p, 2, i, n, f, h, y, w2, dpre);
  set_product(p, 3, i, n, h, f1, dpre, w1, x);
  set_product(p, 4, i, h, f, n, y, pre, g2);
  set_product(p, 5, i, f1, h, n, dpre, x, g1);
}

static cudaDataType_t type_of(pmoe_dtype dtype) {
  return dtype == PMOE_F32 ? CUDA_R_32F : dtype == PMOE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

static pmoe_status make_sets(bench_products *p, const bench_floor_shape *shape) {
  static const cublasOperation_t trans_a[NUM_SETS] = {0, 0, 0, 0, CUBLAS_OP_T, CUBLAS_OP_T},
                                 trans_b[NUM_SETS] = {CUBLAS_OP_T, CUBLAS_OP_T, 0, 0, 0, 0};
  for (int i = 0; i < NUM_SETS; i++) {
    product_set *s = &p->set[i];
    bool gradient = trans_a[i] == CUBLAS_OP_T;
    s->trans_a = trans_a[i], s->trans_b = trans_b[i], s->beta = gradient ? 1 : 0;
    s->in = type_of(shape->dtype), s->out = gradient ? CUDA_R_32F : s->in;
    pmoe_status status = make_set(p, s);
    if (status < 0) return status;
  }
  int64_t first = 0;
  for (int32_t e = 0, i = 0; e < shape->num_experts; first += shape->rows[e++])
    if (shape->rows[e] > 0) set_expert(p, shape, i++, e, first, shape->rows[e]);
  size_t n = (size_t)p->count, bytes = n * sizeof(void *);
  for (int i = 0; i < NUM_SETS; i++) {
    product_set *s = &p->set[i];
    void *pointers = NULL;
    pmoe_status status = p->device->take(p->device, 3 * bytes, &pointers);
    s->pointers = pointers;
    if (status == PMOE_OK) status = p->device->copy(p->device, s->pointers, s->b, bytes);
    if (status == PMOE_OK) status = p->device->copy(p->device, s->pointers + n, s->a, bytes);
    if (status == PMOE_OK) status = p->device->copy(p->device, s->pointers + 2 * n, s->c, bytes);
    if (status < 0) return status;
  }
  return PMOE_OK;
}

static pmoe_status make_buffers(bench_products *p, const bench_floor_shape *s) {
  int64_t rows = 0, e = s->num_experts;
  for (int32_t i = 0; i < e; i++) rows += s->rows[i];
  const int64_t size[NUM_BUFFERS] = {
      [X] = rows * s->hidden,    [PRE] = rows * s->inner1,         [Y] = rows * s->hidden,
      [DPRE] = rows * s->inner1, [W1] = e * s->inner1 * s->hidden, [W2] = e * s->hidden * s->inner};
  pmoe_status status = PMOE_OK;
  for (int i = 0; i < NUM_BUFFERS && status == PMOE_OK; i++)
    status = take_numbers(p, i, i < G1 ? s->dtype : PMOE_F32, i < G1 ? size[i] : size[i - G1 + W1]);
  return status;
}

static pmoe_status make_lanes(bench_products *p) {
  pmoe_status status = cublas_status(cublasCreate(&p->cublas), "cublasCreate");
  if (status < 0) return status;
  BENCH_CUDA_TRY(cudaEventCreateWithFlags(&p->begun, cudaEventDisableTiming));
  p->stream[0] = bench_cuda_stream(p->device);
  for (int i = 0; i < NUM_STREAMS && status == PMOE_OK; i++) {
    if (i > 0) BENCH_CUDA_TRY(cudaStreamCreateWithFlags(&p->stream[i], cudaStreamNonBlocking));
    BENCH_CUDA_TRY(cudaEventCreateWithFlags(&p->done[i], cudaEventDisableTiming));
    status = p->device->take(p->device, WORKSPACE, &p->workspace[i]);
  }
  return status;
}

/* Whether this cuBLAS takes any of the products grouped. */
static bool takes_grouped(bench_products *p) {
  bool any = false;
  for (int i = 0; i < NUM_SETS && p->count > 0; i++) {
    product_set *s = &p->set[i];
    s->grouped = use_stream(p, 0) == PMOE_OK && call_grouped(p, s) == CUBLAS_STATUS_SUCCESS;
    any = any || s->grouped;
  }
  return any && p->device->wait(p->device) == PMOE_OK;
}

static pmoe_status find_ways(bench_products *p, const bench_floor_shape *shape) {
  bool equal = p->count == shape->num_experts;
  for (int32_t e = 1; e + 1 < shape->num_experts; e++) equal = equal && shape->rows[e] == shape->rows[0];
  p->can[BENCH_ONE_BY_ONE] = true, p->can[BENCH_BATCHED] = equal, p->can[BENCH_GROUPED] = takes_grouped(p);
  double best_ms = 0;
  for (int way = 0; way < BENCH_NUM_WAYS; way++) {
    if (!p->can[way]) continue;
    bench_ways arg = {p, (bench_way)way};
    const bench_op ops[2] = {{bench_products_forward, &arg, NULL}, {bench_products_backward, &arg, NULL}};
    double ms = 0;
    pmoe_status status = p->device->train(p->device, ops, 2, 1, &ms); /* kernels are loaded */
    if (status == PMOE_OK) status = p->device->train(p->device, ops, 2, 2, &ms);
    if (status < 0) return status;
    if (way == 0 || ms < best_ms) p->best = (bench_way)way, best_ms = ms;
  }
  return PMOE_OK;
}

pmoe_status bench_cuda_products(bench_device *device, const bench_floor_shape *shape, bench_products **out) {
  bench_products *p = calloc(1, sizeof *p);
  if (!p) return PMOE_ERR_NOMEM;
  p->device = device;
  for (int32_t e = 0; e < shape->num_experts; e++) p->count += shape->rows[e] > 0;
  pmoe_status status = make_lanes(p);
  if (status == PMOE_OK) status = make_buffers(p, shape);
  if (status == PMOE_OK) status = make_sets(p, shape);
  if (status == PMOE_OK) status = find_ways(p, shape);
  if (status < 0) bench_products_destroy(p);
  else *out = p;
  return status;
}

void bench_products_destroy(bench_products *p) {
  if (!p) return;
  (void)p->device->wait(p->device);
  for (int i = 0; i < NUM_SETS; i++) {
    free(p->set[i].m);
    (void)cudaFree(p->set[i].pointers);
  }
  for (int i = 0; i < NUM_BUFFERS; i++) (void)cudaFree(p->buffer[i]);
  for (int i = 0; i < NUM_STREAMS; i++) {
    (void)cudaFree(p->workspace[i]);
    if (p->done[i]) (void)cudaEventDestroy(p->done[i]);
    if (i > 0 && p->stream[i]) (void)cudaStreamDestroy(p->stream[i]);
  }
  if (p->begun) (void)cudaEventDestroy(p->begun);
  if (p->cublas) (void)cublasDestroy(p->cublas);
  free(p);
}
