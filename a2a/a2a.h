/* The exchange's inside: what a plan holds, and what the layer asks beyond the public interface. */
#ifndef PMOEI_A2A_H
#define PMOEI_A2A_H
#include <pmoe/a2a.h>
#include <stdbool.h>

#include "a2a/rows.h"
#include "a2a/transport.h"

enum { PMOEI_WHY_BYTES = 176 };

/* What every rank tells every other before rows move; E row counts follow. */
typedef struct pmoei_count_record {
  int64_t status; /* a pmoe_status: ranks whose arguments are wrong still come, and say so */
  int64_t layer;  /* whose rows these are: ranks may be in different layers that share the group */
  int64_t room;   /* rows that this rank can take; 0: any number */
  char why[PMOEI_WHY_BYTES];
} pmoei_count_record;

struct pmoe_a2a {
  pmoe_ctx *ctx;
  pmoe_comm *ep;
  const pmoei_rows_ops *rows_ops;
  int32_t refs; /* the creator and every plan */
  int32_t hidden, num_experts, first_expert, num_local;
  int32_t layer_id; /* 0 outside a layer */
  pmoe_dtype dtype;
  pmoe_a2a_config cfg;
  int64_t capacity; /* per expert; FIXED without max_recv_rows */
  size_t record_bytes;
  char *records;        /* [nranks] received, then this rank's own; pinned */
  char *device_records; /* the same on a device that shares its experts with others */
  bool constant;        /* every rank sends every expert `capacity` rows, padding included: no counts are exchanged */
};

typedef enum pmoei_motion { PMOEI_MOTION_NONE, PMOEI_MOTION_OUT, PMOEI_MOTION_BACK } pmoei_motion;

/* A movement between its start and pmoe_plan_finish. */
typedef struct pmoei_movement {
  pmoei_motion motion;
  pmoei_exchange exchange;
  int32_t scratch;      /* handle; -1 if none */
  pmoe_mat sent, owned; /* staging on the token side and on the owner's side */
  float *sent_value, *owned_value;
  bool direct; /* the owner's side needs no staging: its rows lie as the exchange wants them */
  pmoei_row_map map;
  pmoe_mat rows; /* OUT: the result */
  float *row_value;
  pmoei_row_sum sum; /* BACK: what makes the result */
  pmoe_mat tokens, branch;
  float *token_value;
} pmoei_movement;

struct pmoe_plan {
  pmoe_a2a *a2a;
  bool built;
  int64_t room; /* most rows that may come here; 0: any number */
  int64_t tokens, send_rows, recv_rows;
  int64_t bytes_sent, bytes_returned; /* to other ranks when rows go out, and when they come back */
  int32_t top_k;
  size_t bytes; /* of the block below */
  void *block;
  const int64_t *map_first_row;     /* first_row in data memory */
  int64_t *device_first_row;        /* that, where it is other memory */
  int64_t *first_row;               /* [E] row of the expert's slot 0 on the token side */
  int64_t *send_first, *send_count; /* [nranks] as moved, padding included */
  int64_t *recv_first, *recv_count;
  int64_t *send_real, *recv_real;   /* [nranks] without padding */
  int64_t *own_rows;                /* [E] rows from this rank, as the plan was built */
  int64_t *expert_rows;             /* [num_local] */
  pmoei_row_run *runs;              /* [num_local * nranks] from source-major to expert-major */
  pmoei_row_run *back_runs;         /* the same the other way */
  int64_t staged_send, staged_recv; /* rows of the staging buffers */
  pmoei_movement move;
};

/* Rows that one rank may send another in FIXED mode. */
int64_t pmoei_a2a_bucket(const pmoe_a2a *a2a, int32_t to);

/* pmoei_plan_settle in two: where counts are on their way to the host, work that does not need them may be enqueued in
 * between. */
pmoe_status pmoei_plan_send_counts(pmoe_plan *plan, const pmoe_routing *routing, pmoe_status mine);
pmoe_status pmoei_plan_take_counts(pmoe_plan *plan, const pmoe_routing *routing, pmoe_status mine);

/* pmoe_plan_build for a caller whose own checks came out as `mine`: takes part in the count exchange in any case, and
 * returns what all ranks can agree on: `mine` if it is an error, ERR_COMM if a peer brought one. */
pmoe_status pmoei_plan_settle(pmoe_plan *plan, const pmoe_routing *routing, pmoe_status mine);

/* Takes part in the count exchange with nothing but an error, for a caller that has no plan. Returns `mine`. */
pmoe_status pmoei_a2a_refuse(pmoe_a2a *a2a, pmoe_status mine);

/* Scratch that one movement needs at most. */
size_t pmoei_a2a_scratch_bytes(const pmoe_a2a *a2a, int64_t send_rows, int64_t recv_rows);

void pmoei_a2a_retain(pmoe_a2a *a2a);
void pmoei_a2a_release(pmoe_a2a *a2a);

#endif
