/* Ranks as MPI processes: takes the place of tests/support/ranks_threads.c. */
#include <limits.h>
#include <mpi.h>
#include <pmoe/mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/ranks.h"

/* A host's own collectives by plain MPI. */

static MPI_Comm comm_of(void *user) { return *(MPI_Comm *)user; }
static int host_barrier(void *user) { return MPI_Barrier(comm_of(user)); }

static int host_allgather(void *user, const void *src, void *dst, size_t bytes) {
  return MPI_Allgather(src, (int)bytes, MPI_BYTE, dst, (int)bytes, MPI_BYTE, comm_of(user));
}

static int host_alltoallv(void *user, const void *src, const size_t *send_bytes, void *dst, const size_t *recv_bytes) {
  int n = 0;
  MPI_Comm_size(comm_of(user), &n);
  int *lists = calloc(4 * (size_t)n, sizeof *lists), *counts = lists, *firsts = lists + n, *recv = lists + 2 * n,
      *to = lists + 3 * n;
  for (int p = 0; p < n; p++) {
    counts[p] = (int)send_bytes[p];
    recv[p] = (int)recv_bytes[p];
    firsts[p] = p ? firsts[p - 1] + counts[p - 1] : 0;
    to[p] = p ? to[p - 1] + recv[p - 1] : 0;
  }
  int code = MPI_Alltoallv(src, counts, firsts, MPI_BYTE, dst, recv, to, MPI_BYTE, comm_of(user));
  free(lists);
  return code;
}

static int host_allreduce(void *user, float *inout, size_t n) {
  return MPI_Allreduce(MPI_IN_PLACE, inout, (int)n, MPI_FLOAT, MPI_SUM, comm_of(user));
}

static void host_release(void *user) {
  MPI_Comm_free(user);
  free(user);
}

static int host_split(void *user, int32_t color, int32_t key, pmoe_comm_callbacks *out);

static pmoe_comm_callbacks callbacks_of(MPI_Comm comm) {
  pmoe_comm_callbacks callbacks = PMOE_CONFIG_INIT(pmoe_comm_callbacks);
  MPI_Comm *user = malloc(sizeof *user);
  *user = comm;
  MPI_Comm_rank(comm, &callbacks.rank);
  MPI_Comm_size(comm, &callbacks.nranks);
  callbacks.user = user;
  callbacks.allgather = host_allgather;
  callbacks.alltoallv = host_alltoallv;
  callbacks.allreduce_f32 = host_allreduce;
  callbacks.barrier = host_barrier;
  callbacks.split = host_split;
  callbacks.release = host_release;
  return callbacks;
}

static int host_split(void *user, int32_t color, int32_t key, pmoe_comm_callbacks *out) {
  MPI_Comm child = MPI_COMM_NULL;
  int code = MPI_Comm_split(comm_of(user), color < 0 ? MPI_UNDEFINED : color, key, &child);
  if (code == MPI_SUCCESS && child != MPI_COMM_NULL) *out = callbacks_of(child);
  return code;
}

typedef struct meeting {
  MPI_Comm comm;
  ranks_transport transport;
} meeting;

static pmoe_status connect(pmoe_ctx *ctx, int32_t rank, void *launcher, pmoe_comm **out) {
  (void)rank;
  meeting *place = launcher;
  if (place->transport == RANKS_NATIVE) return pmoe_comm_from_mpi(ctx, place->comm, out);
  MPI_Comm own;
  MPI_Comm_dup(place->comm, &own);
  pmoe_comm_callbacks callbacks = callbacks_of(own);
  return pmoe_comm_from_callbacks(ctx, &callbacks, out);
}

void ranks_launch(ranks_job *job, char failure[RANKS_TEXT]) {
  int rank = 0, size = 0, failed = 0, first = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (job->config->nranks > size) return;
  meeting place = {MPI_COMM_NULL, job->config->transport};
  MPI_Comm_split(MPI_COMM_WORLD, rank < job->config->nranks ? 0 : MPI_UNDEFINED, rank, &place.comm);
  job->connect = connect;
  job->launcher = &place;
  if (rank < job->config->nranks) {
    ranks_run_one(job, rank, failure);
    MPI_Comm_free(&place.comm);
  }
  if (failure[0]) fprintf(stderr, "%s\n", failure);
  failed = failure[0] ? rank : INT_MAX;
  MPI_Allreduce(&failed, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (first != INT_MAX) MPI_Bcast(failure, RANKS_TEXT, MPI_CHAR, first, MPI_COMM_WORLD);
}

bool ranks_are_processes(void) { return true; }

void ranks_begin(int *argc, char ***argv) {
  int rank = 0;
  MPI_Init(argc, argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0 && !freopen("/dev/null", "w", stdout)) exit(2);
}

int ranks_end(int failures) {
  MPI_Finalize();
  return failures;
}
