/* Every combination of scores, limits of the choice, normalisation and losses, over logits that the host gives:
 * choices, weights and losses against the naive router, gradients by finite differences. */
#include "test_router_reference.h"

enum { T = 70, E = 12, SEQUENCES = 3 };

static const double loss_scale = 70; /* turns means over tokens into sums, nearly */

typedef struct router_case {
  gate_case *c;
  float logits[T * E], dlogits[T * E];
  pmoe_mat logits_mat, dlogits_mat;
  int32_t sequence[T];
} router_case;

static void set_up(router_case *r, pmoe_gate_config cfg) {
  cfg.router = PMOE_ROUTER_HOST_LOGITS;
  r->c = case_new(cfg, T, 3, 2);
  uint64_t seed = 11;
  for (int i = 0; i < T * E; i++) r->logits[i] = 3 * draw(&seed);
  memset(r->dlogits, 0xff, sizeof r->dlogits);
  r->logits_mat = mat_f32(r->logits, T, E);
  r->dlogits_mat = mat_f32(r->dlogits, T, E);
  r->c->step.logits = &r->logits_mat;
  r->c->step.dlogits = &r->dlogits_mat;
  for (int t = 0; t < T; t++) r->sequence[t] = (t * 7 + t / 5) % SEQUENCES;
  if (cfg.seq_aux_coef > 0) {
    r->c->step.num_sequences = SEQUENCES;
    r->c->step.sequence = r->sequence;
  }
}

static void widen_logits(const router_case *r, int64_t t, double *out) {
  for (int e = 0; e < E; e++) out[e] = (double)r->logits[t * E + e];
}

static void assert_near(double got, double want, double tolerance, const char *what, int64_t at) {
  if (!(fabs(got - want) <= tolerance * (fabs(want) + 1)))
    fail_msg("%s %lld: got %.9g, want %.9g", what, (long long)at, got, want);
}

static bool has_losses(const pmoe_gate_config *cfg) {
  return cfg->aux_coef > 0 || cfg->seq_aux_coef > 0 || cfg->global_aux_coef > 0 || cfg->z_coef > 0;
}

/* Choices, and the counts of the losses. */
static void check_choices(const router_case *r) {
  const gate_case *c = r->c;
  const pmoe_gate_config *cfg = &c->cfg;
  static int64_t sums[(SEQUENCES + 1) * (E + 1)];
  memset(sums, 0, sizeof sums);
  for (int64_t t = 0; t < T; t++) {
    double logits[E];
    int32_t want[E], plain[E];
    pmoe_gate_config unlimited = *cfg;
    unlimited.num_groups = 0;
    widen_logits(r, t, logits);
    router_choose(cfg, logits, cfg->selection_bias ? c->selection_bias : NULL, want);
    router_choose(&unlimited, logits, NULL, plain);
    for (int k = 0; k < cfg->top_k; k++)
      assert_int_equal(c->routing.expert[t * cfg->top_k + k], is_masked(c, t) ? -1 : want[k]);
    if (is_masked(c, t)) continue;
    const int32_t *counted = cfg->aux_plain_topk ? plain : want;
    int64_t *own[2] = {sums, sums + (1 + r->sequence[t]) * (E + 1)};
    for (int i = 0; i < (cfg->seq_aux_coef > 0 ? 2 : 1); i++) {
      for (int k = 0; k < (cfg->aux_first_choice_only ? 1 : cfg->top_k); k++) own[i][counted[k]]++;
      own[i][E]++;
    }
  }
  if (cfg->aux_coef > 0 || cfg->global_aux_coef > 0 || cfg->seq_aux_coef > 0)
    for (int i = 0; i < (E + 1) * (cfg->seq_aux_coef > 0 ? 1 + SEQUENCES : 1); i++)
      assert_int_equal(c->routing.loss_sums[i], sums[i]);
}

static const int64_t *global_row(const gate_case *c) {
  return c->routing.loss_sums + (1 + c->step.num_sequences) * (E + 1);
}

