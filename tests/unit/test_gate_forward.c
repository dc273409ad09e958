/* The router's forward against the naive one, over modes, sizes and odd inputs. */
#include "test_gate_reference.h"

#include "gating/gate_cpu.h"

static void run(pmoe_gate_config cfg, int64_t T, int64_t H, int training, int mask_every, int32_t threads) {
  gate_case *c = case_new(cfg, T, H, threads);
  c->step.training = training;
  if (mask_every) mask_some(c, mask_every);
  case_forward(c);
  check_forward(c, 1e-5);
  case_free(c);
}

static void test_every_mode(void **state) {
  (void)state;
  const float factors[] = {0, 0.5f, 1, 1.25f, 8};
  for (int after = 0; after <= 1; after++)
    for (int norm = 0; norm <= PMOE_NORM_AFTER_DROP; norm++)
      for (int drop = 0; drop <= PMOE_DROP_RANDOM; drop++)
        for (size_t f = 0; f < sizeof factors / sizeof *factors; f++)
          for (int K = 1; K <= 4; K++) {
            if (K == 1 && (after || norm)) continue;
            pmoe_gate_config cfg = gate_config(6, K);
            cfg.softmax_after_topk = after;
            cfg.norm = (pmoe_norm)norm;
            cfg.drop = (pmoe_drop)drop;
            cfg.capacity_factor = factors[f];
            cfg.eval_capacity_factor = 0.75f;
            cfg.aux_coef = 0.01f;
            cfg.z_coef = 0.001f;
            cfg.aux_first_choice_only = K == 3;
            cfg.weight_scale = K == 4 ? 2.5f : 0;
            cfg.bias = drop == PMOE_DROP_PROBS;
            run(cfg, 150, 5, f != 2, f % 2 ? 3 : 0, 1 + K % 3);
          }
}

static void test_sizes(void **state) {
  (void)state;
  const int64_t tokens[] = {0, 1, 2, 63, 64, 65, 200};
  const int32_t experts[] = {1, 2, 3, 5, 8, 17, 64, 129, 300};
  for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
    for (size_t j = 0; j < sizeof experts / sizeof *experts; j++)
      for (int32_t K = 1; K <= experts[j]; K = K < 10 ? K + 1 : K * 2 + 1) {
        if (tokens[i] == 200 && K > 5) continue;
        pmoe_gate_config cfg = gate_config(experts[j], K);
        cfg.norm = K > 1 ? PMOE_NORM_AFTER_DROP : PMOE_NORM_NONE;
        cfg.aux_coef = 1;
        run(cfg, tokens[i], 1 + (int64_t)j, 1, 0, 2);
      }
}

static void test_noise(void **state) {
  (void)state;
  for (int K = 1; K <= 3; K++) {
    pmoe_gate_config cfg = gate_config(7, K);
    cfg.jitter = 0.3f;
    cfg.gumbel = K <= 2;
    cfg.aux_coef = cfg.z_coef = 0.5f;
    run(cfg, 130, 9, 1, 4, 2);
    run(cfg, 130, 9, 0, 4, 2);
  }
}

static void test_many_experts(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(512, 1);
  gate_case *c = case_new(cfg, 3, 8, 1);
  memset(c->w, 0, 512 * 8 * 4);
  for (int h = 0; h < 8; h++) c->w[338 * 8 + h] = c->x[h] > 0 ? 1.0f : -1.0f;
  case_forward(c);
  assert_int_equal(c->routing.expert[0], 338);
  check_forward(c, 1e-5);
  case_free(c);
  cfg = gate_config(2048, 64);
  cfg.capacity_factor = 1;
  run(cfg, 70, 16, 1, 0, 2);
  run(gate_config(4096, 100), 3, 16, 1, 0, 1);
}

/* Selection alone, on logits that no product gives: NaN, infinities, equals, both zeros. */
static void test_selection_of_odd_values(void **state) {
  (void)state;
  const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1, 1, 1, 2, -3, -FLT_MAX, FLT_MAX, FLT_MIN};
  const int32_t experts[] = {1, 2, 5, 8, 16, 40, 128, 200};
  uint64_t seed = 3;
  for (size_t j = 0; j < sizeof experts / sizeof *experts; j++) {
    int32_t E = experts[j];
    for (int32_t K = 1; K <= E; K = K < 9 ? K + 1 : K * 3) {
      size_t cells = (size_t)E * LANES, picks = (size_t)K * LANES;
      pmoei_gate_tile tile = {.logits = room(cells, 4),
                              .open = room(cells, 4),
                              .expert = room(picks, 4),
                              .value = room(picks, 4),
                              .key = room((size_t)E, 4),
                              .order = room(2 * (size_t)K, 8)};
      for (size_t i = 0; i < cells; i++) {
        float r = draw(&seed) + 1; /* lane 0 all NaN, lane 1 all -inf, others a mix, from only odd values to few */
        bool plain = r * 32 > (float)(70 - i % LANES);
        tile.logits[i] = i % LANES == 0 ? NAN : i % LANES == 1 ? -INFINITY : plain ? r : odd[(size_t)(r * 6.99f)];
      }
      pmoei_gate_best(tile.logits, E, K, tile.expert, tile.value, tile.open, &tile);
      double *lane = room((size_t)E, 8);
      int32_t *want = room((size_t)K, 4);
      for (size_t l = 0; l < LANES; l++) {
        for (size_t e = 0; e < (size_t)E; e++) lane[e] = (double)tile.logits[e * LANES + l];
        ref_select(lane, E, K, want);
        for (size_t k = 0; k < (size_t)K; k++) {
          assert_int_equal(tile.expert[k * LANES + l], want[k]);
          assert_memory_equal(&tile.value[k * LANES + l], &tile.logits[(size_t)want[k] * LANES + l], 4);
        }
      }
      void *all[] = {tile.logits, tile.open, tile.expert, tile.value, tile.key, tile.order, lane, want};
      for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    }
  }
}

