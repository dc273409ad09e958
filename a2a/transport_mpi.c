/* Ranks that are MPI processes. An exchange is one message for each array and pair of ranks: unlike a collective of
 * MPI's, this can be waited for with a time-out that names the missing ranks, tells another collective by its tag and
 * another size by its count, and can be given up. What is too large for one message goes in rounds. Notices about
 * failures travel on a communicator of their own. Length: one protocol, and every part of it bears on how it fails. */
#include "a2a/transport_mpi.h"

#include <mpi.h>
#include <pmoe/mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/arena.h"

enum { SLOTS = PMOEI_MAX_EXCHANGES + 1, RECV = 0, SEND = 1 };

static const size_t message_limit = (size_t)1 << 30; /* MPI counts in int */
/* A rank that waits looks again at once, after this time lets others have its core, and at last sleeps between its
 * looks. */
static const uint64_t spin_ns = 50000u, yield_ns = 5000000u;
static const uint64_t listen_ns = 200000u;   /* between looks for notices */
static const uint64_t grace_ns = 50000000u;  /* for messages that were sent before a failure, and are overtaken by it */
static const uint64_t drain_ns = 200000000u; /* at most, for messages that are under way when a rank gives up */

typedef struct slot {
  bool used;
  MPI_Request *requests; /* [part][RECV or SEND][nranks - 1] */
  int64_t round, rounds;
} slot;

typedef enum notice_kind { NOTICE_HERE, NOTICE_FAILED } notice_kind;

typedef struct notice {
  int32_t kind, status;
  char what[PMOEI_WHAT_BYTES]; /* HERE: the collective that the sender is in */
  char why[512];               /* FAILED: TIMEOUT and MISMATCH: every rank's sentence; else why the sender failed */
} notice;

typedef struct outbox {
  notice text;
  bool sent;
  MPI_Request *requests; /* [nranks] */
} outbox;

typedef struct mpi_state {
  MPI_Comm data, side;
  size_t message_limit;
  int32_t num_requests; /* of a slot */
  slot slots[SLOTS];
  int *indices; /* [num_requests], as statuses: what MPI_Testsome tells */
  MPI_Status *statuses;
  outbox here, failed;
  notice *heard;         /* [nranks] the last notice of each; what[0] == 0: none */
  int32_t heard_failure; /* rank, or -1 */
  uint64_t heard_at;     /* when */
  uint64_t listened;     /* when it last looked for notices */
} mpi_state;

void pmoei_mpi_set_message_limit(pmoe_comm *comm, size_t bytes) { ((mpi_state *)comm->state)->message_limit = bytes; }

static pmoe_status mpi_error(const char *what, int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return pmoei_error(PMOE_ERR_COMM, "%s: MPI: %s", what, text);
}

static void rest(uint64_t idle_ns) {
  if (idle_ns < spin_ns) return;
  if (idle_ns < yield_ns) sched_yield();
  else nanosleep(&(struct timespec){0, 50000}, NULL);
}

/* ---- notices ---- */

static void say(pmoe_comm *comm, outbox *box, notice_kind kind, pmoe_status status, const char *what, const char *why) {
  mpi_state *state = comm->state;
  if (box->sent) return;
  box->sent = true;
  box->text = (notice){.kind = kind, .status = status};
  snprintf(box->text.what, sizeof box->text.what, "%s", what);
  snprintf(box->text.why, sizeof box->text.why, "%s", why);
  for (int32_t p = 0; p < comm->nranks; p++)
    if (p != comm->rank) MPI_Isend(&box->text, sizeof box->text, MPI_BYTE, p, 0, state->side, &box->requests[p]);
}

static void listen(pmoe_comm *comm) {
  mpi_state *state = comm->state;
  for (int32_t silent = 0; silent < 2;) { /* twice: a probe that finds nothing may only then look at what has come */
    int there = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, 0, state->side, &there, &status) != MPI_SUCCESS) return;
    silent = there ? 0 : silent + 1;
    if (!there) continue;
    int32_t from = status.MPI_SOURCE;
    notice *heard = &state->heard[from];
    if (MPI_Recv(heard, sizeof *heard, MPI_BYTE, from, 0, state->side, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
    if (heard->kind != NOTICE_FAILED || state->heard_failure >= 0) continue;
    state->heard_failure = from;
    state->heard_at = pmoei_now_ns();
  }
}

