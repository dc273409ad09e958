/* Experts against a double-precision reference, finite differences of it, and themselves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "moe/ops.h"
#include "support/experts_problem.h"
#include "support/experts_ref.h"

static ref_experts reference(const problem *p) {
  ref_experts ref = {p->s.hidden,    p->s.inner,
                     p->inner1,      p->s.num_experts,
                     p->total,       p->s.act,
                     p->s.rows,      p->x64,
                     p->param64[W1], p->s.bias ? p->param64[B1] : NULL,
                     p->param64[W2], p->s.bias ? p->param64[B2] : NULL};
  return ref;
}

static ref_grads reference_grads(const problem *p) {
  ref_experts ref = reference(p);
  ref_grads g = {.dx = calloc((size_t)(p->total * p->s.hidden + 1), 8), .drow_weight = calloc((size_t)p->total + 1, 8)};
  double **param[NUM_PARAMS] = {&g.dw1, &g.db1, &g.dw2, &g.db2};
  for (int i = 0; i < NUM_PARAMS; i++) {
    *param[i] = checked_malloc((size_t)p->count[i] * 8);
    memcpy(*param[i], p->start64[i], (size_t)p->count[i] * 8);
  }
  ref_backward(&ref, p->dy64, p->weight64, &g);
  return g;
}

static void free_grads(ref_grads *g) {
  void *all[] = {g->dx, g->drow_weight, g->dw1, g->db1, g->dw2, g->db2};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static void expect_params(const problem *p, const ref_grads *g, double tolerance) {
  const double *expected[NUM_PARAMS] = {g->dw1, g->db1, g->dw2, g->db2};
  const char *names[NUM_PARAMS] = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"};
  double t = p->s.grad_dtype == PMOE_BF16 ? fmax(tolerance, 8e-3) : tolerance;
  for (int i = 0; i < NUM_PARAMS; i++) {
    bool used = p->s.bias || i == W1 || i == W2;
    expect_close(names[i], used ? expected[i] : p->start64[i], p->grad[i], p->s.grad_dtype, 1, p->count[i], p->count[i],
                 t);
  }
}

static double tolerance_of(const shape *s) { return s->dtype == PMOE_F32 ? 3e-6 : 2e-2; }

static void expect_forward(problem *p) {
  ref_experts ref = reference(p);
  double *y = checked_malloc((size_t)(p->total * p->s.hidden) * 8);
  ref_forward(&ref, y);
  expect_mat("y", y, &p->y, tolerance_of(&p->s));
  free(y);
}

static void expect_input_grads(const problem *p, const ref_grads *g, const pmoe_mat *dx) {
  expect_mat("dx", g->dx, dx, tolerance_of(&p->s));
  expect_close("drow_weight", g->drow_weight, p->drow_weight, PMOE_F32, 1, p->total, p->total, tolerance_of(&p->s));
}

/* Forward and backward of one shape against the reference. */
static void check_shape(const shape *s, pmoe_ctx *ctx) {
  problem p = make_problem(s, ctx, 0);
  assert_int_equal(forward(&p, true), PMOE_OK);
  expect_forward(&p);
  assert_int_equal(backward(&p, &p.pre, &p.dpre, &p.dx, PMOE_BWD_ALL), PMOE_OK);
  ref_grads g = reference_grads(&p);
  expect_input_grads(&p, &g, &p.dx);
  expect_params(&p, &g, tolerance_of(s));
  free_grads(&g);
  free_problem(&p);
}

static const int64_t ragged[] = {16, 0, 25, 4, 0, 8};

static void test_every_configuration(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(NULL, 2);
  static const pmoe_dtype types[3][2] = {{PMOE_F32, PMOE_F32}, {PMOE_BF16, PMOE_F32}, {PMOE_BF16, PMOE_BF16}};
  for (int act = PMOE_ACT_GELU; act <= PMOE_ACT_GEGLU; act++)
    for (int bias = 0; bias < 2; bias++)
      for (int type = 0; type < 3; type++) {
        shape s = {24,
                   40,
                   bias ? 3 : 0,
                   6,
                   ragged,
                   (pmoe_act)act,
                   bias != 0,
                   bias == 0 || act % 2,
                   types[type][0],
                   types[type][1]};
        check_shape(&s, ctx);
      }
  pmoe_ctx_destroy(ctx);
}

