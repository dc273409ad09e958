/* What a router refuses: settings that do not go together, and steps that lack what it needs. Each error names the
 * setting, its value and what was expected. */
#include "test_router_reference.h"

#include "core/vmath.h"
#include "support/asserts.h"

enum { E = 8, K = 2, T = 6 };

typedef struct refusal {
  const char *word;
  pmoe_gate_config cfg;
} refusal;

#define CONFIG_OF(choices, ...)                                                                                        \
  (pmoe_gate_config) { .size = sizeof(pmoe_gate_config), .num_experts = E, .top_k = (choices), __VA_ARGS__ }
#define CONFIG(...) CONFIG_OF(K, __VA_ARGS__)

static void test_config(void **state) {
  (void)state;
  const refusal refused[] = {
      {"score is 3", CONFIG(.score = (pmoe_score)3)},
      {"score is -1", CONFIG(.score = (pmoe_score)-1)},
      {"router is 3", CONFIG(.router = (pmoe_router)3)},
      {"choice is 6", CONFIG(.choice = (pmoe_choice)6)},
      {"selection_bias is 2", CONFIG(.selection_bias = 2)},
      {"group_score_top2 is 2", CONFIG(.group_score_top2 = 2)},
      {"aux_plain_topk is -1", CONFIG(.aux_plain_topk = -1)},
      {"seq_aux_coef", CONFIG(.seq_aux_coef = -1)},
      {"global_aux_coef", CONFIG(.global_aux_coef = NAN)},
      {"softmax_after_topk", CONFIG(.softmax_after_topk = 1, .score = PMOE_SCORE_SIGMOID)},
      {"top_k = 1", CONFIG_OF(1, .score = PMOE_SCORE_SIGMOID, .norm = PMOE_NORM_BEFORE_DROP)},
      {"num_groups is 3", CONFIG(.num_groups = 3, .groups_kept = 1)},
      {"num_groups is -1", CONFIG(.num_groups = -1)},
      {"num_groups is 16", CONFIG(.num_groups = 16, .groups_kept = 1)},
      {"groups_kept is 0", CONFIG(.num_groups = 4)},
      {"groups_kept is 5", CONFIG(.num_groups = 4, .groups_kept = 5)},
      {"groups_kept is 1", CONFIG(.groups_kept = 1)},
      {"top_k is 5", CONFIG_OF(5, .num_groups = 4, .groups_kept = 2)},
      {"group_score_top2 is 1", CONFIG(.num_groups = 8, .groups_kept = 2, .group_score_top2 = 1)},
      {"num_groups is 4", CONFIG(.num_groups = 4, .groups_kept = 2, .choice = PMOE_CHOICE_SINKHORN)},
      {"selection_bias is 1", CONFIG(.selection_bias = 1, .choice = PMOE_CHOICE_HASH)},
      {"gumbel is 1", CONFIG(.gumbel = 1, .selection_bias = 1)},
      {"gumbel is 1", CONFIG(.gumbel = 1, .num_groups = 4, .groups_kept = 2)},
      {"gumbel is 1", CONFIG(.gumbel = 1, .choice = PMOE_CHOICE_SINKHORN)},
      {"aux_plain_topk is 1", CONFIG(.aux_plain_topk = 1, .z_coef = 1)},
      {"capacity_factor is 0", CONFIG(.choice = PMOE_CHOICE_EXPERT_CHOICE)},
      {"eval_capacity_factor 0", CONFIG(.choice = PMOE_CHOICE_EXPERT_CHOICE, .capacity_factor = 1)},
      {"auxiliary loss",
       CONFIG(.choice = PMOE_CHOICE_EXPERT_CHOICE, .capacity_factor = 1, .eval_capacity_factor = 1, .aux_coef = 1)},
      {"softmax_after_topk", CONFIG(.choice = PMOE_CHOICE_EXPERT_CHOICE, .capacity_factor = 1,
                                    .eval_capacity_factor = 1, .softmax_after_topk = 1)},
      {"jitter", CONFIG(.router = PMOE_ROUTER_HOST_LOGITS, .jitter = 0.1f)},
      {"bias is 1", CONFIG(.router = PMOE_ROUTER_HOST_LOGITS, .bias = 1)},
      {"choice is 0", CONFIG(.router = PMOE_ROUTER_HOST_ROUTING)},
      {"a loss, norm or score", CONFIG(.router = PMOE_ROUTER_HOST_ROUTING, .choice = PMOE_CHOICE_GIVEN, .z_coef = 1)},
      {"a loss, norm or score",
       CONFIG(.router = PMOE_ROUTER_HOST_ROUTING, .choice = PMOE_CHOICE_GIVEN, .norm = PMOE_NORM_AFTER_DROP)},
      {"a loss, norm or score",
       CONFIG(.router = PMOE_ROUTER_HOST_ROUTING, .choice = PMOE_CHOICE_GIVEN, .score = PMOE_SCORE_SIGMOID)},
  };
  pmoe_ctx *ctx;
  assert_ok(pmoe_ctx_create(NULL, &ctx));
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    pmoe_gate *gate = NULL;
    assert_refused(pmoe_gate_create(ctx, 4, 0, &refused[i].cfg, &gate), PMOE_ERR_ARG, refused[i].word);
    assert_non_null(strstr(pmoe_last_error(), "expected"));
    assert_null(gate);
  }
  pmoe_ctx_destroy(ctx);
}

