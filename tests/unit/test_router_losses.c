/* Losses that ranks and micro-batches share: values and gradients do not depend on how the tokens are cut up; the
 * selection bias; golden values. */
#include "test_router_reference.h"

#include "support/golden.h"

enum { T = 48, E = 8, K = 2, SEQUENCES = 4, MAX_PARTS = 4 };

/* One call of the router over some tokens: a rank, or a micro-batch, or both. */
typedef struct part {
  gate_case *c;
  int64_t first, tokens;
  pmoe_mat logits, dlogits;
  int64_t own[(SEQUENCES + 2) * (E + 1)], total[(SEQUENCES + 2) * (E + 1)];
  int64_t own_global[E + 1], total_global[E + 1];
  bool second_pass;
} part;

static float logits[T * E], dlogits[T * E], whole_dlogits[T * E];
static int32_t sequence[T];
static uint8_t mask[T];

/* The first pass records what this rank brings; the second replaces it by the sum over ranks. */
static pmoe_status sum(int64_t *inout, int64_t n, int64_t *own, const int64_t *total, bool second) {
  if (second) memcpy(inout, total, (size_t)n * sizeof *inout);
  else memcpy(own, inout, (size_t)n * sizeof *inout);
  return PMOE_OK;
}
static pmoe_status sum_micro(void *user, int64_t *inout, int64_t n, pmoe_stream stream) {
  (void)stream;
  part *p = user;
  return sum(inout, n, p->own, p->total, p->second_pass);
}
static pmoe_status sum_global(void *user, int64_t *inout, int64_t n, pmoe_stream stream) {
  (void)stream;
  part *p = user;
  return sum(inout, n, p->own_global, p->total_global, p->second_pass);
}

static pmoe_gate_config all_losses(pmoe_score score) {
  pmoe_gate_config cfg = gate_config(E, K);
  cfg.router = PMOE_ROUTER_HOST_LOGITS;
  cfg.score = score;
  cfg.aux_coef = 0.3f;
  cfg.seq_aux_coef = 0.2f;
  cfg.global_aux_coef = 0.4f;
  cfg.z_coef = 0.01f;
  return cfg;
}

static void begin_part(part *p, pmoe_gate_config cfg, int64_t first, int64_t tokens) {
  memset(p, 0, sizeof *p);
  p->c = case_new(cfg, tokens, 3, 1);
  p->first = first;
  p->tokens = tokens;
  p->logits = mat_f32(logits + first * E, tokens, E);
  p->dlogits = mat_f32(dlogits + first * E, tokens, E);
  p->c->step.logits = &p->logits;
  p->c->step.dlogits = &p->dlogits;
  p->c->step.num_sequences = SEQUENCES;
  p->c->step.sequence = sequence + first;
  p->c->step.token_mask = mask + first;
  p->c->step.token_mask_len = tokens;
  memset(p->c->dweight, 0, (size_t)(tokens * K) * sizeof(float));
}

static void fill(void) {
  uint64_t seed = 21;
  for (int i = 0; i < T * E; i++) logits[i] = 2 * draw(&seed);
  for (int t = 0; t < T; t++) {
    sequence[t] = t * 5 % SEQUENCES;
    mask[t] = t % 7 != 3;
  }
}

static void part_backward(part *p) {
  gate_case *c = p->c;
  pmoe_mat x = mat_f32(c->x, c->T, c->H), dx = mat_f32(c->dx, c->T, c->H);
  assert_int_equal(
      pmoe_gate_backward(c->gate, &c->params, &c->step, &x, &c->routing, c->dweight, 1, NULL, &dx, PMOE_BWD_ALL, NULL),
      PMOE_OK);
}

static void assert_same(const float *got, const float *want, int n, float tolerance) {
  for (int i = 0; i < n; i++)
    if (!(fabsf(got[i] - want[i]) <= tolerance * (fabsf(want[i]) + 1e-3f)))
      fail_msg("%d: got %.9g, want %.9g", i, (double)got[i], (double)want[i]);
}

typedef struct values {
  float aux, seq_aux, global_aux, z;
} values;

static values values_of(const gate_case *c) {
  return (values){c->stats.aux_loss, c->stats.seq_aux_loss, c->stats.global_aux_loss, c->stats.z_loss};
}