static void test_sizes(void **state) {
  (void)state;
  static const int64_t uneven[] = {162, 0, 257, 44, 0, 83}, tiles[] = {128, 130, 65}, hot[] = {0, 700, 0}, one[] = {1},
                       none[] = {0, 0};
  const shape shapes[] = {
      {64, 48, 0, 6, uneven, PMOE_ACT_GELU, true, true, PMOE_F32, PMOE_F32},
      {64, 48, 1, 6, uneven, PMOE_ACT_SWIGLU, true, true, PMOE_BF16, PMOE_F32},
      {32, 16, 0, 3, tiles, PMOE_ACT_SILU, false, true, PMOE_F32, PMOE_F32},
      {16, 600, 0, 3, hot, PMOE_ACT_GELU_TANH, true, true, PMOE_F32, PMOE_F32},
      {5, 3, 0, 3, tiles, PMOE_ACT_GEGLU, true, true, PMOE_F32, PMOE_F32},
      {5, 3, 1, 3, tiles, PMOE_ACT_RELU, true, true, PMOE_BF16, PMOE_BF16},
      {1001, 37, 0, 6, ragged, PMOE_ACT_GELU, true, true, PMOE_F32, PMOE_F32},
      {1001, 37, 0, 6, ragged, PMOE_ACT_GELU, true, true, PMOE_BF16, PMOE_F32},
      {37, 1001, 0, 6, ragged, PMOE_ACT_SWIGLU, true, false, PMOE_F32, PMOE_F32},
      {1, 1, 0, 1, one, PMOE_ACT_SILU, true, true, PMOE_F32, PMOE_F32},
      {8, 8, 0, 2, none, PMOE_ACT_GELU, true, true, PMOE_F32, PMOE_F32},
      {8, 8, 0, 0, NULL, PMOE_ACT_GELU, true, true, PMOE_F32, PMOE_F32},
  };
  pmoe_ctx *ctx = make_ctx(NULL, 2);
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) check_shape(&shapes[i], ctx);
  pmoe_ctx_destroy(ctx);
}

static double loss(const problem *p, const ref_experts *ref) {
  double *y = checked_malloc((size_t)(p->total * p->s.hidden) * 8), sum = 0;
  ref_forward(ref, y);
  for (int64_t r = 0; r < p->total; r++)
    for (int64_t i = 0; i < p->s.hidden; i++)
      sum += p->weight64[r] * p->dy64[r * p->s.hidden + i] * y[r * p->s.hidden + i];
  free(y);
  return sum;
}

static void expect_slope(const problem *p, const char *what, double *value, double got) {
  ref_experts ref = reference(p);
  double kept = *value, step = 1e-5;
  *value = kept + step;
  double up = loss(p, &ref);
  *value = kept - step;
  double down = loss(p, &ref), slope = (up - down) / (2 * step);
  *value = kept;
  if (!(fabs(got - slope) <= 2e-5 * fmax(1.0, fabs(slope))))
    fail_msg("%s: gradient %g, finite difference %g", what, got, slope);
}

static void test_finite_differences(void **state) {
  (void)state;
  static const int64_t rows[] = {3, 0, 5};
  pmoe_ctx *ctx = make_ctx(NULL, 1);
  for (int act = PMOE_ACT_GELU; act <= PMOE_ACT_GEGLU; act++) {
    shape s = {6, 7, 0, 3, rows, (pmoe_act)act, true, true, PMOE_F32, PMOE_F32};
    problem p = make_problem(&s, ctx, 0);
    for (int i = 0; i < NUM_PARAMS; i++) memset(p.grad[i], 0, (size_t)p.count[i] * 4);
    assert_int_equal(forward(&p, true), PMOE_OK);
    assert_int_equal(backward(&p, &p.pre, &p.dpre, &p.dx, PMOE_BWD_ALL), PMOE_OK);
    for (int i = 0; i < NUM_PARAMS; i++)
      for (int64_t j = 0; j < p.count[i]; j += 5)
        expect_slope(&p, "parameter", &p.param64[i][j], load(p.grad[i], PMOE_F32, j));
    for (int64_t j = 0; j < p.total * s.hidden; j += 3) expect_slope(&p, "x", &p.x64[j], load(p.dx.data, PMOE_F32, j));
    for (int64_t r = 0; r < p.total; r++) expect_slope(&p, "row_weight", &p.weight64[r], (double)p.drow_weight[r]);
    free_problem(&p);
  }
  pmoe_ctx_destroy(ctx);
}

static const int64_t mixed_rows[] = {162, 0, 257, 44, 0, 83};

static shape mixed_shape(int type) {
  shape s = {72, 96, 0, 6, mixed_rows, PMOE_ACT_SWIGLU, true, true, PMOE_F32, PMOE_F32};
  if (type) s.dtype = PMOE_BF16, s.act = PMOE_ACT_GELU;
  return s;
}

