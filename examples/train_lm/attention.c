#include "attention.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

#include "parallel.h"

/* A task is one head of one sequence; it goes through the queries in blocks of rows, and each block sees the keys up to
 * its own last row. */
enum { BLOCK = 64 };

struct job {
  struct lm_attention size;
  float *out, *logsum, *dqkv, *scratch;
  const float *qkv, *dout;
};

/* One block of queries of one head: rows [begin, end), keys [0, end). Strides are in floats. */
struct block {
  int64_t begin, rows, keys, head_size, stride, out_stride;
  float scale;
  const float *q, *k, *v; /* of the head's first token */
  float *p;               /* [BLOCK, length] */
};

size_t attention_scratch(struct lm_attention size, int threads) {
  return (size_t)threads * 2 * BLOCK * (size_t)size.length;
}

static void gemm(int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                 const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
  cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans, (int)m, (int)n,
              (int)k, alpha, a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
}

static struct block block_at(const struct job *job, int64_t task, int64_t begin) {
  const struct lm_attention *size = &job->size;
  int64_t sequence = task / size->heads, head = task % size->heads;
  struct block b = {.begin = begin, .head_size = size->hidden / size->heads, .stride = 3 * size->hidden};
  b.rows = size->length - begin < BLOCK ? size->length - begin : BLOCK;
  b.keys = begin + b.rows;
  b.out_stride = size->hidden;
  b.scale = 1.0f / sqrtf((float)b.head_size);
  b.q = job->qkv + sequence * size->length * b.stride + head * b.head_size;
  b.k = b.q + size->hidden;
  b.v = b.k + size->hidden;
  return b;
}

/* p = scaled scores of the block's queries with all its keys */
static void scores(const struct block *b) {
  gemm(0, 1, b->rows, b->keys, b->head_size, b->scale, b->q + b->begin * b->stride, b->stride, b->k, b->stride, 0, b->p,
       b->keys);
}

LM_VECTORISED static void softmax_rows(const struct block *b, float *logsum) {
  for (int64_t i = 0; i < b->rows; i++) {
    float *p = b->p + i * b->keys, most = p[0], sum = 0;
    int64_t seen = b->begin + i + 1;
    LM_SIMD_MAX(most)
    for (int64_t j = 0; j < seen; j++) most = p[j] > most ? p[j] : most;
    LM_SIMD_SUM(sum)
    for (int64_t j = 0; j < seen; j++) {
      float e = lm_exp(p[j] - most);
      p[j] = e;
      sum += e;
    }
    float scale = 1.0f / sum;
    LM_SIMD
    for (int64_t j = 0; j < seen; j++) p[j] *= scale;
    memset(p + seen, 0, (size_t)(b->keys - seen) * sizeof *p);
    logsum[b->begin + i] = most + logf(sum);
  }
}

static void forward_task(void *arg, int64_t index, int thread) {
  const struct job *job = arg;
  const struct lm_attention *size = &job->size;
  for (int64_t begin = 0; begin < size->length; begin += BLOCK) {
    struct block b = block_at(job, index, begin);
    b.p = job->scratch + (int64_t)thread * 2 * BLOCK * size->length;
    scores(&b);
    softmax_rows(&b, job->logsum + index * size->length);
    float *out =
        job->out + (index / size->heads * size->length + begin) * size->hidden + index % size->heads * b.head_size;
    gemm(0, 0, b.rows, b.head_size, b.keys, 1, b.p, b.keys, b.v, b.stride, 0, out, b.out_stride);
  }
}

void attention_forward(struct lm_attention size, float *out, float *logsum, const float *qkv, float *scratch) {
  struct job job = {.size = size, .out = out, .logsum = logsum, .qkv = qkv, .scratch = scratch};
  lm_parallel(size.sequences * size.heads, forward_task, &job);
}

/* p becomes the probabilities; ds, dout vT before, becomes the scores' gradient p (ds - dout . out). */
LM_VECTORISED static void scores_backward(const struct block *b, float *ds_block, const float *logsum,
                                          const float *dout, const float *out) {
  for (int64_t i = 0; i < b->rows; i++) {
    float *p = b->p + i * b->keys, *ds = ds_block + i * b->keys, shift = logsum[b->begin + i], dot = 0;
    const float *dy = dout + i * b->out_stride, *y = out + i * b->out_stride;
    int64_t seen = b->begin + i + 1;
    LM_SIMD_SUM(dot)
    for (int64_t j = 0; j < b->head_size; j++) dot += dy[j] * y[j];
    LM_SIMD
    for (int64_t j = 0; j < seen; j++) {
      p[j] = lm_exp(p[j] - shift);
      ds[j] = p[j] * (ds[j] - dot) * b->scale;
    }
    memset(p + seen, 0, (size_t)(b->keys - seen) * sizeof *p);
    memset(ds + seen, 0, (size_t)(b->keys - seen) * sizeof *ds);
  }
}

static void backward_task(void *arg, int64_t index, int thread) {
  const struct job *job = arg;
  const struct lm_attention *size = &job->size;
  /* From the last block to the first: the last one sees every key, so that its products write all of dk and dv. */
  int64_t last = (size->length - 1) / BLOCK * BLOCK;
  for (int64_t begin = last; begin >= 0; begin -= BLOCK) {
    struct block b = block_at(job, index, begin);
    b.p = job->scratch + (int64_t)thread * 2 * BLOCK * size->length;
    float *ds = b.p + BLOCK * size->length, beta = begin == last ? 0.0f : 1.0f;
    int64_t at = (index / size->heads * size->length + begin) * size->hidden + index % size->heads * b.head_size;
    const float *dout = job->dout + at;
    float *dq = job->dqkv + (b.q - job->qkv), *dk = dq + size->hidden, *dv = dk + size->hidden;
    scores(&b);
    gemm(0, 1, b.rows, b.keys, b.head_size, 1, dout, b.out_stride, b.v, b.stride, 0, ds, b.keys);
    scores_backward(&b, ds, job->logsum + index * size->length, dout, job->out + at);
    gemm(0, 0, b.rows, b.head_size, b.keys, 1, ds, b.keys, b.k, b.stride, 0, dq + begin * b.stride, b.stride);
    gemm(1, 0, b.keys, b.head_size, b.rows, 1, ds, b.keys, b.q + begin * b.stride, b.stride, beta, dk, b.stride);
    gemm(1, 0, b.keys, b.head_size, b.rows, 1, b.p, b.keys, dout, b.out_stride, beta, dv, b.stride);
  }
}

void attention_backward(struct lm_attention size, float *dqkv, const float *dout, const float *qkv, const float *out,
                        const float *logsum, float *scratch) {
  struct job job = {.size = size, .dqkv = dqkv, .dout = dout, .qkv = qkv, .scratch = scratch};
  job.out = (float *)out, job.logsum = (float *)logsum;
  lm_parallel(size.sequences * size.heads, backward_task, &job);
}
