#include "linear.h"

#include <cblas.h>
#include <string.h>

#include "parallel.h"

/* Tiles of a product: big enough that a single-threaded product is fast, small enough to share out. */
enum { TILE_ROWS = 256, TILE_COLS = 512, COLUMNS_PER_TASK = 128, NUMBERS_PER_TASK = 1 << 15 };

/* c [m, n] = a b (+ c), a as [m, k] or transposed, b as [k, n] or transposed; all without gaps. */
struct product {
  int64_t m, n, k;
  const float *a, *b, *bias;
  float *c;
  int trans_a, trans_b, accumulate;
};

static void product_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct product *p = arg;
  int64_t tiles = lm_num_blocks(p->n, TILE_COLS);
  struct lm_range row = lm_block(p->m, TILE_ROWS, index / tiles), col = lm_block(p->n, TILE_COLS, index % tiles);
  int64_t rows = row.end - row.begin, cols = col.end - col.begin;
  float *c = p->c + row.begin * p->n + col.begin;
  if (p->bias)
    for (int64_t i = 0; i < rows; i++) memcpy(c + i * p->n, p->bias + col.begin, (size_t)cols * sizeof *c);
  int64_t lda = p->trans_a ? p->m : p->k, ldb = p->trans_b ? p->k : p->n;
  const float *a = p->a + row.begin * (p->trans_a ? 1 : p->k), *b = p->b + col.begin * (p->trans_b ? p->k : 1);
  cblas_sgemm(CblasRowMajor, p->trans_a ? CblasTrans : CblasNoTrans, p->trans_b ? CblasTrans : CblasNoTrans, (int)rows,
              (int)cols, (int)p->k, 1.0f, a, (int)lda, b, (int)ldb, p->accumulate || p->bias ? 1.0f : 0.0f, c,
              (int)p->n);
}

static void product(struct product p) {
  if (p.k > 0) lm_parallel(lm_num_blocks(p.m, TILE_ROWS) * lm_num_blocks(p.n, TILE_COLS), product_task, &p);
}

void linear_forward(struct lm_linear size, float *y, const float *x, const float *weight, const float *bias) {
  product((struct product){size.rows, size.out, size.in, x, weight, bias, y, 0, 1, 0});
}

void linear_backward_input(struct lm_linear size, float *dx, const float *dy, const float *weight) {
  product((struct product){size.rows, size.in, size.out, dy, weight, NULL, dx, 0, 0, 0});
}

void linear_backward_weight(struct lm_linear size, float *dweight, float *dbias, const float *dy, const float *x) {
  product((struct product){size.out, size.in, size.rows, dy, x, NULL, dweight, 1, 0, 1});
  if (dbias) bias_backward(dbias, dy, size.rows, size.out);
}

struct column_job {
  float *to;
  const float *from;
  int64_t rows, n;
};

LM_VECTORISED static void bias_columns(const struct column_job *job, struct lm_range col) {
  float sum[COLUMNS_PER_TASK] = {0};
  int64_t cols = col.end - col.begin;
  for (int64_t r = 0; r < job->rows; r++) {
    const float *dy = job->from + r * job->n + col.begin;
    LM_SIMD
    for (int64_t j = 0; j < cols; j++) sum[j] += dy[j];
  }
  for (int64_t j = 0; j < cols; j++) job->to[col.begin + j] += sum[j];
}

static void bias_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct column_job *job = arg;
  bias_columns(job, lm_block(job->n, COLUMNS_PER_TASK, index));
}

void bias_backward(float *dbias, const float *dy, int64_t rows, int64_t n) {
  lm_parallel(lm_num_blocks(n, COLUMNS_PER_TASK), bias_task, &(struct column_job){dbias, dy, rows, n});
}

struct add_job {
  float *out;
  const float *a, *b;
  int64_t n;
};

LM_VECTORISED static void add_numbers(float *out, const float *a, const float *b, int64_t n) {
  LM_SIMD
  for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

static void add_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct add_job *job = arg;
  struct lm_range range = lm_block(job->n, NUMBERS_PER_TASK, index);
  add_numbers(job->out + range.begin, job->a + range.begin, job->b + range.begin, range.end - range.begin);
}

void add(float *out, const float *a, const float *b, int64_t n) {
  lm_parallel(lm_num_blocks(n, NUMBERS_PER_TASK), add_task, &(struct add_job){out, a, b, n});
}
