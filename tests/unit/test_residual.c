/* The residual branch: its MLP, its coefficients, and their gradients. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pmoe/pmoe.h>
#include <stdbool.h>
#include <string.h>

#include "core/dtype.h"
#include "moe/ops.h"
#include "support/experts_ref.h"
#include "support/failing_alloc.h"

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

static void *take(size_t bytes) {
  void *p = malloc(bytes + 1);
  assert_non_null(p);
  memset(p, 0xff, bytes + 1);
  return p;
}

static double number(int64_t i, int64_t seed) { return (double)((i * 7919 + seed * 2971 + 5) % 2003 - 1001) / 1001.0; }

static double put(void *p, pmoe_dtype dtype, int64_t i, double value) {
  float v = (float)value, back;
  char *at = (char *)p + (size_t)i * pmoe_dtype_size(dtype);
  pmoei_from_f32(at, dtype, &v, 1);
  pmoei_to_f32(&back, at, dtype, 1);
  return (double)back;
}

static double get(const pmoe_mat *m, int64_t r, int64_t c) {
  float v;
  pmoei_to_f32(&v, (char *)pmoei_row(m, r) + (size_t)c * pmoe_dtype_size(m->dtype), m->dtype, 1);
  return (double)v;
}

static pmoe_mat make_mat(const problem *p, pmoe_dtype dtype, int64_t cols) {
  return (pmoe_mat){take((size_t)(p->tokens * (cols + 2)) * pmoe_dtype_size(dtype)), dtype, p->tokens, cols, cols + 2};
}

static double *fill(pmoe_mat *m, int64_t seed) {
  double *copy = take((size_t)(m->rows * m->cols) * sizeof *copy);
  for (int64_t r = 0; r < m->rows; r++)
    for (int64_t c = 0; c < m->cols; c++)
      copy[r * m->cols + c] = put(m->data, m->dtype, r * m->ld + c, number(r * m->cols + c, seed));
  return copy;
}

static float *fill_floats(int64_t n, int64_t seed) {
  float *p = take((size_t)n * sizeof *p);
  for (int64_t i = 0; i < n; i++) p[i] = (float)number(i, seed);
  return p;
}

static pmoe_ctx *make_ctx(int32_t threads) {
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = threads;
  pmoe_ctx *ctx = NULL;
  assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_OK);
  return ctx;
}

static pmoe_residual_config config_of(const problem *p) {
  pmoe_residual_config cfg = PMOE_CONFIG_INIT(pmoe_residual_config);
  cfg.mix = p->mix;
  cfg.inner = (int32_t)p->inner;
  cfg.act = PMOE_ACT_SILU;
  cfg.bias = 1;
  cfg.dtype = p->dtype;
  return cfg;
}

static problem make_problem(pmoe_ctx *ctx, pmoe_mix mix, pmoe_dtype dtype, pmoe_dtype dx_dtype, int64_t tokens, int64_t hidden) {
  problem p = {.mix = mix, .dtype = dtype, .dx_dtype = dx_dtype, .tokens = tokens, .hidden = hidden, .inner = 7, .ctx = ctx};
  p.outputs = mix == PMOE_MIX_LEARNED ? 2 : mix == PMOE_MIX_GATED_SUM ? 1 : 0;
  int64_t count[NUM_MLP] = {p.inner * hidden, p.inner, hidden * p.inner, hidden};
  for (int i = 0; i < NUM_MLP; i++) {
    p.count[i] = count[i];
    p.mlp[i] = take((size_t)count[i] * 4);
    p.mlp_grad[i] = fill_floats(count[i], 40 + i);
    p.mlp64[i] = take((size_t)count[i] * 8);
    for (int64_t j = 0; j < count[i]; j++) p.mlp64[i][j] = put(p.mlp[i], dtype, j, number(j, 30 + i) / sqrt((double)hidden));
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

static void free_problem(problem *p) {
  for (int i = 0; i < NUM_MLP; i++) {
    free(p->mlp[i]);
    free(p->mlp_grad[i]);
    free(p->mlp64[i]);
  }
  void *rest[] = {p->x.data, p->dy.data, p->pre.data, p->dpre.data, p->y.data, p->dx.data, p->mix_dx.data, p->x64, p->dy64, p->moe64,
                  p->weight, p->bias, p->weight_grad, p->bias_grad, p->scale, p->branch_scale, p->dscale, p->dbranch_scale, p->dmix};
  for (size_t i = 0; i < sizeof rest / sizeof rest[0]; i++) free(rest[i]);
  pmoe_residual_destroy(p->residual);
}

static pmoe_residual_params params_of(const problem *p) {
  pmoe_residual_params q = PMOE_CONFIG_INIT(pmoe_residual_params);
  q.mlp.size = sizeof q.mlp;
  q.mlp.fc1_weight = p->mlp[W1], q.mlp.fc1_bias = p->mlp[B1], q.mlp.fc2_weight = p->mlp[W2], q.mlp.fc2_bias = p->mlp[B2];
  q.mlp.fc1_weight_grad = p->mlp_grad[W1], q.mlp.fc1_bias_grad = p->mlp_grad[B1];
  q.mlp.fc2_weight_grad = p->mlp_grad[W2], q.mlp.fc2_bias_grad = p->mlp_grad[B2];
  if (p->outputs == 0) return q;
  q.mix_weight = p->weight, q.mix_weight_grad = p->weight_grad;
  if (p->outputs == 2) q.mix_bias = p->bias, q.mix_bias_grad = p->bias_grad;
  return q;
}

static pmoe_status forward(problem *p) {
  pmoe_residual_params q = params_of(p);
  return pmoe_residual_forward(p->residual, &q, &p->x, &p->pre, p->scale, p->branch_scale, &p->y, NULL);
}

static pmoe_status backward(problem *p, pmoe_bwd which) {
  pmoe_residual_params q = params_of(p);
  return pmoe_residual_backward(p->residual, &q, &p->x, &p->pre, p->branch_scale, &p->dy, &p->dpre, &p->dx, p->dbranch_scale, which, NULL);
}

static pmoe_status mix_backward(problem *p, float *dmix, pmoe_mat *dx, pmoe_bwd which) {
  pmoe_residual_params q = params_of(p);
  return pmoe_residual_mix_backward(p->residual, &q, &p->x, p->scale, p->branch_scale, p->dscale, p->dbranch_scale, dmix, dx, which, NULL);
}

/* c0 and c1 of token t, with weights and x in double. */
static void coefficients(const problem *p, const double *x64, const double *weight, const double *bias, int64_t t, double c[2]) {
  double l[2] = {0, 0};
  for (int64_t o = 0; o < p->outputs; o++) {
    l[o] = p->outputs == 2 ? bias[o] : 0;
    for (int64_t i = 0; i < p->hidden; i++) l[o] += x64[t * p->hidden + i] * weight[o * p->hidden + i];
  }
  c[0] = p->outputs == 2 ? exp(l[0]) / (exp(l[0]) + exp(l[1])) : 1;
  c[1] = p->outputs == 2 ? exp(l[1]) / (exp(l[0]) + exp(l[1])) : p->outputs == 1 ? 1 / (1 + exp(-l[0])) : 1;
}

