/* Communicators: what the collectives compute, on every transport. Also run under mpirun. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <pmoe/pmoe.h>
#include <stdio.h>

#include "core/dtype.h"
#include "support/exchanges.h"
#include "support/ranks.h"

static void identity(rank_env *env, void *arg) {
  (void)arg;
  check(pmoe_comm_rank(env->world) == env->rank);
  check(pmoe_comm_size(env->world) == env->nranks);
  const char *name = pmoe_comm_transport(env->world);
  check(strcmp(name, "callbacks") == 0 || strcmp(name, ranks_are_processes() ? "mpi" : "threads") == 0);
}

static void test_identity(void **state) {
  (void)state;
  run_ranks_all(identity, NULL);
}

static void gather(rank_env *env, void *arg) {
  (void)arg;
  static const size_t sizes[] = {0, 1, 7, 4096, 100003};
  for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
    size_t bytes = sizes[s];
    unsigned char *mine = malloc(bytes + 1), *all = malloc(bytes * (size_t)env->nranks + 1);
    for (size_t i = 0; i < bytes; i++) mine[i] = (unsigned char)(i * 3 + (size_t)env->rank * 50);
    all[bytes * (size_t)env->nranks] = 77;
    check_ok(pmoe_comm_allgather(env->world, bytes ? mine : NULL, bytes ? all : NULL, bytes));
    bool right = all[bytes * (size_t)env->nranks] == 77;
    for (int32_t p = 0; p < env->nranks; p++)
      for (size_t i = 0; i < bytes; i++) right &= all[(size_t)p * bytes + i] == (unsigned char)(i * 3 + (size_t)p * 50);
    free(mine);
    free(all);
    check(right);
    check_ok(pmoe_comm_barrier(env->world));
  }
}

static void test_allgather(void **state) {
  (void)state;
  run_ranks_all(gather, NULL);
}

/* Values whose float sum depends on the order of adding. */
static float summand(int32_t rank, int64_t i) {
  return (float)sin((double)(i + 1) * (rank + 1)) * powf(10.0f, (float)((rank + i) % 5));
}

static float sum_in_order(int32_t nranks, int64_t i, bool bf16) {
  float sum = bf16 ? pmoei_bf16_to_f32(pmoei_f32_to_bf16(summand(0, i))) : summand(0, i);
  for (int32_t p = 1; p < nranks; p++)
    sum += bf16 ? pmoei_bf16_to_f32(pmoei_f32_to_bf16(summand(p, i))) : summand(p, i);
  return sum;
}

/* The host sums float32 in an order of its own. */
static bool is_sum(const pmoe_comm *comm, float got, float expected) {
  bool hosts_own = strcmp(pmoe_comm_transport(comm), "callbacks") == 0;
  return memcmp(&got, &expected, sizeof got) == 0 ||
         (hosts_own && fabsf(got - expected) <= 1e-2f + 1e-5f * fabsf(expected));
}

static void reduce_floats(rank_env *env, int64_t n) {
  float *f32 = malloc((size_t)(n + 1) * sizeof *f32);
  pmoei_bf16 *bf16 = malloc((size_t)(n + 1) * sizeof *bf16);
  for (int64_t i = 0; i < n; i++) {
    f32[i] = summand(env->rank, i);
    bf16[i] = pmoei_f32_to_bf16(f32[i]);
  }
  f32[n] = 3.0f;
  bf16[n] = 5;
  check_ok(pmoe_comm_allreduce(env->world, n ? f32 : NULL, n, PMOE_F32));
  check_ok(pmoe_comm_allreduce(env->world, n ? bf16 : NULL, n, PMOE_BF16));
  bool right = f32[n] == 3.0f && bf16[n] == 5;
  for (int64_t i = 0; i < n; i++) {
    right &= is_sum(env->world, f32[i], sum_in_order(env->nranks, i, false));
    right &= bf16[i] == pmoei_f32_to_bf16(sum_in_order(env->nranks, i, true));
  }
  free(f32);
  free(bf16);
  check(right);
}

