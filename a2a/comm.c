#include "a2a/transport.h"

#include <stdio.h>
#include <string.h>

#include "core/arena.h"
#include "core/data.h"
#include "core/random.h"

/* Measures (base NULL) or carves a communicator's block. */
static void lay_out(pmoei_arena *arena, int32_t nranks, size_t state_bytes, pmoe_comm *comm) {
  pmoei_take(arena, 1, sizeof *comm);
  int64_t *rows = pmoei_take(arena, (int64_t)4 * nranks, sizeof *rows);
  pmoei_outcome *outcomes = pmoei_take(arena, nranks, sizeof *outcomes);
  void *state = pmoei_take(arena, (int64_t)state_bytes, 1);
  if (!comm) return;
  comm->rows = rows;
  comm->outcomes = outcomes;
  comm->state = state_bytes > 0 ? state : NULL;
}

pmoe_status pmoei_comm_new(pmoe_ctx *ctx, const pmoei_transport *transport, int32_t rank, int32_t nranks,
                           size_t state_bytes, pmoe_comm **out) {
  pmoei_arena measure = {NULL, 0};
  lay_out(&measure, nranks, state_bytes, NULL);
  pmoe_comm *comm = NULL;
  PMOEI_TRY(pmoei_alloc(ctx, measure.used, "communicator", &comm));
  pmoei_arena carve = {(char *)comm, 0};
  lay_out(&carve, nranks, state_bytes, comm);
  comm->transport = transport;
  comm->ctx = ctx;
  comm->rank = rank;
  comm->nranks = nranks;
  comm->refs = 1;
  comm->bytes = measure.used;
  pmoei_ctx_retain(ctx);
  *out = comm;
  return PMOE_OK;
}

void pmoei_comm_retain(pmoe_comm *comm) { comm->refs++; }

void pmoei_comm_release(pmoe_comm *comm) {
  if (!comm || --comm->refs > 0) return;
  pmoe_ctx *ctx = comm->ctx;
  if (comm->num_flying > 0)
    pmoei_comm_fail(comm, PMOE_ERR_COMM, "it ended its communicator with an exchange under way");
  comm->transport->destroy(comm);
  pmoei_free(ctx, comm, comm->bytes);
  pmoei_ctx_release(ctx);
}

void pmoe_comm_destroy(pmoe_comm *comm) { pmoei_comm_release(comm); }

static pmoe_status ready(const pmoe_comm *comm) {
  return comm->failed == PMOE_OK ? PMOE_OK : pmoei_error(comm->failed, "%s", comm->why);
}

static pmoe_status remember(pmoe_comm *comm, pmoe_status status) {
  if (status != PMOE_OK && comm->failed == PMOE_OK) {
    comm->failed = status;
    snprintf(comm->why, sizeof comm->why, "%s", pmoe_last_error());
  }
  return status;
}

pmoe_status pmoei_allgather(pmoe_comm *comm, const char *what, const void *src, void *dst, size_t bytes_each) {
  PMOEI_TRY(ready(comm));
  return remember(comm, comm->transport->allgather(comm, what, src, dst, bytes_each));
}

pmoe_status pmoei_allreduce(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type) {
  PMOEI_TRY(ready(comm));
  if (comm->nranks == 1) return PMOE_OK;
  return remember(comm, comm->transport->allreduce(comm, what, inout, n, type));
}

pmoe_status pmoei_allgather_data(pmoe_comm *comm, const char *what, const void *src, void *dst, size_t bytes_each) {
  PMOEI_TRY(ready(comm));
  return remember(comm, comm->transport->allgather_data(comm, what, src, dst, bytes_each));
}

pmoe_status pmoei_comm_wait(pmoe_comm *comm, const char *what) {
  PMOEI_TRY(ready(comm));
  pmoe_status status = remember(comm, comm->transport->wait(comm, what));
  /* Late, or gone: what NCCL holds has to be ended before anything else can be. */
  if (status != PMOE_OK) comm->transport->fail(comm, comm->why);
  return status;
}