typedef struct step_case {
  gate_case *c;
  float logits[T * E], dlogits[T * E], weight[T * K], dweight[T * K];
  int32_t expert[T * K], sequence[T], token_id[T];
  pmoe_mat logits_mat, dlogits_mat;
} step_case;

static void set_up(step_case *s, pmoe_gate_config cfg) {
  s->c = case_new(cfg, T, 4, 1);
  for (int i = 0; i < T * E; i++) s->logits[i] = (float)(i % 5);
  for (int t = 0; t < T; t++) {
    for (int k = 0; k < K; k++) s->expert[t * K + k] = (t + k) % E;
    s->sequence[t] = t % 2;
    s->token_id[t] = t;
  }
  memset(s->weight, 0, sizeof s->weight);
  s->logits_mat = mat_f32(s->logits, T, E);
  s->dlogits_mat = mat_f32(s->dlogits, T, E);
  pmoe_step *step = &s->c->step;
  step->token_id = s->token_id;
  step->expert = s->expert;
  step->weight = s->weight;
  step->dweight = s->dweight;
  step->logits = &s->logits_mat;
  step->dlogits = &s->dlogits_mat;
  step->sequence = s->sequence;
  step->num_sequences = 2;
}

/* Refused with outputs as they were. */
static void refuse_forward(step_case *s, const char *word) {
  gate_case *c = s->c;
  pmoe_mat x = mat_f32(c->x, T, c->H);
  pmoe_routing routing = c->routing;
  uint8_t before[T * K * 4], sums[(MAX_SEQUENCES + 2) * (E + 1) * 8];
  memcpy(before, routing.expert, sizeof before);
  memcpy(sums, c->routing.loss_sums ? (void *)c->routing.loss_sums : (void *)sums, sizeof sums);
  assert_refused(pmoe_gate_forward(c->gate, &c->params, &c->step, &x, &routing, &c->stats, NULL), PMOE_ERR_ARG, word);
  assert_memory_equal(before, c->routing.expert, sizeof before);
  if (c->routing.loss_sums) assert_memory_equal(sums, c->routing.loss_sums, sizeof sums);
}

#define REFUSE(word, config, statement)                                                                                \
  do {                                                                                                                 \
    step_case s;                                                                                                       \
    set_up(&s, config);                                                                                                \
    case_forward(s.c);                                                                                                 \
    pmoe_step *step = &s.c->step;                                                                                      \
    statement;                                                                                                         \
    (void)step;                                                                                                        \
    refuse_forward(&s, word);                                                                                          \
    case_free(s.c);                                                                                                    \
  } while (0)

static void test_step(void **state) {
  (void)state;
  pmoe_gate_config seq = CONFIG(.seq_aux_coef = 1), hash = CONFIG(.choice = PMOE_CHOICE_HASH),
                   given = CONFIG(.choice = PMOE_CHOICE_GIVEN), logits = CONFIG(.router = PMOE_ROUTER_HOST_LOGITS),
                   routing = CONFIG(.router = PMOE_ROUTER_HOST_ROUTING, .choice = PMOE_CHOICE_GIVEN);
  REFUSE("recompute is 2", seq, step->recompute = 2);
  REFUSE("num_sequences is -1", seq, step->num_sequences = -1);
  REFUSE("num_sequences is 0", seq, step->num_sequences = 0);
  REFUSE("loss_tokens is -1", seq, step->loss_tokens = -1);
  REFUSE("loss_sequences is -1", seq, step->loss_sequences = -1);
  REFUSE("sequence[4] is 2", seq, s.sequence[4] = 2);
  REFUSE("sequence[1] is -1", seq, s.sequence[1] = -1);
  REFUSE("6 tokens in 4 sequences", seq, (step->sequence = NULL, step->num_sequences = 4));
  REFUSE("token_id is NULL", hash, step->token_id = NULL);
  REFUSE("expert is NULL", given, step->expert = NULL);
  REFUSE("expert[3] is 8", given, s.expert[3] = E);
  REFUSE("expert[0] is -2", given, s.expert[0] = -2);
  REFUSE("expert 3 twice for token 2", given, s.expert[4] = 3);
  REFUSE("weight is NULL", routing, step->weight = NULL);
  REFUSE("step->logits is NULL", logits, step->logits = NULL);
  REFUSE("logits->rows is 5", logits, s.logits_mat.rows = 5);
  REFUSE("logits->cols is 7", logits, s.logits_mat.cols = 7);
  REFUSE("float32 was expected", logits, s.logits_mat.dtype = PMOE_BF16);
  REFUSE("params->weight is set", logits, s.c->params.weight = s.c->w);
  REFUSE("selection_bias is set", hash, s.c->params.selection_bias = s.c->selection_bias);
}