static problem run_all(const shape *s, pmoe_ctx *ctx) {
  problem p = make_problem(s, ctx, 0);
  assert_int_equal(forward(&p, true), PMOE_OK);
  assert_int_equal(backward(&p, &p.pre, &p.dpre, &p.dx, PMOE_BWD_ALL), PMOE_OK);
  return p;
}

static void test_threads_change_nothing(void **state) {
  (void)state;
  for (int type = 0; type < 2; type++) {
    shape s = mixed_shape(type);
    pmoe_ctx *first_ctx = make_ctx(NULL, 1);
    problem first = run_all(&s, first_ctx);
    for (int32_t threads = 1; threads <= 3; threads++) {
      pmoe_ctx *ctx = make_ctx(NULL, threads);
      problem p = run_all(&s, ctx);
      expect_same(&first, &p);
      free_problem(&p);
      pmoe_ctx_destroy(ctx);
    }
    free_problem(&first);
    pmoe_ctx_destroy(first_ctx);
  }
}

static void test_two_halves_equal_the_whole(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(NULL, 2);
  for (int type = 0; type < 2; type++) {
    shape s = mixed_shape(type);
    problem whole = run_all(&s, ctx), p = make_problem(&s, ctx, 0);
    assert_int_equal(forward(&p, true), PMOE_OK);
    pmoe_experts_params q = params_of(&p);
    q.fc1_weight_grad = q.fc2_weight_grad = q.fc1_bias_grad = q.fc2_bias_grad = NULL;
    assert_int_equal(pmoe_experts_backward(p.experts, &q, s.rows, &p.x, &p.pre, p.weight, &p.dy, &p.dpre, &p.dx,
                                           p.drow_weight, PMOE_BWD_INPUT, NULL),
                     PMOE_OK);
    q = params_of(&p);
    q.fc1_weight = q.fc2_weight = q.fc1_bias = q.fc2_bias = NULL;
    assert_int_equal(pmoe_experts_backward(p.experts, &q, s.rows, &p.x, &p.pre, p.weight, &p.dy, &p.dpre, NULL, NULL,
                                           PMOE_BWD_WEIGHT, NULL),
                     PMOE_OK);
    expect_same(&whole, &p);
    free_problem(&p);
    free_problem(&whole);
  }
  pmoe_ctx_destroy(ctx);
}

static void test_dx_in_dys_memory_and_dpre_from_scratch(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(NULL, 2);
  for (int type = 0; type < 2; type++) {
    shape s = mixed_shape(type);
    problem whole = run_all(&s, ctx), p = make_problem(&s, ctx, 0);
    assert_int_equal(forward(&p, true), PMOE_OK);
    assert_int_equal(backward(&p, &p.pre, NULL, &p.dy, PMOE_BWD_ALL), PMOE_OK);
    memcpy(p.dx.data, p.dy.data, (size_t)(p.total * p.dx.ld) * pmoe_dtype_size(s.dtype));
    expect_same(&whole, &p);
    free_problem(&p);
    free_problem(&whole);
  }
  pmoe_ctx_destroy(ctx);
}

static void test_recompute(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(NULL, 2);
  for (int type = 0; type < 2; type++) {
    for (int given = 0; given < 2; given++) {
      shape s = mixed_shape(type);
      problem whole = run_all(&s, ctx), p = make_problem(&s, ctx, 1);
      assert_int_equal(forward(&p, true), PMOE_ERR_ARG);
      assert_int_equal(forward(&p, false), PMOE_OK);
      assert_int_equal(backward(&p, given ? &p.pre : NULL, given ? &p.dpre : NULL, &p.dx, PMOE_BWD_ALL), PMOE_OK);
      expect_same(&whole, &p);
      free_problem(&p);
      free_problem(&whole);
    }
  }
  pmoe_ctx_destroy(ctx);
}

static void test_rows_beyond_the_last_are_not_read(void **state) {
  (void)state;
  static const int64_t rows[] = {100};
  pmoe_ctx *ctx = make_ctx(NULL, 2);
  shape s = {24, 32, 0, 1, rows, PMOE_ACT_GELU, true, true, PMOE_F32, PMOE_F32};
  problem p = make_problem(&s, ctx, 0);
  pmoe_mat *mats[] = {&p.x, &p.dy, &p.pre, &p.dpre, &p.y, &p.dx};
  for (size_t i = 0; i < 6; i++) { /* the same with a NaN tail of 28 rows */
    float *longer = checked_malloc((size_t)(128 * mats[i]->ld) * sizeof(float));
    memset(longer, 0xff, (size_t)(128 * mats[i]->ld) * sizeof(float));
    memcpy(longer, mats[i]->data, (size_t)(100 * mats[i]->ld) * sizeof(float));
    free(mats[i]->data);
    mats[i]->data = longer;
  }
  assert_int_equal(forward(&p, true), PMOE_OK);
  expect_forward(&p);
  assert_int_equal(backward(&p, &p.pre, &p.dpre, &p.dx, PMOE_BWD_ALL), PMOE_OK);
  ref_grads g = reference_grads(&p);
  expect_input_grads(&p, &g, &p.dx);
  expect_params(&p, &g, tolerance_of(&s));
  for (size_t i = 0; i < 6; i++)
    for (int64_t j = 100 * mats[i]->ld; j < 128 * mats[i]->ld; j++) assert_true(isnan(((float *)mats[i]->data)[j]));
  free_grads(&g);
  free_problem(&p);
  pmoe_ctx_destroy(ctx);
}