pmoe_status pmoei_exchange_start(pmoe_comm *comm, pmoei_exchange *exchange) {
  PMOEI_TRY(ready(comm));
  if (comm->num_flying == PMOEI_MAX_EXCHANGES)
    return pmoei_error(PMOE_ERR_STATE, "%s: %d exchanges are under way; finish one first", exchange->what,
                       PMOEI_MAX_EXCHANGES);
  PMOEI_TRY(remember(comm, comm->transport->exchange_start(comm, exchange)));
  comm->flying[(comm->oldest + comm->num_flying++) % PMOEI_MAX_EXCHANGES] = exchange;
  return PMOE_OK;
}

pmoe_status pmoei_exchange_finish(pmoe_comm *comm, pmoei_exchange *exchange) {
  PMOEI_TRY(ready(comm));
  if (comm->num_flying == 0 || comm->flying[comm->oldest] != exchange)
    return pmoei_error(PMOE_ERR_STATE, "%s: finished out of order; exchanges finish in the order of starting",
                       exchange->what);
  comm->oldest = (comm->oldest + 1) % PMOEI_MAX_EXCHANGES;
  comm->num_flying--;
  return remember(comm, comm->transport->exchange_finish(comm, exchange));
}

pmoe_status pmoei_exchange_now(pmoe_comm *comm, pmoei_exchange *exchange) {
  PMOEI_TRY(ready(comm));
  PMOEI_TRY(remember(comm, comm->transport->exchange_start(comm, exchange)));
  return remember(comm, comm->transport->exchange_finish(comm, exchange));
}

static void mark_failed(pmoe_comm *comm, pmoe_status status, const char *why) {
  if (comm->failed != PMOE_OK) return;
  comm->failed = status;
  snprintf(comm->why, sizeof comm->why, "%s", why);
  comm->num_flying = 0;
  comm->transport->fail(comm, comm->why);
}

pmoe_status pmoei_comm_fail(pmoe_comm *comm, pmoe_status status, const char *why) {
  char last[sizeof comm->why];
  snprintf(last, sizeof last, "%s", pmoe_last_error());
  /* A rank alone leaves no peer waiting: its next call may well succeed. */
  if (comm->nranks > 1) mark_failed(comm, status, why ? why : last);
  return pmoei_error(status, "%s", last);
}

void pmoe_comm_abort(pmoe_comm *comm, const char *why) {
  if (!comm) return;
  char reason[sizeof comm->why];
  snprintf(reason, sizeof reason, "it gave up: %s", why ? why : "no reason given");
  mark_failed(comm, PMOE_ERR_COMM, reason);
}

int32_t pmoe_comm_rank(const pmoe_comm *comm) { return comm ? comm->rank : -1; }
int32_t pmoe_comm_size(const pmoe_comm *comm) { return comm ? comm->nranks : 0; }
const char *pmoe_comm_transport(const pmoe_comm *comm) { return comm ? comm->transport->name : "none"; }

pmoe_status pmoe_comm_barrier(pmoe_comm *comm) {
  PMOEI_REQUIRE_POINTER(comm);
  PMOEI_TRY(ready(comm));
  return remember(comm, comm->transport->barrier(comm, __func__));
}

static pmoe_status check_allgather(const pmoe_comm *comm, const void *src, const void *dst, size_t bytes_each) {
  if (bytes_each > 0) {
    PMOEI_REQUIRE_POINTER(src);
    PMOEI_REQUIRE_POINTER(dst);
  }
  PMOEI_REQUIRE(bytes_each <= (size_t)INT64_MAX / (size_t)comm->nranks,
                "bytes_each is %zu; %d times that exceeds 64 bits", bytes_each, comm->nranks);
  return PMOE_OK;
}

pmoe_status pmoe_comm_allgather(pmoe_comm *comm, const void *src, void *dst, size_t bytes_each) {
  PMOEI_REQUIRE_POINTER(comm);
  PMOEI_TRY(pmoei_comm_agree(comm, __func__, check_allgather(comm, src, dst, bytes_each)));
  return pmoei_allgather(comm, __func__, src, dst, bytes_each);
}

