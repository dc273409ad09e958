/* Communicators when something goes wrong: ranks that fail, are late, disagree or have no memory. Also run under
 * mpirun. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pmoe/pmoe.h>
#include <stdio.h>
#include <time.h>

#include "support/exchanges.h"
#include "support/ranks.h"

static const uint64_t second = UINT64_C(1000000000);

static void sleep_ns(uint64_t ns) { nanosleep(&(struct timespec){(time_t)(ns / second), (long)(ns % second)}, NULL); }

/* Ranks as threads share this moment; as processes each learns the sentence that counts from the failing rank alone. */
static void expect_broken(rank_env *env, pmoe_status status, const char *word) {
  float value = 1;
  pmoe_comm *part = NULL;
  check_refused(pmoe_comm_barrier(env->world), status, word);
  check_refused(pmoe_comm_allreduce(env->world, &value, 1, PMOE_F32), status, word);
  check_refused(pmoe_comm_split(env->world, 0, 0, &part), status, word);
  check(part == NULL);
}

/* The last rank gives up while the others wait for it. */
static void abort_last(rank_env *env, void *arg) {
  (void)arg;
  check_ok(pmoe_comm_barrier(env->world));
  if (env->rank == env->nranks - 1) {
    sleep_ns(second / 20);
    pmoe_comm_abort(env->world, "the disk is full");
    expect_broken(env, PMOE_ERR_COMM, "the disk is full");
    return;
  }
  uint64_t start = pmoei_now_ns();
  char word[32];
  snprintf(word, sizeof word, "rank %d failed", env->nranks - 1);
  check_refused(pmoe_comm_barrier(env->world), PMOE_ERR_COMM, word);
  check(strstr(pmoe_last_error(), "the disk is full"));
  check(strstr(pmoe_last_error(), "pmoe_comm_barrier"));
  check(pmoei_now_ns() - start < 5 * second);
  expect_broken(env, PMOE_ERR_COMM, "the disk is full");
}

static void test_abort(void **state) {
  (void)state;
  run_ranks(2, abort_last, NULL);
  run_ranks(4, abort_last, NULL);
  run_ranks(8, abort_last, NULL);
}

/* The host's collectives report a failure of their own. */
static void abort_by_callbacks(rank_env *env, void *arg) {
  (void)arg;
  check_ok(pmoe_comm_barrier(env->world));
  if (env->rank == 0) pmoe_comm_abort(env->world, "no more");
  else check_refused(pmoe_comm_barrier(env->world), PMOE_ERR_COMM, "barrier returned 7");
  expect_broken(env, PMOE_ERR_COMM, env->rank == 0 ? "no more" : "returned 7");
}

static void test_abort_by_callbacks(void **state) {
  (void)state;
  if (ranks_are_processes()) return; /* its plain MPI calls cannot be told to stop */
  run_ranks_with(&(ranks_config){.nranks = 3, .transport = RANKS_CALLBACKS}, abort_by_callbacks, NULL);
}

/* A rank fails inside a call with an exchange under way: its error is its own, and stays this thread's last. Its rows
 * may have left already where ranks are processes; then the peers' next collective fails. */
static void fail_inside(rank_env *env, void *arg) {
  (void)arg;
  known_exchange k;
  known_exchange_make(&k, env->world, 0, "dispatch");
  pmoe_status status = pmoei_exchange_start(env->world, &k.x);
  bool mine = env->rank == 1;
  if (mine) {
    pmoei_error(PMOE_ERR_NOMEM, "scratch: 12 bytes short");
    status = pmoei_comm_fail(env->world, PMOE_ERR_NOMEM, NULL);
    if (strcmp(pmoe_last_error(), "scratch: 12 bytes short") != 0) status = PMOE_ERR_INTERNAL;
  } else if (status == PMOE_OK) {
    status = pmoei_exchange_finish(env->world, &k.x);
  }
  bool complete = status == PMOE_OK && known_exchange_is_right(&k);
  memset(k.x.part[0].recv, 1, (size_t)k.recv_total * k.x.part[0].row_bytes); /* the buffers are this rank's again */
  known_exchange_free(&k);
  if (mine) check_refused(status, PMOE_ERR_NOMEM, "12 bytes short");
  else if (!complete || !ranks_are_processes())
    check_refused(status, PMOE_ERR_COMM, "rank 1 failed: scratch: 12 bytes short");
  expect_broken(env, mine ? PMOE_ERR_NOMEM : PMOE_ERR_COMM, "12 bytes short");
}

