/* What a transport does for a communicator. One table per kind: self, threads, callbacks, MPI, NCCL. */
#ifndef PMOEI_TRANSPORT_H
#define PMOEI_TRANSPORT_H
#include <pmoe/comm.h>
#include <stdbool.h>

#include "core/ctx.h"

/* Arrays that travel together: the same rows for each, of row_bytes bytes a row. send and recv may be NULL where no row
 * is. */
typedef struct pmoei_part {
  const void *send;
  void *recv;
  size_t row_bytes;
} pmoei_part;

enum { PMOEI_MAX_PARTS = 2, PMOEI_MAX_EXCHANGES = 8, PMOEI_WHAT_BYTES = 96 };

/* Rows for every peer, this rank included. The caller keeps the struct and all its arrays in place until finish; what
 * the transport needs in between it keeps in `request`. */
typedef struct pmoei_exchange {
  const char *what; /* the collective's name in errors */
  int32_t num_parts;
  pmoei_part part[PMOEI_MAX_PARTS];
  const int64_t *send_first, *send_rows; /* [nranks] in rows from part.send */
  const int64_t *recv_first, *recv_rows; /* [nranks] in rows from part.recv */
  bool uniform; /* on every rank: the same number of rows between any two, back to back in rank order */
  void *request;
} pmoei_exchange;

typedef enum pmoei_sum { PMOEI_SUM_F32, PMOEI_SUM_BF16, PMOEI_SUM_F64, PMOEI_SUM_I64, PMOEI_SUM_F16 } pmoei_sum;

static inline pmoei_sum pmoei_sum_of(pmoe_dtype dtype) {
  return dtype == PMOE_F32 ? PMOEI_SUM_F32 : dtype == PMOE_BF16 ? PMOEI_SUM_BF16 : PMOEI_SUM_F16;
}

/* The ranks that form a new communicator with this one; size 0 when this rank joins none. */
typedef struct pmoei_subgroup {
  int32_t color, key;
  int32_t rank, size;
  const int32_t *ranks; /* [size] of the parent */
} pmoei_subgroup;

/* All are collective except fail and destroy. `what` names the collective in errors. */
typedef struct pmoei_transport {
  const char *name;
  /* Rows and sums are data memory of a device, and calls on them are enqueued on the context's stream. */
  bool on_device;
  /* Host values; waits. */
  pmoe_status (*allgather)(pmoe_comm *comm, const char *what, const void *src, void *dst, size_t bytes_each);
  /* Those of on_device only. Data memory, enqueued. */
  pmoe_status (*allgather_data)(pmoe_comm *comm, const char *what, const void *src, void *dst, size_t bytes_each);
  /* The host waits for what the context's stream holds now; a peer that does not come is an error. */
  pmoe_status (*wait)(pmoe_comm *comm, const char *what);
  /* At most PMOEI_MAX_EXCHANGES may be under way, and one more that finishes before the next starts; the others finish
   * in the order of starting. start waits for no peer where the transport can. */
  pmoe_status (*exchange_start)(pmoe_comm *comm, pmoei_exchange *exchange);
  pmoe_status (*exchange_finish)(pmoe_comm *comm, pmoei_exchange *exchange);
  /* Sum in rank order; BF16 adds in float32 and rounds once. */
  pmoe_status (*allreduce)(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type);
  pmoe_status (*barrier)(pmoe_comm *comm, const char *what);
  /* Every rank of the parent calls it; *out stays NULL for those that join no group. Agreeing on the outcome is the
   * caller's affair. */
  pmoe_status (*split)(pmoe_comm *comm, const pmoei_subgroup *group, pmoe_comm **out);
  void (*fail)(pmoe_comm *comm, const char *why); /* tell the peers; waits for none that is not there */
  void (*destroy)(pmoe_comm *comm);               /* frees `state`; never waits for long */
} pmoei_transport;

/* What a rank brings to pmoei_comm_agree. */
typedef struct pmoei_outcome {
  int32_t status;
  char what[PMOEI_WHAT_BYTES];
  char why[256];
} pmoei_outcome;