static values whole(pmoe_gate_config cfg) {
  part one;
  begin_part(&one, cfg, 0, T);
  case_forward(one.c);
  part_backward(&one);
  memcpy(whole_dlogits, dlogits, sizeof dlogits);
  values out = values_of(one.c);
  case_free(one.c);
  return out;
}

/* Uneven ranks, one of them empty, that share every loss. */
static void test_ranks(void **state) {
  (void)state;
  static const int64_t cuts[MAX_PARTS + 1] = {0, 5, 5, 31, T};
  fill();
  for (int score = PMOE_SCORE_SOFTMAX; score <= PMOE_SCORE_SQRT_SOFTPLUS; score++) {
    pmoe_gate_config cfg = all_losses((pmoe_score)score);
    values want = whole(cfg), got = {0};
    static part ranks[MAX_PARTS];
    for (int r = 0; r < MAX_PARTS; r++) {
      begin_part(&ranks[r], cfg, cuts[r], cuts[r + 1] - cuts[r]);
      assert_int_equal(pmoe_gate_set_loss_sums(ranks[r].c->gate, (pmoe_loss_sum){&ranks[r], sum_micro},
                                               (pmoe_loss_sum){&ranks[r], sum_global}),
                       PMOE_OK);
      ranks[r].c->step.training = 0; /* nothing of the first pass is kept */
      case_forward(ranks[r].c);
    }
    for (int r = 0; r < MAX_PARTS; r++) {
      for (int s = 0; s < MAX_PARTS; s++) {
        for (int i = 0; i < (SEQUENCES + 1) * (E + 1); i++) ranks[r].total[i] += ranks[s].own[i];
        for (int i = 0; i < E + 1; i++) ranks[r].total_global[i] += ranks[s].own_global[i];
      }
      ranks[r].second_pass = true;
      ranks[r].c->step.training = 1;
      case_forward(ranks[r].c);
      part_backward(&ranks[r]);
      values share = values_of(ranks[r].c);
      got.aux += share.aux;
      got.seq_aux += share.seq_aux;
      got.global_aux += share.global_aux;
      got.z += share.z;
    }
    assert_same(dlogits, whole_dlogits, T * E, 1e-5f);
    assert_same(&got.aux, &want.aux, 4, 1e-5f);
    for (int r = 0; r < MAX_PARTS; r++) case_free(ranks[r].c);
  }
}

/* Micro-batches of one step on one gate: the global loss of all, once all forwards have run before the first backward;
 * the z-loss with the step's denominator. A recomputed forward changes nothing. */
static void test_micro_batches(void **state) {
  (void)state;
  fill();
  pmoe_gate_config cfg = all_losses(PMOE_SCORE_SIGMOID);
  cfg.aux_coef = cfg.seq_aux_coef = 0;
  int64_t live = 0;
  for (int t = 0; t < T; t++) live += mask[t];
  values want = whole(cfg), got = {0};
  static part parts[3];
  static const int64_t cuts[] = {0, 20, 21, T};
  for (int m = 0; m < 3; m++) {
    begin_part(&parts[m], cfg, cuts[m], cuts[m + 1] - cuts[m]);
    parts[m].c->step.loss_tokens = live;
    if (m > 0) { /* one gate for all */
      pmoe_gate_destroy(parts[m].c->gate);
      parts[m].c->gate = parts[0].c->gate;
    }
    case_forward(parts[m].c);
    got.z += parts[m].c->stats.z_loss;
    got.global_aux = parts[m].c->stats.global_aux_loss;
  }
  parts[1].c->step.recompute = 1;
  case_forward(parts[1].c);
  assert_memory_equal(&parts[1].c->stats.global_aux_loss, &got.global_aux, sizeof(float));
  parts[1].c->step.training = 0; /* nor does an evaluation */
  parts[1].c->step.recompute = 0;
  case_forward(parts[1].c);
  parts[1].c->step.training = 1;
  for (int m = 2; m >= 0; m--) part_backward(&parts[m]);
  assert_same(dlogits, whole_dlogits, T * E, 1e-5f);
  assert_same(&got.global_aux, &want.global_aux, 1, 1e-5f);
  assert_same(&got.z, &want.z, 1, 1e-5f);
  /* The next step starts anew. */
  part next;
  begin_part(&next, cfg, 0, T);
  pmoe_gate_destroy(next.c->gate);
  next.c->gate = parts[0].c->gate;
  next.c->step.step++;
  case_forward(next.c);
  assert_same(&next.c->stats.global_aux_loss, &want.global_aux, 1, 1e-6f);
  next.c->gate = NULL;
  case_free(next.c);
  for (int m = 2; m >= 0; m--) {
    if (m > 0) parts[m].c->gate = NULL;
    case_free(parts[m].c);
  }
}

