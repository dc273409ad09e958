/* One rank goes wrong: every rank gets an error, with the reason, and none waits for the time-out. */
#include "ranks/world.h"

#include <math.h>
#include <stdlib.h>

#include "support/failing_alloc.h"
#include "support/rig.h"

enum { SOON_MS = WORLD_TIMEOUT_MS / 2 };

typedef struct setup {
  pmoe_topology *topology;
  rig r;
  rig_step s;
  pmoe_stash *stash;
} setup;

static int set_up(setup *u, world *w, const rig_spec *spec) {
  int failures = 0;
  memset(u, 0, sizeof *u);
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.ep = w->nranks;
  CHECK(failures, pmoe_topology_create(w->ctx, w->comm, &cfg, &u->topology) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  CHECK(failures, rig_create(&u->r, w->ctx, u->topology, spec) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  rig_plan plan = {
      .label = "failures", .num_ranks = w->nranks, .rank = w->rank, .training = 1, .loss_scale = 1.0, .seed = 3};
  for (int32_t i = 0; i < w->nranks; i++) plan.rank_tokens[i] = 4 + i;
  rig_step_begin(&u->r, &u->s, &plan);
  pmoe_stash_config stash = PMOE_CONFIG_INIT(pmoe_stash_config);
  stash.max_tokens = 12;
  CHECK(failures, pmoe_stash_create(u->r.layer, &stash, NULL, 0, &u->stash) == PMOE_OK, "%s", pmoe_last_error());
  return failures;
}

static void take_down(setup *u) {
  pmoe_stash_destroy(u->stash);
  rig_step_end(&u->s);
  rig_destroy(&u->r);
  pmoe_topology_destroy(u->topology);
}

static int all_nan(const pmoe_mat *mat) {
  for (int64_t i = 0; i < mat->rows * mat->ld; i++) {
    double value = test_get(mat->data, mat->dtype, i);
    if (value == value) return 0;
  }
  return 1;
}

/* A step that must work, after one that failed. */
static int step_works(setup *u) {
  int failures = 0;
  rig_zero_grads(&u->r);
  CHECK(failures, rig_forward(&u->r, u->stash, &u->s) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, rig_backward(&u->r, u->stash, &u->s, PMOE_BWD_ALL) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_layer_reduce_grads(u->r.layer, 1.0f, NULL) == PMOE_OK, "%s", pmoe_last_error());
  return failures + rig_check(&u->r, u->stash, &u->s, 1) + rig_check_grads(&u->r, 1.0, "after a failure");
}

static int wrong_argument(world *w) {
  setup u;
  rig_spec spec = rig_spec_default();
  int failures = set_up(&u, w, &spec);
  int32_t culprit = w->nranks - 1;
  pmoe_mat narrow = u.s.x;
  narrow.cols--;
  const pmoe_mat *x = w->rank == culprit ? &narrow : &u.s.x;
  uint64_t before = world_now_ms();
  pmoe_status status = pmoe_layer_forward(u.r.layer, u.stash, &u.s.step, x, &u.s.y, NULL);
  pmoe_status expected = w->rank == culprit ? PMOE_ERR_ARG : PMOE_ERR_COMM;
  CHECK(failures, status == expected, "forward gave %s", pmoe_status_name(status));
  CHECK(failures, strstr(pmoe_last_error(), "x->cols"), "\"%s\" does not say why", pmoe_last_error());
  CHECK(failures, all_nan(&u.s.y), "y was written");
  status = rig_backward(&u.r, u.stash, &u.s, PMOE_BWD_ALL);
  CHECK(failures, status == PMOE_ERR_STATE || status == PMOE_ERR_COMM, "backward gave %s", pmoe_status_name(status));
  CHECK(failures, rig_forward(&u.r, u.stash, &u.s) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_mat bf16 = u.s.dy;
  bf16.dtype = PMOE_BF16;
  const pmoe_mat *dy = w->rank == culprit ? &bf16 : &u.s.dy;
  status = pmoe_layer_backward(u.r.layer, u.stash, 1.0f, dy, &u.s.dx, PMOE_BWD_ALL, NULL);
  CHECK(failures, status == expected, "backward gave %s", pmoe_status_name(status));
  CHECK(failures, all_nan(&u.s.dx), "dx was written");
  float loss_scale = w->rank == culprit ? NAN : 1.0f;
  status = pmoe_layer_backward(u.r.layer, u.stash, loss_scale, &u.s.dy, &u.s.dx, PMOE_BWD_ALL, NULL);
  CHECK(failures, status == expected, "backward gave %s", pmoe_status_name(status));
  CHECK(failures, strstr(pmoe_last_error(), "loss_scale"), "\"%s\" does not say why", pmoe_last_error());
  CHECK(failures, all_nan(&u.s.dx), "dx was written");
  CHECK(failures, world_now_ms() - before < SOON_MS, "waited");
  failures += step_works(&u);
  take_down(&u);
  return failures;
}

static void test_an_argument_error_on_one_rank(void **state) {
  (void)state;
  world_run_all(wrong_argument, NULL);
}

static int unbound_on_one_rank(world *w) {
  setup u;
  rig_spec spec = rig_spec_default();
  int failures = set_up(&u, w, &spec);
  const pmoe_param *param = &u.r.param[1];
  if (w->rank == 0)
    CHECK(failures, pmoe_layer_bind_param(u.r.layer, 1, NULL, NULL) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_status expected = w->rank == 0 ? PMOE_ERR_STATE : PMOE_ERR_COMM;
  pmoe_status status = rig_forward(&u.r, u.stash, &u.s);
  CHECK(failures, status == expected, "forward gave %s", pmoe_status_name(status));
  CHECK(failures, strstr(pmoe_last_error(), param->name), "\"%s\" does not name it", pmoe_last_error());
  status = pmoe_layer_reduce_grads(u.r.layer, 1.0f, NULL);
  CHECK(failures, status == expected, "reduce_grads gave %s", pmoe_status_name(status));
  double sum;
  status = pmoe_layer_grad_sumsq(u.r.layer, &sum, NULL);
  CHECK(failures, status == expected, "grad_sumsq gave %s", pmoe_status_name(status));
  if (w->rank == 0)
    CHECK(failures, pmoe_layer_bind_param(u.r.layer, 1, param->data, param->grad) == PMOE_OK, "%s", pmoe_last_error());
  failures += step_works(&u);
  take_down(&u);
  return failures;
}

static void test_a_parameter_unbound_on_one_rank(void **state) {
  (void)state;
  world_run_all(unbound_on_one_rank, NULL);
}

static int configuration_differs(world *w) {
  int failures = 0;
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.ep = w->nranks;
  pmoe_topology *topology = NULL;
  CHECK(failures, pmoe_topology_create(w->ctx, w->comm, &cfg, &topology) == PMOE_OK, "%s", pmoe_last_error());
  static const char *const fields[] = {"top_k", "inner",    "capacity_factor", "aux_coef", "dtype",
                                       "mix",   "layer_id", "sizing",          "drop"};
  char other[24];
  snprintf(other, sizeof other, "rank %d", w->nranks - 1);
  for (int i = 0; i < 9 && !failures; i++) {
    rig_spec spec = rig_spec_default();
    spec.a2a.max_tokens = 9;
    spec.a2a.max_recv_rows = 99;
    if (w->rank == w->nranks - 1) {
      if (i == 0) spec.gate.top_k = 3;
      if (i == 1) spec.experts.inner = 20;
      if (i == 2) spec.gate.capacity_factor = 1.5f;
      if (i == 3) spec.gate.aux_coef = 0.2f;
      if (i == 4) spec.experts.dtype = PMOE_BF16;
      if (i == 5) spec.residual.mix = PMOE_MIX_SUM;
      if (i == 6) spec.layer_id = 4;
      if (i == 7) spec.a2a.sizing = PMOE_SIZING_FIXED;
      if (i == 8) spec.gate.drop = PMOE_DROP_PROBS;
    }
    rig r;
    pmoe_status status = rig_create(&r, w->ctx, topology, &spec);
    CHECK(failures, status == PMOE_ERR_MISMATCH, "%s: %s", fields[i], pmoe_status_name(status));
    CHECK(failures, strstr(pmoe_last_error(), fields[i]), "\"%s\" does not name %s", pmoe_last_error(), fields[i]);
    CHECK(failures, strstr(pmoe_last_error(), "rank 0") && strstr(pmoe_last_error(), other),
          "\"%s\" does not name the ranks", pmoe_last_error());
    if (status == PMOE_OK) rig_destroy(&r);
  }
  rig_spec spec = rig_spec_default();
  rig r;
  if (w->rank == 1) spec.gate.top_k = 9;
  pmoe_status status = rig_create(&r, w->ctx, topology, &spec);
  CHECK(failures, status == (w->rank == 1 ? PMOE_ERR_ARG : PMOE_ERR_COMM), "%s", pmoe_status_name(status));
  spec.gate.top_k = 2;
  CHECK(failures, rig_create(&r, w->ctx, topology, &spec) == PMOE_OK, "after the refusals: %s", pmoe_last_error());
  if (!failures) rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_configurations_that_differ_are_named(void **state) {
  (void)state;
  world_run_all(configuration_differs, NULL);
}

static int more_rows_than_room(world *w) {
  int failures = 0;
  for (int fixed = 0; fixed < 2; fixed++) {
    setup u;
    rig_spec spec = rig_spec_default();
    spec.gate.bias = 1;
    spec.a2a.sizing = fixed ? PMOE_SIZING_FIXED : PMOE_SIZING_EAGER;
    spec.a2a.max_tokens = 12;
    spec.a2a.max_recv_rows = 5 * w->nranks;
    failures += set_up(&u, w, &spec);
    if (failures) return failures;
    float *bias = u.r.param[rig_param(&u.r, "router.bias")]
                      .data; /* everything to the first two experts, of the first rank or two */
    bias[0] = bias[1] = 40.0f;
    pmoe_status status = rig_forward(&u.r, u.stash, &u.s);
    CHECK(failures, status == PMOE_ERR_ARG, "forward gave %s", pmoe_status_name(status));
    CHECK(failures, strstr(pmoe_last_error(), "rows"), "\"%s\"", pmoe_last_error());
    CHECK(failures, all_nan(&u.s.y), "y was written");
    take_down(&u);
  }
  return failures;
}

static void test_a_bound_on_rows_is_checked_on_every_rank(void **state) {
  (void)state;
  world_run_all(more_rows_than_room, NULL);
}

static int gives_up(world *w) {
  setup u;
  rig_spec spec = rig_spec_default();
  pmoe_comm *quiet = NULL;
  int failures = 0;
  CHECK(failures, pmoe_comm_split(w->comm, 0, 0, &quiet) == PMOE_OK, "%s", pmoe_last_error());
  failures += set_up(&u, w, &spec);
  /* An abort also ends what this rank has finished and a peer has not: the peers are out of their creation calls. */
  CHECK(failures, pmoe_comm_barrier(quiet) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_comm_destroy(quiet);
  uint64_t before = world_now_ms();
  if (w->rank == 1) {
    pmoe_comm *ep;
    CHECK(failures, pmoe_topology_groups(u.topology, 0, &ep, NULL, NULL) == PMOE_OK, "%s", pmoe_last_error());
    pmoe_comm_abort(ep, "out of patience");
  } else {
    pmoe_status status = rig_forward(&u.r, u.stash, &u.s);
    CHECK(failures, status == PMOE_ERR_COMM, "forward gave %s", pmoe_status_name(status));
    CHECK(failures, strstr(pmoe_last_error(), "out of patience"), "\"%s\"", pmoe_last_error());
    status = rig_forward(&u.r, u.stash, &u.s);
    CHECK(failures, status == PMOE_ERR_COMM, "forward gave %s the second time", pmoe_status_name(status));
  }
  CHECK(failures, world_now_ms() - before < SOON_MS, "waited");
  take_down(&u);
  return failures;
}

static void test_a_rank_that_gives_up(void **state) {
  (void)state;
  world_run_all(gives_up, NULL);
}

static int different_calls(world *w) {
  setup u;
  rig_spec spec = rig_spec_default();
  int failures = set_up(&u, w, &spec);
  uint64_t before = world_now_ms();
  double sum;
  pmoe_status status = w->rank == 0 ? pmoe_layer_grad_sumsq(u.r.layer, &sum, NULL) : rig_forward(&u.r, u.stash, &u.s);
  CHECK(failures, status == PMOE_ERR_MISMATCH || status == PMOE_ERR_COMM, "%s", pmoe_status_name(status));
  CHECK(failures, world_now_ms() - before < SOON_MS, "waited");
  take_down(&u);
  return failures;
}

static void test_ranks_in_different_calls(void **state) {
  (void)state;
  world_run_all(different_calls, NULL);
}

/* Rank 1 with an allocator whose n-th request fails: creation and one step. */
static pmoe_status whole_life(pmoe_ctx *ctx, pmoe_comm *comm, const world *w) {
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.ep = w->nranks;
  pmoe_topology *topology = NULL;
  pmoe_status status = pmoe_topology_create(ctx, comm, &cfg, &topology);
  rig r = {0};
  rig_step s = {0};
  pmoe_stash *stash = NULL;
  rig_spec spec = rig_spec_default();
  spec.residual.mix = PMOE_MIX_LEARNED;
  if (status == PMOE_OK) status = rig_create(&r, ctx, topology, &spec);
  if (status == PMOE_OK) {
    rig_plan plan = {
        .label = "no memory", .num_ranks = w->nranks, .rank = w->rank, .training = 1, .loss_scale = 1.0, .seed = 3};
    for (int32_t i = 0; i < w->nranks; i++) plan.rank_tokens[i] = 4 + i;
    rig_step_begin(&r, &s, &plan);
    pmoe_stash_config stash_cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
    stash_cfg.max_tokens = 12;
    status = pmoe_stash_create(r.layer, &stash_cfg, NULL, 0, &stash);
    if (status != PMOE_OK)
      pmoe_comm_abort(comm, "no memory for a stash"); /* not collective: the host tells the peers */
  }
  if (status == PMOE_OK) status = rig_forward(&r, stash, &s);
  if (status == PMOE_OK) status = rig_backward(&r, stash, &s, PMOE_BWD_ALL);
  if (status == PMOE_OK) status = pmoe_layer_reduce_grads(r.layer, 1.0f, NULL);
  double sum;
  if (status == PMOE_OK) status = pmoe_layer_grad_sumsq(r.layer, &sum, NULL);
  pmoe_stash_destroy(stash);
  rig_step_end(&s);
  if (r.layer) rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return status;
}

typedef struct starved {
  pmoe_hub *hub;
  int64_t fail_at;
  pmoe_status status[RIG_MAX_RANKS];
  int64_t calls, held;
} starved;

static int starve(world *w) {
  int failures = 0;
  starved *shared = (starved *)w->arg;
  failing_alloc memory = {0};
  pmoe_allocator table = failing_alloc_table(&memory);
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 1;
  cfg.timeout_ns = 10000000000u;
  cfg.allocator = &table;
  pmoe_ctx *ctx = NULL;
  pmoe_comm *comm = NULL;
  CHECK(failures, pmoe_ctx_create(&cfg, &ctx) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_comm_from_hub(ctx, shared->hub, w->rank, &comm) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  if (w->rank == 1) {
    memory.calls = 0;
    memory.fail_at = shared->fail_at;
  }
  uint64_t before = world_now_ms();
  shared->status[w->rank] = whole_life(ctx, comm, w);
  CHECK(failures, world_now_ms() - before < SOON_MS / 2, "waited");
  if (w->rank == 1) shared->calls = memory.calls;
  pmoe_comm_destroy(comm);
  pmoe_ctx_destroy(ctx);
  CHECK(failures, memory.held_bytes == 0 && memory.held_blocks == 0,
        "request %lld failing leaks %lld bytes in %lld blocks", (long long)shared->fail_at,
        (long long)memory.held_bytes, (long long)memory.held_blocks);
  return failures;
}

static void test_no_memory_on_one_rank(void **state) {
  (void)state;
  enum { RANKS = 3 };
  if (ranks_are_processes()) skip(); /* a hub is memory that ranks share */
  for (int64_t n = 1;; n++) {
    starved shared = {.fail_at = n};
    assert_ok(pmoe_hub_create(RANKS, &shared.hub));
    world_run(RANKS, starve, &shared);
    pmoe_hub_destroy(shared.hub);
    if (shared.calls < n) {
      for (int i = 0; i < RANKS; i++) assert_ok(shared.status[i]);
      assert_true(n > 10);
      return;
    }
    if (shared.status[1] != PMOE_ERR_NOMEM)
      fail_msg("request %lld: rank 1 got %s", (long long)n, pmoe_status_name(shared.status[1]));
    for (int i = 0; i < RANKS; i++)
      if (shared.status[i] >= 0)
        fail_msg("request %lld: rank %d got %s", (long long)n, i, pmoe_status_name(shared.status[i]));
  }
}

/* Rank 2 stays away from forward, or from the sum of gradients. */
typedef struct absence {
  pmoe_hub *hub;
  int from_sum;
} absence;

static int one_does_not_come(world *w) {
  int failures = 0;
  const absence *shared = w->arg;
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 1;
  cfg.timeout_ns = 1500000000u;
  pmoe_ctx *ctx = NULL;
  pmoe_comm *comm = NULL;
  CHECK(failures, pmoe_ctx_create(&cfg, &ctx) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_comm_from_hub(ctx, shared->hub, w->rank, &comm) == PMOE_OK, "%s", pmoe_last_error());
  world inner = *w;
  inner.ctx = ctx;
  inner.comm = comm;
  setup u;
  rig_spec spec = rig_spec_default();
  failures += set_up(&u, &inner, &spec);
  if (!failures && w->rank != 2) {
    pmoe_status status =
        shared->from_sum ? pmoe_layer_reduce_grads(u.r.layer, 1.0f, NULL) : rig_forward(&u.r, u.stash, &u.s);
    CHECK(failures, status == PMOE_ERR_TIMEOUT || status == PMOE_ERR_COMM, "%s", pmoe_status_name(status));
    CHECK(failures, strstr(pmoe_last_error(), "missing: 2"), "\"%s\" does not name the missing rank",
          pmoe_last_error());
    const char *what = shared->from_sum ? "pmoe_layer_reduce_grads" : "row counts";
    CHECK(failures, strstr(pmoe_last_error(), what), "\"%s\" does not name the collective", pmoe_last_error());
  }
  CHECK(failures, pmoe_comm_barrier(w->comm) == PMOE_OK, "%s",
        pmoe_last_error()); /* the outer world, which is patient */
  take_down(&u);
  pmoe_comm_destroy(comm);
  pmoe_ctx_destroy(ctx);
  return failures;
}

static void test_a_rank_that_does_not_come_is_named(void **state) {
  (void)state;
  if (ranks_are_processes()) skip();
  for (int from_sum = 0; from_sum < 2; from_sum++) {
    absence shared = {.from_sum = from_sum};
    assert_ok(pmoe_hub_create(4, &shared.hub));
    world_run(4, one_does_not_come, &shared);
    pmoe_hub_destroy(shared.hub);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_an_argument_error_on_one_rank),
      cmocka_unit_test(test_a_parameter_unbound_on_one_rank),
      cmocka_unit_test(test_configurations_that_differ_are_named),
      cmocka_unit_test(test_a_bound_on_rows_is_checked_on_every_rank),
      cmocka_unit_test(test_a_rank_that_gives_up),
      cmocka_unit_test(test_ranks_in_different_calls),
      cmocka_unit_test(test_no_memory_on_one_rank),
      cmocka_unit_test(test_a_rank_that_does_not_come_is_named),
  };
  return world_main("a rank that fails", tests, sizeof tests / sizeof tests[0]);
}
