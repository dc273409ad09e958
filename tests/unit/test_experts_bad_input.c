/* Experts: bad input for every argument, and allocation failures. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "support/experts_problem.h"
#include "support/failing_alloc.h"

static void test_allocation_failures(void **state) {
  (void)state;
  bool done = false;
  for (int64_t n = 1; !done; n++) {
    failing_alloc f = {.fail_at = n};
    pmoe_allocator allocator = failing_alloc_table(&f);
    pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
    cfg.allocator = &allocator;
    cfg.cpu_threads = 2;
    pmoe_ctx *ctx = NULL;
    pmoe_status status = pmoe_ctx_create(&cfg, &ctx);
    if (status == PMOE_OK) {
      pmoe_experts_config ecfg = PMOE_CONFIG_INIT(pmoe_experts_config);
      ecfg.inner = 8;
      pmoe_experts *experts = NULL;
      status = pmoe_experts_create(ctx, 4, 2, &ecfg, &experts);
      if (status == PMOE_OK) {
        static float w[2 * 8 * 4], g[2 * 8 * 4], x[5 * 4], y[5 * 4], pre[5 * 8];
        static const int64_t rows[] = {2, 3};
        pmoe_experts_params q = PMOE_CONFIG_INIT(pmoe_experts_params);
        q.fc1_weight = q.fc2_weight = w;
        q.fc1_weight_grad = q.fc2_weight_grad = g;
        pmoe_mat xm = {x, PMOE_F32, 5, 4, 4}, ym = {y, PMOE_F32, 5, 4, 4}, pm = {pre, PMOE_F32, 5, 8, 8};
        status = pmoe_experts_forward(experts, &q, rows, &xm, &pm, &ym, NULL);
        if (status == PMOE_OK)
          status = pmoe_experts_backward(experts, &q, rows, &xm, &pm, NULL, &ym, NULL, &ym, NULL, PMOE_BWD_ALL, NULL);
        done = status == PMOE_OK;
      }
      pmoe_experts_destroy(experts);
    }
    if (!done) assert_int_equal(status, PMOE_ERR_NOMEM);
    pmoe_ctx_destroy(ctx);
    assert_int_equal(f.held_bytes, 0);
    assert_int_equal(f.held_blocks, 0);
  }
}

static void expect_refused(pmoe_status status, pmoe_status expected, const char *word) {
  assert_int_equal(status, expected);
  if (!strstr(pmoe_last_error(), word)) fail_msg("\"%s\" does not name %s", pmoe_last_error(), word);
}

static void test_bad_creation(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(NULL, 1);
  pmoe_experts_config good = PMOE_CONFIG_INIT(pmoe_experts_config);
  good.inner = 8;
  pmoe_experts *out = (pmoe_experts *)&good, *untouched = out;
  expect_refused(pmoe_experts_create(NULL, 4, 2, &good, &out), PMOE_ERR_ARG, "ctx");
  expect_refused(pmoe_experts_create(ctx, 4, 2, NULL, &out), PMOE_ERR_ARG, "config");
  expect_refused(pmoe_experts_create(ctx, 4, 2, &good, NULL), PMOE_ERR_ARG, "out");
  expect_refused(pmoe_experts_create(ctx, 0, 2, &good, &out), PMOE_ERR_ARG, "hidden is 0");
  expect_refused(pmoe_experts_create(ctx, 4, -1, &good, &out), PMOE_ERR_ARG, "num_local_experts is -1");
  struct {
    size_t at;
    int32_t value;
    const char *word;
  } fields[] = {
      {offsetof(pmoe_experts_config, inner), 0, "inner is 0"},
      {offsetof(pmoe_experts_config, inner), -3, "inner is -3"},
      {offsetof(pmoe_experts_config, act), 6, "act is 6"},
      {offsetof(pmoe_experts_config, act), -1, "act is -1"},
      {offsetof(pmoe_experts_config, bias), 2, "bias is 2"},
      {offsetof(pmoe_experts_config, dtype), PMOE_F16, "float16"},
      {offsetof(pmoe_experts_config, dtype), 9, "dtype is 9"},
      {offsetof(pmoe_experts_config, grad_dtype), 1, "grad_dtype"},
      {offsetof(pmoe_experts_config, recompute_act), 7, "recompute"},
  };
  for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
    pmoe_experts_config cfg = good;
    memcpy((char *)&cfg + fields[i].at, &fields[i].value, sizeof(int32_t));
    expect_refused(pmoe_experts_create(ctx, 4, 2, &cfg, &out), PMOE_ERR_ARG, fields[i].word);
  }
  good.size = 0;
  expect_refused(pmoe_experts_create(ctx, 4, 2, &good, &out), PMOE_ERR_ARG, "size");
  assert_ptr_equal(out, untouched);
  pmoe_experts_destroy(NULL);
  pmoe_ctx_destroy(ctx);
}

/* Every way in which one matrix can be wrong. `call` uses *mat in place of the right one. */
static void refuse_mats(problem *p, pmoe_mat *mat, const char *name, pmoe_status (*call)(problem *)) {
  pmoe_mat good = *mat;
  char word[64];
  snprintf(word, sizeof word, "%s->", name);
  for (int fault = 0; fault < 6; fault++) {
    *mat = good;
    if (fault == 0) mat->dtype = PMOE_BF16;
    if (fault == 1) mat->rows++;
    if (fault == 2) mat->cols++;
    if (fault == 3) mat->ld = mat->cols - 1;
    if (fault == 4) mat->data = NULL;
    if (fault == 5) mat->rows = -1;
    expect_refused(call(p), PMOE_ERR_ARG, strcmp(name, "x") == 0 && (fault == 1 || fault == 5) ? "x->rows" : word);
  }
  *mat = good;
}

