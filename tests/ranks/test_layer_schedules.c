/* Several micro-batches in flight over several ranks, ranks of several threads, and noise that does not depend on the
 * layout. */
#include "ranks/world.h"

#include <stdlib.h>

#include "support/rig.h"

enum { BATCHES = 3, MOST = 9 };

static void count_tokens(rig_plan *plan, const world *w, uint64_t batch) {
  static const int64_t counts[] = {4, MOST, 0, 6, 1};
  plan->num_ranks = w->nranks;
  plan->rank = w->rank;
  for (int32_t r = 0; r < w->nranks; r++) plan->rank_tokens[r] = counts[((uint64_t)r * 2 + batch) % 5];
}

static pmoe_topology *new_topology(const world *w, int32_t ep) {
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.ep = ep;
  pmoe_topology *topology = NULL;
  return pmoe_topology_create(w->ctx, w->comm, &cfg, &topology) == PMOE_OK ? topology : NULL;
}

typedef struct pipeline {
  rig r;
  rig_step s[BATCHES];
  pmoe_stash *stash[BATCHES];
} pipeline;

static int open_pipeline(pipeline *p, world *w, pmoe_topology *topology, const rig_spec *spec) {
  int failures = 0;
  memset(p, 0, sizeof *p);
  CHECK(failures, rig_create(&p->r, w->ctx, topology, spec) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = MOST;
  cfg.split_backward = 1;
  for (int m = 0; m < BATCHES && !failures; m++) {
    rig_plan plan = {.label = "in flight", .training = 1, .loss_scale = 1.0, .seed = 300 + (uint64_t)m};
    count_tokens(&plan, w, (uint64_t)m);
    rig_step_begin(&p->r, &p->s[m], &plan);
    CHECK(failures, pmoe_stash_create(p->r.layer, &cfg, NULL, 0, &p->stash[m]) == PMOE_OK, "%s", pmoe_last_error());
  }
  return failures;
}

static void close_pipeline(pipeline *p) {
  for (int m = 0; m < BATCHES; m++) {
    pmoe_stash_destroy(p->stash[m]);
    rig_step_end(&p->s[m]);
  }
  if (p->r.layer) rig_destroy(&p->r);
}

/* f forward, b backward, i its input part, w its weight part, each with the number of its micro-batch. */
static int run_schedule(pipeline *p, const char *order) {
  int failures = 0;
  for (const char *c = order; *c && !failures; c += 2) {
    int m = c[1] - '1';
    pmoe_bwd which = c[0] == 'i' ? PMOE_BWD_INPUT : c[0] == 'w' ? PMOE_BWD_WEIGHT : PMOE_BWD_ALL;
    pmoe_status status =
        c[0] == 'f' ? rig_forward(&p->r, p->stash[m], &p->s[m]) : rig_backward(&p->r, p->stash[m], &p->s[m], which);
    CHECK(failures, status == PMOE_OK, "%s at %s: %s", order, c, pmoe_last_error());
  }
  return failures;
}

static int schedules(world *w) {
  static const char *const orders[] = {"f1f2f3b1b2b3", "f1f2b1f3b2b3", "f1f2i1f3w1i2w2i3w3", "f1f2f3i3i2i1w1w3w2",
                                       "f1i1f2b2w1f3b3"};
  int failures = 0;
  for (int i = 0; i < 5 && !failures; i++)
    for (int32_t ep = 1; ep <= w->nranks && !failures; ep++) {
      if (w->nranks % ep) continue;
      rig_spec spec = rig_spec_default();
      spec.gate.num_experts = 5;
      spec.experts.act = PMOE_ACT_SWIGLU;
      spec.experts.dtype = i % 2 ? PMOE_BF16 : PMOE_F32;
      spec.residual.mix = PMOE_MIX_LEARNED;
      pipeline p;
      pmoe_topology *topology = new_topology(w, ep);
      CHECK(failures, topology, "%s", pmoe_last_error());
      if (!failures) failures += open_pipeline(&p, w, topology, &spec);
      if (!failures) failures += run_schedule(&p, orders[i]);
      for (int m = 0; m < BATCHES && !failures; m++) failures += rig_check(&p.r, p.stash[m], &p.s[m], 1);
      if (!failures)
        CHECK(failures, pmoe_layer_reduce_grads(p.r.layer, 0.125f, NULL) == PMOE_OK, "%s", pmoe_last_error());
      if (!failures) failures += rig_check_grads(&p.r, 0.125, orders[i]);
      close_pipeline(&p);
      pmoe_topology_destroy(topology);
    }
  return failures;
}

static void test_micro_batches_in_flight(void **state) {
  (void)state;
  world_run_all(schedules, NULL);
}

static void test_ranks_of_several_threads(void **state) {
  (void)state;
  world_run_threaded(2, 3, schedules, NULL);
  world_run_threaded(4, 2, schedules, NULL);
}

/* This rank's part of the routing against the same tokens routed alone. */
static int compare_routing(const pmoe_stash *spread, const pmoe_stash *alone, int64_t first, const char *label) {
  int failures = 0;
  pmoe_routing a = PMOE_CONFIG_INIT(pmoe_routing), b = a;
  CHECK(failures, pmoe_stash_routing(spread, &a) == PMOE_OK && pmoe_stash_routing(alone, &b) == PMOE_OK, "%s",
        pmoe_last_error());
  size_t n = (size_t)(a.tokens * a.top_k);
  if (failures || n == 0) return failures;
  CHECK(failures, memcmp(a.expert, b.expert + first * a.top_k, n * sizeof *a.expert) == 0, "%s: choices", label);
  CHECK(failures, memcmp(a.weight, b.weight + first * a.top_k, n * sizeof *a.weight) == 0, "%s: weights", label);
  return failures;
}

static int noise_over_ranks(world *w) {
  int failures = 0;
  rig_spec spec = rig_spec_default();
  spec.gate.jitter = 0.3f;
  spec.gate.gumbel = 1;
  rig_plan plan = {.label = "noise", .training = 1, .loss_scale = 1.0, .seed = 7, .step = 11};
  count_tokens(&plan, w, 1);
  rig spread, alone;
  rig_step s, whole;
  pmoe_stash *here = NULL, *there = NULL;
  pmoe_topology *topology = new_topology(w, w->nranks);
  CHECK(failures, topology && rig_create(&spread, w->ctx, topology, &spec) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  CHECK(failures, rig_create(&alone, w->ctx, NULL, &spec) == PMOE_OK, "%s", pmoe_last_error());
  rig_step_begin(&spread, &s, &plan);
  rig_plan one = {.label = "noise", .training = 1, .loss_scale = 1.0, .seed = 7, .step = 11, .x = s.x_all};
  one.rank_tokens[0] = s.total;
  rig_step_begin(&alone, &whole, &one);
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = s.total;
  CHECK(failures, pmoe_stash_create(spread.layer, &cfg, NULL, 0, &here) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_stash_create(alone.layer, &cfg, NULL, 0, &there) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, rig_forward(&spread, here, &s) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, rig_forward(&alone, there, &whole) == PMOE_OK, "%s", pmoe_last_error());
  if (!failures) failures += compare_routing(here, there, s.first, "noise");
  pmoe_stash_destroy(here);
  pmoe_stash_destroy(there);
  rig_step_end(&s);
  rig_step_end(&whole);
  rig_destroy(&spread);
  rig_destroy(&alone);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_noise_does_not_depend_on_the_layout(void **state) {
  (void)state;
  world_run_all(noise_over_ranks, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_micro_batches_in_flight),
      cmocka_unit_test(test_ranks_of_several_threads),
      cmocka_unit_test(test_noise_does_not_depend_on_the_layout),
  };
  return world_main("schedules over ranks", tests, sizeof tests / sizeof tests[0]);
}
