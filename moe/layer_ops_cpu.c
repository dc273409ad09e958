#include <string.h>

#include "core/dtype.h"
#include "core/parallel.h"
#include "moe/layer_ops.h"

enum { CHUNK = 256, NUMBERS_PER_TASK = 1 << 14 };

static pmoe_status mask_scales(pmoe_ctx *ctx, int64_t tokens, const uint8_t *mask, float *scale, float *branch_scale) {
  (void)ctx;
  for (int64_t t = 0; t < tokens; t++)
    if (!mask[t]) scale[t] = branch_scale[t] = 0;
  return PMOE_OK;
}

static pmoe_status split_scale(pmoe_ctx *ctx, const pmoe_routing *r, const float *scale, float *dweight,
                               float *dscale) {
  (void)ctx;
  for (int64_t t = 0; t < r->tokens; t++) {
    float sum = 0;
    for (int64_t i = t * r->top_k; i < (t + 1) * r->top_k; i++) {
      sum += r->weight[i] * dweight[i];
      dweight[i] *= scale[t];
    }
    dscale[t] = sum;
  }
  return PMOE_OK;
}

/* ---- rows ---- */

typedef struct rows_job {
  const pmoe_mat *to, *from;
} rows_job;

static void add_row(void *arg, int64_t row, int32_t thread) {
  (void)thread;
  const rows_job *job = arg;
  float part[CHUNK], *to = pmoei_row(job->to, row);
  const char *from = pmoei_row(job->from, row);
  for (int64_t i = 0; i < job->to->cols; i += CHUNK) {
    int64_t n = job->to->cols - i < CHUNK ? job->to->cols - i : CHUNK;
    pmoei_to_f32(part, from + (size_t)i * pmoe_dtype_size(job->from->dtype), job->from->dtype, n);
    for (int64_t j = 0; j < n; j++) to[i + j] += part[j];
  }
}

static pmoe_status add_rows(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *from) {
  pmoei_parallel(ctx, to->rows, add_row, &(rows_job){to, from});
  return PMOE_OK;
}

static void round_row(void *arg, int64_t row, int32_t thread) {
  (void)thread;
  const rows_job *job = arg;
  pmoei_from_f32(pmoei_row(job->to, row), job->to->dtype, pmoei_row(job->from, row), job->to->cols);
}

static pmoe_status round_rows(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *from) {
  pmoei_parallel(ctx, to->rows, round_row, &(rows_job){to, from});
  return PMOE_OK;
}

static void sum_row(void *arg, int64_t row, int32_t thread) {
  (void)thread;
  const rows_job *job = arg;
  float sum[CHUNK], part[CHUNK];
  size_t size = pmoe_dtype_size(job->to->dtype);
  for (int64_t i = 0; i < job->to->cols; i += CHUNK) {
    int64_t n = job->to->cols - i < CHUNK ? job->to->cols - i : CHUNK;
    for (int64_t from = row; from < job->from->rows; from += job->to->rows) {
      bool first = from == row;
      pmoei_to_f32(first ? sum : part, (char *)pmoei_row(job->from, from) + (size_t)i * size, job->from->dtype, n);
      for (int64_t j = 0; j < n && !first; j++) sum[j] += part[j];
    }
    pmoei_from_f32((char *)pmoei_row(job->to, row) + (size_t)i * size, job->to->dtype, sum, n);
  }
}

static pmoe_status sum_parts(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *parts) {
  pmoei_parallel(ctx, to->rows, sum_row, &(rows_job){to, parts});
  return PMOE_OK;
}

/* ---- shards ---- */

static pmoe_status shards_route(pmoe_ctx *ctx, const pmoei_numbering *n, const pmoe_routing *from, pmoe_routing *to) {
  (void)ctx;
  for (int64_t i = 0; i < from->tokens * from->top_k; i++)
    for (int32_t shard = 0; shard < n->shards; shard++) {
      int64_t at = i * n->shards + shard;
      to->expert[at] = from->expert[i] < 0 ? -1 : pmoei_virtual_id(n, from->expert[i], shard);
      to->slot[at] = from->slot[i];
      to->weight[at] = from->weight[i];
    }
  for (int32_t e = 0; e < from->num_experts; e++)
    for (int32_t shard = 0; shard < n->shards; shard++) {
      int32_t at = pmoei_virtual_id(n, e, shard);
      to->expert_count[at] = from->expert_count[e];
      to->expert_rows[at] = from->expert_rows[e];
    }
  return PMOE_OK;
}

