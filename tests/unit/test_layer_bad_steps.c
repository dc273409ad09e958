/* Wrong arguments to forward and backward, calls out of order, and an allocation that fails at every point. */
#include <math.h>

#include "support/counted_layer.h"

/* ---- forward and backward ---- */

/* A matrix with one thing wrong with it. */
static pmoe_mat broken(const pmoe_mat *good, int how) {
  pmoe_mat mat = *good;
  if (how == 0) mat.dtype = PMOE_BF16;
  if (how == 1) mat.dtype = (pmoe_dtype)55;
  if (how == 2) mat.cols--;
  if (how == 3) mat.ld = mat.cols - 1;
  if (how == 4) mat.rows = -1;
  if (how == 5) mat.data = NULL;
  if (how == 6) mat.rows++;
  return mat;
}
enum { WAYS_TO_BREAK = 7 };
static const char *const broken_word[WAYS_TO_BREAK] = {"dtype", "dtype", "cols", "ld", "rows", "data", "rows"};

static pmoe_status forward(bench *b, pmoe_stash *stash, const pmoe_step *step, const pmoe_mat *x, pmoe_mat *y) {
  return pmoe_layer_forward(b->r.layer, stash, step, x, y, NULL);
}

static void test_forward_matrices(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  assert_refused(pmoe_layer_forward(NULL, b.stash, &b.s.step, &b.s.x, &b.s.y, NULL), PMOE_ERR_ARG, "layer");
  assert_refused(forward(&b, NULL, &b.s.step, &b.s.x, &b.s.y), PMOE_ERR_ARG, "stash");
  assert_refused(forward(&b, b.stash, &b.s.step, NULL, &b.s.y), PMOE_ERR_ARG, "x");
  assert_refused(forward(&b, b.stash, &b.s.step, &b.s.x, NULL), PMOE_ERR_ARG, "y");
  for (int how = 0; how < WAYS_TO_BREAK; how++) {
    pmoe_mat x = broken(&b.s.x, how), y = broken(&b.s.y, how);
    assert_refused(forward(&b, b.stash, &b.s.step, &x, &b.s.y), PMOE_ERR_ARG, broken_word[how]);
    assert_refused(forward(&b, b.stash, &b.s.step, &b.s.x, &y), PMOE_ERR_ARG, broken_word[how]);
  }
  pmoe_mat same = b.s.x;
  assert_refused(forward(&b, b.stash, &b.s.step, &b.s.x, &same), PMOE_ERR_ARG, "y");
  assert_untouched(&b.s.y);
  assert_still_works(&b);
  take_down(&b);
}

static void test_forward_step_and_mask(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  uint8_t mask[T + 1] = {1, 1, 1, 1, 1, 1};
  pmoe_step step = b.s.step;
  step.token_mask = mask;
  for (int64_t length = -1; length <= T + 1; length++) {
    step.token_mask_len = length;
    if (length != T) assert_refused(forward(&b, b.stash, &step, &b.s.x, &b.s.y), PMOE_ERR_ARG, "token_mask_len");
  }
  step = b.s.step;
  step.size = 0;
  assert_refused(forward(&b, b.stash, &step, &b.s.x, &b.s.y), PMOE_ERR_ARG, "size");
  step = b.s.step;
  step.first_token = -1;
  assert_refused(forward(&b, b.stash, &step, &b.s.x, &b.s.y), PMOE_ERR_ARG, "first_token");
  assert_untouched(&b.s.y);
  assert_still_works(&b);
  take_down(&b);
}

static void test_stash_of_another_layer(void **state) {
  (void)state;
  bench a, b;
  set_up(&a);
  set_up(&b);
  assert_refused(forward(&a, b.stash, &a.s.step, &a.s.x, &a.s.y), PMOE_ERR_ARG, "stash");
  assert_untouched(&a.s.y);
  assert_ok(rig_forward(&b.r, b.stash, &b.s));
  assert_refused(rig_backward(&a.r, b.stash, &a.s, PMOE_BWD_ALL), PMOE_ERR_ARG, "stash");
  assert_untouched(&a.s.dx);
  assert_still_works(&b);
  assert_still_works(&a);
  take_down(&a);
  take_down(&b);
}

