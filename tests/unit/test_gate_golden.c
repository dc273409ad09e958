/* Values computed elsewhere: tests/data/router-golden.json, and small inputs on which other routers went wrong. */
#include "test_gate_reference.h"

#include "support/golden.h"

static const cJSON *input(const cJSON *matrix) {
  return cJSON_IsString(matrix) ? get(get(golden, "inputs"), matrix->valuestring) : matrix;
}

/* Tokens whose logits are exactly the given ones: x = logits, Wg = 1. Logits are a matrix or the name of one of the
 * inputs. */
static gate_case *case_of_logits(pmoe_gate_config cfg, const cJSON *logits) {
  logits = input(logits);
  int64_t T = cJSON_GetArraySize(logits), E = cJSON_GetArraySize(cJSON_GetArrayItem(logits, 0));
  cfg.num_experts = (int32_t)E;
  gate_case *c = case_new(cfg, T, E, 2);
  for (int64_t t = 0; t < T; t++)
    for (int64_t e = 0; e < E; e++) c->x[t * E + e] = (float)number_at(logits, t, e);
  for (int64_t i = 0; i < E * E; i++) c->w[i] = i % (E + 1) == 0 ? 1.0f : 0.0f;
  return c;
}

static gate_case *case_of_text(pmoe_gate_config cfg, const char *text) {
  cJSON *logits = cJSON_Parse(text);
  assert_non_null(logits);
  gate_case *c = case_of_logits(cfg, logits);
  cJSON_Delete(logits);
  return c;
}

static void assert_dlogits(const gate_case *c, const cJSON *want) {
  for (int64_t t = 0; t < c->T; t++)
    for (int64_t e = 0; e < c->cfg.num_experts; e++)
      assert_close((double)c->dlogits[t * c->cfg.num_experts + e], number_at(want, t, e));
}

/* Groups and K are checked against E, so the smallest E that holds them stands in until the logits are known. */
static pmoe_gate_config golden_config(const cJSON *config) {
  pmoe_gate_config cfg = gate_config(8, get(config, "k")->valueint);
  const cJSON *score = cJSON_GetObjectItem(config, "score"), *groups = cJSON_GetObjectItem(config, "groups");
  cfg.selection_bias = cJSON_GetObjectItem(config, "bias") != NULL;
  if (score) {
    cfg.score = strcmp(score->valuestring, "sigmoid") == 0 ? PMOE_SCORE_SIGMOID : PMOE_SCORE_SQRT_SOFTPLUS;
    cfg.norm = cfg.top_k > 1 ? PMOE_NORM_BEFORE_DROP : PMOE_NORM_NONE;
  } else {
    cfg.softmax_after_topk = !cJSON_GetObjectItem(config, "pre");
  }
  if (groups) {
    cfg.num_groups = groups->valueint;
    cfg.groups_kept = get(config, "gtop")->valueint;
    cfg.group_score_top2 = cJSON_GetObjectItem(config, "per_group") != NULL;
  }
  return cfg;
}

static void test_routing(void **state) {
  (void)state;
  int used = 0;
  const cJSON *item;
  cJSON_ArrayForEach(item, get(golden, "routing")) {
    const char *name = get(item, "name")->valuestring;
    const cJSON *config = get(item, "config");
    int K = get(config, "k")->valueint;
    pmoe_gate_config cfg = golden_config(config);
    gate_case *c = case_of_logits(cfg, get(item, "logits"));
    for (int e = 0; e < c->cfg.num_experts && cfg.selection_bias; e++)
      c->selection_bias[e] = (float)cJSON_GetArrayItem(get(config, "bias"), e)->valuedouble;
    case_forward(c);
    print_message("  %s\n", name);
    for (int64_t t = 0; t < c->T; t++) {
      for (int k = 0; k < K; k++) {
        assert_int_equal(c->routing.expert[t * K + k], (int)number_at(get(item, "indices"), t, k));
        assert_close((double)c->routing.weight[t * K + k], number_at(get(item, "weights"), t, k));
      }
    }
    for (int e = 0; e < c->cfg.num_experts; e++)
      assert_int_equal(c->routing.expert_count[e], cJSON_GetArrayItem(get(item, "tokens_per_expert"), e)->valueint);
    if (cJSON_GetObjectItem(item, "grad_logits")) {
      const cJSON *gradient = input(get(item, "grad_probs"));
      for (int64_t i = 0; i < c->T * K; i++) c->dweight[i] = (float)number_at(gradient, i / K, c->routing.expert[i]);
      case_backward(c, 1);
      assert_dlogits(c, get(item, "grad_logits"));
    }
    case_free(c);
    used++;
  }
  assert_int_equal(used, 13);
}

