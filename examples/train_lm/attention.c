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
  struct lm_qkv in;
  float *out, *logsum, *dq, *dkv, *scratch;
  const float *dout;
};

/* One block of queries of one head: rows [begin, begin + rows), and the keys that its last row sees. */
struct block {
  int64_t begin, rows, before, keys, head_size, q_stride, kv_stride, out_stride;
  int64_t q_at, k_at, v_at; /* of the block's first query, and of the head's first key and value */
  float scale;
  const float *q, *k, *v;
  float *p; /* [BLOCK, keys of a sequence] */
};

static int64_t keys_of(const struct lm_attention *size) { return size->first + size->length; }

size_t attention_scratch(struct lm_attention size, int threads) {
  return (size_t)threads * 2 * BLOCK * (size_t)keys_of(&size);
}

static void gemm(int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                 const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
  cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans, (int)m, (int)n,
              (int)k, alpha, a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
}

static struct block block_at(const struct job *job, int64_t task, int64_t begin, int thread) {
  const struct lm_attention *size = &job->size;
  int64_t sequence = task / size->heads, head = task % size->heads, head_size = size->width / size->heads;
  struct block b = {.begin = begin, .before = size->first, .head_size = head_size, .out_stride = size->width};
  b.q_stride = job->in.q_stride, b.kv_stride = job->in.kv_stride;
  b.rows = size->length - begin < BLOCK ? size->length - begin : BLOCK;
  b.keys = size->first + begin + b.rows;
  b.scale = 1.0f / sqrtf((float)head_size);
  b.q_at = (sequence * size->length + begin) * b.q_stride + head * head_size;
  b.k_at = sequence * keys_of(size) * b.kv_stride + head * head_size;
  b.v_at = b.k_at + size->width;
  b.q = job->in.q + b.q_at, b.k = job->in.kv + b.k_at, b.v = job->in.kv + b.v_at;
  b.p = job->scratch + (int64_t)thread * 2 * BLOCK * keys_of(size);
  return b;
}

/* Of the block's first row and the head's first column in out. */
static int64_t out_at(const struct job *job, const struct block *b, int64_t task) {
  const struct lm_attention *size = &job->size;
  return (task / size->heads * size->length + b->begin) * size->width + task % size->heads * b->head_size;
}

/* p = scaled scores of the block's queries with all its keys */
static void scores(const struct block *b) {
  gemm(0, 1, b->rows, b->keys, b->head_size, b->scale, b->q, b->q_stride, b->k, b->kv_stride, 0, b->p, b->keys);
}

LM_VECTORISED static void softmax_rows(const struct block *b, float *logsum) {
  for (int64_t i = 0; i < b->rows; i++) {
    float *p = b->p + i * b->keys, most = p[0], sum = 0;
    int64_t seen = b->before + b->begin + i + 1;
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
  for (int64_t begin = 0; begin < job->size.length; begin += BLOCK) {
    struct block b = block_at(job, index, begin, thread);
    scores(&b);
    softmax_rows(&b, job->logsum + index * job->size.length);
    gemm(0, 0, b.rows, b.head_size, b.keys, 1, b.p, b.keys, b.v, b.kv_stride, 0, job->out + out_at(job, &b, index),
         b.out_stride);
  }
}

void attention_forward(struct lm_attention size, float *out, float *logsum, struct lm_qkv in, float *scratch) {
  struct job job = {.size = size, .in = in, .out = out, .logsum = logsum, .scratch = scratch};
  lm_parallel(size.sequences * size.heads, forward_task, &job);
}

/* p becomes the probabilities; ds, dout vT before, becomes the scores' gradient p (ds - dout . out). */
LM_VECTORISED static void scores_backward(const struct block *b, float *ds_block, const float *logsum,
                                          const float *dout, const float *out) {
  for (int64_t i = 0; i < b->rows; i++) {
    float *p = b->p + i * b->keys, *ds = ds_block + i * b->keys, shift = logsum[b->begin + i], dot = 0;
    const float *dy = dout + i * b->out_stride, *y = out + i * b->out_stride;
    int64_t seen = b->before + b->begin + i + 1;
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
    struct block b = block_at(job, index, begin, thread);
    float *ds = b.p + BLOCK * keys_of(size), beta = begin == last ? 0.0f : 1.0f;
    const float *dout = job->dout + out_at(job, &b, index), *out = job->out + out_at(job, &b, index);
    scores(&b);
    gemm(0, 1, b.rows, b.keys, b.head_size, 1, dout, b.out_stride, b.v, b.kv_stride, 0, ds, b.keys);
    scores_backward(&b, ds, job->logsum + index * size->length, dout, out);
    gemm(0, 0, b.rows, b.head_size, b.keys, 1, ds, b.keys, b.k, b.kv_stride, 0, job->dq + b.q_at, b.q_stride);
    gemm(1, 0, b.keys, b.head_size, b.rows, 1, ds, b.keys, b.q, b.q_stride, beta, job->dkv + b.k_at, b.kv_stride);
    gemm(1, 0, b.keys, b.head_size, b.rows, 1, b.p, b.keys, dout, b.out_stride, beta, job->dkv + b.v_at, b.kv_stride);
  }
}

void attention_backward(struct lm_attention size, float *dq, float *dkv, const float *dout, struct lm_qkv in,
                        const float *out, const float *logsum, float *scratch) {
  struct job job = {.size = size, .in = in, .dq = dq, .dkv = dkv, .dout = dout, .scratch = scratch};
  job.out = (float *)out, job.logsum = (float *)logsum;
  lm_parallel(size.sequences * size.heads, backward_task, &job);
}