/* Who keeps a slot. */
static void check_drops(const router_case *r) {
  const gate_case *c = r->c;
  int64_t K = c->cfg.top_k;
  double score[T * E];
  int64_t slot[T * E];
  for (int64_t t = 0; t < T; t++) {
    double logits[E];
    widen_logits(r, t, logits);
    if (!is_masked(c, t)) router_choice_scores(&c->cfg, logits, c->routing.expert + t * K, score + t * K);
  }
  for (int64_t i = 0; i < T * K; i++) slot[i] = -1;
  ref_drop(c, score, c->routing.expert, c->routing.capacity, slot);
  for (int64_t i = 0; i < T * K; i++) assert_true((slot[i] >= 0) == (c->routing.slot[i] >= 0));
}

static void check_values(const router_case *r) {
  const gate_case *c = r->c;
  int64_t K = c->cfg.top_k;
  router_losses total = {0};
  for (int64_t t = 0; t < T; t++) {
    double logits[E], score[E], weight[E];
    if (is_masked(c, t)) continue;
    widen_logits(r, t, logits);
    router_choice_scores(&c->cfg, logits, c->routing.expert + t * K, score);
    ref_weights(c, score, c->routing.slot + t * K, weight);
    for (int k = 0; k < K; k++) assert_near((double)c->routing.weight[t * K + k], weight[k], 3e-6, "weight", t * K + k);
    if (!has_losses(&c->cfg)) continue;
    router_losses losses =
        router_token_losses(c, logits, c->step.sequence ? r->sequence[t] : 0, c->routing.loss_sums, global_row(c));
    total.aux += losses.aux;
    total.seq_aux += losses.seq_aux;
    total.global_aux += losses.global_aux;
    total.z += losses.z;
  }
  assert_near((double)c->stats.aux_loss, total.aux, 2e-6, "aux", 0);
  assert_near((double)c->stats.seq_aux_loss, total.seq_aux, 2e-6, "seq_aux", 0);
  assert_near((double)c->stats.global_aux_loss, total.global_aux, 2e-6, "global_aux", 0);
  assert_near((double)c->stats.z_loss, c->cfg.z_coef > 0 ? total.z : 0, 2e-6, "z", 0);
}

static void check_gradient(const router_case *r, int64_t step) {
  const gate_case *c = r->c;
  const double h = 1e-5;
  for (int64_t i = 0; i < T * E; i += step) {
    int64_t t = i / E;
    double logits[E], side[2];
    widen_logits(r, t, logits);
    for (int s = 0; s < 2; s++) {
      logits[i % E] = (double)r->logits[i] + (s ? h : -h);
      side[s] = router_token_objective(c, logits, t, loss_scale, has_losses(&c->cfg) ? global_row(c) : NULL);
    }
    double want = is_masked(c, t) ? 0 : (side[1] - side[0]) / (2 * h);
    assert_near((double)r->dlogits[i], want, 1e-5, "dlogit", i);
  }
}

static void backward(router_case *r) {
  gate_case *c = r->c;
  pmoe_mat x = mat_f32(c->x, c->T, c->H), dx = mat_f32(c->dx, c->T, c->H);
  assert_int_equal(pmoe_gate_backward(c->gate, &c->params, &c->step, &x, &c->routing, c->dweight, (float)loss_scale,
                                      c->dlogits, &dx, PMOE_BWD_ALL, NULL),
                   PMOE_OK);
}

static void check(pmoe_gate_config cfg, bool masked, int64_t step) {
  router_case r;
  set_up(&r, cfg);
  if (masked) mask_some(r.c, 4);
  case_forward(r.c);
  check_choices(&r);
  check_drops(&r);
  check_values(&r);
  backward(&r);
  check_gradient(&r, step);
  case_free(r.c);
}