/* ERR_COMM, TIMEOUT or MISMATCH if a peer has sent such a notice. */
static pmoe_status heard_failure(pmoe_comm *comm, const char *what, uint64_t now) {
  mpi_state *state = comm->state;
  if (now - state->listened >= listen_ns) {
    listen(comm);
    state->listened = now;
  }
  if (state->heard_failure < 0) return PMOE_OK;
  const notice *heard = &state->heard[state->heard_failure];
  if (heard->status == PMOE_ERR_TIMEOUT || heard->status == PMOE_ERR_MISMATCH)
    return pmoei_error((pmoe_status)heard->status, "%s", heard->why);
  return pmoei_error(PMOE_ERR_COMM, "%s: rank %d failed: %s", what, state->heard_failure, heard->why);
}

/* ---- messages ---- */

typedef struct message {
  const pmoei_part *part;
  int32_t direction, peer;
  int64_t first;
  size_t bytes; /* in all rounds */
} message;

/* The message of request `index`. Peers come in an order that spreads the load. */
static message message_at(const pmoe_comm *comm, const pmoei_exchange *x, int32_t index) {
  int32_t others = comm->nranks - 1, distance = index % others + 1, direction = index / others % 2;
  message m = {.part = &x->part[index / others / 2], .direction = direction};
  m.peer = (comm->rank + (direction == SEND ? distance : comm->nranks - distance)) % comm->nranks;
  m.first = direction == SEND ? x->send_first[m.peer] : x->recv_first[m.peer];
  m.bytes = (size_t)(direction == SEND ? x->send_rows : x->recv_rows)[m.peer] * m.part->row_bytes;
  return m;
}

static size_t round_bytes(const mpi_state *state, const slot *s, const message *m) {
  size_t before = (size_t)s->round * state->message_limit;
  if (m->bytes <= before) return 0;
  return m->bytes - before < state->message_limit ? m->bytes - before : state->message_limit;
}

/* Any text of a collective's name within the tags that every MPI has. */
static int tag_of(const char *what) {
  uint32_t hash = 2166136261u;
  for (; *what; what++) hash = (hash ^ (unsigned char)*what) * 16777619u;
  return (int)((hash ^ (hash >> 15)) & 0x7fffu);
}

static int32_t used_requests(const pmoe_comm *comm, const pmoei_exchange *x) {
  return x->num_parts * 2 * (comm->nranks - 1);
}

/* Receives take any tag: messages of a pair arrive in the order of sending, so a wrong tag is a wrong collective. In
 * the first round each pair sends a message for the first array even if no row goes, so that both sides see what the
 * other expects. */
static pmoe_status post_round(pmoe_comm *comm, const pmoei_exchange *x, slot *s) {
  mpi_state *state = comm->state;
  int tag = tag_of(x->what);
  for (int32_t i = 0; i < used_requests(comm, x); i++) {
    message m = message_at(comm, x, i);
    size_t bytes = round_bytes(state, s, &m);
    if (bytes == 0 && (s->round > 0 || m.part != &x->part[0])) continue;
    size_t offset = (size_t)m.first * m.part->row_bytes + (size_t)s->round * state->message_limit;
    int code;
    if (m.direction == RECV)
      code = MPI_Irecv(bytes ? (char *)m.part->recv + offset : NULL, (int)bytes, MPI_BYTE, m.peer, MPI_ANY_TAG,
                       state->data, &s->requests[i]);
    else
      code = MPI_Isend(bytes ? (const char *)m.part->send + offset : NULL, (int)bytes, MPI_BYTE, m.peer, tag,
                       state->data, &s->requests[i]);
    if (code != MPI_SUCCESS) return mpi_error(x->what, code);
  }
  return PMOE_OK;
}

/* ---- failing ---- */