static pmoe_status check_allreduce(const pmoe_comm *comm, const void *inout, int64_t n, pmoe_dtype dtype) {
  PMOEI_REQUIRE(n >= 0, "n is %lld; 0 or more was expected", (long long)n);
  if (n > 0) PMOEI_REQUIRE_POINTER(inout);
  return pmoei_check_dtype(comm->ctx, dtype, "dtype");
}

pmoe_status pmoe_comm_allreduce(pmoe_comm *comm, void *inout, int64_t n, pmoe_dtype dtype) {
  PMOEI_REQUIRE_POINTER(comm);
  PMOEI_TRY(pmoei_comm_agree(comm, __func__, check_allreduce(comm, inout, n, dtype)));
  PMOEI_TRY(pmoei_ctx_enter(comm->ctx, NULL));
  PMOEI_TRY(pmoei_allreduce(comm, __func__, inout, n, pmoei_sum_of(dtype)));
  return pmoei_data_wait(comm->ctx);
}

typedef struct split_entry {
  int32_t color, key;
} split_entry;

/* Ranks of this rank's colour by key, then by rank. ranks has room for every one. */
static pmoei_subgroup choose(const pmoe_comm *comm, const split_entry *entries, int32_t *ranks) {
  split_entry mine = entries[comm->rank];
  pmoei_subgroup group = {.color = mine.color, .key = mine.key, .ranks = ranks};
  for (int32_t p = 0; p < comm->nranks && mine.color >= 0; p++) {
    if (entries[p].color != mine.color) continue;
    int32_t at = group.size++;
    for (; at > 0 && entries[ranks[at - 1]].key > entries[p].key; at--) ranks[at] = ranks[at - 1];
    ranks[at] = p;
  }
  for (int32_t i = 0; i < group.size; i++)
    if (ranks[i] == comm->rank) group.rank = i;
  return group;
}

/* All ranks get their communicator or none does. */
static pmoe_status split(pmoe_comm *comm, const char *what, split_entry mine, void *room, pmoe_comm **out) {
  split_entry *entries = room;
  int32_t *ranks = (int32_t *)(entries + comm->nranks);
  PMOEI_TRY(pmoei_allgather(comm, what, &mine, entries, sizeof mine));
  pmoei_subgroup group = choose(comm, entries, ranks);
  pmoe_comm *child = NULL;
  pmoe_status status = comm->transport->split(comm, &group, &child);
  status = pmoei_comm_agree(comm, what, status);
  if (status == PMOE_OK) *out = child;
  else pmoei_comm_release(child);
  return status;
}

pmoe_status pmoe_comm_split(pmoe_comm *comm, int32_t color, int32_t key, pmoe_comm **out) {
  PMOEI_REQUIRE_POINTER(comm);
  void *room = NULL;
  int32_t frame = -1;
  pmoe_status status = out ? PMOE_OK : pmoei_error(PMOE_ERR_ARG, "out is NULL; a pointer was expected");
  if (status == PMOE_OK)
    status = pmoei_scratch_open_host(comm->ctx, (size_t)comm->nranks * (sizeof(split_entry) + sizeof(int32_t)), &room,
                                     &frame);
  status = pmoei_comm_agree(comm, __func__, status);
  if (status == PMOE_OK) status = split(comm, __func__, (split_entry){color, key}, room, out);
  if (frame >= 0) pmoei_scratch_close(comm->ctx, frame);
  return status;
}

/* A list of ranks: its first, its length and a mark of all of it. */
typedef struct list_entry {
  int32_t first, n;
  uint64_t mark;
} list_entry;

