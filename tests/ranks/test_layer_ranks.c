/* The layer over many ranks against the one-rank reference: every output, loss and gradient of every rank, different
 * data everywhere. */
#include "ranks/world.h"

#include <stdlib.h>

#include "support/rig.h"

/* A topology of this world with expert-parallel size ep. */
static pmoe_topology *new_topology(const world *w, int32_t ep) {
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.ep = ep;
  pmoe_topology *topology = NULL;
  return pmoe_topology_create(w->ctx, w->comm, &cfg, &topology) == PMOE_OK ? topology : NULL;
}

/* Token counts that differ from rank to rank and from step to step, some zero. */
static void count_tokens(rig_plan *plan, int32_t nranks, int32_t rank, uint64_t step) {
  static const int64_t counts[] = {5, 0, 9, 2, 7, 1, 0, 11};
  plan->num_ranks = nranks;
  plan->rank = rank;
  for (int32_t r = 0; r < nranks; r++) plan->rank_tokens[r] = counts[((uint64_t)r + step) % 8];
}

typedef struct rank_case {
  const char *name;
  rig_spec spec;
  int masked, split, pile_up; /* pile_up: all tokens on expert 0 */
} rank_case;

static int train_step(rig *r, const world *w, const rank_case *c, uint64_t n) {
  int failures = 0;
  char label[128];
  snprintf(label, sizeof label, "%s ep %d step %d rank %d/%d", c->name, r->spec.ep, (int)n, w->rank, w->nranks);
  rig_plan plan = {
      .label = label, .training = 1, .loss_scale = 1.5, .seed = 30 + n, .step = n, .masked = c->masked, .pad = (int)n};
  count_tokens(&plan, w->nranks, w->rank, n);
  rig_zero_grads(r);
  failures += rig_run(r, &plan, c->split, 1);
  int64_t total = 0;
  for (int32_t i = 0; i < w->nranks; i++) total += plan.rank_tokens[i];
  double scale = (double)(float)(1.0 / (double)total);
  pmoe_status status = failures ? PMOE_ERR_STATE : pmoe_layer_reduce_grads(r->layer, (float)scale, NULL);
  CHECK(failures, status == PMOE_OK, "%s: reduce: %s", label, pmoe_last_error());
  if (failures) return failures;
  failures += rig_check_grads(r, scale, label);
  failures += rig_check_sumsq(r, scale);
  rig_descend(r, 0.5, scale);
  if (r->spec.experts.dtype != PMOE_F32) rig_load(r);
  return failures;
}

static int train(world *w, const rank_case *c, int32_t ep) {
  int failures = 0;
  pmoe_topology *topology = new_topology(w, ep);
  CHECK(failures, topology, "ep %d: %s", ep, pmoe_last_error());
  if (failures) return failures;
  rig r;
  rig_spec spec = c->spec;
  spec.ep = ep;
  pmoe_status status = rig_create(&r, w->ctx, topology, &spec);
  CHECK(failures, status == PMOE_OK, "%s ep %d: %s", c->name, ep, pmoe_last_error());
  if (!failures && c->pile_up) {
    r.model->tensor[ORACLE_ROUTER_BIAS].data[0] = 40.0;
    rig_load(&r);
  }
  for (uint64_t n = 0; n < 3 && !failures; n++) failures += train_step(&r, w, c, n);
  if (status == PMOE_OK) rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return failures;
}

static int every_ep_size(world *w) {
  int failures = 0;
  for (int32_t ep = 1; ep <= w->nranks && !failures; ep++)
    if (w->nranks % ep == 0) failures += train(w, w->arg, ep);
  return failures;
}

static void run_case(const rank_case *c) { world_run_all(every_ep_size, c); }

static void test_dropless(void **state) {
  (void)state;
  rank_case c = {.name = "dropless", .spec = rig_spec_default()};
  c.spec.experts.act = PMOE_ACT_SWIGLU;
  c.spec.experts.bias = 1;
  c.spec.gate.norm = PMOE_NORM_AFTER_DROP;
  run_case(&c);
}

