/* Choices other than top-k, and routers of the host's: who is chosen, what weights and gradients follow. */
#include "test_router_reference.h"

#include "support/golden.h"

enum { T = 150, E = 10 };

typedef struct router_case {
  gate_case *c;
  float logits[T * E], dlogits[T * E], dweight[T * E], weight[T * E];
  pmoe_mat logits_mat, dlogits_mat;
  int32_t token_id[T], expert[T * E];
} router_case;

static void set_up(router_case *r, pmoe_gate_config cfg, int32_t threads) {
  r->c = case_new(cfg, T, 3, threads);
  uint64_t seed = 31;
  for (int i = 0; i < T * E; i++) r->logits[i] = 3 * draw(&seed);
  for (int t = 0; t < T; t++) r->token_id[t] = (t * 13) % 40 - 3;
  for (int t = 0; t < T; t++)
    for (int k = 0; k < cfg.top_k; k++) r->expert[t * cfg.top_k + k] = t % 6 == 5 && k > 0 ? -1 : (t + 3 * k) % E;
  for (int i = 0; i < T * E; i++) r->weight[i] = draw(&seed);
  memset(r->dlogits, 0xff, sizeof r->dlogits);
  memset(r->dweight, 0xff, sizeof r->dweight);
  r->logits_mat = mat_f32(r->logits, T, E);
  r->dlogits_mat = mat_f32(r->dlogits, T, E);
  pmoe_step *step = &r->c->step;
  if (cfg.router == PMOE_ROUTER_HOST_LOGITS) step->logits = &r->logits_mat, step->dlogits = &r->dlogits_mat;
  if (cfg.choice == PMOE_CHOICE_HASH) step->token_id = r->token_id;
  if (cfg.choice == PMOE_CHOICE_GIVEN) step->expert = r->expert;
  if (cfg.router == PMOE_ROUTER_HOST_ROUTING) step->weight = r->weight, step->dweight = r->dweight;
}

static void backward(router_case *r, float scale) {
  gate_case *c = r->c;
  pmoe_mat x = mat_f32(c->x, c->T, c->H), dx = mat_f32(c->dx, c->T, c->H);
  assert_int_equal(pmoe_gate_backward(c->gate, &c->params, &c->step, &x, &c->routing, c->dweight, scale, c->dlogits,
                                      &dx, PMOE_BWD_ALL, NULL),
                   PMOE_OK);
}

static void widen_logits(const router_case *r, int64_t t, double *out) {
  for (int e = 0; e < E; e++) out[e] = (double)r->logits[t * E + e];
}

static void assert_near(double got, double want, double tolerance, int64_t at) {
  if (!(fabs(got - want) <= tolerance * (fabs(want) + 1)))
    fail_msg("%lld: got %.9g, want %.9g", (long long)at, got, want);
}

/* Distinct experts, weights from the scores, slots in token order, and the gradient by differences. */
static void check_consistent(router_case *r) {
  gate_case *c = r->c;
  int64_t K = c->cfg.top_k, next[E] = {0};
  for (int64_t t = 0; t < T; t++) {
    double logits[E], score[E], weight[E];
    const int32_t *expert = c->routing.expert + t * K;
    widen_logits(r, t, logits);
    router_choice_scores(&c->cfg, logits, expert, score);
    ref_weights(c, score, c->routing.slot + t * K, weight);
    for (int64_t k = 0; k < K; k++) {
      assert_true(expert[k] >= -1 && expert[k] < E && (!is_masked(c, t) || expert[k] == -1));
      for (int64_t j = 0; j < k; j++) assert_true(expert[k] == -1 || expert[j] != expert[k]);
      int64_t slot = c->routing.slot[t * K + k];
      assert_true(slot == -1 || slot == next[expert[k]]++);
      assert_near((double)c->routing.weight[t * K + k], slot >= 0 ? weight[k] : 0, 3e-6, t * K + k);
    }
  }
  for (int e = 0; e < E; e++) assert_int_equal(next[e], c->routing.expert_rows[e]);
  backward(r, 0.7f);
  for (int64_t i = 0; i < T * E; i += 3) {
    double logits[E], side[2];
    widen_logits(r, i / E, logits);
    for (int s = 0; s < 2; s++) {
      logits[i % E] = (double)r->logits[i] + (s ? 1e-5 : -1e-5);
      side[s] = router_token_objective(c, logits, i / E, 0.7, c->routing.loss_sums);
    }
    assert_near((double)r->dlogits[i], is_masked(c, i / E) ? 0 : (side[1] - side[0]) / 2e-5, 1e-5, i);
  }
}

