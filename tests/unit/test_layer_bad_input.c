/* Wrong arguments where a layer and its stashes are made and its parameters handled: the right status, a sentence that
 * names the argument, outputs untouched, nothing leaked. */
#include "support/counted_layer.h"

/* ---- creation ---- */

typedef struct parts {
  pmoe_gate_config gate;
  pmoe_experts_config experts;
  pmoe_residual_config residual;
  pmoe_a2a_config a2a;
  pmoe_layer_config layer;
} parts;

static parts good_parts(void) {
  rig_spec spec = rig_spec_default();
  parts p = {spec.gate, spec.experts, spec.residual, spec.a2a, PMOE_CONFIG_INIT(pmoe_layer_config)};
  p.layer.hidden = spec.hidden;
  p.residual.mix = PMOE_MIX_SUM;
  return p;
}

static void assert_config_refused(bench *b, parts *p, pmoe_status status, const char *word, int line) {
  p->layer.gate = &p->gate;
  p->layer.experts = &p->experts;
  p->layer.residual = &p->residual;
  p->layer.a2a = &p->a2a;
  pmoe_layer *layer = NULL;
  int64_t held = b->memory.held_bytes;
  pmoe_status got = pmoe_layer_create(b->ctx, NULL, &p->layer, &layer);
  test_assert_refused(got, status, word, "pmoe_layer_create", __FILE__, line);
  assert_null(layer);
  assert_int_equal(b->memory.held_bytes, held);
}

/* One field of good parts changed. */
#define REFUSED(field, value, status, word)                                                                            \
  do {                                                                                                                 \
    parts changed_ = good_parts();                                                                                     \
    changed_.field = (value);                                                                                          \
    assert_config_refused(&b, &changed_, (status), (word), __LINE__);                                                  \
  } while (0)

static void test_router_configurations(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  REFUSED(gate.size, 0, PMOE_ERR_ARG, "size");
  REFUSED(gate.num_experts, 0, PMOE_ERR_ARG, "num_experts");
  REFUSED(gate.num_experts, -4, PMOE_ERR_ARG, "num_experts");
  REFUSED(gate.top_k, 0, PMOE_ERR_ARG, "top_k");
  REFUSED(gate.top_k, -1, PMOE_ERR_ARG, "top_k");
  REFUSED(gate.top_k, 5, PMOE_ERR_ARG, "top_k");
  REFUSED(gate.score, (pmoe_score)7, PMOE_ERR_ARG, "score");
  REFUSED(gate.norm, (pmoe_norm)7, PMOE_ERR_ARG, "norm");
  REFUSED(gate.norm, (pmoe_norm)-1, PMOE_ERR_ARG, "norm");
  REFUSED(gate.drop, (pmoe_drop)7, PMOE_ERR_ARG, "drop");
  REFUSED(gate.weight_scale, NAN, PMOE_ERR_ARG, "weight_scale");
  REFUSED(gate.weight_scale, INFINITY, PMOE_ERR_ARG, "weight_scale");
  REFUSED(gate.weight_scale, -1.0f, PMOE_ERR_ARG, "weight_scale");
  REFUSED(gate.capacity_factor, -1.0f, PMOE_ERR_ARG, "capacity_factor");
  REFUSED(gate.capacity_factor, NAN, PMOE_ERR_ARG, "capacity_factor");
  REFUSED(gate.capacity_factor, INFINITY, PMOE_ERR_ARG, "capacity_factor");
  REFUSED(gate.eval_capacity_factor, -0.5f, PMOE_ERR_ARG, "eval_capacity_factor");
  REFUSED(gate.min_capacity, -1, PMOE_ERR_ARG, "min_capacity");
  REFUSED(gate.aux_coef, -0.1f, PMOE_ERR_ARG, "aux_coef");
  REFUSED(gate.aux_coef, NAN, PMOE_ERR_ARG, "aux_coef");
  REFUSED(gate.z_coef, -0.1f, PMOE_ERR_ARG, "z_coef");
  REFUSED(gate.jitter, -0.1f, PMOE_ERR_ARG, "jitter");
  REFUSED(gate.jitter, 1.5f, PMOE_ERR_ARG, "jitter");
  REFUSED(gate.jitter, NAN, PMOE_ERR_ARG, "jitter");
  parts many = good_parts();
  many.gate.top_k = 3;
  many.gate.gumbel = 1;
  assert_config_refused(&b, &many, PMOE_ERR_ARG, "gumbel", __LINE__);
  take_down(&b);
}

