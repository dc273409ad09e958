/* What must not depend on the layout though ranks split the tokens: noise, and losses over a micro-batch. */
#include "ranks/layout.h"

#include <stdlib.h>

static const layout split[] = {
    {2, 2, 1, 1, 1, 1, 0, NULL}, {2, 2, 1, 1, 2, 1, 1, NULL}, {2, 1, 2, 1, 2, 1, 0, NULL},
    {4, 2, 2, 1, 2, 2, 0, NULL}, {4, 2, 2, 1, 4, 1, 1, NULL}, {4, 1, 4, 1, 2, 2, 0, NULL},
    {8, 4, 2, 1, 4, 2, 0, NULL}, {8, 2, 4, 1, 2, 4, 1, NULL}, {8, 2, 4, 1, 8, 1, 0, "ep-cp-tp-dp-pp"},
};
enum { LAYOUTS = sizeof split / sizeof split[0], SEQUENCES = 3 };

static layout_case case_of(int i) {
  layout_case c = {.layout = split[i], .spec = rig_spec_default(), .seed = 70 + (uint64_t)i, .most_tokens = 6};
  c.spec.gate.num_experts = 5;
  c.spec.experts.act = PMOE_ACT_SWIGLU;
  c.spec.experts.bias = 1;
  c.spec.residual.mix = PMOE_MIX_LEARNED;
  c.spec.residual.inner = 9;
  return c;
}

/* ---- noise ---- */

