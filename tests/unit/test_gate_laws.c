/* What must not change the router's results: the run, the number of threads, how tokens are split over calls, the order
 * of tokens, the names of experts, a capacity that is large enough; and randomness only where it belongs. */
#include "test_gate_case.h"

static pmoe_gate_config busy_config(int32_t E, int32_t K) {
  pmoe_gate_config cfg = gate_config(E, K);
  cfg.norm = PMOE_NORM_AFTER_DROP;
  cfg.capacity_factor = 0.9f;
  cfg.eval_capacity_factor = 0.9f;
  cfg.aux_coef = 0.01f;
  cfg.z_coef = 0.001f;
  cfg.jitter = 0.2f;
  cfg.gumbel = K <= 2;
  cfg.bias = 1;
  return cfg;
}

static void assert_same_results(const gate_case *a, const gate_case *b) {
  size_t choices = (size_t)(a->T * a->cfg.top_k), E = (size_t)a->cfg.num_experts;
  assert_memory_equal(a->routing.expert, b->routing.expert, choices * 4);
  assert_memory_equal(a->routing.slot, b->routing.slot, choices * 8);
  assert_memory_equal(a->routing.weight, b->routing.weight, choices * 4);
  assert_memory_equal(a->routing.expert_count, b->routing.expert_count, E * 8);
  assert_memory_equal(a->routing.expert_rows, b->routing.expert_rows, E * 8);
  assert_memory_equal(&a->stats, &b->stats, sizeof a->stats);
}

static void test_threads_and_repeats(void **state) {
  (void)state;
  for (int drop = 0; drop <= PMOE_DROP_RANDOM; drop++) {
    pmoe_gate_config cfg = busy_config(10, 2);
    cfg.drop = (pmoe_drop)drop;
    gate_case *first = NULL;
    for (int32_t threads = 1; threads <= 4; threads++) {
      gate_case *c = case_new(cfg, 1000, 130, threads);
      mask_some(c, 6);
      for (int repeat = 0; repeat < 2; repeat++) {
        case_forward(c);
        case_backward(c, 3);
        if (!first) break;
        assert_same_results(first, c);
        assert_memory_equal(first->dx, c->dx, 1000 * 130 * 4);
        assert_memory_equal(first->dw, c->dw, 10 * 130 * 4);
        assert_memory_equal(first->db, c->db, 10 * 4);
        assert_memory_equal(first->dlogits, c->dlogits, 1000 * 10 * 4);
      }
      if (!first) first = c;
      else case_free(c);
    }
    case_free(first);
  }
}

static void test_no_randomness_in_evaluation(void **state) {
  (void)state;
  pmoe_gate_config cfg = busy_config(6, 2), quiet = cfg;
  cfg.drop = PMOE_DROP_RANDOM;
  quiet.jitter = 0;
  quiet.gumbel = 0;
  quiet.drop = PMOE_DROP_POSITION;
  gate_case *c = case_new(cfg, 150, 9, 2), *plain = case_new(quiet, 150, 9, 2);
  c->step.training = plain->step.training = 0;
  case_forward(plain);
  for (int i = 0; i < 4; i++) {
    c->step.step = (uint64_t)i;
    c->step.first_token = i * 17;
    case_forward(c);
    assert_same_results(c, plain);
  }
  pmoe_mat x = mat_f32(c->x, c->T, c->H);
  assert_int_equal(pmoe_gate_forward(c->gate, &c->params, NULL, &x, &c->routing, &c->stats, NULL), PMOE_OK);
  assert_same_results(c, plain);
  case_free(c);
  case_free(plain);
}

/* Share of choices on which two runs agree. */
static double agreement(const gate_case *a, const int32_t *expert) {
  int64_t same = 0, n = a->T * a->cfg.top_k;
  for (int64_t i = 0; i < n; i++) same += a->routing.expert[i] == expert[i];
  return (double)same / (double)n;
}

