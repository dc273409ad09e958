/* The host's own collectives. They block, so an exchange happens as a whole when it starts. */
#include <string.h>

#include "a2a/transport.h"
#include "core/config.h"

typedef struct host_state {
  pmoe_comm_callbacks host;
  size_t *send_bytes, *recv_bytes; /* [nranks] */
} host_state;

static pmoe_status host_result(const char *what, const char *function, int result) {
  return result == 0 ? PMOE_OK : pmoei_error(PMOE_ERR_COMM, "%s: the host's %s returned %d", what, function, result);
}

static pmoe_status host_allgather(pmoe_comm *comm, const char *what, const void *src, void *dst, size_t bytes_each) {
  host_state *state = comm->state;
  return host_result(what, "allgather", state->host.allgather(state->host.user, src, dst, bytes_each));
}

static pmoe_status host_barrier(pmoe_comm *comm, const char *what) {
  host_state *state = comm->state;
  return host_result(what, "barrier", state->host.barrier(state->host.user));
}

static pmoe_status host_allreduce(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type) {
  host_state *state = comm->state;
  if (type != PMOEI_SUM_F32) return pmoei_allreduce_by_exchange(comm, what, inout, n, type);
  return host_result(what, "allreduce_f32", state->host.allreduce_f32(state->host.user, inout, (size_t)n));
}

static int64_t total(const int64_t *rows, int32_t nranks) {
  int64_t sum = 0;
  for (int32_t p = 0; p < nranks; p++) sum += rows[p];
  return sum;
}

/* Blocks that lie back to back in rank order can be handed over as they are. */
static bool is_packed(const int64_t *first, const int64_t *rows, int32_t nranks) {
  int64_t next = first[0];
  for (int32_t p = 0; p < nranks; p++) {
    if (rows[p] > 0 && first[p] != next) return false;
    next += rows[p];
  }
  return true;
}

static char *row_of(const void *base, int64_t row, size_t row_bytes) {
  return base ? (char *)base + (size_t)row * row_bytes : NULL;
}

/* One part; send_room and recv_room are NULL where the rows are packed already. */
static pmoe_status exchange_part(pmoe_comm *comm, const pmoei_exchange *x, const pmoei_part *part, char *send_room,
                                 char *recv_room) {
  host_state *state = comm->state;
  size_t row_bytes = part->row_bytes;
  char *packed = send_room;
  for (int32_t p = 0; p < comm->nranks; p++) {
    state->send_bytes[p] = (size_t)x->send_rows[p] * row_bytes;
    state->recv_bytes[p] = (size_t)x->recv_rows[p] * row_bytes;
    if (!send_room || state->send_bytes[p] == 0) continue;
    memcpy(packed, row_of(part->send, x->send_first[p], row_bytes), state->send_bytes[p]);
    packed += state->send_bytes[p];
  }
  const char *send = send_room ? send_room : row_of(part->send, x->send_first[0], row_bytes);
  char *recv = recv_room ? recv_room : row_of(part->recv, x->recv_first[0], row_bytes);
  int result = state->host.alltoallv(state->host.user, send, state->send_bytes, recv, state->recv_bytes);
  PMOEI_TRY(host_result(x->what, "alltoallv", result));
  for (int32_t p = 0; p < comm->nranks && recv_room; p++) {
    if (state->recv_bytes[p] == 0) continue;
    memcpy(row_of(part->recv, x->recv_first[p], row_bytes), recv_room, state->recv_bytes[p]);
    recv_room += state->recv_bytes[p];
  }
  return PMOE_OK;
}

static pmoe_status host_exchange_start(pmoe_comm *comm, pmoei_exchange *x) {
  PMOEI_TRY(pmoei_exchange_check(x, comm->rank, x, comm->rank));
  bool pack_send = !is_packed(x->send_first, x->send_rows, comm->nranks);
  bool pack_recv = !is_packed(x->recv_first, x->recv_rows, comm->nranks);
  size_t row_bytes = 0; /* parts take their turns in the same room */
  for (int32_t i = 0; i < x->num_parts; i++)
    if (x->part[i].row_bytes > row_bytes) row_bytes = x->part[i].row_bytes;
  size_t send_bytes = pack_send ? (size_t)total(x->send_rows, comm->nranks) * row_bytes : 0;
  size_t recv_bytes = pack_recv ? (size_t)total(x->recv_rows, comm->nranks) * row_bytes : 0;
  void *room = NULL;
  int32_t frame = 0;
  pmoe_status status = pmoei_scratch_open(comm->ctx, send_bytes + recv_bytes, &room, &frame);
  if (status != PMOE_OK) return pmoei_comm_fail(comm, status, NULL);
  for (int32_t i = 0; i < x->num_parts && status == PMOE_OK; i++)
    status = exchange_part(comm, x, &x->part[i], pack_send ? room : NULL, pack_recv ? (char *)room + send_bytes : NULL);
  pmoei_scratch_close(comm->ctx, frame);
  return status;
}