static pmoe_status shards_sum(pmoe_ctx *ctx, int64_t choices, int32_t shards, const float *moved, float *dweight) {
  (void)ctx;
  for (int64_t i = 0; i < choices; i++) {
    float sum = moved[i * shards];
    for (int32_t shard = 1; shard < shards; shard++) sum += moved[i * shards + shard];
    dweight[i] = sum;
  }
  return PMOE_OK;
}

/* ---- gradients ---- */

typedef struct grad_job {
  char *grad;
  pmoe_dtype dtype;
  int64_t n;
  float scale;
} grad_job;

static int64_t num_tasks(int64_t n) { return (n + NUMBERS_PER_TASK - 1) / NUMBERS_PER_TASK; }

static int64_t task_length(const grad_job *job, int64_t index) {
  int64_t left = job->n - index * NUMBERS_PER_TASK;
  return left < NUMBERS_PER_TASK ? left : NUMBERS_PER_TASK;
}

static void scale_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const grad_job *job = arg;
  float tile[CHUNK];
  size_t size = pmoe_dtype_size(job->dtype);
  char *grad = job->grad + (size_t)(index * NUMBERS_PER_TASK) * size;
  for (int64_t n = task_length(job, index), i = 0; i < n; i += CHUNK) {
    int64_t count = n - i < CHUNK ? n - i : CHUNK;
    pmoei_to_f32(tile, grad + (size_t)i * size, job->dtype, count);
    for (int64_t j = 0; j < count; j++) tile[j] *= job->scale;
    pmoei_from_f32(grad + (size_t)i * size, job->dtype, tile, count);
  }
}

static pmoe_status scale_grad(pmoe_ctx *ctx, void *grad, pmoe_dtype dtype, int64_t n, float scale) {
  pmoei_parallel(ctx, num_tasks(n), scale_task, &(grad_job){grad, dtype, n, scale});
  return PMOE_OK;
}

/* Sums of squares, one a task: added in order afterwards, whoever computed them. */
typedef struct square_job {
  grad_job grad;
  double *partial;
} square_job;

static void square_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const square_job *job = arg;
  float tile[CHUNK];
  size_t size = pmoe_dtype_size(job->grad.dtype);
  const char *grad = job->grad.grad + (size_t)(index * NUMBERS_PER_TASK) * size;
  double sum = 0;
  for (int64_t n = task_length(&job->grad, index), i = 0; i < n; i += CHUNK) {
    int64_t count = n - i < CHUNK ? n - i : CHUNK;
    pmoei_to_f32(tile, grad + (size_t)i * size, job->grad.dtype, count);
    for (int64_t j = 0; j < count; j++) sum += (double)tile[j] * (double)tile[j];
  }
  job->partial[index] = sum;
}

static pmoe_status add_squares(pmoe_ctx *ctx, const void *grad, pmoe_dtype dtype, int64_t n, double *sum) {
  void *base;
  int32_t frame;
  PMOEI_TRY(pmoei_scratch_open(ctx, (size_t)num_tasks(n) * sizeof(double), &base, &frame));
  square_job job = {{(char *)grad, dtype, n, 1}, base}; /* only read */
  pmoei_parallel(ctx, num_tasks(n), square_task, &job);
  for (int64_t task = 0; task < num_tasks(n); task++) *sum += job.partial[task];
  pmoei_scratch_close(ctx, frame);
  return PMOE_OK;
}

const pmoei_layer_ops pmoei_layer_ops_cpu = {
    .mask = mask_scales,
    .split_scale = split_scale,
    .add_rows = add_rows,
    .round_rows = round_rows,
    .sum_parts = sum_parts,
    .shards_route = shards_route,
    .shards_sum = shards_sum,
    .scale_grad = scale_grad,
    .add_squares = add_squares,
};