/* Every choice x score x norm x losses, with a mask and capacities. */
static void test_all(void **state) {
  (void)state;
  int cases = 0;
  for (int choice = PMOE_CHOICE_SINKHORN; choice <= PMOE_CHOICE_EXPERT_CHOICE; choice++) {
    for (int score = PMOE_SCORE_SOFTMAX; score <= PMOE_SCORE_SQRT_SOFTPLUS; score++) {
      for (int norm = PMOE_NORM_NONE; norm <= PMOE_NORM_AFTER_DROP; norm++) {
        for (int32_t K = 1; K <= E; K += 3) {
          for (int losses = 0; losses < 3; losses++) {
            bool experts_choose = choice == PMOE_CHOICE_EXPERT_CHOICE;
            if (K == 1 && norm) continue;
            pmoe_gate_config cfg = gate_config(E, K);
            cfg.router = PMOE_ROUTER_HOST_LOGITS;
            cfg.choice = (pmoe_choice)choice;
            cfg.score = (pmoe_score)score;
            cfg.norm = (pmoe_norm)norm;
            cfg.z_coef = losses ? 0.01f : 0;
            cfg.aux_coef = losses && !experts_choose ? 0.1f : 0;
            cfg.aux_plain_topk = losses == 2 && !experts_choose;
            cfg.capacity_factor = experts_choose ? 2 : cases % 2 ? 0.7f : 0;
            cfg.eval_capacity_factor = cfg.capacity_factor;
            router_case r;
            set_up(&r, cfg, 2);
            if (cases % 3 == 0) mask_some(r.c, 4);
            case_forward(r.c);
            check_consistent(&r);
            case_free(r.c);
            cases++;
          }
        }
      }
    }
  }
  assert_true(cases > 400);
}

/* The same for one and for three threads, and for a second run. */
static void test_repeats(void **state) {
  (void)state;
  for (int choice = PMOE_CHOICE_SINKHORN; choice <= PMOE_CHOICE_EXPERT_CHOICE; choice++) {
    pmoe_gate_config cfg = gate_config(E, 3);
    cfg.router = PMOE_ROUTER_HOST_LOGITS;
    cfg.choice = (pmoe_choice)choice;
    cfg.capacity_factor = cfg.eval_capacity_factor = 1.5f;
    static router_case a, b;
    set_up(&a, cfg, 1);
    set_up(&b, cfg, 3);
    case_forward(a.c);
    backward(&a, 1);
    for (int run = 0; run < 2; run++) {
      case_forward(b.c);
      backward(&b, 1);
      assert_memory_equal(a.c->routing.expert, b.c->routing.expert, sizeof(int32_t) * T * 3);
      assert_memory_equal(a.c->routing.slot, b.c->routing.slot, sizeof(int64_t) * T * 3);
      assert_memory_equal(a.c->routing.weight, b.c->routing.weight, sizeof(float) * T * 3);
      assert_memory_equal(a.dlogits, b.dlogits, sizeof a.dlogits);
    }
    case_free(a.c);
    case_free(b.c);
  }
}

/* Round robin and hash depend on the global token alone, not on how tokens are cut into calls. */
static void test_cut(void **state) {
  (void)state;
  for (int choice = PMOE_CHOICE_ROUND_ROBIN; choice <= PMOE_CHOICE_HASH; choice++) {
    pmoe_gate_config cfg = gate_config(E, 4);
    cfg.router = PMOE_ROUTER_HOST_LOGITS;
    cfg.choice = (pmoe_choice)choice;
    static router_case a, b;
    set_up(&a, cfg, 2);
    set_up(&b, cfg, 2);
    case_forward(a.c);
    enum { CUT = 67 };
    b.c->T = T - CUT;
    b.c->step.first_token += CUT;
    b.c->step.token_id = choice == PMOE_CHOICE_HASH ? b.token_id + CUT : NULL;
    pmoe_mat rest = mat_f32(b.logits + CUT * E, T - CUT, E);
    b.c->step.logits = &rest;
    case_forward(b.c);
    assert_memory_equal(a.c->routing.expert + CUT * 4, b.c->routing.expert, sizeof(int32_t) * (T - CUT) * 4);
    case_free(a.c);
    case_free(b.c);
  }
}