struct pmoe_comm {
  const pmoei_transport *transport;
  pmoe_ctx *ctx; /* retained */
  int32_t rank, nranks;
  int32_t refs;
  size_t bytes;       /* of this block */
  pmoe_status failed; /* not OK: every further collective returns this with `why` */
  char why[512];
  pmoei_exchange *flying[PMOEI_MAX_EXCHANGES]; /* under way, the oldest at `oldest` */
  int32_t oldest, num_flying;
  int64_t *rows;           /* [4 * nranks] for collectives that are made of an exchange */
  pmoei_outcome *outcomes; /* [nranks] */
  void *state;             /* the transport's */
};

/* state_bytes of zeroed memory come with the communicator as its `state`. */
pmoe_status pmoei_comm_new(pmoe_ctx *ctx, const pmoei_transport *transport, int32_t rank, int32_t nranks,
                           size_t state_bytes, pmoe_comm **out);
void pmoei_comm_retain(pmoe_comm *comm);
void pmoei_comm_release(pmoe_comm *comm);

/* What the rest of the library calls: they check `failed` first, and remember a failure. */
pmoe_status pmoei_allgather(pmoe_comm *comm, const char *what, const void *src, void *dst, size_t bytes_each);
pmoe_status pmoei_exchange_start(pmoe_comm *comm, pmoei_exchange *exchange);
pmoe_status pmoei_exchange_finish(pmoe_comm *comm, pmoei_exchange *exchange);
/* Data memory; those of on_device only. */
pmoe_status pmoei_allgather_data(pmoe_comm *comm, const char *what, const void *src, void *dst, size_t bytes_each);
pmoe_status pmoei_comm_wait(pmoe_comm *comm, const char *what);
/* Both in one, also while others are under way. */
pmoe_status pmoei_exchange_now(pmoe_comm *comm, pmoei_exchange *exchange);
pmoe_status pmoei_allreduce(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type);

/* Scratch that pmoei_allreduce opens at most. */
size_t pmoei_allreduce_scratch_bytes(const pmoe_comm *comm, int64_t n, pmoei_sum type);

/* This rank cannot go on inside a collective call: the peers' pending collectives return ERR_COMM with this rank and
 * reason (this thread's last error when why is NULL). Returns `status`, leaving this thread's last error as it was. */
pmoe_status pmoei_comm_fail(pmoe_comm *comm, pmoe_status status, const char *why);

/* Every rank brings the outcome of its own checks before a collective call's first exchange: all OK, or each rank with
 * an error returns its own and the others ERR_COMM with the first such rank, its error and its sentence; a rank in
 * another call: ERR_MISMATCH with both names. The communicator stays usable. `what` names the call. Collective, and
 * made even by a rank whose arguments are wrong. Allocates nothing. */
pmoe_status pmoei_comm_agree(pmoe_comm *comm, const char *what, pmoe_status mine);

/* The same before the first exchange of a step's call. Where steps are enqueued nothing can be agreed on without
 * waiting: a rank that refuses its arguments returns its error, has sent nothing, and may call again; its peers'
 * streams wait for it. */
pmoe_status pmoei_comm_agree_in_step(pmoe_comm *comm, const char *what, pmoe_status mine);

/* For transports' tables: collectives made of the transport's own exchange. */
pmoe_status pmoei_allgather_by_exchange(pmoe_comm *comm, const char *what, const void *src, void *dst,
                                        size_t bytes_each);
pmoe_status pmoei_allreduce_by_exchange(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type);
pmoe_status pmoei_barrier_by_exchange(pmoe_comm *comm, const char *what);

/* Copies what rank `from` sends to `to`, every part, between two exchanges of one process. */
void pmoei_exchange_copy(const pmoei_exchange *sender, int32_t from, const pmoei_exchange *receiver, int32_t to);
/* ERR_MISMATCH unless what rank `from` sends to `to` is what `to` expects of `from`. */
pmoe_status pmoei_exchange_check(const pmoei_exchange *sender, int32_t from, const pmoei_exchange *receiver,
                                 int32_t to);

#endif