static void test_fail_inside_a_call(void **state) {
  (void)state;
  run_ranks(2, fail_inside, NULL);
  run_ranks(4, fail_inside, NULL);
}

/* A rank fails, and its memory goes, just when the others copy from it. */
static void fail_under_copies(rank_env *env, void *arg) {
  enum { ROW = 4 << 20 };
  int32_t n = env->nranks;
  char *send = calloc((size_t)n, ROW), *recv = calloc((size_t)n, ROW);
  int64_t first[8], rows[8];
  for (int32_t p = 0; p < n; p++) {
    first[p] = p;
    rows[p] = 1;
  }
  pmoei_exchange x = {.what = "large",
                      .num_parts = 1,
                      .part = {{send, recv, ROW}},
                      .send_first = first,
                      .recv_first = first,
                      .send_rows = rows,
                      .recv_rows = rows};
  pmoe_status status = pmoei_exchange_start(env->world, &x);
  bool mine = env->rank == 1;
  if (mine) sleep_ns(*(uint64_t *)arg);
  if (mine) pmoe_comm_abort(env->world, "enough");
  else if (status == PMOE_OK) status = pmoei_exchange_finish(env->world, &x);
  free(send);
  free(recv);
  if (mine) check_ok(status);
  else if (status != PMOE_OK) check_refused(status, PMOE_ERR_COMM, "rank 1 failed: it gave up: enough");
  expect_broken(env, PMOE_ERR_COMM, "enough");
}

static void test_fail_under_copies(void **state) {
  (void)state;
  for (uint64_t ns = 0; ns < 8000000; ns += 1000000) run_ranks(3, fail_under_copies, &ns);
}

/* Ranks end their communicator early, one with an exchange under way. */
static void leave_early(rank_env *env, void *arg) {
  bool flying = *(bool *)arg;
  if (env->rank > 0) {
    pmoe_status status = pmoe_comm_barrier(env->world);
    /* who comes while rank 0's exchange is still there sees that it is no barrier */
    bool saw_it = flying && status == PMOE_ERR_MISMATCH && strstr(pmoe_last_error(), "dispatch");
    if (!saw_it) check_refused(status, PMOE_ERR_COMM, "rank 0 failed: it ended its communicator");
    return;
  }
  known_exchange k;
  known_exchange_make(&k, env->world, 0, "dispatch");
  pmoe_status status = flying ? pmoei_exchange_start(env->world, &k.x) : PMOE_OK;
  pmoe_comm_destroy(env->world);
  env->world = NULL;
  known_exchange_free(&k);
  check_ok(status);
}

static void test_leave_early(void **state) {
  (void)state;
  bool flying = true;
  run_ranks(4, leave_early, &flying);
  flying = false; /* MPI processes do not hear about this one: it is a matter of the time-out */
  if (!ranks_are_processes()) run_ranks(3, leave_early, &flying);
}

static void come_late(rank_env *env, void *arg) {
  (void)arg;
  check_ok(pmoe_comm_barrier(env->world));
  if (env->rank % 2 == 1) sleep_ns(second * 3);
  uint64_t start = pmoei_now_ns();
  float value = 1;
  pmoe_status status = pmoei_allreduce(env->world, "gradient sum", &value, 1, PMOEI_SUM_F32);
  check(env->rank % 2 == 1 || pmoei_now_ns() - start < second * 5 / 2);
  check_refused(status, PMOE_ERR_TIMEOUT, "gradient sum: after 0.300 s these ranks are missing: 1");
  if (env->nranks > 3) check(strstr(pmoe_last_error(), "missing: 1 3"));
  check(!strstr(pmoe_last_error(), "2"));
  expect_broken(env, PMOE_ERR_TIMEOUT, "gradient sum");
}

static void test_time_out(void **state) {
  (void)state;
  run_ranks_with(&(ranks_config){.nranks = 2, .timeout_ns = second * 3 / 10}, come_late, NULL);
  run_ranks_with(&(ranks_config){.nranks = 4, .timeout_ns = second * 3 / 10}, come_late, NULL);
}

/* A rank that has started an exchange and does not finish it is missed as well, by threads that wait for their buffers.
 */
