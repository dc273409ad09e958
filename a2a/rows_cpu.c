#include <stdbool.h>
#include <string.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "a2a/rows.h"
#include "core/dtype.h"
#include "core/parallel.h"
#include "core/simd.h"

enum {
  TOKENS_PER_TASK = 64,
  COLUMNS_PER_PASS = 1024 /* float32 sums that stay in the first-level cache while K rows stream by */
};

static int64_t num_tasks(int64_t count, int64_t per_task) { return (count + per_task - 1) / per_task; }

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- streaming ---- */
/* Stores that pass the caches by spare the read of what they overwrite. On an AMD Zen 4 the gather takes half the time
 * with them from 4 MB on (smaller buffers were not tried), and the experts that read the rows next are no slower;
 * buffers that happen to lie in the caches lose. On Intel's processors they are known to pay for huge buffers alone. */
static bool should_stream(const pmoe_mat *to) {
#ifdef __SSE2__
  size_t row_bytes = (size_t)to->cols * pmoe_dtype_size(to->dtype),
         ld_bytes = (size_t)to->ld * pmoe_dtype_size(to->dtype);
  bool aligned =
      (uintptr_t)to->data % sizeof(__m128i) == 0 && row_bytes % sizeof(__m128i) == 0 && ld_bytes % sizeof(__m128i) == 0;
  size_t least = (size_t)1 << 30;
#if defined(__GNUC__)
  if (__builtin_cpu_is("amd")) least = (size_t)1 << 22;
#endif
  return aligned && row_bytes * (size_t)to->rows >= least;
#else
  (void)to;
  return false;
#endif
}

static void copy_bytes(void *to, const void *from, size_t bytes, bool stream) {
#ifdef __SSE2__
  if (stream) {
    __m128i *out = to;
    const __m128i *in = from;
    for (size_t i = 0; i < bytes / sizeof *in; i++) _mm_stream_si128(out + i, _mm_loadu_si128(in + i));
    return;
  }
#endif
  (void)stream;
  memcpy(to, from, bytes);
}

/* Before another thread may read what was streamed. */
static void end_stream(bool stream) {
#ifdef __SSE2__
  if (stream) _mm_sfence();
#else
  (void)stream;
#endif
}

/* ---- spread ---- */
typedef struct spread_job {
  const pmoei_row_map *map;
  const pmoe_mat *x;
  pmoe_mat *rows;
  const float *weight, *scale;
  float *row_weight;
  bool stream;
} spread_job;

static void spread_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const spread_job *job = arg;
  const pmoei_row_map *map = job->map;
  size_t bytes = (size_t)job->x->cols * pmoe_dtype_size(job->x->dtype);
  int64_t end = smaller(map->tokens, (index + 1) * TOKENS_PER_TASK);
  for (int64_t t = index * TOKENS_PER_TASK; t < end; t++) {
    const void *source = pmoei_row(job->x, t);
    for (int32_t k = 0; k < map->top_k; k++) {
      int64_t choice = t * map->top_k + k;
      if (map->slot[choice] < 0) continue;
      int64_t row = map->first_row[map->expert[choice]] + map->slot[choice];
      copy_bytes(pmoei_row(job->rows, row), source, bytes, job->stream);
      if (job->row_weight) job->row_weight[row] = job->weight[choice] * (job->scale ? job->scale[t] : 1.0f);
    }
  }
  end_stream(job->stream);
}

static pmoe_status spread(const pmoe_ctx *ctx, const pmoei_row_map *map, const pmoe_mat *x, pmoe_mat *rows,
                          const float *weight, const float *scale, float *row_weight) {
  spread_job job = {map, x, rows, weight, scale, row_weight, should_stream(rows)};
  pmoei_parallel(ctx, num_tasks(map->tokens, TOKENS_PER_TASK), spread_task, &job);
  return PMOE_OK;
}

/* ---- sum ---- */
typedef struct sum_job {
  const pmoei_row_map *map;
  const pmoei_row_sum *sum;
} sum_job;

/* sum = (first ? 0 : sum) + weight row; the other two take two rows in one pass. */
PMOEI_VECTORISED static void add_f32(float *restrict sum, bool first, const float *restrict row, float weight,
                                     int64_t n) {
  for (int64_t i = 0; i < n; i++) sum[i] = (first ? 0.0f : sum[i]) + weight * row[i];
}

PMOEI_VECTORISED static void add_bf16(float *restrict sum, bool first, const pmoei_bf16 *restrict row, float weight,
                                      int64_t n) {
  for (int64_t i = 0; i < n; i++) sum[i] = (first ? 0.0f : sum[i]) + weight * pmoei_bf16_to_f32(row[i]);
}

PMOEI_VECTORISED static void add_two_f32(float *restrict sum, bool first, const float *const row[2],
                                         const float weight[2], int64_t n) {
  const float *restrict a = row[0], *restrict b = row[1];
  float u = weight[0], v = weight[1];
  for (int64_t i = 0; i < n; i++) sum[i] = ((first ? 0.0f : sum[i]) + u * a[i]) + v * b[i];
}

PMOEI_VECTORISED static void add_two_bf16(float *restrict sum, bool first, const pmoei_bf16 *const row[2],
                                          const float weight[2], int64_t n) {
  const pmoei_bf16 *restrict a = row[0], *restrict b = row[1];
  float u = weight[0], v = weight[1];
  for (int64_t i = 0; i < n; i++)
    sum[i] = ((first ? 0.0f : sum[i]) + u * pmoei_bf16_to_f32(a[i])) + v * pmoei_bf16_to_f32(b[i]);
}

