/* Experts against a double-precision reference, finite differences of it, and themselves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pmoe/pmoe.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "core/dtype.h"
#include "core/random.h"
#include "moe/ops.h"
#include "support/experts_ref.h"
#include "support/failing_alloc.h"

typedef struct shape {
  int64_t hidden, inner, pad; /* pad: extra elements in every matrix row, never to be touched */
  int32_t num_experts;
  const int64_t *rows;
  pmoe_act act;
  bool bias, weighted;
  pmoe_dtype dtype, grad_dtype;
} shape;

enum { W1, B1, W2, B2, NUM_PARAMS };

typedef struct problem {
  shape s;
  int64_t inner1, total, count[NUM_PARAMS];
  pmoe_ctx *ctx;
  pmoe_experts *experts;
  void *param[NUM_PARAMS], *grad[NUM_PARAMS];
  double *param64[NUM_PARAMS], *start64[NUM_PARAMS]; /* what the library was given, exactly; gradients' start values */
  pmoe_mat x, dy, pre, dpre, y, dx;
  double *x64, *dy64, *weight64;
  float *weight, *drow_weight;
} problem;

static void *checked_malloc(size_t bytes) {
  void *p = malloc(bytes ? bytes : 1);
  assert_non_null(p);
  return p;
}

static double random_value(uint64_t key, int64_t i) {
  uint32_t w[4];
  float pair[2];
  pmoei_random4(key, 0, (uint64_t)i, w);
  pmoei_normal2(w[0], w[1], pair);
  return (double)pair[0];
}

/* Stores `value` as dtype and returns what was stored. */
static double store(void *p, pmoe_dtype dtype, int64_t i, double value) {
  if (dtype == PMOE_F32) return (double)(((float *)p)[i] = (float)value);
  ((pmoei_bf16 *)p)[i] = pmoei_f32_to_bf16((float)value);
  return (double)pmoei_bf16_to_f32(((pmoei_bf16 *)p)[i]);
}

static double load(const void *p, pmoe_dtype dtype, int64_t i) {
  return dtype == PMOE_F32 ? (double)((const float *)p)[i] : (double)pmoei_bf16_to_f32(((const pmoei_bf16 *)p)[i]);
}

/* All NaN, the padding too. */
static pmoe_mat make_mat(const problem *p, int64_t cols) {
  pmoe_mat m = {NULL, p->s.dtype, p->total, cols, cols + p->s.pad};
  size_t bytes = (size_t)(m.rows * m.ld) * pmoe_dtype_size(m.dtype);
  m.data = checked_malloc(bytes);
  memset(m.data, 0xff, bytes);
  return m;
}

static double *fill_mat(pmoe_mat *m, uint64_t key) {
  double *copy = checked_malloc((size_t)(m->rows * m->cols) * sizeof *copy);
  for (int64_t r = 0; r < m->rows; r++)
    for (int64_t c = 0; c < m->cols; c++)
      copy[r * m->cols + c] = store(m->data, m->dtype, r * m->ld + c, random_value(key, r * m->cols + c));
  return copy;
}

/* Rounds in double and float32 may differ, so large sums are compared by their largest element. */
static void expect_close(const char *what, const double *expected, const void *p, pmoe_dtype dtype, int64_t rows, int64_t cols,
                         int64_t ld, double tolerance) {
  double largest = 1e-3;
  for (int64_t i = 0; i < rows * cols; i++) largest = fmax(largest, fabs(expected[i]));
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < cols; c++) {
      double got = load(p, dtype, r * ld + c), want = expected[r * cols + c];
      if (!(fabs(got - want) <= tolerance * largest))
        fail_msg("%s [%lld,%lld] is %g; %g was expected (largest %g)", what, (long long)r, (long long)c, got, want, largest);
    }
  }
}

static void expect_mat(const char *what, const double *expected, const pmoe_mat *m, double tolerance) {
  expect_close(what, expected, m->data, m->dtype, m->rows, m->cols, m->ld, tolerance);
  for (int64_t r = 0; r < m->rows; r++) /* the padding was left alone */
    for (int64_t c = m->cols; c < m->ld; c++) assert_true(isnan(load(m->data, m->dtype, r * m->ld + c)));
}

static void fill_params(problem *p) {
  double scale[NUM_PARAMS] = {1 / sqrt((double)p->s.hidden), 0.3, 1 / sqrt((double)p->s.inner), 0.3};
  for (int i = 0; i < NUM_PARAMS; i++) {
    int64_t n = p->count[i];
    p->param[i] = checked_malloc((size_t)n * 4);
    p->grad[i] = checked_malloc((size_t)n * 4);
    p->param64[i] = checked_malloc((size_t)n * 8);
    p->start64[i] = checked_malloc((size_t)n * 8);
    for (int64_t j = 0; j < n; j++) {
      p->param64[i][j] = store(p->param[i], p->s.dtype, j, scale[i] * random_value(77 + (uint64_t)i, j));
      p->start64[i][j] = store(p->grad[i], p->s.grad_dtype, j, random_value(99 + (uint64_t)i, j));
    }
  }
}