static void test_expert_and_branch_configurations(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  REFUSED(experts.size, 1, PMOE_ERR_ARG, "size");
  REFUSED(experts.inner, 0, PMOE_ERR_ARG, "inner");
  REFUSED(experts.inner, -3, PMOE_ERR_ARG, "inner");
  REFUSED(experts.act, (pmoe_act)6, PMOE_ERR_ARG, "act");
  REFUSED(experts.act, (pmoe_act)-1, PMOE_ERR_ARG, "act");
  REFUSED(experts.dtype, (pmoe_dtype)9, PMOE_ERR_ARG, "dtype");
  REFUSED(experts.grad_dtype, (pmoe_dtype)9, PMOE_ERR_ARG, "grad_dtype");
  REFUSED(experts.grad_dtype, PMOE_BF16, PMOE_ERR_ARG, "grad_dtype"); /* float32 weights */
  REFUSED(residual.size, 0, PMOE_ERR_ARG, "size");
  REFUSED(residual.mix, (pmoe_mix)4, PMOE_ERR_ARG, "mix");
  REFUSED(residual.inner, 0, PMOE_ERR_ARG, "inner");
  REFUSED(residual.act, (pmoe_act)11, PMOE_ERR_ARG, "act");
  parts huge = good_parts(); /* its number of parameters would overflow */
  huge.layer.hidden = huge.experts.inner = INT32_MAX;
  assert_config_refused(&b, &huge, PMOE_ERR_ARG, "inner", __LINE__);
  REFUSED(residual.dtype, PMOE_BF16, PMOE_ERR_ARG, "dtype");
  REFUSED(residual.grad_dtype, PMOE_BF16, PMOE_ERR_ARG, "grad_dtype");
  parts half = good_parts();
  half.experts.dtype = PMOE_F16;
  half.layer.gate = &half.gate;
  half.layer.experts = &half.experts;
  pmoe_layer *layer = NULL;
  pmoe_status status = pmoe_layer_create(b.ctx, NULL, &half.layer, &layer);
  assert_true(status == PMOE_ERR_UNSUPPORTED || status == PMOE_ERR_ARG);
  assert_non_null(strstr(pmoe_last_error(), "float16"));
  take_down(&b);
}

