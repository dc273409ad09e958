/* Pipeline schedules, played: every stage runs its list, an operation begins when what it needs is there, and the whole
 * takes as long as the schedule's papers say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "examples/train_lm/schedule.h"

enum { MOST_STAGES = 5, MOST_CHUNKS = 4, MOST_MICROS = 24, FORWARD = 1, BACKWARD = 2 };

/* When each operation ends; 0: not yet. */
struct board {
  int64_t end[2][MOST_STAGES * MOST_CHUNKS][MOST_MICROS];
};

/* When what the operation needs is there, or -1. */
static int64_t ready_at(const struct board *board, const struct lm_op *op, int v, int last) {
  int64_t forward = board->end[0][v][op->micro];
  if (!op->backward) return v == 0 ? 0 : board->end[0][v - 1][op->micro] ? board->end[0][v - 1][op->micro] : -1;
  if (!forward) return -1;
  if (v == last) return forward;
  return board->end[1][v + 1][op->micro] ? board->end[1][v + 1][op->micro] : -1;
}

/* Returns the time that all of it takes. */
static int64_t play(enum lm_schedule schedule, int stages, int chunks, int64_t micros) {
  static struct board board;
  struct lm_ops ops[MOST_STAGES];
  int64_t at[MOST_STAGES] = {0}, now[MOST_STAGES] = {0}, longest = 0;
  memset(&board, 0, sizeof board);
  for (int s = 0; s < stages; s++) {
    ops[s] = schedule_ops(schedule, stages, s, chunks, micros, 1);
    assert_int_equal(ops[s].count, 2 * micros * chunks);
  }
  for (int moved = 1; moved;) {
    moved = 0;
    for (int s = 0; s < stages; s++)
      while (at[s] < ops[s].count) {
        const struct lm_op *op = &ops[s].op[at[s]];
        int v = op->chunk * stages + s;
        int64_t ready = ready_at(&board, op, v, stages * chunks - 1);
        if (ready < 0) break;
        assert_int_equal(board.end[op->backward][v][op->micro], 0); /* once */
        if (ready > now[s]) now[s] = ready;
        board.end[op->backward][v][op->micro] = now[s] += op->backward ? BACKWARD : FORWARD;
        at[s]++;
        moved = 1;
      }
  }
  for (int s = 0; s < stages; s++) {
    if (at[s] < ops[s].count) fail_msg("stage %d of %d, %d chunks: stuck at %d", s, stages, chunks, (int)at[s]);
    if (now[s] > longest) longest = now[s];
    free(ops[s].op);
  }
  return longest;
}

/* A pipeline idles for one micro-batch's forward and backward in each stage but one; in chunks that is less, as a
 * chunk's are shorter. */
static void nobody_waits_longer_than_promised(void **state) {
  (void)state;
  for (int stages = 1; stages <= MOST_STAGES; stages++)
    for (int64_t micros = 1; micros <= MOST_MICROS; micros++) {
      int64_t expected = (micros + stages - 1) * (FORWARD + BACKWARD);
      assert_int_equal(play(LM_GPIPE, stages, 1, micros), expected);
      assert_int_equal(play(LM_1F1B, stages, 1, micros), expected);
    }
  for (int stages = 2; stages <= MOST_STAGES; stages++)
    for (int chunks = 2; chunks <= MOST_CHUNKS; chunks++)
      for (int64_t micros = stages; micros <= MOST_MICROS; micros += stages)
        assert_int_equal(play(LM_INTERLEAVED, stages, chunks, micros),
                         (micros * chunks + stages - 1) * (FORWARD + BACKWARD));
}

static void memory_is_what_they_are_for(void **state) {
  (void)state;
  for (int stage = 0; stage < 4; stage++) {
    struct lm_ops one = schedule_ops(LM_1F1B, 4, stage, 1, 16, 1), all = schedule_ops(LM_GPIPE, 4, stage, 1, 16, 1);
    struct lm_ops two = schedule_ops(LM_INTERLEAVED, 4, stage, 2, 16, 1);
    assert_int_equal(schedule_in_flight(&one, 0), 4 - stage);
    assert_int_equal(schedule_in_flight(&all, 0), 16);
    assert_true(schedule_in_flight(&two, 0) <= 8 && schedule_in_flight(&two, 1) <= 4);
    free(one.op), free(all.op), free(two.op);
  }
}

/* As text: F or B, the chunk if there are several, the micro-batch. */
static void assert_order(enum lm_schedule schedule, int stages, int stage, int chunks, int64_t micros, int training,
                         const char *expected) {
  char text[512] = "";
  struct lm_ops ops = schedule_ops(schedule, stages, stage, chunks, micros, training);
  for (int64_t i = 0, length = 0; i < ops.count; i++) {
    const struct lm_op *op = &ops.op[i];
    length += snprintf(text + length, sizeof text - (size_t)length, "%s%c", i ? " " : "", op->backward ? 'B' : 'F');
    if (chunks > 1) length += snprintf(text + length, sizeof text - (size_t)length, "%d.", op->chunk);
    length += snprintf(text + length, sizeof text - (size_t)length, "%d", (int)op->micro);
  }
  assert_string_equal(text, expected);
  free(ops.op);
}

static void orders_are_the_known_ones(void **state) {
  (void)state;
  assert_order(LM_1F1B, 1, 0, 1, 3, 1, "F0 B0 F1 B1 F2 B2");
  assert_order(LM_1F1B, 3, 0, 1, 4, 1, "F0 F1 F2 B0 F3 B1 B2 B3");
  assert_order(LM_1F1B, 3, 2, 1, 3, 1, "F0 B0 F1 B1 F2 B2");
  assert_order(LM_1F1B, 4, 0, 1, 2, 1, "F0 F1 B0 B1"); /* fewer micro-batches than stages */
  assert_order(LM_GPIPE, 2, 1, 1, 3, 1, "F0 F1 F2 B0 B1 B2");
  assert_order(LM_INTERLEAVED, 2, 1, 2, 4, 1,
               "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3");
  assert_order(LM_INTERLEAVED, 2, 0, 2, 2, 0, "F0.0 F0.1 F1.0 F1.1");
  assert_int_equal(schedule_micros(LM_INTERLEAVED, 4, 5), 8);
  assert_int_equal(schedule_micros(LM_1F1B, 4, 5), 5);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(nobody_waits_longer_than_promised),
      cmocka_unit_test(memory_is_what_they_are_for),
      cmocka_unit_test(orders_are_the_known_ones),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
