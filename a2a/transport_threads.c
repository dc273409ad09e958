/* Ranks that are threads of one process. A rank publishes its exchange and goes on; to finish it waits until its peers
 * have published theirs, copies its own rows out of their buffers, and waits until they have done the same with its
 * own. Nobody ever writes into another rank's memory, and a rank that fails leaves only when no peer reads from it any
 * more. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "a2a/transport.h"

enum { POSTS = PMOEI_MAX_EXCHANGES + 1 };

/* An exchange of one rank that its peers may read. */
typedef struct post {
  const pmoei_exchange *exchange; /* NULL: free */
  uint64_t sequence;
  int32_t unread; /* ranks that have yet to copy from it, the owner included */
  bool pulled;    /* the owner has copied from all */
} post;

typedef struct member {
  bool taken, left;
  int32_t readers;     /* peers that are copying from this rank's buffers now */
  pthread_cond_t wake; /* what this rank waits for may be there */
  post posts[POSTS];
  pmoe_hub *child; /* of the split that this rank leads */
} member;

struct pmoe_hub {
  pthread_mutex_t mutex; /* guards everything below */
  int32_t refs, nranks;
  pmoe_status
      failed; /* TIMEOUT and MISMATCH: `why` is every rank's sentence; else `failed_rank` failed because of it */
  int32_t failed_rank;
  char why[512];
  member members[];
};

typedef struct thread_rank {
  pmoe_hub *hub;
  uint64_t next_sequence;
  post *theirs[]; /* [nranks] scratch of a finish: the posts with its sequence number */
} thread_rank;

static pmoe_hub *hub_of(const pmoe_comm *comm) { return ((thread_rank *)comm->state)->hub; }

static void hub_free(pmoe_hub *hub, int32_t num_conds) {
  for (int32_t p = 0; p < num_conds; p++) pthread_cond_destroy(&hub->members[p].wake);
  pthread_mutex_destroy(&hub->mutex);
  free(hub);
}

static pmoe_hub *hub_new(int32_t nranks) {
  pmoe_hub *hub = calloc(1, sizeof *hub + (size_t)nranks * sizeof hub->members[0]);
  if (!hub || pthread_mutex_init(&hub->mutex, NULL) != 0) {
    free(hub);
    return NULL;
  }
  hub->refs = 1;
  hub->nranks = nranks;
  pthread_condattr_t monotonic;
  bool attr = pthread_condattr_init(&monotonic) == 0;
  bool good = attr && pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC) == 0;
  int32_t made = 0;
  while (good && made < nranks && pthread_cond_init(&hub->members[made].wake, &monotonic) == 0) made++;
  if (attr) pthread_condattr_destroy(&monotonic);
  if (made == nranks) return hub;
  hub_free(hub, made);
  return NULL;
}

static void hub_release(pmoe_hub *hub) {
  pthread_mutex_lock(&hub->mutex);
  bool last = --hub->refs == 0;
  pthread_mutex_unlock(&hub->mutex);
  if (last) hub_free(hub, hub->nranks);
}

pmoe_status pmoe_hub_create(int32_t nranks, pmoe_hub **out) {
  PMOEI_REQUIRE_POINTER(out);
  PMOEI_REQUIRE(nranks >= 1, "nranks is %d; 1 or more was expected", nranks);
  pmoe_hub *hub = hub_new(nranks);
  if (!hub) return pmoei_error(PMOE_ERR_NOMEM, "hub: no memory for %d ranks", nranks);
  *out = hub;
  return PMOE_OK;
}

void pmoe_hub_destroy(pmoe_hub *hub) {
  if (hub) hub_release(hub);
}

/* The functions from here to the transport's own are called with the mutex held. */

static void wake_all(pmoe_hub *hub) {
  for (int32_t p = 0; p < hub->nranks; p++) pthread_cond_signal(&hub->members[p].wake);
}

static void hub_fail(pmoe_hub *hub, pmoe_status status, int32_t rank, const char *why) {
  if (hub->failed == PMOE_OK) {
    hub->failed = status;
    hub->failed_rank = rank;
    snprintf(hub->why, sizeof hub->why, "%s", why);
  }
  wake_all(hub);
}

/* After a failure: this rank's buffers become its own again. Peers that are copying from them finish that; none begins.
 */
