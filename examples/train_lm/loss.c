#include "loss.h"

#include <math.h>

#include "parallel.h"

enum { NUMBERS_PER_TASK = 1 << 14 };

struct job {
  float *logits, *loss;
  const int32_t *targets;
  int64_t rows, vocab, rows_per_task;
  int gradient;
};

LM_VECTORISED static void loss_row(const struct job *job, int64_t r) {
  int64_t vocab = job->vocab;
  float *logits = job->logits + r * vocab, most = logits[0], sum = 0;
  LM_SIMD_MAX(most)
  for (int64_t i = 0; i < vocab; i++) most = logits[i] > most ? logits[i] : most;
  float target = logits[job->targets[r]] - most;
  LM_SIMD_SUM(sum)
  for (int64_t i = 0; i < vocab; i++) {
    float e = lm_exp(logits[i] - most);
    logits[i] = e;
    sum += e;
  }
  job->loss[r] = logf(sum) - target;
  if (!job->gradient) return;
  float scale = 1.0f / sum;
  LM_SIMD
  for (int64_t i = 0; i < vocab; i++) logits[i] *= scale;
  logits[job->targets[r]] -= 1.0f;
}

static void loss_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct job *job = arg;
  struct lm_range range = lm_block(job->rows, job->rows_per_task, index);
  for (int64_t r = range.begin; r < range.end; r++) loss_row(job, r);
}

void loss_forward_backward(float *logits, float *loss, const int32_t *targets, int64_t rows, int64_t vocab,
                           int gradient) {
  struct job job = {logits, loss, targets, rows, vocab, lm_num_blocks(NUMBERS_PER_TASK, vocab), gradient};
  lm_parallel(lm_num_blocks(rows, job.rows_per_task), loss_task, &job);
}