/* The part of the loss sum dy.y that depends on the coefficients, with the branch outputs held. */
static double mix_loss(const problem *p, const double *x64, const double *weight, const double *bias, const double *dmoe, const double *dmlp) {
  double sum = 0;
  for (int64_t t = 0; t < p->tokens; t++) {
    double c[2];
    coefficients(p, x64, weight, bias, t, c);
    sum += c[0] * dmoe[t] + c[1] * dmlp[t];
  }
  return sum;
}

typedef struct mix64 {
  double *weight, bias[2], *dmoe, *dmlp;
} mix64;

static mix64 widen_mix(const problem *p) {
  mix64 m = {take((size_t)(2 * p->hidden) * 8), {(double)p->bias[0], (double)p->bias[1]}, take((size_t)p->tokens * 8), take((size_t)p->tokens * 8)};
  for (int64_t i = 0; i < 2 * p->hidden; i++) m.weight[i] = (double)p->weight[i];
  for (int64_t t = 0; t < p->tokens; t++) m.dmoe[t] = (double)p->dscale[t], m.dmlp[t] = (double)p->dbranch_scale[t];
  return m;
}

static void free_mix(mix64 *m) {
  free(m->weight);
  free(m->dmoe);
  free(m->dmlp);
}

static double slope(const problem *p, const mix64 *m, double *value) {
  double kept = *value, step = 1e-6;
  *value = kept + step;
  double up = mix_loss(p, p->x64, m->weight, m->bias, m->dmoe, m->dmlp);
  *value = kept - step;
  double down = mix_loss(p, p->x64, m->weight, m->bias, m->dmoe, m->dmlp);
  *value = kept;
  return (up - down) / (2 * step);
}

