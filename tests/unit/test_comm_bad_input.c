/* Communicators and bad input: wrong arguments, hubs, callbacks. Also run under mpirun. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pmoe/pmoe.h>
#include <string.h>

#include "a2a/transport.h"
#include "support/ranks.h"

/* Bad arguments on one rank: every rank returns, and the communicator goes on. */
static void bad_arguments(rank_env *env, void *arg) {
  (void)arg;
  pmoe_comm *w = env->world, *part = NULL;
  bool bad = env->rank == 0;
  pmoe_status expected = bad ? PMOE_ERR_ARG : PMOE_ERR_COMM;
  float x = 4, all[8] = {0};
  check_refused(pmoe_comm_allreduce(w, bad ? NULL : &x, 1, PMOE_F32), expected, "inout is NULL");
  check_refused(pmoe_comm_allreduce(w, &x, bad ? -2 : 1, PMOE_F32), expected, "n is -2");
  check_refused(pmoe_comm_allreduce(w, &x, 1, bad ? PMOE_F16 : PMOE_F32), expected, "float16");
  check_refused(pmoe_comm_allreduce(w, &x, 1, bad ? (pmoe_dtype)9 : PMOE_F32), expected, "dtype is 9");
  check_refused(pmoe_comm_allgather(w, bad ? NULL : &x, all, 4), expected, "src is NULL");
  check_refused(pmoe_comm_allgather(w, &x, bad ? NULL : all, 4), expected, "dst is NULL");
  check_refused(pmoe_comm_allgather(w, &x, all, bad ? SIZE_MAX : 4), expected, "bytes_each is");
  check_refused(pmoe_comm_split(w, 0, 0, bad ? NULL : &part), expected, "out is NULL");
  check(x == 4 && all[0] == 0 && part == NULL);
  check_ok(pmoe_comm_allreduce(w, &x, 1, PMOE_F32));
  check(x == 4.0f * (float)env->nranks);
}

static void no_communicator(rank_env *env, void *arg) {
  (void)arg;
  float x = 0;
  pmoe_comm *out = NULL;
  check_refused(pmoe_comm_barrier(NULL), PMOE_ERR_ARG, "comm is NULL");
  check_refused(pmoe_comm_allgather(NULL, &x, &x, 4), PMOE_ERR_ARG, "comm is NULL");
  check_refused(pmoe_comm_allreduce(NULL, &x, 1, PMOE_F32), PMOE_ERR_ARG, "comm is NULL");
  check_refused(pmoe_comm_split(NULL, 0, 0, &out), PMOE_ERR_ARG, "comm is NULL");
  check_refused(pmoe_comm_self(NULL, &out), PMOE_ERR_ARG, "ctx is NULL");
  check_refused(pmoe_comm_self(env->ctx, NULL), PMOE_ERR_ARG, "out is NULL");
  check(pmoe_comm_rank(NULL) == -1 && pmoe_comm_size(NULL) == 0 && strcmp(pmoe_comm_transport(NULL), "none") == 0);
  pmoe_comm_abort(NULL, "x");
  pmoe_comm_destroy(NULL);
  pmoe_hub_destroy(NULL);
  check(out == NULL);
}

static void test_bad_arguments(void **state) {
  (void)state;
  run_ranks_all(bad_arguments, NULL);
  run_ranks(1, no_communicator, NULL);
}

static void bad_hubs(rank_env *env, void *arg) {
  (void)arg;
  pmoe_hub *hub = NULL;
  pmoe_comm *a = NULL, *b = NULL;
  check_refused(pmoe_hub_create(0, &hub), PMOE_ERR_ARG, "nranks is 0");
  check_refused(pmoe_hub_create(-3, &hub), PMOE_ERR_ARG, "nranks is -3");
  check_refused(pmoe_hub_create(2, NULL), PMOE_ERR_ARG, "out is NULL");
  check(hub == NULL);
  check_ok(pmoe_hub_create(2, &hub));
  check_refused(pmoe_comm_from_hub(NULL, hub, 0, &a), PMOE_ERR_ARG, "ctx is NULL");
  check_refused(pmoe_comm_from_hub(env->ctx, NULL, 0, &a), PMOE_ERR_ARG, "hub is NULL");
  check_refused(pmoe_comm_from_hub(env->ctx, hub, 0, NULL), PMOE_ERR_ARG, "out is NULL");
  check_refused(pmoe_comm_from_hub(env->ctx, hub, 2, &a), PMOE_ERR_ARG, "rank is 2");
  check_refused(pmoe_comm_from_hub(env->ctx, hub, -1, &a), PMOE_ERR_ARG, "rank is -1");
  env->memory->fail_at = env->memory->calls + 1;
  check_status(pmoe_comm_from_hub(env->ctx, hub, 1, &a), PMOE_ERR_NOMEM);
  check_ok(pmoe_comm_from_hub(env->ctx, hub, 1, &a)); /* the place is free again */
  check_refused(pmoe_comm_from_hub(env->ctx, hub, 1, &b), PMOE_ERR_STATE, "rank is 1, which is taken");
  check(b == NULL);
  pmoe_hub_destroy(hub); /* in any order */
  pmoe_comm_destroy(a);
}

/* pmoe/mpi.h includes mpi.h, which need not be there. */
pmoe_status pmoe_comm_from_mpi_handle(pmoe_ctx *ctx, const void *handle, size_t handle_bytes, pmoe_comm **out);

