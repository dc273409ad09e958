/* Ranks that are GPUs, by NCCL. Data moves on the context's exchange stream, ordered with the stream of the call by
 * events; nothing that a step needs waits. Host values go through a little device memory, and are waited for. */
#include <nccl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "a2a/transport.h"
#include "core/cuda.h"
#include "core/data.h"

typedef struct nccl_rank {
  ncclComm_t comm;
  bool own; /* split off by pmoe */
} nccl_rank;

static nccl_rank *state_of(const pmoe_comm *comm) { return comm->state; }

static void pause_briefly(void) {
  const struct timespec pause = {0, 20000};
  nanosleep(&pause, NULL);
}

static pmoe_status late(const pmoe_comm *comm, const char *what) {
  return pmoei_error(PMOE_ERR_TIMEOUT, "%s: NCCL was not done after %.3f s; peers are missing", what,
                     (double)comm->ctx->timeout_ns * 1e-9);
}

/* What a call returned, or what became of it in a communicator that does not block. */
static pmoe_status settle(const pmoe_comm *comm, ncclComm_t nccl, ncclResult_t result, const char *what) {
  uint64_t start = pmoei_now_ns();
  while (result == ncclInProgress) {
    ncclResult_t asked = ncclCommGetAsyncError(nccl, &result);
    if (asked != ncclSuccess) result = asked;
    if (result == ncclInProgress && pmoei_now_ns() - start > comm->ctx->timeout_ns) return late(comm, what);
    if (result == ncclInProgress) pause_briefly();
  }
  if (result == ncclSuccess) return PMOE_OK;
  return pmoei_error(PMOE_ERR_COMM, "%s: NCCL says: %s", what, ncclGetErrorString(result));
}

/* The host waits for an event, and for no longer than the time-out; what NCCL finds meanwhile ends it too. */
static pmoe_status wait_for(pmoe_comm *comm, cudaEvent_t event, const char *what) {
  uint64_t start = pmoei_now_ns();
  for (int64_t polls = 0;; polls++) {
    cudaError_t done = cudaEventQuery(event);
    if (done == cudaSuccess) return PMOE_OK;
    if (done != cudaErrorNotReady) return pmoei_cuda_status(done, what);
    ncclResult_t result = ncclSuccess;
    ncclResult_t asked = ncclCommGetAsyncError(state_of(comm)->comm, &result);
    if (asked != ncclSuccess || (result != ncclSuccess && result != ncclInProgress))
      return pmoei_error(PMOE_ERR_COMM, "%s: NCCL says: %s", what,
                         ncclGetErrorString(asked != ncclSuccess ? asked : result));
    if (pmoei_now_ns() - start > comm->ctx->timeout_ns) return late(comm, what);
    if (polls > 1000) pause_briefly(); /* the counts of a step are there sooner */
  }
}

/* ---- collectives of data, enqueued ---- */

static pmoe_status nccl_allgather_data(pmoe_comm *comm, const char *what, const void *src, void *dst,
                                       size_t bytes_each) {
  ncclComm_t nccl = state_of(comm)->comm;
  return settle(comm, nccl, ncclAllGather(src, dst, bytes_each, ncclUint8, nccl, pmoei_cuda_stream(comm->ctx)), what);
}

static pmoe_status send_and_receive(pmoe_comm *comm, const pmoei_exchange *x, int32_t i, cudaStream_t stream) {
  ncclComm_t nccl = state_of(comm)->comm;
  const pmoei_part *part = &x->part[i];
  for (int32_t p = 0; p < comm->nranks; p++) {
    size_t sent = (size_t)x->send_rows[p] * part->row_bytes, received = (size_t)x->recv_rows[p] * part->row_bytes;
    const char *from = (const char *)part->send + (size_t)x->send_first[p] * part->row_bytes;
    char *to = (char *)part->recv + (size_t)x->recv_first[p] * part->row_bytes;
    if (p == comm->rank) {
      if (sent > 0) PMOEI_CUDA_TRY(cudaMemcpyAsync(to, from, sent, cudaMemcpyDeviceToDevice, stream));
      continue;
    }
    if (sent > 0) PMOEI_TRY(settle(comm, nccl, ncclSend(from, sent, ncclUint8, p, nccl, stream), x->what));
    if (received > 0) PMOEI_TRY(settle(comm, nccl, ncclRecv(to, received, ncclUint8, p, nccl, stream), x->what));
  }
  return PMOE_OK;
}