static void test_experts_do_not_divide(void **state) {
  (void)state;
  rank_case c = {.name = "E=5", .spec = rig_spec_default()};
  c.spec.gate.num_experts = 5;
  c.spec.gate.top_k = 3;
  c.spec.gate.softmax_after_topk = 1;
  run_case(&c);
}

static void test_fewer_experts_than_ranks(void **state) {
  (void)state;
  rank_case c = {.name = "E=2", .spec = rig_spec_default(), .split = 1};
  c.spec.gate.num_experts = 2;
  c.spec.gate.top_k = 1;
  c.spec.experts.act = PMOE_ACT_GEGLU;
  run_case(&c);
  c.name = "E=1";
  c.spec.gate.num_experts = 1;
  run_case(&c);
}

static void test_capacity_per_source_rank(void **state) {
  (void)state;
  for (int i = 0; i < 4; i++) {
    rank_case c = {.name = i / 2 ? "capacity, fixed" : "capacity, eager", .spec = rig_spec_default(), .masked = 1};
    c.spec.gate.capacity_factor = 0.7f;
    c.spec.gate.norm = PMOE_NORM_BEFORE_DROP;
    c.spec.gate.drop = i % 2 ? PMOE_DROP_PROBS : PMOE_DROP_POSITION;
    c.spec.a2a.sizing = i / 2 ? PMOE_SIZING_FIXED : PMOE_SIZING_EAGER;
    c.spec.a2a.max_tokens = i / 2 ? 11 : 0;
    run_case(&c);
  }
}

static void test_fixed_and_dropless(void **state) {
  (void)state;
  rank_case c = {.name = "fixed", .spec = rig_spec_default(), .split = 1};
  c.spec.a2a.sizing = PMOE_SIZING_FIXED;
  c.spec.a2a.max_tokens = 11;
  c.spec.a2a.max_recv_rows = 22 * 8; /* every choice of every rank, split evenly over 8 */
  c.spec.residual.mix = PMOE_MIX_GATED_SUM;
  run_case(&c);
}

static void test_bf16_with_residual(void **state) {
  (void)state;
  rank_case c = {.name = "bf16", .spec = rig_spec_default(), .split = 1};
  c.spec.experts.dtype = PMOE_BF16;
  c.spec.experts.recompute_act = 1;
  c.spec.residual.mix = PMOE_MIX_LEARNED;
  c.spec.residual.bias = 1;
  run_case(&c);
  c.name = "bf16 gradients";
  c.split = 0;
  c.spec.experts.grad_dtype = PMOE_BF16;
  run_case(&c);
}

static void test_all_tokens_on_one_expert(void **state) {
  (void)state;
  rank_case c = {.name = "pile-up", .spec = rig_spec_default(), .pile_up = 1};
  c.spec.gate.bias = 1;
  c.spec.gate.top_k = 1;
  c.spec.residual.mix = PMOE_MIX_SUM;
  run_case(&c);
}

/* ---- the same bits ---- */

static void *one_step(world *w, pmoe_topology *topology, const rig_spec *spec, size_t *bytes, int *failures) {
  rig r;
  rig_step s;
  pmoe_stash *stash = NULL;
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = 11;
  rig_plan plan = {.label = "bits", .training = 1, .loss_scale = 1.0, .seed = 70};
  count_tokens(&plan, w->nranks, w->rank, 0);
  CHECK(*failures, rig_create(&r, w->ctx, topology, spec) == PMOE_OK, "%s", pmoe_last_error());
  if (*failures) return NULL;
  rig_step_begin(&r, &s, &plan);
  pmoe_status status = pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash);
  if (status == PMOE_OK) status = rig_forward(&r, stash, &s);
  if (status == PMOE_OK) status = rig_backward(&r, stash, &s, PMOE_BWD_ALL);
  if (status == PMOE_OK) status = pmoe_layer_reduce_grads(r.layer, 0.5f, NULL);
  CHECK(*failures, status == PMOE_OK, "%s", pmoe_last_error());
  void *bits = rig_snapshot(&r, &s, bytes);
  pmoe_stash_destroy(stash);
  rig_step_end(&s);
  rig_destroy(&r);
  return bits;
}