static void reduce(rank_env *env, void *arg) {
  (void)arg;
  static const int64_t sizes[] = {0, 1, 5, 1000, 9001, 50021};
  for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) reduce_floats(env, sizes[s]);
  enum { N = 3000 };
  double wide[N];
  int64_t whole[N];
  for (int64_t i = 0; i < N; i++) {
    wide[i] = summand(env->rank, i);
    whole[i] = (INT64_C(1) << 60) / (env->rank + 1) + i;
  }
  check_ok(pmoei_allreduce(env->world, "doubles", wide, N, PMOEI_SUM_F64));
  check_ok(pmoei_allreduce(env->world, "whole numbers", whole, N, PMOEI_SUM_I64));
  for (int64_t i = 0; i < N; i++) {
    double sum = summand(0, i);
    uint64_t count = (UINT64_C(1) << 60) + (uint64_t)i;
    for (int32_t p = 1; p < env->nranks; p++) {
      sum += (double)summand(p, i);
      count += (UINT64_C(1) << 60) / (uint64_t)(p + 1) + (uint64_t)i;
    }
    check(wide[i] == sum);
    check((uint64_t)whole[i] == count);
  }
}

static void test_allreduce(void **state) {
  (void)state;
  run_ranks_all(reduce, NULL);
}

/* More than one chunk, and no scratch that grows with n. */
static void reduce_much(rank_env *env, void *arg) {
  (void)arg;
  enum { N = 3 << 20 };
  float *values = malloc(N * sizeof *values);
  for (int64_t i = 0; i < N; i++) values[i] = (float)((i * 7 + env->rank) % 1000);
  pmoe_ctx_reset_peak_memory(env->ctx);
  pmoe_memory before = PMOE_CONFIG_INIT(pmoe_memory), after = before;
  check_ok(pmoe_ctx_memory(env->ctx, &before));
  pmoe_status status = pmoe_comm_allreduce(env->world, values, N, PMOE_F32);
  check_ok(pmoe_ctx_memory(env->ctx, &after));
  bool right = status == PMOE_OK;
  for (int64_t i = 0; i < N && right; i++) {
    float sum = 0;
    for (int32_t p = 0; p < env->nranks; p++) sum += (float)((i * 7 + p) % 1000);
    right = values[i] == sum;
  }
  free(values);
  check_ok(status);
  check(right);
  check(after.peak_bytes - before.peak_bytes < 8 << 20);
}

static void test_allreduce_in_chunks(void **state) {
  (void)state;
  run_ranks(3, reduce_much, NULL);
  run_ranks(2, reduce_much, NULL);
}

static void exchange_in_turn(rank_env *env, void *arg) {
  (void)arg;
  for (int32_t seed = 0; seed < 6; seed++) {
    known_exchange k;
    known_exchange_make(&k, env->world, seed, "an exchange");
    pmoe_status status = pmoei_exchange_start(env->world, &k.x);
    if (status == PMOE_OK) status = pmoei_exchange_finish(env->world, &k.x);
    bool right = known_exchange_is_right(&k);
    known_exchange_free(&k);
    check_ok(status);
    check(right);
  }
}

static void test_exchange(void **state) {
  (void)state;
  run_ranks_all(exchange_in_turn, NULL);
}

