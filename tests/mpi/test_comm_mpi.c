/* What only MPI has: handles, messages beyond what it can count, and processes that fail. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pmoe/mpi.h>
#include <pmoe/pmoe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "a2a/transport_mpi.h"
#include "support/exchanges.h"
#include "support/ranks.h"

/* A limit far below the blocks, so that they go in many rounds; two exchanges' rounds mix. */
static void exchange_in_rounds(rank_env *env, void *arg) {
  (void)arg;
  static const size_t limits[] = {1, 7, 64, 1000, 4096};
  for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
    pmoei_mpi_set_message_limit(env->world, limits[i]);
    known_exchange a, b;
    known_exchange_make(&a, env->world, 3, "one");
    known_exchange_make(&b, env->world, 4, "one");
    float sum = 1;
    pmoe_status status = pmoei_exchange_start(env->world, &a.x);
    if (status == PMOE_OK) status = pmoei_exchange_start(env->world, &b.x);
    if (status == PMOE_OK) status = pmoe_comm_allreduce(env->world, &sum, 1, PMOE_F32);
    if (status == PMOE_OK) status = pmoei_exchange_finish(env->world, &a.x);
    if (status == PMOE_OK) status = pmoei_exchange_finish(env->world, &b.x);
    bool right = known_exchange_is_right(&a) && known_exchange_is_right(&b) && sum == (float)env->nranks;
    known_exchange_free(&a);
    known_exchange_free(&b);
    check_ok(status);
    check(right);
  }
}

static void test_rounds(void **state) {
  (void)state;
  for (int32_t n = 1; n <= 4; n++) run_ranks(n, exchange_in_rounds, NULL);
}

/* Sizes that disagree beyond the first round. */
static void mix_sizes_in_rounds(rank_env *env, void *arg) {
  int64_t by = *(int64_t *)arg;
  pmoei_mpi_set_message_limit(env->world, 64);
  known_exchange k;
  known_exchange_make(&k, env->world, 4, "dispatch"); /* rank 1 sends 3 rows to rank 0, rank 0 sends 5 to rank 1 */
  if (env->rank == 1) ((int64_t *)(uintptr_t)k.x.send_rows)[0] += by;
  pmoe_status status = pmoei_exchange_start(env->world, &k.x);
  if (status == PMOE_OK) status = pmoei_exchange_finish(env->world, &k.x);
  known_exchange_free(&k);
  if (env->rank == 0 || status != PMOE_OK) check_refused(status, PMOE_ERR_MISMATCH, "dispatch: rank 1 sends");
  check_status(pmoe_comm_barrier(env->world), PMOE_ERR_MISMATCH);
}

static void test_sizes_that_disagree_in_rounds(void **state) {
  (void)state;
  for (int64_t by = -2; by <= 2; by++)
    if (by != 0) run_ranks(2, mix_sizes_in_rounds, &by);
}

static void handles(rank_env *env, void *arg) {
  (void)arg;
  pmoe_comm *comm = NULL;
  MPI_Comm world = MPI_COMM_WORLD, null = MPI_COMM_NULL;
  check_refused(pmoe_comm_from_mpi_handle(NULL, &world, sizeof world, &comm), PMOE_ERR_ARG, "ctx is NULL");
  check_refused(pmoe_comm_from_mpi_handle(env->ctx, NULL, sizeof world, &comm), PMOE_ERR_ARG, "handle is NULL");
  check_refused(pmoe_comm_from_mpi_handle(env->ctx, &world, sizeof world, NULL), PMOE_ERR_ARG, "out is NULL");
  check_refused(pmoe_comm_from_mpi_handle(env->ctx, &world, 3, &comm), PMOE_ERR_ARG, "handle_bytes is 3");
  check_refused(pmoe_comm_from_mpi(env->ctx, null, &comm), PMOE_ERR_ARG, "MPI_COMM_NULL");
  check(comm == NULL);
  /* The host's communicator may end before ours. */
  MPI_Comm own;
  MPI_Comm_dup(MPI_COMM_SELF, &own);
  check_ok(pmoe_comm_from_mpi(env->ctx, own, &comm));
  MPI_Comm_free(&own);
  check_ok(pmoe_comm_barrier(comm));
  check(strcmp(pmoe_comm_transport(comm), "mpi") == 0);
  pmoe_comm_destroy(comm);
}

