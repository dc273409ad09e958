/* What a transport does for a communicator. One table per kind: self, threads, callbacks, MPI. */
#ifndef PMOEI_TRANSPORT_H
#define PMOEI_TRANSPORT_H
#include <pmoe/comm.h>
#include <stdbool.h>

#include "core/ctx.h"

/* Arrays that travel together: the same rows for each, of row_bytes bytes a row. send and recv may be NULL where no row is. */
typedef struct pmoei_part {
  const void *send;
  void *recv;
  size_t row_bytes;
} pmoei_part;

enum { PMOEI_MAX_PARTS = 2, PMOEI_MAX_EXCHANGES = 8 };

/* Rows for every peer, this rank included. The caller keeps the struct and all its arrays in place until finish; what the transport
 * needs in between it keeps in `request`. */
typedef struct pmoei_exchange {
  const char *what; /* the collective's name in errors */
  int32_t num_parts;
  pmoei_part part[PMOEI_MAX_PARTS];
  const int64_t *send_first, *send_rows; /* [nranks] in rows from part.send */
  const int64_t *recv_first, *recv_rows; /* [nranks] in rows from part.recv */
  void *request[PMOEI_MAX_PARTS];
  uint64_t sequence;
} pmoei_exchange;

typedef enum pmoei_sum { PMOEI_SUM_F32, PMOEI_SUM_BF16, PMOEI_SUM_F64, PMOEI_SUM_I64 } pmoei_sum;

/* All are collective except fail and destroy. `what` names the collective in errors. */
typedef struct pmoei_transport {
  const char *name;
  pmoe_status (*allgather)(pmoe_comm *comm, const char *what, const void *src, void *dst, size_t bytes_each);
  /* At most PMOEI_MAX_EXCHANGES may be under way; they finish in the order of starting. start waits for no peer where the transport can. */
  pmoe_status (*exchange_start)(pmoe_comm *comm, pmoei_exchange *exchange);
  pmoe_status (*exchange_finish)(pmoe_comm *comm, pmoei_exchange *exchange);
  /* Sum in rank order; BF16 adds in float32 and rounds once. */
  pmoe_status (*allreduce)(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type);
  pmoe_status (*barrier)(pmoe_comm *comm, const char *what);
  pmoe_status (*split)(pmoe_comm *comm, int32_t color, int32_t key, pmoe_comm **out);
  void (*fail)(pmoe_comm *comm, const char *why); /* tell the peers; never waits */
  void (*destroy)(pmoe_comm *comm);               /* frees `state`; never waits for long */
} pmoei_transport;

struct pmoe_comm {
  const pmoei_transport *transport;
  pmoe_ctx *ctx; /* retained */
  int32_t rank, nranks;
  int32_t refs;
  pmoe_status failed; /* not OK: every further collective returns this with `why` */
  char why[256];
  void *state; /* the transport's */
};

pmoe_status pmoei_comm_new(pmoe_ctx *ctx, const pmoei_transport *transport, int32_t rank, int32_t nranks, pmoe_comm **out);
void pmoei_comm_retain(pmoe_comm *comm);
void pmoei_comm_release(pmoe_comm *comm);

/* What the rest of the library calls: they check `failed` first, and remember a failure. */
pmoe_status pmoei_allgather(pmoe_comm *comm, const char *what, const void *src, void *dst, size_t bytes_each);
pmoe_status pmoei_exchange_start(pmoe_comm *comm, pmoei_exchange *exchange);
pmoe_status pmoei_exchange_finish(pmoe_comm *comm, pmoei_exchange *exchange);
pmoe_status pmoei_allreduce(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type);

/* This rank cannot go on inside a collective call: the peers' pending collectives return ERR_COMM with this rank and reason (this
 * thread's last error when why is NULL). Returns `status`, leaving this thread's last error as it was. */
pmoe_status pmoei_comm_fail(pmoe_comm *comm, pmoe_status status, const char *why);

/* Every rank brings the outcome of its own checks before a collective call's first exchange: all OK, or each rank with an error returns
 * its own and the others ERR_COMM with the first such rank, its error and its sentence; a rank in another call: ERR_MISMATCH with both names. The
 * communicator stays usable. `what` names the call. Collective, and made even by a rank whose arguments are wrong. */
pmoe_status pmoei_comm_agree(pmoe_comm *comm, const char *what, pmoe_status mine);

#endif