static void test_noise_is_keyed(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(8, 1);
  cfg.gumbel = 1;
  gate_case *c = case_new(cfg, 500, 4, 1);
  case_forward(c);
  int32_t *first = room(500, 4);
  memcpy(first, c->routing.expert, 500 * 4);
  case_forward(c);
  assert_true(agreement(c, first) == 1);
  c->step.step++;
  case_forward(c);
  assert_true(agreement(c, first) < 0.7);
  c->step.step--;
  c->step.first_token++;
  case_forward(c);
  assert_true(agreement(c, first) < 0.7);
  c->step.first_token--;
  pmoe_gate *other;
  assert_int_equal(pmoe_gate_create(c->ctx, 4, c->layer + 1, &cfg, &other), PMOE_OK);
  pmoe_mat x = mat_f32(c->x, c->T, c->H);
  assert_int_equal(pmoe_gate_forward(other, &c->params, &c->step, &x, &c->routing, NULL, NULL), PMOE_OK);
  assert_true(agreement(c, first) < 0.7);
  pmoe_gate_destroy(other);
  free(first);
  case_free(c);
}

/* The sampled choice of K = 1 follows the softmax. */
static void test_gumbel_distribution(void **state) {
  (void)state;
  enum { T = 40000, E = 4 };
  pmoe_gate_config cfg = gate_config(E, 1);
  cfg.gumbel = 1;
  gate_case *c = case_new(cfg, T, 1, 2);
  for (int t = 0; t < T; t++) c->x[t] = 1;
  for (int e = 0; e < E; e++) c->w[e] = (float)e * 0.5f;
  case_forward(c);
  double sum = 0;
  for (int e = 0; e < E; e++) sum += exp((double)c->w[e]);
  for (int e = 0; e < E; e++) {
    double p = exp((double)c->w[e]) / sum, share = (double)c->routing.expert_count[e] / T;
    assert_true(fabs(share - p) < 5 * sqrt(p * (1 - p) / T));
  }
  for (int t = 0; t < T; t++) /* weights from the clean scores */
    assert_true(fabs((double)c->routing.weight[t] - exp((double)c->w[c->routing.expert[t]]) / sum) < 1e-6);
  case_free(c);
}

static void test_random_drop_is_fair(void **state) {
  (void)state;
  enum { T = 20000 };
  pmoe_gate_config cfg = gate_config(2, 1);
  cfg.capacity_factor = 0.5f;
  cfg.drop = PMOE_DROP_RANDOM;
  gate_case *c = case_new(cfg, T, 1, 2);
  for (int t = 0; t < T; t++) c->x[t] = 1;
  c->w[0] = 1;
  c->w[1] = 0;
  case_forward(c);
  assert_int_equal(c->routing.capacity, 5000);
  assert_int_equal(c->stats.routed, 5000);
  int64_t early = 0;
  for (int t = 0; t < T / 2; t++) early += c->routing.slot[t] >= 0;
  assert_true(early > 2500 - 250 && early < 2500 + 250);
  case_free(c);
}

/* One call for all tokens, or several with their first_token: the same noise, choices and gradients. */
static void test_split_over_calls(void **state) {
  (void)state;
  enum { T = 200, H = 10, E = 8 };
  for (int K = 1; K <= 2; K++) {
    pmoe_gate_config cfg = busy_config(E, K);
    cfg.capacity_factor = 0;
    cfg.aux_coef = cfg.z_coef = 0;
    if (K == 1) cfg.norm = PMOE_NORM_NONE;
    gate_case *whole = case_new(cfg, T, H, 1);
    case_forward(whole);
    case_backward(whole, 1);
    for (int64_t cut = 0; cut <= T; cut += 67) {
      gate_case *part = case_new(cfg, T, H, 2);
      float *dw = calloc(E * H, 4);
      assert_non_null(dw);
      for (int half = 0; half < 2; half++) {
        int64_t first = half ? cut : 0, rows = half ? T - cut : cut;
        part->T = rows;
        part->step.first_token = whole->step.first_token + first;
        memcpy(part->x, whole->x + first * H, (size_t)(rows * H) * 4);
        memcpy(part->dweight, whole->dweight + first * K, (size_t)(rows * K) * 4);
        case_forward(part);
        case_backward(part, 1);
        assert_memory_equal(part->routing.expert, whole->routing.expert + first * K, (size_t)(rows * K) * 4);
        for (int64_t i = 0; i < rows * K; i++)
          assert_true(fabsf(part->routing.weight[i] - whole->routing.weight[first * K + i]) < 1e-6f);
        for (int64_t i = 0; i < rows * H; i++) assert_true(fabsf(part->dx[i] - whole->dx[first * H + i]) < 1e-6f);
        for (int i = 0; i < E * H; i++) dw[i] += part->dw[i];
      }
      for (int i = 0; i < E * H; i++) assert_true(fabsf(dw[i] - whole->dw[i]) < 2e-5f);
      free(dw);
      case_free(part);
    }
    case_free(whole);
  }
}

