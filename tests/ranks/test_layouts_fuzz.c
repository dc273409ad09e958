/* Random layouts, sizes, routings and masks against the reference. A short run by default;
 *   test_layouts_fuzz CASES [SEED]
 * runs more. A case that fails names its own seed: run one case from it. */
#include "ranks/layout.h"

#include <inttypes.h>
#include <stdlib.h>

static int64_t num_cases = 60;
static uint64_t first_seed = 20260901;

/* One case's choices: each draw has a place of its own, so that adding one leaves the others alone. */
typedef struct dice {
  uint64_t seed, place;
} dice;

static int64_t roll(dice *d, int64_t below) { return layout_draw(d->seed, 5000 + d->place++, below); }

static int32_t divisor_of(dice *d, int32_t n) {
  int32_t divisors[8] = {1}, count = 0;
  for (int32_t i = 1; i <= n; i++)
    if (n % i == 0) divisors[count++] = i;
  return divisors[roll(d, count)];
}

static layout draw_layout(dice *d) {
  static const char *const orders[] = {NULL,
                                       "tp-cp-ep-dp-pp",
                                       "ep-tp-cp-dp-pp",
                                       "dp-tp-ep-cp-pp",
                                       "cp-dp-tp-ep-pp",
                                       "dp-ep-cp-tp-pp",
                                       "pp-dp-ep-cp-tp",
                                       "pp-tp-ep-dp-cp"};
  layout l = {.world = 1 + (int32_t)roll(d, 8)};
  l.pp = roll(d, 4) == 0 ? divisor_of(d, l.world) : 1;
  int32_t stage = l.world / l.pp;
  l.tp = divisor_of(d, stage);
  l.cp = divisor_of(d, stage / l.tp);
  l.etp = roll(d, 3) == 0 ? l.tp : divisor_of(d, stage);
  l.ep = divisor_of(d, stage / l.etp);
  l.sp = (int32_t)roll(d, 2);
  l.order = orders[roll(d, sizeof orders / sizeof orders[0])];
  return l;
}

static void draw_gate(dice *d, pmoe_gate_config *gate) {
  gate->num_experts = 2 + (int32_t)roll(d, 8); /* of one expert the gradients cancel, and leave rounding errors */
  gate->top_k = 1 + (int32_t)roll(d, gate->num_experts < 3 ? 2 : 3);
  gate->score = (pmoe_score)roll(d, 3);
  gate->softmax_after_topk = gate->top_k > 1 && gate->score == PMOE_SCORE_SOFTMAX && roll(d, 2) == 0;
  gate->global_aux_coef = roll(d, 2) ? 0.2f : 0.0f;
  gate->norm = gate->top_k > 1 ? (pmoe_norm)roll(d, 3) : PMOE_NORM_NONE;
  gate->capacity_factor = roll(d, 2) == 0 ? 0.0f : 0.4f + 0.3f * (float)roll(d, 4);
  gate->min_capacity = (int32_t)roll(d, 3);
  gate->drop = roll(d, 2) ? PMOE_DROP_PROBS : PMOE_DROP_POSITION;
  gate->aux_first_choice_only = (int32_t)roll(d, 2);
  gate->weight_scale = roll(d, 3) == 0 ? 1.7f : 0.0f;
}

static void draw_experts(dice *d, const layout *l, rig_spec *spec) {
  spec->hidden = 3 + (int32_t)roll(d, 20);
  spec->experts.inner = l->etp + (int32_t)roll(d, 16);
  spec->experts.act = (pmoe_act)roll(d, 6);
  spec->experts.bias = (int32_t)roll(d, 2);
  spec->experts.recompute_act = roll(d, 4) == 0;
  spec->residual.mix = (pmoe_mix)roll(d, 4);
  spec->residual.inner = l->tp + (int32_t)roll(d, 12);
  spec->residual.act = (pmoe_act)roll(d, 6);
  spec->residual.bias = (int32_t)roll(d, 2);
}

static layout_case draw_case(uint64_t seed) {
  dice d = {seed, 0};
  layout_case c = {.layout = draw_layout(&d), .spec = rig_spec_default(), .seed = seed};
  draw_gate(&d, &c.spec.gate);
  draw_experts(&d, &c.layout, &c.spec);
  c.most_tokens = 1 + roll(&d, 12);
  c.masked = roll(&d, 3) == 0;
  c.split = roll(&d, 3) == 0;
  c.pile_up = roll(&d, 5) == 0;
  /* Probabilities of nearly 1 are equal in float32, but not in the reference. */
  if (c.pile_up) c.spec.gate.drop = PMOE_DROP_POSITION;
  c.spec.gate.bias = c.pile_up || roll(&d, 2);
  c.spec.slack = 50.0; /* sums that cancel turn up among many cases; what is wrong is wrong by far more */
  c.steps = 2;
  c.host_groups = roll(&d, 3) == 0;
  if (c.spec.gate.capacity_factor > 0.0f && roll(&d, 3) == 0) {
    c.spec.a2a.sizing = PMOE_SIZING_FIXED;
    c.spec.a2a.max_tokens = c.most_tokens * c.layout.tp;
  }
  return c;
}

static void test_random_cases(void **state) {
  (void)state;
  for (int64_t i = 0; i < num_cases; i++) {
    layout_case c = draw_case(first_seed + (uint64_t)i);
    if (num_cases > 1000 && i % 1000 == 0) fprintf(stderr, "%" PRId64 " cases\n", i);
    world_run(c.layout.world, layout_train, &c);
  }
}

int main(int argc, char **argv) {
  if (argc > 1) num_cases = strtoll(argv[1], NULL, 10);
  if (argc > 2) first_seed = strtoull(argv[2], NULL, 10);
  fprintf(stderr, "%" PRId64 " cases from seed %" PRIu64 "\n", num_cases, first_seed);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_cases)};
  return world_main("random layouts", tests, 1);
}
