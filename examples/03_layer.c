/* One layer learns: forward, backward and SGD, until four experts have divided four kinds of tokens among them. */
#include <math.h>

#include "task.h"

enum { TOKENS = 256, EXPERTS = 4, INNER = 32, DEFAULT_STEPS = 600 };

static pmoe_layer *make_layer(pmoe_ctx *ctx) {
  pmoe_gate_config gate = PMOE_CONFIG_INIT(pmoe_gate_config);
  gate.num_experts = EXPERTS;
  gate.top_k = 1;
  gate.aux_coef = 0.05f; /* pulls towards an even load */
  pmoe_experts_config experts = PMOE_CONFIG_INIT(pmoe_experts_config);
  experts.inner = INNER;
  experts.act = PMOE_ACT_SWIGLU;
  pmoe_layer_config cfg = PMOE_CONFIG_INIT(pmoe_layer_config);
  cfg.hidden = TASK_HIDDEN;
  cfg.gate = &gate;
  cfg.experts = &experts;
  pmoe_layer *layer;
  TRY(pmoe_layer_create(ctx, NULL, &cfg, &layer));
  return layer;
}

/* Returns the mean loss before the step. */
static double train_step(pmoe_layer *layer, pmoe_stash *stash, example_params *params, task_batch *batch, int number) {
  pmoe_step step = PMOE_CONFIG_INIT(pmoe_step);
  step.training = 1;
  step.step = (uint64_t)number;
  TRY(pmoe_layer_forward(layer, stash, &step, &batch->x, &batch->y, NULL));
  double loss = task_loss(batch);
  /* Gradients are sums over tokens until reduce_grads scales them, and the load-balancing loss is a mean: hence its
   * factor TOKENS here. */
  TRY(pmoe_layer_backward(layer, stash, TOKENS, &batch->dy, &batch->dx, PMOE_BWD_ALL, NULL));
  TRY(pmoe_layer_reduce_grads(layer, 1.0f / TOKENS, NULL));
  example_params_step(params, 1.0f);
  return loss / TOKENS;
}

static void print_loss(int step, double loss, double first) {
  printf("%5d  %.6f  ", step, loss);
  for (int i = 0; i < (int)(50 * loss / first + 0.5); i++) putchar('#');
  putchar('\n');
}

/* Whether each kind has an expert of its own, to which nine in ten of its tokens go. */
static int print_choices(const pmoe_routing *routing) {
  int count[TASK_KINDS][EXPERTS] = {{0}}, owner[EXPERTS] = {0}, tokens_of_kind = TOKENS / TASK_KINDS, owned = 0;
  for (int64_t t = 0; t < routing->tokens; t++) count[task_kind(t)][routing->expert[t]]++;
  printf("\nkind   tokens at expert 0...%d\n", EXPERTS - 1);
  for (int kind = 0; kind < TASK_KINDS; kind++) {
    printf("%4d", kind);
    for (int e = 0; e < EXPERTS; e++) {
      printf("%6d", count[kind][e]);
      if (10 * count[kind][e] > 9 * tokens_of_kind && owner[e]++ == 0) owned++;
    }
    putchar('\n');
  }
  putchar('\n');
  return owned == TASK_KINDS;
}

int main(int argc, char **argv) {
  int steps = (int)example_option(argc, argv, "--steps", DEFAULT_STEPS, 1, 100000,
                                  "Trains one layer on a small task for N steps.");
  pmoe_ctx_config ctx_cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  ctx_cfg.cpu_threads = 1; /* the task is tiny */
  pmoe_ctx *ctx;
  TRY(pmoe_ctx_create(&ctx_cfg, &ctx));
  pmoe_layer *layer = make_layer(ctx);
  example_params params;
  example_params_bind(&params, layer);
  TRY(pmoe_layer_init_params(layer, 1, 0.2f));
  pmoe_stash_config stash_cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  stash_cfg.max_tokens = TOKENS;
  pmoe_stash *stash;
  TRY(pmoe_stash_create(layer, &stash_cfg, NULL, 0, &stash));
  task_batch batch = task_batch_make(0, TOKENS);

  double first = 0, loss = 0;
  printf(" step  loss\n");
  for (int step = 0; step < steps; step++) {
    loss = train_step(layer, stash, &params, &batch, step);
    if (step == 0) first = loss;
    if (step * 10 % steps < 10 || step == steps - 1) print_loss(step, loss, first);
  }
  pmoe_routing routing = PMOE_CONFIG_INIT(pmoe_routing);
  TRY(pmoe_stash_routing(stash, &routing));
  int divided = print_choices(&routing);
  int bad = 0;
  if (steps >= DEFAULT_STEPS) {
    bad += example_check(loss < 0.02 * first, "the loss fell to less than a fiftieth");
    bad += example_check(divided, "each kind of token has an expert of its own");
  } else {
    printf("(checked from %d steps on)\n", DEFAULT_STEPS);
  }

  task_batch_free(&batch);
  pmoe_stash_destroy(stash);
  pmoe_layer_destroy(layer);
  pmoe_ctx_destroy(ctx);
  example_params_free(&params);
  return bad ? 1 : 0;
}
