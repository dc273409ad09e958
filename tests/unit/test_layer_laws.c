/* What must not change a layer's result, and what must not change a single bit of it. */
#include "support/asserts.h"

#include <math.h>
#include <stdlib.h>

#include "support/rig.h"

enum { T = 12, H = 12, E = 4 };

/* A layer with one micro-batch, from its start to its end. */
typedef struct run {
  pmoe_ctx *ctx;
  rig r;
  rig_step s;
  pmoe_stash *stash;
} run;

static rig_plan plan_of(int64_t tokens, uint64_t seed) {
  rig_plan plan = {.label = "law", .rank_tokens = {tokens}, .training = 1, .loss_scale = 1.0, .seed = seed};
  return plan;
}

static void start(run *o, const rig_spec *spec, const rig_plan *plan, int32_t threads) {
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = threads;
  cfg.seed = 17;
  assert_ok(pmoe_ctx_create(&cfg, &o->ctx));
  assert_ok(rig_create(&o->r, o->ctx, NULL, spec));
  pmoe_stash_config stash = PMOE_CONFIG_INIT(pmoe_stash_config);
  stash.max_tokens = plan->rank_tokens[0];
  assert_ok(pmoe_stash_create(o->r.layer, &stash, NULL, 0, &o->stash));
  rig_step_begin(&o->r, &o->s, plan);
}

static void step(run *o) {
  assert_ok(rig_forward(&o->r, o->stash, &o->s));
  assert_ok(rig_backward(&o->r, o->stash, &o->s, PMOE_BWD_ALL));
}

static void end(run *o) {
  rig_step_end(&o->s);
  pmoe_stash_destroy(o->stash);
  rig_destroy(&o->r);
  pmoe_ctx_destroy(o->ctx);
}

static void assert_same_bits(const run *a, const run *b) {
  size_t na, nb;
  void *pa = rig_snapshot(&a->r, &a->s, &na), *pb = rig_snapshot(&b->r, &b->s, &nb);
  assert_int_equal(na, nb);
  assert_memory_equal(pa, pb, na);
  free(pa);
  free(pb);
}

/* Row order[i] of `got` is row i of `expected`. */
static void assert_rows_permuted(const pmoe_mat *got, const pmoe_mat *expected, const int *order, int64_t rows) {
  double *moved = calloc((size_t)(rows * expected->cols), sizeof *moved);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < expected->cols; j++)
      moved[order[i] * expected->cols + j] = test_get(expected->data, expected->dtype, i * expected->ld + j);
  pmoe_mat part = *got;
  part.rows = rows;
  assert_int_equal(test_compare_mat("permuted rows", &part, moved, 1.0, expected->dtype), 0);
  free(moved);
}

static void assert_grads_near(const run *got, const run *expected) {
  for (int32_t p = 0; p < got->r.num_params; p++) {
    const pmoe_param *a = &got->r.param[p], *b = &expected->r.param[p];
    double *values = calloc((size_t)b->numel, sizeof *values);
    for (int64_t i = 0; i < b->numel; i++) values[i] = test_get(b->grad, b->grad_dtype, i);
    assert_int_equal(
        test_compare(a->name, a->grad, a->grad_dtype, values, 1.0, a->numel, expected->r.spec.experts.dtype), 0);
    free(values);
  }
}

static rig_spec busy_spec(pmoe_dtype dtype) {
  rig_spec spec = rig_spec_default();
  spec.experts.dtype = dtype;
  spec.experts.act = PMOE_ACT_SWIGLU;
  spec.experts.bias = 1;
  spec.residual.mix = PMOE_MIX_LEARNED;
  return spec;
}

static void test_runs_and_threads_give_the_same_bits(void **state) {
  (void)state;
  for (int i = 0; i < 2; i++) {
    rig_spec spec = busy_spec(i ? PMOE_BF16 : PMOE_F32);
    spec.hidden = 65;
    spec.experts.inner = 40;
    spec.gate.num_experts = 16;
    spec.gate.top_k = 8;
    rig_plan plan = plan_of(150, 5);
    run first;
    start(&first, &spec, &plan, 1);
    step(&first);
    for (int32_t again = 0; again < 8; again++) {
      run o;
      start(&o, &spec, &plan, 1 + again % 4);
      step(&o);
      assert_same_bits(&o, &first);
      end(&o);
    }
    end(&first);
  }
}

