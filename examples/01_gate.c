/* The router alone: six tokens choose among four experts, and an expert has two slots.
 *
 * The router's weight is the identity, so that a token's row is its logits and every number can be followed by hand. */
#include <math.h>

#include "example.h"

enum { TOKENS = 6, EXPERTS = 4 };

static float x[TOKENS * EXPERTS] = {2, 1, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0, 2, 0, 0, 1.5f, 1, 0, 0, 0, 0, 1, 0};
static float weight[EXPERTS * EXPERTS] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};

/* What a router fills for one step; the memory is the caller's. */
static int32_t expert[TOKENS];
static int64_t slot[TOKENS], chosen[EXPERTS], rows[EXPERTS], loss_sums[EXPERTS + 1];
static float gate_weight[TOKENS];

static pmoe_routing make_routing(void) {
  pmoe_routing routing = PMOE_CONFIG_INIT(pmoe_routing);
  routing.tokens = TOKENS;
  routing.num_experts = EXPERTS;
  routing.top_k = 1;
  routing.expert = expert;
  routing.slot = slot;
  routing.weight = gate_weight;
  routing.expert_count = chosen;
  routing.expert_rows = rows;
  routing.loss_sums = loss_sums;
  return routing;
}

static pmoe_gate *make_gate(pmoe_ctx *ctx) {
  pmoe_gate_config cfg = PMOE_CONFIG_INIT(pmoe_gate_config);
  cfg.num_experts = EXPERTS;
  cfg.top_k = 1;
  cfg.capacity_factor = 1.0f; /* ceil(6 tokens * 1 choice * 1.0 / 4 experts) = 2 slots */
  cfg.aux_coef = 1.0f;
  pmoe_gate *gate;
  TRY(pmoe_gate_create(ctx, EXPERTS, 0, &cfg, &gate));
  return gate;
}

static void print_routing(const pmoe_gate_stats *stats) {
  printf("token   logits                  expert  slot   weight\n");
  for (int t = 0; t < TOKENS; t++) {
    printf("%5d  ", t);
    for (int e = 0; e < EXPERTS; e++) printf(" %4.1f", (double)x[t * EXPERTS + e]);
    if (slot[t] < 0) printf("  %6d  full   -\n", expert[t]);
    else printf("  %6d  %4d   %.6f\n", expert[t], (int)slot[t], (double)gate_weight[t]);
  }
  printf("\nexpert  chosen  kept\n");
  for (int e = 0; e < EXPERTS; e++) {
    printf("%6d  %6d  %4d   ", e, (int)chosen[e], (int)rows[e]);
    for (int64_t i = 0; i < chosen[e]; i++) putchar(i < rows[e] ? '#' : '.');
    putchar('\n');
  }
  printf("\nload-balancing loss %.6f (1 if balanced), %d of %d choices dropped\n\n", (double)stats->aux_loss,
         (int)stats->dropped, TOKENS);
}

/* Sum of the gate weights plus the load-balancing loss. */
static double objective(pmoe_gate *gate, const pmoe_gate_params *params, const pmoe_step *step) {
  pmoe_mat tokens = example_mat(x, TOKENS, EXPERTS);
  pmoe_routing routing = make_routing();
  pmoe_gate_stats stats = PMOE_CONFIG_INIT(pmoe_gate_stats);
  TRY(pmoe_gate_forward(gate, params, step, &tokens, &routing, &stats, NULL));
  double sum = (double)stats.aux_loss;
  for (int t = 0; t < TOKENS; t++) sum += (double)gate_weight[t];
  return sum;
}

/* The largest difference between the router's gradient and finite differences of the objective. */
static double gradient_error(pmoe_gate *gate, const pmoe_gate_params *params, const pmoe_step *step) {
  float dweight[TOKENS], dx[TOKENS * EXPERTS] = {0};
  for (int t = 0; t < TOKENS; t++) dweight[t] = 1.0f;
  pmoe_mat tokens = example_mat(x, TOKENS, EXPERTS), dtokens = example_mat(dx, TOKENS, EXPERTS);
  pmoe_routing routing = make_routing();
  objective(gate, params, step); /* backward wants the routing that forward made */
  TRY(pmoe_gate_backward(gate, params, step, &tokens, &routing, dweight, 1.0f, NULL, &dtokens, PMOE_BWD_ALL, NULL));
  double worst = 0;
  for (int i = 0; i < EXPERTS * EXPERTS; i++) {
    const float step_size = 1.0f / 256, was = weight[i];
    weight[i] = was + step_size;
    double above = objective(gate, params, step);
    weight[i] = was - step_size;
    double below = objective(gate, params, step);
    weight[i] = was;
    worst = fmax(worst, fabs((above - below) / (2 * (double)step_size) - (double)params->weight_grad[i]));
  }
  return worst;
}

static int check_routing(const pmoe_gate_stats *stats) {
  static const int64_t want_slot[TOKENS] = {0, 1, -1, 0, -1, 0};
  static const double want_weight[TOKENS] = {.610296, .475367, 0, .711235, 0, .475367};
  int right = 1;
  for (int t = 0; t < TOKENS; t++)
    right = right && slot[t] == want_slot[t] && fabs((double)gate_weight[t] - want_weight[t]) < 1e-5;
  int bad = example_check(right, "slots go to the tokens that come first; weights are softmax probabilities");
  return bad + example_check(fabs((double)stats->aux_loss - 1.495704) < 1e-5, "the load-balancing loss is 1.495704");
}

int main(void) {
  pmoe_ctx *ctx;
  TRY(pmoe_ctx_create(NULL, &ctx));
  pmoe_gate *gate = make_gate(ctx);
  float weight_grad[EXPERTS * EXPERTS] = {0};
  pmoe_gate_params params = PMOE_CONFIG_INIT(pmoe_gate_params);
  params.weight = weight;
  params.weight_grad = weight_grad;
  pmoe_step step = PMOE_CONFIG_INIT(pmoe_step);
  step.training = 1;

  pmoe_mat tokens = example_mat(x, TOKENS, EXPERTS);
  pmoe_routing routing = make_routing();
  pmoe_gate_stats stats = PMOE_CONFIG_INIT(pmoe_gate_stats);
  TRY(pmoe_gate_forward(gate, &params, &step, &tokens, &routing, &stats, NULL));
  print_routing(&stats);
  int bad = check_routing(&stats);
  bad += example_check(gradient_error(gate, &params, &step) < 2e-3, "the gradient agrees with finite differences");

  pmoe_gate_destroy(gate);
  pmoe_ctx_destroy(ctx);
  return bad ? 1 : 0;
}
