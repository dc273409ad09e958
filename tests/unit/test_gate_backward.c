/* The router's gradients against finite differences of the naive router in double precision, over modes and losses. */
#include "test_gate_reference.h"

#include "core/dtype.h"

/* sum weight dweight + loss_scale (aux + z), for fixed choices and drops. x is before jitter. */
static double objective(const gate_case *c, const double *x, const double *w, const double *b, float loss_scale) {
  int64_t E = c->cfg.num_experts, K = c->cfg.top_k;
  double *seen = room((size_t)(c->T * c->H), 8), *buffer = room((size_t)(E + 2 * K), 8), *score = buffer + E,
         *weight = score + K;
  double total = 0, aux, z;
  for (int64_t i = 0; i < c->T * c->H; i++) seen[i] = x[i] * ref_factor(c, i / c->H, i % c->H);
  for (int64_t t = 0; t < c->T; t++) {
    if (is_masked(c, t)) continue;
    ref_logits(c, seen, w, b, t, buffer);
    ref_scores(c, buffer, c->routing.expert + t * K, score);
    ref_weights(c, score, c->routing.slot + t * K, weight);
    for (int64_t k = 0; k < K; k++)
      if (c->routing.slot[t * K + k] >= 0) total += weight[k] * (double)c->dweight[t * K + k];
  }
  ref_losses(c, seen, w, b, c->routing.expert, &aux, &z);
  free(seen);
  free(buffer);
  return total + (double)loss_scale * (aux + z);
}

static void check_array(const gate_case *c, double *x, double *w, double *b, double *varied, const float *gradient,
                        int64_t n, float loss_scale, double tolerance) {
  const double h = 1e-5;
  for (int64_t i = 0; i < n; i++) {
    double kept = varied[i];
    varied[i] = kept + h;
    double up = objective(c, x, w, b, loss_scale);
    varied[i] = kept - h;
    double down = objective(c, x, w, b, loss_scale);
    varied[i] = kept;
    double want = (up - down) / (2 * h);
    if (!(fabs((double)gradient[i] - want) <= tolerance * (1 + fabs(want))))
      fail_msg("element %lld: gradient %.9g, by differences %.9g", (long long)i, (double)gradient[i], want);
  }
}

static void check_gradients(const gate_case *c, float loss_scale) {
  int64_t E = c->cfg.num_experts, nx = c->T * c->H, nw = E * c->H;
  double *x = widen(c->x, nx), *w = widen(c->w, nw), *b = widen(c->b, E);
  check_array(c, x, w, b, x, c->dx, nx, loss_scale, 3e-6);
  check_array(c, x, w, b, w, c->dw, nw, loss_scale, 2e-5);
  if (c->cfg.bias) check_array(c, x, w, b, b, c->db, E, loss_scale, 2e-5);
  free(x);
  free(w);
  free(b);
}

static void run(pmoe_gate_config cfg, int64_t T, int64_t H, int mask_every, float loss_scale) {
  gate_case *c = case_new(cfg, T, H, 2);
  if (mask_every) mask_some(c, mask_every);
  case_forward(c);
  case_backward(c, loss_scale);
  check_gradients(c, loss_scale);
  case_free(c);
}

static void test_every_mode(void **state) {
  (void)state;
  const float factors[] = {0, 0.6f, 1.3f};
  for (int losses = 0; losses < 5; losses++)
    for (int after = 0; after <= 1; after++)
      for (int norm = 0; norm <= PMOE_NORM_AFTER_DROP; norm++)
        for (int K = 1; K <= 3; K++) {
          if (K == 1 && (after || norm)) continue;
          pmoe_gate_config cfg = gate_config(5, K);
          cfg.softmax_after_topk = after;
          cfg.norm = (pmoe_norm)norm;
          cfg.capacity_factor = factors[(losses + K) % 3];
          cfg.drop = (pmoe_drop)((norm + K) % 3);
          cfg.aux_coef = losses & 1 ? 0.7f : 0;
          cfg.z_coef = losses & 2 ? 0.3f : 0;
          if (losses == 4) {
            cfg.aux_coef = 0.4f;
            cfg.aux_first_choice_only = 1;
          }
          cfg.weight_scale = K == 3 ? 2.5f : 0;
          cfg.bias = (losses + norm) % 2;
          run(cfg, 21, 3, losses % 2 ? 4 : 0, 1.5f);
        }
}