static void test_aux_loss(void **state) {
  (void)state;
  const cJSON *losses = get(golden, "aux_losses"), *item = get(losses, "aux_loss_softmax_k2_coeff0.01");
  pmoe_gate_config cfg = gate_config(2, 2);
  cfg.aux_coef = 0.01f;
  gate_case *c = case_of_logits(cfg, get(item, "logits"));
  case_forward(c);
  assert_close((double)c->stats.aux_loss, get(item, "value")->valuedouble);
  memset(c->dweight, 0, (size_t)(c->T * 2) * 4);
  case_backward(c, 1);
  assert_dlogits(c, get(item, "grad_logits"));

  item = get(losses, "aux_loss_padding");
  for (int64_t t = 0; t < c->T; t++) c->mask[t] = (uint8_t)cJSON_GetArrayItem(get(item, "valid"), (int)t)->valueint;
  use_mask(c);
  case_forward(c);
  assert_close((double)c->stats.aux_loss, get(item, "value")->valuedouble);
  for (int e = 0; e < 8; e++)
    assert_int_equal(c->routing.expert_count[e], cJSON_GetArrayItem(get(item, "counts"), e)->valueint);
  case_free(c);

  cfg.aux_coef = 1;
  item = get(losses, "collapsed_is_E_over_k");
  c = case_of_logits(cfg, get(item, "logits"));
  case_forward(c);
  assert_close((double)c->stats.aux_loss, get(item, "value_over_coeff")->valuedouble);
  case_free(c);
  cfg.num_experts = 8;
  c = case_new(cfg, 8, 3, 1);
  memset(c->w, 0, 8 * 3 * 4);
  case_forward(c);
  assert_close((double)c->stats.aux_loss, get(get(losses, "uniform_is_one"), "value_over_coeff")->valuedouble);
  case_free(c);
}

static void test_z_loss(void **state) {
  (void)state;
  const cJSON *item = get(golden, "z_loss");
  pmoe_gate_config cfg = gate_config(2, 2);
  cfg.z_coef = (float)get(item, "coeff")->valuedouble;
  gate_case *c = case_of_logits(cfg, get(item, "logits"));
  case_forward(c);
  assert_close((double)c->stats.z_loss, get(item, "value")->valuedouble);
  memset(c->dweight, 0, (size_t)(c->T * 2) * 4);
  case_backward(c, 1);
  assert_dlogits(c, get(item, "grad_logits"));
  for (int64_t t = 0; t < c->T; t++)
    c->mask[t] = (uint8_t)cJSON_GetArrayItem(get(get(item, "padding"), "valid"), (int)t)->valueint;
  use_mask(c);
  case_forward(c);
  assert_close((double)c->stats.z_loss, get(get(item, "padding"), "value")->valuedouble);
  memset(c->mask, 0, (size_t)c->T);
  case_forward(c);
  assert_true(c->stats.z_loss == 0);
  c->step.token_mask = NULL;
  c->step.token_mask_len = 0;
  for (int64_t i = 0; i < c->T * 8; i++) c->x[i] += 1000;
  case_forward(c);
  assert_close((double)c->stats.z_loss, get(get(item, "shift_by_1000"), "value")->valuedouble);
  case_free(c);
}

static void assert_map(const gate_case *c, const cJSON *map) {
  for (int64_t i = 0; i < c->T * c->cfg.top_k; i++)
    assert_int_equal(c->routing.slot[i] >= 0, (int)number_at(map, i / c->cfg.top_k, c->routing.expert[i]));
}