static pmoe_status backward(bench *b, const pmoe_mat *dy, pmoe_mat *dx, int which) {
  return pmoe_layer_backward(b->r.layer, b->stash, 1.0f, dy, dx, (pmoe_bwd)which, NULL);
}

static void test_backward_matrices(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  assert_ok(rig_forward(&b.r, b.stash, &b.s));
  assert_refused(pmoe_layer_backward(NULL, b.stash, 1.0f, &b.s.dy, &b.s.dx, PMOE_BWD_ALL, NULL), PMOE_ERR_ARG, "layer");
  assert_refused(pmoe_layer_backward(b.r.layer, NULL, 1.0f, &b.s.dy, &b.s.dx, PMOE_BWD_ALL, NULL), PMOE_ERR_ARG,
                 "stash");
  assert_refused(backward(&b, NULL, &b.s.dx, PMOE_BWD_ALL), PMOE_ERR_ARG, "dy");
  assert_refused(backward(&b, &b.s.dy, NULL, PMOE_BWD_ALL), PMOE_ERR_ARG, "dx");
  assert_refused(backward(&b, &b.s.dy, &b.s.dx, 3), PMOE_ERR_ARG, "which");
  assert_refused(backward(&b, &b.s.dy, &b.s.dx, -1), PMOE_ERR_ARG, "which");
  assert_refused(pmoe_layer_backward(b.r.layer, b.stash, NAN, &b.s.dy, &b.s.dx, PMOE_BWD_ALL, NULL), PMOE_ERR_ARG,
                 "loss_scale");
  assert_refused(pmoe_layer_backward(b.r.layer, b.stash, INFINITY, &b.s.dy, &b.s.dx, PMOE_BWD_ALL, NULL), PMOE_ERR_ARG,
                 "loss_scale");
  for (int how = 0; how < WAYS_TO_BREAK; how++) {
    pmoe_mat dy = broken(&b.s.dy, how), dx = broken(&b.s.dx, how);
    assert_refused(backward(&b, &dy, &b.s.dx, PMOE_BWD_ALL), PMOE_ERR_ARG, broken_word[how]);
    assert_refused(backward(&b, &b.s.dy, &dx, PMOE_BWD_ALL), PMOE_ERR_ARG, broken_word[how]);
  }
  assert_untouched(&b.s.dx);
  for (int32_t p = 0; p < b.r.num_params; p++)
    for (int64_t i = 0; i < b.r.param[p].numel; i++) assert_true(((float *)b.r.param[p].grad)[i] == 0.0f);
  /* the forward is still there to go back from */
  assert_ok(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_ALL));
  assert_int_equal(rig_check(&b.r, b.stash, &b.s, 1) + rig_check_grads(&b.r, 1.0, "after refusals"), 0);
  take_down(&b);
}

static void test_calls_out_of_order(void **state) {
  (void)state;
  bench b;
  set_up(&b);
  assert_status(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_ALL), PMOE_ERR_STATE);
  assert_ok(rig_forward(&b.r, b.stash, &b.s));
  assert_status(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_INPUT), PMOE_ERR_STATE); /* no room for two parts */
  assert_status(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_WEIGHT), PMOE_ERR_STATE);
  assert_untouched(&b.s.dx);
  assert_ok(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_ALL));
  assert_status(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_ALL), PMOE_ERR_STATE);
  assert_ok(rig_forward(&b.r, b.stash, &b.s));
  assert_ok(rig_forward(&b.r, b.stash, &b.s)); /* a forward without a backward is given up by the next */
  assert_still_works(&b);
  take_down(&b);

  set_up_split(&b, 1);
  assert_ok(rig_forward(&b.r, b.stash, &b.s));
  assert_status(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_WEIGHT), PMOE_ERR_STATE);
  assert_ok(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_INPUT));
  assert_status(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_INPUT), PMOE_ERR_STATE);
  assert_status(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_ALL), PMOE_ERR_STATE);
  assert_ok(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_WEIGHT));
  assert_status(rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_WEIGHT), PMOE_ERR_STATE);
  assert_int_equal(rig_check(&b.r, b.stash, &b.s, 1) + rig_check_grads(&b.r, 1.0, "in two parts"), 0);
  take_down(&b);
}

/* ---- the failing allocator ---- */

