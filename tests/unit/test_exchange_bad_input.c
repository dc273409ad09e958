/* Wrong arguments to the exchange, and its calls out of order: the right status, a sentence that names the argument,
 * outputs untouched, nothing leaked. */
#include "support/asserts.h"

#include <math.h>
#include <stdlib.h>

#include "support/compare.h"
#include "support/failing_alloc.h"
#include <pmoe/pmoe.h>

enum { H = 4, T = 3, K = 2, E = 3, R = 5 };

/* Three tokens, two choices each, one dropped; everything is this rank's. */
typedef struct bench {
  failing_alloc memory;
  pmoe_ctx *ctx;
  pmoe_comm *comm;
  pmoe_a2a *a2a;
  pmoe_plan *plan;
  pmoe_routing routing;
  int32_t expert[T * K];
  int64_t slot[T * K], count[E], rows[E];
  float weight[T * K], token_data[T * H], row_data[R * H], row_value[R], token_value[T * K];
  pmoe_mat tokens, owned;
} bench;

static void set_up(bench *b) {
  *b = (bench){.expert = {0, 1, 2, 0, 1, 2}, .slot = {0, 0, 0, 1, 1, -1}, .count = {2, 2, 2}, .rows = {2, 2, 1}};
  for (int i = 0; i < T * K; i++) b->weight[i] = b->slot[i] < 0 ? 0.0f : 0.5f;
  b->routing = (pmoe_routing){.size = sizeof b->routing,
                              .tokens = T,
                              .num_experts = E,
                              .top_k = K,
                              .capacity = 2,
                              .expert = b->expert,
                              .slot = b->slot,
                              .weight = b->weight,
                              .expert_count = b->count,
                              .expert_rows = b->rows};
  pmoe_allocator table = failing_alloc_table(&b->memory);
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 1;
  cfg.allocator = &table;
  assert_ok(pmoe_ctx_create(&cfg, &b->ctx));
  assert_ok(pmoe_comm_self(b->ctx, &b->comm));
  assert_ok(pmoe_a2a_create(b->ctx, b->comm, H, PMOE_F32, E, 0, NULL, &b->a2a));
  assert_ok(pmoe_plan_create(b->a2a, &b->plan));
  b->tokens = (pmoe_mat){b->token_data, PMOE_F32, T, H, H};
  b->owned = (pmoe_mat){b->row_data, PMOE_F32, R, H, H};
  test_poison(b->token_data, sizeof b->token_data);
  test_poison(b->row_data, sizeof b->row_data);
  test_poison(b->row_value, sizeof b->row_value);
  test_poison(b->token_value, sizeof b->token_value);
}

static void take_down(bench *b) {
  pmoe_plan_destroy(b->plan);
  pmoe_a2a_destroy(b->a2a);
  pmoe_comm_destroy(b->comm);
  pmoe_ctx_destroy(b->ctx);
  assert_int_equal(b->memory.held_bytes, 0);
  assert_int_equal(b->memory.held_blocks, 0);
}

static void assert_untouched(const bench *b) {
  for (int i = 0; i < T * H; i++) assert_true(isnan(b->token_data[i]));
  for (int i = 0; i < R * H; i++) assert_true(isnan(b->row_data[i]));
  for (int i = 0; i < R; i++) assert_true(isnan(b->row_value[i]));
  for (int i = 0; i < T * K; i++) assert_true(isnan(b->token_value[i]));
}

/* The right calls work: rows carry their tokens, and come back weighted. */
static void assert_still_works(bench *b) {
  for (int i = 0; i < T * H; i++) b->token_data[i] = (float)i;
  assert_ok(pmoe_plan_build(b->plan, &b->routing, NULL));
  assert_ok(pmoe_dispatch_forward(b->plan, &b->routing, &b->tokens, &b->owned, NULL));
  assert_ok(pmoe_plan_finish(b->plan, NULL));
  const int token_of_row[R] = {0, 1, 0, 2, 1};
  for (int i = 0; i < R * H; i++) assert_true(b->row_data[i] == (float)(token_of_row[i / H] * H + i % H));
  assert_ok(pmoe_combine_forward(b->plan, &b->routing, &b->owned, NULL, &b->tokens, NULL));
  assert_ok(pmoe_plan_finish(b->plan, NULL));
  for (int i = 0; i < T * H; i++) assert_true(b->token_data[i] == (i / H == 2 ? 0.5f : 1.0f) * (float)i);
}