static void test_capacity(void **state) {
  (void)state;
  const cJSON *capacity = get(golden, "capacity"), *item;
  cJSON_ArrayForEach(item, get(capacity, "cases")) {
    pmoe_gate_config cfg = gate_config(2, 2);
    cfg.softmax_after_topk = 1;
    cfg.capacity_factor = (float)get(item, "capacity_factor")->valuedouble;
    cfg.drop = strcmp(get(item, "policy")->valuestring, "probs") == 0 ? PMOE_DROP_PROBS : PMOE_DROP_POSITION;
    gate_case *c = case_of_logits(cfg, get(capacity, "logits"));
    case_forward(c);
    assert_int_equal(c->routing.capacity, get(item, "capacity")->valueint);
    assert_map(c, get(item, "map"));
    for (int64_t i = 0; i < c->T * 2; i++)
      assert_close((double)c->routing.weight[i], number_at(get(item, "probs"), i / 2, c->routing.expert[i]));
    assert_int_equal(c->stats.routed, get(item, "kept")->valueint);
    assert_int_equal(c->stats.dropped, get(item, "dropped")->valueint);
    case_free(c);
  }
  const cJSON *tie = get(capacity, "tie_case");
  for (int drop = PMOE_DROP_POSITION; drop <= PMOE_DROP_PROBS; drop++) {
    pmoe_gate_config cfg = gate_config(2, 2);
    cfg.capacity_factor = 1;
    cfg.drop = (pmoe_drop)drop;
    gate_case *c = case_of_logits(cfg, get(tie, "weights_in"));
    for (int64_t i = 0; i < c->T * 4; i++) c->x[i] = c->x[i] > 0 ? 0 : -200.0f; /* a softmax of exactly 0.5 and 0 */
    case_forward(c);
    assert_map(c, get(get(tie, drop == PMOE_DROP_PROBS ? "policy_probs" : "policy_position"), "map"));
    case_free(c);
  }
}

static void assert_capacity(int64_t tokens, int32_t num_experts, int32_t top_k, float factor, int32_t least,
                            int64_t want) {
  int64_t capacity = -1;
  assert_int_equal(pmoe_gate_capacity(tokens, num_experts, top_k, factor, least, &capacity), PMOE_OK);
  assert_int_equal(capacity, want);
}

static void test_capacity_in_integers(void **state) {
  (void)state;
  const cJSON *item;
  cJSON_ArrayForEach(item, get(get(golden, "capacity"), "float_rounding_cases"))
      assert_capacity(get(item, "n")->valueint, get(item, "E")->valueint, 1, (float)get(item, "cf")->valuedouble, 0,
                      get(item, "exact_rational")->valueint);
  assert_capacity(50, 4, 1, 1.2f, 0, 15);
  assert_capacity(1000, 3, 1, 1.2f, 0, 400);
  assert_capacity(90, 4, 1, 1.2f, 0, 27);
  assert_capacity(20, 3, 1, 1.05f, 0, 7);
  assert_capacity(8, 2, 2, 2, 0, 16);
  assert_capacity(1, 4, 1, 0.5f, 0, 1);
  assert_capacity(0, 4, 1, 0.5f, 0, 1);
  assert_capacity(100, 4, 2, 0, 5, 0);
  assert_capacity(10, 4, 1, 1, 9, 9);
  assert_capacity(10, 4, 1, 0.000001f, 0, 1);
  assert_capacity(1000000, 1, 1, 0.000001f, 0, 1);
  assert_capacity(1000001, 1, 1, 0.000001f, 0, 2);
  assert_capacity(INT64_C(1) << 40, 3, 3, 1.1f, 0, INT64_C(1209462790554));
  assert_capacity(INT64_MAX, 1, 1, 1, 0, INT64_MAX);
  int64_t capacity = 42;
  assert_int_equal(pmoe_gate_capacity(INT64_MAX, 1, 1, 2, 0, &capacity), PMOE_ERR_ARG);
  assert_int_equal(capacity, 42);
}

static const char *const six_rows = "[[2,1,0,0],[1,0,0,0],[3,0,0,0],[0,2,0,0],[1.5,1,0,0],[0,0,1,0]]";

static void test_first_choice_with_capacity(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(1, 1);
  cfg.capacity_factor = 1;
  cfg.aux_coef = 1;
  gate_case *c = case_of_text(cfg, six_rows);
  case_forward(c);
  const int64_t slots[] = {0, 1, -1, 0, -1, 0}, counts[] = {4, 1, 1, 0}, rows[] = {2, 1, 1, 0};
  const double weights[] = {.610296, .475367, 0, .711235, 0, .475367};
  assert_int_equal(c->routing.capacity, 2);
  assert_memory_equal(c->routing.slot, slots, sizeof slots);
  assert_memory_equal(c->routing.expert_count, counts, sizeof counts);
  assert_memory_equal(c->routing.expert_rows, rows, sizeof rows);
  for (int t = 0; t < 6; t++) assert_true(fabs((double)c->routing.weight[t] - weights[t]) < 1e-6);
  assert_true(fabs((double)c->stats.aux_loss - 1.495704) < 2e-6);
  c->mask[0] = c->mask[1] = c->mask[2] = c->mask[3] = 1;
  c->mask[4] = c->mask[5] = 0;
  use_mask(c);
  case_forward(c);
  assert_true(fabs((double)c->stats.aux_loss - 1.827461) < 2e-6);
  assert_int_equal(c->stats.masked, 2);
  case_free(c);
}