static void expect_near(const char *what, double got, double want, double limit) {
  if (!(fabs(got - want) <= limit * fmax(1, fabs(want)))) fail_msg("%s is %.9g; %.9g was expected", what, got, want);
}

static void set_dscale(problem *p) { /* dy . moe, as the layer learns it from the experts */
  for (int64_t t = 0; t < p->tokens; t++) {
    double sum = 0;
    for (int64_t i = 0; i < p->hidden; i++) sum += p->dy64[t * p->hidden + i] * p->moe64[t * p->hidden + i];
    p->dscale[t] = (float)sum;
  }
}

static void check_forward(problem *p) {
  int64_t rows[] = {p->tokens};
  ref_experts ref = {p->hidden, p->inner, p->inner, 1, p->tokens, PMOE_ACT_SILU, rows, p->x64, p->mlp64[W1], p->mlp64[B1], p->mlp64[W2],
                     p->mlp64[B2]};
  double *y = take((size_t)(p->tokens * p->hidden) * 8), c[2], limit = p->dtype == PMOE_BF16 ? 2e-2 : 2e-6;
  ref_forward(&ref, y);
  mix64 m = widen_mix(p);
  for (int64_t t = 0; t < p->tokens; t++) {
    coefficients(p, p->x64, m.weight, m.bias, t, c);
    double rounding = 1e-6 + 2e-8 * (double)p->hidden; /* of the logits' sums */
    expect_near("scale", (double)p->scale[t], c[0], rounding);
    expect_near("branch_scale", (double)p->branch_scale[t], c[1], rounding);
    for (int64_t i = 0; i < p->hidden; i++) expect_near("mlp", get(&p->y, t, i), y[t * p->hidden + i], limit);
  }
  free_mix(&m);
  free(y);
}

/* Gradients of the MLP against the reference, dbranch_scale against dy . mlp. */
static void check_backward(problem *p) {
  int64_t rows[] = {p->tokens};
  double sums = 3e-6 * (1 + (double)(p->tokens * p->hidden) / 4000);
  double limit = p->dtype == PMOE_BF16 ? 3e-2 : sums, *weight = take((size_t)p->tokens * 8);
  ref_experts ref = {p->hidden, p->inner, p->inner, 1, p->tokens, PMOE_ACT_SILU, rows, p->x64, p->mlp64[W1], p->mlp64[B1], p->mlp64[W2],
                     p->mlp64[B2]};
  ref_grads g = {calloc((size_t)(p->tokens * p->hidden + 1), 8), calloc((size_t)p->tokens + 1, 8), NULL, NULL, NULL, NULL};
  double **grads[NUM_MLP] = {&g.dw1, &g.db1, &g.dw2, &g.db2};
  for (int i = 0; i < NUM_MLP; i++) {
    *grads[i] = take((size_t)p->count[i] * 8);
    for (int64_t j = 0; j < p->count[i]; j++) (*grads[i])[j] = (double)(float)number(j, 40 + i);
  }
  for (int64_t t = 0; t < p->tokens; t++) weight[t] = (double)p->branch_scale[t];
  ref_backward(&ref, p->dy64, weight, &g);
  for (int64_t t = 0; t < p->tokens; t++) {
    expect_near("dbranch_scale", (double)p->dbranch_scale[t], g.drow_weight[t], limit);
    for (int64_t i = 0; i < p->hidden; i++) expect_near("dx", get(&p->dx, t, i), g.dx[t * p->hidden + i], limit);
  }
  for (int i = 0; i < NUM_MLP; i++) {
    for (int64_t j = 0; j < p->count[i]; j++) expect_near("mlp gradient", (double)((float *)p->mlp_grad[i])[j], (*grads[i])[j], 2 * limit);
    free(*grads[i]);
  }
  free(g.dx);
  free(g.drow_weight);
  free(weight);
}

