#include <stdbool.h>

#include "core/dtype.h"
#include "core/simd.h"
#include "moe/activation.h"
#include "moe/activation_math.h"

enum { CHUNK = 512 }; /* columns at a time: what one chunk touches stays in the first-level cache */

/* One chunk of one row. Backward returns dact . a. Outputs may be the memory of inputs. */
typedef struct chunk_grad {
  const float *h, *up, *dact;
  float weight;
  float *dh, *dup, *weighted;
} chunk_grad;
typedef void (*forward_chunk)(int64_t n, const float *h, const float *up, float *a);
typedef float (*backward_chunk)(int64_t n, const chunk_grad *c);

#define PLAIN_ACTIVATION(name)                                                                                         \
  PMOEI_VECTORISED static void name##_forward(int64_t n, const float *h, const float *up, float *a) {                  \
    (void)up;                                                                                                          \
    float slope;                                                                                                       \
    PMOEI_SIMD for (int64_t i = 0; i < n; i++) a[i] = pmoei_##name(h[i], &slope);                                      \
  }                                                                                                                    \
  PMOEI_VECTORISED static float name##_backward(int64_t n, const chunk_grad *c) {                                      \
    const float *h = c->h, *dact = c->dact;                                                                            \
    float *dh = c->dh, *weighted = c->weighted, weight = c->weight, sum = 0;                                           \
    PMOEI_SIMD_SUM(sum) for (int64_t i = 0; i < n; i++) {                                                              \
      float slope, a = pmoei_##name(h[i], &slope), d = dact[i];                                                        \
      sum += d * a;                                                                                                    \
      dh[i] = weight * d * slope;                                                                                      \
      weighted[i] = weight * a;                                                                                        \
    }                                                                                                                  \
    return sum;                                                                                                        \
  }

#define GATED_ACTIVATION(name, gate)                                                                                   \
  PMOEI_VECTORISED static void name##_forward(int64_t n, const float *h, const float *up, float *a) {                  \
    float slope;                                                                                                       \
    PMOEI_SIMD for (int64_t i = 0; i < n; i++) a[i] = gate(h[i], &slope) * up[i];                                      \
  }                                                                                                                    \
  PMOEI_VECTORISED static float name##_backward(int64_t n, const chunk_grad *c) {                                      \
    const float *h = c->h, *up = c->up, *dact = c->dact;                                                               \
    float *dh = c->dh, *dup = c->dup, *weighted = c->weighted, weight = c->weight, sum = 0;                            \
    PMOEI_SIMD_SUM(sum) for (int64_t i = 0; i < n; i++) {                                                              \
      float slope, g = gate(h[i], &slope), u = up[i], d = dact[i], wd = weight * d;                                    \
      sum += d * (g * u);                                                                                              \
      dh[i] = wd * u * slope;                                                                                          \
      dup[i] = wd * g;                                                                                                 \
      weighted[i] = weight * (g * u);                                                                                  \
    }                                                                                                                  \
    return sum;                                                                                                        \
  }

PLAIN_ACTIVATION(gelu)
PLAIN_ACTIVATION(gelu_tanh)
PLAIN_ACTIVATION(relu)
PLAIN_ACTIVATION(silu)
GATED_ACTIVATION(swiglu, pmoei_silu)
GATED_ACTIVATION(geglu, pmoei_gelu)

static const struct {
  forward_chunk forward;
  backward_chunk backward;
} activations[] = {
    [PMOE_ACT_GELU] = {gelu_forward, gelu_backward},
    [PMOE_ACT_GELU_TANH] = {gelu_tanh_forward, gelu_tanh_backward},
    [PMOE_ACT_RELU] = {relu_forward, relu_backward},
    [PMOE_ACT_SILU] = {silu_forward, silu_backward},
    [PMOE_ACT_SWIGLU] = {swiglu_forward, swiglu_backward},
    [PMOE_ACT_GEGLU] = {geglu_forward, geglu_backward},
};

PMOEI_VECTORISED static void add_f32(int64_t n, const float *in, const float *bias, float *restrict out) {
  for (int64_t i = 0; i < n; i++) out[i] = in[i] + bias[i];
}

