/* A naive router in double precision to compare with. Selection, drops and weights are written from their definitions,
 * one token or one expert at a time. */
#ifndef TEST_GATE_REFERENCE_H
#define TEST_GATE_REFERENCE_H
#include "test_gate_case.h"

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
      if (c->cfg.drop == PMOE_DROP_TOKEN_ORDER) rank[found] = 0;
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

/* What follows from the case and the counts. */
static inline void check_load(const gate_case *c) {
  double entropy = 0, largest = 0, total = 0, E = (double)c->cfg.num_experts;
  for (int64_t e = 0; e < c->cfg.num_experts; e++) total += (double)c->routing.expert_count[e];
  for (int64_t e = 0; e < c->cfg.num_experts; e++) {
    double count = (double)c->routing.expert_count[e];
    if (count > 0) entropy -= count / total * log(count / total);
    largest = fmax(largest, count);
  }
  assert_true(fabs((double)c->stats.entropy - entropy) <= 1e-6);
  assert_true(fabs((double)c->stats.load_max_over_mean - (total > 0 ? largest * E / total : 0)) <= 1e-6 * E);
  assert_int_equal(c->routing.tokens, c->T);
  assert_int_equal(c->routing.num_experts, c->cfg.num_experts);
  assert_int_equal(c->routing.top_k, c->cfg.top_k);
  assert_int_equal(c->stats.tokens, c->T);
}

/* Everything that forward returns, from scratch, with the tolerances of float32 arithmetic. */
static inline void check_forward(const gate_case *c, double tolerance) {
  int64_t E = c->cfg.num_experts, K = c->cfg.top_k, T = c->T, routed = 0, masked = 0, nonfinite = 0;
  double *x = ref_input(c), *w = widen(c->w, E * c->H), *b = widen(c->b, E), *logits = room((size_t)E, 8);
  double *score = room((size_t)(T * K), 8), *weight = room((size_t)K, 8);
  int32_t *expert = room((size_t)(T * K), 4);
  int64_t *slot = room((size_t)(T * K), 8), *next = calloc((size_t)E, 8), *count = calloc((size_t)E, 8), capacity;
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
      if (is_masked(c, t)) expert[t * K + k] = -1;
      else count[expert[t * K + k]]++;
    }
  }
  ref_drop(c, score, expert, capacity, slot);
  for (int64_t t = 0; t < T; t++) {
    ref_weights(c, score + t * K, slot + t * K, weight);
    for (int64_t i = t * K, k = 0; k < K; k++, i++) {
      assert_int_equal(c->routing.expert[i], expert[i]);
      bool kept = expert[i] >= 0 && slot[i] >= 0;
      assert_int_equal(c->routing.slot[i], kept ? next[expert[i]]++ : -1);
      if (!kept) assert_true(c->routing.weight[i] == 0);
      else if (isnan(weight[k])) assert_true(isnan(c->routing.weight[i]));
      else assert_true(fabs((double)c->routing.weight[i] - weight[k]) <= 1e-7 + tolerance * fabs(weight[k]));
      routed += kept;
    }
  }
  for (int64_t e = 0; e < E; e++) {
    assert_int_equal(c->routing.expert_count[e], count[e]);
    assert_int_equal(c->routing.expert_rows[e], next[e]);
  }
  assert_int_equal(c->routing.capacity, capacity);
  assert_int_equal(c->stats.masked, masked);
  assert_int_equal(c->stats.nonfinite, nonfinite);
  assert_int_equal(c->stats.routed, routed);
  assert_int_equal(c->stats.dropped, (T - masked) * K - routed);
  double aux, z;
  ref_losses(c, x, w, b, expert, &aux, &z);
  assert_true(fabs((double)c->stats.aux_loss - aux) <= 1e-7 + tolerance * fabs(aux));
  assert_true(fabs((double)c->stats.z_loss - z) <= 1e-7 + tolerance * fabs(z));
  check_load(c);
  void *all[] = {x, w, b, logits, score, weight, expert, slot, next, count};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

#endif