static int fixed_and_eager(world *w) {
  int failures = 0;
  for (int32_t ep = 1; ep <= w->nranks && !failures; ep++) {
    if (w->nranks % ep) continue;
    rig_spec spec = rig_spec_default();
    spec.gate.num_experts = 6;
    spec.gate.capacity_factor = ep % 2 ? 0.9f : 0.0f;
    spec.experts.dtype = ep % 3 ? PMOE_F32 : PMOE_BF16;
    spec.residual.mix = PMOE_MIX_LEARNED;
    pmoe_topology *topology = new_topology(w, ep);
    CHECK(failures, topology, "%s", pmoe_last_error());
    size_t bytes[3] = {0};
    void *bits[3] = {NULL};
    for (int i = 0; i < 3 && !failures; i++) { /* eager, fixed, eager again */
      spec.a2a.sizing = i == 1 ? PMOE_SIZING_FIXED : PMOE_SIZING_EAGER;
      spec.a2a.max_tokens = i == 1 ? 11 : 0;
      spec.a2a.max_recv_rows = i == 1 && ep % 2 == 0 ? 22 * 8 : 0;
      bits[i] = one_step(w, topology, &spec, &bytes[i], &failures);
    }
    if (!failures) {
      CHECK(failures, memcmp(bits[0], bits[1], bytes[0]) == 0, "ep %d: fixed and eager differ", ep);
      CHECK(failures, memcmp(bits[0], bits[2], bytes[0]) == 0, "ep %d: two runs differ", ep);
    }
    for (int i = 0; i < 3; i++) free(bits[i]);
    pmoe_topology_destroy(topology);
  }
  return failures;
}

static void test_fixed_equals_eager_bit_for_bit(void **state) {
  (void)state;
  world_run_all(fixed_and_eager, NULL);
}

/* ---- first values ---- */

static int compare_init(const rig *whole, const rig *part) {
  int failures = 0;
  for (int32_t p = 0; p < part->num_params; p++) {
    const pmoe_param *a = &whole->param[p], *b = &part->param[p];
    int64_t first = b->first_expert < 0 ? 0 : b->first_expert * whole->tensor[p]->per_expert;
    CHECK(failures, memcmp((const float *)a->data + first, b->data, (size_t)b->numel * sizeof(float)) == 0,
          "%s differs", a->name);
  }
  return failures;
}