static void test_fixed_equals_eager_bit_for_bit(void **state) {
  (void)state;
  for (int i = 0; i < 4; i++) {
    rig_spec spec = busy_spec(i % 2 ? PMOE_BF16 : PMOE_F32);
    spec.gate.capacity_factor = i / 2 ? 0.8f : 0.0f;
    rig_plan plan = plan_of(T, 6);
    run eager, fixed;
    start(&eager, &spec, &plan, 2);
    spec.a2a.sizing = PMOE_SIZING_FIXED;
    spec.a2a.max_tokens = T + 5;
    spec.a2a.max_recv_rows = i / 2 ? 0 : 3 * T;
    start(&fixed, &spec, &plan, 2);
    step(&eager);
    step(&fixed);
    assert_same_bits(&fixed, &eager);
    end(&eager);
    end(&fixed);
  }
}

static void test_large_capacity_equals_dropless(void **state) {
  (void)state;
  for (int i = 0; i < 6; i++) {
    rig_spec spec = busy_spec(i % 2 ? PMOE_BF16 : PMOE_F32);
    spec.gate.norm = PMOE_NORM_AFTER_DROP;
    rig_plan plan = plan_of(T, 7);
    run dropless, capped;
    start(&dropless, &spec, &plan, 1);
    spec.gate.capacity_factor = 100.0f;
    spec.gate.drop = (pmoe_drop)(i / 2);
    start(&capped, &spec, &plan, 1);
    step(&dropless);
    step(&capped);
    int order[T];
    for (int t = 0; t < T; t++) order[t] = t;
    assert_rows_permuted(&capped.s.y, &dropless.s.y, order, T);
    assert_rows_permuted(&capped.s.dx, &dropless.s.dx, order, T);
    assert_grads_near(&capped, &dropless);
    end(&dropless);
    end(&capped);
  }
}

static void test_permuting_tokens_permutes_outputs(void **state) {
  (void)state;
  for (int i = 0; i < 3; i++) {
    rig_spec spec = busy_spec(PMOE_F32);
    if (i == 1) { /* the most probable survive wherever they stand */
      spec.gate.capacity_factor = 0.7f;
      spec.gate.drop = PMOE_DROP_PROBS;
    }
    if (i == 2) spec.residual.mix = PMOE_MIX_GATED_SUM;
    rig_plan plan = plan_of(T, 8);
    run straight, moved;
    start(&straight, &spec, &plan, 2);
    int order[T];
    double x[T * H], dy[T * H];
    for (int t = 0; t < T; t++) {
      order[t] = (5 * t + 3) % T;
      memcpy(x + order[t] * H, straight.s.x_all + t * H, H * sizeof *x);
      memcpy(dy + order[t] * H, straight.s.dy_all + t * H, H * sizeof *dy);
    }
    plan.x = x;
    plan.dy = dy;
    start(&moved, &spec, &plan, 2);
    step(&straight);
    step(&moved);
    assert_rows_permuted(&moved.s.y, &straight.s.y, order, T);
    assert_rows_permuted(&moved.s.dx, &straight.s.dx, order, T);
    assert_grads_near(&moved, &straight);
    end(&straight);
    end(&moved);
  }
}

/* Moves the blocks of one parameter that belong to one expert each. */
static void relabel(const pmoe_param *param, const void *from, void *to, pmoe_dtype dtype, const int *label) {
  size_t block = (size_t)(param->numel / E) * pmoe_dtype_size(dtype);
  for (int e = 0; e < E; e++)
    memcpy((char *)to + (size_t)label[e] * block, (const char *)from + (size_t)e * block, block);
}

static void test_relabelling_experts_changes_nothing(void **state) {
  (void)state;
  const int label[E] = {2, 0, 3, 1};
  rig_spec spec = busy_spec(PMOE_F32);
  spec.gate.capacity_factor = 0.8f;
  spec.gate.bias = 1;
  rig_plan plan = plan_of(T, 9);
  run plain, named;
  start(&plain, &spec, &plan, 2);
  start(&named, &spec, &plan, 2);
  for (int32_t p = 0; p < plain.r.num_params; p++)
    if (plain.r.param[p].shape[0] == E && strncmp(plain.r.param[p].name, "residual", 8) != 0)
      relabel(&plain.r.param[p], plain.r.param[p].data, named.r.param[p].data, plain.r.param[p].dtype, label);
  step(&plain);
  step(&named);
  int order[T];
  for (int t = 0; t < T; t++) order[t] = t;
  assert_rows_permuted(&named.s.y, &plain.s.y, order, T);
  assert_rows_permuted(&named.s.dx, &plain.s.dx, order, T);
  for (int32_t p = 0; p < plain.r.num_params; p++)
    if (plain.r.param[p].shape[0] == E && strncmp(plain.r.param[p].name, "residual", 8) != 0) {
      void *kept = malloc((size_t)plain.r.param[p].numel * sizeof(float));
      memcpy(kept, plain.r.param[p].grad, (size_t)plain.r.param[p].numel * sizeof(float));
      relabel(&plain.r.param[p], kept, plain.r.param[p].grad, PMOE_F32, label);
      free(kept);
    }
  assert_grads_near(&named, &plain);
  end(&plain);
  end(&named);
}