typedef struct limits {
  int32_t selection_bias, num_groups, groups_kept, group_score_top2;
} limits;
static const limits all_limits[] = {{0, 0, 0, 0}, {1, 0, 0, 0}, {0, 4, 2, 0}, {0, 4, 3, 1}, {1, 3, 2, 0}, {1, 6, 4, 1}};

static pmoe_gate_config with_limits(pmoe_gate_config cfg, limits l) {
  cfg.selection_bias = l.selection_bias;
  cfg.num_groups = l.num_groups;
  cfg.groups_kept = l.groups_kept;
  cfg.group_score_top2 = l.group_score_top2;
  return cfg;
}

/* score x softmax_after_topk x norm x K x limits x capacity */
static void test_weights(void **state) {
  (void)state;
  static const int32_t widths[] = {1, 2, 3, 5, 8, 10, 12};
  int cases = 0;
  for (int score = PMOE_SCORE_SOFTMAX; score <= PMOE_SCORE_SQRT_SOFTPLUS; score++) {
    for (int after = 0; after <= (score == PMOE_SCORE_SOFTMAX); after++) {
      for (int norm = PMOE_NORM_NONE; norm <= PMOE_NORM_AFTER_DROP; norm++) {
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
          for (size_t l = 0; l < sizeof all_limits / sizeof *all_limits; l++) {
            pmoe_gate_config cfg = with_limits(gate_config(E, widths[w]), all_limits[l]);
            if (cfg.top_k == 1 && (norm || after)) continue;
            if (cfg.num_groups && cfg.top_k > cfg.groups_kept * (E / cfg.num_groups)) continue;
            cfg.score = (pmoe_score)score;
            cfg.softmax_after_topk = after;
            cfg.norm = (pmoe_norm)norm;
            cfg.capacity_factor = cases % 2 ? 0.8f : 0;
            cfg.drop = cases % 6 == 1 ? PMOE_DROP_PROBS : cases % 6 == 3 ? PMOE_DROP_TOKEN_ORDER : PMOE_DROP_POSITION;
            cfg.weight_scale = cases % 3 ? 0 : 2.5f;
            check(cfg, cases % 5 == 0, 7);
            cases++;
          }
        }
      }
    }
  }
  assert_true(cases > 250);
}

/* score x every set of losses x what they count */
static void test_losses(void **state) {
  (void)state;
  for (int score = PMOE_SCORE_SOFTMAX; score <= PMOE_SCORE_SQRT_SOFTPLUS; score++) {
    for (int set = 1; set < 16; set++) {
      for (int counted = 0; counted < 4; counted++) {
        for (int masked = 0; masked <= 1; masked++) {
          pmoe_gate_config cfg = with_limits(gate_config(E, 3), all_limits[(set + counted) % 6]);
          cfg.score = (pmoe_score)score;
          cfg.softmax_after_topk = score == PMOE_SCORE_SOFTMAX && set % 2;
          cfg.norm = set % 3 ? PMOE_NORM_BEFORE_DROP : PMOE_NORM_NONE;
          cfg.aux_coef = set & 1 ? 0.3f : 0;
          cfg.seq_aux_coef = set & 2 ? 0.2f : 0;
          cfg.global_aux_coef = set & 4 ? 0.5f : 0;
          cfg.z_coef = set & 8 ? 0.01f : 0;
          if (set & 7) {
            cfg.aux_first_choice_only = counted & 1;
            cfg.aux_plain_topk = counted >> 1;
          }
          check(cfg, masked, 5);
        }
      }
    }
  }
}

