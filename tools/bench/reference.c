#include "reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ranks.h"

void bench_compare(bench_error *error, double got, double want) {
  double deviation = fabs(got - want);
  if (!(deviation <= error->deviation)) error->deviation = deviation;
  if (fabs(want) > error->size) error->size = fabs(want);
}

double bench_relative(const bench_error *error) {
  return error->deviation == 0 ? 0 : error->deviation / (error->size > 0 ? error->size : 1);
}

double bench_worse(double a, double b) { return a <= b ? b : a >= b ? a : NAN; }

double bench_worst(const bench_error *errors, int n) {
  double worst = 0;
  for (int i = 0; i < n; i++) worst = bench_worse(worst, bench_relative(&errors[i]));
  return worst;
}

/* ---- activations ---- */
static double normal_cdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }

static double gelu(double x) { return x * normal_cdf(x); }
static double gelu_slope(double x) { return normal_cdf(x) + x * exp(-0.5 * x * x) * 0.39894228040143267794; }

static double tanh_inner(double x) { return 0.79788456080286535588 * (x + 0.044715 * x * x * x); }
static double gelu_tanh(double x) { return 0.5 * x * (1 + tanh(tanh_inner(x))); }
static double gelu_tanh_slope(double x) {
  double t = tanh(tanh_inner(x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.79788456080286535588 * (1 + 3 * 0.044715 * x * x);
}

static double silu(double x) { return x / (1 + exp(-x)); }
static double silu_slope(double x) {
  double s = 1 / (1 + exp(-x));
  return s * (1 + x * (1 - s));
}

/* The function that act applies to its (first) input. */
static double bend(pmoe_act act, double x) {
  switch (act) {
  case PMOE_ACT_GELU_TANH: return gelu_tanh(x);
  case PMOE_ACT_RELU: return x > 0 ? x : 0;
  case PMOE_ACT_SILU:
  case PMOE_ACT_SWIGLU: return silu(x);
  default: return gelu(x);
  }
}

static double slope(pmoe_act act, double x) {
  switch (act) {
  case PMOE_ACT_GELU_TANH: return gelu_tanh_slope(x);
  case PMOE_ACT_RELU: return x > 0 ? 1 : 0;
  case PMOE_ACT_SILU:
  case PMOE_ACT_SWIGLU: return silu_slope(x);
  default: return gelu_slope(x);
  }
}

static int gated(const bench_options *o) { return bench_inner1(o) != o->inner; }

/* ---- one row through one expert ---- */
void bench_expert_forward(const bench_options *o, int32_t expert, const double *x, double *pre, double *act,
                          double *out) {
  int64_t h = o->hidden, f = o->inner, f1 = bench_inner1(o);
  for (int64_t i = 0; i < f1; i++) {
    double sum = o->bias ? (double)bench_element(o, BENCH_FC1_BIAS, expert * f1 + i) : 0;
    for (int64_t j = 0; j < h; j++) sum += (double)bench_element(o, BENCH_FC1_WEIGHT, (expert * f1 + i) * h + j) * x[j];
    pre[i] = sum;
  }
  for (int64_t i = 0; i < f; i++) act[i] = bend(o->act, pre[i]) * (gated(o) ? pre[f + i] : 1);
  for (int64_t i = 0; i < h; i++) {
    double sum = o->bias ? (double)bench_element(o, BENCH_FC2_BIAS, expert * h + i) : 0;
    for (int64_t j = 0; j < f; j++)
      sum += (double)bench_element(o, BENCH_FC2_WEIGHT, (expert * h + i) * f + j) * act[j];
    out[i] = sum;
  }
}

static void add_through_fc1(const bench_options *o, int32_t expert, int64_t feature, double dpre, double *dx) {
  int64_t h = o->hidden, f1 = bench_inner1(o);
  for (int64_t j = 0; j < h; j++)
    dx[j] += dpre * (double)bench_element(o, BENCH_FC1_WEIGHT, (expert * f1 + feature) * h + j);
}

void bench_expert_backward(const bench_options *o, int32_t expert, const double *pre, const double *dout, double *dx) {
  int64_t h = o->hidden, f = o->inner;
  for (int64_t i = 0; i < f; i++) {
    double dact = 0;
    for (int64_t j = 0; j < h; j++)
      dact += dout[j] * (double)bench_element(o, BENCH_FC2_WEIGHT, (expert * h + j) * f + i);
    add_through_fc1(o, expert, i, dact * slope(o->act, pre[i]) * (gated(o) ? pre[f + i] : 1), dx);
    if (gated(o)) add_through_fc1(o, expert, f + i, dact * bend(o->act, pre[i]), dx);
  }
}

/* ---- one inner feature of one expert ---- */
pmoe_status bench_feature_create(const bench_options *o, int32_t expert, int32_t feature, bench_feature *out) {
  *out = (bench_feature){.options = o, .expert = expert, .feature = feature};
  int64_t h = o->hidden, f = o->inner, f1 = bench_inner1(o);
  double *p;
  BENCH_TRY(bench_alloc((size_t)(6 * h) * sizeof *p, &p));
  out->memory = p;
  out->w1[0] = p, out->w1[1] = p + h, out->w2 = p + 2 * h;
  out->dw1[0] = p + 3 * h, out->dw1[1] = p + 4 * h, out->dw2 = p + 5 * h;
  for (int64_t j = 0; j < h; j++) {
    for (int64_t half = 0; half <= gated(o); half++)
      out->w1[half][j] = (double)bench_element(o, BENCH_FC1_WEIGHT, (expert * f1 + half * f + feature) * h + j);
    out->w2[j] = (double)bench_element(o, BENCH_FC2_WEIGHT, (expert * h + j) * f + feature);
  }
  for (int64_t half = 0; o->bias && half <= gated(o); half++)
    out->b1[half] = (double)bench_element(o, BENCH_FC1_BIAS, expert * f1 + half * f + feature);
  return PMOE_OK;
}

void bench_feature_destroy(bench_feature *feature) { free(feature->memory); }

static double dot(const double *a, const double *b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

void bench_feature_add(bench_feature *s, const double *x, const double *dy, double weight) {
  const bench_options *o = s->options;
  int64_t h = o->hidden;
  double pre = s->b1[0] + dot(s->w1[0], x, h), up = gated(o) ? s->b1[1] + dot(s->w1[1], x, h) : 1;
  double dact = weight * dot(s->w2, dy, h), act = bend(o->act, pre) * up;
  double dpre[2] = {dact * slope(o->act, pre) * up, dact * bend(o->act, pre)};
  for (int64_t j = 0; j < h; j++) {
    s->dw2[j] += weight * act * dy[j];
    for (int half = 0; half <= gated(o); half++) s->dw1[half][j] += dpre[half] * x[j];
  }
  for (int half = 0; half <= gated(o); half++) s->db1[half] += dpre[half];
}

void bench_feature_compare(const bench_feature *s, const float *dw1, const float *db1, const float *dw2,
                           bench_error *error) {
  const bench_options *o = s->options;
  int64_t h = o->hidden, f = o->inner;
  bench_error each[3] = {{0, 0}, {0, 0}, {0, 0}};
  for (int64_t half = 0; half <= gated(o); half++) {
    for (int64_t j = 0; j < h; j++)
      bench_compare(&each[0], (double)dw1[(half * f + s->feature) * h + j], s->dw1[half][j]);
    if (db1) bench_compare(&each[1], (double)db1[half * f + s->feature], s->db1[half]);
  }
  for (int64_t j = 0; j < h; j++) bench_compare(&each[2], (double)dw2[j * f + s->feature], s->dw2[j]);
  for (int i = 0; i < 3; i++) bench_compare(error, bench_relative(&each[i]), 0);
}

/* ---- router ---- */
pmoe_status bench_router_create(const bench_options *o, bench_router_reference *out) {
  size_t weights = (size_t)o->experts * (size_t)o->hidden, experts = (size_t)o->experts;
  *out = (bench_router_reference){.options = o};
  BENCH_TRY(bench_alloc(experts * sizeof *out->prob + weights * sizeof *out->weight, &out->prob));
  out->weight = (float *)(out->prob + experts);
  bench_router(o, out->weight);
  return PMOE_OK;
}

void bench_router_destroy(bench_router_reference *router) { free(router->prob); }

void bench_router_forward(bench_router_reference *r, const double *x) {
  const bench_options *o = r->options;
  double largest = -INFINITY, sum = 0;
  for (int64_t e = 0; e < o->experts; e++) {
    r->prob[e] = 0;
    for (int64_t h = 0; h < o->hidden; h++) r->prob[e] += (double)r->weight[e * o->hidden + h] * x[h];
    largest = fmax(largest, r->prob[e]);
  }
  for (int32_t k = 0; k < o->top_k; k++) {
    int32_t best = -1;
    for (int32_t e = 0; e < o->experts; e++) {
      bool taken = false;
      for (int32_t i = 0; i < k; i++) taken = taken || r->expert[i] == e;
      if (!taken && (best < 0 || r->prob[e] > r->prob[best])) best = e;
    }
    r->expert[k] = best;
  }
  for (int32_t e = 0; e < o->experts; e++) sum += r->prob[e] = exp(r->prob[e] - largest);
  for (int32_t e = 0; e < o->experts; e++) r->prob[e] /= sum;
}

void bench_router_backward(const bench_router_reference *r, const double *dweight, double *dlogits) {
  const bench_options *o = r->options;
  double sum = 0;
  for (int32_t k = 0; k < o->top_k; k++) sum += dweight[k] * r->prob[r->expert[k]];
  for (int32_t e = 0; e < o->experts; e++) dlogits[e] = -r->prob[e] * sum;
  for (int32_t k = 0; k < o->top_k; k++) dlogits[r->expert[k]] += r->prob[r->expert[k]] * dweight[k];
}