static pmoe_status host_exchange_finish(pmoe_comm *comm, pmoei_exchange *exchange) {
  (void)comm, (void)exchange;
  return PMOE_OK;
}

static void host_fail(pmoe_comm *comm, const char *why) {
  host_state *state = comm->state;
  if (state->host.abort) state->host.abort(state->host.user, why);
}

static void host_destroy(pmoe_comm *comm) {
  host_state *state = comm->state;
  if (state->host.release) state->host.release(state->host.user);
}

/* The host's split is called for every rank, those without a colour included. */
static pmoe_status host_split(pmoe_comm *comm, const pmoei_subgroup *group, pmoe_comm **out) {
  host_state *state = comm->state;
  if (!state->host.split)
    return pmoei_error(PMOE_ERR_UNSUPPORTED, "pmoe_comm_split: the host's callbacks have no split");
  pmoe_comm_callbacks child = PMOE_CONFIG_INIT(pmoe_comm_callbacks);
  PMOEI_TRY(
      host_result("pmoe_comm_split", "split", state->host.split(state->host.user, group->color, group->key, &child)));
  if (group->size == 0) return PMOE_OK;
  pmoe_status status = pmoe_comm_from_callbacks(comm->ctx, &child, out);
  if (status == PMOE_OK && (child.rank != group->rank || child.nranks != group->size)) {
    status = pmoei_error(PMOE_ERR_MISMATCH,
                         "pmoe_comm_split: the host's split made rank %d of %d; rank %d of %d was expected", child.rank,
                         child.nranks, group->rank, group->size);
    pmoei_comm_release(*out);
    *out = NULL;
  } else if (status != PMOE_OK && child.release) {
    child.release(child.user);
  }
  return status;
}

static const pmoei_transport callbacks_transport = {.name = "callbacks",
                                                    .allgather = host_allgather,
                                                    .exchange_start = host_exchange_start,
                                                    .exchange_finish = host_exchange_finish,
                                                    .allreduce = host_allreduce,
                                                    .barrier = host_barrier,
                                                    .split = host_split,
                                                    .fail = host_fail,
                                                    .destroy = host_destroy};

static pmoe_status check_callbacks(const pmoe_comm_callbacks *host) {
  PMOEI_REQUIRE(host->nranks >= 1, "callbacks->nranks is %d; 1 or more was expected", host->nranks);
  PMOEI_REQUIRE(host->rank >= 0 && host->rank < host->nranks, "callbacks->rank is %d; 0 to %d was expected", host->rank,
                host->nranks - 1);
  PMOEI_REQUIRE(host->allgather, "callbacks->allgather is NULL; a function was expected");
  PMOEI_REQUIRE(host->alltoallv, "callbacks->alltoallv is NULL; a function was expected");
  PMOEI_REQUIRE(host->allreduce_f32, "callbacks->allreduce_f32 is NULL; a function was expected");
  PMOEI_REQUIRE(host->barrier, "callbacks->barrier is NULL; a function was expected");
  return PMOE_OK;
}

pmoe_status pmoe_comm_from_callbacks(pmoe_ctx *ctx, const pmoe_comm_callbacks *callbacks, pmoe_comm **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(out);
  pmoe_comm_callbacks host;
  PMOEI_TRY(PMOEI_CONFIG_READ(&host, callbacks));
  PMOEI_TRY(check_callbacks(&host));
  size_t lists = 2 * (size_t)host.nranks * sizeof(size_t);
  pmoe_comm *comm = NULL;
  PMOEI_TRY(pmoei_comm_new(ctx, &callbacks_transport, host.rank, host.nranks, sizeof(host_state) + lists, &comm));
  host_state *state = comm->state;
  state->host = host;
  state->send_bytes = (size_t *)(state + 1);
  state->recv_bytes = state->send_bytes + host.nranks;
  *out = comm;
  return PMOE_OK;
}
