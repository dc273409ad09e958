/* A naive router in double precision to compare with, and a case: one gate with its parameters, tokens and results.
 * Selection, drops and weights are written from their definitions, one token or one expert at a time. */
#ifndef TEST_GATE_REFERENCE_H
#define TEST_GATE_REFERENCE_H
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h> /* after those four */
#include <float.h>
#include <math.h>
#include <pmoe/pmoe.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/random.h"

typedef struct gate_case {
  pmoe_ctx *ctx;
  pmoe_gate *gate;
  pmoe_gate_config cfg;
  int64_t T, H;
  int32_t layer;
  uint64_t seed;
  float *x, *w, *b, *dw, *db; /* dw, db: parameter gradients */
  float *dx, *dweight, *dlogits;
  uint8_t *mask;
  pmoe_step step;
  pmoe_gate_params params;
  pmoe_routing routing;
  pmoe_gate_stats stats;
} gate_case;

static inline void *room(size_t count, size_t size) {
  size_t bytes = count * size > 0 ? count * size : 1;
  void *p = malloc(bytes);
  assert_non_null(p);
  memset(p, 0xff, bytes);
  return p;
}

static inline float draw(uint64_t *state) { /* uniform in (-1, 1) */
  *state = pmoei_mix64(*state + 1);
  return 2.0f * pmoei_uniform((uint32_t)(*state >> 32)) - 1.0f;
}

static inline pmoe_gate_config gate_config(int32_t num_experts, int32_t top_k) {
  pmoe_gate_config cfg = PMOE_CONFIG_INIT(pmoe_gate_config);
  cfg.num_experts = num_experts;
  cfg.top_k = top_k;
  return cfg;
}

/* Random tokens and parameters; training, no mask. */
static inline gate_case *case_new(pmoe_gate_config cfg, int64_t T, int64_t H, int32_t threads) {
  gate_case *c = calloc(1, sizeof *c);
  assert_non_null(c);
  size_t E = (size_t)cfg.num_experts, K = (size_t)cfg.top_k, t = (size_t)T, h = (size_t)H;
  c->cfg = cfg;
  c->T = T;
  c->H = H;
  c->layer = 3;
  c->seed = 77;
  pmoe_ctx_config ctx_cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  ctx_cfg.cpu_threads = threads;
  ctx_cfg.seed = c->seed;
  assert_int_equal(pmoe_ctx_create(&ctx_cfg, &c->ctx), PMOE_OK);
  assert_int_equal(pmoe_gate_create(c->ctx, (int32_t)H, c->layer, &cfg, &c->gate), PMOE_OK);
  c->x = room(t * h, 4);
  c->dx = room(t * h, 4);
  c->w = room(E * h, 4);
  c->dw = room(E * h, 4);
  c->b = room(E, 4);
  c->db = room(E, 4);
  c->dweight = room(t * K, 4);
  c->dlogits = room(t * E, 4);
  c->mask = room(t, 1);
  uint64_t state = 5;
  for (size_t i = 0; i < t * h; i++) c->x[i] = draw(&state);
  for (size_t i = 0; i < E * h; i++) c->w[i] = draw(&state);
  for (size_t i = 0; i < E; i++) c->b[i] = draw(&state);
  for (size_t i = 0; i < t * K; i++) c->dweight[i] = draw(&state);
  c->step = (pmoe_step)PMOE_CONFIG_INIT(pmoe_step);
  c->step.training = 1;
  c->step.step = 9;
  c->step.first_token = 1000;
  c->params = (pmoe_gate_params)PMOE_CONFIG_INIT(pmoe_gate_params);
  c->params.weight = c->w;
  c->params.bias = cfg.bias ? c->b : NULL;
  c->params.weight_grad = c->dw;
  c->params.bias_grad = cfg.bias ? c->db : NULL;
  c->routing = (pmoe_routing)PMOE_CONFIG_INIT(pmoe_routing);
  c->routing.expert = room(t * K, 4);
  c->routing.slot = room(t * K, 8);
  c->routing.weight = room(t * K, 4);
  c->routing.expert_count = room(E, 8);
  c->routing.expert_rows = room(E, 8);
  c->stats = (pmoe_gate_stats)PMOE_CONFIG_INIT(pmoe_gate_stats);
  return c;
}

static inline void case_free(gate_case *c) {
  pmoe_gate_destroy(c->gate);
  pmoe_ctx_destroy(c->ctx);
  void *all[] = {c->x,
                 c->dx,
                 c->w,
                 c->dw,
                 c->b,
                 c->db,
                 c->dweight,
                 c->dlogits,
                 c->mask,
                 c->routing.expert,
                 c->routing.slot,
                 c->routing.weight,
                 c->routing.expert_count,
                 c->routing.expert_rows};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  free(c);
}

