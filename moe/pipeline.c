#include "pmoe/pipeline.h"

#include <math.h>
#include <stdbool.h>

#include "core/config.h"
#include "moe/activation.h"

typedef struct cut {
  int32_t num_layers, num_stages;
  const double *cost;
  int32_t *layers;
} cut;

/* Fills each stage up to the bound. False if the last one exceeds it; then *next is the smallest bound with which a
 * stage would have taken more, so that no bound below it gives anything else. */
static bool fill(const cut *c, double bound, double *next) {
  int32_t layer = 0;
  double load = 0;
  *next = INFINITY;
  for (int32_t stage = 0; stage < c->num_stages; stage++) {
    int32_t first = layer, left = c->num_stages - stage - 1, end = c->num_layers - left;
    for (load = c->cost[layer++]; layer < end && (left == 0 || load + c->cost[layer] <= bound); layer++)
      load += c->cost[layer];
    if (layer < end) *next = fmin(*next, load + c->cost[layer]);
    c->layers[stage] = layer - first;
  }
  *next = fmin(*next, load);
  return load <= bound;
}

pmoe_status pmoe_partition_stages(int32_t num_layers, const double *cost, int32_t num_stages, int32_t *layers) {
  PMOEI_REQUIRE(num_stages >= 1, "num_stages is %d; 1 or more was expected", num_stages);
  PMOEI_REQUIRE(num_layers >= num_stages, "num_layers is %d; at least one for each of the %d stages was expected",
                num_layers, num_stages);
  PMOEI_REQUIRE_POINTER(cost);
  PMOEI_REQUIRE_POINTER(layers);
  double total = 0, bound = 0;
  for (int32_t i = 0; i < num_layers; i++) {
    PMOEI_REQUIRE(cost[i] >= 0 && cost[i] <= 1e300 / num_layers,
                  "cost[%d] is %g; a finite number of 0 or more was expected", i, cost[i]);
    total += cost[i];
    bound = fmax(bound, cost[i]);
  }
  bound = fmax(bound, 0.999999 * total / num_stages); /* below the best, however sums round */
  const cut c = {num_layers, num_stages, cost, layers};
  for (double next; !fill(&c, bound, &next);) bound = next;
  return PMOE_OK;
}

static double network(double hidden, int32_t inner, pmoe_act act) {
  return hidden * inner * (pmoei_act_gated(act) ? 3 : 2);
}

pmoe_status pmoe_layer_cost(const pmoe_layer_config *config, double *flops) {
  pmoe_layer_config cfg;
  pmoe_gate_config gate;
  pmoe_experts_config experts;
  pmoe_residual_config residual = PMOE_CONFIG_INIT(pmoe_residual_config);
  PMOEI_TRY(PMOEI_CONFIG_READ(&cfg, config));
  PMOEI_REQUIRE_POINTER(flops);
  PMOEI_REQUIRE(cfg.hidden > 0, "config->hidden is %d; 1 or more was expected", cfg.hidden);
  PMOEI_TRY(pmoei_config_read(&gate, sizeof gate, cfg.gate, "config->gate"));
  PMOEI_TRY(pmoei_config_read(&experts, sizeof experts, cfg.experts, "config->experts"));
  if (cfg.residual) PMOEI_TRY(pmoei_config_read(&residual, sizeof residual, cfg.residual, "config->residual"));
  double hidden = cfg.hidden, chosen = network(hidden, experts.inner, experts.act) * gate.top_k;
  double products = hidden * gate.num_experts + chosen, again = 0;
  if (residual.mix != PMOE_MIX_NONE) products += network(hidden, residual.inner, residual.act);
  if (residual.mix == PMOE_MIX_LEARNED) products += 2 * hidden;
  if (residual.mix == PMOE_MIX_GATED_SUM) products += hidden;
  if (experts.recompute_act) again = chosen - hidden * experts.inner * gate.top_k;
  *flops = 2 * (3 * products + again); /* a multiplication and an addition each */
  return PMOE_OK;
}