static pmoe_status leave(pmoe_comm *comm, const char *what) {
  pmoe_hub *hub = hub_of(comm);
  member *me = &hub->members[comm->rank];
  while (me->readers > 0) pthread_cond_wait(&me->wake, &hub->mutex);
  for (int32_t i = 0; i < POSTS; i++) me->posts[i].exchange = NULL;
  if (hub->failed == PMOE_ERR_COMM)
    return pmoei_error(PMOE_ERR_COMM, "%s: rank %d failed: %s", what, hub->failed_rank, hub->why);
  return pmoei_error(hub->failed, "%s", hub->why);
}

static post *find_post(member *owner, uint64_t sequence) {
  for (int32_t i = 0; i < POSTS; i++)
    if (owner->posts[i].exchange && owner->posts[i].sequence == sequence) return &owner->posts[i];
  return NULL;
}

static bool peers_came(pmoe_hub *hub, const post *mine) {
  for (int32_t p = 0; p < hub->nranks; p++)
    if (!find_post(&hub->members[p], mine->sequence)) return false;
  return true;
}

static bool peers_read(pmoe_hub *hub, const post *mine) {
  (void)hub;
  return mine->unread == 0;
}

/* A rank that has not come, or that came and has not copied its rows yet. */
static bool is_missing(pmoe_hub *hub, const post *mine, int32_t rank) {
  const post *theirs = find_post(&hub->members[rank], mine->sequence);
  return mine->pulled ? theirs && !theirs->pulled : !theirs;
}

static void fail_late(const pmoe_comm *comm, const post *mine) {
  pmoe_hub *hub = hub_of(comm);
  char why[sizeof hub->why];
  int length = snprintf(why, sizeof why, "%s: after %.3f s these ranks are missing:", mine->exchange->what,
                        (double)comm->ctx->timeout_ns * 1e-9);
  for (int32_t p = 0; p < hub->nranks && length < (int)sizeof why - 16; p++)
    if (is_missing(hub, mine, p)) length += snprintf(why + length, sizeof why - (size_t)length, " %d", p);
  hub_fail(hub, PMOE_ERR_TIMEOUT, comm->rank, why);
}

/* A rank that ended its communicator will not come any more. */
static void fail_left(pmoe_hub *hub, const post *mine) {
  for (int32_t p = 0; p < hub->nranks; p++) {
    if (!hub->members[p].left || !is_missing(hub, mine, p)) continue;
    char why[PMOEI_WHAT_BYTES + 64];
    snprintf(why, sizeof why, "it ended its communicator before %s", mine->exchange->what);
    hub_fail(hub, PMOE_ERR_COMM, p, why);
  }
}

static struct timespec deadline_of(const pmoe_comm *comm) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  uint64_t ns = (uint64_t)t.tv_nsec + comm->ctx->timeout_ns % 1000000000u, limit = UINT64_C(1)
                                                                                   << 40; /* seconds: no overflow */
  uint64_t seconds = comm->ctx->timeout_ns / 1000000000u + ns / 1000000000u;
  t.tv_sec += (time_t)(seconds < limit ? seconds : limit);
  t.tv_nsec = (long)(ns % 1000000000u);
  return t;
}

static void wait_until(const pmoe_comm *comm, const post *mine, bool (*done)(pmoe_hub *, const post *),
                       const struct timespec *deadline) {
  pmoe_hub *hub = hub_of(comm);
  pthread_cond_t *wake = &hub->members[comm->rank].wake;
  bool late = false;
  while (hub->failed == PMOE_OK && !done(hub, mine)) {
    fail_left(hub, mine);
    if (late) fail_late(comm, mine);
    if (hub->failed == PMOE_OK) late = pthread_cond_timedwait(wake, &hub->mutex, deadline) == ETIMEDOUT;
  }
}

