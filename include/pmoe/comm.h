/* Communicators: how the ranks of one group reach each other. A communicator is used by one thread at a time, and every
 * call marked *collective* is made by all its ranks, in the same order. pmoe/mpi.h adds communicators from MPI.
 *
 * When a rank fails, or gives up with pmoe_comm_abort, the collectives of its peers return PMOE_ERR_COMM with that rank
 * and its reason; a rank that does not come within the context's time-out gives PMOE_ERR_TIMEOUT with the collective's
 * name and the missing ranks. After either, every later collective on that communicator fails in the same way. */
#ifndef PMOE_COMM_H
#define PMOE_COMM_H
#include <pmoe/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The group of one. */
PMOE_API pmoe_status pmoe_comm_self(pmoe_ctx *ctx, pmoe_comm **out);

/* A hub joins ranks that are threads of one process. Create it once, hand it to every thread, destroy it after all of
 * its communicators. nranks >= 1. */
PMOE_API pmoe_status pmoe_hub_create(int32_t nranks, pmoe_hub **out);
PMOE_API void pmoe_hub_destroy(pmoe_hub *hub);
/* Not collective. Each rank in [0, nranks) is taken once. */
PMOE_API pmoe_status pmoe_comm_from_hub(pmoe_ctx *ctx, pmoe_hub *hub, int32_t rank, pmoe_comm **out);

/* The host's own collectives. Each function returns 0, or another value that ends the collective with PMOE_ERR_COMM.
 * They block, and their time-out is the host's affair. Counts and bytes may be 0. `user` must outlive the communicator.
 */
typedef struct pmoe_comm_callbacks {
  size_t size;
  void *user;
  int32_t rank, nranks;
  /* dst holds nranks blocks of bytes_each, in rank order */
  int (*allgather)(void *user, const void *src, void *dst, size_t bytes_each);
  /* blocks lie back to back in rank order on both sides */
  int (*alltoallv)(void *user, const void *src, const size_t *send_bytes, void *dst, const size_t *recv_bytes);
  int (*allreduce_f32)(void *user, float *inout, size_t n); /* sum */
  int (*barrier)(void *user);
  /* Optional. Fills *out for the ranks of the same colour ordered by key, then by rank; with color < 0 it leaves *out
   * alone. NULL: pmoe_comm_split refuses. */
  int (*split)(void *user, int32_t color, int32_t key, struct pmoe_comm_callbacks *out);
  void (*release)(void *user);                /* optional; called when the communicator ends */
  void (*abort)(void *user, const char *why); /* optional; tell the peers that this rank gave up */
} pmoe_comm_callbacks;
PMOE_API pmoe_status pmoe_comm_from_callbacks(pmoe_ctx *ctx, const pmoe_comm_callbacks *callbacks, pmoe_comm **out);

/* Collective. Ranks with the same colour form a new communicator, ordered by key, then by rank. color < 0: *out is
 * NULL. */
PMOE_API pmoe_status pmoe_comm_split(pmoe_comm *comm, int32_t color, int32_t key, pmoe_comm **out);

/* Collective over comm. The ranks of comm that this rank shares the new communicator with, itself included, in the
 * order they shall have there: a host's list of a process group. ERR_MISMATCH with two ranks whose lists differ though
 * each names the other, or of which only one names the other. */
PMOE_API pmoe_status pmoe_comm_split_ranks(pmoe_comm *comm, const int32_t *ranks, int32_t n, pmoe_comm **out);

PMOE_API int32_t pmoe_comm_rank(const pmoe_comm *comm);
PMOE_API int32_t pmoe_comm_size(const pmoe_comm *comm);
/* "self", "threads", "callbacks" or "mpi". */
PMOE_API const char *pmoe_comm_transport(const pmoe_comm *comm);

/* Collective; waits. For hosts and tests that have no collectives of their own. */
PMOE_API pmoe_status pmoe_comm_barrier(pmoe_comm *comm);
PMOE_API pmoe_status pmoe_comm_allgather(pmoe_comm *comm, const void *src, void *dst, size_t bytes_each);
/* Sum in rank order, so that every run and every rank gets the same bits (with callbacks: what the host's sum gives).
 * dtype PMOE_F32 or PMOE_BF16 (added in float32, rounded once). */
PMOE_API pmoe_status pmoe_comm_allreduce(pmoe_comm *comm, void *inout, int64_t n, pmoe_dtype dtype);

/* Not collective. Makes the pending and later collectives of every peer fail with this reason. */
PMOE_API void pmoe_comm_abort(pmoe_comm *comm, const char *why);

/* Not collective; NULL is allowed. Objects made from the communicator keep what they need of it. */
PMOE_API void pmoe_comm_destroy(pmoe_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