/* A layer's whole life; each n-th allocation fails in turn. */
static pmoe_status whole_life(const pmoe_allocator *table, int variant) {
  pmoe_ctx *ctx = NULL;
  rig r = {0};
  rig_step s = {0};
  pmoe_stash *stash = NULL;
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 2;
  cfg.allocator = table;
  pmoe_status status = pmoe_ctx_create(&cfg, &ctx);
  rig_spec spec = rig_spec_default();
  spec.experts.dtype = variant % 2 ? PMOE_BF16 : PMOE_F32;
  spec.experts.recompute_act = variant / 2 % 2;
  spec.residual.mix = variant % 2 ? PMOE_MIX_GATED_SUM : PMOE_MIX_LEARNED;
  spec.gate.capacity_factor = 1.0f;
  spec.gate.drop = variant % 2 ? PMOE_DROP_PROBS : PMOE_DROP_RANDOM;
  if (status == PMOE_OK) status = rig_create(&r, ctx, NULL, &spec);
  if (status == PMOE_OK) {
    pmoe_stash_config stash_cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
    stash_cfg.max_tokens = T;
    stash_cfg.split_backward = variant / 4;
    status = pmoe_stash_create(r.layer, &stash_cfg, NULL, 0, &stash);
    rig_plan plan = {.label = "no memory", .rank_tokens = {T}, .training = 1, .loss_scale = 1.0, .seed = 2};
    rig_step_begin(&r, &s, &plan);
  }
  if (status == PMOE_OK) status = rig_forward(&r, stash, &s);
  if (status == PMOE_OK && variant / 4) status = rig_backward(&r, stash, &s, PMOE_BWD_INPUT);
  if (status == PMOE_OK) status = rig_backward(&r, stash, &s, variant / 4 ? PMOE_BWD_WEIGHT : PMOE_BWD_ALL);
  double sum;
  if (status == PMOE_OK) status = pmoe_layer_init_params(r.layer, 1, 0.1f);
  if (status == PMOE_OK) status = pmoe_layer_reduce_grads(r.layer, 1.0f, NULL);
  if (status == PMOE_OK) status = pmoe_layer_grad_sumsq(r.layer, &sum, NULL);
  pmoe_stash_destroy(stash);
  rig_step_end(&s);
  if (r.layer) rig_destroy(&r);
  pmoe_ctx_destroy(ctx);
  return status;
}

static void test_every_allocation_may_fail(void **state) {
  (void)state;
  for (int variant = 0; variant < 8; variant++)
    for (int64_t n = 1;; n++) {
      failing_alloc memory = {.fail_at = n};
      pmoe_allocator table = failing_alloc_table(&memory);
      pmoe_status status = whole_life(&table, variant);
      if (memory.held_bytes != 0 || memory.held_blocks != 0)
        fail_msg("variant %d: request %d failing leaks %d bytes", variant, (int)n, (int)memory.held_bytes);
      if (memory.calls < n) {
        assert_ok(status);
        assert_true(n > 8);
        break;
      }
      if (status != PMOE_ERR_NOMEM)
        fail_msg("variant %d: request %d failing gave %s", variant, (int)n, pmoe_status_name(status));
    }
}

/* A step that found no memory leaves the layer and its stash usable. */
static void test_a_step_after_one_without_memory(void **state) {
  (void)state;
  for (int64_t n = 1;; n++) {
    bench b;
    set_up(&b);
    b.memory.calls = 0;
    b.memory.fail_at = n;
    pmoe_status status = rig_forward(&b.r, b.stash, &b.s);
    if (status == PMOE_OK) status = rig_backward(&b.r, b.stash, &b.s, PMOE_BWD_ALL);
    int done = b.memory.calls < n;
    assert_status(status, done ? PMOE_OK : PMOE_ERR_NOMEM);
    b.memory.fail_at = 0;
    assert_still_works(&b);
    take_down(&b);
    if (done) break;
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_forward_matrices),
      cmocka_unit_test(test_forward_step_and_mask),
      cmocka_unit_test(test_stash_of_another_layer),
      cmocka_unit_test(test_backward_matrices),
      cmocka_unit_test(test_calls_out_of_order),
      cmocka_unit_test(test_every_allocation_may_fail),
      cmocka_unit_test(test_a_step_after_one_without_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