static pmoe_status fail_sum(void *user, int64_t *inout, int64_t n, pmoe_stream stream) {
  (void)user, (void)inout, (void)n, (void)stream;
  return PMOE_ERR_COMM;
}

static void test_failing_sum(void **state) {
  (void)state;
  fill();
  part p;
  begin_part(&p, all_losses(PMOE_SCORE_SOFTMAX), 0, T);
  pmoe_mat x = mat_f32(p.c->x, T, 3);
  for (int which = 0; which < 2; which++) {
    pmoe_loss_sum fails = {NULL, fail_sum}, none = {NULL, NULL};
    assert_int_equal(pmoe_gate_set_loss_sums(p.c->gate, which ? none : fails, which ? fails : none), PMOE_OK);
    assert_int_equal(pmoe_gate_forward(p.c->gate, &p.c->params, &p.c->step, &x, &p.c->routing, &p.c->stats, NULL),
                     PMOE_ERR_COMM);
  }
  case_free(p.c);
}

/* ---- selection bias ---- */

static void test_counts(void **state) {
  (void)state;
  fill();
  pmoe_gate_config cfg = gate_config(E, K);
  gate_case *c = case_new(cfg, T, 4, 2);
  int64_t count[E], want[E] = {0};
  case_forward(c);
  for (int e = 0; e < E; e++) want[e] = 2 * c->routing.expert_count[e];
  case_forward(c);
  c->step.recompute = 1;
  case_forward(c);
  c->step.recompute = 0;
  c->step.training = 0;
  case_forward(c);
  assert_int_equal(pmoe_gate_take_counts(c->gate, count), PMOE_OK);
  assert_memory_equal(count, want, sizeof want);
  memset(want, 0, sizeof want);
  assert_int_equal(pmoe_gate_take_counts(c->gate, count), PMOE_OK);
  assert_memory_equal(count, want, sizeof want);
  case_free(c);
}

static void test_bias_arguments(void **state) {
  (void)state;
  int64_t count[2] = {1, 3}, bad[2] = {1, -1};
  float bias[2] = {0.5f, 0.25f};
  assert_int_equal(pmoe_selection_bias_update(0, count, 0.1f, 0, bias), PMOE_ERR_ARG);
  assert_int_equal(pmoe_selection_bias_update(2, NULL, 0.1f, 0, bias), PMOE_ERR_ARG);
  assert_int_equal(pmoe_selection_bias_update(2, count, 0.1f, 0, NULL), PMOE_ERR_ARG);
  assert_int_equal(pmoe_selection_bias_update(2, count, NAN, 0, bias), PMOE_ERR_ARG);
  assert_int_equal(pmoe_selection_bias_update(2, count, 0.1f, 2, bias), PMOE_ERR_ARG);
  assert_int_equal(pmoe_selection_bias_update(2, bad, 0.1f, 0, bias), PMOE_ERR_ARG);
  assert_non_null(strstr(pmoe_last_error(), "count[1] is -1"));
  assert_true(bias[0] == 0.5f && bias[1] == 0.25f);
  int64_t large[2] = {INT64_MAX / 2, INT64_MAX / 2 - 1}; /* one choice apart */
  assert_int_equal(pmoe_selection_bias_update(2, large, 0.25f, 0, bias), PMOE_OK);
  assert_true(bias[0] == 0.25f && bias[1] == 0.5f);
}

/* ---- golden values ---- */

static int read_logits(const cJSON *rows, int at) {
  const cJSON *row, *value;
  cJSON_ArrayForEach(row, rows) cJSON_ArrayForEach(value, row) logits[at++] = (float)value->valuedouble;
  return at;
}

