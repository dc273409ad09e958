#include "support/host_board.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct host_board {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int32_t nranks, arrived, refs;
  int64_t generation;
  bool aborted;
  const void **pointers; /* [2 * nranks] what each rank shows the others */
};

typedef struct host_rank {
  host_board *board;
  int32_t rank;
} host_rank;

host_board *host_board_create(int32_t nranks) {
  host_board *board = calloc(1, sizeof *board);
  board->pointers = calloc(2 * (size_t)nranks, sizeof *board->pointers);
  board->nranks = nranks;
  board->refs = 1;
  pthread_mutex_init(&board->mutex, NULL);
  pthread_cond_init(&board->changed, NULL);
  return board;
}

void host_board_destroy(host_board *board) {
  pthread_mutex_lock(&board->mutex);
  bool last = --board->refs == 0;
  pthread_mutex_unlock(&board->mutex);
  if (!last) return;
  pthread_cond_destroy(&board->changed);
  pthread_mutex_destroy(&board->mutex);
  free(board->pointers);
  free(board);
}

/* Waits for everyone. Not 0 once a rank has given up. */
static int meet(host_rank *self) {
  host_board *board = self->board;
  pthread_mutex_lock(&board->mutex);
  int64_t generation = board->generation;
  if (++board->arrived == board->nranks) {
    board->arrived = 0;
    board->generation++;
    pthread_cond_broadcast(&board->changed);
  }
  while (board->generation == generation && !board->aborted) pthread_cond_wait(&board->changed, &board->mutex);
  int result = board->generation == generation ? 7 : 0;
  pthread_mutex_unlock(&board->mutex);
  return result;
}

/* Shows two pointers and waits for everyone's; they stay until the ranks have met once more. */
static int show(host_rank *self, const void *a, const void *b) {
  self->board->pointers[2 * self->rank] = a;
  self->board->pointers[2 * self->rank + 1] = b;
  return meet(self);
}

static int board_barrier(void *user) { return meet(user); }

static int board_allgather(void *user, const void *src, void *dst, size_t bytes_each) {
  host_rank *self = user;
  if (show(self, src, NULL) != 0) return 7;
  for (int32_t p = 0; p < self->board->nranks && bytes_each > 0; p++)
    memcpy((char *)dst + (size_t)p * bytes_each, self->board->pointers[2 * p], bytes_each);
  return meet(self);
}

static int board_alltoallv(void *user, const void *src, const size_t *send_bytes, void *dst, const size_t *recv_bytes) {
  host_rank *self = user;
  if (show(self, src, send_bytes) != 0) return 7;
  char *to = dst;
  bool fits = true;
  for (int32_t p = 0; p < self->board->nranks; p++) {
    const char *from = self->board->pointers[2 * p];
    const size_t *bytes = self->board->pointers[2 * p + 1];
    size_t offset = 0;
    for (int32_t q = 0; q < self->rank; q++) offset += bytes[q];
    fits &= bytes[self->rank] == recv_bytes[p];
    if (!fits || recv_bytes[p] == 0) continue;
    memcpy(to, from + offset, recv_bytes[p]);
    to += recv_bytes[p];
  }
  return meet(self) != 0 ? 7 : fits ? 0 : 8;
}

static int board_allreduce(void *user, float *inout, size_t n) {
  host_rank *self = user;
  float *sum = calloc(n + 1, sizeof *sum);
  int result = show(self, inout, NULL);
  for (int32_t p = 0; p < self->board->nranks && result == 0; p++)
    for (size_t i = 0; i < n; i++) sum[i] = (p ? sum[i] : 0) + ((const float *)self->board->pointers[2 * p])[i];
  if (result == 0) result = meet(self);
  if (result == 0 && n > 0) memcpy(inout, sum, n * sizeof *sum);
  free(sum);
  return result;
}

static int board_split(void *user, int32_t color, int32_t key, pmoe_comm_callbacks *out) {
  host_rank *self = user;
  int32_t n = self->board->nranks, mine[2] = {color, key}, rank = 0, size = 0, leader = -1;
  int32_t(*all)[2] = calloc((size_t)n, sizeof *all);
  host_board **made = calloc((size_t)n, sizeof *made), *own = NULL;
  int result = board_allgather(self, mine, all, sizeof mine);
  for (int32_t p = 0; p < n; p++) {
    if (all[p][0] != color) continue;
    if (leader < 0) leader = p;
    rank += all[p][1] < key || (all[p][1] == key && p < self->rank);
    size++;
  }
  if (result == 0 && color >= 0 && leader == self->rank) own = host_board_create(size);
  if (result == 0) result = board_allgather(self, &own, made, sizeof own);
  if (result == 0 && color >= 0) *out = host_board_callbacks(made[leader], rank);
  if (result == 0) result = meet(self);
  if (own) host_board_destroy(own);
  free(made);
  free(all);
  return result;
}

static void board_release(void *user) {
  host_rank *self = user;
  host_board_destroy(self->board);
  free(self);
}

static void board_abort(void *user, const char *why) {
  (void)why;
  host_board *board = ((host_rank *)user)->board;
  pthread_mutex_lock(&board->mutex);
  board->aborted = true;
  pthread_cond_broadcast(&board->changed);
  pthread_mutex_unlock(&board->mutex);
}

pmoe_comm_callbacks host_board_callbacks(host_board *board, int32_t rank) {
  host_rank *self = calloc(1, sizeof *self);
  self->board = board;
  self->rank = rank;
  pthread_mutex_lock(&board->mutex);
  board->refs++;
  pthread_mutex_unlock(&board->mutex);
  pmoe_comm_callbacks callbacks = PMOE_CONFIG_INIT(pmoe_comm_callbacks);
  callbacks.user = self;
  callbacks.rank = rank;
  callbacks.nranks = board->nranks;
  callbacks.allgather = board_allgather;
  callbacks.alltoallv = board_alltoallv;
  callbacks.allreduce_f32 = board_allreduce;
  callbacks.barrier = board_barrier;
  callbacks.split = board_split;
  callbacks.release = board_release;
  callbacks.abort = board_abort;
  return callbacks;
}
