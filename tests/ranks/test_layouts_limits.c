/* Layers over TP and ETP ranks at their limits: memory, first values, the same bits twice, disagreement and failure. */
#include "ranks/layout.h"

#include <stdlib.h>

enum { MOST = 6 };

static const layout few[] = {
    {2, 2, 1, 1, 1, 2, 0, NULL}, {2, 2, 1, 1, 2, 1, 1, NULL}, {4, 2, 1, 1, 2, 2, 0, NULL},
    {4, 2, 1, 1, 2, 2, 1, NULL}, {4, 4, 1, 1, 2, 1, 0, NULL}, {4, 2, 1, 1, 2, 1, 0, "ep-dp-cp-tp-pp"},
    {8, 4, 1, 1, 2, 2, 1, NULL}, {8, 2, 1, 1, 2, 4, 0, NULL}, {8, 2, 1, 1, 2, 1, 0, "ep-dp-cp-tp-pp"},
};
enum { FEW = sizeof few / sizeof few[0] };

static layout_case case_of(int i) {
  layout_case c = {.layout = few[i % FEW], .spec = rig_spec_default(), .seed = 40 + (uint64_t)i, .most_tokens = MOST};
  c.spec.gate.num_experts = 5;
  c.spec.experts.act = PMOE_ACT_SWIGLU;
  c.spec.experts.bias = 1;
  c.spec.residual.mix = PMOE_MIX_LEARNED;
  c.spec.residual.inner = 9;
  c.spec.residual.bias = 1;
  return c;
}

static void each(world_body body) {
  for (int i = 0; i < FEW; i++) {
    layout_case c = case_of(i);
    world_run(c.layout.world, body, &c);
  }
}

/* ---- memory ---- */

static int64_t allocations(const world *w) {
  pmoe_memory memory = PMOE_CONFIG_INIT(pmoe_memory);
  return pmoe_ctx_memory(w->ctx, &memory) == PMOE_OK ? memory.allocations : -1;
}

static int exact_memory(world *w, const layout_case *c, rig *r, const layout_place *p, int split) {
  int failures = 0;
  pmoe_stash_config cfg = layout_stash(c, split);
  size_t stash_bytes = 0, scratch_bytes = 0;
  CHECK(failures, pmoe_stash_bytes(r->layer, &cfg, &stash_bytes) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_layer_scratch_bytes(r->layer, &cfg, &scratch_bytes) == PMOE_OK, "%s", pmoe_last_error());
  void *stash_mem = NULL, *scratch_mem = NULL;
  if (posix_memalign(&stash_mem, 64, stash_bytes) || posix_memalign(&scratch_mem, 64, scratch_bytes)) return 1;
  test_poison(stash_mem, stash_bytes);
  test_poison(scratch_mem, scratch_bytes);
  pmoe_stash *stash = NULL;
  CHECK(failures, pmoe_stash_create(r->layer, &cfg, stash_mem, stash_bytes, &stash) == PMOE_OK, "%s",
        pmoe_last_error());
  CHECK(failures, pmoe_ctx_set_scratch(w->ctx, scratch_mem, scratch_bytes) == PMOE_OK, "%s", pmoe_last_error());
  int64_t before = allocations(w);
  for (uint64_t n = 0; n < 4 && !failures; n++) {
    rig_step s;
    layout_begin(c, p, r, n, &s);
    CHECK(failures, layout_step(r, stash, &s, split) == PMOE_OK, "%s", pmoe_last_error());
    if (!failures) failures += rig_check(r, stash, &s, 1);
    rig_step_end(&s);
  }
  CHECK(failures, allocations(w) == before, "%d allocations", (int)(allocations(w) - before));
  pmoe_stash_destroy(stash);
  pmoe_ctx_set_scratch(w->ctx, NULL, 0);
  free(stash_mem);
  free(scratch_mem);
  return failures;
}

static int callers_memory(world *w) {
  layout_case c = *(const layout_case *)w->arg;
  int failures = 0;
  for (int variant = 0; variant < 8 && !failures; variant++) {
    c.spec.experts.dtype = variant & 1 ? PMOE_BF16 : PMOE_F32;
    c.spec.residual.mix = variant & 2 ? PMOE_MIX_SUM : PMOE_MIX_NONE;
    c.spec.a2a.max_recv_rows = 2 * MOST * c.layout.world * c.layout.etp;
    pmoe_topology *topology = NULL;
    layout_place p = {0};
    rig r = {0};
    failures += layout_open(w, &c, &topology, &p, &r);
    if (!failures) failures += exact_memory(w, &c, &r, &p, variant / 4);
    if (r.layer) rig_destroy(&r);
    pmoe_topology_destroy(topology);
  }
  return failures;
}

