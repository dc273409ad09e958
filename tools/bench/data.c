#include "data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "block.h"
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

/* To float16's nearest, ties to even; values here are far below its largest. Small ones are multiples of 2^-24. */
static float round_f16(float value) {
  int exponent;
  (void)frexpf(value, &exponent);
  int step = exponent > -13 ? exponent - 11 : -24;
  return ldexpf(rintf(ldexpf(value, -step)), step);
}

static float round_to(pmoe_dtype dtype, float value) {
  return dtype == PMOE_F32 ? value : dtype == PMOE_BF16 ? round_bf16(value) : round_f16(value);
}

/* The bits of a number that round_f16 leaves as it is. */
static uint16_t f16_bits(float value) {
  int exponent;
  float part = frexpf(fabsf(value), &exponent); /* in [1/2, 1) */
  uint16_t sign = signbit(value) ? 0x8000u : 0;
  if (part == 0) return sign;
  if (exponent <= -14) return (uint16_t)(sign | (unsigned)ldexpf(part, exponent + 24));
  return (uint16_t)(sign | (unsigned)(exponent + 14) << 10 | ((unsigned)ldexpf(part, 11) & 0x3ffu));
}

static float load_f16(uint16_t bits) {
  int exponent = bits >> 10 & 31, part = bits & 0x3ff;
  float value = exponent == 31 ? (part ? NAN : INFINITY)
                               : ldexpf((float)(exponent ? part + 1024 : part), (exponent ? exponent : 1) - 25);
  return bits & 0x8000u ? -value : value;
}

float bench_load(pmoe_dtype dtype, const void *p, int64_t i) {
  if (dtype == PMOE_F32) return ((const float *)p)[i];
  if (dtype == PMOE_F16) return load_f16(((const uint16_t *)p)[i]);
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
  if (dtype == PMOE_F16) {
    ((uint16_t *)p)[i] = f16_bits(round_f16(value));
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
  case BENCH_MIX: return 1.0f / sqrtf((float)o->hidden);
  /* noise on the codes, small beside the steps between them */
  case BENCH_ROUTER: return 0.02f / (sqrtf((float)o->hidden) * (float)o->top_k);
  default: return 1.0f;
  }
}

static int is_float32(bench_stream stream) {
  return stream == BENCH_ROUTER || stream == BENCH_ROW_WEIGHT || stream == BENCH_MIX;
}

float bench_element(const bench_options *o, bench_stream stream, int64_t index) {
  float value = bench_value(o, stream, index) * scale_of(o, stream);
  return is_float32(stream) ? value : round_to(o->dtype, value);
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
    out[expert[k]] = (double)round_to(o->dtype, code);
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

static void place_routing(pmoe_routing *r, char *base, size_t choices, size_t experts) {
  r->expert_count = (int64_t *)(void *)base;
  r->expert_rows = r->expert_count + experts;
  r->slot = r->expert_rows + experts;
  r->weight = (float *)(void *)(r->slot + choices);
  r->expert = (int32_t *)(void *)(r->weight + choices);
}

pmoe_status bench_routing(const bench_options *o, bench_device *device, int64_t first_token, int64_t n,
                          pmoe_routing *out, bench_block *block, pmoe_routing *there) {
  size_t choices = (size_t)n * (size_t)o->top_k, experts = (size_t)o->experts;
  pmoe_status status = bench_block_create(
      device, 2 * experts * sizeof(int64_t) + choices * (sizeof(int64_t) + sizeof(float) + sizeof(int32_t)), block);
  if (status < 0) return status;
  *out = (pmoe_routing)PMOE_CONFIG_INIT(pmoe_routing);
  out->tokens = n, out->num_experts = o->experts, out->top_k = o->top_k;
  *there = *out;
  place_routing(out, block->host, choices, experts);
  place_routing(there, block->data, choices, experts);
  for (int64_t t = 0; t < n; t++) {
    bench_choose(o, first_token + t, out->expert + t * o->top_k);
    for (int64_t i = t * o->top_k; i < (t + 1) * o->top_k; i++) {
      out->slot[i] = out->expert_rows[out->expert[i]]++;
      out->weight[i] = 0.5f + 0.25f * bench_value(o, BENCH_ROW_WEIGHT, first_token * o->top_k + i);
    }
  }
  memcpy(out->expert_count, out->expert_rows, experts * sizeof(int64_t));
  return bench_block_push(block);
}