static pmoe_status check_list(const pmoe_comm *comm, const int32_t *ranks, int32_t n, pmoe_comm **out, int32_t *place,
                              list_entry *entry) {
  PMOEI_REQUIRE_POINTER(out);
  PMOEI_REQUIRE_POINTER(ranks);
  PMOEI_REQUIRE(n >= 1 && n <= comm->nranks, "n is %d; 1 to %d was expected", n, comm->nranks);
  *entry = (list_entry){ranks[0], n, 0};
  for (int32_t i = 0; i < n; i++) {
    PMOEI_REQUIRE(ranks[i] >= 0 && ranks[i] < comm->nranks, "ranks[%d] is %d; 0 to %d was expected", i, ranks[i],
                  comm->nranks - 1);
    for (int32_t j = 0; j < i; j++)
      PMOEI_REQUIRE(ranks[j] != ranks[i], "ranks[%d] and ranks[%d] are both %d; different ranks were expected", j, i,
                    ranks[i]);
    if (ranks[i] == comm->rank) *place = i;
    entry->mark = pmoei_mix64(entry->mark + (uint64_t)ranks[i] + 1);
  }
  PMOEI_REQUIRE(*place >= 0, "ranks does not name this rank, which is %d", comm->rank);
  return PMOE_OK;
}

/* Every rank on my list has the same list. */
static pmoe_status compare_lists(const pmoe_comm *comm, const list_entry *lists, const int32_t *ranks, int32_t n) {
  const list_entry *mine = &lists[comm->rank];
  for (int32_t i = 0; i < n; i++) {
    const list_entry *theirs = &lists[ranks[i]];
    if (theirs->first != mine->first || theirs->n != mine->n || theirs->mark != mine->mark)
      return pmoei_error(PMOE_ERR_MISMATCH,
                         "pmoe_comm_split_ranks: rank %d names rank %d, but their lists differ (%d ranks from %d on "
                         "the one, %d from %d on the other)",
                         comm->rank, ranks[i], mine->n, mine->first, theirs->n, theirs->first);
  }
  return PMOE_OK;
}

pmoe_status pmoe_comm_split_ranks(pmoe_comm *comm, const int32_t *ranks, int32_t n, pmoe_comm **out) {
  PMOEI_REQUIRE_POINTER(comm);
  int32_t place = -1, frame = -1;
  list_entry mine;
  void *room = NULL;
  pmoe_status status = check_list(comm, ranks, n, out, &place, &mine);
  if (status == PMOE_OK)
    status = pmoei_scratch_open_host(comm->ctx, (size_t)comm->nranks * sizeof(list_entry), &room, &frame);
  status = pmoei_comm_agree(comm, __func__, status);
  if (status == PMOE_OK) status = pmoei_allgather(comm, __func__, &mine, room, sizeof mine);
  if (status == PMOE_OK) status = pmoei_comm_agree(comm, __func__, compare_lists(comm, room, ranks, n));
  if (frame >= 0) pmoei_scratch_close(comm->ctx, frame);
  return status == PMOE_OK ? pmoe_comm_split(comm, mine.first, place, out) : status;
}

#ifndef PMOE_WITH_MPI
/* pmoe/mpi.h needs mpi.h, which is not here. */
PMOE_API pmoe_status pmoe_comm_from_mpi_handle(pmoe_ctx *ctx, const void *handle, size_t handle_bytes, pmoe_comm **out);

pmoe_status pmoe_comm_from_mpi_handle(pmoe_ctx *ctx, const void *handle, size_t handle_bytes, pmoe_comm **out) {
  (void)ctx, (void)handle, (void)handle_bytes, (void)out;
  return pmoei_error(PMOE_ERR_UNSUPPORTED, "pmoe_comm_from_mpi: this library was built without MPI");
}
#endif

#ifndef PMOE_WITH_NCCL
PMOE_API pmoe_status pmoe_comm_from_nccl_handle(pmoe_ctx *ctx, void *nccl_comm, pmoe_comm **out);

pmoe_status pmoe_comm_from_nccl_handle(pmoe_ctx *ctx, void *nccl_comm, pmoe_comm **out) {
  (void)ctx, (void)nccl_comm, (void)out;
  return pmoei_error(PMOE_ERR_UNSUPPORTED, "pmoe_comm_from_nccl: this library was built without NCCL");
}
#endif