static pmoe_ctx *make_ctx(const char *gemm, int32_t threads) {
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.gemm = gemm;
  cfg.cpu_threads = threads;
  pmoe_ctx *ctx = NULL;
  assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_OK);
  return ctx;
}

static problem make_problem(const shape *s, pmoe_ctx *ctx, int32_t recompute) {
  problem p = {.s = *s, .ctx = ctx};
  for (int32_t e = 0; e < s->num_experts; e++) p.total += s->rows[e];
  p.inner1 = s->act == PMOE_ACT_SWIGLU || s->act == PMOE_ACT_GEGLU ? 2 * s->inner : s->inner;
  p.count[W1] = s->num_experts * p.inner1 * s->hidden;
  p.count[W2] = s->num_experts * s->inner * s->hidden;
  p.count[B1] = s->num_experts * p.inner1;
  p.count[B2] = s->num_experts * s->hidden;
  fill_params(&p);
  p.x = make_mat(&p, s->hidden);
  p.dy = make_mat(&p, s->hidden);
  p.y = make_mat(&p, s->hidden);
  p.dx = make_mat(&p, s->hidden);
  p.pre = make_mat(&p, p.inner1);
  p.dpre = make_mat(&p, p.inner1);
  p.x64 = fill_mat(&p.x, 1);
  p.dy64 = fill_mat(&p.dy, 2);
  p.weight = checked_malloc((size_t)p.total * sizeof(float));
  p.drow_weight = checked_malloc((size_t)p.total * sizeof(float));
  p.weight64 = checked_malloc((size_t)p.total * sizeof(double));
  for (int64_t r = 0; r < p.total; r++) p.weight64[r] = store(p.weight, PMOE_F32, r, s->weighted ? random_value(3, r) : 1.0);
  pmoe_experts_config cfg = PMOE_CONFIG_INIT(pmoe_experts_config);
  cfg.inner = (int32_t)s->inner;
  cfg.act = s->act;
  cfg.bias = s->bias;
  cfg.dtype = s->dtype;
  cfg.grad_dtype = s->grad_dtype;
  cfg.recompute_act = recompute;
  assert_int_equal(pmoe_experts_create(ctx, (int32_t)s->hidden, s->num_experts, &cfg, &p.experts), PMOE_OK);
  return p;
}

static void free_problem(problem *p) {
  for (int i = 0; i < NUM_PARAMS; i++) {
    free(p->param[i]);
    free(p->grad[i]);
    free(p->param64[i]);
    free(p->start64[i]);
  }
  void *rest[] = {p->x.data, p->dy.data, p->y.data, p->dx.data, p->pre.data, p->dpre.data, p->x64, p->dy64, p->weight64, p->weight,
                  p->drow_weight};
  for (size_t i = 0; i < sizeof rest / sizeof rest[0]; i++) free(rest[i]);
  pmoe_experts_destroy(p->experts);
}

static pmoe_experts_params params_of(const problem *p) {
  pmoe_experts_params q = PMOE_CONFIG_INIT(pmoe_experts_params);
  q.fc1_weight = p->param[W1], q.fc2_weight = p->param[W2];
  q.fc1_weight_grad = p->grad[W1], q.fc2_weight_grad = p->grad[W2];
  if (!p->s.bias) return q;
  q.fc1_bias = p->param[B1], q.fc2_bias = p->param[B2];
  q.fc1_bias_grad = p->grad[B1], q.fc2_bias_grad = p->grad[B2];
  return q;
}

static pmoe_status forward(problem *p, bool keep) {
  pmoe_experts_params q = params_of(p);
  return pmoe_experts_forward(p->experts, &q, p->s.rows, &p->x, keep ? &p->pre : NULL, &p->y, NULL);
}

static pmoe_status backward(problem *p, pmoe_mat *pre, pmoe_mat *dpre, pmoe_mat *dx, pmoe_bwd which) {
  pmoe_experts_params q = params_of(p);
  return pmoe_experts_backward(p->experts, &q, p->s.rows, &p->x, pre, p->s.weighted ? p->weight : NULL, &p->dy, dpre, dx,
                               p->drow_weight, which, NULL);
}

static ref_experts reference(const problem *p) {
  ref_experts ref = {p->s.hidden, p->s.inner, p->inner1, p->s.num_experts, p->total, p->s.act, p->s.rows, p->x64,
                     p->param64[W1], p->s.bias ? p->param64[B1] : NULL, p->param64[W2], p->s.bias ? p->param64[B2] : NULL};
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
    expect_close(names[i], used ? expected[i] : p->start64[i], p->grad[i], p->s.grad_dtype, 1, p->count[i], p->count[i], t);
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
        shape s = {24, 40, bias ? 3 : 0, 6, ragged, (pmoe_act)act, bias != 0, bias == 0 || act % 2, types[type][0], types[type][1]};
        check_shape(&s, ctx);
      }
  pmoe_ctx_destroy(ctx);
}