static pmoe_status exchange_ragged(pmoe_comm *comm, const pmoei_exchange *x, cudaStream_t stream) {
  ncclComm_t nccl = state_of(comm)->comm;
  PMOEI_TRY(settle(comm, nccl, ncclGroupStart(), x->what));
  pmoe_status status = PMOE_OK;
  for (int32_t i = 0; i < x->num_parts && status == PMOE_OK; i++) status = send_and_receive(comm, x, i, stream);
  ncclResult_t ended = ncclGroupEnd(); /* in any case: it was begun */
  return status == PMOE_OK ? settle(comm, nccl, ended, x->what) : status;
}

static pmoe_status exchange_uniform(pmoe_comm *comm, const pmoei_exchange *x, cudaStream_t stream) {
  ncclComm_t nccl = state_of(comm)->comm;
  for (int32_t i = 0; i < x->num_parts; i++) {
    const pmoei_part *part = &x->part[i];
    size_t bytes = (size_t)x->send_rows[0] * part->row_bytes;
    if (bytes == 0) continue;
    PMOEI_TRY(settle(comm, nccl, ncclAlltoAll(part->send, part->recv, bytes, ncclUint8, nccl, stream), x->what));
  }
  return PMOE_OK;
}

static pmoe_status nccl_exchange_start(pmoe_comm *comm, pmoei_exchange *exchange) {
  pmoei_cuda_lane *lane = &comm->ctx->cuda->exchange;
  PMOEI_TRY(pmoei_cuda_fork(comm->ctx, lane));
  return exchange->uniform ? exchange_uniform(comm, exchange, lane->stream)
                           : exchange_ragged(comm, exchange, lane->stream);
}

static pmoe_status nccl_exchange_finish(pmoe_comm *comm, pmoei_exchange *exchange) {
  (void)exchange;
  return pmoei_cuda_join(comm->ctx, &comm->ctx->cuda->exchange);
}

static pmoe_status nccl_allreduce(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type) {
  static const ncclDataType_t types[] = {[PMOEI_SUM_F32] = ncclFloat32,
                                         [PMOEI_SUM_BF16] = ncclBfloat16,
                                         [PMOEI_SUM_F16] = ncclFloat16,
                                         [PMOEI_SUM_F64] = ncclFloat64,
                                         [PMOEI_SUM_I64] = ncclInt64};
  ncclComm_t nccl = state_of(comm)->comm;
  if (n == 0) return PMOE_OK;
  return settle(comm, nccl,
                ncclAllReduce(inout, inout, (size_t)n, types[type], ncclSum, nccl, pmoei_cuda_stream(comm->ctx)), what);
}

/* ---- collectives of host values, waited for ---- */

static pmoe_status nccl_wait(pmoe_comm *comm, const char *what) {
  cudaEvent_t event = comm->ctx->cuda->reached;
  PMOEI_CUDA_TRY(cudaEventRecord(event, pmoei_cuda_stream(comm->ctx)));
  return wait_for(comm, event, what);
}

/* On the exchange stream: the stream of the latest step need not exist any more. */
static pmoe_status gather_host(pmoe_comm *comm, const char *what, const void *src, void *dst, size_t bytes, char *room,
                               char *pinned) {
  size_t all = bytes * (size_t)comm->nranks;
  if (bytes == 0) return comm->transport->barrier(comm, what);
  memcpy(pinned, src, bytes);
  PMOEI_TRY(pmoei_data_copy(comm->ctx, room, pinned, bytes));
  PMOEI_TRY(nccl_allgather_data(comm, what, room, room + bytes, bytes));
  PMOEI_TRY(pmoei_data_copy(comm->ctx, pinned, room + bytes, all));
  PMOEI_TRY(nccl_wait(comm, what));
  memcpy(dst, pinned, all);
  return PMOE_OK;
}

static pmoe_status nccl_allgather(pmoe_comm *comm, const char *what, const void *src, void *dst, size_t bytes_each) {
  pmoe_ctx *ctx = comm->ctx;
  size_t bytes = bytes_each * ((size_t)comm->nranks + 1);
  char *room = NULL, *pinned = NULL;
  pmoe_stream before = ctx->stream;
  PMOEI_TRY(pmoei_ctx_enter(ctx, ctx->cuda->exchange.stream));
  pmoe_status status = pmoei_data_alloc(ctx, bytes, "room for a collective", &room);
  if (status == PMOE_OK) status = pmoei_pinned_alloc(ctx, bytes, "room for a collective", &pinned);
  bool began = status == PMOE_OK;
  if (began) status = gather_host(comm, what, src, dst, bytes_each, room, pinned);
  /* What NCCL still works on after a failure stays where it is. */
  if (status == PMOE_OK || !began) {
    pmoei_data_free(ctx, room, bytes);
    pmoei_pinned_free(ctx, pinned, bytes);
  }
  ctx->stream = before;
  return status;
}

