/* What ranks have to agree on in every step: which layer they are in, and whether the rows of a step have room. */
#include "ranks/world.h"

#include <stdlib.h>

#include "support/rig.h"

static pmoe_topology *one_group(world *w, int *failures) {
  pmoe_topology *topology = NULL;
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.ep = w->nranks;
  CHECK(*failures, pmoe_topology_create(w->ctx, w->comm, &cfg, &topology) == PMOE_OK, "%s", pmoe_last_error());
  return topology;
}

static rig_plan tokens_each(const world *w, int64_t tokens) {
  rig_plan plan = {
      .label = "agreement", .num_ranks = w->nranks, .rank = w->rank, .training = 1, .loss_scale = 1.0, .seed = 8};
  for (int32_t r = 0; r < w->nranks; r++) plan.rank_tokens[r] = tokens;
  return plan;
}

/* Two layers of one shape over one group: their rows must not swap in silence. */
static int swapped_layers(world *w) {
  int failures = 0;
  pmoe_topology *topology = one_group(w, &failures);
  rig_spec spec = rig_spec_default();
  rig r[2];
  for (int i = 0; i < 2; i++) {
    spec.layer_id = i;
    CHECK(failures, rig_create(&r[i], w->ctx, topology, &spec) == PMOE_OK, "%s", pmoe_last_error());
  }
  rig *mine = &r[w->rank == w->nranks - 1];
  rig_step s;
  rig_plan plan = tokens_each(w, 4);
  rig_step_begin(mine, &s, &plan);
  pmoe_stash *stash = NULL;
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = 4;
  CHECK(failures, pmoe_stash_create(mine->layer, &cfg, NULL, 0, &stash) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_status status = rig_forward(mine, stash, &s);
  CHECK(failures, status == PMOE_ERR_MISMATCH, "%s: %s", pmoe_status_name(status), pmoe_last_error());
  CHECK(failures, strstr(pmoe_last_error(), "layer 0") && strstr(pmoe_last_error(), "layer 1"), "%s",
        pmoe_last_error());
  pmoe_stash_destroy(stash);
  rig_step_end(&s);
  for (int i = 0; i < 2; i++) rig_destroy(&r[i]);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_ranks_in_different_layers(void **state) {
  (void)state;
  world_run_all(swapped_layers, NULL);
}

/* Rank 0's stash has room for one row only. Every rank hears of it before rows move, and the next step works. */
static int small_stash(world *w) {
  int failures = 0;
  pmoe_topology *topology = one_group(w, &failures);
  rig_spec spec = rig_spec_default();
  rig r;
  CHECK(failures, rig_create(&r, w->ctx, topology, &spec) == PMOE_OK, "%s", pmoe_last_error());
  rig_step s;
  rig_plan plan = tokens_each(w, 6);
  rig_step_begin(&r, &s, &plan);
  pmoe_stash *small = NULL, *large = NULL;
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = 6;
  CHECK(failures, pmoe_stash_create(r.layer, &cfg, NULL, 0, &large) == PMOE_OK, "%s", pmoe_last_error());
  cfg.max_recv_rows = w->rank == 0 ? 1 : 0;
  CHECK(failures, pmoe_stash_create(r.layer, &cfg, NULL, 0, &small) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_status status = rig_forward(&r, small, &s);
  CHECK(failures, status == PMOE_ERR_ARG, "%s: %s", pmoe_status_name(status), pmoe_last_error());
  CHECK(failures, strstr(pmoe_last_error(), "rank 0") && strstr(pmoe_last_error(), "max_recv_rows 1"), "%s",
        pmoe_last_error());
  CHECK(failures, rig_forward(&r, large, &s) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, rig_backward(&r, large, &s, PMOE_BWD_ALL) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_stash_destroy(small);
  pmoe_stash_destroy(large);
  rig_step_end(&s);
  rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_a_stash_too_small_on_one_rank(void **state) {
  (void)state;
  world_run_all(small_stash, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_ranks_in_different_layers),
      cmocka_unit_test(test_a_stash_too_small_on_one_rank),
  };
  return world_main("layer_agreement", tests, sizeof tests / sizeof *tests);
}