static void test_order_of_tokens(void **state) {
  (void)state;
  enum { T = 131, H = 6, E = 7, K = 3 };
  pmoe_gate_config cfg = gate_config(E, K);
  cfg.norm = PMOE_NORM_AFTER_DROP;
  cfg.aux_coef = cfg.z_coef = 0.1f;
  gate_case *a = case_new(cfg, T, H, 1), *b = case_new(cfg, T, H, 1);
  for (int64_t t = 0; t < T; t++) { /* 37 generates the residues of the prime 131 */
    memcpy(b->x + t * 37 % T * H, a->x + t * H, H * 4);
    memcpy(b->dweight + t * 37 % T * K, a->dweight + t * K, K * 4);
  }
  case_forward(a);
  case_forward(b);
  case_backward(a, 1);
  case_backward(b, 1);
  assert_memory_equal(a->routing.expert_count, b->routing.expert_count, E * 8);
  assert_true(fabsf(a->stats.aux_loss - b->stats.aux_loss) < 1e-6f && fabsf(a->stats.z_loss - b->stats.z_loss) < 1e-6f);
  for (int64_t t = 0; t < T; t++) {
    int64_t to = t * 37 % T;
    assert_memory_equal(a->routing.expert + t * K, b->routing.expert + to * K, K * 4);
    for (int64_t k = 0; k < K; k++)
      assert_true(fabsf(a->routing.weight[t * K + k] - b->routing.weight[to * K + k]) < 1e-6f);
    for (int64_t h = 0; h < H; h++) assert_true(fabsf(a->dx[t * H + h] - b->dx[to * H + h]) < 1e-6f);
  }
  for (int i = 0; i < E * H; i++) assert_true(fabsf(a->dw[i] - b->dw[i]) < 1e-5f);
  case_free(a);
  case_free(b);
}

static void test_names_of_experts(void **state) {
  (void)state;
  enum { T = 100, H = 6, E = 7, K = 2 };
  pmoe_gate_config cfg = gate_config(E, K);
  cfg.capacity_factor = 1;
  cfg.aux_coef = 0.1f;
  gate_case *a = case_new(cfg, T, H, 1), *b = case_new(cfg, T, H, 1);
  for (int e = 0; e < E; e++) memcpy(b->w + e * 3 % E * H, a->w + e * H, H * 4);
  case_forward(a);
  case_forward(b);
  for (int i = 0; i < T * K; i++) assert_int_equal(a->routing.expert[i] * 3 % E, b->routing.expert[i]);
  assert_memory_equal(a->routing.slot, b->routing.slot, T * K * 8);
  assert_true(fabsf(a->stats.aux_loss - b->stats.aux_loss) < 1e-7f);
  case_free(a);
  case_free(b);
}

static void test_large_capacity_is_dropless(void **state) {
  (void)state;
  for (int norm = 0; norm <= PMOE_NORM_AFTER_DROP; norm++) {
    pmoe_gate_config cfg = gate_config(5, 3);
    cfg.norm = (pmoe_norm)norm;
    gate_case *a = case_new(cfg, 90, 4, 1);
    cfg.capacity_factor = 100;
    gate_case *b = case_new(cfg, 90, 4, 1);
    case_forward(a);
    case_forward(b);
    assert_same_results(a, b);
    case_free(a);
    case_free(b);
  }
}