/* The outcomes' memory is free: an agreement is finished before the next collective. */
static pmoe_status nccl_barrier(pmoe_comm *comm, const char *what) {
  char here = 0;
  return nccl_allgather(comm, what, &here, comm->outcomes, sizeof here);
}

/* ---- communicators ---- */

static const pmoei_transport nccl_transport;

static pmoe_status take(pmoe_ctx *ctx, ncclComm_t nccl, bool own, pmoe_comm **out) {
  int rank = 0, size = 0, device = 0;
  if (ncclCommUserRank(nccl, &rank) != ncclSuccess || ncclCommCount(nccl, &size) != ncclSuccess ||
      ncclCommCuDevice(nccl, &device) != ncclSuccess)
    return pmoei_error(PMOE_ERR_COMM, "pmoe_comm_from_nccl: NCCL does not know this communicator");
  PMOEI_REQUIRE(device == ctx->cuda->device, "nccl_comm is of device %d; device %d, the context's, was expected",
                device, ctx->cuda->device);
  PMOEI_TRY(pmoei_comm_new(ctx, &nccl_transport, rank, size, sizeof(nccl_rank), out));
  *state_of(*out) = (nccl_rank){nccl, own};
  return PMOE_OK;
}

static pmoe_status nccl_split(pmoe_comm *comm, const pmoei_subgroup *group, pmoe_comm **out) {
  ncclComm_t nccl = state_of(comm)->comm, child = NULL;
  PMOEI_TRY(pmoei_ctx_enter(comm->ctx, comm->ctx->stream));
  int color = group->size > 0 ? group->color : NCCL_SPLIT_NOCOLOR;
  ncclResult_t result = ncclCommSplit(nccl, color, group->rank, &child, NULL);
  PMOEI_TRY(settle(comm, nccl, result, "pmoe_comm_split"));
  if (!child) return PMOE_OK;
  PMOEI_TRY(settle(comm, child, ncclSuccess, "pmoe_comm_split"));
  pmoe_status status = take(comm->ctx, child, true, out);
  if (status != PMOE_OK) (void)ncclCommDestroy(child);
  return status;
}

/* The host's own is revoked: it stays the host's to destroy. */
static void nccl_fail(pmoe_comm *comm, const char *why) {
  (void)why;
  nccl_rank *state = state_of(comm);
  if (!state->comm) return;
  if (state->own) (void)ncclCommAbort(state->comm);
  else (void)ncclCommRevoke(state->comm, 0);
  state->comm = NULL;
}

static void nccl_destroy(pmoe_comm *comm) {
  nccl_rank *state = state_of(comm);
  if (!state->own || !state->comm) return;
  (void)pmoei_cuda_enter(comm->ctx);
  (void)ncclCommDestroy(state->comm);
}

static const pmoei_transport nccl_transport = {.name = "nccl",
                                               .on_device = true,
                                               .allgather = nccl_allgather,
                                               .allgather_data = nccl_allgather_data,
                                               .wait = nccl_wait,
                                               .exchange_start = nccl_exchange_start,
                                               .exchange_finish = nccl_exchange_finish,
                                               .allreduce = nccl_allreduce,
                                               .barrier = nccl_barrier,
                                               .split = nccl_split,
                                               .fail = nccl_fail,
                                               .destroy = nccl_destroy};

PMOE_API pmoe_status pmoe_comm_from_nccl_handle(pmoe_ctx *ctx, void *nccl_comm, pmoe_comm **out);

pmoe_status pmoe_comm_from_nccl_handle(pmoe_ctx *ctx, void *nccl_comm, pmoe_comm **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(nccl_comm);
  PMOEI_REQUIRE_POINTER(out);
  PMOEI_REQUIRE(pmoei_on_device(ctx), "ctx is of the CPU back end; one of the CUDA back end was expected");
  return take(ctx, nccl_comm, false, out);
}