/* Token 2 of x is all NaN, token 5 overflows to +inf, and expert 1 is switched off by its bias. */
static void test_nonfinite_rows(void **state) {
  (void)state;
  for (int after = 0; after <= 1; after++) {
    pmoe_gate_config cfg = gate_config(128, 8);
    cfg.softmax_after_topk = after;
    cfg.norm = PMOE_NORM_AFTER_DROP;
    cfg.aux_coef = cfg.z_coef = 1;
    gate_case *clean = case_new(cfg, 70, 4, 1), *c = case_new(cfg, 70, 4, 2);
    case_forward(clean);
    for (int h = 0; h < 4; h++) {
      c->x[2 * 4 + h] = NAN;
      c->x[5 * 4 + h] = c->w[h] > 0 ? 3e38f : -3e38f;
      c->w[h] *= 100;
      clean->w[h] *= 100;
    }
    case_forward(clean);
    case_forward(c);
    assert_int_equal(c->stats.nonfinite, 2);
    for (int k = 0; k < 8; k++) assert_int_equal(c->routing.expert[2 * 8 + k], k);
    assert_true(isnan(c->routing.weight[2 * 8]));
    assert_true(isfinite(c->stats.aux_loss) && isfinite(c->stats.z_loss));
    for (int i = 0; i < 70 * 8; i++) {
      if (i / 8 == 2 || i / 8 == 5) continue;
      assert_int_equal(c->routing.expert[i], clean->routing.expert[i]);
      assert_memory_equal(&c->routing.weight[i], &clean->routing.weight[i], 4);
    }
    /* the losses are those of the 68 others */
    clean->mask[2] = clean->mask[5] = 0;
    use_mask(clean);
    case_forward(clean);
    assert_memory_equal(&c->stats.aux_loss, &clean->stats.aux_loss, 4);
    assert_memory_equal(&c->stats.z_loss, &clean->stats.z_loss, 4);
    case_free(c);
    case_free(clean);
  }
}

static void test_expert_switched_off(void **state) {
  (void)state;
  for (int K = 2; K <= 5; K++) {
    pmoe_gate_config cfg = gate_config(5, K);
    cfg.bias = 1;
    gate_case *c = case_new(cfg, 80, 6, 1);
    c->b[1] = -INFINITY;
    case_forward(c);
    assert_int_equal(c->stats.nonfinite, 80);
    for (int i = 0; i < 80 * K; i++) {
      assert_true(isfinite(c->routing.weight[i]));
      if (c->routing.expert[i] == 1) assert_true(c->routing.weight[i] == 0 && K == 5);
    }
    check_forward(c, 1e-5);
    case_free(c);
  }
}

/* A survivor whose probability vanishes beside the dropped choice weighs nothing, rather than 0/0. Token 0 chooses
 * experts 0 and 2, token 1 experts 0 and 1, each with room for one. */
static void test_vanishing_survivor(void **state) {
  (void)state;
  for (int after = 0; after <= 1; after++) {
    pmoe_gate_config cfg = gate_config(3, 2);
    cfg.bias = 1;
    cfg.norm = PMOE_NORM_AFTER_DROP;
    cfg.capacity_factor = 0.5f;
    cfg.softmax_after_topk = after;
    gate_case *c = case_new(cfg, 2, 1, 1);
    const float w[] = {0, -10, 10}, b[] = {500, 0, 0}, x[] = {1, -1}, weights[] = {1, 0, 0, 0};
    const int32_t experts[] = {0, 2, 0, 1};
    const int64_t slots[] = {0, 0, -1, 0};
    memcpy(c->w, w, sizeof w);
    memcpy(c->b, b, sizeof b);
    memcpy(c->x, x, sizeof x);
    case_forward(c);
    assert_memory_equal(c->routing.expert, experts, sizeof experts);
    assert_memory_equal(c->routing.slot, slots, sizeof slots);
    assert_memory_equal(c->routing.weight, weights, sizeof weights);
    case_backward(c, 1);
    for (int i = 0; i < 6; i++) assert_true(c->dlogits[i] == 0);
    case_free(c);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_mode),
      cmocka_unit_test(test_sizes),
      cmocka_unit_test(test_noise),
      cmocka_unit_test(test_many_experts),
      cmocka_unit_test(test_nonfinite_rows),
      cmocka_unit_test(test_selection_of_odd_values),
      cmocka_unit_test(test_expert_switched_off),
      cmocka_unit_test(test_vanishing_survivor),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