static bool is_open(const mpi_state *state, const slot *s) {
  for (int32_t i = 0; i < state->num_requests; i++)
    if (s->requests[i] != MPI_REQUEST_NULL) return true;
  return false;
}

/* Takes receives back that no message has come for, and gives messages that are under way a moment to end, so that the
 * caller may soon do with its buffers what it wants. */
static void drain(pmoe_comm *comm) {
  mpi_state *state = comm->state;
  uint64_t start = pmoei_now_ns();
  for (int32_t k = 0; k < SLOTS; k++) {
    slot *s = &state->slots[k];
    for (int32_t i = 0; i < state->num_requests; i++)
      if (i / (comm->nranks - 1) % 2 == RECV && s->requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&s->requests[i]);
    for (uint64_t waited = 0; is_open(state, s) && waited < drain_ns; waited = pmoei_now_ns() - start) {
      int done = 0;
      MPI_Testsome(state->num_requests, s->requests, &done, state->indices, state->statuses);
      rest(waited);
    }
  }
}

/* Ends the communicator for every rank. */
static pmoe_status give_up(pmoe_comm *comm, const char *what, pmoe_status status) {
  mpi_state *state = comm->state;
  if (state->heard_failure < 0) say(comm, &state->failed, NOTICE_FAILED, status, what, pmoe_last_error());
  drain(comm);
  return status;
}

static pmoe_status too_late(pmoe_comm *comm, const pmoei_exchange *x, const slot *s) {
  char why[512];
  int length = snprintf(why, sizeof why, "%s: after %.3f s these ranks are missing:", x->what,
                        (double)comm->ctx->timeout_ns * 1e-9);
  for (int32_t p = 0; p < comm->nranks; p++) {
    bool missing = false;
    for (int32_t i = 0; i < used_requests(comm, x); i++)
      missing |= s->requests[i] != MPI_REQUEST_NULL && message_at(comm, x, i).peer == p;
    if (missing && length < (int)sizeof why - 16)
      length += snprintf(why + length, sizeof why - (size_t)length, " %d", p);
  }
  return pmoei_error(PMOE_ERR_TIMEOUT, "%s", why);
}

/* A message of another collective came from `peer`. It sees the same of this rank, so each tells its own collective's
 * name. */
static pmoe_status other_collective(pmoe_comm *comm, const char *what, int32_t peer) {
  mpi_state *state = comm->state;
  say(comm, &state->here, NOTICE_HERE, PMOE_OK, what, "");
  uint64_t start = pmoei_now_ns(), waited = 0;
  while (state->heard[peer].what[0] == 0 && waited < comm->ctx->timeout_ns) {
    PMOEI_TRY(heard_failure(comm, what, start + waited));
    rest(waited);
    waited = pmoei_now_ns() - start;
  }
  const char *theirs = state->heard[peer].what;
  return pmoei_error(PMOE_ERR_MISMATCH, "rank %d is in %s, but rank %d is in %s", comm->rank, what, peer,
                     theirs[0] ? theirs : "another collective");
}

static pmoe_status check_message(pmoe_comm *comm, const pmoei_exchange *x, const slot *s, int32_t index,
                                 MPI_Status *status, int code) {
  message m = message_at(comm, x, index);
  int class = MPI_SUCCESS;
  if (code != MPI_SUCCESS) MPI_Error_class(code, &class);
  bool truncated = class == MPI_ERR_TRUNCATE;
  if (code != MPI_SUCCESS && !truncated) return mpi_error(x->what, code);
  if (m.direction == SEND) return PMOE_OK;
  if (status->MPI_TAG != tag_of(x->what)) return other_collective(comm, x->what, m.peer);
  size_t expected = round_bytes(comm->state, s, &m);
  int count = 0;
  MPI_Get_count(status, MPI_BYTE, &count);
  if (truncated || (size_t)count != expected)
    return pmoei_error(PMOE_ERR_MISMATCH, "%s: rank %d sends %s bytes to rank %d than the %zu that it expects", x->what,
                       m.peer, truncated ? "more" : "fewer", comm->rank, expected);
  return PMOE_OK;
}