static pmoe_status call_forward(problem *p) { return forward(p, true); }
static pmoe_status call_all(problem *p) { return backward(p, &p->pre, &p->dpre, &p->dx, PMOE_BWD_ALL); }
static pmoe_status call_input(problem *p) { return backward(p, &p->pre, &p->dpre, &p->dx, PMOE_BWD_INPUT); }
static pmoe_status call_weight(problem *p) { return backward(p, &p->pre, &p->dpre, NULL, PMOE_BWD_WEIGHT); }

static void refuse_params(problem *p, const pmoe_experts_params *good, bool with_forward) {
  static const struct {
    size_t at;
    const char *word;
    bool data;
  } pointers[] = {
      {offsetof(pmoe_experts_params, fc1_weight), "fc1_weight is NULL", true},
      {offsetof(pmoe_experts_params, fc2_weight), "fc2_weight is NULL", true},
      {offsetof(pmoe_experts_params, fc1_bias), "fc1_bias is NULL", true},
      {offsetof(pmoe_experts_params, fc2_bias), "fc2_bias is NULL", true},
      {offsetof(pmoe_experts_params, fc1_weight_grad), "fc1_weight_grad is NULL", false},
      {offsetof(pmoe_experts_params, fc2_weight_grad), "fc2_weight_grad is NULL", false},
      {offsetof(pmoe_experts_params, fc1_bias_grad), "fc1_bias_grad is NULL", false},
      {offsetof(pmoe_experts_params, fc2_bias_grad), "fc2_bias_grad is NULL", false},
  };
  for (size_t i = 0; i < sizeof pointers / sizeof pointers[0]; i++) {
    pmoe_experts_params q = *good;
    memset((char *)&q + pointers[i].at, 0, sizeof(void *));
    if (with_forward && pointers[i].data)
      expect_refused(pmoe_experts_forward(p->experts, &q, p->s.rows, &p->x, &p->pre, &p->y, NULL), PMOE_ERR_ARG,
                     pointers[i].word);
    for (int which = PMOE_BWD_ALL; which <= PMOE_BWD_WEIGHT; which++) {
      if (which == (pointers[i].data ? PMOE_BWD_WEIGHT : PMOE_BWD_INPUT)) continue;
      expect_refused(pmoe_experts_backward(p->experts, &q, p->s.rows, &p->x, &p->pre, NULL, &p->dy, &p->dpre, &p->dx,
                                           NULL, (pmoe_bwd)which, NULL),
                     PMOE_ERR_ARG, pointers[i].word);
    }
  }
}

