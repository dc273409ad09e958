/* The residual branch: bad input for every argument, and allocation failures. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "support/failing_alloc.h"
#include "support/residual_problem.h"

static void test_allocation_failures(void **state) {
  (void)state;
  pmoe_status status = PMOE_ERR_NOMEM;
  for (int64_t n = 1; status != PMOE_OK; n++) {
    failing_alloc f = {.fail_at = n};
    pmoe_allocator allocator = failing_alloc_table(&f);
    pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
    cfg.allocator = &allocator;
    pmoe_ctx *ctx = NULL;
    pmoe_residual *residual = NULL;
    problem shape = {.mix = PMOE_MIX_LEARNED, .inner = 4};
    pmoe_residual_config rcfg = config_of(&shape);
    status = pmoe_ctx_create(&cfg, &ctx);
    if (status == PMOE_OK) status = pmoe_residual_create(ctx, 4, &rcfg, &residual);
    if (status == PMOE_OK) {
      float w[8] = {0}, g[8] = {0}, one[1] = {1}, x[4] = {0};
      pmoe_mat m = {x, PMOE_F32, 1, 4, 4};
      pmoe_residual_params q = PMOE_CONFIG_INIT(pmoe_residual_params);
      q.mix_weight = w, q.mix_bias = w, q.mix_weight_grad = g, q.mix_bias_grad = g;
      status = pmoe_residual_mix_backward(residual, &q, &m, one, one, one, one, NULL, &m, PMOE_BWD_ALL, NULL);
    }
    if (status != PMOE_OK) assert_int_equal(status, PMOE_ERR_NOMEM);
    pmoe_residual_destroy(residual);
    pmoe_ctx_destroy(ctx);
    assert_int_equal(f.held_bytes, 0);
    assert_int_equal(f.held_blocks, 0);
  }
}

static void expect_refused(pmoe_status status, const char *word) {
  assert_int_equal(status, PMOE_ERR_ARG);
  if (!strstr(pmoe_last_error(), word)) fail_msg("\"%s\" does not name %s", pmoe_last_error(), word);
}

static void test_bad_creation(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(1);
  problem shape = {.mix = PMOE_MIX_LEARNED, .inner = 4};
  pmoe_residual_config good = config_of(&shape), cfg = good;
  pmoe_residual *out = NULL;
  expect_refused(pmoe_residual_create(NULL, 4, &good, &out), "ctx");
  expect_refused(pmoe_residual_create(ctx, 4, NULL, &out), "config");
  expect_refused(pmoe_residual_create(ctx, 4, &good, NULL), "out");
  expect_refused(pmoe_residual_create(ctx, 0, &good, &out), "hidden is 0");
  cfg.mix = PMOE_MIX_NONE;
  expect_refused(pmoe_residual_create(ctx, 4, &cfg, &out), "mix is 0");
  cfg.mix = (pmoe_mix)4;
  expect_refused(pmoe_residual_create(ctx, 4, &cfg, &out), "mix is 4");
  cfg = good, cfg.inner = 0;
  expect_refused(pmoe_residual_create(ctx, 4, &cfg, &out), "inner is 0");
  cfg = good, cfg.act = (pmoe_act)9;
  expect_refused(pmoe_residual_create(ctx, 4, &cfg, &out), "act is 9");
  cfg = good, cfg.bias = -1;
  expect_refused(pmoe_residual_create(ctx, 4, &cfg, &out), "bias is -1");
  cfg = good, cfg.dtype = PMOE_F16;
  expect_refused(pmoe_residual_create(ctx, 4, &cfg, &out), "float16");
  cfg = good, cfg.grad_dtype = PMOE_BF16;
  expect_refused(pmoe_residual_create(ctx, 4, &cfg, &out), "grad_dtype");
  assert_null(out);
  pmoe_residual_destroy(NULL);
  pmoe_ctx_destroy(ctx);
}

static void test_bad_forward_and_backward(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(1);
  problem p = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 4, 3),
          fresh = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 4, 3);
  pmoe_residual_params good = params_of(&p), q = good;
  pmoe_residual *r = p.residual;
  expect_refused(pmoe_residual_forward(NULL, &good, &p.x, &p.pre, p.scale, p.branch_scale, &p.y, NULL), "residual");
  expect_refused(pmoe_residual_forward(r, NULL, &p.x, &p.pre, p.scale, p.branch_scale, &p.y, NULL), "params");
  expect_refused(pmoe_residual_forward(r, &good, NULL, &p.pre, p.scale, p.branch_scale, &p.y, NULL), "x is NULL");
  expect_refused(pmoe_residual_forward(r, &good, &p.x, &p.pre, NULL, p.branch_scale, &p.y, NULL), "scale is NULL");
  expect_refused(pmoe_residual_forward(r, &good, &p.x, &p.pre, p.scale, NULL, &p.y, NULL), "branch_scale is NULL");
  expect_refused(pmoe_residual_forward(r, &good, &p.x, &p.pre, p.scale, p.branch_scale, NULL, NULL), "y is NULL");
  expect_refused(pmoe_residual_forward(r, &good, &p.x, &p.y, p.scale, p.branch_scale, &p.y, NULL), "pre->cols");
  q.mix_weight = NULL;
  expect_refused(pmoe_residual_forward(r, &q, &p.x, &p.pre, p.scale, p.branch_scale, &p.y, NULL), "mix_weight is NULL");
  q = good, q.mix_bias = NULL;
  expect_refused(pmoe_residual_forward(r, &q, &p.x, &p.pre, p.scale, p.branch_scale, &p.y, NULL), "mix_bias is NULL");
  q = good, q.mlp.fc1_weight = NULL;
  expect_refused(pmoe_residual_forward(r, &q, &p.x, &p.pre, p.scale, p.branch_scale, &p.y, NULL), "fc1_weight is NULL");
  expect_refused(
      pmoe_residual_backward(NULL, &good, &p.x, &p.pre, p.scale, &p.dy, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL),
      "residual");
  expect_refused(
      pmoe_residual_backward(r, NULL, &p.x, &p.pre, p.scale, &p.dy, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL),
      "params");
  expect_refused(
      pmoe_residual_backward(r, &good, NULL, &p.pre, p.scale, &p.dy, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL),
      "x is NULL");
  expect_refused(
      pmoe_residual_backward(r, &good, &p.x, &p.pre, NULL, &p.dy, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL),
      "branch_scale");
  expect_refused(
      pmoe_residual_backward(r, &good, &p.x, &p.pre, p.scale, NULL, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL),
      "dy is NULL");
  expect_refused(
      pmoe_residual_backward(r, &good, &p.x, NULL, p.scale, &p.dy, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL),
      "pre is NULL");
  expect_refused(
      pmoe_residual_backward(r, &good, &p.x, &p.pre, p.scale, &p.dy, &p.dpre, &p.dx, NULL, PMOE_BWD_ALL, NULL),
      "dbranch_scale");
  expect_refused(
      pmoe_residual_backward(r, &good, &p.x, &p.pre, p.scale, &p.dy, &p.dpre, &p.dx, p.dscale, (pmoe_bwd)5, NULL),
      "which is 5");
  memcpy(p.scale, fresh.scale, 4 * sizeof(float));
  expect_same(&p, &fresh);
  free_problem(&p);
  free_problem(&fresh);
  pmoe_ctx_destroy(ctx);
}

static void test_bad_mix_backward(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(1);
  problem p = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 4, 3),
          fresh = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 4, 3);
  pmoe_residual_params good = params_of(&p), q = good;
  pmoe_residual *r = p.residual;
  float *s = p.dscale;
  expect_refused(pmoe_residual_mix_backward(NULL, &good, &p.x, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL),
                 "residual");
  expect_refused(pmoe_residual_mix_backward(r, NULL, &p.x, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL), "params");
  expect_refused(pmoe_residual_mix_backward(r, &good, NULL, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL),
                 "x is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.pre, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL),
                 "x->cols");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, NULL, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL),
                 "scale is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, NULL, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL),
                 "branch_scale is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, NULL, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL),
                 "dscale is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, NULL, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL),
                 "dbranch_scale is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, s, NULL, NULL, PMOE_BWD_ALL, NULL), "dx is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_INPUT, NULL),
                 "dmix is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, s, NULL, NULL, PMOE_BWD_WEIGHT, NULL),
                 "dmix is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, s, NULL, &p.mix_dx, (pmoe_bwd)-1, NULL),
                 "which is -1");
  pmoe_mat wrong = p.mix_dx;
  wrong.dtype = PMOE_BF16;
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, s, NULL, &wrong, PMOE_BWD_ALL, NULL), "dx->dtype");
  q.mix_weight_grad = NULL;
  expect_refused(pmoe_residual_mix_backward(r, &q, &p.x, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL),
                 "mix_weight_grad is NULL");
  q = good, q.mix_bias_grad = NULL;
  expect_refused(pmoe_residual_mix_backward(r, &q, &p.x, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL),
                 "mix_bias_grad is NULL");
  expect_same(&p, &fresh);
  free_problem(&p);
  free_problem(&fresh);
  pmoe_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_allocation_failures),
      cmocka_unit_test(test_bad_creation),
      cmocka_unit_test(test_bad_forward_and_backward),
      cmocka_unit_test(test_bad_mix_backward),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
