#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "support/host_board.h"
#include "support/ranks.h"

typedef struct meeting {
  pmoe_hub *hub;
  host_board *board;
} meeting;

typedef struct rank_thread {
  const ranks_job *job;
  pthread_t thread;
  int32_t rank;
  char failure[RANKS_TEXT];
} rank_thread;

static pmoe_status connect(pmoe_ctx *ctx, int32_t rank, void *launcher, pmoe_comm **out) {
  meeting *place = launcher;
  if (place->hub) return pmoe_comm_from_hub(ctx, place->hub, rank, out);
  pmoe_comm_callbacks callbacks = host_board_callbacks(place->board, rank);
  pmoe_status status = pmoe_comm_from_callbacks(ctx, &callbacks, out);
  if (status != PMOE_OK) callbacks.release(callbacks.user);
  return status;
}

static void *run(void *arg) {
  rank_thread *self = arg;
  ranks_run_one(self->job, self->rank, self->failure);
  return NULL;
}

/* A check that fails makes the peers fail: a failure of another kind than theirs tells more. */
static bool is_cause(const char *failure) { return failure[0] && !strstr(failure, "PMOE_ERR_COMM"); }

void ranks_launch(ranks_job *job, char failure[RANKS_TEXT]) {
  int32_t n = job->config->nranks;
  meeting place = {NULL, NULL};
  if (job->config->transport == RANKS_CALLBACKS) place.board = host_board_create(n);
  else if (pmoe_hub_create(n, &place.hub) != PMOE_OK) abort();
  job->connect = connect;
  job->launcher = &place;
  rank_thread *threads = calloc((size_t)n, sizeof *threads);
  for (int32_t r = 0; r < n; r++) {
    threads[r].job = job;
    threads[r].rank = r;
    if (pthread_create(&threads[r].thread, NULL, run, &threads[r]) != 0) abort();
  }
  for (int32_t r = 0; r < n; r++) pthread_join(threads[r].thread, NULL);
  for (int32_t r = 0; r < n; r++)
    if (threads[r].failure[0] && (failure[0] == 0 || (is_cause(threads[r].failure) && !is_cause(failure))))
      memcpy(failure, threads[r].failure, RANKS_TEXT);
  free(threads);
  pmoe_hub_destroy(place.hub);
  if (place.board) host_board_destroy(place.board);
}

bool ranks_are_processes(void) { return false; }
void ranks_begin(int *argc, char ***argv) { (void)argc, (void)argv; }
int ranks_end(int failures) { return failures; }