static void test_exchange_and_layer_configurations(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  REFUSED(a2a.size, 0, PMOE_ERR_ARG, "size");
  REFUSED(a2a.sizing, (pmoe_sizing)2, PMOE_ERR_ARG, "sizing");
  REFUSED(a2a.sizing, PMOE_SIZING_FIXED, PMOE_ERR_ARG, "max_tokens"); /* 0 */
  REFUSED(a2a.max_recv_rows, -1, PMOE_ERR_ARG, "max_recv_rows");
  REFUSED(a2a.max_tokens, -1, PMOE_ERR_ARG, "max_tokens");
  parts fixed = good_parts();
  fixed.a2a.sizing = PMOE_SIZING_FIXED;
  fixed.a2a.max_tokens = 8;
  assert_config_refused(&b, &fixed, PMOE_ERR_ARG, "max_recv_rows", __LINE__); /* dropless: no bound */
  REFUSED(layer.size, 0, PMOE_ERR_ARG, "size");
  REFUSED(layer.hidden, 0, PMOE_ERR_ARG, "hidden");
  REFUSED(layer.hidden, -8, PMOE_ERR_ARG, "hidden");
  REFUSED(layer.ep, -1, PMOE_ERR_ARG, "ep");
  REFUSED(layer.ep, 2, PMOE_ERR_ARG, "ep"); /* alone */

  parts good = good_parts();
  pmoe_layer *layer = NULL;
  good.layer.experts = &good.experts;
  assert_refused(pmoe_layer_create(b.ctx, NULL, &good.layer, &layer), PMOE_ERR_ARG, "gate");
  good.layer.experts = NULL;
  good.layer.gate = &good.gate;
  assert_refused(pmoe_layer_create(b.ctx, NULL, &good.layer, &layer), PMOE_ERR_ARG, "experts");
  good.layer.experts = &good.experts;
  assert_refused(pmoe_layer_create(NULL, NULL, &good.layer, &layer), PMOE_ERR_ARG, "ctx");
  assert_status(pmoe_layer_create(b.ctx, NULL, NULL, &layer), PMOE_ERR_ARG);
  assert_refused(pmoe_layer_create(b.ctx, NULL, &good.layer, NULL), PMOE_ERR_ARG, "out");
  assert_null(layer);
  pmoe_layer_destroy(NULL);
  take_down(&b);
}

/* ---- stashes ---- */

static void test_stash_arguments(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = T;
  size_t bytes = 11;
  pmoe_stash *stash = NULL;
  assert_refused(pmoe_stash_bytes(NULL, &cfg, &bytes), PMOE_ERR_ARG, "layer");
  assert_status(pmoe_stash_bytes(b.r.layer, NULL, &bytes), PMOE_ERR_ARG);
  assert_refused(pmoe_stash_bytes(b.r.layer, &cfg, NULL), PMOE_ERR_ARG, "bytes");
  assert_refused(pmoe_layer_scratch_bytes(NULL, &cfg, &bytes), PMOE_ERR_ARG, "layer");
  assert_status(pmoe_layer_scratch_bytes(b.r.layer, NULL, &bytes), PMOE_ERR_ARG);
  assert_refused(pmoe_layer_scratch_bytes(b.r.layer, &cfg, NULL), PMOE_ERR_ARG, "bytes");
  assert_refused(pmoe_stash_create(NULL, &cfg, NULL, 0, &stash), PMOE_ERR_ARG, "layer");
  assert_status(pmoe_stash_create(b.r.layer, NULL, NULL, 0, &stash), PMOE_ERR_ARG);
  assert_refused(pmoe_stash_create(b.r.layer, &cfg, NULL, 0, NULL), PMOE_ERR_ARG, "out");
  for (int i = 0; i < 3; i++) {
    pmoe_stash_config bad = cfg;
    if (i == 0) bad.size = 0;
    if (i == 1) bad.max_tokens = -1;
    if (i == 2) bad.max_recv_rows = -1;
    const char *word = i == 0 ? "size" : i == 1 ? "max_tokens" : "max_recv_rows";
    assert_refused(pmoe_stash_bytes(b.r.layer, &bad, &bytes), PMOE_ERR_ARG, word);
    assert_refused(pmoe_layer_scratch_bytes(b.r.layer, &bad, &bytes), PMOE_ERR_ARG, word);
    assert_refused(pmoe_stash_create(b.r.layer, &bad, NULL, 0, &stash), PMOE_ERR_ARG, word);
  }
  assert_int_equal(bytes, 11);
  assert_null(stash);
  pmoe_stash_destroy(NULL);
  assert_still_works(&b);
  take_down(&b);
}

