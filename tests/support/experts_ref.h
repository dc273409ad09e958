/* Experts in double precision, written from the formulas in pmoe/experts.h and nothing else. All arrays are double and
 * dense. */
#ifndef TEST_EXPERTS_REF_H
#define TEST_EXPERTS_REF_H
#include <math.h>
#include <pmoe/experts.h>
#include <stdlib.h>

typedef struct ref_experts {
  int64_t hidden, inner, inner1, num_experts, total;
  pmoe_act act;
  const int64_t *rows;
  const double *x, *w1, *b1, *w2, *b2; /* biases may be NULL */
} ref_experts;

typedef struct ref_grads {
  double *dx, *drow_weight, *dw1, *db1, *dw2, *db2; /* [R,H], [R], and as the parameters; all zero before */
} ref_grads;

static inline double ref_scalar_act(pmoe_act act, double h, double *slope) {
  const double pi = 3.14159265358979323846;
  if (act == PMOE_ACT_GELU || act == PMOE_ACT_GEGLU) {
    double cdf = 0.5 * erfc(-h / sqrt(2.0));
    *slope = cdf + h * exp(-0.5 * h * h) / sqrt(2.0 * pi);
    return h * cdf;
  }
  if (act == PMOE_ACT_GELU_TANH) {
    double u = sqrt(2.0 / pi) * (h + 0.044715 * h * h * h), t = tanh(u);
    *slope = 0.5 * (1.0 + t) + 0.5 * h * (1.0 - t * t) * sqrt(2.0 / pi) * (1.0 + 3.0 * 0.044715 * h * h);
    return 0.5 * h * (1.0 + t);
  }
  if (act == PMOE_ACT_RELU) {
    *slope = h > 0 ? 1.0 : 0.0;
    return h > 0 ? h : 0.0;
  }
  double s = 1.0 / (1.0 + exp(-h));
  *slope = s + h * s * (1.0 - s);
  return h * s;
}

/* Activation j of a row whose pre-activation is h [F1]; also da/dh_j and, if gated, da/dh_{F+j}. */
static inline double ref_act(const ref_experts *p, const double *h, int64_t j, double *to_gate, double *to_up) {
  double a = ref_scalar_act(p->act, h[j], to_gate);
  *to_up = a;
  if (p->inner1 == p->inner) return a;
  *to_gate *= h[p->inner + j];
  return a * h[p->inner + j];
}

static inline void ref_pre(const ref_experts *p, int64_t e, int64_t r, double *h) {
  for (int64_t o = 0; o < p->inner1; o++) {
    h[o] = p->b1 ? p->b1[e * p->inner1 + o] : 0.0;
    for (int64_t i = 0; i < p->hidden; i++)
      h[o] += p->x[r * p->hidden + i] * p->w1[(e * p->inner1 + o) * p->hidden + i];
  }
}

static inline void ref_output(const ref_experts *p, int64_t e, const double *h, double *y) {
  for (int64_t i = 0; i < p->hidden; i++) y[i] = p->b2 ? p->b2[e * p->hidden + i] : 0.0;
  for (int64_t j = 0; j < p->inner; j++) {
    double to_gate, to_up, a = ref_act(p, h, j, &to_gate, &to_up);
    for (int64_t i = 0; i < p->hidden; i++) y[i] += a * p->w2[(e * p->hidden + i) * p->inner + j];
  }
}

static inline void ref_forward(const ref_experts *p, double *y) {
  double *h = malloc((size_t)p->inner1 * sizeof *h);
  int64_t r = 0;
  for (int64_t e = 0; e < p->num_experts; e++) {
    for (int64_t end = r + p->rows[e]; r < end; r++) {
      ref_pre(p, e, r, h);
      ref_output(p, e, h, y + r * p->hidden);
    }
  }
  free(h);
}

static inline void ref_backward_row(const ref_experts *p, int64_t e, int64_t r, const double *dy, double weight,
                                    const ref_grads *g, double *h, double *dh) {
  int64_t H = p->hidden, F = p->inner;
  ref_pre(p, e, r, h);
  for (int64_t i = 0; i < H; i++) {
    if (g->db2) g->db2[e * H + i] += weight * dy[i];
    if (p->b2) g->drow_weight[r] += dy[i] * p->b2[e * H + i];
  }
  for (int64_t j = 0; j < F; j++) {
    double to_gate, to_up, a = ref_act(p, h, j, &to_gate, &to_up), da = 0;
    for (int64_t i = 0; i < H; i++) {
      da += dy[i] * p->w2[(e * H + i) * F + j];
      g->dw2[(e * H + i) * F + j] += weight * dy[i] * a;
    }
    g->drow_weight[r] += da * a;
    dh[j] = weight * da * to_gate;
    if (p->inner1 != F) dh[F + j] = weight * da * to_up;
  }
  for (int64_t o = 0; o < p->inner1; o++) {
    if (g->db1) g->db1[e * p->inner1 + o] += dh[o];
    for (int64_t i = 0; i < H; i++) {
      g->dx[r * H + i] += dh[o] * p->w1[(e * p->inner1 + o) * H + i];
      g->dw1[(e * p->inner1 + o) * H + i] += dh[o] * p->x[r * H + i];
    }
  }
}

/* row_weight NULL: all 1. */
static inline void ref_backward(const ref_experts *p, const double *dy, const double *row_weight, const ref_grads *g) {
  double *h = malloc((size_t)p->inner1 * sizeof *h), *dh = malloc((size_t)p->inner1 * sizeof *dh);
  int64_t r = 0;
  for (int64_t e = 0; e < p->num_experts; e++)
    for (int64_t end = r + p->rows[e]; r < end; r++)
      ref_backward_row(p, e, r, dy + r * p->hidden, row_weight ? row_weight[r] : 1.0, g, h, dh);
  free(h);
  free(dh);
}

#endif