static void test_padding_changes_nothing(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(5, 2);
  cfg.aux_coef = cfg.z_coef = 1;
  gate_case *a = case_new(cfg, 60, 4, 1), *b = case_new(cfg, 90, 4, 1);
  memset(b->mask, 1, 60);
  memset(b->mask + 60, 0, 30);
  use_mask(b);
  memcpy(b->x, a->x, 60 * 4 * 4);
  memcpy(b->w, a->w, 5 * 4 * 4);
  memcpy(b->dweight, a->dweight, 60 * 2 * 4);
  case_forward(a);
  case_forward(b);
  case_backward(a, 1);
  case_backward(b, 1);
  assert_memory_equal(a->routing.slot, b->routing.slot, 120 * 8);
  assert_memory_equal(a->routing.weight, b->routing.weight, 120 * 4);
  assert_memory_equal(&a->stats.aux_loss, &b->stats.aux_loss, 4);
  assert_memory_equal(&a->stats.z_loss, &b->stats.z_loss, 4);
  assert_memory_equal(a->dx, b->dx, 60 * 4 * 4);
  for (int i = 0; i < 20; i++) assert_true(fabsf(a->dw[i] - b->dw[i]) < 1e-5f);
  case_free(a);
  case_free(b);
}

static void test_empty(void **state) {
  (void)state;
  pmoe_gate_config cfg = busy_config(6, 2);
  gate_case *c = case_new(cfg, 0, 4, 2);
  pmoe_mat none = {NULL, PMOE_F32, 0, 4, 4};
  pmoe_routing routing = c->routing;
  routing.expert = NULL;
  routing.slot = NULL;
  routing.weight = NULL;
  for (int i = 0; i < 6 * 4; i++) c->dw[i] = 2;
  for (int i = 0; i < 6; i++) c->db[i] = 3;
  assert_int_equal(pmoe_gate_forward(c->gate, &c->params, &c->step, &none, &routing, &c->stats, NULL), PMOE_OK);
  for (int e = 0; e < 6; e++) assert_true(c->routing.expert_count[e] == 0 && c->routing.expert_rows[e] == 0);
  assert_true(c->stats.aux_loss == 0 && c->stats.z_loss == 0 && c->stats.entropy == 0 &&
              c->stats.load_max_over_mean == 0);
  assert_int_equal(
      pmoe_gate_backward(c->gate, &c->params, &c->step, &none, &routing, NULL, 1, NULL, &none, PMOE_BWD_ALL, NULL),
      PMOE_OK);
  for (int i = 0; i < 6 * 4; i++) assert_true(c->dw[i] == 2);
  for (int i = 0; i < 6; i++) assert_true(c->db[i] == 3);
  case_free(c);
  c = case_new(cfg, 70, 4, 2); /* the same when all are masked */
  memset(c->mask, 0, 70);
  use_mask(c);
  case_forward(c);
  assert_int_equal(c->stats.masked, 70);
  assert_true(c->stats.aux_loss == 0 && c->stats.z_loss == 0 && c->stats.entropy == 0);
  case_backward(c, 1);
  for (int i = 0; i < 70 * 4; i++) assert_true(c->dx[i] == 0);
  for (int i = 0; i < 6 * 4; i++) assert_true(c->dw[i] == 0);
  case_free(c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_threads_and_repeats),
      cmocka_unit_test(test_no_randomness_in_evaluation),
      cmocka_unit_test(test_noise_is_keyed),
      cmocka_unit_test(test_gumbel_distribution),
      cmocka_unit_test(test_random_drop_is_fair),
      cmocka_unit_test(test_split_over_calls),
      cmocka_unit_test(test_order_of_tokens),
      cmocka_unit_test(test_names_of_experts),
      cmocka_unit_test(test_large_capacity_is_dropless),
      cmocka_unit_test(test_padding_changes_nothing),
      cmocka_unit_test(test_empty),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
