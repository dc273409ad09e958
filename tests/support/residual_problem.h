/* A residual branch with its data, and the same data in double precision. */
#ifndef TEST_RESIDUAL_PROBLEM_H
#define TEST_RESIDUAL_PROBLEM_H
#include <math.h>
#include <pmoe/pmoe.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"

/* cmocka.h must have been included by the test itself. */
enum { W1, B1, W2, B2, NUM_MLP };

typedef struct problem {
  pmoe_mix mix;
  pmoe_dtype dtype, dx_dtype;
  int64_t tokens, hidden, inner, outputs;
  pmoe_ctx *ctx;
  pmoe_residual *residual;
  void *mlp[NUM_MLP], *mlp_grad[NUM_MLP];
  double *mlp64[NUM_MLP];
  int64_t count[NUM_MLP];
  pmoe_mat x, pre, y, dy, dpre, dx, mix_dx;
  double *x64, *dy64, *moe64;
  float *weight, *bias, *weight_grad, *bias_grad, *scale, *branch_scale, *dscale, *dbranch_scale, *dmix;
} problem;

static inline void *take(size_t bytes) {
  void *p = malloc(bytes + 1);
  assert_non_null(p);
  memset(p, 0xff, bytes + 1);
  return p;
}

static inline double number(int64_t i, int64_t seed) {
  return (double)((i * 7919 + seed * 2971 + 5) % 2003 - 1001) / 1001.0;
}

static inline double put(void *p, pmoe_dtype dtype, int64_t i, double value) {
  float v = (float)value, back;
  char *at = (char *)p + (size_t)i * pmoe_dtype_size(dtype);
  pmoei_from_f32(at, dtype, &v, 1);
  pmoei_to_f32(&back, at, dtype, 1);
  return (double)back;
}

static inline double get(const pmoe_mat *m, int64_t r, int64_t c) {
  float v;
  pmoei_to_f32(&v, (char *)pmoei_row(m, r) + (size_t)c * pmoe_dtype_size(m->dtype), m->dtype, 1);
  return (double)v;
}

static inline pmoe_mat make_mat(const problem *p, pmoe_dtype dtype, int64_t cols) {
  return (pmoe_mat){take((size_t)(p->tokens * (cols + 2)) * pmoe_dtype_size(dtype)), dtype, p->tokens, cols, cols + 2};
}

static inline double *fill(pmoe_mat *m, int64_t seed) {
  double *copy = take((size_t)(m->rows * m->cols) * sizeof *copy);
  for (int64_t r = 0; r < m->rows; r++)
    for (int64_t c = 0; c < m->cols; c++)
      copy[r * m->cols + c] = put(m->data, m->dtype, r * m->ld + c, number(r * m->cols + c, seed));
  return copy;
}

static inline float *fill_floats(int64_t n, int64_t seed) {
  float *p = take((size_t)n * sizeof *p);
  for (int64_t i = 0; i < n; i++) p[i] = (float)number(i, seed);
  return p;
}

static inline pmoe_ctx *make_ctx(int32_t threads) {
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = threads;
  pmoe_ctx *ctx = NULL;
  assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_OK);
  return ctx;
}

static inline pmoe_residual_config config_of(const problem *p) {
  pmoe_residual_config cfg = PMOE_CONFIG_INIT(pmoe_residual_config);
  cfg.mix = p->mix;
  cfg.inner = (int32_t)p->inner;
  cfg.act = PMOE_ACT_SILU;
  cfg.bias = 1;
  cfg.dtype = p->dtype;
  return cfg;
}

static inline problem make_problem(pmoe_ctx *ctx, pmoe_mix mix, pmoe_dtype dtype, pmoe_dtype dx_dtype, int64_t tokens,
                                   int64_t hidden) {
  problem p = {
      .mix = mix, .dtype = dtype, .dx_dtype = dx_dtype, .tokens = tokens, .hidden = hidden, .inner = 7, .ctx = ctx};
  p.outputs = mix == PMOE_MIX_LEARNED ? 2 : mix == PMOE_MIX_GATED_SUM ? 1 : 0;
  int64_t count[NUM_MLP] = {p.inner * hidden, p.inner, hidden * p.inner, hidden};
  for (int i = 0; i < NUM_MLP; i++) {
    p.count[i] = count[i];
    p.mlp[i] = take((size_t)count[i] * 4);
    p.mlp_grad[i] = fill_floats(count[i], 40 + i);
    p.mlp64[i] = take((size_t)count[i] * 8);
    for (int64_t j = 0; j < count[i]; j++)
      p.mlp64[i][j] = put(p.mlp[i], dtype, j, number(j, 30 + i) / sqrt((double)hidden));
  }
  p.x = make_mat(&p, dtype, hidden), p.x64 = fill(&p.x, 1);
  p.dy = make_mat(&p, dtype, hidden), p.dy64 = fill(&p.dy, 2);
  p.pre = make_mat(&p, dtype, p.inner), p.dpre = make_mat(&p, dtype, p.inner);
  p.y = make_mat(&p, dtype, hidden), p.dx = make_mat(&p, dtype, hidden);
  p.mix_dx = make_mat(&p, dx_dtype, hidden);
  free(fill(&p.mix_dx, 3));
  p.moe64 = take((size_t)(tokens * hidden) * 8);
  for (int64_t i = 0; i < tokens * hidden; i++) p.moe64[i] = number(i, 4);
  p.weight = fill_floats(2 * hidden, 5), p.bias = fill_floats(2, 6);
  p.weight_grad = fill_floats(2 * hidden, 7), p.bias_grad = fill_floats(2, 8);
  float **rows[] = {&p.scale, &p.branch_scale, &p.dscale, &p.dbranch_scale};
  for (int i = 0; i < 4; i++) *rows[i] = take((size_t)tokens * sizeof(float));
  p.dmix = take((size_t)tokens * 2 * sizeof(float));
  pmoe_residual_config cfg = config_of(&p);
  assert_int_equal(pmoe_residual_create(ctx, (int32_t)hidden, &cfg, &p.residual), PMOE_OK);
  return p;
}