static void test_round_robin_is_even(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(E, 3);
  cfg.router = PMOE_ROUTER_HOST_LOGITS;
  cfg.choice = PMOE_CHOICE_ROUND_ROBIN;
  router_case r;
  set_up(&r, cfg, 2);
  case_forward(r.c);
  for (int e = 0; e < E; e++) assert_int_equal(r.c->routing.expert_count[e], T * 3 / E);
  assert_true(r.c->stats.load_cv == 0 && r.c->stats.load_max_over_mean == 1);
  case_free(r.c);
}

/* Equal ids, equal experts; another layer or seed, other experts; every set of experts comes up. */
static void test_hash(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(4, 2);
  cfg.choice = PMOE_CHOICE_HASH;
  enum { N = 3000 };
  gate_case *c = case_new(cfg, N, 2, 2);
  static int32_t id[N], first[N * 2];
  for (int t = 0; t < N; t++) id[t] = t / 2;
  c->step.token_id = id;
  case_forward(c);
  int64_t pairs[16] = {0};
  for (int t = 0; t < N; t += 2) {
    assert_memory_equal(c->routing.expert + t * 2, c->routing.expert + t * 2 + 2, 2 * sizeof(int32_t));
    pairs[c->routing.expert[t * 2] * 4 + c->routing.expert[t * 2 + 1]]++;
  }
  for (int i = 0; i < 16; i++) {
    if (i / 4 == i % 4) assert_int_equal(pairs[i], 0);
    else assert_true(pairs[i] > 80 && pairs[i] < 175); /* 125 expected, four deviations are 43 */
  }
  memcpy(first, c->routing.expert, sizeof first);
  c->step.step++;
  c->step.training = 0;
  case_forward(c);
  assert_memory_equal(first, c->routing.expert, sizeof first);
  pmoe_gate_destroy(c->gate);
  assert_int_equal(pmoe_gate_create(c->ctx, 2, 4, &cfg, &c->gate), PMOE_OK);
  case_forward(c);
  assert_true(memcmp(first, c->routing.expert, sizeof first) != 0);
  case_free(c);
}

/* A recorded top-k routing fed back gives the same weights and gradients, bit for bit. */
static void test_replay(void **state) {
  (void)state;
  for (int score = PMOE_SCORE_SOFTMAX; score <= PMOE_SCORE_SQRT_SOFTPLUS; score++) {
    pmoe_gate_config cfg = gate_config(E, 3);
    cfg.router = PMOE_ROUTER_HOST_LOGITS;
    cfg.score = (pmoe_score)score;
    cfg.norm = PMOE_NORM_AFTER_DROP;
    cfg.capacity_factor = 0.8f;
    cfg.aux_coef = 0.1f;
    cfg.z_coef = 0.01f;
    static router_case a, b;
    set_up(&a, cfg, 2);
    case_forward(a.c);
    backward(&a, 1);
    cfg.choice = PMOE_CHOICE_GIVEN;
    set_up(&b, cfg, 2);
    memcpy(b.expert, a.c->routing.expert, sizeof(int32_t) * T * 3);
    case_forward(b.c);
    backward(&b, 1);
    assert_memory_equal(a.c->routing.expert, b.c->routing.expert, sizeof(int32_t) * T * 3);
    assert_memory_equal(a.c->routing.slot, b.c->routing.slot, sizeof(int64_t) * T * 3);
    assert_memory_equal(a.c->routing.weight, b.c->routing.weight, sizeof(float) * T * 3);
    assert_memory_equal(a.dlogits, b.dlogits, sizeof a.dlogits);
    assert_memory_equal(&a.c->stats, &b.c->stats, sizeof a.c->stats);
    case_free(a.c);
    case_free(b.c);
  }
}

/* The learned router, and a host that computes the same logits. */
static void test_host_logits(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(E, 2);
  cfg.aux_coef = 0.1f;
  cfg.bias = 1;
  static router_case a, b;
  set_up(&a, cfg, 1);
  case_forward(a.c);
  case_backward(a.c, 1);
  cfg.bias = 0;
  cfg.router = PMOE_ROUTER_HOST_LOGITS;
  set_up(&b, cfg, 1);
  for (int t = 0; t < T; t++) {
    for (int e = 0; e < E; e++) {
      float sum = a.c->b[e];
      for (int h = 0; h < 3; h++) sum += a.c->x[t * 3 + h] * a.c->w[e * 3 + h];
      b.logits[t * E + e] = sum;
    }
  }
  memset(b.c->dx, 0, (size_t)T * 3 * 4);
  case_forward(b.c);
  backward(&b, 1);
  assert_memory_equal(a.c->routing.expert, b.c->routing.expert, sizeof(int32_t) * T * 2);
  for (int i = 0; i < T * E; i++) assert_near((double)b.dlogits[i], (double)a.c->dlogits[i], 1e-5, i);
  for (int i = 0; i < T * 3; i++) assert_true(b.c->dx[i] == 0); /* the host carries it on */
  case_free(a.c);
  case_free(b.c);
}