static int first_values(world *w) {
  int failures = 0;
  rig_spec spec = rig_spec_default();
  spec.gate.num_experts = 5;
  spec.hidden = 33;
  spec.residual.mix = PMOE_MIX_LEARNED;
  spec.experts.bias = 1;
  rig whole, part;
  pmoe_topology *topology = new_topology(w, 1);
  CHECK(failures, topology && rig_create(&whole, w->ctx, topology, &spec) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  CHECK(failures, pmoe_layer_init_params(whole.layer, 99, 0.02f) == PMOE_OK, "%s", pmoe_last_error());
  for (int32_t ep = 1; ep <= w->nranks && !failures; ep++) {
    if (w->nranks % ep) continue;
    spec.ep = ep;
    CHECK(failures, rig_create(&part, w->ctx, topology, &spec) == PMOE_OK, "%s", pmoe_last_error());
    if (failures) break;
    CHECK(failures, pmoe_layer_init_params(part.layer, 99, 0.02f) == PMOE_OK, "%s", pmoe_last_error());
    failures += compare_init(&whole, &part);
    rig_destroy(&part);
  }
  rig_destroy(&whole);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_first_values_do_not_depend_on_the_layout(void **state) {
  (void)state;
  world_run_all(first_values, NULL);
}

/* ---- pyramid ---- */

static int pyramid(world *w) {
  int failures = 0;
  pmoe_topology *topology = new_topology(w, w->nranks);
  CHECK(failures, topology, "%s", pmoe_last_error());
  if (failures) return failures;
  rig_spec narrow = rig_spec_default(), wide = rig_spec_default(), again = rig_spec_default();
  narrow.gate.num_experts = 3;
  narrow.ep = 1;
  wide.gate.num_experts = 7;
  wide.layer_id = 1;
  wide.experts.act = PMOE_ACT_SWIGLU;
  wide.residual.mix = PMOE_MIX_LEARNED;
  again.layer_id = 2;
  rig layer[3];
  rig_step s[3];
  pmoe_stash *stash[3] = {NULL};
  const rig_spec *specs[] = {&narrow, &wide, &again};
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = 11;
  for (int i = 0; i < 3; i++) {
    rig_plan plan = {.label = "pyramid", .training = 1, .loss_scale = 1.0, .seed = 80 + (uint64_t)i};
    count_tokens(&plan, w->nranks, w->rank, 3);
    CHECK(failures, rig_create(&layer[i], w->ctx, topology, specs[i]) == PMOE_OK, "%s", pmoe_last_error());
    if (failures) return failures;
    rig_step_begin(&layer[i], &s[i], &plan);
    CHECK(failures, pmoe_stash_create(layer[i].layer, &cfg, NULL, 0, &stash[i]) == PMOE_OK, "%s", pmoe_last_error());
  }
  for (int i = 0; i < 3 && !failures; i++)
    CHECK(failures, rig_forward(&layer[i], stash[i], &s[i]) == PMOE_OK, "%s", pmoe_last_error());
  for (int i = 2; i >= 0 && !failures; i--)
    CHECK(failures, rig_backward(&layer[i], stash[i], &s[i], PMOE_BWD_ALL) == PMOE_OK, "%s", pmoe_last_error());
  for (int i = 0; i < 3 && !failures; i++) {
    failures += rig_check(&layer[i], stash[i], &s[i], 1);
    CHECK(failures, pmoe_layer_reduce_grads(layer[i].layer, 1.0f, NULL) == PMOE_OK, "%s", pmoe_last_error());
    failures += rig_check_grads(&layer[i], 1.0, "pyramid");
  }
  pmoe_topology_destroy(topology); /* layers keep what they need */
  for (int i = 0; i < 3; i++) {
    rig_step_end(&s[i]);
    rig_destroy(&layer[i]);
    pmoe_stash_destroy(stash[i]); /* and stashes what they need of the layer */
  }
  return failures;
}

static void test_layers_of_different_expert_parallel_sizes(void **state) {
  (void)state;
  world_run_all(pyramid, NULL);
}

static int shared_groups(world *w) {
  int failures = 0;
  pmoe_topology *topology = new_topology(w, 1);
  pmoe_comm *first[3], *second[3];
  CHECK(failures, topology, "%s", pmoe_last_error());
  for (int32_t ep = 1; ep <= w->nranks && !failures; ep++) {
    if (w->nranks % ep) continue;
    CHECK(failures, pmoe_topology_groups(topology, ep, &first[0], &first[1], &first[2]) == PMOE_OK, "%s",
          pmoe_last_error());
    CHECK(failures, pmoe_topology_groups(topology, ep, &second[0], &second[1], &second[2]) == PMOE_OK, "%s",
          pmoe_last_error());
    CHECK(failures, memcmp(first, second, sizeof first) == 0, "ep %d: groups were made twice", ep);
    CHECK(failures, pmoe_comm_size(first[0]) == ep && pmoe_comm_size(first[1]) == w->nranks / ep, "ep %d", ep);
    CHECK(failures, pmoe_comm_size(first[2]) == w->nranks, "ep %d", ep);
  }
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_layers_share_communicators(void **state) {
  (void)state;
  world_run_all(shared_groups, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_dropless),
      cmocka_unit_test(test_experts_do_not_divide),
      cmocka_unit_test(test_fewer_experts_than_ranks),
      cmocka_unit_test(test_capacity_per_source_rank),
      cmocka_unit_test(test_fixed_and_dropless),
      cmocka_unit_test(test_bf16_with_residual),
      cmocka_unit_test(test_all_tokens_on_one_expert),
      cmocka_unit_test(test_fixed_equals_eager_bit_for_bit),
      cmocka_unit_test(test_first_values_do_not_depend_on_the_layout),
      cmocka_unit_test(test_layers_of_different_expert_parallel_sizes),
      cmocka_unit_test(test_layers_share_communicators),
  };
  return world_main("layer over ranks", tests, sizeof tests / sizeof tests[0]);
}