static void test_golden_sequences(void **state) {
  (void)state;
  const cJSON *losses = get(golden, "aux_losses"), *item = get(losses, "seq_aux_loss_S3_B2");
  assert_int_equal(read_logits(get(get(golden, "inputs"), "logits_6x8"), 0), 6 * E);
  memset(mask, 1, sizeof mask);
  pmoe_gate_config cfg = gate_config(E, K);
  cfg.router = PMOE_ROUTER_HOST_LOGITS;
  cfg.seq_aux_coef = 0.01f;
  for (int t = 0; t < 6; t++) sequence[t] = t % 2;
  part p;
  begin_part(&p, cfg, 0, 6);
  p.c->step.num_sequences = 2;
  case_forward(p.c);
  assert_close((double)p.c->stats.seq_aux_loss, get(item, "value")->valuedouble);
  for (int s = 0; s < 2; s++) {
    for (int t = 0; t < 6; t++) mask[t] = t % 2 == s;
    case_forward(p.c);
    assert_close((double)p.c->stats.seq_aux_loss, cJSON_GetArrayItem(get(item, "per_sequence"), s)->valuedouble);
  }
  case_free(p.c);
}

/* Two micro-batches on two ranks of three tokens: as one batch of twelve, and cut up. */
static void test_golden_global(void **state) {
  (void)state;
  const cJSON *item = get(get(golden, "aux_losses"), "global_aux_loss_2ranks_2mb"), *micro, *rank;
  double want = get(item, "definition_value (one value for the whole global batch)")->valuedouble;
  int at = 0;
  cJSON_ArrayForEach(micro, get(item, "microbatch_rank_logits")) cJSON_ArrayForEach(rank, micro) at =
      read_logits(rank, at);
  assert_int_equal(at, 12 * E);
  memset(mask, 1, sizeof mask);
  pmoe_gate_config cfg = gate_config(E, K);
  cfg.router = PMOE_ROUTER_HOST_LOGITS;
  cfg.global_aux_coef = 0.01f;
  part p, second;
  begin_part(&p, cfg, 0, 12);
  case_forward(p.c);
  assert_close((double)p.c->stats.global_aux_loss, want);
  case_free(p.c);
  begin_part(&p, cfg, 0, 6);
  begin_part(&second, cfg, 6, 6);
  case_forward(p.c);
  pmoe_gate *own = second.c->gate;
  second.c->gate = p.c->gate;
  case_forward(second.c);
  assert_close((double)second.c->stats.global_aux_loss, want);
  second.c->gate = own;
  case_free(second.c);
  case_free(p.c);
}

/* The first six rows on two ranks: their shares, and their sum. */
static values golden_shares(pmoe_gate_config cfg, float *shares, float (*share_of)(const gate_case *c)) {
  static part ranks[2];
  values got = {0};
  for (int pass = 0; pass < 2; pass++) {
    for (int r = 0; r < 2; r++) {
      if (pass == 0) begin_part(&ranks[r], cfg, 3 * r, 3);
      ranks[r].second_pass = pass == 1;
      ranks[r].c->step.training = 0;
      assert_int_equal(
          pmoe_gate_set_loss_sums(ranks[r].c->gate, (pmoe_loss_sum){&ranks[r], sum_micro}, (pmoe_loss_sum){NULL, NULL}),
          PMOE_OK);
      for (int i = 0; i < E + 1 && pass == 1; i++) ranks[r].total[i] = ranks[0].own[i] + ranks[1].own[i];
      case_forward(ranks[r].c);
    }
  }
  for (int r = 0; r < 2; r++) {
    shares[r] = share_of(ranks[r].c);
    got.aux += ranks[r].c->stats.aux_loss;
    got.z += ranks[r].c->stats.z_loss;
    case_free(ranks[r].c);
  }
  return got;
}

static float aux_of(const gate_case *c) { return c->stats.aux_loss; }
static float z_of(const gate_case *c) { return c->stats.z_loss; }