static void test_memory_of_the_caller_suffices(void **state) {
  (void)state;
  each(callers_memory);
}

/* ---- first values ---- */

static int first_values(world *w) {
  layout_case c = *(const layout_case *)w->arg;
  c.spec.hidden = 33;
  c.spec.experts.inner = 10 + c.layout.world % 3;
  pmoe_topology *topology = NULL;
  layout_place p = {0};
  rig part = {0}, whole = {0};
  int failures = layout_open(w, &c, &topology, &p, &part);
  CHECK(failures, rig_create(&whole, w->ctx, NULL, &c.spec) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  CHECK(failures, pmoe_layer_init_params(whole.layer, 99, 0.02f) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_layer_init_params(part.layer, 99, 0.02f) == PMOE_OK, "%s", pmoe_last_error());
  for (int32_t i = 0; i < part.num_params; i++) {
    const float *a = whole.param[i].data, *b = part.param[i].data;
    int64_t wrong = 0;
    for (int64_t j = 0; j < part.param[i].numel; j++) wrong += a[rig_element(&part, i, j)] != b[j];
    CHECK(failures, wrong == 0, "%lld numbers of %s differ", (long long)wrong, part.param[i].name);
  }
  rig_destroy(&part);
  rig_destroy(&whole);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_first_values_do_not_depend_on_the_layout(void **state) {
  (void)state;
  each(first_values);
}

/* ---- the same bits ---- */

typedef struct outcome {
  layout_case c;
  void *bits[RIG_MAX_RANKS];
  size_t bytes[RIG_MAX_RANKS];
} outcome;

static int record(world *w) {
  outcome *out = (outcome *)w->arg;
  pmoe_topology *topology = NULL;
  layout_place p = {0};
  rig r = {0};
  int failures = layout_open(w, &out->c, &topology, &p, &r);
  pmoe_stash_config cfg = layout_stash(&out->c, out->c.split);
  pmoe_stash *stash = NULL;
  rig_step s;
  layout_begin(&out->c, &p, &r, 1, &s);
  CHECK(failures, pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, layout_step(&r, stash, &s, out->c.split) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_layer_reduce_grads(r.layer, 0.25f, NULL) == PMOE_OK, "%s", pmoe_last_error());
  out->bits[w->rank] = rig_snapshot(&r, &s, &out->bytes[w->rank]);
  pmoe_stash_destroy(stash);
  rig_step_end(&s);
  rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return failures;
}

/* Two runs, one backward in two parts, one with two threads in each rank, one over the host's collectives. */
static void test_the_same_bits(void **state) {
  (void)state;
  for (int i = 0; i < FEW; i++) {
    outcome out[5];
    for (int run = 0; run < 5; run++) {
      out[run] = (outcome){.c = case_of(i)};
      out[run].c.spec.experts.dtype = i % 2 ? PMOE_BF16 : PMOE_F32;
      out[run].c.split = run == 2;
      if (run == 3) world_run_threaded(few[i].world, 2, record, &out[run]);
      else if (run == 4) world_run_callbacks(few[i].world, record, &out[run]);
      else world_run(few[i].world, record, &out[run]);
      for (int rank = 0; rank < few[i].world; rank++) {
        assert_int_equal(out[0].bytes[rank], out[run].bytes[rank]);
        bool same_order = run < 4 || !ranks_are_processes(); /* MPI adds in an order of its own */
        if (out[run].bits[rank] && same_order)
          assert_memory_equal(out[0].bits[rank], out[run].bits[rank], out[0].bytes[rank]);
      }
    }
    for (int run = 0; run < 5; run++)
      for (int rank = 0; rank < few[i].world; rank++) free(out[run].bits[rank]);
  }
}

/* ---- disagreement and failure ---- */

static int works(const layout_case *c, const layout_place *p, rig *r, pmoe_stash *stash) {
  int failures = 0;
  rig_step s;
  layout_begin(c, p, r, 2, &s);
  rig_zero_grads(r);
  CHECK(failures, layout_step(r, stash, &s, 0) == PMOE_OK, "after an error: %s", pmoe_last_error());
  CHECK(failures, pmoe_layer_reduce_grads(r->layer, 1.0f, NULL) == PMOE_OK, "%s", pmoe_last_error());
  if (!failures) failures += rig_check(r, stash, &s, 1) + rig_check_grads(r, 1.0, "after an error");
  rig_step_end(&s);
  return failures;
}

/* The last rank of the world brings a row less than its TP neighbours; or something that is no matrix at all. */
static int wrong_input(world *w) {
  const layout_case *c = w->arg;
  pmoe_topology *topology = NULL;
  layout_place p = {0};
  rig r = {0};
  int failures = layout_open(w, c, &topology, &p, &r);
  pmoe_stash_config cfg = layout_stash(c, 0);
  pmoe_stash *stash = NULL;
  CHECK(failures, pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash) == PMOE_OK, "%s", pmoe_last_error());
  rig_plan plan = {.label = "wrong", .loss_scale = 1.0, .seed = 5};
  layout_draw_tokens(c, &p, 1, &plan);
  for (int32_t i = 0; i < plan.num_ranks; i++) plan.rank_tokens[i] = 3;
  rig_step s;
  rig_step_begin(&r, &s, &plan);
  bool odd = w->rank == w->nranks - 1;
  pmoe_mat x = s.x, y = s.y;
  if (odd) x.rows = y.rows = x.rows - 1;
  if (!c->layout.sp) {
    pmoe_status status = pmoe_layer_forward(r.layer, stash, NULL, &x, &y, NULL);
    CHECK(failures, status != PMOE_OK || c->layout.world == 8, "accepted");
    char both[2][24];
    snprintf(both[0], sizeof both[0], "%d tokens", (int)s.x.rows);
    snprintf(both[1], sizeof both[1], "%d tokens", (int)s.x.rows - 1);
    if (odd)
      CHECK(failures, strstr(pmoe_last_error(), both[0]) && strstr(pmoe_last_error(), both[1]), "\"%s\"",
            pmoe_last_error());
    if (odd) CHECK(failures, status == PMOE_ERR_MISMATCH, "%s", pmoe_status_name(status));
  }
  x = s.x;
  x.cols -= odd;
  pmoe_status status = pmoe_layer_forward(r.layer, stash, NULL, &x, &s.y, NULL);
  if (odd) CHECK(failures, status == PMOE_ERR_ARG || status == PMOE_ERR_COMM, "%s", pmoe_status_name(status));
  double unused;
  status = pmoe_layer_grad_sumsq(r.layer, odd ? NULL : &unused, NULL);
  if (odd) CHECK(failures, status == PMOE_ERR_ARG || status == PMOE_ERR_COMM, "%s", pmoe_status_name(status));
  /* Only where whoever shares a group shares them all do the others hear of it before they go on. */
  if (c->layout.world < 8) failures += works(c, &p, &r, stash);
  pmoe_stash_destroy(stash);
  rig_step_end(&s);
  rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_wrong_input_of_one_rank(void **state) {
  (void)state;
  each(wrong_input);
}

/* With sequence parallelism the branch needs room for the tokens of the whole TP group. */
static int small_stash(world *w) {
  const layout_case *c = w->arg;
  pmoe_topology *topology = NULL;
  layout_place p = {0};
  rig r = {0};
  int failures = layout_open(w, c, &topology, &p, &r);
  pmoe_stash_config cfg = layout_stash(c, 0);
  cfg.max_tokens = w->rank == 0 ? 2 : 9;
  pmoe_stash *stash = NULL;
  CHECK(failures, pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash) == PMOE_OK, "%s", pmoe_last_error());
  for (int round = 0; round < 2; round++) {
    rig_plan plan = {.label = "small", .loss_scale = 1.0, .seed = 5};
    layout_draw_tokens(c, &p, 1, &plan);
    for (int32_t i = 0; i < plan.num_ranks; i++) plan.rank_tokens[i] = round == 0 && i == 1 ? 9 : 2;
    rig_step s;
    rig_step_begin(&r, &s, &plan);
    pmoe_status status = layout_step(&r, stash, &s, 0);
    CHECK(failures, status == (round == 0 ? PMOE_ERR_ARG : PMOE_OK), "%s", pmoe_last_error());
    if (round == 0) CHECK(failures, strstr(pmoe_last_error(), "max_tokens 2"), "%s", pmoe_last_error());
    else if (!failures) failures += rig_check(&r, stash, &s, 1);
    rig_step_end(&s);
  }
  pmoe_stash_destroy(stash);
  rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_a_stash_too_small_for_the_group(void **state) {
  (void)state;
  layout_case c = case_of(1);
  world_run(c.layout.world, small_stash, &c);
}

/* Rank 0's allocation `fail_at` of a stash and a step fails: every rank comes back. A failed communicator may be the
 * world's own, so each try has a new one. */
typedef struct memory_case {
  layout_case c;
  int32_t fail_at;
  bool passed; /* rank 0 had all it wanted */
} memory_case;

static int out_of_memory(world *w) {
  memory_case *m = (memory_case *)w->arg;
  pmoe_topology *topology = NULL;
  layout_place p = {0};
  rig r = {0};
  pmoe_stash *stash = NULL;
  int failures = layout_open(w, &m->c, &topology, &p, &r);
  if (failures) return failures;
  rig_step s;
  layout_begin(&m->c, &p, &r, 1, &s);
  uint64_t before = world_now_ms();
  if (w->rank == 0) w->memory->fail_at = w->memory->calls + m->fail_at;
  pmoe_stash_config cfg = layout_stash(&m->c, 0);
  pmoe_status created = pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash);
  /* A rank without a stash still comes, and says so. */
  pmoe_status status = created == PMOE_OK ? layout_step(&r, stash, &s, 0) : rig_forward(&r, NULL, &s);
  if (w->rank == 0) {
    CHECK(failures, created != PMOE_ERR_NOMEM || status == PMOE_ERR_ARG, "%s", pmoe_last_error());
    CHECK(failures, created != PMOE_OK || status == PMOE_OK || status == PMOE_ERR_NOMEM, "%s", pmoe_last_error());
    w->memory->fail_at = 0;
    m->passed = status == PMOE_OK;
  }
  CHECK(failures, world_now_ms() - before < WORLD_TIMEOUT_MS / 2, "waited");
  pmoe_stash_destroy(stash);
  rig_step_end(&s);
  rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_allocation_failures(void **state) {
  (void)state;
  if (ranks_are_processes()) return; /* they cannot tell each other when to stop */
  for (int i = 0; i < FEW; i++) {
    memory_case m = {.c = case_of(i)};
    for (m.fail_at = 1; !m.passed; m.fail_at++) world_run(m.c.layout.world, out_of_memory, &m);
    assert_in_range(m.fail_at, 5, 40);
  }
}

static int thin_experts(world *w) {
  layout_case c = *(const layout_case *)w->arg;
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.tp = c.layout.tp;
  cfg.etp = c.layout.etp;
  pmoe_topology *topology = NULL;
  int failures = 0;
  CHECK(failures, pmoe_topology_create(w->ctx, w->comm, &cfg, &topology) == PMOE_OK, "%s", pmoe_last_error());
  rig r;
  c.spec.experts.inner = 1;
  CHECK(failures, rig_create(&r, w->ctx, topology, &c.spec) == PMOE_ERR_ARG, "accepted");
  CHECK(failures, strstr(pmoe_last_error(), "inner is 1; at least etp (2)"), "%s", pmoe_last_error());
  c.spec.experts.inner = 2;
  c.spec.residual.inner = 1;
  CHECK(failures, rig_create(&r, w->ctx, topology, &c.spec) == PMOE_ERR_ARG, "accepted");
  CHECK(failures, strstr(pmoe_last_error(), "inner is 1; at least tp (2)"), "%s", pmoe_last_error());
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_shards_of_nothing(void **state) {
  (void)state;
  layout_case c = case_of(0);
  world_run(2, thin_experts, &c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_memory_of_the_caller_suffices),
      cmocka_unit_test(test_first_values_do_not_depend_on_the_layout),
      cmocka_unit_test(test_the_same_bits),
      cmocka_unit_test(test_wrong_input_of_one_rank),
      cmocka_unit_test(test_a_stash_too_small_for_the_group),
      cmocka_unit_test(test_allocation_failures),
      cmocka_unit_test(test_shards_of_nothing),
  };
  return world_main("limits of layouts", tests, sizeof tests / sizeof tests[0]);
}