/* Finished weights go through, those without a slot become zero, and their gradient comes back. */
static void test_host_routing(void **state) {
  (void)state;
  for (int drop = PMOE_DROP_POSITION; drop <= PMOE_DROP_PROBS; drop++) {
    pmoe_gate_config cfg = gate_config(E, 3);
    cfg.router = PMOE_ROUTER_HOST_ROUTING;
    cfg.choice = PMOE_CHOICE_GIVEN;
    cfg.capacity_factor = 0.6f;
    cfg.drop = (pmoe_drop)drop;
    cfg.weight_scale = 1.5f;
    router_case r;
    set_up(&r, cfg, 2);
    mask_some(r.c, 5);
    case_forward(r.c);
    backward(&r, 1);
    int64_t kept = 0;
    for (int64_t i = 0; i < T * 3; i++) {
      bool there = !is_masked(r.c, i / 3) && r.expert[i] >= 0, has_slot = r.c->routing.slot[i] >= 0;
      assert_int_equal(r.c->routing.expert[i], there ? r.expert[i] : -1);
      assert_true(there || !has_slot);
      assert_near((double)r.c->routing.weight[i], has_slot ? 1.5 * (double)r.weight[i] : 0, 1e-7, i);
      assert_near((double)r.dweight[i], has_slot ? 1.5 * (double)r.c->dweight[i] : 0, 1e-7, i);
      kept += has_slot;
    }
    assert_int_equal(kept, r.c->stats.routed);
    assert_true(r.c->stats.dropped > 0);
    if (drop == PMOE_DROP_PROBS) /* no kept weight below a dropped one */
      for (int64_t i = 0; i < T * 3; i++)
        for (int64_t j = 0; j < T * 3; j++)
          if (r.c->routing.expert[i] >= 0 && r.c->routing.expert[i] == r.c->routing.expert[j])
            assert_true(r.c->routing.slot[i] >= 0 || r.c->routing.slot[j] < 0 || r.weight[j] >= r.weight[i]);
    case_free(r.c);
  }
}

/* Each expert has its C best tokens, and no other; with little room a token keeps its best experts. */
static void test_expert_choice(void **state) {
  (void)state;
  for (int32_t room_for = 2; room_for <= E; room_for += 8) {
    pmoe_gate_config cfg = gate_config(E, room_for);
    cfg.router = PMOE_ROUTER_HOST_LOGITS;
    cfg.choice = PMOE_CHOICE_EXPERT_CHOICE;
    cfg.capacity_factor = cfg.eval_capacity_factor = 2;
    router_case r;
    set_up(&r, cfg, 2);
    for (int i = 0; i < T * E; i++) r.logits[i] = r.logits[i / (3 * E) * (3 * E) + i % E]; /* ties of three tokens */
    r.logits[7 * E + 2] = -INFINITY;
    for (int e = 0; e < E; e++) r.logits[8 * E + e] = NAN;
    case_forward(r.c);
    int64_t capacity = (T * 2 + E - 1) / E;
    static double score[T * E];
    static uint8_t picked[T * E];
    memset(picked, 0, sizeof picked);
    assert_int_equal(r.c->routing.capacity, capacity);
    for (int64_t t = 0; t < T; t++) {
      double logits[E];
      widen_logits(&r, t, logits);
      router_scores(&cfg, logits, score + t * E);
      for (int e = 0; e < E; e++)
        if (logits[e] == -INFINITY) score[t * E + e] = -INFINITY;
    }
    for (int e = 0; e < E; e++) {
      double column[T];
      int32_t best[T];
      for (int64_t t = 0; t < T; t++) column[t] = score[t * E + e];
      ref_select(column, T, capacity, best);
      for (int64_t i = 0; i < capacity; i++) picked[best[i] * E + e] = 1;
      assert_int_equal(r.c->routing.expert_count[e], capacity);
    }
    int64_t routed = 0;
    for (int64_t t = 0; t < T; t++) {
      double own[E];
      int32_t order[E];
      for (int e = 0; e < E; e++) own[e] = picked[t * E + e] ? score[t * E + e] : NAN;
      ref_select(own, E, room_for, order);
      for (int k = 0; k < room_for; k++) {
        bool there = picked[t * E + order[k]];
        assert_int_equal(r.c->routing.expert[t * room_for + k], there ? order[k] : -1);
        routed += there;
      }
    }
    assert_int_equal(r.c->stats.routed, routed);
    assert_int_equal(r.c->stats.dropped, capacity * E - routed);
    assert_true(room_for < E ? routed < capacity * E : routed == capacity * E);
    case_free(r.c);
  }
}