/* The coefficients' gradients by finite differences of their part of the loss. */
static void check_mix_backward(problem *p) {
  mix64 m = widen_mix(p);
  double sums = 1e-5 * (1 + (double)(p->tokens * p->hidden) / 4000), limit = p->dx_dtype == PMOE_BF16 ? 8e-3 : sums;
  for (int64_t i = 0; i < p->tokens * p->hidden; i += 1 + p->tokens * p->hidden / 100) {
    float before = (float)number(i, 3);
    if (p->dx_dtype == PMOE_BF16) before = pmoei_bf16_to_f32(pmoei_f32_to_bf16(before));
    expect_near("mix dx", get(&p->mix_dx, i / p->hidden, i % p->hidden), (double)before + slope(p, &m, &p->x64[i]), limit);
  }
  for (int64_t i = 0; i < p->outputs * p->hidden; i += 1 + p->hidden / 50)
    expect_near("mix weight", (double)p->weight_grad[i], (double)(float)number(i, 7) + slope(p, &m, &m.weight[i]), sums);
  for (int64_t i = p->outputs * p->hidden; i < 2 * p->hidden; i++) assert_true(p->weight_grad[i] == (float)number(i, 7));
  for (int o = 0; o < 2; o++) {
    double want = (double)(float)number(o, 8) + (p->outputs == 2 ? slope(p, &m, &m.bias[o]) : 0);
    expect_near("mix bias", (double)p->bias_grad[o], want, sums);
  }
  free_mix(&m);
}

static void test_against_reference(void **state) {
  (void)state;
  static const int64_t sizes[][2] = {{9, 6}, {70, 5}, {0, 4}, {1, 1}, {130, 300}};
  static const pmoe_dtype types[][2] = {{PMOE_F32, PMOE_F32}, {PMOE_BF16, PMOE_F32}, {PMOE_BF16, PMOE_BF16}};
  pmoe_ctx *ctx = make_ctx(2);
  for (int mix = PMOE_MIX_LEARNED; mix <= PMOE_MIX_GATED_SUM; mix++) {
    for (int type = 0; type < 3; type++) {
      for (size_t s = 0; s < (type == 0 ? 5u : 3u); s++) {
        problem p = make_problem(ctx, (pmoe_mix)mix, types[type][0], types[type][1], sizes[s][0], sizes[s][1]);
        assert_int_equal(forward(&p), PMOE_OK);
        check_forward(&p);
        set_dscale(&p);
        assert_int_equal(backward(&p, PMOE_BWD_ALL), PMOE_OK);
        check_backward(&p);
        assert_int_equal(mix_backward(&p, NULL, &p.mix_dx, PMOE_BWD_ALL), PMOE_OK);
        check_mix_backward(&p);
        free_problem(&p);
      }
    }
  }
  pmoe_ctx_destroy(ctx);
}

/* Known values: logits (.2, -.4), expert output 2, MLP output -1 give .936969; permuted tokens give permuted coefficients. */
static void test_softmax_runs_over_the_two_branches(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(1);
  problem p = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 3, 1);
  const float x[3] = {1, -2, 0.5f};
  p.weight[0] = 0.3f, p.weight[1] = -0.6f, p.bias[0] = -0.1f, p.bias[1] = 0.2f;
  for (int t = 0; t < 3; t++) ((float *)p.x.data)[t * p.x.ld] = x[t];
  assert_int_equal(forward(&p), PMOE_OK);
  assert_true(fabs((double)p.scale[0] * 2 - (double)p.branch_scale[0] - 0.936969) < 1e-6);
  float kept[3] = {p.scale[0], p.scale[1], p.scale[2]};
  for (int t = 0; t < 3; t++) ((float *)p.x.data)[t * p.x.ld] = x[(t + 1) % 3];
  assert_int_equal(forward(&p), PMOE_OK);
  for (int t = 0; t < 3; t++) {
    assert_true(p.scale[t] == kept[(t + 1) % 3]);
    assert_true(fabsf(p.scale[t] + p.branch_scale[t] - 1) < 2e-7f);
  }
  free_problem(&p);
  pmoe_ctx_destroy(ctx);
}