static void test_creation(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  pmoe_a2a *a2a = NULL;
  pmoe_plan *plan = NULL;
  pmoe_a2a_config cfg = PMOE_CONFIG_INIT(pmoe_a2a_config);
  assert_refused(pmoe_a2a_create(NULL, b.comm, H, PMOE_F32, E, 0, NULL, &a2a), PMOE_ERR_ARG, "ctx");
  assert_refused(pmoe_a2a_create(b.ctx, NULL, H, PMOE_F32, E, 0, NULL, &a2a), PMOE_ERR_ARG, "ep");
  assert_refused(pmoe_a2a_create(b.ctx, b.comm, 0, PMOE_F32, E, 0, NULL, &a2a), PMOE_ERR_ARG, "hidden");
  assert_refused(pmoe_a2a_create(b.ctx, b.comm, H, PMOE_F16, E, 0, NULL, &a2a), PMOE_ERR_ARG, "dtype");
  assert_refused(pmoe_a2a_create(b.ctx, b.comm, H, (pmoe_dtype)77, E, 0, NULL, &a2a), PMOE_ERR_ARG, "dtype");
  assert_refused(pmoe_a2a_create(b.ctx, b.comm, H, PMOE_F32, 0, 0, NULL, &a2a), PMOE_ERR_ARG, "num_experts");
  assert_refused(pmoe_a2a_create(b.ctx, b.comm, H, PMOE_F32, E, -1, NULL, &a2a), PMOE_ERR_ARG, "capacity_per_expert");
  assert_refused(pmoe_a2a_create(b.ctx, b.comm, H, PMOE_F32, E, 0, NULL, NULL), PMOE_ERR_ARG, "out");
  cfg.size = 0;
  assert_refused(pmoe_a2a_create(b.ctx, b.comm, H, PMOE_F32, E, 0, &cfg, &a2a), PMOE_ERR_ARG, "size");
  for (int i = 0; i < 5; i++) {
    static const char *const word[] = {"sizing", "max_recv_rows", "max_tokens", "max_tokens", "max_recv_rows"};
    cfg = (pmoe_a2a_config)PMOE_CONFIG_INIT(pmoe_a2a_config);
    if (i == 0) cfg.sizing = (pmoe_sizing)-1;
    if (i == 1) cfg.max_recv_rows = -5;
    if (i == 2) cfg.max_tokens = -5;
    if (i >= 3) cfg.sizing = PMOE_SIZING_FIXED;
    if (i == 4) cfg.max_tokens = T;
    assert_refused(pmoe_a2a_create(b.ctx, b.comm, H, PMOE_F32, E, 0, &cfg, &a2a), PMOE_ERR_ARG, word[i]);
  }
  assert_null(a2a);
  assert_refused(pmoe_plan_create(NULL, &plan), PMOE_ERR_ARG, "a2a");
  assert_refused(pmoe_plan_create(b.a2a, NULL), PMOE_ERR_ARG, "out");
  pmoe_a2a_destroy(NULL);
  pmoe_plan_destroy(NULL);
  assert_still_works(&b);
  take_down(&b);
}