/* All peers' exchanges are there: do they fit mine? */
static void check_peers(pmoe_comm *comm, const post *mine) {
  pmoe_hub *hub = hub_of(comm);
  for (int32_t p = 0; p < hub->nranks && hub->failed == PMOE_OK; p++) {
    post *their_post = find_post(&hub->members[p], mine->sequence);
    const pmoei_exchange *theirs = their_post->exchange;
    ((thread_rank *)comm->state)->theirs[p] = their_post;
    if (strcmp(theirs->what, mine->exchange->what) != 0) {
      char why[sizeof hub->why];
      snprintf(why, sizeof why, "rank %d is in %s, but rank %d is in %s", comm->rank, mine->exchange->what, p,
               theirs->what);
      hub_fail(hub, PMOE_ERR_MISMATCH, comm->rank, why);
    } else if (pmoei_exchange_check(theirs, p, mine->exchange, comm->rank) != PMOE_OK ||
               pmoei_exchange_check(mine->exchange, comm->rank, theirs, p) != PMOE_OK) {
      hub_fail(hub, PMOE_ERR_MISMATCH, comm->rank, pmoe_last_error());
    }
  }
}

/* Copies without the mutex: an owner keeps a post, and the buffers, in place while it has readers. */
static void pull(pmoe_comm *comm, post *mine) {
  pmoe_hub *hub = hub_of(comm);
  post *const *theirs = ((thread_rank *)comm->state)->theirs;
  for (int32_t p = 0; p < hub->nranks; p++) hub->members[p].readers++;
  pthread_mutex_unlock(&hub->mutex);
  for (int32_t i = 0; i < hub->nranks; i++) { /* starting with itself, so that ranks do not all read from one */
    int32_t p = (comm->rank + i) % hub->nranks;
    pmoei_exchange_copy(theirs[p]->exchange, p, mine->exchange, comm->rank);
  }
  pthread_mutex_lock(&hub->mutex);
  for (int32_t p = 0; p < hub->nranks; p++) {
    hub->members[p].readers--;
    theirs[p]->unread--;
    if (theirs[p]->unread == 0 || hub->failed != PMOE_OK) pthread_cond_signal(&hub->members[p].wake);
  }
  mine->pulled = true;
}

static pmoe_status threads_exchange_start(pmoe_comm *comm, pmoei_exchange *exchange) {
  thread_rank *state = comm->state;
  pmoe_hub *hub = state->hub;
  pthread_mutex_lock(&hub->mutex);
  pmoe_status status = hub->failed == PMOE_OK ? PMOE_OK : leave(comm, exchange->what);
  for (int32_t i = 0; i < POSTS && status == PMOE_OK; i++) {
    post *slot = &hub->members[comm->rank].posts[i];
    if (slot->exchange) continue;
    *slot = (post){.exchange = exchange, .sequence = state->next_sequence++, .unread = hub->nranks};
    exchange->request = slot;
    if (peers_came(hub, slot)) wake_all(hub); /* the last to come, lest each wakes all */
    break;
  }
  pthread_mutex_unlock(&hub->mutex);
  return status;
}

static pmoe_status threads_exchange_finish(pmoe_comm *comm, pmoei_exchange *exchange) {
  pmoe_hub *hub = hub_of(comm);
  post *mine = exchange->request;
  struct timespec deadline = deadline_of(comm);
  pthread_mutex_lock(&hub->mutex);
  wait_until(comm, mine, peers_came, &deadline);
  if (hub->failed == PMOE_OK) check_peers(comm, mine);
  if (hub->failed == PMOE_OK) {
    pull(comm, mine);
    wait_until(comm, mine, peers_read, &deadline);
  }
  pmoe_status status = PMOE_OK;
  if (mine->unread == 0) mine->exchange = NULL; /* whatever failed since then, this exchange is complete */
  else status = leave(comm, exchange->what);
  pthread_mutex_unlock(&hub->mutex);
  return status;
}

static void threads_fail(pmoe_comm *comm, const char *why) {
  pmoe_hub *hub = hub_of(comm);
  pthread_mutex_lock(&hub->mutex);
  hub_fail(hub, PMOE_ERR_COMM, comm->rank, why);
  member *me = &hub->members[comm->rank];
  while (me->readers > 0) pthread_cond_wait(&me->wake, &hub->mutex);
  pthread_mutex_unlock(&hub->mutex);
}

static void threads_destroy(pmoe_comm *comm) {
  pmoe_hub *hub = hub_of(comm);
  pthread_mutex_lock(&hub->mutex);
  hub->members[comm->rank].left = true;
  wake_all(hub);
  pthread_mutex_unlock(&hub->mutex);
  hub_release(hub);
}

