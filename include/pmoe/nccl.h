/* Communicators from NCCL, for contexts of the CUDA back end. The only pmoe header that includes <nccl.h>. */
#ifndef PMOE_NCCL_H
#define PMOE_NCCL_H
#include <nccl.h>
#include <pmoe/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Use pmoe_comm_from_nccl. */
PMOE_API pmoe_status pmoe_comm_from_nccl_handle(pmoe_ctx *ctx, void *nccl_comm, pmoe_comm **out);

/* Not collective. nccl_comm is borrowed until pmoe_comm_destroy, and of the context's device; communicators that pmoe
 * splits off it are pmoe's own. Its traffic is pmoe's alone meanwhile: what the host itself puts on nccl_comm must be
 * ordered with pmoe's calls in the same way on every rank.
 *
 * Rows are moved on a stream of the context's. Collectives of host values (creation of layers and topologies, splits,
 * pmoe_comm_barrier, pmoe_comm_allgather) wait. A rank that fails, or that waits longer than
 * the context's time-out, ends the NCCL communicator (a borrowed one is revoked, and stays the host's to destroy): NCCL
 * offers no other way to end what is under way. Its peers learn of it from NCCL or by their own time-out.
 * ERR_UNSUPPORTED if pmoe was built without NCCL, ERR_ARG for a context of the CPU back end or another device. */
static inline pmoe_status pmoe_comm_from_nccl(pmoe_ctx *ctx, ncclComm_t nccl_comm, pmoe_comm **out) {
  return pmoe_comm_from_nccl_handle(ctx, (void *)nccl_comm, out);
}

#ifdef __cplusplus
}
#endif
#endif
