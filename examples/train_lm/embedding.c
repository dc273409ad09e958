#include "embedding.h"

#include "parallel.h"

/* Backward splits the columns: two tasks never meet in one place, and each adds its tokens in order. */
enum { ROWS_PER_TASK = 64, COLUMNS_PER_TASK = 64 };

struct job {
  struct lm_embedding size;
  float *x, *dtoken, *dposition;
  const float *token, *position, *dx;
};

static int64_t position_of(const struct lm_embedding *size, int64_t row) {
  return size->first_position + (size->first_row + row) % size->length;
}

static void forward_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct job *job = arg;
  int64_t hidden = job->size.hidden;
  struct lm_range range = lm_block(job->size.rows, ROWS_PER_TASK, index);
  for (int64_t t = range.begin; t < range.end; t++) {
    const float *token = job->token + job->size.tokens[t] * hidden;
    const float *position = job->position + position_of(&job->size, t) * hidden;
    float *x = job->x + t * hidden;
    LM_SIMD
    for (int64_t i = 0; i < hidden; i++) x[i] = token[i] + position[i];
  }
}

void embedding_forward(struct lm_embedding size, float *x, const float *token_table, const float *position_table) {
  struct job job = {.size = size, .x = x, .token = token_table, .position = position_table};
  lm_parallel(lm_num_blocks(size.rows, ROWS_PER_TASK), forward_task, &job);
}

static void backward_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct job *job = arg;
  int64_t hidden = job->size.hidden;
  struct lm_range col = lm_block(hidden, COLUMNS_PER_TASK, index);
  for (int64_t t = 0; t < job->size.rows; t++) {
    float *dtoken = job->dtoken + job->size.tokens[t] * hidden;
    float *dposition = job->dposition + position_of(&job->size, t) * hidden;
    const float *dx = job->dx + t * hidden;
    LM_SIMD
    for (int64_t i = col.begin; i < col.end; i++) {
      dtoken[i] += dx[i];
      dposition[i] += dx[i];
    }
  }
}

void embedding_backward(struct lm_embedding size, float *dtoken_table, float *dposition_table, const float *dx) {
  struct job job = {.size = size, .dtoken = dtoken_table, .dposition = dposition_table, .dx = dx};
  lm_parallel(lm_num_blocks(size.hidden, COLUMNS_PER_TASK), backward_task, &job);
}