PMOEI_VECTORISED static void add_bf16(int64_t n, const pmoei_bf16 *in, const pmoei_bf16 *bias, float *restrict out) {
  for (int64_t i = 0; i < n; i++) out[i] = pmoei_bf16_to_f32(in[i]) + pmoei_bf16_to_f32(bias[i]);
}

static const void *element(const void *p, pmoe_dtype dtype, int64_t i) {
  return p ? (const char *)p + (size_t)i * pmoe_dtype_size(dtype) : NULL;
}

/* n elements of in + bias in float32: in `buffer`, or where they already lie. */
static const float *load(int64_t n, const void *in, const void *bias, pmoe_dtype dtype, float *buffer) {
  if (dtype == PMOE_F32) {
    if (!bias) return in;
    add_f32(n, in, bias, buffer);
  } else if (bias) {
    add_bf16(n, in, bias, buffer);
  } else {
    pmoei_to_f32(buffer, in, dtype, n);
  }
  return buffer;
}

void pmoei_activation_forward(pmoe_act act, int64_t inner, const pmoe_mat *pre, const void *bias, pmoe_mat *out) {
  pmoe_dtype dtype = pre->dtype;
  float h[CHUNK], up[CHUNK], a[CHUNK];
  for (int64_t r = 0; r < pre->rows; r++) {
    const void *row = pmoei_row(pre, r), *row_out = pmoei_row(out, r);
    for (int64_t j = 0; j < inner; j += CHUNK) {
      int64_t n = inner - j < CHUNK ? inner - j : CHUNK;
      const float *hc = load(n, element(row, dtype, j), element(bias, dtype, j), dtype, h), *uc = NULL;
      if (pmoei_act_gated(act))
        uc = load(n, element(row, dtype, inner + j), element(bias, dtype, inner + j), dtype, up);
      void *to = (void *)element(row_out, dtype, j);
      activations[act].forward(n, hc, uc, dtype == PMOE_F32 ? to : a);
      if (dtype != PMOE_F32) pmoei_from_f32(to, dtype, a, n);
    }
  }
}

static float backward_row(const pmoei_activation_grad *g, int64_t r) {
  pmoe_dtype dtype = g->pre->dtype;
  bool gated = pmoei_act_gated(g->act), direct = dtype == PMOE_F32;
  float h[CHUNK], up[CHUNK], dh[CHUNK], dup[CHUNK], weighted[CHUNK], sum = 0;
  char *pre = pmoei_row(g->pre, r), *dpre = pmoei_row(g->dpre, r);
  size_t size = pmoe_dtype_size(dtype), half = (size_t)g->inner * size;
  for (int64_t j = 0; j < g->inner; j += CHUNK) {
    int64_t n = g->inner - j < CHUNK ? g->inner - j : CHUNK;
    size_t at = (size_t)j * size;
    chunk_grad c = {.dact = (const float *)pmoei_row(g->dact, r) + j,
                    .weight = g->row_weight ? g->row_weight[r] : 1.0f};
    c.h = load(n, pre + at, element(g->bias, dtype, j), dtype, h);
    if (gated) c.up = load(n, pre + half + at, element(g->bias, dtype, g->inner + j), dtype, up);
    c.dh = direct ? (void *)(dpre + at) : dh;
    c.dup = direct ? (void *)(dpre + half + at) : dup;
    c.weighted = direct ? (void *)(pre + at) : weighted;
    sum += activations[g->act].backward(n, &c);
    if (direct) continue;
    pmoei_from_f32(dpre + at, dtype, dh, n);
    if (gated) pmoei_from_f32(dpre + half + at, dtype, dup, n);
    pmoei_from_f32(pre + at, dtype, weighted, n);
  }
  return sum;
}

void pmoei_activation_backward(const pmoei_activation_grad *grad) {
  for (int64_t r = 0; r < grad->rows; r++) {
    float sum = backward_row(grad, r);
    if (grad->drow_weight) grad->drow_weight[r] = sum;
  }
}