static void no_mpi(rank_env *env, void *arg) {
  (void)arg;
  pmoe_comm *comm = NULL;
  int handle = 0;
  pmoe_status status = pmoe_comm_from_mpi_handle(env->ctx, &handle, 1, &comm);
  if (pmoe_has_feature("mpi")) check_refused(status, PMOE_ERR_ARG, "handle_bytes is 1");
  else check_refused(status, PMOE_ERR_UNSUPPORTED, "built without MPI");
  check(comm == NULL);
}

static void test_no_mpi(void **state) {
  (void)state;
  run_ranks(1, no_mpi, NULL);
}

static void test_bad_hubs(void **state) {
  (void)state;
  run_ranks(1, bad_hubs, NULL);
}

/* The host's functions by number: the n-th fails. */
typedef struct broken_host {
  int failing;
} broken_host;

static int broken_allgather(void *user, const void *src, void *dst, size_t bytes) {
  if (bytes) memcpy(dst, src, bytes);
  return ((broken_host *)user)->failing == 1 ? -5 : 0;
}
static int broken_alltoallv(void *user, const void *src, const size_t *send, void *dst, const size_t *recv) {
  if (send[0] && send[0] == recv[0]) memcpy(dst, src, send[0]);
  return ((broken_host *)user)->failing == 2 ? -5 : 0;
}
static int broken_allreduce(void *user, float *inout, size_t n) {
  (void)inout, (void)n;
  return ((broken_host *)user)->failing == 3 ? -5 : 0;
}
static int broken_barrier(void *user) { return ((broken_host *)user)->failing == 4 ? -5 : 0; }
static int broken_split(void *user, int32_t color, int32_t key, pmoe_comm_callbacks *out) {
  (void)color, (void)key;
  if (((broken_host *)user)->failing == 6) out->nranks = -1; /* and the rest left out */
  return ((broken_host *)user)->failing == 5 ? -5 : 0;
}

static pmoe_comm_callbacks broken_callbacks(broken_host *host) {
  pmoe_comm_callbacks c = PMOE_CONFIG_INIT(pmoe_comm_callbacks);
  c.user = host;
  c.nranks = 1;
  c.allgather = broken_allgather;
  c.alltoallv = broken_alltoallv;
  c.allreduce_f32 = broken_allreduce;
  c.barrier = broken_barrier;
  c.split = broken_split;
  return c;
}

static void bad_callbacks(rank_env *env, void *arg) {
  (void)arg;
  broken_host host = {0};
  const pmoe_comm_callbacks good = broken_callbacks(&host);
  pmoe_comm *comm = NULL, *part = NULL;
  pmoe_comm_callbacks c = good;
#define refuse(change, word)                                                                                           \
  do {                                                                                                                 \
    c = good;                                                                                                          \
    change;                                                                                                            \
    check_refused(pmoe_comm_from_callbacks(env->ctx, &c, &comm), PMOE_ERR_ARG, word);                                  \
  } while (0)
  refuse(c.nranks = 0, "nranks is 0");
  refuse(c.rank = 1, "rank is 1");
  refuse(c.rank = -1, "rank is -1");
  refuse(c.allgather = NULL, "allgather is NULL");
  refuse(c.alltoallv = NULL, "alltoallv is NULL");
  refuse(c.allreduce_f32 = NULL, "allreduce_f32 is NULL");
  refuse(c.barrier = NULL, "barrier is NULL");
  refuse(c.size = 0, "size is 0");
#undef refuse
  check_refused(pmoe_comm_from_callbacks(env->ctx, NULL, &comm), PMOE_ERR_ARG, "callbacks is NULL");
  check_refused(pmoe_comm_from_callbacks(NULL, &good, &comm), PMOE_ERR_ARG, "ctx is NULL");
  check_refused(pmoe_comm_from_callbacks(env->ctx, &good, NULL), PMOE_ERR_ARG, "out is NULL");
  check(comm == NULL);
  static const char *const words[] = {"",
                                      "allgather returned -5",
                                      "alltoallv returned -5",
                                      "allreduce_f32 returned -5",
                                      "barrier returned -5",
                                      "split returned -5",
                                      "nranks is -1"};
  for (host.failing = 1; host.failing <= 6; host.failing++) {
    check_ok(pmoe_comm_from_callbacks(env->ctx, &good, &comm));
    float x = 1;
    double y = 1;
    pmoe_status status = PMOE_OK;
    if (host.failing == 1) status = pmoe_comm_allgather(comm, &x, &x, 4);
    if (host.failing == 2) status = pmoei_allreduce(comm, "sum", &y, 1, PMOEI_SUM_F64);
    if (host.failing == 3) status = pmoe_comm_allreduce(comm, &x, 1, PMOE_F32);
    if (host.failing == 4) status = pmoe_comm_barrier(comm);
    if (host.failing >= 5) status = pmoe_comm_split(comm, 0, 0, &part);
    check_refused(status, host.failing == 6 ? PMOE_ERR_ARG : PMOE_ERR_COMM, words[host.failing]);
    pmoe_comm_destroy(comm);
  }
  c = good;
  c.split = NULL;
  check_ok(pmoe_comm_from_callbacks(env->ctx, &c, &comm));
  check_refused(pmoe_comm_split(comm, 0, 0, &part), PMOE_ERR_UNSUPPORTED, "no split");
  check(part == NULL);
  check_ok(pmoe_comm_barrier(comm));
  pmoe_comm_destroy(comm);
}

static void test_bad_callbacks(void **state) {
  (void)state;
  run_ranks(1, bad_callbacks, NULL);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bad_arguments),
      cmocka_unit_test(test_no_mpi),
      cmocka_unit_test(test_bad_hubs),
      cmocka_unit_test(test_bad_callbacks),
  };
  ranks_begin(&argc, &argv);
  return ranks_end(cmocka_run_group_tests(tests, NULL, NULL));
}
