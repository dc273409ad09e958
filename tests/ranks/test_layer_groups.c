/* Layers over the host's own groups and the host's own collectives. */
#include "ranks/world.h"

#include <stdlib.h>

#include "support/rig.h"

static void plan_tokens(rig_plan *plan, const world *w) {
  *plan = (rig_plan){
      .label = "groups", .num_ranks = w->nranks, .rank = w->rank, .training = 1, .loss_scale = 1.0, .seed = 91};
  for (int32_t r = 0; r < w->nranks; r++) plan->rank_tokens[r] = (r * 5 + 3) % 8;
}

/* Forward, backward and the gradients' reduction against the reference; with `bits`, a copy of everything for
 * comparison. */
static int step_and_check(world *w, pmoe_topology *topology, const rig_spec *spec, void **bits, size_t *bytes) {
  int failures = 0;
  rig r;
  rig_step s;
  rig_plan plan;
  pmoe_stash *stash = NULL;
  plan_tokens(&plan, w);
  CHECK(failures, rig_create(&r, w->ctx, topology, spec) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  rig_step_begin(&r, &s, &plan);
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = 8;
  pmoe_status status = pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash);
  if (status == PMOE_OK) status = rig_forward(&r, stash, &s);
  if (status == PMOE_OK) status = rig_backward(&r, stash, &s, PMOE_BWD_ALL);
  if (status == PMOE_OK) status = pmoe_layer_reduce_grads(r.layer, 1.0f, NULL);
  CHECK(failures, status == PMOE_OK, "%s", pmoe_last_error());
  if (!failures) failures += rig_check(&r, stash, &s, 1) + rig_check_grads(&r, 1.0, "groups");
  if (bits) *bits = rig_snapshot(&r, &s, bytes);
  pmoe_stash_destroy(stash);
  rig_step_end(&s);
  rig_destroy(&r);
  return failures;
}

/* Expert-parallel groups that are blocks of neighbours (stride 1) or lie strided across the world. */
static int own_groups(world *w) {
  int failures = 0;
  for (int32_t ep = 1; ep <= w->nranks && !failures; ep++)
    for (int strided = 0; strided < 2 && !failures && w->nranks % ep == 0; strided++) {
      int32_t edp = w->nranks / ep;
      int32_t group = strided ? w->rank % edp : w->rank / ep, place = strided ? w->rank / edp : w->rank % ep;
      pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
      groups.dense_dp = w->comm;
      CHECK(failures, pmoe_comm_split(w->comm, group, place, &groups.ep) == PMOE_OK, "%s", pmoe_last_error());
      CHECK(failures, pmoe_comm_split(w->comm, place, group, &groups.expert_dp) == PMOE_OK, "%s", pmoe_last_error());
      pmoe_topology *topology = NULL;
      CHECK(failures, pmoe_topology_from_groups(w->ctx, &groups, &topology) == PMOE_OK, "ep %d: %s", ep,
            pmoe_last_error());
      rig_spec spec = rig_spec_default();
      spec.gate.num_experts = 5;
      spec.residual.mix = PMOE_MIX_LEARNED;
      if (!failures) failures += step_and_check(w, topology, &spec, NULL, NULL);
      pmoe_topology_destroy(topology);
      pmoe_comm_destroy(groups.ep);
      pmoe_comm_destroy(groups.expert_dp);
    }
  return failures;
}

static void test_the_hosts_own_groups(void **state) {
  (void)state;
  world_run_all(own_groups, NULL);
}

/* Expert-data groups whose members sit at different places of their expert-parallel groups would add up gradients of
 * different experts. */
static int crossed_groups(world *w) {
  int failures = 0;
  if (w->nranks != 4) return 0;
  pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
  groups.dense_dp = w->comm;
  /* ep {0,1} and {3,2}: 0 meets 3 at place 0, yet the expert-data groups say {0,2} and {1,3} */
  static const int32_t key[] = {0, 1, 1, 0};
  CHECK(failures, pmoe_comm_split(w->comm, w->rank / 2, key[w->rank], &groups.ep) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_comm_split(w->comm, w->rank % 2, w->rank, &groups.expert_dp) == PMOE_OK, "%s",
        pmoe_last_error());
  pmoe_topology *topology = NULL;
  CHECK(failures, pmoe_topology_from_groups(w->ctx, &groups, &topology) == PMOE_ERR_MISMATCH, "%s", pmoe_last_error());
  CHECK(failures, topology == NULL, "output was touched");
  pmoe_comm_destroy(groups.ep);
  pmoe_comm_destroy(groups.expert_dp);
  return failures;
}

static void test_groups_that_do_not_fit_are_refused(void **state) {
  (void)state;
  world_run_all(crossed_groups, NULL);
}

#ifndef TEST_ON_DEVICE_H /* whose memory the host's collectives do not reach */
/* ---- the host's own collectives ---- */

typedef struct outcome {
  void *bits[RIG_MAX_RANKS];
  size_t bytes[RIG_MAX_RANKS];
} outcome;

static int record(world *w) {
  int failures = 0;
  outcome *out = (outcome *)w->arg;
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.ep = w->nranks % 2 ? w->nranks : w->nranks / 2;
  pmoe_topology *topology = NULL;
  CHECK(failures, pmoe_topology_create(w->ctx, w->comm, &cfg, &topology) == PMOE_OK, "%s", pmoe_last_error());
  rig_spec spec = rig_spec_default();
  spec.experts.act = PMOE_ACT_SWIGLU;
  spec.residual.mix = PMOE_MIX_LEARNED;
  if (!failures) failures += step_and_check(w, topology, &spec, &out->bits[w->rank], &out->bytes[w->rank]);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_the_hosts_collectives_give_the_same_bits(void **state) {
  (void)state;
  for (int32_t n = 2; n <= RIG_MAX_RANKS; n++) {
    outcome ours = {0}, hosts = {0};
    world_run(n, record, &ours);
    world_run_callbacks(n, record, &hosts);
    for (int r = 0; r < n; r++) {
      assert_int_equal(ours.bytes[r], hosts.bytes[r]);
      /* MPI adds in an order of its own. */
      if (ours.bits[r] && !ranks_are_processes()) assert_memory_equal(ours.bits[r], hosts.bits[r], ours.bytes[r]);
      free(ours.bits[r]);
      free(hosts.bits[r]);
    }
  }
}
#endif

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_the_hosts_own_groups),
      cmocka_unit_test(test_groups_that_do_not_fit_are_refused),
#ifndef TEST_ON_DEVICE_H
      cmocka_unit_test(test_the_hosts_collectives_give_the_same_bits),
#endif
  };
  return world_main("layer over the host's groups", tests, sizeof tests / sizeof tests[0]);
}
