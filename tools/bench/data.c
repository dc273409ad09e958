#include "data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ranks.h"

static uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

static uint64_t bits(const bench_options *o, bench_stream stream, int64_t index) {
  uint64_t start = mix(o->seed * 16 + (uint64_t)stream + 1);
  return mix(start + (uint64_t)index * UINT64_C(0x9e3779b97f4a7c15));
}

float bench_value(const bench_options *o, bench_stream stream, int64_t index) {
  return (float)((double)(int32_t)(bits(o, stream, index) >> 32) * 0x1p-31);
}

static float round_bf16(float value) {
  uint32_t u;
  memcpy(&u, &value, sizeof u);
  u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  memcpy(&value, &u, sizeof u);
  return value;
}

float bench_load(pmoe_dtype dtype, const void *p, int64_t i) {
  if (dtype == PMOE_F32) return ((const float *)p)[i];
  uint32_t u = (uint32_t)((const uint16_t *)p)[i] << 16;
  float value;
  memcpy(&value, &u, sizeof value);
  return value;
}

void bench_store(pmoe_dtype dtype, void *p, int64_t i, float value) {
  if (dtype == PMOE_F32) {
    ((float *)p)[i] = value;
    return;
  }
  value = round_bf16(value);
  uint32_t u;
  memcpy(&u, &value, sizeof u);
  ((uint16_t *)p)[i] = (uint16_t)(u >> 16);
}

int32_t bench_inner1(const bench_options *o) { return o->act >= PMOE_ACT_SWIGLU ? 2 * o->inner : o->inner; }

static float scale_of(const bench_options *o, bench_stream stream) {
  switch (stream) {
  case BENCH_FC1_WEIGHT: return 1.7f / sqrtf((float)o->hidden);
  case BENCH_FC2_WEIGHT: return 1.7f / sqrtf((float)o->inner);
  case BENCH_FC1_BIAS:
  case BENCH_FC2_BIAS: return 0.1f;
  /* noise on the codes, small beside the steps between them */
  case BENCH_ROUTER: return 0.02f / (sqrtf((float)o->hidden) * (float)o->top_k);
  default: return 1.0f;
  }
}

static int is_float32(bench_stream stream) { return stream == BENCH_ROUTER || stream == BENCH_ROW_WEIGHT; }

float bench_element(const bench_options *o, bench_stream stream, int64_t index) {
  float value = bench_value(o, stream, index) * scale_of(o, stream);
  return o->dtype == PMOE_F32 || is_float32(stream) ? value : round_bf16(value);
}

void bench_fill(const bench_options *o, bench_stream stream, int64_t first, int64_t n, void *out) {
  float scale = scale_of(o, stream);
  pmoe_dtype dtype = is_float32(stream) ? PMOE_F32 : o->dtype;
  for (int64_t i = 0; i < n; i++) bench_store(dtype, out, i, bench_value(o, stream, first + i) * scale);
}

/* Gumbel's trick: the K largest of log p_e + noise are K draws without replacement. */
static void draw(const bench_options *o, int64_t token, int32_t *expert) {
  double best[BENCH_MAX_TOP_K];
  int32_t kept = 0;
  for (int32_t e = 0; e < o->experts; e++) {
    double u = ((double)bench_value(o, BENCH_CHOICE, token * o->experts + e) + 1.0) * 0.5;
    double score = -log(-log(u * 0.999998 + 1e-6)) - (o->pattern == BENCH_ZIPF ? log(e + 1.0) : 0.0);
    int32_t at = kept;
    while (at > 0 && best[at - 1] < score) at--;
    if (at == o->top_k) continue;
    if (kept < o->top_k) kept++;
    for (int32_t i = kept - 1; i > at; i--) best[i] = best[i - 1], expert[i] = expert[i - 1];
    best[at] = score, expert[at] = e;
  }
}

void bench_choose(const bench_options *o, int64_t token, int32_t *expert) {
  for (int32_t k = 0; k < o->top_k; k++)
    expert[k] = o->pattern == BENCH_ONE ? k : (int32_t)((token * o->top_k + k) % o->experts);
  if (o->pattern == BENCH_MULTINOMIAL || o->pattern == BENCH_ZIPF) draw(o, token, expert);
}

void bench_row(const bench_options *o, bench_stream stream, int64_t row, double *out) {
  for (int64_t h = 0; h < o->hidden; h++) out[h] = (double)bench_element(o, stream, row * o->hidden + h);
  if (stream != BENCH_X) return;
  int32_t expert[BENCH_MAX_TOP_K];
  bench_choose(o, row, expert);
  memset(out, 0, (size_t)o->experts * sizeof *out);
  for (int32_t k = 0; k < o->top_k; k++) {
    float code = 2.0f + 2.0f * (float)(o->top_k - k) / (float)o->top_k;
    out[expert[k]] = (double)(o->dtype == PMOE_F32 ? code : round_bf16(code));
  }
}

void bench_router(const bench_options *o, float *weight) {
  bench_fill(o, BENCH_ROUTER, 0, (int64_t)o->experts * o->hidden, weight);
  for (int64_t e = 0; e < o->experts; e++)
    for (int64_t h = 0; h < o->experts; h++) weight[e * o->hidden + h] = e == h ? 1.0f : 0.0f;
}

pmoe_status bench_tokens(const bench_options *o, int64_t first_token, int64_t n, void *out) {
  double *x;
  BENCH_TRY(bench_alloc((size_t)o->hidden * sizeof *x, &x));
  for (int64_t t = 0; t < n; t++) {
    bench_row(o, BENCH_X, first_token + t, x);
    for (int64_t h = 0; h < o->hidden; h++) bench_store(o->dtype, out, t * o->hidden + h, (float)x[h]);
  }
  free(x);
  return PMOE_OK;
}

pmoe_status bench_routing(const bench_options *o, int64_t first_token, int64_t n, pmoe_routing *out, void **memory) {
  size_t choices = (size_t)n * (size_t)o->top_k, experts = (size_t)o->experts;
  char *block;
  BENCH_TRY(bench_alloc(2 * experts * sizeof(int64_t) + choices * (sizeof(int64_t) + sizeof(float) + sizeof(int32_t)),
                        &block));
  *memory = block;
  *out = (pmoe_routing)PMOE_CONFIG_INIT(pmoe_routing);
  out->tokens = n, out->num_experts = o->experts, out->top_k = o->top_k;
  out->expert_count = (int64_t *)(void *)block;
  out->expert_rows = out->expert_count + experts;
  out->slot = out->expert_rows + experts;
  out->weight = (float *)(void *)(out->slot + choices);
  out->expert = (int32_t *)(void *)(out->weight + choices);
  for (int64_t t = 0; t < n; t++) {
    bench_choose(o, first_token + t, out->expert + t * o->top_k);
    for (int64_t i = t * o->top_k; i < (t + 1) * o->top_k; i++) {
      out->slot[i] = out->expert_rows[out->expert[i]]++;
      out->weight[i] = 0.5f + 0.25f * bench_value(o, BENCH_ROW_WEIGHT, first_token * o->top_k + i);
    }
  }
  memcpy(out->expert_count, out->expert_rows, experts * sizeof(int64_t));
  return PMOE_OK;
}