static pmoe_status wait_round(pmoe_comm *comm, const pmoei_exchange *x, slot *s) {
  mpi_state *state = comm->state;
  uint64_t start = pmoei_now_ns(), last = start;
  for (;;) {
    int done = 0;
    int result = MPI_Testsome(used_requests(comm, x), s->requests, &done, state->indices, state->statuses);
    if (result != MPI_SUCCESS && result != MPI_ERR_IN_STATUS) return mpi_error(x->what, result);
    if (done == MPI_UNDEFINED) return PMOE_OK; /* none was left */
    for (int i = 0; i < done; i++) {
      int code = result == MPI_ERR_IN_STATUS ? state->statuses[i].MPI_ERROR : MPI_SUCCESS;
      PMOEI_TRY(check_message(comm, x, s, state->indices[i], &state->statuses[i], code));
    }
    uint64_t now = pmoei_now_ns();
    if (done > 0) last = now;
    if (done > 0) continue;
    /* The peer may have finished this exchange before it failed in a later one. */
    pmoe_status failure = heard_failure(comm, x->what, now);
    if (failure != PMOE_OK && pmoei_now_ns() - state->heard_at >= grace_ns) return failure;
    if (now - start >= comm->ctx->timeout_ns) return too_late(comm, x, s);
    rest(now - last);
  }
}

/* ---- the transport ---- */

static int64_t count_rounds(const pmoe_comm *comm, const pmoei_exchange *x) {
  const mpi_state *state = comm->state;
  int64_t rounds = 1;
  for (int32_t i = 0; i < used_requests(comm, x); i++) {
    size_t bytes = message_at(comm, x, i).bytes;
    int64_t needed = (int64_t)(bytes / state->message_limit + (bytes % state->message_limit != 0));
    if (needed > rounds) rounds = needed;
  }
  return rounds;
}

static pmoe_status mpi_exchange_start(pmoe_comm *comm, pmoei_exchange *x) {
  mpi_state *state = comm->state;
  pmoe_status status = heard_failure(comm, x->what, pmoei_now_ns());
  if (status == PMOE_OK) status = pmoei_exchange_check(x, comm->rank, x, comm->rank);
  slot *s = state->slots;
  while (s->used) s++;
  if (status == PMOE_OK) {
    s->used = true;
    s->round = 0;
    s->rounds = count_rounds(comm, x);
    x->request = s;
    pmoei_exchange_copy(x, comm->rank, x, comm->rank); /* ahead of the messages, which would compete for the caches */
    status = post_round(comm, x, s);
  }
  return status == PMOE_OK ? PMOE_OK : give_up(comm, x->what, status);
}

static pmoe_status mpi_exchange_finish(pmoe_comm *comm, pmoei_exchange *x) {
  slot *s = x->request;
  pmoe_status status = wait_round(comm, x, s);
  while (status == PMOE_OK && ++s->round < s->rounds) {
    status = post_round(comm, x, s);
    if (status == PMOE_OK) status = wait_round(comm, x, s);
  }
  if (status != PMOE_OK) return give_up(comm, x->what, status);
  s->used = false;
  return PMOE_OK;
}

static void mpi_fail(pmoe_comm *comm, const char *why) {
  mpi_state *state = comm->state;
  say(comm, &state->failed, NOTICE_FAILED, PMOE_ERR_COMM, "", why);
  drain(comm);
}

static void finish_sending(const pmoe_comm *comm, outbox *box) {
  uint64_t start = pmoei_now_ns();
  int done = 0;
  while (!done && pmoei_now_ns() - start < drain_ns) {
    MPI_Testall(comm->nranks, box->requests, &done, MPI_STATUSES_IGNORE);
    if (!done) rest(spin_ns);
  }
}

/* MPI_Comm_free is collective in name; the standard expects it to be local, and so it is wherever ranks may end in any
 * order. After a failure late messages may still come: the communicators stay, lest a new one gets their number and
 * those messages. */
