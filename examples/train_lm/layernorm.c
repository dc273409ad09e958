#include "layernorm.h"

#include <math.h>

#include "parallel.h"

enum { ROWS_PER_TASK = 32, COLUMNS_PER_TASK = 128 };
static const float epsilon = 1e-5f;

struct job {
  float *y, *mean, *rstd, *dx, *dweight, *dbias;
  const float *x, *weight, *bias, *dy;
  int64_t rows, n;
};

LM_VECTORISED static void forward_row(const struct job *job, int64_t r) {
  int64_t n = job->n;
  const float *x = job->x + r * n, *weight = job->weight, *bias = job->bias;
  float *y = job->y + r * n, sum = 0, squares = 0;
  LM_SIMD_SUM(sum)
  for (int64_t i = 0; i < n; i++) sum += x[i];
  float mean = sum / (float)n;
  LM_SIMD_SUM(squares)
  for (int64_t i = 0; i < n; i++) squares += (x[i] - mean) * (x[i] - mean);
  float rstd = 1.0f / sqrtf(squares / (float)n + epsilon);
  LM_SIMD
  for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
  job->mean[r] = mean, job->rstd[r] = rstd;
}

static void forward_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct job *job = arg;
  struct lm_range range = lm_block(job->rows, ROWS_PER_TASK, index);
  for (int64_t r = range.begin; r < range.end; r++) forward_row(job, r);
}

void layernorm_forward(float *y, float *mean, float *rstd, const float *x, const float *weight, const float *bias,
                       int64_t rows, int64_t n) {
  struct job job = {.y = y, .mean = mean, .rstd = rstd, .x = x, .weight = weight, .bias = bias, .rows = rows, .n = n};
  lm_parallel(lm_num_blocks(rows, ROWS_PER_TASK), forward_task, &job);
}

LM_VECTORISED static void backward_row(const struct job *job, int64_t r) {
  int64_t n = job->n;
  const float *x = job->x + r * n, *dy = job->dy + r * n, *weight = job->weight;
  float *dx = job->dx + r * n, mean = job->mean[r], rstd = job->rstd[r], sum = 0, dot = 0;
  LM_SIMD_SUM(sum)
  for (int64_t i = 0; i < n; i++) sum += dy[i] * weight[i];
  LM_SIMD_SUM(dot)
  for (int64_t i = 0; i < n; i++) dot += dy[i] * weight[i] * (x[i] - mean);
  float mean_g = sum / (float)n, mean_gx = dot * rstd / (float)n;
  LM_SIMD
  for (int64_t i = 0; i < n; i++) dx[i] += rstd * (dy[i] * weight[i] - mean_g - (x[i] - mean) * rstd * mean_gx);
}

static void backward_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct job *job = arg;
  struct lm_range range = lm_block(job->rows, ROWS_PER_TASK, index);
  for (int64_t r = range.begin; r < range.end; r++) backward_row(job, r);
}

LM_VECTORISED static void params_columns(const struct job *job, struct lm_range col) {
  float dweight[COLUMNS_PER_TASK] = {0}, dbias[COLUMNS_PER_TASK] = {0};
  int64_t cols = col.end - col.begin;
  for (int64_t r = 0; r < job->rows; r++) {
    const float *x = job->x + r * job->n + col.begin, *dy = job->dy + r * job->n + col.begin;
    float mean = job->mean[r], rstd = job->rstd[r];
    LM_SIMD
    for (int64_t j = 0; j < cols; j++) {
      dweight[j] += dy[j] * (x[j] - mean) * rstd;
      dbias[j] += dy[j];
    }
  }
  for (int64_t j = 0; j < cols; j++) {
    job->dweight[col.begin + j] += dweight[j];
    job->dbias[col.begin + j] += dbias[j];
  }
}

static void params_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct job *job = arg;
  params_columns(job, lm_block(job->n, COLUMNS_PER_TASK, index));
}

void layernorm_backward(float *dx, float *dweight, float *dbias, const float *dy, const float *x, const float *weight,
                        const float *mean, const float *rstd, int64_t rows, int64_t n) {
  struct job job = {.dx = dx,
                    .dweight = dweight,
                    .dbias = dbias,
                    .dy = dy,
                    .x = x,
                    .weight = weight,
                    .mean = (float *)mean,
                    .rstd = (float *)rstd,
                    .rows = rows,
                    .n = n};
  lm_parallel(lm_num_blocks(rows, ROWS_PER_TASK), backward_task, &job);
  lm_parallel(lm_num_blocks(n, COLUMNS_PER_TASK), params_task, &job);
}