static void test_padding_rows_change_nothing(void **state) {
  (void)state;
  enum { PADDED = T + 7 };
  rig_spec spec = busy_spec(PMOE_F32);
  spec.residual.mix = PMOE_MIX_NONE; /* a branch sees every token, masked or not */
  rig_plan plan = plan_of(T, 10);
  run bare, padded;
  start(&bare, &spec, &plan, 2);
  double x[PADDED * H], dy[PADDED * H];
  uint8_t mask[PADDED];
  for (int i = 0; i < PADDED * H; i++) x[i] = dy[i] = 3.0;
  memcpy(x, bare.s.x_all, T * H * sizeof *x);
  memcpy(dy, bare.s.dy_all, T * H * sizeof *dy);
  for (int t = 0; t < PADDED; t++) mask[t] = t < T;
  plan.x = x;
  plan.dy = dy;
  plan.rank_tokens[0] = PADDED;
  start(&padded, &spec, &plan, 2);
  padded.s.step.token_mask = mask;
  padded.s.step.token_mask_len = PADDED;
  step(&bare);
  step(&padded);
  int order[T];
  for (int t = 0; t < T; t++) order[t] = t;
  assert_rows_permuted(&padded.s.y, &bare.s.y, order, T);
  assert_rows_permuted(&padded.s.dx, &bare.s.dx, order, T);
  for (int i = T * H; i < PADDED * H; i++) {
    assert_true(test_get(padded.s.y.data, PMOE_F32, i) == 0.0);
    assert_true(test_get(padded.s.dx.data, PMOE_F32, i) == 0.0);
  }
  assert_grads_near(&padded, &bare);
  end(&bare);
  end(&padded);
}

static void test_evaluation_has_no_randomness(void **state) {
  (void)state;
  rig_spec spec = busy_spec(PMOE_F32);
  spec.gate.eval_capacity_factor = 0.6f;
  rig_plan plan = plan_of(T, 11);
  plan.training = 0;
  run quiet;
  start(&quiet, &spec, &plan, 2);
  step(&quiet);
  spec.gate.jitter = 0.3f;
  spec.gate.gumbel = 1;
  spec.gate.drop = PMOE_DROP_RANDOM;
  for (uint64_t n = 0; n < 4; n++) {
    run o;
    start(&o, &spec, &plan, 2);
    o.s.step.step = n;
    step(&o);
    assert_same_bits(&o, &quiet);
    end(&o);
  }
  end(&quiet);
}

static void test_step_null_is_evaluation(void **state) {
  (void)state;
  rig_spec spec = busy_spec(PMOE_F32);
  spec.gate.jitter = 0.3f;
  rig_plan plan = plan_of(T, 12);
  plan.training = 0;
  run with, without;
  start(&with, &spec, &plan, 1);
  start(&without, &spec, &plan, 1);
  step(&with);
  assert_ok(pmoe_layer_forward(without.r.layer, without.stash, NULL, &without.s.x, &without.s.y, NULL));
  assert_ok(rig_backward(&without.r, without.stash, &without.s, PMOE_BWD_ALL));
  assert_same_bits(&without, &with);
  end(&with);
  end(&without);
}

/* Noise is keyed by step and global token, so that it does not depend on how tokens are cut into micro-batches. */
static void test_noise_follows_the_global_token(void **state) {
  (void)state;
  rig_spec spec = busy_spec(PMOE_F32);
  spec.gate.jitter = 0.4f;
  spec.gate.gumbel = 1;
  rig_plan plan = plan_of(T, 13);
  plan.step = 5;
  run whole, tail, other;
  start(&whole, &spec, &plan, 2);
  double x[(T - 4) * H];
  memcpy(x, whole.s.x_all + 4 * H, sizeof x);
  plan.step = 6;
  start(&other, &spec, &plan, 2);
  plan.step = 5;
  plan.rank_tokens[0] = T - 4;
  plan.x = x;
  start(&tail, &spec, &plan, 2);
  tail.s.step.first_token = 4;
  step(&whole);
  step(&tail);
  step(&other);
  pmoe_routing a = PMOE_CONFIG_INIT(pmoe_routing), b = a, c = a;
  assert_ok(pmoe_stash_routing(whole.stash, &a));
  assert_ok(pmoe_stash_routing(tail.stash, &b));
  assert_ok(pmoe_stash_routing(other.stash, &c));
  assert_memory_equal(a.expert + 4 * 2, b.expert, (T - 4) * 2 * sizeof *a.expert);
  assert_memory_equal(a.weight + 4 * 2, b.weight, (T - 4) * 2 * sizeof *a.weight);
  assert_memory_not_equal(a.weight, c.weight, T * 2 * sizeof *a.weight);
  end(&whole);
  end(&tail);
  end(&other);
}