static void refuse_nulls_and_rows(problem *p, const pmoe_experts_params *q) {
  static const int64_t negative[] = {6, -1}, few[] = {2, 2}, many[] = {2, 4}, overflow[] = {INT64_MAX, INT64_MAX};
  const int64_t *wrong[] = {negative, few, many, overflow, NULL};
  const int64_t *rows = p->s.rows;
  pmoe_experts *x = p->experts;
  for (int i = 0; i < 5; i++) {
    expect_refused(pmoe_experts_forward(x, q, wrong[i], &p->x, &p->pre, &p->y, NULL), PMOE_ERR_ARG, "rows");
    expect_refused(
        pmoe_experts_backward(x, q, wrong[i], &p->x, &p->pre, NULL, &p->dy, &p->dpre, &p->dx, NULL, PMOE_BWD_ALL, NULL),
        PMOE_ERR_ARG, "rows");
  }
  expect_refused(pmoe_experts_forward(NULL, q, rows, &p->x, &p->pre, &p->y, NULL), PMOE_ERR_ARG, "experts");
  expect_refused(pmoe_experts_forward(x, NULL, rows, &p->x, &p->pre, &p->y, NULL), PMOE_ERR_ARG, "params");
  expect_refused(pmoe_experts_forward(x, q, rows, NULL, &p->pre, &p->y, NULL), PMOE_ERR_ARG, "x is NULL");
  expect_refused(pmoe_experts_forward(x, q, rows, &p->x, &p->pre, NULL, NULL), PMOE_ERR_ARG, "y is NULL");
  expect_refused(
      pmoe_experts_backward(NULL, q, rows, &p->x, &p->pre, NULL, &p->dy, &p->dpre, &p->dx, NULL, PMOE_BWD_ALL, NULL),
      PMOE_ERR_ARG, "experts");
  expect_refused(
      pmoe_experts_backward(x, NULL, rows, &p->x, &p->pre, NULL, &p->dy, &p->dpre, &p->dx, NULL, PMOE_BWD_ALL, NULL),
      PMOE_ERR_ARG, "params");
  expect_refused(backward(p, &p->pre, &p->dpre, &p->dx, (pmoe_bwd)3), PMOE_ERR_ARG, "which is 3");
  expect_refused(backward(p, NULL, &p->dpre, &p->dx, PMOE_BWD_ALL), PMOE_ERR_ARG, "pre is NULL");
  expect_refused(backward(p, &p->pre, NULL, &p->dx, PMOE_BWD_INPUT), PMOE_ERR_ARG, "dpre is NULL");
  expect_refused(backward(p, &p->pre, NULL, &p->dx, PMOE_BWD_WEIGHT), PMOE_ERR_ARG, "dpre is NULL");
  expect_refused(backward(p, &p->pre, &p->dpre, NULL, PMOE_BWD_INPUT), PMOE_ERR_ARG, "dx is NULL");
  expect_refused(backward(p, &p->pre, &p->dpre, &p->dy, PMOE_BWD_INPUT), PMOE_ERR_ARG, "dx is dy's memory");
  pmoe_mat shifted = p->dy;
  shifted.ld++;
  expect_refused(backward(p, &p->pre, &p->dpre, &shifted, PMOE_BWD_ALL), PMOE_ERR_ARG, "dx->ld");
}

static void test_bad_calls_leave_outputs_alone(void **state) {
  (void)state;
  static const int64_t rows[] = {2, 3};
  pmoe_ctx *ctx = make_ctx(NULL, 1);
  shape s = {4, 8, 0, 2, rows, PMOE_ACT_SWIGLU, true, true, PMOE_F32, PMOE_F32};
  problem p = make_problem(&s, ctx, 0), fresh = make_problem(&s, ctx, 0);
  memset(p.drow_weight, 0, (size_t)p.total * sizeof(float));
  memset(fresh.drow_weight, 0, (size_t)p.total * sizeof(float));
  pmoe_experts_params q = params_of(&p);
  refuse_params(&p, &q, true);
  refuse_nulls_and_rows(&p, &q);
  refuse_mats(&p, &p.x, "x", call_forward);
  refuse_mats(&p, &p.y, "y", call_forward);
  refuse_mats(&p, &p.pre, "pre", call_forward);
  pmoe_status (*calls[])(problem *) = {call_all, call_input, call_weight};
  for (int i = 0; i < 3; i++) {
    refuse_mats(&p, &p.x, "x", calls[i]);
    refuse_mats(&p, &p.dy, "dy", calls[i]);
    refuse_mats(&p, &p.pre, "pre", calls[i]);
    refuse_mats(&p, &p.dpre, "dpre", calls[i]);
    if (i < 2) refuse_mats(&p, &p.dx, "dx", calls[i]);
  }
  expect_same(&p, &fresh);
  expect_same_mat(&p.pre, &fresh.pre);
  expect_same_mat(&p.dpre, &fresh.dpre);
  free_problem(&fresh);
  free_problem(&p);
  pmoe_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_allocation_failures),
      cmocka_unit_test(test_bad_creation),
      cmocka_unit_test(test_bad_calls_leave_outputs_alone),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
