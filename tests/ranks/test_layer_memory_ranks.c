/* What a layer over ranks allocates, and when. */
#include "ranks/world.h"

#include <stdlib.h>

#include "support/rig.h"

enum { T = 11 };

static pmoe_memory memory_of(const world *w) {
  pmoe_memory memory = PMOE_CONFIG_INIT(pmoe_memory);
  if (pmoe_ctx_memory(w->ctx, &memory) != PMOE_OK) memory.allocations = -1;
  return memory;
}

static int step_of(rig *r, pmoe_stash *stash, const world *w, uint64_t n, int split) {
  int failures = 0;
  static const int64_t counts[] = {T, 3, 0, 7};
  rig_plan plan = {
      .label = "memory", .num_ranks = w->nranks, .rank = w->rank, .training = 1, .loss_scale = 1.0, .seed = n};
  for (int32_t i = 0; i < w->nranks; i++) plan.rank_tokens[i] = counts[((uint64_t)i + n) % 4];
  rig_step s;
  rig_step_begin(r, &s, &plan);
  rig_zero_grads(r);
  CHECK(failures, rig_forward(r, stash, &s) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, rig_backward(r, stash, &s, split ? PMOE_BWD_INPUT : PMOE_BWD_ALL) == PMOE_OK, "%s",
        pmoe_last_error());
  if (split) CHECK(failures, rig_backward(r, stash, &s, PMOE_BWD_WEIGHT) == PMOE_OK, "%s", pmoe_last_error());
  if (!failures) failures += rig_check(r, stash, &s, 1);
  rig_step_end(&s);
  return failures;
}

static rig_spec spec_of(const world *w, int variant) {
  rig_spec spec = rig_spec_default();
  spec.ep = w->nranks;
  spec.residual.mix = variant & 1 ? PMOE_MIX_LEARNED : PMOE_MIX_NONE;
  spec.experts.dtype = variant & 2 ? PMOE_BF16 : PMOE_F32;
  spec.a2a.max_recv_rows = 2 * T * w->nranks;
  if (variant & 4) {
    spec.a2a.sizing = PMOE_SIZING_FIXED;
    spec.a2a.max_tokens = T;
  }
  return spec;
}

/* The stash's memory and the scratch are the caller's, exactly as large as asked for and full of NaN. */
static int callers_memory(world *w) {
  int failures = 0;
  pmoe_topology *topology = NULL;
  CHECK(failures, pmoe_topology_create(w->ctx, w->comm, NULL, &topology) == PMOE_OK, "%s", pmoe_last_error());
  for (int variant = 0; variant < 16 && !failures; variant++) {
    rig r;
    rig_spec spec = spec_of(w, variant);
    CHECK(failures, rig_create(&r, w->ctx, topology, &spec) == PMOE_OK, "%s", pmoe_last_error());
    if (failures) break;
    pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
    cfg.max_tokens = T;
    cfg.split_backward = variant / 8;
    size_t stash_bytes = 0, scratch_bytes = 0;
    CHECK(failures, pmoe_stash_bytes(r.layer, &cfg, &stash_bytes) == PMOE_OK, "%s", pmoe_last_error());
    CHECK(failures, pmoe_layer_scratch_bytes(r.layer, &cfg, &scratch_bytes) == PMOE_OK, "%s", pmoe_last_error());
    void *stash_mem = NULL, *scratch_mem = NULL;
    CHECK(failures,
          posix_memalign(&stash_mem, 64, stash_bytes) == 0 && posix_memalign(&scratch_mem, 64, scratch_bytes) == 0,
          "memory");
    test_poison(stash_mem, stash_bytes);
    test_poison(scratch_mem, scratch_bytes);
    pmoe_stash *stash = NULL;
    CHECK(failures, pmoe_stash_create(r.layer, &cfg, stash_mem, stash_bytes, &stash) == PMOE_OK, "%s",
          pmoe_last_error());
    CHECK(failures, pmoe_ctx_set_scratch(w->ctx, scratch_mem, scratch_bytes) == PMOE_OK, "%s", pmoe_last_error());
    pmoe_memory before = memory_of(w);
    for (uint64_t n = 0; n < 5 && !failures; n++) failures += step_of(&r, stash, w, n, cfg.split_backward);
    pmoe_memory after = memory_of(w);
    CHECK(failures, after.allocations == before.allocations, "variant %d: %d allocations", variant,
          (int)(after.allocations - before.allocations));
    pmoe_stash_destroy(stash);
    rig_destroy(&r);
    pmoe_ctx_set_scratch(w->ctx, NULL, 0);
    free(stash_mem);
    free(scratch_mem);
  }
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_memory_of_the_caller_suffices(void **state) {
  (void)state;
  world_run_all(callers_memory, NULL);
}

/* Without any bound a stash grows when more rows come than ever before, and at no other time. */
static int growing(world *w) {
  int failures = 0;
  pmoe_topology *topology = NULL;
  CHECK(failures, pmoe_topology_create(w->ctx, w->comm, NULL, &topology) == PMOE_OK, "%s", pmoe_last_error());
  rig r;
  rig_spec spec = spec_of(w, 1);
  spec.a2a.max_recv_rows = 0;
  CHECK(failures, rig_create(&r, w->ctx, topology, &spec) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = T;
  pmoe_stash *stash = NULL;
  CHECK(failures, pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash) == PMOE_OK, "%s", pmoe_last_error());
  for (uint64_t n = 0; n < 4 && !failures; n++) failures += step_of(&r, stash, w, n, 0);
  pmoe_memory before = memory_of(w);
  for (uint64_t n = 0; n < 4 && !failures; n++) failures += step_of(&r, stash, w, n, 0);
  pmoe_memory after = memory_of(w);
  CHECK(failures, after.allocations == before.allocations && after.bytes == before.bytes, "%d allocations",
        (int)(after.allocations - before.allocations));
  size_t bytes = 77;
  if (pmoe_comm_size(w->comm) <= 4) /* every rank has an expert, and so no bound */
    CHECK(failures, pmoe_stash_bytes(r.layer, &cfg, &bytes) == PMOE_ERR_ARG && bytes == 77, "a size without a bound");
  pmoe_stash_destroy(stash);
  rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_a_stash_without_a_bound_grows_to_the_largest_step(void **state) {
  (void)state;
  world_run_all(growing, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_memory_of_the_caller_suffices),
      cmocka_unit_test(test_a_stash_without_a_bound_grows_to_the_largest_step),
  };
  return world_main("memory of a layer over ranks", tests, sizeof tests / sizeof tests[0]);
}