/* Jitter and Gumbel noise are drawn by global token, so that every layout routes as one rank does. */
static int noise(world *w) {
  layout_case c = *(const layout_case *)w->arg;
  c.spec.gate.jitter = 0.3f;
  c.spec.gate.gumbel = 1;
  pmoe_topology *topology = NULL;
  layout_place p = {0};
  rig spread = {0}, alone = {0};
  int failures = layout_open(w, &c, &topology, &p, &spread);
  CHECK(failures, rig_create(&alone, w->ctx, NULL, &c.spec) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  rig_step s, whole;
  layout_begin(&c, &p, &spread, 1, &s);
  rig_plan one = {.label = "noise", .training = 1, .loss_scale = 1.0, .step = 1, .x = s.x_all, .dy = s.dy_all};
  one.rank_tokens[0] = s.total;
  rig_step_begin(&alone, &whole, &one);
  pmoe_stash *here = NULL, *there = NULL;
  pmoe_stash_config cfg = layout_stash(&c, 0), all = PMOE_CONFIG_INIT(pmoe_stash_config);
  all.max_tokens = s.total;
  CHECK(failures, pmoe_stash_create(spread.layer, &cfg, NULL, 0, &here) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_stash_create(alone.layer, &all, NULL, 0, &there) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, rig_forward(&spread, here, &s) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, rig_forward(&alone, there, &whole) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_routing a = PMOE_CONFIG_INIT(pmoe_routing), b = a;
  CHECK(failures, pmoe_stash_routing(here, &a) == PMOE_OK && pmoe_stash_routing(there, &b) == PMOE_OK, "%s",
        pmoe_last_error());
  for (int64_t i = 0; i < a.tokens * a.top_k && !failures; i++) {
    int64_t j = s.own_first * a.top_k + i;
    CHECK(failures, a.expert[i] == b.expert[j] && a.weight[i] == b.weight[j], "choice %lld of source %d", (long long)i,
          p.source);
  }
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
  for (int i = 0; i < LAYOUTS; i++) {
    layout_case c = case_of(i);
    world_run(c.layout.world, noise, &c);
  }
}

/* ---- losses over a micro-batch that ranks split ---- */

/* All of a step's tokens on one rank, with the same parameters. */
typedef struct whole_step {
  rig r;
  rig_step s;
  pmoe_stash *stash;
  pmoe_metrics metrics;
} whole_step;

static void give_sequences(rig_step *s, const int32_t *sequence) {
  s->step.sequence = sequence + s->first;
  s->step.num_sequences = SEQUENCES;
}

static pmoe_status run_whole(whole_step *one, world *w, const rig_spec *spec, const rig_step *spread,
                             const int32_t *sequence) {
  pmoe_status status = rig_create(&one->r, w->ctx, NULL, spec);
  rig_plan plan = {.label = "whole", .training = 1, .loss_scale = 1.5, .x = spread->x_all, .dy = spread->dy_all};
  plan.rank_tokens[0] = spread->total;
  rig_step_begin(&one->r, &one->s, &plan);
  give_sequences(&one->s, sequence);
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = spread->total;
  if (status == PMOE_OK) status = pmoe_stash_create(one->r.layer, &cfg, NULL, 0, &one->stash);
  if (status == PMOE_OK) status = layout_step(&one->r, one->stash, &one->s, 0);
  one->metrics = (pmoe_metrics)PMOE_CONFIG_INIT(pmoe_metrics);
  return status == PMOE_OK ? pmoe_stash_metrics(one->stash, &one->metrics) : status;
}

static int compare_with_whole(const rig *r, const whole_step *one) {
  int failures = 0;
  for (int32_t i = 0; i < r->num_params; i++) {
    int64_t n = r->param[i].numel;
    double *expected = calloc((size_t)n + 1, sizeof *expected);
    const float *grad = one->r.param[i].grad;
    for (int64_t j = 0; j < n; j++) expected[j] = (double)grad[rig_element(r, i, j)];
    failures += test_compare(r->param[i].name, r->param[i].grad, PMOE_F32, expected, 1.0, n, PMOE_F32);
    free(expected);
  }
  return failures;
}

/* The shares of all ranks add up to the loss, and the gradients to its gradient. */
static int split_losses(world *w) {
  const layout_case *c = w->arg;
  pmoe_topology *topology = NULL;
  layout_place p = {0};
  rig r = {0};
  int failures = layout_open(w, c, &topology, &p, &r);
  rig_step s;
  rig_plan plan = {.label = "losses", .training = 1, .loss_scale = 1.5, .seed = c->seed};
  layout_draw_tokens(c, &p, 1, &plan);
  rig_step_begin(&r, &s, &plan);
  int32_t *sequence = calloc((size_t)s.total + 1, sizeof *sequence);
  for (int64_t t = 0; t < s.total; t++) sequence[t] = (int32_t)(t * 5 / 3 % SEQUENCES);
  give_sequences(&s, sequence);
  whole_step one = {0};
  CHECK(failures, run_whole(&one, w, &c->spec, &s, sequence) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_stash *stash = NULL;
  pmoe_stash_config cfg = layout_stash(c, 0);
  CHECK(failures, pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, layout_step(&r, stash, &s, 0) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
  CHECK(failures, pmoe_stash_metrics(stash, &m) == PMOE_OK, "%s", pmoe_last_error());
  float sums[4] = {m.aux_loss, m.z_loss, m.seq_aux_loss, m.global_aux_loss};
  const float whole[4] = {one.metrics.aux_loss, one.metrics.z_loss, one.metrics.seq_aux_loss,
                          one.metrics.global_aux_loss};
  CHECK(failures, pmoe_comm_allreduce(p.stage, sums, 4, PMOE_F32) == PMOE_OK, "%s", pmoe_last_error());
  for (int i = 0; i < 4; i++) {
    CHECK(failures, whole[i] > 0.01f, "loss %d is %g", i, (double)whole[i]);
    failures += test_compare_one("loss of all ranks", (double)sums[i], (double)whole[i], 1e-5);
  }
  CHECK(failures, pmoe_layer_reduce_grads(r.layer, 1.0f, NULL) == PMOE_OK, "%s", pmoe_last_error());
  if (!failures) failures += compare_with_whole(&r, &one);
  pmoe_stash_destroy(stash);
  pmoe_stash_destroy(one.stash);
  rig_step_end(&s);
  rig_step_end(&one.s);
  rig_destroy(&one.r);
  rig_destroy(&r);
  pmoe_topology_destroy(topology);
  free(sequence);
  return failures;
}

static void test_losses_of_a_split_micro_batch(void **state) {
  (void)state;
  for (int i = 0; i < LAYOUTS; i++) {
    layout_case c = case_of(i);
    c.spec.max_sequences = SEQUENCES;
    c.spec.gate.seq_aux_coef = 0.2f;
    c.spec.gate.global_aux_coef = 0.3f;
    world_run(c.layout.world, split_losses, &c);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_noise_does_not_depend_on_the_layout),
                                     cmocka_unit_test(test_losses_of_a_split_micro_batch)};
  return world_main("split micro-batches", tests, sizeof tests / sizeof tests[0]);
}