static void run_whole(problem *p) {
  assert_int_equal(forward(p), PMOE_OK);
  set_dscale(p);
  assert_int_equal(backward(p, PMOE_BWD_ALL), PMOE_OK);
  assert_int_equal(mix_backward(p, NULL, &p->mix_dx, PMOE_BWD_ALL), PMOE_OK);
}

static void expect_same(const problem *a, const problem *b) {
  const pmoe_mat *ma[] = {&a->y, &a->dx, &a->mix_dx}, *mb[] = {&b->y, &b->dx, &b->mix_dx};
  for (int i = 0; i < 3; i++)
    assert_memory_equal(ma[i]->data, mb[i]->data, (size_t)(ma[i]->rows * ma[i]->ld) * pmoe_dtype_size(ma[i]->dtype));
  for (int i = 0; i < NUM_MLP; i++) assert_memory_equal(a->mlp_grad[i], b->mlp_grad[i], (size_t)a->count[i] * sizeof(float));
  assert_memory_equal(a->weight_grad, b->weight_grad, (size_t)(2 * a->hidden) * sizeof(float));
  assert_memory_equal(a->bias_grad, b->bias_grad, 2 * sizeof(float));
  assert_memory_equal(a->scale, b->scale, (size_t)a->tokens * sizeof(float));
  assert_memory_equal(a->dbranch_scale, b->dbranch_scale, (size_t)a->tokens * sizeof(float));
}

static void test_halves_and_threads_give_the_same_bits(void **state) {
  (void)state;
  for (int mix = PMOE_MIX_LEARNED; mix <= PMOE_MIX_GATED_SUM; mix++) {
    pmoe_ctx *one = make_ctx(1);
    problem whole = make_problem(one, (pmoe_mix)mix, PMOE_F32, PMOE_F32, 150, 300);
    run_whole(&whole);
    for (int32_t threads = 1; threads <= 3; threads++) {
      pmoe_ctx *ctx = make_ctx(threads);
      problem p = make_problem(ctx, (pmoe_mix)mix, PMOE_F32, PMOE_F32, 150, 300);
      run_whole(&p);
      expect_same(&whole, &p);
      free_problem(&p);
      p = make_problem(ctx, (pmoe_mix)mix, PMOE_F32, PMOE_F32, 150, 300);
      assert_int_equal(forward(&p), PMOE_OK);
      set_dscale(&p);
      assert_int_equal(backward(&p, PMOE_BWD_INPUT), PMOE_OK);
      assert_int_equal(mix_backward(&p, p.dmix, &p.mix_dx, PMOE_BWD_INPUT), PMOE_OK);
      assert_int_equal(backward(&p, PMOE_BWD_WEIGHT), PMOE_OK);
      assert_int_equal(mix_backward(&p, p.dmix, NULL, PMOE_BWD_WEIGHT), PMOE_OK);
      expect_same(&whole, &p);
      free_problem(&p);
      pmoe_ctx_destroy(ctx);
    }
    free_problem(&whole);
    pmoe_ctx_destroy(one);
  }
}