static void test_second_choice_after_drop(void **state) {
  (void)state;
  const double after[4][2] = {{.668188, .331812}, {.622459, .377541}, {1, 0}, {1, 0}};
  const double before[4][2] = {{.668188, .331812}, {.622459, .377541}, {.524979, 0}, {.622459, 0}};
  const int32_t experts[] = {1, 2, 0, 2, 1, 2, 0, 1};
  for (int norm = PMOE_NORM_BEFORE_DROP; norm <= PMOE_NORM_AFTER_DROP; norm++) {
    pmoe_gate_config cfg = gate_config(2, 2);
    cfg.norm = (pmoe_norm)norm;
    cfg.capacity_factor = 0.5f;
    gate_case *c = case_of_text(cfg, "[[0.1,0.9,0.2],[0.8,0.1,0.3],[0.4,0.6,0.5],[0.7,0.2,0.1]]");
    case_forward(c);
    assert_int_equal(c->routing.capacity, 2);
    for (int i = 0; i < 8; i++) {
      double want = norm == PMOE_NORM_AFTER_DROP ? after[i / 2][i % 2] : before[i / 2][i % 2];
      assert_true(fabs((double)c->routing.weight[i] - want) < 1e-6);
      assert_int_equal(c->routing.expert[i], experts[i]);
    }
    case_free(c);
  }
}

static void test_aux_loss_of_first_choices(void **state) {
  (void)state;
  for (int first = 0; first <= 1; first++) {
    pmoe_gate_config cfg = gate_config(2, 2);
    cfg.aux_coef = 1;
    cfg.aux_first_choice_only = first;
    gate_case *c = case_of_text(cfg, "[[0.11,0.2,0.1,0.3],[0.3,0.4,0.11,0.1],[0.11,0.1,0.6,0.5],[0.1,0.11,0.7,0.8]]");
    case_forward(c);
    assert_true(fabs((double)c->stats.aux_loss - (first ? 1.066840 : 1.033420)) < 2e-6);
    case_free(c);
  }
}

static void test_capacity_beyond_tokens(void **state) {
  (void)state;
  for (int drop = 0; drop <= PMOE_DROP_RANDOM; drop++) {
    pmoe_gate_config cfg = gate_config(2, 2);
    cfg.capacity_factor = 2;
    cfg.drop = (pmoe_drop)drop;
    gate_case *c = case_new(cfg, 8, 3, 1);
    case_forward(c);
    assert_int_equal(c->routing.capacity, 16);
    assert_int_equal(c->stats.dropped, 0);
    case_free(c);
    cfg = gate_config(4, 1);
    cfg.capacity_factor = 8;
    cfg.drop = (pmoe_drop)drop;
    c = case_new(cfg, 3, 3, 1);
    case_forward(c);
    assert_int_equal(c->stats.routed, 3);
    case_free(c);
  }
}

static void test_negative_logits_rank_as_probabilities(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(16, 4);
  cfg.capacity_factor = 1;
  cfg.drop = PMOE_DROP_PROBS;
  cfg.bias = 1;
  gate_case *c = case_new(cfg, 64, 8, 1);
  for (int e = 0; e < 16; e++) c->b[e] = -5;
  for (int i = 0; i < 16 * 8; i++) c->w[i] *= 0.01f;
  case_forward(c);
  int64_t kept = 0;
  for (int e = 0; e < 16; e++) kept += c->routing.expert_count[e] < 16 ? c->routing.expert_count[e] : 16;
  assert_int_equal(c->routing.capacity, 16);
  assert_int_equal(c->stats.routed, kept);
  assert_true(kept > 128 && kept < 256);
  check_forward(c, 1e-5);
  case_free(c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_routing),
      cmocka_unit_test(test_aux_loss),
      cmocka_unit_test(test_z_loss),
      cmocka_unit_test(test_capacity),
      cmocka_unit_test(test_capacity_in_integers),
      cmocka_unit_test(test_first_choice_with_capacity),
      cmocka_unit_test(test_second_choice_after_drop),
      cmocka_unit_test(test_aux_loss_of_first_choices),
      cmocka_unit_test(test_capacity_beyond_tokens),
      cmocka_unit_test(test_negative_logits_rank_as_probabilities),
  };
  return cmocka_run_group_tests(tests, load_golden, free_golden);
}