static inline void use_mask(gate_case *c) {
  c->step.token_mask = c->mask;
  c->step.token_mask_len = c->T;
}

static inline void mask_some(gate_case *c, int every) {
  for (int64_t t = 0; t < c->T; t++) c->mask[t] = t % every != 1;
  use_mask(c);
}

static inline bool is_masked(const gate_case *c, int64_t t) { return c->step.token_mask && !c->mask[t]; }

static inline pmoe_mat mat_f32(float *data, int64_t rows, int64_t cols) {
  return (pmoe_mat){data, PMOE_F32, rows, cols, cols};
}

static inline void case_forward(gate_case *c) {
  pmoe_mat x = mat_f32(c->x, c->T, c->H);
  assert_int_equal(pmoe_gate_forward(c->gate, &c->params, &c->step, &x, &c->routing, &c->stats, NULL), PMOE_OK);
}

/* Gradients start from zero. */
static inline void case_backward(gate_case *c, float loss_scale) {
  memset(c->dx, 0, (size_t)(c->T * c->H) * 4);
  memset(c->dw, 0, (size_t)(c->cfg.num_experts * c->H) * 4);
  memset(c->db, 0, (size_t)c->cfg.num_experts * 4);
  pmoe_mat x = mat_f32(c->x, c->T, c->H), dx = mat_f32(c->dx, c->T, c->H);
  assert_int_equal(pmoe_gate_backward(c->gate, &c->params, &c->step, &x, &c->routing, c->dweight, loss_scale,
                                      c->dlogits, &dx, PMOE_BWD_ALL, NULL),
                   PMOE_OK);
}

/* What jitter multiplies x[t,h] by. */
static inline double ref_factor(const gate_case *c, int64_t t, int64_t h) {
  if (!c->step.training || c->cfg.jitter == 0) return 1;
  uint32_t word[4];
  uint64_t key = pmoei_random_key(c->seed, PMOEI_RANDOM_JITTER, (uint64_t)c->layer, c->step.step);
  pmoei_random4(key, (uint64_t)(c->step.first_token + t), (uint64_t)h / 4, word);
  return 1 - (double)c->cfg.jitter + 2 * (double)c->cfg.jitter * (double)pmoei_uniform(word[h % 4]);
}

/* x as the router sees it. */
static inline double *ref_input(const gate_case *c) {
  double *x = room((size_t)(c->T * c->H), sizeof *x);
  for (int64_t i = 0; i < c->T * c->H; i++) x[i] = (double)c->x[i] * ref_factor(c, i / c->H, i % c->H);
  return x;
}

static inline double *widen(const float *from, int64_t n) {
  double *out = room((size_t)n, sizeof *out);
  for (int64_t i = 0; i < n; i++) out[i] = (double)from[i];
  return out;
}

static inline void ref_logits(const gate_case *c, const double *x, const double *w, const double *b, int64_t t,
                              double *logits) {
  for (int64_t e = 0; e < c->cfg.num_experts; e++) {
    double sum = c->cfg.bias ? b[e] : 0;
    for (int64_t h = 0; h < c->H; h++) sum += x[t * c->H + h] * w[e * c->H + h];
    logits[e] = sum;
  }
}

static inline double ref_gumbel(const gate_case *c, int64_t t, int64_t e) {
  uint32_t word[4];
  pmoei_random4(pmoei_random_key(c->seed, PMOEI_RANDOM_GUMBEL, (uint64_t)c->layer, c->step.step),
                (uint64_t)(c->step.first_token + t), (uint64_t)e / 4, word);
  return -log(-log((double)pmoei_uniform(word[e % 4])));
}

/* a before b: larger first, NaN last. Equal: neither. */
static inline bool ref_better(double a, double b) { return isnan(b) ? !isnan(a) : a > b; }

static inline void ref_select(const double *values, int64_t n, int64_t k, int32_t *chosen) {
  uint8_t *taken = calloc((size_t)n, 1);
  assert_non_null(taken);
  for (int64_t i = 0; i < k; i++) {
    int64_t best = -1;
    for (int64_t e = 0; e < n; e++)
      if (!taken[e] && (best < 0 || ref_better(values[e], values[best]))) best = e;
    taken[best] = 1;
    chosen[i] = (int32_t)best;
  }
  free(taken);
}