static void test_noise(void **state) {
  (void)state;
  for (int K = 1; K <= 2; K++) {
    pmoe_gate_config cfg = gate_config(6, K);
    cfg.jitter = 0.4f;
    cfg.gumbel = 1;
    cfg.aux_coef = cfg.z_coef = 0.5f;
    run(cfg, 19, 6, 3, 1);
  }
}

static void test_several_blocks(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(4, 2);
  cfg.aux_coef = cfg.z_coef = 0.5f;
  cfg.capacity_factor = 0.9f;
  cfg.norm = PMOE_NORM_AFTER_DROP;
  run(cfg, 135, 2, 5, 2);
}

/* More experts, columns and tokens than one patch of the weight gradient has, against the plain product. */
static void test_products(void **state) {
  (void)state;
  enum { T = 300, H = 70, E = 600 };
  for (int jitter = 0; jitter <= 1; jitter++) {
    pmoe_gate_config cfg = gate_config(E, 2);
    cfg.bias = 1;
    cfg.jitter = jitter ? 0.25f : 0;
    gate_case *c = case_new(cfg, T, H, 2);
    case_forward(c);
    case_backward(c, 1);
    double *x = ref_input(c);
    for (int e = 0; e < E; e++) {
      double column = 0;
      for (int t = 0; t < T; t++) column += (double)c->dlogits[t * E + e];
      assert_true(fabs((double)c->db[e] - column) < 1e-6);
      for (int h = 0; h < H; h++) {
        double want = 0;
        for (int t = 0; t < T; t++) want += (double)c->dlogits[t * E + e] * x[t * H + h];
        assert_true(fabs((double)c->dw[e * H + h] - want) < 1e-6);
      }
    }
    for (int t = 0; t < T; t++) {
      for (int h = 0; h < H; h++) {
        double want = 0;
        for (int e = 0; e < E; e++) want += (double)c->dlogits[t * E + e] * (double)c->w[e * H + h];
        assert_true(fabs((double)c->dx[t * H + h] - want * ref_factor(c, t, h)) < 1e-6);
      }
    }
    free(x);
    case_free(c);
  }
}

/* Gradients add to what was there; x with padding between rows; in two parts, the same bits. */
static void test_accumulation_and_parts(void **state) {
  (void)state;
  enum { T = 300, H = 70, E = 9, K = 2, LD = 83 };
  for (int jitter = 0; jitter <= 1; jitter++) {
    pmoe_gate_config cfg = gate_config(E, K);
    cfg.bias = 1;
    cfg.aux_coef = cfg.z_coef = 0.1f;
    cfg.jitter = jitter ? 0.1f : 0;
    gate_case *c = case_new(cfg, T, H, 2);
    mask_some(c, 7);
    case_forward(c);
    case_backward(c, 1);
    float *wide = room(T * LD, 4), *dx = room(T * LD, 4), *dw = room(E * H, 4), *db = room(E, 4),
          *dlogits = room(T * E, 4);
    for (int t = 0; t < T; t++) {
      memcpy(wide + t * LD, c->x + t * H, H * 4);
      for (int h = 0; h < H; h++) dx[t * LD + h] = (float)(h - t);
    }
    for (int i = 0; i < E * H; i++) dw[i] = (float)i;
    for (int i = 0; i < E; i++) db[i] = (float)-i;
    pmoe_gate_params params = c->params;
    params.weight_grad = dw;
    params.bias_grad = db;
    pmoe_mat x = {wide, PMOE_F32, T, H, LD}, dx_mat = {dx, PMOE_F32, T, H, LD};
    assert_int_equal(pmoe_gate_backward(c->gate, &params, &c->step, &x, &c->routing, c->dweight, 1, dlogits, &dx_mat,
                                        PMOE_BWD_INPUT, NULL),
                     PMOE_OK);
    assert_memory_equal(dlogits, c->dlogits, T * E * 4);
    for (int i = 0; i < E * H; i++) assert_true(dw[i] == (float)i);
    for (int t = 0; t < T; t++)
      for (int h = 0; h < LD; h++) {
        if (h >= H) assert_true(isnan(dx[t * LD + h]));
        else assert_true(fabsf(dx[t * LD + h] - (float)(h - t) - c->dx[t * H + h]) <= 2e-5f);
      }
    memset(dx, 0, T * LD * 4);
    assert_int_equal(
        pmoe_gate_backward(c->gate, &params, &c->step, &x, &c->routing, NULL, 1, dlogits, NULL, PMOE_BWD_WEIGHT, NULL),
        PMOE_OK);
    for (int i = 0; i < T * LD; i++) assert_true(dx[i] == 0);
    for (int i = 0; i < E * H; i++) assert_true(fabsf(dw[i] - (float)i - c->dw[i]) <= 1e-4f);
    for (int i = 0; i < E; i++) assert_true(fabsf(db[i] + (float)i - c->db[i]) <= 1e-5f);
    /* from zero, and without room for dlogits: the same bits as ALL gave */
    memset(dw, 0, E * H * 4);
    memset(db, 0, E * 4);
    assert_int_equal(pmoe_gate_backward(c->gate, &params, &c->step, &x, &c->routing, c->dweight, 1, NULL, &dx_mat,
                                        PMOE_BWD_ALL, NULL),
                     PMOE_OK);
    assert_memory_equal(dw, c->dw, E * H * 4);
    assert_memory_equal(db, c->db, E * 4);
    for (int t = 0; t < T; t++) assert_memory_equal(dx + t * LD, c->dx + t * H, H * 4);
    free(wide);
    free(dx);
    free(dw);
    free(db);
    free(dlogits);
    case_free(c);
  }
}