/* Denominators that the caller gives; equal runs of tokens as sequences. */
static void test_denominators(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(E, 2);
  cfg.aux_coef = 0.3f;
  cfg.seq_aux_coef = 0.2f;
  cfg.global_aux_coef = 0.1f;
  cfg.z_coef = 0.01f;
  cfg.score = PMOE_SCORE_SIGMOID;
  router_case r;
  set_up(&r, cfg);
  r.c->step.loss_tokens = 1000;
  r.c->step.loss_sequences = 17;
  case_forward(r.c);
  check_values(&r);
  backward(&r);
  check_gradient(&r, 3);
  float values[] = {r.c->stats.aux_loss, r.c->stats.seq_aux_loss, r.c->stats.global_aux_loss, r.c->stats.z_loss};
  r.c->step.num_sequences = 2;
  r.c->step.sequence = NULL;
  case_forward(r.c);
  float by_array = 0, by_runs = r.c->stats.seq_aux_loss;
  for (int t = 0; t < T; t++) r.sequence[t] = t / (T / 2);
  r.c->step.sequence = r.sequence;
  case_forward(r.c);
  by_array = r.c->stats.seq_aux_loss;
  assert_memory_equal(&by_array, &by_runs, sizeof by_runs);
  assert_true(values[0] > 0 && values[1] > 0 && values[2] > 0 && values[3] > 0);
  case_free(r.c);
}

/* Large and small logits: nothing overflows, nothing saturates into another choice. */
static void test_extreme_logits(void **state) {
  (void)state;
  static const float scales[] = {1e-4f, 30, 300, 3e4f};
  for (int score = PMOE_SCORE_SOFTMAX; score <= PMOE_SCORE_SQRT_SOFTPLUS; score++) {
    for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
      pmoe_gate_config cfg = gate_config(E, 3);
      cfg.score = (pmoe_score)score;
      cfg.norm = PMOE_NORM_BEFORE_DROP;
      cfg.aux_coef = 0.1f;
      cfg.z_coef = 1e-3f;
      router_case r;
      set_up(&r, cfg);
      for (int i = 0; i < T * E; i++) r.logits[i] *= scales[s];
      case_forward(r.c);
      for (int64_t t = 0; t < T; t++) {
        double logits[E];
        int32_t want[E];
        widen_logits(&r, t, logits);
        ref_select(logits, E, 3, want);
        assert_memory_equal(r.c->routing.expert + t * 3, want, 3 * sizeof *want);
        for (int k = 0; k < 3; k++) assert_true(isfinite(r.c->routing.weight[t * 3 + k]));
      }
      backward(&r);
      for (int i = 0; i < T * E; i++) assert_true(isfinite(r.dlogits[i]));
      assert_true(isfinite(r.c->stats.aux_loss) && isfinite(r.c->stats.z_loss));
      case_free(r.c);
    }
  }
}

/* An expert whose logit is -inf is not chosen, whatever its bias; NaN rows choose distinct experts inside groups. */
static void test_switched_off(void **state) {
  (void)state;
  for (size_t l = 0; l < sizeof all_limits / sizeof *all_limits; l++) {
    pmoe_gate_config cfg = with_limits(gate_config(E, 2), all_limits[l]);
    cfg.score = PMOE_SCORE_SIGMOID;
    router_case r;
    set_up(&r, cfg);
    r.c->selection_bias[4] = 1e6f;
    for (int t = 0; t < T; t++) r.logits[t * E + 4] = -INFINITY;
    for (int e = 0; e < E; e++) r.logits[9 * E + e] = NAN;
    case_forward(r.c);
    for (int t = 0; t < T; t++) {
      const int32_t *expert = r.c->routing.expert + t * 2;
      assert_true(expert[0] != expert[1] && expert[0] >= 0 && expert[0] < E && expert[1] >= 0 && expert[1] < E);
      assert_true(t == 9 || (expert[0] != 4 && expert[1] != 4));
      assert_true(t == 9 ? isnan(r.c->routing.weight[t * 2]) : isfinite(r.c->routing.weight[t * 2]));
    }
    assert_int_equal(r.c->stats.nonfinite, T);
    case_free(r.c);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_weights), cmocka_unit_test(test_losses),
                                     cmocka_unit_test(test_denominators), cmocka_unit_test(test_extreme_logits),
                                     cmocka_unit_test(test_switched_off)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