static void test_sizes_that_no_memory_holds(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  pmoe_stash *stash = NULL;
  const int64_t sizes[] = {INT64_MAX, INT64_MAX / 2, INT64_C(1) << 60, INT64_C(1) << 58};
  for (int i = 0; i < 4; i++) {
    cfg.max_tokens = sizes[i];
    pmoe_status status = pmoe_stash_create(b.r.layer, &cfg, NULL, 0, &stash);
    assert_status(status, PMOE_ERR_ARG);
    cfg.max_tokens = 1;
    cfg.max_recv_rows = sizes[i];
    assert_refused(pmoe_stash_create(b.r.layer, &cfg, NULL, 0, &stash), PMOE_ERR_ARG, "max_recv_rows");
    cfg.max_recv_rows = 0;
    REFUSED(a2a.max_tokens, sizes[i], PMOE_ERR_ARG, "max_tokens");
    REFUSED(a2a.max_recv_rows, sizes[i], PMOE_ERR_ARG, "max_recv_rows");
    assert_null(stash);
  }
  const int64_t huge = INT64_C(1) << 28; /* can be asked for, and not be had */
  cfg.max_tokens = huge;
  size_t bytes;
  assert_ok(pmoe_stash_bytes(b.r.layer, &cfg, &bytes));
  assert_true(bytes > (size_t)huge * 2 * (12 + 10) * sizeof(float));
  assert_still_works(&b);
  take_down(&b);
}

static void test_reading_before_the_first_forward(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  pmoe_routing routing = PMOE_CONFIG_INIT(pmoe_routing);
  pmoe_metrics metrics = PMOE_CONFIG_INIT(pmoe_metrics);
  metrics.tokens = 5;
  routing.tokens = 6;
  assert_status(pmoe_stash_routing(b.stash, &routing), PMOE_ERR_STATE);
  assert_status(pmoe_stash_metrics(b.stash, &metrics), PMOE_ERR_STATE);
  assert_refused(pmoe_stash_routing(NULL, &routing), PMOE_ERR_ARG, "stash");
  assert_refused(pmoe_stash_metrics(NULL, &metrics), PMOE_ERR_ARG, "stash");
  assert_ok(rig_forward(&b.r, b.stash, &b.s));
  assert_refused(pmoe_stash_routing(b.stash, NULL), PMOE_ERR_ARG, "out");
  assert_refused(pmoe_stash_metrics(b.stash, NULL), PMOE_ERR_ARG, "out");
  metrics.size = routing.size = 0;
  assert_refused(pmoe_stash_routing(b.stash, &routing), PMOE_ERR_ARG, "size");
  assert_refused(pmoe_stash_metrics(b.stash, &metrics), PMOE_ERR_ARG, "size");
  assert_int_equal(metrics.tokens, 5);
  assert_int_equal(routing.tokens, 6);
  take_down(&b);
}

/* ---- parameters ---- */

static void test_parameters_that_are_not_bound(void **state) {
  (void)state;
  bench b;
  set_up_split(&b, 1);
  double sum = 7.0;
  for (int32_t p = 0; p < b.r.num_params; p++) {
    const pmoe_param *param = &b.r.param[p];
    assert_ok(pmoe_layer_bind_param(b.r.layer, p, NULL, param->grad));
    assert_refused(rig_forward(&b.r, b.stash, &b.s), PMOE_ERR_STATE, param->name);
    assert_refused(pmoe_layer_init_params(b.r.layer, 1, 0.1f), PMOE_ERR_STATE, param->name);
    assert_untouched(&b.s.y);
    assert_ok(pmoe_layer_bind_param(b.r.layer, p, param->data, NULL));
    assert_refused(pmoe_layer_reduce_grads(b.r.layer, 1.0f, NULL), PMOE_ERR_STATE, param->name);
    assert_refused(pmoe_layer_grad_sumsq(b.r.layer, &sum, NULL), PMOE_ERR_STATE, param->name);
    assert_ok(pmoe_layer_forward(b.r.layer, b.stash, &b.s.step, &b.s.x, &b.s.y, NULL)); /* needs no gradients */
    assert_refused(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_ALL), PMOE_ERR_STATE, param->name);
    assert_untouched(&b.s.dx);
    assert_ok(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_INPUT)); /* nor does this */
    assert_refused(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_WEIGHT), PMOE_ERR_STATE, param->name);
    assert_ok(pmoe_layer_bind_param(b.r.layer, p, param->data, param->grad));
    test_poison(b.s.y.data, T * 12 * sizeof(float));
    test_poison(b.s.dx.data, T * 12 * sizeof(float));
  }
  assert_true(sum == 7.0);
  assert_still_works(&b);
  take_down(&b);
}