/* As many as may be, with other collectives between them; nothing that start left out may be missed. */
static void exchange_many(rank_env *env, void *arg) {
  (void)arg;
  known_exchange k[PMOEI_MAX_EXCHANGES];
  pmoe_status status = PMOE_OK;
  bool right = true;
  for (int32_t i = 0; i < PMOEI_MAX_EXCHANGES; i++) known_exchange_make(&k[i], env->world, i, i % 2 ? "odd" : "even");
  for (int32_t round = 0; round < 3; round++) {
    for (int32_t i = 0; i < PMOEI_MAX_EXCHANGES && status == PMOE_OK; i++) {
      status = pmoei_exchange_start(env->world, &k[i].x);
      if (status == PMOE_OK && i == 3) status = pmoe_comm_barrier(env->world);
    }
    float one = 1;
    if (status == PMOE_OK) right &= pmoei_exchange_start(env->world, &k[0].x) == PMOE_ERR_STATE;
    if (status == PMOE_OK) right &= pmoei_exchange_finish(env->world, &k[1].x) == PMOE_ERR_STATE;
    if (status == PMOE_OK) status = pmoe_comm_allreduce(env->world, &one, 1, PMOE_F32);
    right &= one == (float)env->nranks;
    for (int32_t i = 0; i < PMOEI_MAX_EXCHANGES && status == PMOE_OK; i++) {
      status = pmoei_exchange_finish(env->world, &k[i].x);
      right &= known_exchange_is_right(&k[i]);
    }
  }
  for (int32_t i = 0; i < PMOEI_MAX_EXCHANGES; i++) known_exchange_free(&k[i]);
  check_ok(status);
  check(right);
}

static void test_exchanges_in_flight(void **state) {
  (void)state;
  run_ranks_all(exchange_many, NULL);
}

static void sums_to(pmoe_comm *comm, float mine, float expected) {
  check_ok(pmoe_comm_allreduce(comm, &mine, 1, PMOE_F32));
  check(mine == expected);
}

/* Odd and even ranks, in reverse; then pairs of those; the parent ends first. */
static void split(rank_env *env, void *arg) {
  (void)arg;
  pmoe_comm *half = NULL, *pair = NULL, *none = (pmoe_comm *)1;
  check_ok(pmoe_comm_split(env->world, env->rank % 2, -env->rank, &half));
  int32_t size = (env->nranks + 1 - env->rank % 2) / 2, last = env->rank % 2 + 2 * (size - 1);
  check(pmoe_comm_size(half) == size);
  check(pmoe_comm_rank(half) == (last - env->rank) / 2);
  check(strcmp(pmoe_comm_transport(half), pmoe_comm_transport(env->world)) == 0);
  float sum = 0;
  for (int32_t p = env->rank % 2; p < env->nranks; p += 2) sum += (float)p;
  sums_to(half, (float)env->rank, sum);
  check_ok(pmoe_comm_split(half, pmoe_comm_rank(half) / 2, 0, &pair));
  check(pmoe_comm_rank(pair) == pmoe_comm_rank(half) % 2);
  check_ok(pmoe_comm_split(env->world, env->rank == 0 ? 5 : -1, 0, &none));
  check(env->rank == 0 ? pmoe_comm_size(none) == 1 : none == NULL);
  pmoe_comm_destroy(half);
  if (none) sums_to(none, 2, 2);
  pmoe_comm_destroy(none);
  sums_to(pair, 1, (float)pmoe_comm_size(pair));
  sums_to(env->world, 1, (float)env->nranks);
  pmoe_comm_destroy(pair);
}

static void test_split(void **state) {
  (void)state;
  run_ranks_all(split, NULL);
}

static void split_often(rank_env *env, void *arg) {
  (void)arg;
  for (int32_t i = 0; i < 20; i++) {
    pmoe_comm *part = NULL;
    check_ok(pmoe_comm_split(env->world, (env->rank + i) % 2, i, &part));
    sums_to(part, 1, (float)pmoe_comm_size(part));
    pmoe_comm_destroy(part);
  }
}

static void test_split_again_and_again(void **state) {
  (void)state;
  run_ranks(4, split_often, NULL);
  run_ranks(2, split_often, NULL);
}

/* Two communicators' collectives mixed, in the same order on all ranks. */
static void interleave(rank_env *env, void *arg) {
  (void)arg;
  pmoe_comm *other = NULL;
  check_ok(pmoe_comm_split(env->world, 0, -env->rank, &other));
  known_exchange a, b;
  known_exchange_make(&a, env->world, 1, "one");
  known_exchange_make(&b, other, 2, "two");
  pmoe_status status = pmoei_exchange_start(env->world, &a.x);
  if (status == PMOE_OK) status = pmoei_exchange_start(other, &b.x);
  if (status == PMOE_OK) status = pmoei_exchange_finish(env->world, &a.x);
  if (status == PMOE_OK) status = pmoei_exchange_finish(other, &b.x);
  bool right = known_exchange_is_right(&a) && known_exchange_is_right(&b);
  known_exchange_free(&a);
  known_exchange_free(&b);
  check_ok(status);
  check(right);
  pmoe_comm_destroy(other);
}