static void test_sinkhorn_golden(void **state) {
  (void)state;
  const cJSON *item;
  int cases = 0;
  cJSON_ArrayForEach(item, get(get(golden, "sinkhorn"), "cases")) {
    const cJSON *rows = cJSON_GetObjectItem(item, "logits");
    int tokens = cJSON_GetArraySize(rows), experts = cJSON_GetArraySize(cJSON_GetArrayItem(rows, 0));
    pmoe_gate_config cfg = gate_config(experts, cJSON_GetObjectItem(item, "k")->valueint);
    cfg.router = PMOE_ROUTER_HOST_LOGITS;
    cfg.choice = PMOE_CHOICE_SINKHORN;
    cfg.score = cfg.top_k == 1 ? PMOE_SCORE_SIGMOID : PMOE_SCORE_SOFTMAX;
    gate_case *c = case_new(cfg, tokens, 3, 1);
    float logits[64];
    /* A shift of a whole row changes nothing, and 1000 would overflow exp. */
    for (int shift = 0; shift <= 1000; shift += cfg.top_k == 1 ? 2000 : 1000) {
      for (int i = 0; i < tokens * experts; i++)
        logits[i] =
            (float)(shift + cJSON_GetArrayItem(cJSON_GetArrayItem(rows, i / experts), i % experts)->valuedouble);
      pmoe_mat mat = mat_f32(logits, tokens, experts);
      c->step.logits = &mat;
      for (int training = 0; training <= 1; training++) {
        c->step.training = training;
        case_forward(c);
        const cJSON *want = cJSON_GetObjectItem(item, training ? "indices" : "eval_indices");
        for (int i = 0; i < tokens * cfg.top_k; i++) {
          const cJSON *row = cJSON_GetArrayItem(want, i / cfg.top_k);
          assert_int_equal(c->routing.expert[i], cJSON_GetArrayItem(row, i % cfg.top_k)->valueint);
          row = cJSON_GetArrayItem(cJSON_GetObjectItem(item, "weights"), i / cfg.top_k);
          if (training)
            assert_near((double)c->routing.weight[i], cJSON_GetArrayItem(row, i % cfg.top_k)->valuedouble, 1e-6, i);
        }
      }
      for (int e = 0; e < experts; e++)
        assert_int_equal(c->routing.expert_count[e],
                         cJSON_GetArrayItem(cJSON_GetObjectItem(item, "train_counts"), e)->valueint);
    }
    case_free(c);
    cases++;
  }
  assert_int_equal(cases, 3);
}

/* Balances what top-k leaves on one expert; masked and non-finite tokens do not take part. */
static void test_sinkhorn_balances(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(E, 1);
  cfg.router = PMOE_ROUTER_HOST_LOGITS;
  cfg.choice = PMOE_CHOICE_SINKHORN;
  router_case r;
  set_up(&r, cfg, 2);
  for (int t = 0; t < T; t++) r.logits[t * E] += 8;
  mask_some(r.c, 5);
  r.logits[7 * E + 1] = NAN;
  case_forward(r.c);
  assert_true(r.c->stats.load_max_over_mean < 2);
  assert_int_equal(r.c->stats.nonfinite, 1);
  r.c->step.training = 0;
  case_forward(r.c);
  assert_true(r.c->stats.load_max_over_mean > 5);
  case_free(r.c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_all),
      cmocka_unit_test(test_repeats),
      cmocka_unit_test(test_cut),
      cmocka_unit_test(test_round_robin_is_even),
      cmocka_unit_test(test_hash),
      cmocka_unit_test(test_replay),
      cmocka_unit_test(test_host_logits),
      cmocka_unit_test(test_host_routing),
      cmocka_unit_test(test_expert_choice),
      cmocka_unit_test(test_sinkhorn_golden),
      cmocka_unit_test(test_sinkhorn_balances),
  };
  return cmocka_run_group_tests(tests, load_golden, free_golden);
}
