/* Every kind of layout gives the numbers of one rank: outputs, losses, gradients, their norm, and parameters after
 * steps of gradient descent. */
#include "ranks/layout.h"

#define FIRST_EP "ep-tp-cp-dp-pp"
#define FIRST_DP "dp-tp-ep-cp-pp"

static const layout layouts[] = {
    /* world tp cp pp ep etp sp */
    {2, 1, 1, 1, 2, 1, 0, NULL}, /* EP */
    {2, 1, 2, 1, 1, 1, 0, NULL}, /* CP */
    {2, 1, 1, 2, 1, 1, 0, NULL}, /* PP */
    {2, 1, 1, 1, 1, 2, 0, NULL}, /* ETP of a model without TP */
    {2, 2, 1, 1, 1, 1, 0, NULL}, /* TP, the experts whole */
    {2, 2, 1, 1, 1, 1, 1, NULL},
    {2, 2, 1, 1, 1, 2, 0, NULL}, /* TP and ETP */
    {2, 2, 1, 1, 1, 2, 1, NULL},
    {2, 2, 1, 1, 2, 1, 0, NULL}, /* TP folded into EP */
    {2, 2, 1, 1, 2, 1, 1, NULL},
    {3, 3, 1, 1, 1, 3, 0, NULL},
    {3, 3, 1, 1, 3, 1, 1, NULL},
    {4, 2, 1, 1, 2, 2, 0, NULL},
    {4, 2, 1, 1, 2, 2, 1, NULL},
    {4, 2, 1, 1, 2, 1, 0, NULL},
    {4, 2, 1, 1, 4, 1, 1, NULL},
    {4, 4, 1, 1, 2, 2, 0, NULL}, /* ETP is half of TP */
    {4, 4, 1, 1, 1, 4, 1, NULL},
    {4, 1, 1, 1, 2, 2, 0, NULL},
    {4, 2, 1, 2, 1, 2, 0, NULL},
    {4, 2, 2, 1, 4, 1, 0, NULL},
    {4, 2, 2, 1, 2, 2, 1, NULL},
    {4, 2, 1, 1, 2, 2, 0, FIRST_EP},
    {4, 2, 1, 1, 2, 2, 0, FIRST_DP},
    {4, 2, 1, 1, 2, 1, 0, "ep-dp-cp-tp-pp"}, /* TP groups and expert groups cross */
    {4, 2, 1, 1, 2, 1, 1, "ep-dp-cp-tp-pp"},
    {8, 2, 1, 1, 2, 1, 0, "ep-dp-cp-tp-pp"},
    {6, 2, 1, 1, 3, 1, 0, NULL},
    {6, 3, 1, 1, 2, 3, 0, NULL},
    {6, 1, 3, 1, 3, 2, 0, NULL},
    {6, 2, 1, 1, 3, 2, 1, FIRST_EP},
    {8, 2, 2, 2, 2, 2, 1, NULL},
    {8, 2, 1, 1, 4, 1, 0, NULL},
    {8, 2, 1, 1, 4, 2, 0, NULL},
    {8, 2, 2, 1, 8, 1, 0, NULL},
    {8, 4, 1, 1, 4, 2, 1, NULL},
    {8, 4, 2, 1, 2, 2, 0, NULL},
    {8, 4, 1, 2, 2, 1, 0, NULL},
    {8, 2, 2, 1, 2, 4, 0, NULL}, /* ETP is more than TP */
    {8, 8, 1, 1, 1, 8, 0, NULL},
    {8, 8, 1, 1, 8, 1, 1, NULL},
    {8, 2, 1, 1, 2, 2, 0, FIRST_EP},
    {8, 2, 2, 1, 2, 2, 0, "cp-dp-tp-ep-pp"},
    {8, 2, 1, 1, 2, 2, 1, FIRST_DP},
    {8, 2, 1, 2, 2, 1, 0, "pp-dp-ep-cp-tp"},
    {8, 1, 2, 1, 4, 2, 0, "cp-ep-dp-tp-pp"},
};
enum { NUM_LAYOUTS = sizeof layouts / sizeof layouts[0] };

static void each_layout(layout_case *c) {
  for (int i = 0; i < NUM_LAYOUTS; i++) {
    c->layout = layouts[i];
    c->seed = 500 + (uint64_t)i;
    world_run(layouts[i].world, layout_train, c);
  }
}

static layout_case base(void) { return (layout_case){.spec = rig_spec_default(), .steps = 3, .most_tokens = 6}; }

static void test_swiglu_with_biases(void **state) {
  (void)state;
  layout_case c = base();
  c.spec.gate.num_experts = 5;
  c.spec.experts.act = PMOE_ACT_SWIGLU;
  c.spec.experts.bias = 1;
  c.spec.gate.norm = PMOE_NORM_AFTER_DROP;
  each_layout(&c);
}

static void test_residual_and_masks(void **state) {
  (void)state;
  layout_case c = base();
  c.masked = 1;
  c.spec.gate.score = PMOE_SCORE_SIGMOID;
  c.spec.gate.global_aux_coef = 0.3f;
  c.spec.gate.capacity_factor = 0.8f;
  c.spec.residual = (pmoe_residual_config){sizeof c.spec.residual, PMOE_MIX_LEARNED, 11, PMOE_ACT_SWIGLU, 1, 0, 0};
  each_layout(&c);
}

static void test_split_backward_with_gated_branch(void **state) {
  (void)state;
  layout_case c = base();
  c.split = 1;
  c.spec.gate.num_experts = 3;
  c.spec.experts.recompute_act = 1;
  c.spec.residual.mix = PMOE_MIX_GATED_SUM;
  c.spec.residual.inner = 9;
  each_layout(&c);
}

static void test_fixed_sizes(void **state) {
  (void)state;
  layout_case c = base();
  c.spec.gate.capacity_factor = 1.1f;
  c.spec.gate.drop = PMOE_DROP_PROBS;
  c.spec.a2a.sizing = PMOE_SIZING_FIXED;
  c.spec.a2a.max_tokens = 6 * 8;
  c.spec.residual.mix = PMOE_MIX_SUM;
  c.spec.residual.bias = 1;
  c.spec.residual.inner = 8;
  each_layout(&c);
}

static void test_bf16_all_on_one_expert(void **state) {
  (void)state;
  layout_case c = base();
  c.pile_up = 1;
  c.spec.gate.bias = 1;
  c.spec.gate.top_k = 1;
  c.spec.experts.dtype = PMOE_BF16;
  c.spec.experts.act = PMOE_ACT_SILU;
  c.spec.residual.mix = PMOE_MIX_GATED_SUM;
  c.spec.residual.inner = 8;
  each_layout(&c);
}

static void test_the_hosts_groups(void **state) {
  (void)state;
  layout_case c = base();
  c.host_groups = 1;
  c.steps = 1;
  c.spec.gate.num_experts = 7;
  c.spec.residual.mix = PMOE_MIX_LEARNED;
  c.spec.residual.inner = 8;
  each_layout(&c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_swiglu_with_biases),
      cmocka_unit_test(test_residual_and_masks),
      cmocka_unit_test(test_split_backward_with_gated_branch),
      cmocka_unit_test(test_fixed_sizes),
      cmocka_unit_test(test_bf16_all_on_one_expert),
      cmocka_unit_test(test_the_hosts_groups),
  };
  return world_main("layouts", tests, sizeof tests / sizeof tests[0]);
}