/* `count` (1 or 2) rows at once. */
static void add_rows(float *sum, bool first, pmoe_dtype dtype, int count, const void *const row[2],
                     const float weight[2], int64_t n) {
  bool bf16 = dtype == PMOE_BF16;
  if (count == 2 && bf16) add_two_bf16(sum, first, (const pmoei_bf16 *const[2]){row[0], row[1]}, weight, n);
  else if (count == 2) add_two_f32(sum, first, (const float *const[2]){row[0], row[1]}, weight, n);
  else if (bf16) add_bf16(sum, first, row[0], weight[0], n);
  else add_f32(sum, first, row[0], weight[0], n);
}

static const void *element(const pmoe_mat *mat, int64_t row, int64_t column) {
  return (const char *)pmoei_row(mat, row) + (size_t)column * pmoe_dtype_size(mat->dtype);
}

/* The weighted rows of a token, in the order of k. */
static void sum_choices(const sum_job *job, int64_t t, int64_t column, int64_t n, float *out) {
  const pmoei_row_map *map = job->map;
  const pmoei_row_sum *s = job->sum;
  const void *row[2];
  float weight[2];
  int count = 0;
  bool first = true;
  for (int64_t choice = t * map->top_k; choice < (t + 1) * map->top_k; choice++) {
    if (map->slot[choice] < 0) continue;
    row[count] = element(s->rows, map->first_row[map->expert[choice]] + map->slot[choice], column);
    weight[count++] = s->weight ? s->weight[choice] : 1.0f;
    if (count < 2) continue;
    add_rows(out, first, s->rows->dtype, count, row, weight, n);
    first = false;
    count = 0;
  }
  if (count > 0) add_rows(out, first, s->rows->dtype, count, row, weight, n);
  else if (first) memset(out, 0, (size_t)n * sizeof *out);
}

PMOEI_VECTORISED static void multiply(float *values, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i++) values[i] *= factor;
}

static void sum_token(const sum_job *job, int64_t t, int64_t column, int64_t n) {
  const pmoei_row_sum *s = job->sum;
  float tile[COLUMNS_PER_PASS];
  float *out = s->y->dtype == PMOE_F32 ? (float *)pmoei_row(s->y, t) + column : tile;
  sum_choices(job, t, column, n, out);
  if (s->scale) multiply(out, s->scale[t], n);
  if (s->branch) {
    const void *row[2] = {element(s->branch, t, column)};
    const float weight[2] = {s->branch_scale ? s->branch_scale[t] : 1.0f};
    add_rows(out, false, s->branch->dtype, 1, row, weight, n);
  }
  if (out == tile)
    pmoei_from_f32((char *)pmoei_row(s->y, t) + (size_t)column * pmoe_dtype_size(s->y->dtype), s->y->dtype, tile, n);
}

static void sum_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const sum_job *job = arg;
  int64_t cols = job->sum->y->cols;
  int64_t end = smaller(job->map->tokens, (index + 1) * TOKENS_PER_TASK);
  for (int64_t t = index * TOKENS_PER_TASK; t < end; t++)
    for (int64_t column = 0; column < cols; column += COLUMNS_PER_PASS)
      sum_token(job, t, column, smaller(COLUMNS_PER_PASS, cols - column));
}

static pmoe_status sum_rows(const pmoe_ctx *ctx, const pmoei_row_map *map, const pmoei_row_sum *sum) {
  sum_job job = {map, sum};
  pmoei_parallel(ctx, num_tasks(map->tokens, TOKENS_PER_TASK), sum_task, &job);
  return PMOE_OK;
}

/* ---- pick ---- */
static pmoe_status pick(const pmoe_ctx *ctx, const pmoei_row_map *map, const float *row_value, float *value) {
  (void)ctx; /* T·K floats: not worth a parallel region */
  for (int64_t choice = 0; choice < map->tokens * map->top_k; choice++)
    value[choice] = map->slot[choice] < 0 ? 0.0f : row_value[map->first_row[map->expert[choice]] + map->slot[choice]];
  return PMOE_OK;
}

/* ---- copy_runs ---- */
typedef struct copy_job {
  const pmoei_row_run *runs;
  const pmoe_mat *from;
  pmoe_mat *to;
  const float *from_value;
  float *to_value;
} copy_job;

static void copy_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const copy_job *job = arg;
  const pmoei_row_run *run = &job->runs[index];
  if (run->rows == 0) return;
  size_t bytes = (size_t)job->from->cols * pmoe_dtype_size(job->from->dtype);
  if (job->from->ld == job->from->cols && job->to->ld == job->to->cols) {
    memcpy(pmoei_row(job->to, run->to), pmoei_row(job->from, run->from), bytes * (size_t)run->rows);
  } else {
    for (int64_t i = 0; i < run->rows; i++)
      memcpy(pmoei_row(job->to, run->to + i), pmoei_row(job->from, run->from + i), bytes);
  }
  if (job->from_value && job->to_value)
    memcpy(job->to_value + run->to, job->from_value + run->from, (size_t)run->rows * sizeof(float));
}

static pmoe_status copy_runs(const pmoe_ctx *ctx, int64_t num_runs, const pmoei_row_run *runs, const pmoe_mat *from,
                             pmoe_mat *to, const float *from_value, float *to_value) {
  copy_job job = {runs, from, to, from_value, to_value};
  pmoei_parallel(ctx, num_runs, copy_task, &job);
  return PMOE_OK;
}

const pmoei_rows_ops pmoei_rows_cpu = {spread, sum_rows, pick, copy_runs};