static void test_bf16(void **state) {
  (void)state;
  enum { T = 90, H = 37, E = 6, K = 2 };
  pmoe_gate_config cfg = gate_config(E, K);
  cfg.norm = PMOE_NORM_AFTER_DROP;
  cfg.capacity_factor = 1;
  cfg.aux_coef = cfg.z_coef = 0.2f;
  gate_case *c = case_new(cfg, T, H, 2);
  pmoei_bf16 *half = room(T * H, 2), *dx_half = room(T * H, 2);
  pmoei_from_f32(half, PMOE_BF16, c->x, T * H);
  pmoei_to_f32(c->x, half, PMOE_BF16, T * H);
  case_forward(c);
  case_backward(c, 1);
  float *weight = room(T * K, 4), *dw = room(E * H, 4), *dx = room(T * H, 4);
  memcpy(weight, c->routing.weight, T * K * 4);
  memset(c->routing.weight, 0xff, T * K * 4);
  pmoe_mat x = {half, PMOE_BF16, T, H, H};
  assert_int_equal(pmoe_gate_forward(c->gate, &c->params, &c->step, &x, &c->routing, &c->stats, NULL), PMOE_OK);
  assert_memory_equal(weight, c->routing.weight, T * K * 4); /* widening is exact */
  check_forward(c, 1e-5);
  pmoe_gate_params params = c->params;
  params.weight_grad = dw;
  memset(dw, 0, E * H * 4);
  memset(dx, 0, T * H * 4);
  pmoe_mat dx_mat = mat_f32(dx, T, H);
  assert_int_equal(
      pmoe_gate_backward(c->gate, &params, &c->step, &x, &c->routing, c->dweight, 1, NULL, &dx_mat, PMOE_BWD_ALL, NULL),
      PMOE_OK);
  assert_memory_equal(dx, c->dx, T * H * 4);
  assert_memory_equal(dw, c->dw, E * H * 4);
  for (int i = 0; i < T * H; i++) dx_half[i] = pmoei_f32_to_bf16(0.25f);
  dx_mat = (pmoe_mat){dx_half, PMOE_BF16, T, H, H};
  assert_int_equal(pmoe_gate_backward(c->gate, &params, &c->step, &x, &c->routing, c->dweight, 1, c->dlogits, &dx_mat,
                                      PMOE_BWD_INPUT, NULL),
                   PMOE_OK);
  for (int i = 0; i < T * H; i++) assert_int_equal(dx_half[i], pmoei_f32_to_bf16(0.25f + c->dx[i]));
  free(half);
  free(dx_half);
  free(weight);
  free(dw);
  free(dx);
  case_free(c);
}

