#include "support/asserts.h"

#include "support/rig.h"

rig_plan rig_plan_of(const char *label, int64_t tokens, uint64_t seed) {
  rig_plan plan = {.label = label, .rank_tokens = {tokens}, .training = 1, .loss_scale = 1.0, .seed = seed};
  return plan;
}

void rig_bench_create(rig_bench *b, pmoe_ctx *ctx, const rig_spec *spec, const rig_plan *plan) {
  assert_ok(rig_create(&b->r, ctx, NULL, spec));
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = plan->rank_tokens[0];
  assert_ok(pmoe_stash_create(b->r.layer, &cfg, NULL, 0, &b->stash));
  rig_step_begin(&b->r, &b->s, plan);
}

void rig_bench_create_logits(rig_bench *b, pmoe_ctx *ctx, rig_spec spec, const double *logits, int64_t tokens) {
  int32_t e = spec.gate.num_experts;
  spec.hidden = e;
  rig_plan plan = rig_plan_of("given logits", tokens, 40);
  plan.x = logits;
  rig_bench_create(b, ctx, &spec, &plan);
  double *router = b->r.model->tensor[ORACLE_ROUTER_WEIGHT].data;
  for (int32_t i = 0; i < e * e; i++) router[i] = i / e == i % e;
  rig_load(&b->r);
}

void rig_bench_destroy(rig_bench *b) {
  rig_step_end(&b->s);
  pmoe_stash_destroy(b->stash);
  rig_destroy(&b->r);
}

void rig_bench_forward(rig_bench *b) {
  assert_ok(rig_forward(&b->r, b->stash, &b->s));
  b->routing = (pmoe_routing)PMOE_CONFIG_INIT(pmoe_routing);
  b->metrics = (pmoe_metrics)PMOE_CONFIG_INIT(pmoe_metrics);
  assert_ok(pmoe_stash_routing(b->stash, &b->routing));
  assert_ok(pmoe_stash_metrics(b->stash, &b->metrics));
}

void rig_bench_step(rig_bench *b) {
  rig_bench_forward(b);
  assert_ok(rig_backward(&b->r, b->stash, &b->s, PMOE_BWD_ALL));
}

void rig_bench_check(rig_bench *b) {
  assert_int_equal(rig_check(&b->r, b->stash, &b->s, 1) + rig_check_grads(&b->r, 1.0, b->s.plan.label), 0);
}