static void test_sizes(void **state) {
  (void)state;
  static const int64_t uneven[] = {162, 0, 257, 44, 0, 83}, tiles[] = {128, 130, 65}, hot[] = {0, 700, 0}, one[] = {1}, none[] = {0, 0};
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
  if (!(fabs(got - slope) <= 2e-5 * fmax(1.0, fabs(slope)))) fail_msg("%s: gradient %g, finite difference %g", what, got, slope);
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
      for (int64_t j = 0; j < p.count[i]; j += 5) expect_slope(&p, "parameter", &p.param64[i][j], load(p.grad[i], PMOE_F32, j));
    for (int64_t j = 0; j < p.total * s.hidden; j += 3) expect_slope(&p, "x", &p.x64[j], load(p.dx.data, PMOE_F32, j));
    for (int64_t r = 0; r < p.total; r++) expect_slope(&p, "row_weight", &p.weight64[r], (double)p.drow_weight[r]);
    free_problem(&p);
  }
  pmoe_ctx_destroy(ctx);
}

static void expect_same_mat(const pmoe_mat *a, const pmoe_mat *b) {
  assert_memory_equal(a->data, b->data, (size_t)(a->rows * a->ld) * pmoe_dtype_size(a->dtype));
}

static void expect_same(const problem *a, const problem *b) {
  expect_same_mat(&a->y, &b->y);
  expect_same_mat(&a->dx, &b->dx);
  assert_memory_equal(a->drow_weight, b->drow_weight, (size_t)a->total * sizeof(float));
  for (int i = 0; i < NUM_PARAMS; i++)
    assert_memory_equal(a->grad[i], b->grad[i], (size_t)a->count[i] * pmoe_dtype_size(a->s.grad_dtype));
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
    assert_int_equal(pmoe_experts_backward(p.experts, &q, s.rows, &p.x, &p.pre, p.weight, &p.dy, &p.dpre, &p.dx, p.drow_weight,
                                           PMOE_BWD_INPUT, NULL),
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
    for (int64_t j = 0; j < p.count[W1]; j++) assert_int_equal(isnan(((float *)p.grad[W1])[j]) != 0, j >= p.count[W1] / 2);
    for (int64_t j = 0; j < p.count[W2]; j++) assert_int_equal(isnan(((float *)p.grad[W2])[j]) != 0, j >= p.count[W2] / 2);
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
      {offsetof(pmoe_experts_config, inner), 0, "inner is 0"},        {offsetof(pmoe_experts_config, inner), -3, "inner is -3"},
      {offsetof(pmoe_experts_config, act), 6, "act is 6"},            {offsetof(pmoe_experts_config, act), -1, "act is -1"},
      {offsetof(pmoe_experts_config, bias), 2, "bias is 2"},          {offsetof(pmoe_experts_config, dtype), PMOE_F16, "float16"},
      {offsetof(pmoe_experts_config, dtype), 9, "dtype is unknown"},  {offsetof(pmoe_experts_config, grad_dtype), 1, "grad_dtype"},
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
      expect_refused(pmoe_experts_forward(p->experts, &q, p->s.rows, &p->x, &p->pre, &p->y, NULL), PMOE_ERR_ARG, pointers[i].word);
    for (int which = PMOE_BWD_ALL; which <= PMOE_BWD_WEIGHT; which++) {
      if (which == (pointers[i].data ? PMOE_BWD_WEIGHT : PMOE_BWD_INPUT)) continue;
      expect_refused(pmoe_experts_backward(p->experts, &q, p->s.rows, &p->x, &p->pre, NULL, &p->dy, &p->dpre, &p->dx, NULL,
                                           (pmoe_bwd)which, NULL),
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
    expect_refused(pmoe_experts_backward(x, q, wrong[i], &p->x, &p->pre, NULL, &p->dy, &p->dpre, &p->dx, NULL, PMOE_BWD_ALL, NULL),
                   PMOE_ERR_ARG, "rows");
  }
  expect_refused(pmoe_experts_forward(NULL, q, rows, &p->x, &p->pre, &p->y, NULL), PMOE_ERR_ARG, "experts");
  expect_refused(pmoe_experts_forward(x, NULL, rows, &p->x, &p->pre, &p->y, NULL), PMOE_ERR_ARG, "params");
  expect_refused(pmoe_experts_forward(x, q, rows, NULL, &p->pre, &p->y, NULL), PMOE_ERR_ARG, "x is NULL");
  expect_refused(pmoe_experts_forward(x, q, rows, &p->x, &p->pre, NULL, NULL), PMOE_ERR_ARG, "y is NULL");
  expect_refused(pmoe_experts_backward(NULL, q, rows, &p->x, &p->pre, NULL, &p->dy, &p->dpre, &p->dx, NULL, PMOE_BWD_ALL, NULL),
                 PMOE_ERR_ARG, "experts");
  expect_refused(pmoe_experts_backward(x, NULL, rows, &p->x, &p->pre, NULL, &p->dy, &p->dpre, &p->dx, NULL, PMOE_BWD_ALL, NULL),
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
      cmocka_unit_test(test_allocation_failures),
      cmocka_unit_test(test_scratch_is_bounded),
      cmocka_unit_test(test_bad_creation),
      cmocka_unit_test(test_bad_calls_leave_outputs_alone),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
