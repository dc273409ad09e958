/* A whole model: the gradient of every parameter against differences of the loss, and the optimizer against plain
 * code. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "examples/train_lm/model.h"
#include "examples/train_lm/optimizer.h"

enum { SEQUENCES = 2, CONTEXT = 6, VOCAB = 11, TOKENS = SEQUENCES * CONTEXT };

static int32_t tokens[TOKENS], targets[TOKENS];
static const struct lm_batch whole = {SEQUENCES, CONTEXT, tokens, targets};

static struct lm_batch read_whole(void *arg, int64_t index) {
  (void)arg, (void)index;
  return whole;
}

static const struct lm_feed feed = {1, read_whole, NULL};

/* The batch in two pieces, and before them an empty one. */
static struct lm_batch read_piece(void *arg, int64_t index) {
  (void)arg;
  int64_t at = index > 0 ? index - 1 : 0;
  return (struct lm_batch){index > 0, CONTEXT, tokens + at * CONTEXT, targets + at * CONTEXT};
}

/* Every token goes to all experts: a choice that flips would make the loss jump. */
static struct lm_config tiny(pmoe_mix residual) {
  struct lm_config cfg;
  struct lm_error err;
  config_init(&cfg);
  assert_int_equal(config_set_text(&cfg,
                                   "layers = 2\nhidden = 12\nheads = 3\ncontext = 6\nexperts = 0,3\ntopk = 3\n"
                                   "batch = 2\nmicro = 2\naux = 0\nz = 0\ndata = x\nthreads = 2",
                                   "test", &err),
                   0);
  cfg.residual = residual;
  assert_int_equal(config_check(&cfg, 1, &err), 0);
  for (int i = 0; i < TOKENS; i++) tokens[i] = i * i % VOCAB, targets[i] = (3 * i + 1) % VOCAB;
  return cfg;
}

static void train_once(struct lm_model *model) {
  double counts[8] = {0};
  struct lm_sums sums = {.expert_count = counts};
  gradients_zero(model);
  model_train(model, &feed, 0, 0, &sums);
  assert_true(sums.tokens == TOKENS && sums.routed == 3 * TOKENS && sums.dropped == 0);
  assert_true(counts[0] + counts[1] + counts[2] == 3 * TOKENS);
  assert_true(fabs(sums.loss - model_loss(model, &feed)) < 1e-4);
}

/* Along its own gradient g the loss changes by |g| per unit. Steps are small and gradients summed in float32, hence the
 * tolerance; a wrong gradient is wrong by its size. */
static void check_param(struct lm_model *model, struct lm_param *p) {
  double norm = 0;
  for (int64_t i = 0; i < p->numel; i++) norm += (double)p->grad[i] * (double)p->grad[i];
  norm = sqrt(norm);
  float *keep = malloc((size_t)p->numel * sizeof *keep);
  memcpy(keep, p->master, (size_t)p->numel * sizeof *keep);
  double loss[2], length = 0.01;
  for (int side = 0; side < 2; side++) {
    double step = (side ? length : -length) / (norm > 1e-6 ? norm : 1);
    for (int64_t i = 0; i < p->numel; i++) p->master[i] = keep[i] + (float)(step * (double)p->grad[i]);
    loss[side] = model_loss(model, &feed);
  }
  memcpy(p->master, keep, (size_t)p->numel * sizeof *keep);
  free(keep);
  double slope = (loss[1] - loss[0]) / (2 * length);
  if (fabs(slope - norm) > 0.02 * norm + 2e-3) fail_msg("%s: slope %g, gradient norm %g", p->name, slope, norm);
}

static void check_gradients(struct lm_ranks *ranks, void *arg) {
  struct lm_model *model = model_create(arg, VOCAB, ranks);
  train_once(model);
  int large = 0;
  for (int i = 0; i < model->num_params; i++) {
    check_param(model, &model->params[i]);
    for (int64_t j = 0; j < model->params[i].numel; j++) large += fabsf(model->params[i].grad[j]) > 1e-3f;
  }
  assert_true(large > 1000);
  model_destroy(model);
}

static void gradients_match_differences(void **state) {
  (void)state;
  for (int mix = PMOE_MIX_NONE; mix <= PMOE_MIX_GATED_SUM; mix++) {
    struct lm_config cfg = tiny((pmoe_mix)mix);
    ranks_run(&cfg, 1, check_gradients, &cfg);
  }
}

static void check_accumulation(struct lm_ranks *ranks, void *arg) {
  struct lm_model *model = model_create(arg, VOCAB, ranks);
  train_once(model);
  int64_t n = model->dense_numel[LM_SUM_STAGE];
  assert_true(n > 1000 && model->dense_numel[LM_SUM_DENSE_DP] == 0);
  float *before = malloc((size_t)n * sizeof *before);
  memcpy(before, model->dense_grad, (size_t)n * sizeof *before);
  double counts[8] = {0};
  struct lm_sums sums = {.expert_count = counts};
  gradients_zero(model);
  model_train(model, &(struct lm_feed){1 + SEQUENCES, read_piece, NULL}, 0, 0, &sums);
  assert_true(sums.tokens == TOKENS);
  for (int64_t i = 0; i < n; i++) assert_true(fabsf(model->dense_grad[i] - before[i]) < 1e-4f * (1 + fabsf(before[i])));
  free(before);
  model_destroy(model);
}

