#include <math.h>
#include <stdlib.h>

#include "oracle/oracle.h"

static const double tanh_scale = 0.7978845608028654; /* sqrt(2 / pi) */

static double sigmoid(double v) { return 1.0 / (1.0 + exp(-v)); }

/* The non-linearity and its derivative at v. */
static double curve(pmoe_act act, double v) {
  switch (act) {
  case PMOE_ACT_GELU:
  case PMOE_ACT_GEGLU: return 0.5 * v * (1.0 + erf(v / sqrt(2.0)));
  case PMOE_ACT_GELU_TANH: return 0.5 * v * (1.0 + tanh(tanh_scale * (v + 0.044715 * v * v * v)));
  case PMOE_ACT_RELU: return v > 0.0 ? v : 0.0;
  case PMOE_ACT_SILU:
  case PMOE_ACT_SWIGLU: return v * sigmoid(v);
  }
  return NAN;
}

static double slope(pmoe_act act, double v) {
  switch (act) {
  case PMOE_ACT_GELU:
  case PMOE_ACT_GEGLU: return 0.5 * (1.0 + erf(v / sqrt(2.0))) + v * exp(-0.5 * v * v) / sqrt(6.283185307179586);
  case PMOE_ACT_GELU_TANH: {
    double t = tanh(tanh_scale * (v + 0.044715 * v * v * v));
    return 0.5 * (1.0 + t) + 0.5 * v * (1.0 - t * t) * tanh_scale * (1.0 + 3.0 * 0.044715 * v * v);
  }
  case PMOE_ACT_RELU: return v > 0.0 ? 1.0 : 0.0;
  case PMOE_ACT_SILU:
  case PMOE_ACT_SWIGLU: return sigmoid(v) * (1.0 + v * (1.0 - sigmoid(v)));
  }
  return NAN;
}

int oracle_act_gated(pmoe_act act) { return act == PMOE_ACT_SWIGLU || act == PMOE_ACT_GEGLU; }

double oracle_act(pmoe_act act, const double *pre, int64_t i, int64_t inner) {
  double a = curve(act, pre[i]);
  return oracle_act_gated(act) ? a * pre[inner + i] : a;
}

static double *pre_activation(const oracle_ffn *ffn, const double *x) {
  int64_t f1 = oracle_act_gated(ffn->act) ? 2 * ffn->inner : ffn->inner;
  double *pre = calloc((size_t)f1 + 1, sizeof *pre);
  for (int64_t i = 0; i < f1; i++) {
    pre[i] = ffn->b1 ? ffn->b1[i] : 0.0;
    for (int64_t j = 0; j < ffn->hidden; j++) pre[i] += ffn->w1[i * ffn->hidden + j] * x[j];
  }
  return pre;
}

void oracle_ffn_forward(const oracle_ffn *ffn, const double *x, double *y) {
  double *pre = pre_activation(ffn, x);
  for (int64_t j = 0; j < ffn->hidden; j++) {
    y[j] = ffn->b2 ? ffn->b2[j] : 0.0;
    for (int64_t i = 0; i < ffn->inner; i++)
      y[j] += ffn->w2[j * ffn->inner + i] * oracle_act(ffn->act, pre, i, ffn->inner);
  }
  free(pre);
}

void oracle_ffn_backward(const oracle_ffn *ffn, const double *x, const double *dy, double *dx) {
  int64_t h = ffn->hidden, f = ffn->inner;
  double *pre = pre_activation(ffn, x), *dpre = calloc((size_t)(2 * f) + 1, sizeof *dpre);
  for (int64_t i = 0; i < f; i++) {
    double a = oracle_act(ffn->act, pre, i, f), da = 0.0;
    for (int64_t j = 0; j < h; j++) {
      da += ffn->w2[j * f + i] * dy[j];
      ffn->dw2[j * f + i] += dy[j] * a;
    }
    if (oracle_act_gated(ffn->act)) {
      dpre[i] = da * slope(ffn->act, pre[i]) * pre[f + i];
      dpre[f + i] = da * curve(ffn->act, pre[i]);
    } else {
      dpre[i] = da * slope(ffn->act, pre[i]);
    }
  }
  int64_t f1 = oracle_act_gated(ffn->act) ? 2 * f : f;
  for (int64_t i = 0; i < f1; i++) {
    for (int64_t j = 0; j < h; j++) {
      dx[j] += dpre[i] * ffn->w1[i * h + j];
      ffn->dw1[i * h + j] += dpre[i] * x[j];
    }
    if (ffn->b1) ffn->db1[i] += dpre[i];
  }
  for (int64_t j = 0; j < h && ffn->b2; j++) ffn->db2[j] += dy[j];
  free(pre);
  free(dpre);
}