static inline void free_problem(problem *p) {
  for (int i = 0; i < NUM_MLP; i++) {
    free(p->mlp[i]);
    free(p->mlp_grad[i]);
    free(p->mlp64[i]);
  }
  void *rest[] = {p->x.data, p->dy.data,      p->pre.data, p->dpre.data,     p->y.data, p->dx.data,     p->mix_dx.data,
                  p->x64,    p->dy64,         p->moe64,    p->weight,        p->bias,   p->weight_grad, p->bias_grad,
                  p->scale,  p->branch_scale, p->dscale,   p->dbranch_scale, p->dmix};
  for (size_t i = 0; i < sizeof rest / sizeof rest[0]; i++) free(rest[i]);
  pmoe_residual_destroy(p->residual);
}

static inline pmoe_residual_params params_of(const problem *p) {
  pmoe_residual_params q = PMOE_CONFIG_INIT(pmoe_residual_params);
  q.mlp.size = sizeof q.mlp;
  q.mlp.fc1_weight = p->mlp[W1], q.mlp.fc1_bias = p->mlp[B1], q.mlp.fc2_weight = p->mlp[W2],
  q.mlp.fc2_bias = p->mlp[B2];
  q.mlp.fc1_weight_grad = p->mlp_grad[W1], q.mlp.fc1_bias_grad = p->mlp_grad[B1];
  q.mlp.fc2_weight_grad = p->mlp_grad[W2], q.mlp.fc2_bias_grad = p->mlp_grad[B2];
  if (p->outputs == 0) return q;
  q.mix_weight = p->weight, q.mix_weight_grad = p->weight_grad;
  if (p->outputs == 2) q.mix_bias = p->bias, q.mix_bias_grad = p->bias_grad;
  return q;
}

static inline pmoe_status forward(problem *p) {
  pmoe_residual_params q = params_of(p);
  return pmoe_residual_forward(p->residual, &q, &p->x, &p->pre, p->scale, p->branch_scale, &p->y, NULL);
}

static inline pmoe_status backward(problem *p, pmoe_bwd which) {
  pmoe_residual_params q = params_of(p);
  return pmoe_residual_backward(p->residual, &q, &p->x, &p->pre, p->branch_scale, &p->dy, &p->dpre, &p->dx,
                                p->dbranch_scale, which, NULL);
}

static inline pmoe_status mix_backward(problem *p, float *dmix, pmoe_mat *dx, pmoe_bwd which) {
  pmoe_residual_params q = params_of(p);
  return pmoe_residual_mix_backward(p->residual, &q, &p->x, p->scale, p->branch_scale, p->dscale, p->dbranch_scale,
                                    dmix, dx, which, NULL);
}

static inline void expect_same(const problem *a, const problem *b) {
  const pmoe_mat *ma[] = {&a->y, &a->dx, &a->mix_dx}, *mb[] = {&b->y, &b->dx, &b->mix_dx};
  for (int i = 0; i < 3; i++)
    assert_memory_equal(ma[i]->data, mb[i]->data, (size_t)(ma[i]->rows * ma[i]->ld) * pmoe_dtype_size(ma[i]->dtype));
  for (int i = 0; i < NUM_MLP; i++)
    assert_memory_equal(a->mlp_grad[i], b->mlp_grad[i], (size_t)a->count[i] * sizeof(float));
  assert_memory_equal(a->weight_grad, b->weight_grad, (size_t)(2 * a->hidden) * sizeof(float));
  assert_memory_equal(a->bias_grad, b->bias_grad, 2 * sizeof(float));
  assert_memory_equal(a->scale, b->scale, (size_t)a->tokens * sizeof(float));
  assert_memory_equal(a->dbranch_scale, b->dbranch_scale, (size_t)a->tokens * sizeof(float));
}

#endif