static void never_finish(rank_env *env, void *arg) {
  (void)arg;
  known_exchange k;
  known_exchange_make(&k, env->world, 0, "dispatch");
  pmoe_status status = pmoei_exchange_start(env->world, &k.x);
  if (status == PMOE_OK && env->rank == 1) sleep_ns(second);
  if (status == PMOE_OK) status = pmoei_exchange_finish(env->world, &k.x);
  known_exchange_free(&k);
  check_refused(status, PMOE_ERR_TIMEOUT, "dispatch: after 0.200 s these ranks are missing: 1");
}

static void test_time_out_before_finish(void **state) {
  (void)state;
  if (ranks_are_processes()) return; /* MPI moves small messages without the peer's help */
  run_ranks_with(&(ranks_config){.nranks = 3, .timeout_ns = second / 5}, never_finish, NULL);
}

static void mix_names(rank_env *env, void *arg) {
  (void)arg;
  int32_t all[8] = {0};
  pmoe_status status = env->rank == 1
                           ? pmoei_allgather(env->world, "counts of layer 3", &env->rank, all, sizeof env->rank)
                           : pmoei_allgather(env->world, "counts of layer 2", &env->rank, all, sizeof env->rank);
  check_refused(status, PMOE_ERR_MISMATCH, "rank 1 is in counts of layer 3");
  check(strstr(pmoe_last_error(), "is in counts of layer 2"));
  expect_broken(env, PMOE_ERR_MISMATCH, "layer 3");
}

static void test_other_collective(void **state) {
  (void)state;
  run_ranks(2, mix_names, NULL);
  run_ranks(4, mix_names, NULL);
}

typedef struct wrong_size {
  int32_t rank;
  bool send;
  int64_t by;
  size_t row_bytes;
} wrong_size;

/* One rank's sizes are off by a row, or a byte in each: everybody hears of it and nothing overflows (the lists' ends
 * are guarded). */
static void mix_sizes(rank_env *env, void *arg) {
  const wrong_size *wrong = arg;
  known_exchange k;
  known_exchange_make(&k, env->world, 0, "dispatch");
  pmoe_status status;
  if (env->rank == wrong->rank) {
    int64_t *rows = (int64_t *)(uintptr_t)(wrong->send ? k.x.send_rows : k.x.recv_rows);
    rows[0] += wrong->by;
    if (wrong->row_bytes) k.x.part[1].row_bytes = wrong->row_bytes;
  }
  status = pmoei_exchange_start(env->world, &k.x);
  if (status == PMOE_OK) status = pmoei_exchange_finish(env->world, &k.x);
  known_exchange_free(&k);
  bool unaware = ranks_are_processes() && status == PMOE_OK; /* what came to this rank was right */
  if (!unaware) check_refused(status, PMOE_ERR_MISMATCH, "dispatch: rank ");
  if (!unaware) check(strstr(pmoe_last_error(), "expects"));
  expect_broken(env, PMOE_ERR_MISMATCH, "dispatch");
}

static void test_sizes_that_disagree(void **state) {
  (void)state;
  const wrong_size cases[] = {{1, true, 1, 0},   {1, true, -1, 0}, {1, false, 1, 0},
                              {1, false, -1, 0}, {1, true, 0, 3},  {0, false, 1, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    wrong_size wrong = cases[i];
    run_ranks(2, mix_sizes, &wrong);
    run_ranks(4, mix_sizes, &wrong);
  }
}

static void mix_lengths(rank_env *env, void *arg) {
  int64_t n = *(int64_t *)arg + (env->rank == 0);
  float *values = calloc((size_t)n + 1, sizeof *values);
  pmoe_status status = pmoe_comm_allreduce(env->world, values, n, PMOE_F32);
  free(values);
  check_status(status, PMOE_ERR_MISMATCH);
}

static void test_lengths_that_disagree(void **state) {
  (void)state;
  const int64_t lengths[] = {0, 1, 4096, 40000, (4 << 20) / 4};
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    int64_t n = lengths[i];
    run_ranks(2, mix_lengths, &n);
    run_ranks(3, mix_lengths, &n);
  }
}