static void mpi_destroy(pmoe_comm *comm) {
  mpi_state *state = comm->state;
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized) return;
  listen(comm);
  finish_sending(comm, &state->here);
  finish_sending(comm, &state->failed);
  if (comm->failed != PMOE_OK || state->heard_failure >= 0) return;
  MPI_Comm_free(&state->data);
  MPI_Comm_free(&state->side);
}

static pmoe_status mpi_split(pmoe_comm *comm, const pmoei_subgroup *group, pmoe_comm **out);

static const pmoei_transport mpi_transport = {.name = "mpi",
                                              .allgather = pmoei_allgather_by_exchange,
                                              .exchange_start = mpi_exchange_start,
                                              .exchange_finish = mpi_exchange_finish,
                                              .allreduce = pmoei_allreduce_by_exchange,
                                              .barrier = pmoei_barrier_by_exchange,
                                              .split = mpi_split,
                                              .fail = mpi_fail,
                                              .destroy = mpi_destroy};

/* Measures (base NULL) or carves what lies behind the state. */
static void lay_out(pmoei_arena *arena, int32_t nranks, mpi_state *state) {
  mpi_state measured;
  if (!state) state = &measured;
  int32_t num_requests = PMOEI_MAX_PARTS * 2 * (nranks - 1);
  pmoei_take(arena, 1, sizeof *state);
  for (int32_t k = 0; k < SLOTS; k++) state->slots[k].requests = pmoei_take(arena, num_requests, sizeof(MPI_Request));
  state->indices = pmoei_take(arena, num_requests, sizeof *state->indices);
  state->statuses = pmoei_take(arena, num_requests, sizeof *state->statuses);
  state->here.requests = pmoei_take(arena, nranks, sizeof(MPI_Request));
  state->failed.requests = pmoei_take(arena, nranks, sizeof(MPI_Request));
  state->heard = pmoei_take(arena, nranks, sizeof *state->heard);
  state->num_requests = num_requests;
}