static inline void ref_choose(const gate_case *c, const double *logits, int64_t t, int32_t *chosen) {
  int64_t E = c->cfg.num_experts, K = c->cfg.top_k;
  ref_select(logits, E, K, chosen);
  if (!c->cfg.gumbel || !c->step.training) return;
  double *noisy = room((size_t)E, sizeof *noisy);
  for (int64_t e = 0; e < E; e++) noisy[e] = logits[e] + ref_gumbel(c, t, e);
  if (K == 2) noisy[chosen[0]] = NAN;
  ref_select(noisy, E, 1, chosen + K - 1);
  free(noisy);
}

static inline double ref_softmax(const double *logits, int64_t n, double *p) { /* returns logsumexp */
  double max = -INFINITY, sum = 0;
  for (int64_t i = 0; i < n; i++) max = fmax(max, logits[i]);
  for (int64_t i = 0; i < n; i++) sum += exp(logits[i] - max);
  for (int64_t i = 0; i < n; i++) p[i] = exp(logits[i] - max) / sum;
  return max + log(sum);
}

static inline void ref_scores(const gate_case *c, const double *logits, const int32_t *chosen, double *score) {
  int64_t E = c->cfg.num_experts, K = c->cfg.top_k;
  double *p = room((size_t)(E + K), sizeof *p);
  if (c->cfg.softmax_after_topk) {
    for (int64_t k = 0; k < K; k++) p[E + k] = logits[chosen[k]];
    ref_softmax(p + E, K, score);
  } else {
    ref_softmax(logits, E, p);
    for (int64_t k = 0; k < K; k++) score[k] = p[chosen[k]];
  }
  free(p);
}

static inline void ref_weights(const gate_case *c, const double *score, const int64_t *slot, double *weight) {
  double sum = 0, scale = c->cfg.weight_scale == 0 ? 1 : (double)c->cfg.weight_scale;
  for (int64_t k = 0; k < c->cfg.top_k; k++)
    if (slot[k] >= 0 || c->cfg.norm == PMOE_NORM_BEFORE_DROP) sum += score[k];
  if (c->cfg.norm == PMOE_NORM_NONE) sum = 1;
  for (int64_t k = 0; k < c->cfg.top_k; k++) weight[k] = slot[k] >= 0 ? scale * score[k] / sum : 0;
}

static inline bool ref_live(const gate_case *c, const double *logits, int64_t t) {
  for (int64_t e = 0; e < c->cfg.num_experts; e++)
    if (!isfinite(logits[e])) return false;
  return !is_masked(c, t);
}

/* Both losses for given choices. f is counted from `fraction_of` so that differences may hold it constant. */
static inline void ref_losses(const gate_case *c, const double *x, const double *w, const double *b,
                              const int32_t *expert, double *aux, double *z) {
  int64_t E = c->cfg.num_experts, K = c->cfg.top_k, counted = c->cfg.aux_first_choice_only ? 1 : K;
  double *f = calloc((size_t)E * 4, sizeof *f), *p = f + E, *mean = p + E, *logits = mean + E, live = 0;
  assert_non_null(f);
  *z = *aux = 0;
  for (int64_t t = 0; t < c->T; t++) {
    ref_logits(c, x, w, b, t, logits);
    if (!ref_live(c, logits, t)) continue;
    live++;
    double lse = ref_softmax(logits, E, p);
    *z += lse * lse;
    for (int64_t e = 0; e < E; e++) mean[e] += p[e];
    for (int64_t k = 0; k < counted; k++) f[expert[t * K + k]]++;
  }
  if (live > 0) {
    *z *= (double)c->cfg.z_coef / live;
    for (int64_t e = 0; e < E; e++)
      *aux += (double)c->cfg.aux_coef * (double)E * f[e] / (live * (double)counted) * mean[e] / live;
  }
  free(f);
}

/* Who keeps a slot: scores and choices of all tokens -> slot 0 or -1. */
static inline void ref_drop(const gate_case *c, const double *score, const int32_t *expert, int64_t capacity,
                            int64_t *slot) {
  int64_t E = c->cfg.num_experts, K = c->cfg.top_k, n = c->T * K;
  double *rank = room((size_t)n, sizeof *rank);
  int32_t *order = room((size_t)n, sizeof *order);
  uint64_t key = pmoei_random_key(c->seed, PMOEI_RANDOM_DROP, (uint64_t)c->layer, c->step.step);
  for (int64_t e = 0; e < E; e++) {
    int64_t found = 0, *who = room((size_t)n, sizeof *who);
    for (int64_t i = 0; i < n; i++) {
      if (expert[i] != e) continue;
      uint32_t word[4];
      pmoei_random4(key, (uint64_t)(c->step.first_token + i / K), (uint64_t)(i % K), word);
      bool random = c->cfg.drop == PMOE_DROP_RANDOM && c->step.training;
      rank[found] = random ? -(double)word[0] : c->cfg.drop == PMOE_DROP_PROBS ? score[i] : -(double)(i % K);
      who[found++] = i;
    }
    int64_t kept = capacity > 0 && found > capacity ? capacity : found;
    ref_select(rank, found, kept, order);
    for (int64_t i = 0; i < found; i++) slot[who[i]] = -1;
    for (int64_t i = 0; i < kept; i++) slot[who[order[i]]] = 0;
    free(who);
  }
  free(rank);
  free(order);
}