static void test_parameter_arguments(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  pmoe_param param = PMOE_CONFIG_INIT(pmoe_param);
  param.numel = 13;
  double sum = 7.0;
  assert_int_equal(pmoe_layer_num_params(NULL), 0);
  assert_refused(pmoe_layer_param(NULL, 0, &param), PMOE_ERR_ARG, "layer");
  assert_refused(pmoe_layer_param(b.r.layer, -1, &param), PMOE_ERR_ARG, "index");
  assert_refused(pmoe_layer_param(b.r.layer, b.r.num_params, &param), PMOE_ERR_ARG, "index");
  assert_refused(pmoe_layer_param(b.r.layer, 0, NULL), PMOE_ERR_ARG, "out");
  param.size = 0;
  assert_refused(pmoe_layer_param(b.r.layer, 0, &param), PMOE_ERR_ARG, "size");
  assert_int_equal(param.numel, 13);
  assert_refused(pmoe_layer_bind_param(NULL, 0, NULL, NULL), PMOE_ERR_ARG, "layer");
  assert_refused(pmoe_layer_bind_param(b.r.layer, -1, NULL, NULL), PMOE_ERR_ARG, "index");
  assert_refused(pmoe_layer_bind_param(b.r.layer, b.r.num_params, NULL, NULL), PMOE_ERR_ARG, "index");
  assert_refused(pmoe_layer_bind_param(b.r.layer, 0, (char *)b.r.param[0].data + 1, NULL), PMOE_ERR_ARG, "data");
  assert_refused(pmoe_layer_bind_param(b.r.layer, 0, NULL, (char *)b.r.param[0].grad + 2), PMOE_ERR_ARG, "grad");
  assert_refused(pmoe_layer_init_params(NULL, 0, 1.0f), PMOE_ERR_ARG, "layer");
  assert_refused(pmoe_layer_init_params(b.r.layer, 0, -1.0f), PMOE_ERR_ARG, "std");
  assert_refused(pmoe_layer_init_params(b.r.layer, 0, NAN), PMOE_ERR_ARG, "std");
  assert_refused(pmoe_layer_reduce_grads(NULL, 1.0f, NULL), PMOE_ERR_ARG, "layer");
  assert_refused(pmoe_layer_reduce_grads(b.r.layer, NAN, NULL), PMOE_ERR_ARG, "scale");
  assert_refused(pmoe_layer_reduce_grads(b.r.layer, INFINITY, NULL), PMOE_ERR_ARG, "scale");
  assert_refused(pmoe_layer_grad_sumsq(NULL, &sum, NULL), PMOE_ERR_ARG, "layer");
  assert_refused(pmoe_layer_grad_sumsq(b.r.layer, NULL, NULL), PMOE_ERR_ARG, "out");
  assert_true(sum == 7.0);
  assert_still_works(&b);
  take_down(&b);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_router_configurations),
      cmocka_unit_test(test_expert_and_branch_configurations),
      cmocka_unit_test(test_exchange_and_layer_configurations),
      cmocka_unit_test(test_stash_arguments),
      cmocka_unit_test(test_sizes_that_no_memory_holds),
      cmocka_unit_test(test_reading_before_the_first_forward),
      cmocka_unit_test(test_parameters_that_are_not_bound),
      cmocka_unit_test(test_parameter_arguments),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
