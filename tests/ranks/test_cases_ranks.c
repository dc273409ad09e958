/* Faults that users of MoE layers over several ranks have met, each with the small input that shows it. */
#include "ranks/world.h"

#include <math.h>
#include <stdlib.h>

#include "support/rig.h"

typedef struct bench {
  pmoe_topology *topology;
  rig r;
  rig_step s;
  pmoe_stash *stash;
} bench;

/* A layer over all ranks with expert-parallel size ep; its micro-batch is set by new_step. */
static int set_up(bench *b, world *w, int32_t ep, const rig_spec *spec, int64_t max_tokens) {
  int failures = 0;
  memset(b, 0, sizeof *b);
  CHECK(failures, pmoe_topology_create(w->ctx, w->comm, NULL, &b->topology) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  rig_spec own = *spec;
  own.ep = ep;
  CHECK(failures, rig_create(&b->r, w->ctx, b->topology, &own) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = max_tokens;
  CHECK(failures, pmoe_stash_create(b->r.layer, &cfg, NULL, 0, &b->stash) == PMOE_OK, "%s", pmoe_last_error());
  return failures;
}

static void new_step(bench *b, const world *w, const rig_plan *plan) {
  rig_step_end(&b->s);
  rig_plan own = *plan;
  own.num_ranks = w->nranks;
  own.rank = w->rank;
  rig_step_begin(&b->r, &b->s, &own);
}

static void take_down(bench *b) {
  rig_step_end(&b->s);
  pmoe_stash_destroy(b->stash);
  if (b->r.layer) rig_destroy(&b->r);
  pmoe_topology_destroy(b->topology);
}

static int step(bench *b) {
  int failures = 0;
  CHECK(failures, rig_forward(&b->r, b->stash, &b->s) == PMOE_OK, "%s", pmoe_last_error());
  if (!failures)
    CHECK(failures, rig_backward(&b->r, b->stash, &b->s, PMOE_BWD_ALL) == PMOE_OK, "%s", pmoe_last_error());
  return failures;
}

/* A step and the gradients' reduction against the reference. */
static int step_and_check(bench *b, double scale) {
  int failures = 0;
  rig_zero_grads(&b->r);
  failures += step(b);
  if (!failures) failures += rig_check(&b->r, b->stash, &b->s, 1);
  if (!failures)
    CHECK(failures, pmoe_layer_reduce_grads(b->r.layer, (float)scale, NULL) == PMOE_OK, "%s", pmoe_last_error());
  return failures ? failures : rig_check_grads(&b->r, scale, b->s.plan.label);
}

static rig_plan plan_of(const char *label) {
  rig_plan plan = {.label = label, .training = 1, .loss_scale = 1.0, .seed = 60};
  return plan;
}

/* Every token's first choice becomes `expert`. */
static void pile_up(bench *b, int32_t expert) {
  b->r.model->tensor[ORACLE_ROUTER_BIAS].data[expert] = 40.0;
  rig_load(&b->r);
}

/* ---- sizes that differ ---- */

static int sizes_from_own_token_count(world *w) {
  rig_spec spec = rig_spec_default();
  spec.gate.top_k = 1;
  spec.gate.bias = 1;
  bench b;
  int failures = set_up(&b, w, 2, &spec, 10);
  if (!failures) {
    pile_up(&b, 0);
    rig_plan plan = plan_of("T=[2,10]");
    plan.rank_tokens[0] = 2;
    plan.rank_tokens[1] = 10;
    new_step(&b, w, &plan);
    failures += step_and_check(&b, 1.0);
    pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
    CHECK(failures, pmoe_stash_metrics(b.stash, &m) == PMOE_OK, "%s", pmoe_last_error());
    CHECK(failures, m.recv_rows == (w->rank == 0 ? 12 : 0), "%lld rows", (long long)m.recv_rows);
    /* 10 rows go out and come back, in both passes: each rank sends them twice */
    CHECK(failures, m.bytes_sent == 2 * 10 * 12 * (int64_t)sizeof(float), "%lld bytes", (long long)m.bytes_sent);
  }
  take_down(&b);
  return failures;
}

static void test_sizes_from_the_own_token_count(void **state) {
  (void)state;
  world_run(2, sizes_from_own_token_count, NULL);
}

/* One rank sends a row to itself and one to its peer; the peer sends nothing at all. */
static int zero_sized_pair(world *w) {
  rig_spec spec = rig_spec_default();
  spec.hidden = spec.gate.num_experts = 2;
  spec.gate.top_k = 1;
  const double x[] = {3, 0, 0, 3};
  rig_plan plan = plan_of("splits [1,1] and [0,0]");
  plan.x = x;
  plan.rank_tokens[0] = 2;
  bench b;
  int failures = set_up(&b, w, 2, &spec, 2);
  if (!failures) {
    double *router = b.r.model->tensor[ORACLE_ROUTER_WEIGHT].data;
    for (int i = 0; i < 4; i++) router[i] = i / 2 == i % 2;
    rig_load(&b.r);
    for (int n = 0; n < 2 && !failures; n++) { /* and the other way round */
      plan.rank_tokens[n] = 2;
      plan.rank_tokens[1 - n] = 0;
      new_step(&b, w, &plan);
      failures += step_and_check(&b, 1.0);
      pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
      CHECK(failures, pmoe_stash_metrics(b.stash, &m) == PMOE_OK && m.recv_rows == 1, "%lld rows",
            (long long)m.recv_rows);
    }
  }
  take_down(&b);
  return failures;
}

static void test_a_zero_sized_pair_skipped_on_one_side(void **state) {
  (void)state;
  world_run(2, zero_sized_pair, NULL);
}

/* Every pattern of empty ranks: all make the same calls, and gradients of experts that got nothing are zero. */
static int rank_without_tokens(world *w) {
  static const int64_t tokens[][4] = {{1, 0, 0, 0}, {0, 0, 0, 3}, {0, 0, 0, 0}, {4, 0, 5, 0}};
  int failures = 0;
  for (int32_t ep = 1; ep <= w->nranks && !failures; ep *= 2)
    for (int i = 0; i < 4 && !failures; i++) {
      rig_spec spec = rig_spec_default();
      spec.gate.top_k = 1;
      spec.gate.bias = 1;
      bench b;
      failures += set_up(&b, w, ep, &spec, 5);
      if (!failures) {
        pile_up(&b, 1); /* on the first rank of each group if there are at most two */
        rig_plan plan = plan_of("ranks without tokens");
        for (int r = 0; r < 4; r++) plan.rank_tokens[r] = tokens[i][r];
        new_step(&b, w, &plan);
        failures += step_and_check(&b, 0.25);
      }
      take_down(&b);
    }
  return failures;
}

static void test_a_rank_without_tokens_leaves_the_others_waiting(void **state) {
  (void)state;
  world_run(4, rank_without_tokens, NULL);
}

static int fewer_experts_than_ranks(world *w) {
  static const int32_t experts[] = {1, 2, 5, 9};
  int failures = 0;
  for (int32_t ep = 1; ep <= w->nranks && !failures; ep++)
    for (int i = 0; i < 4 && !failures && w->nranks % ep == 0; i++) {
      rig_spec spec = rig_spec_default();
      spec.gate.num_experts = experts[i];
      spec.gate.top_k = experts[i] > 1 ? 2 : 1;
      bench b;
      failures += set_up(&b, w, ep, &spec, 6);
      int32_t first, count, place = w->rank % ep;
      CHECK(failures, pmoe_expert_block(experts[i], ep, place, &first, &count) == PMOE_OK, "%s", pmoe_last_error());
      int32_t p = failures ? -1 : rig_param(&b.r, "experts.fc1.weight");
      if (p >= 0)
        CHECK(failures, b.r.param[p].shape[0] == count, "%lld experts, expected %d", (long long)b.r.param[p].shape[0],
              count);
      if (!failures) {
        rig_plan plan = plan_of("E and ranks");
        for (int r = 0; r < w->nranks; r++) plan.rank_tokens[r] = 6 - r % 3;
        new_step(&b, w, &plan);
        failures += step_and_check(&b, 1.0);
      }
      take_down(&b);
    }
  return failures;
}

static void test_experts_fewer_than_ranks_or_not_divisible(void **state) {
  (void)state;
  world_run_all(fewer_experts_than_ranks, NULL);
}

/* T 16 -> 24 -> 16 with two experts a rank, eager and fixed. */
static int buffers_reused(world *w) {
  int failures = 0;
  for (int fixed = 0; fixed < 2; fixed++) {
    rig_spec spec = rig_spec_default();
    spec.gate.num_experts = 2 * w->nranks;
    if (fixed) {
      spec.a2a.sizing = PMOE_SIZING_FIXED;
      spec.a2a.max_tokens = 24;
      spec.a2a.max_recv_rows = 48 * w->nranks;
    }
    bench b;
    failures += set_up(&b, w, w->nranks, &spec, 24);
    const int64_t sizes[] = {16, 24, 16};
    for (int i = 0; i < 3 && !failures; i++) {
      rig_plan plan = plan_of("16, 24, 16");
      plan.seed += (uint64_t)i;
      for (int r = 0; r < w->nranks; r++) plan.rank_tokens[r] = sizes[i];
      new_step(&b, w, &plan);
      failures += step_and_check(&b, 1.0);
    }
    take_down(&b);
  }
  return failures;
}

static void test_shapes_that_change_between_steps(void **state) {
  (void)state;
  world_run_all(buffers_reused, NULL);
}

/* Rank 0 sends 6 of its 10 rows to one peer; blocks hold the average. */
static int bucket_of_the_average(world *w) {
  rig_spec spec = rig_spec_default();
  spec.gate.num_experts = w->nranks;
  spec.gate.top_k = 1;
  spec.gate.bias = 1;
  spec.a2a.sizing = PMOE_SIZING_FIXED;
  spec.a2a.max_tokens = 10;
  spec.a2a.max_recv_rows = 5 * w->nranks;
  bench b;
  int failures = set_up(&b, w, w->nranks, &spec, 10);
  rig_plan plan = plan_of("bucket");
  for (int r = 0; r < w->nranks; r++) plan.rank_tokens[r] = r == 0 ? 6 : 1;
  if (!failures) {
    pile_up(&b, 1);
    new_step(&b, w, &plan);
    pmoe_status status = rig_forward(&b.r, b.stash, &b.s);
    CHECK(failures, status == PMOE_ERR_ARG, "%s", pmoe_status_name(status));
    CHECK(failures, strstr(pmoe_last_error(), "rank 0") && strstr(pmoe_last_error(), "6"), "\"%s\"", pmoe_last_error());
    plan.rank_tokens[0] = 5; /* just fits */
    new_step(&b, w, &plan);
    failures += step_and_check(&b, 1.0);
  }
  take_down(&b);
  return failures;
}

static void test_a_bucket_sized_by_the_average_overflows(void **state) {
  (void)state;
  world_run_all(bucket_of_the_average, NULL);
}

/* ---- gradients ---- */

/* y = w_e x and the loss is the mean over each rank's two tokens. */
static int expert_gradients_scaled(world *w) {
  int failures = 0;
  for (int32_t ep = 1; ep <= 2 && !failures; ep++) {
    rig_spec spec = rig_spec_default();
    spec.hidden = 2;
    spec.gate.num_experts = 2;
    spec.gate.top_k = 1;
    spec.gate.aux_coef = spec.gate.z_coef = 0.0f;
    spec.experts.inner = 1;
    spec.experts.act = PMOE_ACT_RELU;
    bench b;
    failures += set_up(&b, w, ep, &spec, 2);
    if (!failures) {
      oracle_tensor *t = b.r.model->tensor;
      for (int i = ORACLE_ROUTER_WEIGHT; i <= ORACLE_FC2_WEIGHT; i++)
        for (int64_t j = 0; j < t[i].numel; j++) t[i].data[j] = 0.0;
      t[ORACLE_ROUTER_WEIGHT].data[0] = 1000.0; /* the first feature leads to an expert, the second is x */
      t[ORACLE_ROUTER_WEIGHT].data[2] = -1000.0;
      for (int e = 0; e < 2; e++) t[ORACLE_FC1_WEIGHT].data[e * 2 + 1] = t[ORACLE_FC2_WEIGHT].data[e * 2 + 1] = 1.0;
      rig_load(&b.r);
      const double x[] = {1, 1, -1, 2, 1, 3, 1, 4}, dy[] = {0, .5, 0, .5, 0, .5, 0, .5};
      rig_plan plan = plan_of("y = w x");
      plan.rank_tokens[0] = plan.rank_tokens[1] = 2;
      plan.x = x;
      plan.dy = dy;
      new_step(&b, w, &plan);
      failures += step_and_check(&b, 0.5); /* the mean over ranks */
      const pmoe_param *fc2 = &b.r.param[rig_param(&b.r, "experts.fc2.weight")];
      for (int64_t e = 0; e < fc2->shape[0]; e++)
        failures += test_compare_one("dw", test_get(fc2->grad, PMOE_F32, e * 2 + 1),
                                     e + fc2->first_expert == 0 ? 2.0 : 0.5, 1e-6);
    }
    take_down(&b);
  }
  return failures;
}

static void test_expert_gradients_ep_times_too_large(void **state) {
  (void)state;
  world_run(2, expert_gradients_scaled, NULL);
}

/* The objective of all ranks together through the library's forward. */
static double objective(bench *b, world *w, int *failures) {
  CHECK(*failures, rig_forward(&b->r, b->stash, &b->s) == PMOE_OK, "%s", pmoe_last_error());
  double mine = 0.0, all[RIG_MAX_RANKS] = {0}, sum = 0.0;
  const double *dy = b->s.dy_all + b->s.first * b->r.spec.hidden;
  for (int64_t i = 0; i < b->s.tokens * b->r.spec.hidden; i++) mine += dy[i] * test_get(b->s.y.data, PMOE_F32, i);
  pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
  CHECK(*failures, pmoe_stash_metrics(b->stash, &m) == PMOE_OK, "%s", pmoe_last_error());
  mine += (double)m.aux_loss + (double)m.z_loss;
  CHECK(*failures, pmoe_comm_allgather(w->comm, &mine, all, sizeof mine) == PMOE_OK, "%s", pmoe_last_error());
  for (int32_t r = 0; r < w->nranks; r++) sum += all[r];
  return sum;
}

static int router_gradient_over_ranks(world *w) {
  rig_spec spec = rig_spec_default();
  spec.hidden = 4;
  spec.experts.inner = 5;
  bench b;
  int failures = set_up(&b, w, w->nranks, &spec, 4);
  rig_plan plan = plan_of("differences");
  for (int r = 0; r < w->nranks; r++) plan.rank_tokens[r] = 4;
  if (!failures) {
    new_step(&b, w, &plan);
    failures += step_and_check(&b, 1.0);
  }
  const pmoe_param *router = failures ? NULL : &b.r.param[rig_param(&b.r, "router.weight")];
  int64_t close = 0;
  for (int64_t i = 0; router && i < router->numel && !failures; i++) { /* the same number moves on every rank */
    const float kept = ((float *)router->data)[i];
    double value[2];
    for (int side = 0; side < 2; side++) {
      ((float *)router->data)[i] = kept + (side ? 0.01f : -0.01f);
      value[side] = objective(&b, w, &failures);
    }
    ((float *)router->data)[i] = kept;
    double slope = (value[1] - value[0]) / 0.02, gradient = test_get(router->grad, PMOE_F32, i);
    close += fabs(slope - gradient) <= 5e-3 * (1.0 + fabs(slope)); /* all but those where a choice flips */
  }
  CHECK(failures, close >= 14, "%lld of 16 differences agree", (long long)close);
  take_down(&b);
  return failures;
}

static void test_router_gradient_missing_over_ranks(void **state) {
  (void)state;
  world_run(2, router_gradient_over_ranks, NULL);
  world_run(4, router_gradient_over_ranks, NULL);
}

/* One expert of two numbers a rank: [2,4] and [6,8]. */
static int norm_of_gradients(world *w) {
  rig_spec spec = rig_spec_default();
  spec.hidden = spec.experts.inner = 1;
  spec.gate.num_experts = 2;
  spec.gate.top_k = 1;
  bench b;
  int failures = set_up(&b, w, 2, &spec, 1);
  if (!failures) {
    rig_zero_grads(&b.r);
    *(float *)b.r.param[rig_param(&b.r, "experts.fc1.weight")].grad = 2.0f + 4.0f * (float)w->rank;
    *(float *)b.r.param[rig_param(&b.r, "experts.fc2.weight")].grad = 4.0f + 4.0f * (float)w->rank;
    double sum = 0.0;
    CHECK(failures, pmoe_layer_grad_sumsq(b.r.layer, &sum, NULL) == PMOE_OK, "%s", pmoe_last_error());
    failures += test_compare_one("norm", sqrt(sum), 10.954452, 1e-6);
    ((float *)b.r.param[rig_param(&b.r, "router.weight")].grad)[0] = 3.0f; /* dense: the same on both, counted once */
    CHECK(failures, pmoe_layer_grad_sumsq(b.r.layer, &sum, NULL) == PMOE_OK, "%s", pmoe_last_error());
    failures += test_compare_one("norm with dense", sum, 129.0, 1e-6);
  }
  take_down(&b);
  return failures;
}

static void test_norm_counts_experts_wrongly(void **state) {
  (void)state;
  world_run(2, norm_of_gradients, NULL);
}

/* The same tokens on one rank and on two, in parts whose loads are alike, so that the mean of their losses is the
 * whole's. */
static int aux_gradient_over_ranks(world *w) {
  enum { PART = 4, H = 12 };
  double x[RIG_MAX_RANKS * PART * H];
  oracle_fill(x, PART * H, 5, 1.0);
  for (int r = 1; r < w->nranks; r++)
    for (int t = 0; t < PART; t++) memcpy(x + (r * PART + (t + r) % PART) * H, x + t * H, H * sizeof *x);
  rig_spec spec = rig_spec_default();
  bench b;
  int failures = set_up(&b, w, w->nranks, &spec, PART);
  rig_plan plan = plan_of("loss over ranks");
  plan.x = x;
  plan.loss_scale = 1.0 / w->nranks;
  for (int r = 0; r < w->nranks; r++) plan.rank_tokens[r] = PART;
  if (!failures) {
    new_step(&b, w, &plan);
    failures += step_and_check(&b, 1.0);
    oracle_zero_grads(b.r.model); /* now as one rank, one micro-batch */
    oracle_batch whole = {
        .tokens = PART * w->nranks, .training = 1, .loss_scale = 1.0, .x = b.s.x_all, .dy = b.s.dy_all};
    oracle_result_destroy(oracle_run(b.r.model, &whole));
    failures += rig_check_grads(&b.r, 1.0, "one rank's gradient");
  }
  take_down(&b);
  return failures;
}

static void test_aux_gradient_depends_on_the_number_of_ranks(void **state) {
  (void)state;
  world_run_all(aux_gradient_over_ranks, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_sizes_from_the_own_token_count),
      cmocka_unit_test(test_a_zero_sized_pair_skipped_on_one_side),
      cmocka_unit_test(test_a_rank_without_tokens_leaves_the_others_waiting),
      cmocka_unit_test(test_experts_fewer_than_ranks_or_not_divisible),
      cmocka_unit_test(test_shapes_that_change_between_steps),
      cmocka_unit_test(test_a_bucket_sized_by_the_average_overflows),
      cmocka_unit_test(test_expert_gradients_ep_times_too_large),
      cmocka_unit_test(test_router_gradient_missing_over_ranks),
      cmocka_unit_test(test_norm_counts_experts_wrongly),
      cmocka_unit_test(test_aux_gradient_depends_on_the_number_of_ranks),
  };
  return world_main("cases over ranks", tests, sizeof tests / sizeof tests[0]);
}