static void test_plans(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  pmoe_plan_info info = PMOE_CONFIG_INIT(pmoe_plan_info);
  info.send_rows = 9;
  assert_refused(pmoe_plan_build(NULL, &b.routing, NULL), PMOE_ERR_ARG, "plan");
  assert_status(pmoe_plan_build(b.plan, NULL, NULL), PMOE_ERR_ARG);
  assert_status(pmoe_plan_get_info(b.plan, &info), PMOE_ERR_STATE);
  for (int i = 0; i < 8; i++) {
    static const char *const word[] = {"size",        "num_experts", "tokens", "top_k",
                                       "expert_rows", "expert_rows", "tokens", "tokens"};
    pmoe_routing bad = b.routing;
    int64_t negative[E] = {2, -1, 1};
    if (i == 0) bad.size = 0;
    if (i == 1) bad.num_experts = E + 1;
    if (i == 2) bad.tokens = -1;
    if (i == 3) bad.top_k = 0;
    if (i == 4) bad.expert_rows = NULL;
    if (i == 5) bad.expert_rows = negative;
    if (i >= 6) bad.tokens = i == 6 ? INT64_MAX : INT64_MAX / K;
    assert_refused(pmoe_plan_build(b.plan, &bad, NULL), PMOE_ERR_ARG, word[i]);
  }
  assert_status(pmoe_plan_get_info(b.plan, &info), PMOE_ERR_STATE);
  assert_ok(pmoe_plan_build(b.plan, &b.routing, NULL));
  assert_refused(pmoe_plan_get_info(NULL, &info), PMOE_ERR_ARG, "plan");
  assert_status(pmoe_plan_get_info(b.plan, NULL), PMOE_ERR_ARG);
  info.size = 0;
  assert_refused(pmoe_plan_get_info(b.plan, &info), PMOE_ERR_ARG, "size");
  assert_int_equal(info.send_rows, 9);
  assert_still_works(&b);
  take_down(&b);
}

/* The four movements, with any of their arguments replaced. */
static pmoe_status move(bench *b, int which, const pmoe_routing *routing, pmoe_mat *tokens, pmoe_mat *owned,
                        float *owned_value, float *token_value) {
  if (which == 0) return pmoe_dispatch_forward(b->plan, routing, tokens, owned, NULL);
  if (which == 1) return pmoe_combine_forward(b->plan, routing, owned, NULL, tokens, NULL);
  if (which == 2) return pmoe_combine_backward(b->plan, routing, tokens, NULL, owned, owned_value, NULL);
  return pmoe_dispatch_backward(b->plan, routing, owned, owned_value, tokens, token_value, NULL);
}

static void test_movement_arguments(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  for (int which = 0; which < 4; which++)
    assert_status(move(&b, which, &b.routing, &b.tokens, &b.owned, b.row_value, b.token_value),
                  PMOE_ERR_STATE); /* no plan yet */
  assert_ok(pmoe_plan_build(b.plan, &b.routing, NULL));
  static const char *const word[] = {"dtype", "cols", "ld", "rows", "data", "rows"};
  for (int which = 0; which < 4; which++) {
    for (int how = 0; how < 6; how++)
      for (int side = 0; side < 2; side++) {
        pmoe_mat mats[2] = {b.tokens, b.owned}, *bad = &mats[side];
        if (how == 0) bad->dtype = (pmoe_dtype)9;
        if (how == 1) bad->cols = H - 1;
        if (how == 2) bad->ld = H - 1;
        if (how == 3) bad->rows++;
        if (how == 4) bad->data = NULL;
        if (how == 5) bad->rows = -1;
        assert_refused(move(&b, which, &b.routing, &mats[0], &mats[1], b.row_value, b.token_value), PMOE_ERR_ARG,
                       word[how]);
      }
    assert_status(move(&b, which, &b.routing, NULL, &b.owned, b.row_value, b.token_value), PMOE_ERR_ARG);
    assert_status(move(&b, which, &b.routing, &b.tokens, NULL, b.row_value, b.token_value), PMOE_ERR_ARG);
    assert_status(move(&b, which, NULL, &b.tokens, &b.owned, b.row_value, b.token_value), PMOE_ERR_ARG);
  }
  assert_refused(move(&b, 2, &b.routing, &b.tokens, &b.owned, NULL, NULL), PMOE_ERR_ARG, "row_weight");
  assert_refused(move(&b, 3, &b.routing, &b.tokens, &b.owned, NULL, b.token_value), PMOE_ERR_ARG, "drow_weight");
  assert_refused(move(&b, 3, &b.routing, &b.tokens, &b.owned, b.row_value, NULL), PMOE_ERR_ARG, "dweight");
  assert_untouched(&b);
  assert_still_works(&b);
  take_down(&b);
}

