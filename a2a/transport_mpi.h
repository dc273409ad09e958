#ifndef PMOEI_TRANSPORT_MPI_H
#define PMOEI_TRANSPORT_MPI_H
#include "a2a/transport.h"

/* The largest message that an exchange sends in one piece; the same on all ranks. */
void pmoei_mpi_set_message_limit(pmoe_comm *comm, size_t bytes);

#endif