static void test_scratch_is_bounded(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(2);
  problem p = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 300, 2);
  size_t bytes = pmoei_residual_scratch_bytes(p.residual, p.tokens);
  void *mem = NULL;
  assert_int_equal(posix_memalign(&mem, 64, bytes), 0);
  assert_int_equal(pmoe_ctx_set_scratch(ctx, mem, bytes), PMOE_OK);
  pmoe_memory before = PMOE_CONFIG_INIT(pmoe_memory), after = before;
  pmoe_ctx_memory(ctx, &before);
  run_whole(&p);
  pmoe_ctx_memory(ctx, &after);
  assert_int_equal(before.allocations, after.allocations);
  free_problem(&p);
  pmoe_ctx_destroy(ctx);
  free(mem);
}

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
  problem p = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 4, 3), fresh = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 4, 3);
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
  expect_refused(pmoe_residual_backward(NULL, &good, &p.x, &p.pre, p.scale, &p.dy, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL), "residual");
  expect_refused(pmoe_residual_backward(r, NULL, &p.x, &p.pre, p.scale, &p.dy, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL), "params");
  expect_refused(pmoe_residual_backward(r, &good, NULL, &p.pre, p.scale, &p.dy, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL), "x is NULL");
  expect_refused(pmoe_residual_backward(r, &good, &p.x, &p.pre, NULL, &p.dy, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL), "branch_scale");
  expect_refused(pmoe_residual_backward(r, &good, &p.x, &p.pre, p.scale, NULL, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL), "dy is NULL");
  expect_refused(pmoe_residual_backward(r, &good, &p.x, NULL, p.scale, &p.dy, &p.dpre, &p.dx, p.dscale, PMOE_BWD_ALL, NULL), "pre is NULL");
  expect_refused(pmoe_residual_backward(r, &good, &p.x, &p.pre, p.scale, &p.dy, &p.dpre, &p.dx, NULL, PMOE_BWD_ALL, NULL), "dbranch_scale");
  expect_refused(pmoe_residual_backward(r, &good, &p.x, &p.pre, p.scale, &p.dy, &p.dpre, &p.dx, p.dscale, (pmoe_bwd)5, NULL), "which is 5");
  memcpy(p.scale, fresh.scale, 4 * sizeof(float));
  expect_same(&p, &fresh);
  free_problem(&p);
  free_problem(&fresh);
  pmoe_ctx_destroy(ctx);
}

static void test_bad_mix_backward(void **state) {
  (void)state;
  pmoe_ctx *ctx = make_ctx(1);
  problem p = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 4, 3), fresh = make_problem(ctx, PMOE_MIX_LEARNED, PMOE_F32, PMOE_F32, 4, 3);
  pmoe_residual_params good = params_of(&p), q = good;
  pmoe_residual *r = p.residual;
  float *s = p.dscale;
  expect_refused(pmoe_residual_mix_backward(NULL, &good, &p.x, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL), "residual");
  expect_refused(pmoe_residual_mix_backward(r, NULL, &p.x, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL), "params");
  expect_refused(pmoe_residual_mix_backward(r, &good, NULL, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL), "x is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.pre, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL), "x->cols");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, NULL, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL), "scale is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, NULL, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL), "branch_scale is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, NULL, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL), "dscale is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, NULL, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL), "dbranch_scale is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, s, NULL, NULL, PMOE_BWD_ALL, NULL), "dx is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_INPUT, NULL), "dmix is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, s, NULL, NULL, PMOE_BWD_WEIGHT, NULL), "dmix is NULL");
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, s, NULL, &p.mix_dx, (pmoe_bwd)-1, NULL), "which is -1");
  pmoe_mat wrong = p.mix_dx;
  wrong.dtype = PMOE_BF16;
  expect_refused(pmoe_residual_mix_backward(r, &good, &p.x, s, s, s, s, NULL, &wrong, PMOE_BWD_ALL, NULL), "dx->dtype");
  q.mix_weight_grad = NULL;
  expect_refused(pmoe_residual_mix_backward(r, &q, &p.x, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL), "mix_weight_grad is NULL");
  q = good, q.mix_bias_grad = NULL;
  expect_refused(pmoe_residual_mix_backward(r, &q, &p.x, s, s, s, s, NULL, &p.mix_dx, PMOE_BWD_ALL, NULL), "mix_bias_grad is NULL");
  expect_same(&p, &fresh);
  free_problem(&p);
  free_problem(&fresh);
  pmoe_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_against_reference),
      cmocka_unit_test(test_softmax_runs_over_the_two_branches),
      cmocka_unit_test(test_halves_and_threads_give_the_same_bits),
      cmocka_unit_test(test_scratch_is_bounded),
      cmocka_unit_test(test_allocation_failures),
      cmocka_unit_test(test_bad_creation),
      cmocka_unit_test(test_bad_forward_and_backward),
      cmocka_unit_test(test_bad_mix_backward),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
