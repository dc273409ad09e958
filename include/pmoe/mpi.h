/* Communicators from MPI. The only pmoe header that includes <mpi.h>. */
#ifndef PMOE_MPI_H
#define PMOE_MPI_H
#include <mpi.h>
#include <pmoe/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Use pmoe_comm_from_mpi. handle points to an MPI_Comm of handle_bytes bytes. */
PMOE_API pmoe_status pmoe_comm_from_mpi_handle(pmoe_ctx *ctx, const void *handle, size_t handle_bytes, pmoe_comm **out);

/* Collective over mpi_comm, which is duplicated: the host's own is borrowed for this call and keeps its traffic to
 * itself. MPI must be initialised, and not finalised before pmoe_comm_destroy. When a collective fails, MPI may still
 * be moving large messages: the call waits 0.2 s for them; if the peer is gone for good, keep the buffers of that call
 * until the process ends. ERR_UNSUPPORTED if pmoe was built without MPI. */
static inline pmoe_status pmoe_comm_from_mpi(pmoe_ctx *ctx, MPI_Comm mpi_comm, pmoe_comm **out) {
  return pmoe_comm_from_mpi_handle(ctx, &mpi_comm, sizeof mpi_comm, out);
}

#ifdef __cplusplus
}
#endif
#endif