static pmoe_status threads_split(pmoe_comm *comm, const pmoei_subgroup *group, pmoe_comm **out);

static const pmoei_transport threads_transport = {.name = "threads",
                                                  .allgather = pmoei_allgather_by_exchange,
                                                  .exchange_start = threads_exchange_start,
                                                  .exchange_finish = threads_exchange_finish,
                                                  .allreduce = pmoei_allreduce_by_exchange,
                                                  .barrier = pmoei_barrier_by_exchange,
                                                  .split = threads_split,
                                                  .fail = threads_fail,
                                                  .destroy = threads_destroy};

static pmoe_status take_place(pmoe_hub *hub, int32_t rank) {
  pthread_mutex_lock(&hub->mutex);
  bool taken = hub->members[rank].taken;
  if (!taken) {
    hub->members[rank].taken = true;
    hub->refs++;
  }
  pthread_mutex_unlock(&hub->mutex);
  return taken
             ? pmoei_error(PMOE_ERR_STATE, "rank is %d, which is taken already; each rank of a hub is taken once", rank)
             : PMOE_OK;
}

pmoe_status pmoe_comm_from_hub(pmoe_ctx *ctx, pmoe_hub *hub, int32_t rank, pmoe_comm **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(hub);
  PMOEI_REQUIRE_POINTER(out);
  PMOEI_REQUIRE(rank >= 0 && rank < hub->nranks, "rank is %d; 0 to %d was expected", rank, hub->nranks - 1);
  PMOEI_TRY(take_place(hub, rank));
  pmoe_comm *comm = NULL;
  size_t state_bytes = sizeof(thread_rank) + (size_t)hub->nranks * sizeof(post *);
  pmoe_status status = pmoei_comm_new(ctx, &threads_transport, rank, hub->nranks, state_bytes, &comm);
  if (status != PMOE_OK) {
    pthread_mutex_lock(&hub->mutex);
    hub->members[rank].taken = false;
    pthread_mutex_unlock(&hub->mutex);
    hub_release(hub);
    return status;
  }
  ((thread_rank *)comm->state)->hub = hub;
  *out = comm;
  return PMOE_OK;
}

static void set_child(pmoe_comm *comm, pmoe_hub *child) {
  pmoe_hub *hub = hub_of(comm);
  pthread_mutex_lock(&hub->mutex);
  hub->members[comm->rank].child = child;
  pthread_mutex_unlock(&hub->mutex);
}

/* The leader's new hub, with a reference for the caller; NULL if it had no memory, or gave up. */
static pmoe_hub *get_child(pmoe_comm *comm, int32_t leader) {
  pmoe_hub *hub = hub_of(comm);
  pthread_mutex_lock(&hub->mutex);
  pmoe_hub *child = hub->members[leader].child;
  if (child) {
    pthread_mutex_lock(&child->mutex);
    child->refs++;
    pthread_mutex_unlock(&child->mutex);
  }
  pthread_mutex_unlock(&hub->mutex);
  return child;
}

static pmoe_status join_child(pmoe_comm *comm, const pmoei_subgroup *group, pmoe_comm **out) {
  pmoe_hub *child = get_child(comm, group->ranks[0]);
  if (!child) return pmoei_error(PMOE_ERR_NOMEM, "pmoe_comm_split: rank %d had no memory for the hub", group->ranks[0]);
  pmoe_status status = pmoe_comm_from_hub(comm->ctx, child, group->rank, out);
  hub_release(child);
  return status;
}

/* The first rank of each group makes its hub; the others find it after one barrier, and have joined it before the
 * other. */
static pmoe_status threads_split(pmoe_comm *comm, const pmoei_subgroup *group, pmoe_comm **out) {
  pmoe_hub *made = group->size > 0 && group->rank == 0 ? hub_new(group->size) : NULL;
  set_child(comm, made);
  pmoe_status status = pmoei_barrier_by_exchange(comm, "pmoe_comm_split"), joined = PMOE_OK;
  if (status == PMOE_OK) {
    joined = group->size > 0 ? join_child(comm, group, out) : PMOE_OK;
    status = pmoei_barrier_by_exchange(comm, "pmoe_comm_split");
  }
  set_child(comm, NULL);
  if (made) hub_release(made);
  return joined != PMOE_OK ? joined : status;
}