/* Takes the communicators over, also when it fails. */
static pmoe_status adopt(pmoe_ctx *ctx, MPI_Comm data, MPI_Comm side, pmoe_comm **out) {
  int rank = 0, nranks = 1;
  MPI_Comm_rank(data, &rank);
  MPI_Comm_size(data, &nranks);
  MPI_Comm_set_errhandler(data, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(side, MPI_ERRORS_RETURN);
  pmoei_arena measure = {NULL, 0};
  lay_out(&measure, nranks, NULL);
  pmoe_comm *comm = NULL;
  pmoe_status status = pmoei_comm_new(ctx, &mpi_transport, rank, nranks, measure.used, &comm);
  if (status != PMOE_OK) {
    MPI_Comm_free(&data);
    MPI_Comm_free(&side);
    return status;
  }
  mpi_state *state = comm->state;
  pmoei_arena carve = {(char *)state, 0};
  lay_out(&carve, nranks, state);
  for (int32_t k = 0; k < SLOTS; k++)
    for (int32_t i = 0; i < state->num_requests; i++) state->slots[k].requests[i] = MPI_REQUEST_NULL;
  for (int32_t p = 0; p < nranks; p++) state->here.requests[p] = state->failed.requests[p] = MPI_REQUEST_NULL;
  state->data = data;
  state->side = side;
  state->message_limit = message_limit;
  state->heard_failure = -1;
  *out = comm;
  return PMOE_OK;
}

/* Every rank is here, as the caller has just heard from it, so that MPI's own waiting without end does no harm. */
static pmoe_status mpi_split(pmoe_comm *comm, const pmoei_subgroup *group, pmoe_comm **out) {
  mpi_state *state = comm->state;
  int color = group->size > 0 ? group->color : MPI_UNDEFINED;
  MPI_Comm data = MPI_COMM_NULL, side = MPI_COMM_NULL;
  int code = MPI_Comm_split(state->data, color, group->key, &data);
  if (code == MPI_SUCCESS) code = MPI_Comm_split(state->side, color, group->key, &side);
  if (code != MPI_SUCCESS) return mpi_error("pmoe_comm_split", code);
  return group->size > 0 ? adopt(comm->ctx, data, side, out) : PMOE_OK;
}

static pmoe_status await(const pmoe_ctx *ctx, MPI_Request *request, int code) {
  uint64_t start = pmoei_now_ns(), waited = 0;
  int done = 0;
  while (code == MPI_SUCCESS) {
    code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
    if (done) return PMOE_OK;
    waited = pmoei_now_ns() - start;
    if (waited >= ctx->timeout_ns)
      return pmoei_error(PMOE_ERR_TIMEOUT,
                         "pmoe_comm_from_mpi: after %.3f s not every rank of the MPI communicator is there",
                         (double)ctx->timeout_ns * 1e-9);
    rest(waited);
  }
  return mpi_error("pmoe_comm_from_mpi", code);
}

static pmoe_status check_handle(const void *handle, size_t handle_bytes, MPI_Comm *out) {
  PMOEI_REQUIRE_POINTER(handle);
  PMOEI_REQUIRE(handle_bytes == sizeof *out,
                "handle_bytes is %zu; the %zu of this library's MPI_Comm were expected (another MPI?)", handle_bytes,
                sizeof *out);
  int initialized = 0, finalized = 0, inter = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (!initialized || finalized)
    return pmoei_error(PMOE_ERR_STATE, "pmoe_comm_from_mpi: MPI is not initialised, or finalised already");
  memcpy(out, handle, sizeof *out);
  PMOEI_REQUIRE(*out != MPI_COMM_NULL, "mpi_comm is MPI_COMM_NULL; a communicator was expected");
  MPI_Comm_test_inter(*out, &inter);
  PMOEI_REQUIRE(!inter, "mpi_comm is an intercommunicator; one with a single group was expected");
  return PMOE_OK;
}

/* What MPI writes to while it waits for other ranks. */
typedef struct connection {
  MPI_Comm data, side;
  MPI_Request request;
  int32_t mine, worst;
} connection;

static pmoe_status duplicate(const pmoe_ctx *ctx, MPI_Comm host, connection *c) {
  PMOEI_TRY(await(ctx, &c->request, MPI_Comm_idup(host, &c->data, &c->request)));
  return await(ctx, &c->request, MPI_Comm_idup(c->data, &c->side, &c->request));
}

/* All ranks get their communicator or none does. */
static pmoe_status connect(pmoe_ctx *ctx, MPI_Comm host, connection *c, pmoe_comm **out) {
  PMOEI_TRY(duplicate(ctx, host, c));
  pmoe_comm *comm = NULL;
  pmoe_status mine = adopt(ctx, c->data, c->side, &comm);
  char why[512];
  snprintf(why, sizeof why, "%s", pmoe_last_error());
  c->mine = mine;
  pmoe_status status =
      await(ctx, &c->request, MPI_Iallreduce(&c->mine, &c->worst, 1, MPI_INT32_T, MPI_MIN, host, &c->request));
  if (status == PMOE_OK && c->worst != PMOE_OK)
    status = pmoei_error(PMOE_ERR_COMM, "pmoe_comm_from_mpi: another rank failed: %s",
                         pmoe_status_name((pmoe_status)c->worst));
  if (mine != PMOE_OK) status = pmoei_error(mine, "%s", why);
  if (status == PMOE_OK) *out = comm;
  else pmoei_comm_release(comm);
  return status;
}

pmoe_status pmoe_comm_from_mpi_handle(pmoe_ctx *ctx, const void *handle, size_t handle_bytes, pmoe_comm **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(out);
  MPI_Comm host = MPI_COMM_NULL;
  PMOEI_TRY(check_handle(handle, handle_bytes, &host));
  connection *c = calloc(1, sizeof *c);
  if (!c) return pmoei_error(PMOE_ERR_NOMEM, "pmoe_comm_from_mpi: no memory for %zu bytes", sizeof *c);
  pmoe_status status = connect(ctx, host, c, out);
  if (status != PMOE_ERR_TIMEOUT)
    free(c); /* else MPI may still write to it; this is why it is not the context's memory */
  return status;
}
