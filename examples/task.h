/* A task that suits experts: tokens are of four kinds, and each kind has a rule of its own. */
#ifndef TASK_H
#define TASK_H
#include "example.h"

enum { TASK_KINDS = 4, TASK_HIDDEN = 8 };

static inline int task_kind(int64_t token) { return (int)(token % TASK_KINDS); }

/* Token `token` of the data: its kind shows in the first four numbers. Kind c wants them all turned round by c + 1
 * places, odd kinds with the sign changed. */
static inline void task_token(int64_t token, float *x, float *target) {
  int kind = task_kind(token);
  for (int j = 0; j < TASK_HIDDEN; j++) {
    x[j] = example_noise(1, (uint64_t)(token * TASK_HIDDEN + j));
    if (j < TASK_KINDS) x[j] = 0.25f * x[j] + (j == kind ? 2.0f : 0.0f);
  }
  for (int j = 0; j < TASK_HIDDEN; j++) target[j] = (kind % 2 ? -1.0f : 1.0f) * x[(j + kind + 1) % TASK_HIDDEN];
}

/* Tokens [first, first + tokens) of the data, and what a step needs beside them. */
typedef struct task_batch {
  int64_t first, tokens;
  float *target;
  pmoe_mat x, y, dy, dx;
} task_batch;

static inline pmoe_mat task_mat(int64_t rows) {
  return example_mat(example_alloc((size_t)(rows * TASK_HIDDEN), sizeof(float)), rows, TASK_HIDDEN);
}

static inline task_batch task_batch_make(int64_t first, int64_t tokens) {
  task_batch b = {first, tokens, NULL, task_mat(tokens), task_mat(tokens), task_mat(tokens), task_mat(tokens)};
  b.target = task_mat(tokens).data;
  for (int64_t t = 0; t < tokens; t++)
    task_token(first + t, (float *)b.x.data + t * TASK_HIDDEN, b.target + t * TASK_HIDDEN);
  return b;
}

static inline void task_batch_free(task_batch *b) {
  free(b->target);
  free(b->x.data);
  free(b->y.data);
  free(b->dy.data);
  free(b->dx.data);
}

/* The sum over tokens of the mean squared error, and its gradient in dy. */
static inline double task_loss(task_batch *b) {
  const float *y = b->y.data;
  float *dy = b->dy.data;
  double sum = 0;
  for (int64_t i = 0; i < b->tokens * TASK_HIDDEN; i++) {
    float error = y[i] - b->target[i];
    sum += (double)error * (double)error / TASK_HIDDEN;
    dy[i] = 2.0f * error / TASK_HIDDEN;
  }
  return sum;
}

#endif