static void micro_batches_add_up(void **state) {
  (void)state;
  struct lm_config cfg = tiny(PMOE_MIX_LEARNED);
  ranks_run(&cfg, 1, check_accumulation, &cfg);
}

static void check_names(struct lm_ranks *ranks, void *arg) {
  struct lm_model *model = model_create(arg, VOCAB, ranks);
  for (int i = 0; i < model->num_params; i++) {
    const struct lm_param *p = &model->params[i];
    int64_t numel = 1;
    for (int d = 0; d < p->ndim; d++) numel *= p->shape[d];
    assert_true(numel == p->numel);
    assert_int_equal(p->first_expert >= 0, strstr(p->name, ".moe.experts.") != NULL);
    for (int j = 0; j < i; j++) assert_string_not_equal(p->name, model->params[j].name);
  }
  model_destroy(model);
}

static void names_are_unique(void **state) {
  (void)state;
  struct lm_config cfg = tiny(PMOE_MIX_LEARNED);
  ranks_run(&cfg, 1, check_names, &cfg);
}

/* Three steps of AdamW on one number each, in double. */
static void check_adamw(struct lm_ranks *ranks, void *arg) {
  const struct lm_config *cfg = arg;
  struct lm_model *model = model_create(cfg, VOCAB, ranks);
  for (int i = 0; i < model->num_params; i++) {
    struct lm_param *p = &model->params[i];
    double w = (double)p->master[0], m = 0, v = 0;
    for (int step = 1; step <= 3; step++) {
      double g = 0.3 * step - 0.7, grad_scale = 0.5;
      p->grad[0] = (float)g;
      m = 0.9 * m + 0.1 * g * grad_scale;
      v = 0.95 * v + 0.05 * g * g * grad_scale * grad_scale;
      double update = m / (1 - pow(0.9, step)) / (sqrt(v / (1 - pow(0.95, step))) + 1e-8);
      w -= 0.01 * (update + (p->decay ? (double)cfg->weight_decay : 0) * w);
    }
    p->adam_m[0] = (float)m, p->adam_v[0] = (float)v; /* expected, kept until all have stepped */
    p->grad[0] = (float)w;
  }
  float expected[256][3];
  for (int i = 0; i < model->num_params; i++) {
    struct lm_param *p = &model->params[i];
    expected[i][0] = p->grad[0], expected[i][1] = p->adam_m[0], expected[i][2] = p->adam_v[0];
    p->adam_m[0] = p->adam_v[0] = 0;
  }
  for (int step = 1; step <= 3; step++) {
    gradients_zero(model);
    for (int i = 0; i < model->num_params; i++) model->params[i].grad[0] = (float)(0.3 * step - 0.7);
    adamw_step(model, 0.01f, 0.5f, step);
  }
  for (int i = 0; i < model->num_params; i++) {
    const struct lm_param *p = &model->params[i];
    assert_true(fabsf(p->master[0] - expected[i][0]) < 1e-5f);
    assert_true(fabsf(p->adam_m[0] - expected[i][1]) < 1e-6f && fabsf(p->adam_v[0] - expected[i][2]) < 1e-6f);
  }
  model_destroy(model);
}

static void adamw_matches(void **state) {
  (void)state;
  struct lm_config cfg = tiny(PMOE_MIX_NONE);
  ranks_run(&cfg, 1, check_adamw, &cfg);
}

static void learning_rate_rises_and_falls(void **state) {
  (void)state;
  struct lm_config cfg = {.lr = 1, .warmup = 10, .steps = 110};
  assert_true(fabsf(learning_rate(&cfg, 0) - 0.1f) < 1e-6f);
  assert_true(fabsf(learning_rate(&cfg, 9) - 1) < 1e-6f);
  assert_true(fabsf(learning_rate(&cfg, 10) - 1) < 1e-6f);
  assert_true(fabsf(learning_rate(&cfg, 60) - 0.55f) < 1e-6f);
  assert_true(fabsf(learning_rate(&cfg, 110) - 0.1f) < 1e-6f);
  assert_true(fabsf(learning_rate(&cfg, 1000) - 0.1f) < 1e-6f);
  cfg.warmup = 0;
  assert_true(fabsf(learning_rate(&cfg, 0) - 1) < 1e-6f);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(gradients_match_differences),
      cmocka_unit_test(micro_batches_add_up),
      cmocka_unit_test(names_are_unique),
      cmocka_unit_test(adamw_matches),
      cmocka_unit_test(learning_rate_rises_and_falls),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