static void test_two_communicators(void **state) {
  (void)state;
  run_ranks_all(interleave, NULL);
}

/* No collective allocates once it has run. */
static void repeat(rank_env *env, void *arg) {
  (void)arg;
  float values[20000] = {0};
  int64_t after_first = 0;
  for (int round = 0; round < 4; round++) {
    known_exchange k;
    known_exchange_make(&k, env->world, 2, "an exchange");
    pmoe_status status = pmoei_exchange_start(env->world, &k.x);
    if (status == PMOE_OK) status = pmoei_exchange_finish(env->world, &k.x);
    known_exchange_free(&k);
    check_ok(status);
    check_ok(pmoe_comm_allreduce(env->world, values, 20000, PMOE_F32));
    check_ok(pmoei_comm_agree(env->world, "a call", PMOE_OK));
    if (round == 1) after_first = env->memory->calls;
  }
  check(env->memory->calls == after_first);
}

static void test_collectives_do_not_allocate(void **state) {
  (void)state;
  run_ranks_all(repeat, NULL);
}

static void test_self(void **state) {
  (void)state;
  failing_alloc memory = {0};
  pmoe_allocator allocator = failing_alloc_table(&memory);
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.allocator = &allocator;
  pmoe_ctx *ctx = NULL;
  pmoe_comm *self = NULL, *part = NULL;
  assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_OK);
  assert_int_equal(pmoe_comm_self(ctx, &self), PMOE_OK);
  assert_string_equal(pmoe_comm_transport(self), "self");
  assert_int_equal(pmoe_comm_rank(self), 0);
  assert_int_equal(pmoe_comm_size(self), 1);
  float value = 2.5f, copy = 0;
  assert_int_equal(pmoe_comm_allreduce(self, &value, 1, PMOE_F32), PMOE_OK);
  assert_int_equal(pmoe_comm_allgather(self, &value, &copy, sizeof value), PMOE_OK);
  assert_int_equal(pmoe_comm_barrier(self), PMOE_OK);
  assert_true(value == 2.5f && copy == 2.5f);
  known_exchange k;
  known_exchange_make(&k, self, 1, "an exchange");
  assert_int_equal(pmoei_exchange_start(self, &k.x), PMOE_OK);
  assert_int_equal(pmoei_exchange_finish(self, &k.x), PMOE_OK);
  assert_true(known_exchange_is_right(&k));
  known_exchange_free(&k);
  assert_int_equal(pmoe_comm_split(self, 3, 0, &part), PMOE_OK);
  pmoe_ctx_destroy(ctx); /* its objects keep it alive */
  pmoe_comm_destroy(self);
  assert_int_equal(pmoe_comm_barrier(part), PMOE_OK);
  pmoe_comm_abort(part, "enough");
  assert_int_equal(pmoe_comm_barrier(part), PMOE_ERR_COMM);
  assert_non_null(strstr(pmoe_last_error(), "enough"));
  pmoe_comm_destroy(part);
  assert_int_equal(memory.held_blocks, 0);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_identity),
      cmocka_unit_test(test_allgather),
      cmocka_unit_test(test_allreduce),
      cmocka_unit_test(test_allreduce_in_chunks),
      cmocka_unit_test(test_exchange),
      cmocka_unit_test(test_exchanges_in_flight),
      cmocka_unit_test(test_split),
      cmocka_unit_test(test_split_again_and_again),
      cmocka_unit_test(test_two_communicators),
      cmocka_unit_test(test_collectives_do_not_allocate),
      cmocka_unit_test(test_self),
  };
  ranks_begin(&argc, &argv);
  return ranks_end(cmocka_run_group_tests(tests, NULL, NULL));
}