/* Everything that forward returns, from scratch, with the tolerances of float32 arithmetic. */
static inline void check_forward(const gate_case *c, double tolerance) {
  int64_t E = c->cfg.num_experts, K = c->cfg.top_k, T = c->T, routed = 0, masked = 0, nonfinite = 0, next_size = E;
  double *x = ref_input(c), *w = widen(c->w, E * c->H), *b = widen(c->b, E), *logits = room((size_t)E, 8);
  double *score = room((size_t)(T * K), 8), *weight = room((size_t)K, 8);
  int32_t *expert = room((size_t)(T * K), 4);
  int64_t *slot = room((size_t)(T * K), 8), *next = calloc((size_t)next_size, 8), *count = calloc((size_t)next_size, 8),
          capacity;
  assert_true(next && count);
  float factor = c->step.training ? c->cfg.capacity_factor : c->cfg.eval_capacity_factor;
  assert_int_equal(pmoe_gate_capacity(T, (int32_t)E, (int32_t)K, factor, c->cfg.min_capacity, &capacity), PMOE_OK);
  for (int64_t t = 0; t < T; t++) {
    ref_logits(c, x, w, b, t, logits);
    masked += is_masked(c, t);
    nonfinite += !is_masked(c, t) && !ref_live(c, logits, t);
    ref_choose(c, logits, t, expert + t * K);
    ref_scores(c, logits, expert + t * K, score + t * K);
    for (int64_t k = 0; k < K; k++) {
      if (is_masked(c, t))
        expert[t * K + k] = -1;
      else
        count[expert[t * K + k]]++;
    }
  }
  ref_drop(c, score, expert, capacity, slot);
  for (int64_t t = 0; t < T; t++) {
    ref_weights(c, score + t * K, slot + t * K, weight);
    for (int64_t i = t * K, k = 0; k < K; k++, i++) {
      assert_int_equal(c->routing.expert[i], expert[i]);
      bool kept = expert[i] >= 0 && slot[i] >= 0;
      assert_int_equal(c->routing.slot[i], kept ? next[expert[i]]++ : -1);
      if (!kept)
        assert_true(c->routing.weight[i] == 0);
      else if (isnan(weight[k]))
        assert_true(isnan(c->routing.weight[i]));
      else
        assert_true(fabs((double)c->routing.weight[i] - weight[k]) <= 1e-7 + tolerance * fabs(weight[k]));
      routed += kept;
    }
  }
  double aux, z, entropy = 0, largest = 0, total = (double)((T - masked) * K);
  ref_losses(c, x, w, b, expert, &aux, &z);
  for (int64_t e = 0; e < E; e++) {
    assert_int_equal(c->routing.expert_count[e], count[e]);
    assert_int_equal(c->routing.expert_rows[e], next[e]);
    if (count[e]) entropy -= (double)count[e] / total * log((double)count[e] / total);
    largest = fmax(largest, (double)count[e]);
  }
  assert_int_equal(c->routing.tokens, T);
  assert_int_equal(c->routing.num_experts, E);
  assert_int_equal(c->routing.top_k, K);
  assert_int_equal(c->routing.capacity, capacity);
  assert_int_equal(c->stats.tokens, T);
  assert_int_equal(c->stats.masked, masked);
  assert_int_equal(c->stats.nonfinite, nonfinite);
  assert_int_equal(c->stats.routed, routed);
  assert_int_equal(c->stats.dropped, (T - masked) * K - routed);
  assert_true(fabs((double)c->stats.aux_loss - aux) <= 1e-7 + tolerance * fabs(aux));
  assert_true(fabs((double)c->stats.z_loss - z) <= 1e-7 + tolerance * fabs(z));
  assert_true(fabs((double)c->stats.entropy - entropy) <= 1e-6);
  assert_true(fabs((double)c->stats.load_max_over_mean - (total > 0 ? largest * (double)E / total : 0)) <=
              1e-6 * (double)E);
  void *all[] = {x, w, b, logits, score, weight, expert, slot, next, count};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

#endif