static void test_handles(void **state) {
  (void)state;
  run_ranks(2, handles, NULL);
}

static void intercommunicator(rank_env *env, void *arg) {
  (void)arg;
  MPI_Comm half, inter;
  MPI_Comm_split(MPI_COMM_WORLD, env->rank < 2 ? env->rank : MPI_UNDEFINED, 0, &half);
  if (half == MPI_COMM_NULL) return;
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - env->rank, 0, &inter);
  pmoe_comm *comm = NULL;
  pmoe_status status = pmoe_comm_from_mpi(env->ctx, inter, &comm);
  char why[256];
  snprintf(why, sizeof why, "%s", pmoe_last_error());
  MPI_Comm_free(&inter);
  MPI_Comm_free(&half);
  check_status(status, PMOE_ERR_ARG);
  check(strstr(why, "intercommunicator"));
}

static void test_intercommunicator(void **state) {
  (void)state;
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  run_ranks(size, intercommunicator, NULL);
}

/* One rank has no memory for its communicator: none gets one, and the next attempt is as good as any. */
static void connect_without_memory(rank_env *env, void *arg) {
  (void)arg;
  pmoe_comm *comm = NULL;
  if (env->rank == 0) env->memory->fail_at = env->memory->calls + 1;
  pmoe_status status = pmoe_comm_from_mpi(env->ctx, MPI_COMM_WORLD, &comm);
  check_status(status, env->rank == 0 ? PMOE_ERR_NOMEM : PMOE_ERR_COMM);
  check(comm == NULL);
  check_ok(pmoe_comm_from_mpi(env->ctx, MPI_COMM_WORLD, &comm));
  check_ok(pmoe_comm_barrier(comm));
  pmoe_comm_destroy(comm);
}

static void test_connect_without_memory(void **state) {
  (void)state;
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  run_ranks(size, connect_without_memory, NULL);
}

/* Large messages are still under way when a rank fails; then work goes on with another communicator. */
static void fail_with_large_messages(rank_env *env, void *arg) {
  (void)arg;
  enum { BYTES = 8 << 20 };
  int32_t n = env->nranks;
  pmoe_comm *other = NULL;
  check_ok(pmoe_comm_split(env->world, 0, 0, &other));
  char *send = calloc((size_t)n, BYTES), *recv = calloc((size_t)n, BYTES);
  int64_t *lists = calloc(2 * (size_t)n, sizeof *lists);
  for (int32_t p = 0; p < n; p++) {
    lists[p] = p;
    lists[n + p] = 1;
  }
  pmoei_exchange x = {.what = "large",
                      .num_parts = 1,
                      .part = {{send, recv, BYTES}},
                      .send_first = lists,
                      .recv_first = lists,
                      .send_rows = lists + n,
                      .recv_rows = lists + n};
  pmoe_status status = pmoe_comm_barrier(env->world);
  if (status == PMOE_OK && env->rank == 0) pmoe_comm_abort(env->world, "it met an error");
  else if (status == PMOE_OK) status = pmoei_exchange_start(env->world, &x);
  if (status == PMOE_OK && env->rank > 0) status = pmoei_exchange_finish(env->world, &x);
  free(send);
  free(recv);
  free(lists);
  if (env->rank > 0) check_refused(status, PMOE_ERR_COMM, "rank 0 failed: it gave up: it met an error");
  for (int i = 0; i < 5; i++) {
    pmoe_comm *part = NULL;
    float value = 1;
    check_ok(pmoe_comm_split(other, 0, 0, &part));
    check_ok(pmoe_comm_allreduce(part, &value, 1, PMOE_F32));
    check(value == (float)n);
    pmoe_comm_destroy(part);
  }
  pmoe_comm_destroy(other);
}

static void test_fail_with_large_messages(void **state) {
  (void)state;
  run_ranks(2, fail_with_large_messages, NULL);
  run_ranks(4, fail_with_large_messages, NULL);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_rounds),
      cmocka_unit_test(test_sizes_that_disagree_in_rounds),
      cmocka_unit_test(test_handles),
      cmocka_unit_test(test_intercommunicator),
      cmocka_unit_test(test_connect_without_memory),
      cmocka_unit_test(test_fail_with_large_messages),
  };
  ranks_begin(&argc, &argv);
  return ranks_end(cmocka_run_group_tests(tests, NULL, NULL));
}