/* A routing that is not the one the plan was built with may not write outside the rows. */
static void test_routings_that_do_not_fit_the_plan(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  assert_ok(pmoe_plan_build(b.plan, &b.routing, NULL));
  for (int which = 0; which < 4; which++)
    for (int how = 0; how < 7; how++) {
      static const char *const word[] = {"tokens", "top_k", "expert", "expert", "slot", "expert", "slot"};
      pmoe_routing bad = b.routing;
      int32_t expert[T * K];
      int64_t slot[T * K];
      memcpy(expert, b.expert, sizeof expert);
      memcpy(slot, b.slot, sizeof slot);
      bad.expert = expert;
      bad.slot = slot;
      if (how == 0) bad.tokens = T - 1;
      if (how == 1) bad.top_k = K - 1;
      if (how == 2) expert[3] = E;
      if (how == 3) expert[3] = -2;
      if (how == 4) slot[4] = 2;
      if (how == 5) bad.expert = NULL;
      if (how == 6) bad.slot = NULL;
      assert_refused(move(&b, which, &bad, &b.tokens, &b.owned, b.row_value, b.token_value), PMOE_ERR_ARG, word[how]);
    }
  pmoe_routing bad = b.routing;
  bad.weight = NULL;
  assert_refused(move(&b, 1, &bad, &b.tokens, &b.owned, NULL, NULL), PMOE_ERR_ARG, "weight");
  assert_refused(move(&b, 2, &bad, &b.tokens, &b.owned, b.row_value, NULL), PMOE_ERR_ARG, "weight");
  assert_untouched(&b);
  assert_still_works(&b);
  take_down(&b);
}

static void test_calls_out_of_order(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  assert_refused(pmoe_plan_finish(NULL, NULL), PMOE_ERR_ARG, "plan");
  assert_status(pmoe_plan_finish(b.plan, NULL), PMOE_ERR_STATE);
  assert_ok(pmoe_plan_build(b.plan, &b.routing, NULL));
  assert_status(pmoe_plan_finish(b.plan, NULL), PMOE_ERR_STATE);
  assert_ok(move(&b, 0, &b.routing, &b.tokens, &b.owned, NULL, NULL));
  assert_status(move(&b, 0, &b.routing, &b.tokens, &b.owned, NULL, NULL), PMOE_ERR_STATE); /* one at a time */
  assert_status(pmoe_plan_build(b.plan, &b.routing, NULL), PMOE_ERR_STATE);
  assert_ok(pmoe_plan_finish(b.plan, NULL));
  assert_status(pmoe_plan_finish(b.plan, NULL), PMOE_ERR_STATE);
  assert_still_works(&b);
  assert_ok(move(&b, 0, &b.routing, &b.tokens, &b.owned, NULL, NULL));
  take_down(&b); /* with a movement under way */
}

static void test_every_allocation_may_fail(void **state) {
  (void)state;
  for (int64_t n = 1;; n++) {
    failing_alloc memory = {.fail_at = n};
    pmoe_allocator table = failing_alloc_table(&memory);
    pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
    cfg.cpu_threads = 1;
    cfg.allocator = &table;
    pmoe_ctx *ctx = NULL;
    pmoe_comm *comm = NULL;
    pmoe_a2a *a2a = NULL;
    pmoe_plan *plan = NULL;
    pmoe_status status = pmoe_ctx_create(&cfg, &ctx);
    if (status == PMOE_OK) status = pmoe_comm_self(ctx, &comm);
    if (status == PMOE_OK) status = pmoe_a2a_create(ctx, comm, H, PMOE_F32, E, 0, NULL, &a2a);
    if (status == PMOE_OK) status = pmoe_plan_create(a2a, &plan);
    pmoe_plan_destroy(plan);
    pmoe_a2a_destroy(a2a);
    pmoe_comm_destroy(comm);
    pmoe_ctx_destroy(ctx);
    assert_int_equal(memory.held_blocks, 0);
    if (memory.calls < n) {
      assert_ok(status);
      break;
    }
    assert_status(status, PMOE_ERR_NOMEM);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_creation),           cmocka_unit_test(test_plans),
      cmocka_unit_test(test_movement_arguments), cmocka_unit_test(test_routings_that_do_not_fit_the_plan),
      cmocka_unit_test(test_calls_out_of_order), cmocka_unit_test(test_every_allocation_may_fail),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
