#include "schedule.h"

#include "error.h"

int64_t schedule_micros(enum lm_schedule schedule, int stages, int64_t micros) {
  return schedule == LM_INTERLEAVED ? (micros + stages - 1) / stages * stages : micros;
}

/* The index-th forward or backward of a stage: as many micro-batches as there are stages go through one chunk before
 * the next chunk's turn, so that the first of them has come round when it is wanted. */
static struct lm_op op_at(int backward, int stages, int chunks, int64_t index) {
  int64_t round = (int64_t)stages * chunks, within = index % round;
  int chunk = (int)(within / stages);
  return (struct lm_op){backward, backward ? chunks - 1 - chunk : chunk, index / round * stages + within % stages};
}

/* Forwards ahead of the first backward. */
static int64_t warm_up(enum lm_schedule schedule, int stages, int stage, int chunks, int64_t total) {
  int64_t ahead = total;
  if (schedule == LM_1F1B) ahead = stages - 1 - stage;
  if (schedule == LM_INTERLEAVED) ahead = (int64_t)2 * (stages - 1 - stage) + (int64_t)(chunks - 1) * stages;
  return ahead < total ? ahead : total;
}

struct lm_ops schedule_ops(enum lm_schedule schedule, int stages, int stage, int chunks, int64_t micros, int training) {
  int64_t total = micros * chunks, ahead = training ? warm_up(schedule, stages, stage, chunks, total) : total;
  struct lm_ops ops = {.op = lm_alloc((size_t)(2 * total), sizeof *ops.op)};
  for (int64_t i = 0; i < total; i++) {
    ops.op[ops.count++] = op_at(0, stages, chunks, i);
    if (training && i >= ahead) ops.op[ops.count++] = op_at(1, stages, chunks, i - ahead);
  }
  for (int64_t i = total - ahead; training && i < total; i++) ops.op[ops.count++] = op_at(1, stages, chunks, i);
  return ops;
}

int64_t schedule_in_flight(const struct lm_ops *ops, int chunk) {
  int64_t now = 0, most = 0;
  for (int64_t i = 0; i < ops->count; i++) {
    if (ops->op[i].chunk != chunk) continue;
    now += ops->op[i].backward ? -1 : 1;
    if (now > most) most = now;
  }
  return most;
}