static void refuse_backward(step_case *s, const char *word) {
  gate_case *c = s->c;
  pmoe_mat x = mat_f32(c->x, T, c->H), dx = mat_f32(c->dx, T, c->H);
  memset(s->dlogits, 0x55, sizeof s->dlogits);
  memset(s->dweight, 0x55, sizeof s->dweight);
  assert_refused(
      pmoe_gate_backward(c->gate, &c->params, &c->step, &x, &c->routing, c->dweight, 1, NULL, &dx, PMOE_BWD_ALL, NULL),
      PMOE_ERR_ARG, word);
  for (int i = 0; i < T * E; i++) assert_int_equal(pmoei_bits_of(s->dlogits[i]), 0x55555555);
  for (int i = 0; i < T * K; i++) assert_int_equal(pmoei_bits_of(s->dweight[i]), 0x55555555);
}

static void test_backward(void **state) {
  (void)state;
  step_case s;
  set_up(&s, CONFIG(.router = PMOE_ROUTER_HOST_LOGITS, .aux_coef = 1));
  case_forward(s.c);
  s.c->step.dlogits = NULL;
  refuse_backward(&s, "step->dlogits is NULL");
  s.c->step.dlogits = &s.dlogits_mat;
  s.dlogits_mat.rows = 2;
  refuse_backward(&s, "step->dlogits->rows is 2");
  s.dlogits_mat.rows = T;
  int64_t *sums = s.c->routing.loss_sums;
  s.c->routing.loss_sums = NULL;
  refuse_backward(&s, "loss_sums is NULL");
  refuse_forward(&s, "loss_sums is NULL");
  s.c->routing.loss_sums = sums;
  case_free(s.c);
  set_up(&s, CONFIG(.router = PMOE_ROUTER_HOST_ROUTING, .choice = PMOE_CHOICE_GIVEN));
  case_forward(s.c);
  s.c->step.dweight = NULL;
  refuse_backward(&s, "step->dweight is NULL");
  case_free(s.c);
}

static void test_functions(void **state) {
  (void)state;
  gate_case *c = case_new(CONFIG(.aux_coef = 1, .seq_aux_coef = 1, .global_aux_coef = 1), T, 4, 1);
  pmoe_loss_sum none = {NULL, NULL};
  int64_t rows = 0;
  assert_refused(pmoe_gate_set_loss_sums(NULL, none, none), PMOE_ERR_ARG, "gate");
  assert_refused(pmoe_gate_loss_rows(NULL, 1, &rows), PMOE_ERR_ARG, "gate");
  assert_refused(pmoe_gate_loss_rows(c->gate, 1, NULL), PMOE_ERR_ARG, "rows");
  assert_refused(pmoe_gate_loss_rows(c->gate, -1, &rows), PMOE_ERR_ARG, "num_sequences is -1");
  assert_refused(pmoe_gate_take_counts(NULL, &rows), PMOE_ERR_ARG, "gate");
  assert_refused(pmoe_gate_take_counts(c->gate, NULL), PMOE_ERR_ARG, "count");
  assert_ok(pmoe_gate_loss_rows(c->gate, 3, &rows));
  assert_int_equal(rows, 5);
  case_free(c);
}

/* No token at all, for every choice and router. */
static void test_empty(void **state) {
  (void)state;
  for (int choice = PMOE_CHOICE_TOPK; choice <= PMOE_CHOICE_EXPERT_CHOICE; choice++) {
    for (int router = PMOE_ROUTER_LINEAR; router <= PMOE_ROUTER_HOST_ROUTING; router++) {
      bool experts_choose = choice == PMOE_CHOICE_EXPERT_CHOICE;
      if (router == PMOE_ROUTER_HOST_ROUTING && choice != PMOE_CHOICE_GIVEN) continue;
      pmoe_gate_config cfg = CONFIG(.choice = (pmoe_choice)choice, .router = (pmoe_router)router);
      cfg.capacity_factor = cfg.eval_capacity_factor = 1;
      if (!experts_choose && router != PMOE_ROUTER_HOST_ROUTING) cfg.seq_aux_coef = cfg.global_aux_coef = 1;
      gate_case *c = case_new(cfg, 0, 4, 2);
      pmoe_mat none = {NULL, PMOE_F32, 0, 4, 4}, no_logits = {NULL, PMOE_F32, 0, E, E};
      c->step.logits = c->step.dlogits = &no_logits;
      assert_ok(pmoe_gate_forward(c->gate, &c->params, &c->step, &none, &c->routing, &c->stats, NULL));
      for (int e = 0; e < E; e++) assert_int_equal(c->routing.expert_rows[e], 0);
      assert_true(c->stats.seq_aux_loss == 0 && c->stats.global_aux_loss == 0 && c->stats.load_cv == 0);
      assert_ok(pmoe_gate_backward(c->gate, &c->params, &c->step, &none, &c->routing, NULL, 1, NULL, &none,
                                   PMOE_BWD_ALL, NULL));
      case_free(c);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_config), cmocka_unit_test(test_step),
                                     cmocka_unit_test(test_backward), cmocka_unit_test(test_functions),
                                     cmocka_unit_test(test_empty)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