static void agree(rank_env *env, void *arg) {
  (void)arg;
  pmoe_comm *w = env->world;
  int32_t last = env->nranks - 1;
  check_ok(pmoei_comm_agree(w, "a call", PMOE_OK));
  /* One fails. */
  pmoe_status mine = env->rank == last ? pmoei_error(PMOE_ERR_ARG, "x is 3; 4 was expected") : PMOE_OK;
  pmoe_status status = pmoei_comm_agree(w, "a call", mine);
  if (mine != PMOE_OK) check_refused(status, PMOE_ERR_ARG, "x is 3; 4 was expected");
  else check_refused(status, PMOE_ERR_COMM, "a call: rank ");
  if (mine == PMOE_OK) check(strstr(pmoe_last_error(), "failed: PMOE_ERR_ARG: x is 3; 4 was expected"));
  /* All fail, each in its own way. */
  status = pmoei_comm_agree(w, "a call",
                            pmoei_error(env->rank ? PMOE_ERR_NOMEM : PMOE_ERR_STATE, "rank %d is ill", env->rank));
  char word[32];
  snprintf(word, sizeof word, "rank %d is ill", env->rank);
  check_refused(status, env->rank ? PMOE_ERR_NOMEM : PMOE_ERR_STATE, word);
  /* The sentences are longer than what travels. */
  char longest[500];
  memset(longest, 'x', sizeof longest);
  longest[sizeof longest - 1] = 0;
  status = pmoei_comm_agree(w, longest, env->rank == 0 ? pmoei_error(PMOE_ERR_IO, "%s", longest) : PMOE_OK);
  check_status(status, env->rank == 0 ? PMOE_ERR_IO : PMOE_ERR_COMM);
  /* In different calls. */
  status = pmoei_comm_agree(w, env->rank == last ? "another call" : "a call", PMOE_OK);
  if (env->nranks > 1) check_refused(status, PMOE_ERR_MISMATCH, "rank 0 is in a call, but rank ");
  if (env->nranks > 1) check(strstr(pmoe_last_error(), "is in another call"));
  /* It stays usable throughout. */
  check_ok(pmoe_comm_barrier(w));
}

static void test_agree(void **state) {
  (void)state;
  run_ranks_all(agree, NULL);
}

/* Rank 0's n-th allocation fails, for every n: no rank gets a communicator, none leaks (the runner looks), all go on.
 */
static void split_without_memory(rank_env *env, void *arg) {
  (void)arg;
  pmoe_status status = PMOE_ERR_NOMEM;
  int32_t refused = 0;
  for (int32_t n = 1; status != PMOE_OK && n < 20; n++) {
    pmoe_comm *part = NULL;
    if (env->rank == 0) env->memory->fail_at = env->memory->calls + n;
    status = pmoe_comm_split(env->world, 0, 0, &part);
    env->memory->fail_at = 0;
    if (status == PMOE_OK) check_ok(pmoe_comm_barrier(part));
    else check_status(status, env->rank == 0 ? PMOE_ERR_NOMEM : PMOE_ERR_COMM);
    refused += status != PMOE_OK;
    check((status == PMOE_OK) == (part != NULL));
    pmoe_comm_destroy(part);
    check_ok(pmoe_comm_barrier(env->world));
  }
  check(status == PMOE_OK);
  check(refused >= 2);
}

/* A collective that finds no scratch cannot go on; its peers hear why. */
static void sum_without_memory(rank_env *env, void *arg) {
  (void)arg;
  double values[100] = {0};
  if (env->rank == 1) env->memory->fail_at = env->memory->calls + 1;
  pmoe_status status = pmoei_allreduce(env->world, "sum", values, 100, PMOEI_SUM_F64);
  if (env->rank == 1) check_status(status, PMOE_ERR_NOMEM);
  else check_refused(status, PMOE_ERR_COMM, "sum: rank 1 failed: scratch");
}

static void test_allocation_failures(void **state) {
  (void)state;
  for (int32_t n = 1; n <= 4; n++) run_ranks(n, split_without_memory, NULL);
  run_ranks_with(&(ranks_config){.nranks = 2, .transport = RANKS_CALLBACKS}, split_without_memory, NULL);
  run_ranks(2, sum_without_memory, NULL);
  run_ranks(4, sum_without_memory, NULL);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_abort),
      cmocka_unit_test(test_abort_by_callbacks),
      cmocka_unit_test(test_fail_inside_a_call),
      cmocka_unit_test(test_fail_under_copies),
      cmocka_unit_test(test_leave_early),
      cmocka_unit_test(test_time_out),
      cmocka_unit_test(test_time_out_before_finish),
      cmocka_unit_test(test_other_collective),
      cmocka_unit_test(test_sizes_that_disagree),
      cmocka_unit_test(test_lengths_that_disagree),
      cmocka_unit_test(test_agree),
      cmocka_unit_test(test_allocation_failures),
  };
  ranks_begin(&argc, &argv);
  return ranks_end(cmocka_run_group_tests(tests, NULL, NULL));
}