static void test_golden_ranks(void **state) {
  (void)state;
  const cJSON *aux = get(get(golden, "aux_losses"), "aux_loss_split_2_ranks"), *z = get(golden, "z_loss");
  float shares[2];
  assert_int_equal(read_logits(get(get(golden, "inputs"), "logits_6x8"), 0), 6 * E);
  memset(mask, 1, sizeof mask);
  pmoe_gate_config cfg = gate_config(E, K);
  cfg.router = PMOE_ROUTER_HOST_LOGITS;
  cfg.aux_coef = 0.01f;
  assert_close((double)golden_shares(cfg, shares, aux_of).aux, get(aux, "sum")->valuedouble);
  for (int r = 0; r < 2; r++)
    assert_close((double)shares[r], cJSON_GetArrayItem(get(aux, "partial_values"), r)->valuedouble);
  cfg.aux_coef = 0;
  cfg.z_coef = (float)get(z, "coeff")->valuedouble;
  const cJSON *split = get(z, "split_2_ranks"), *padding = get(z, "padding_split_2_ranks");
  assert_close((double)golden_shares(cfg, shares, z_of).z, get(split, "sum")->valuedouble);
  for (int r = 0; r < 2; r++) assert_close((double)shares[r], cJSON_GetArrayItem(get(split, "values"), r)->valuedouble);
  for (int t = 0; t < 6; t++) mask[t] = (uint8_t)cJSON_GetArrayItem(get(padding, "valid"), t)->valueint;
  assert_close((double)golden_shares(cfg, shares, z_of).z, get(padding, "correct_mean_over_all_valid")->valuedouble);
  memset(mask, 0, sizeof mask);
  assert_true((double)golden_shares(cfg, shares, z_of).z == get(z, "all_masked_value")->valuedouble);
}

static void test_golden_plain_counts(void **state) {
  (void)state;
  const cJSON *item = get(get(golden, "aux_losses"), "aux_map_vs_dispatch_map (issue 2767)");
  static const double biases[] = {0.5, -0.25, 0.125, 0.0, -0.5, 0.375, -0.125, 0.25};
  assert_int_equal(read_logits(get(get(golden, "inputs"), "logits_6x8"), 0), 6 * E);
  memset(mask, 1, sizeof mask);
  for (int plain = 0; plain <= 1; plain++) {
    pmoe_gate_config cfg = gate_config(E, get(item, "k")->valueint);
    cfg.router = PMOE_ROUTER_HOST_LOGITS;
    cfg.score = PMOE_SCORE_SIGMOID;
    cfg.selection_bias = 1;
    cfg.num_groups = 4;
    cfg.groups_kept = 2;
    cfg.aux_coef = 0.01f;
    cfg.aux_plain_topk = plain;
    part p;
    begin_part(&p, cfg, 0, 6);
    for (int e = 0; e < E; e++) p.c->selection_bias[e] = (float)biases[e];
    case_forward(p.c);
    const cJSON *want = get(item, plain ? "aux_counts_ignoring_bias_and_groups" : "dispatch_counts");
    for (int e = 0; e < E; e++) {
      assert_int_equal(p.c->routing.loss_sums[e], cJSON_GetArrayItem(want, e)->valueint);
      assert_int_equal(p.c->routing.expert_count[e], cJSON_GetArrayItem(get(item, "dispatch_counts"), e)->valueint);
    }
    case_free(p.c);
  }
}

static void test_golden_bias_update(void **state) {
  (void)state;
  const cJSON *item = get(golden, "bias_update");
  int64_t count[E];
  for (int e = 0; e < E; e++) count[e] = cJSON_GetArrayItem(get(item, "counts"), e)->valueint;
  for (int centred = 0; centred <= 1; centred++) {
    float bias[E] = {0};
    const cJSON *want = get(item, centred ? "torchtitan_mean_centred" : "megatron");
    assert_int_equal(pmoe_selection_bias_update(E, count, (float)get(item, "rate")->valuedouble, centred, bias),
                     PMOE_OK);
    for (int e = 0; e < E; e++) assert_close((double)bias[e], cJSON_GetArrayItem(want, e)->valuedouble);
  }
  /* A count that bfloat16 would round past the mean. */
  const cJSON *trap = get(item, "bf16_count_trap");
  int64_t mean = get(trap, "row_average")->valueint, two[2];
  two[0] = get(trap, "true_count")->valueint;
  two[1] = 2 * mean - two[0];
  float bias[2] = {0};
  assert_int_equal(pmoe_selection_bias_update(2, two, 1, 0, bias), PMOE_OK);
  assert_true((double)bias[0] == get(trap, "sign_true")->valuedouble && bias[1] == -bias[0]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_ranks),          cmocka_unit_test(test_micro_batches),
      cmocka_unit_test(test_failing_sum),    cmocka_unit_test(test_counts),
      cmocka_unit_test(test_bias_arguments), cmocka_unit_test(test_golden_sequences),
      cmocka_unit_test(test_golden_global),  cmocka_unit_test(test_golden_plain_counts),
      cmocka_unit_test(test_golden_ranks),   cmocka_unit_test(test_golden_bias_update),
  };
  return cmocka_run_group_tests(tests, load_golden, free_golden);
}