/* Whatever a masked token's x and dweight hold, nothing of it arrives anywhere; dropped choices' dweight is not read.
 */
static void test_masked_tokens_are_inert(void **state) {
  (void)state;
  for (int mode = 0; mode < 4; mode++) {
    pmoe_gate_config cfg = gate_config(5, 2);
    cfg.norm = mode & 1 ? PMOE_NORM_BEFORE_DROP : PMOE_NORM_NONE;
    cfg.capacity_factor = 0.8f;
    cfg.bias = 1;
    if (mode & 2) cfg.aux_coef = cfg.z_coef = 1;
    gate_case *c = case_new(cfg, 100, 11, 2);
    mask_some(c, 3);
    case_forward(c);
    case_backward(c, 1);
    gate_case *d = case_new(cfg, 100, 11, 2);
    mask_some(d, 3);
    for (int64_t t = 0; t < 100; t++) {
      for (int64_t h = 0; h < 11; h++)
        if (is_masked(d, t)) d->x[t * 11 + h] = NAN;
      for (int64_t k = 0; k < 2; k++)
        if (c->routing.slot[t * 2 + k] < 0) d->dweight[t * 2 + k] = NAN;
    }
    case_forward(d);
    case_backward(d, 1);
    assert_int_equal(d->stats.nonfinite, 0);
    assert_memory_equal(c->routing.weight, d->routing.weight, 200 * 4);
    assert_memory_equal(c->dlogits, d->dlogits, 100 * 5 * 4);
    assert_memory_equal(c->dx, d->dx, 100 * 11 * 4);
    assert_memory_equal(c->dw, d->dw, 5 * 11 * 4);
    assert_memory_equal(c->db, d->db, 5 * 4);
    case_free(c);
    case_free(d);
  }
}

/* A token with NaN logits has no part in the losses' gradients and leaves other tokens' dx alone. */
static void test_nonfinite_token(void **state) {
  (void)state;
  for (int norm = 0; norm <= 1; norm++) {
    pmoe_gate_config cfg = gate_config(6, 2);
    cfg.norm = norm ? PMOE_NORM_AFTER_DROP : PMOE_NORM_NONE;
    cfg.aux_coef = cfg.z_coef = 1;
    gate_case *c = case_new(cfg, 70, 5, 1), *without = case_new(cfg, 70, 5, 1);
    without->mask[4] = 0;
    use_mask(without);
    for (int h = 0; h < 5; h++) c->x[4 * 5 + h] = NAN;
    case_forward(c);
    case_backward(c, 1);
    case_forward(without);
    case_backward(without, 1);
    for (int64_t t = 0; t < 70; t++) {
      if (t == 4) continue;
      assert_memory_equal(c->dx + t * 5, without->dx + t * 5, 5 * 4);
      assert_memory_equal(c->dlogits + t * 6, without->dlogits + t * 6, 6 * 4);
    }
    assert_true(isnan(c->dlogits[4 * 6]));
    case_free(c);
    case_free(without);
  }
}

/* An expert switched off by -inf gets no gradient and spoils none. */
static void test_expert_switched_off(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(5, 2);
  cfg.bias = 1;
  gate_case *c = case_new(cfg, 40, 4, 1);
  c->b[3] = -INFINITY;
  case_forward(c);
  case_backward(c, 1);
  for (int t = 0; t < 40; t++) {
    assert_true(c->dlogits[t * 5 + 3] == 0);
    for (int e = 0; e < 5; e++) assert_true(isfinite(c->dlogits[t * 5 + e]));
  }
  double *x = widen(c->x, 160), *w = widen(c->w, 20), *b = widen(c->b, 5);
  check_array(c, x, w, b, x, c->dx, 160, 1, 3e-6);
  free(x);
  free(w);
  free(b);
  case_free(c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_mode),
      cmocka_unit_test(test_noise),
      cmocka_unit_test(test_several_blocks),
      cmocka_unit_test(test_products),
      cmocka_unit_test(test_accumulation_and_parts),
      cmocka_unit_test(test_bf16),
      cmocka_unit_test(test_masked_tokens_are_inert),
      cmocka_unit_test(test_nonfinite_token),
      cmocka_unit_test(test_expert_switched_off),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