static void new_stash(run *o, pmoe_stash **stash, int split) {
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = T;
  cfg.split_backward = split;
  assert_ok(pmoe_stash_create(o->r.layer, &cfg, NULL, 0, stash));
}

/* order: per call, which micro-batch and what (f forward, b backward, i input part, w weight part). */
static void run_schedule(run *o, const rig_spec *spec, const char *order, rig_step s[2], pmoe_stash *stash[2]) {
  rig_plan plan = plan_of(T, 14);
  start(o, spec, &plan, 2);
  for (int m = 0; m < 2; m++) {
    plan.seed = 20 + (uint64_t)m;
    plan.rank_tokens[0] = T - 3 * m;
    rig_step_begin(&o->r, &s[m], &plan);
    new_stash(o, &stash[m], strchr(order, 'i') != NULL);
  }
  for (const char *c = order; *c; c += 2) {
    int m = c[1] - '1';
    if (c[0] == 'f') assert_ok(rig_forward(&o->r, stash[m], &s[m]));
    else
      assert_ok(rig_backward(&o->r, stash[m], &s[m],
                             c[0] == 'b'   ? PMOE_BWD_ALL
                             : c[0] == 'i' ? PMOE_BWD_INPUT
                                           : PMOE_BWD_WEIGHT));
  }
}

static void end_schedule(run *o, rig_step s[2], pmoe_stash *stash[2]) {
  for (int m = 0; m < 2; m++) {
    rig_step_end(&s[m]);
    pmoe_stash_destroy(stash[m]);
  }
  end(o);
}

static void test_micro_batches_in_flight_equal_one_after_another(void **state) {
  (void)state;
  for (int i = 0; i < 2; i++) {
    rig_spec spec = busy_spec(i ? PMOE_BF16 : PMOE_F32);
    spec.gate.capacity_factor = 0.9f;
    run a, b;
    rig_step sa[2], sb[2];
    pmoe_stash *ta[2], *tb[2];
    run_schedule(&a, &spec, "f1b1f2b2", sa, ta);
    run_schedule(&b, &spec, "f1f2b1b2", sb, tb);
    for (int m = 0; m < 2; m++) {
      size_t na, nb;
      void *pa = rig_snapshot(&a.r, &sa[m], &na), *pb = rig_snapshot(&b.r, &sb[m], &nb);
      assert_int_equal(na, nb);
      assert_memory_equal(pa, pb, na);
      free(pa);
      free(pb);
    }
    end_schedule(&a, sa, ta);
    end_schedule(&b, sb, tb);
  }
}

static void test_gradients_add_up_over_micro_batches_in_any_schedule(void **state) {
  (void)state;
  const char *const schedules[] = {"f1b1f2b2", "f1f2b1b2", "f1f2b2b1", "f1f2i1i2w1w2", "f1f2i2i1w1w2", "f1i1f2w1i2w2"};
  for (int i = 0; i < 6 * 4; i++) {
    rig_spec spec = busy_spec(i / 6 % 2 ? PMOE_BF16 : PMOE_F32);
    spec.experts.grad_dtype = i / 18 ? PMOE_BF16 : PMOE_F32;
    spec.experts.recompute_act = i / 12;
    run o;
    rig_step s[2];
    pmoe_stash *stash[2];
    run_schedule(&o, &spec, schedules[i % 6], s, stash);
    int failures = 0;
    for (int m = 0; m < 2; m++) failures += rig_check(&o.r, stash[m], &s[m], 1);
    failures += rig_check_grads(&o.r, 1.0, schedules[i % 6]);
    assert_int_equal(failures, 0);
    end_schedule(&o, s, stash);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_runs_and_threads_give_the_same_bits),
      cmocka_unit_test(test_fixed_equals_eager_bit_for_bit),
      cmocka_unit_test(test_large_capacity_equals_dropless),
      cmocka_unit_test(test_permuting_tokens_permutes_outputs),
      cmocka_unit_test(test_relabelling_experts_changes_nothing),
      cmocka_unit_test(test_padding_rows_change_nothing),
      cmocka_unit_test(test_evaluation_has_no_randomness),
      cmocka_unit_test(test_step_null_is_evaluation),
      cmocka_unit_test(test_noise_follows_the_global_token),
      cmocka_unit_test(test_micro_batches_in_flight_equal_one_after_another),
      cmocka_unit_test(test_gradients_add_up_over_micro_batches_in_any_schedule),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