/* A NaN row poisons its own outputs and its expert's gradients, nothing else. */
static void test_nan_stays_with_its_expert(void **state) {
  (void)state;
  static const int64_t rows[] = {3, 4};
  pmoe_ctx *ctx = make_ctx(NULL, 1);
  for (int act = PMOE_ACT_GELU; act <= PMOE_ACT_GEGLU; act++) {
    shape s = {8, 8, 0, 2, rows, (pmoe_act)act, true, false, PMOE_F32, PMOE_F32};
    problem p = make_problem(&s, ctx, 0);
    ((float *)p.x.data)[5 * 8] = NAN;
    assert_int_equal(forward(&p, true), PMOE_OK);
    assert_int_equal(backward(&p, &p.pre, &p.dpre, &p.dx, PMOE_BWD_ALL), PMOE_OK);
    for (int64_t i = 0; i < 7 * 8; i++) {
      assert_int_equal(isnan(((float *)p.y.data)[i]) != 0, i / 8 == 5);
      assert_int_equal(isnan(((float *)p.dx.data)[i]) != 0, i / 8 == 5);
    }
    for (int64_t j = 0; j < p.count[W1]; j++)
      assert_int_equal(isnan(((float *)p.grad[W1])[j]) != 0, j >= p.count[W1] / 2);
    for (int64_t j = 0; j < p.count[W2]; j++)
      assert_int_equal(isnan(((float *)p.grad[W2])[j]) != 0, j >= p.count[W2] / 2);
    free_problem(&p);
  }
  pmoe_ctx_destroy(ctx);
}

static void test_providers_agree(void **state) {
  (void)state;
  static const char *const names[] = {"onednn", "cblas", "plain"};
  for (int type = 0; type < 2; type++) {
    for (int i = 0; i < 3; i++) {
      if (i < 2 && !pmoe_has_feature(names[i])) continue;
      pmoe_ctx *ctx = make_ctx(names[i], 2);
      shape s = mixed_shape(type);
      check_shape(&s, ctx);
      pmoe_ctx_destroy(ctx);
    }
  }
}

/* What the layer sets aside suffices: no call opens more. */
static void test_scratch_is_bounded(void **state) {
  (void)state;
  for (int recompute = 0; recompute < 2; recompute++) {
    pmoe_ctx *ctx = make_ctx(NULL, 3);
    shape s = mixed_shape(0);
    problem p = make_problem(&s, ctx, recompute);
    size_t bytes = pmoei_experts_scratch_bytes(p.experts, p.total);
    void *mem = NULL;
    assert_int_equal(posix_memalign(&mem, 64, bytes), 0);
    assert_int_equal(pmoe_ctx_set_scratch(ctx, mem, bytes), PMOE_OK);
    pmoe_memory before = PMOE_CONFIG_INIT(pmoe_memory), after = before;
    pmoe_ctx_memory(ctx, &before);
    assert_int_equal(forward(&p, !recompute), PMOE_OK);
    assert_int_equal(backward(&p, recompute ? NULL : &p.pre, NULL, &p.dx, PMOE_BWD_ALL), PMOE_OK);
    pmoe_ctx_memory(ctx, &after);
    assert_int_equal(before.allocations, after.allocations);
    free_problem(&p);
    pmoe_ctx_destroy(ctx);
    free(mem);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_configuration),
      cmocka_unit_test(test_sizes),
      cmocka_unit_test(test_finite_differences),
      cmocka_unit_test(test_threads_change_nothing),
      cmocka_unit_test(test_two_halves_equal_the_whole),
      cmocka_unit_test(test_dx_in_dys_memory_and_dpre_from_scratch),
      cmocka_unit_test(test_recompute),
      cmocka_unit_test(test_rows_beyond_the_last_are_not_read),
      cmocka_unit_test(test_nan_stays_with_its_expert),
      cmocka_unit_test(test_providers_agree),
      cmocka_unit_test(test_scratch_is_bounded),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
