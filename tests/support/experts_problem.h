/* A set of experts with its data, and the same data in double precision. */
#ifndef TEST_EXPERTS_PROBLEM_H
#define TEST_EXPERTS_PROBLEM_H
#include <math.h>
#include <pmoe/pmoe.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/random.h"

/* cmocka.h must have been included by the test itself. */
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

static inline void *checked_malloc(size_t bytes) {
  void *p = malloc(bytes ? bytes : 1);
  assert_non_null(p);
  return p;
}

static inline double random_value(uint64_t key, int64_t i) {
  uint32_t w[4];
  float pair[2];
  pmoei_random4(key, 0, (uint64_t)i, w);
  pmoei_normal2(w[0], w[1], pair);
  return (double)pair[0];
}

/* Stores `value` as dtype and returns what was stored. */
static inline double store(void *p, pmoe_dtype dtype, int64_t i, double value) {
  if (dtype == PMOE_F32) return (double)(((float *)p)[i] = (float)value);
  ((pmoei_bf16 *)p)[i] = pmoei_f32_to_bf16((float)value);
  return (double)pmoei_bf16_to_f32(((pmoei_bf16 *)p)[i]);
}

static inline double load(const void *p, pmoe_dtype dtype, int64_t i) {
  return dtype == PMOE_F32 ? (double)((const float *)p)[i] : (double)pmoei_bf16_to_f32(((const pmoei_bf16 *)p)[i]);
}

/* All NaN, the padding too. */
static inline pmoe_mat make_mat(const problem *p, int64_t cols) {
  pmoe_mat m = {NULL, p->s.dtype, p->total, cols, cols + p->s.pad};
  size_t bytes = (size_t)(m.rows * m.ld) * pmoe_dtype_size(m.dtype);
  m.data = checked_malloc(bytes);
  memset(m.data, 0xff, bytes);
  return m;
}

static inline double *fill_mat(pmoe_mat *m, uint64_t key) {
  double *copy = checked_malloc((size_t)(m->rows * m->cols) * sizeof *copy);
  for (int64_t r = 0; r < m->rows; r++)
    for (int64_t c = 0; c < m->cols; c++)
      copy[r * m->cols + c] = store(m->data, m->dtype, r * m->ld + c, random_value(key, r * m->cols + c));
  return copy;
}

/* Rounds in double and float32 may differ, so large sums are compared by their largest element. */
static inline void expect_close(const char *what, const double *expected, const void *p, pmoe_dtype dtype, int64_t rows,
                                int64_t cols, int64_t ld, double tolerance) {
  double largest = 1e-3;
  for (int64_t i = 0; i < rows * cols; i++) largest = fmax(largest, fabs(expected[i]));
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < cols; c++) {
      double got = load(p, dtype, r * ld + c), want = expected[r * cols + c];
      if (!(fabs(got - want) <= tolerance * largest))
        fail_msg("%s [%lld,%lld] is %g; %g was expected (largest %g)", what, (long long)r, (long long)c, got, want,
                 largest);
    }
  }
}

static inline void expect_mat(const char *what, const double *expected, const pmoe_mat *m, double tolerance) {
  expect_close(what, expected, m->data, m->dtype, m->rows, m->cols, m->ld, tolerance);
  for (int64_t r = 0; r < m->rows; r++) /* the padding was left alone */
    for (int64_t c = m->cols; c < m->ld; c++) assert_true(isnan(load(m->data, m->dtype, r * m->ld + c)));
}

static inline void fill_params(problem *p) {
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

static inline pmoe_ctx *make_ctx(const char *gemm, int32_t threads) {
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.gemm = gemm;
  cfg.cpu_threads = threads;
  pmoe_ctx *ctx = NULL;
  assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_OK);
  return ctx;
}

static inline problem make_problem(const shape *s, pmoe_ctx *ctx, int32_t recompute) {
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
  for (int64_t r = 0; r < p.total; r++)
    p.weight64[r] = store(p.weight, PMOE_F32, r, s->weighted ? random_value(3, r) : 1.0);
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

static inline void free_problem(problem *p) {
  for (int i = 0; i < NUM_PARAMS; i++) {
    free(p->param[i]);
    free(p->grad[i]);
    free(p->param64[i]);
    free(p->start64[i]);
  }
  void *rest[] = {p->x.data, p->dy.data, p->y.data,   p->dx.data, p->pre.data,   p->dpre.data,
                  p->x64,    p->dy64,    p->weight64, p->weight,  p->drow_weight};
  for (size_t i = 0; i < sizeof rest / sizeof rest[0]; i++) free(rest[i]);
  pmoe_experts_destroy(p->experts);
}

static inline pmoe_experts_params params_of(const problem *p) {
  pmoe_experts_params q = PMOE_CONFIG_INIT(pmoe_experts_params);
  q.fc1_weight = p->param[W1], q.fc2_weight = p->param[W2];
  q.fc1_weight_grad = p->grad[W1], q.fc2_weight_grad = p->grad[W2];
  if (!p->s.bias) return q;
  q.fc1_bias = p->param[B1], q.fc2_bias = p->param[B2];
  q.fc1_bias_grad = p->grad[B1], q.fc2_bias_grad = p->grad[B2];
  return q;
}

static inline pmoe_status forward(problem *p, bool keep) {
  pmoe_experts_params q = params_of(p);
  return pmoe_experts_forward(p->experts, &q, p->s.rows, &p->x, keep ? &p->pre : NULL, &p->y, NULL);
}

static inline pmoe_status backward(problem *p, pmoe_mat *pre, pmoe_mat *dpre, pmoe_mat *dx, pmoe_bwd which) {
  pmoe_experts_params q = params_of(p);
  return pmoe_experts_backward(p->experts, &q, p->s.rows, &p->x, pre, p->s.weighted ? p->weight : NULL, &p->dy, dpre,
                               dx, p->drow_weight, which, NULL);
}

static inline void expect_same_mat(const pmoe_mat *a, const pmoe_mat *b) {
  assert_memory_equal(a->data, b->data, (size_t)(a->rows * a->ld) * pmoe_dtype_size(a->dtype));
}

static inline void expect_same(const problem *a, const problem *b) {
  expect_same_mat(&a->y, &b->y);
  expect_same_mat(&a->dx, &b->dx);
  assert_memory_equal(a->drow_weight, b->drow_weight, (size_t)a->total * sizeof(float));
  for (int i = 0; i < NUM_PARAMS; i++)
    assert_memory_equal(a->grad[i], b->grad[i], (size_t)a->count[i] * pmoe_dtype_size(a->s.grad_dtype));
}

#endif
