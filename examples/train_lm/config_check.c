/* Which settings go together. */
#include "moe.h"

int config_inner(const struct lm_config *cfg) { return cfg->inner > 0 ? cfg->inner : 4 * cfg->hidden; }

/* Of a pipeline stage, which hold a whole set of experts for each EP x ETP of them. */
static int stage_ranks(const struct lm_config *cfg, int nranks) { return nranks / cfg->pp; }

int config_layer_ep(const struct lm_config *cfg, int layer, int nranks) {
  if (cfg->ep.value[layer] > 0) return cfg->ep.value[layer];
  int most = stage_ranks(cfg, nranks) / cfg->etp, ep = most;
  while (most % ep || cfg->experts.value[layer] % ep) ep--;
  return ep;
}

static int spread(struct lm_list *list, int layers, const char *name, struct lm_error *err) {
  if (list->count == 1)
    while (list->count < layers) list->value[list->count++] = list->value[0];
  if (list->count == layers) return 0;
  return lm_error_set(err, "%s has %d numbers; one for each of the %d layers, or a single one, was expected", name,
                      list->count, layers);
}

static int check_layer(const struct lm_config *cfg, int layer, int nranks, struct lm_error *err) {
  int experts = cfg->experts.value[layer], ranks = stage_ranks(cfg, nranks);
  if (experts == 0) return 0;
  if (cfg->topk > experts)
    return lm_error_set(err, "topk is %d; layer %d has %d experts only", cfg->topk, layer, experts);
  int ep = config_layer_ep(cfg, layer, nranks);
  if (ranks % (ep * cfg->etp) == 0) return 0;
  if (cfg->etp > 1 || cfg->pp > 1)
    return lm_error_set(err, "ep is %d in layer %d: ep x etp %d was expected to divide the %d ranks of a stage", ep,
                        layer, ep * cfg->etp, ranks);
  return lm_error_set(err, "ep is %d in layer %d; a divisor of the %d ranks was expected", ep, layer, nranks);
}

/* ---- layout ---- */

static int check_multiple(int value, int of, const char *name, const char *by, struct lm_error *err) {
  if (value % of == 0) return 0;
  return lm_error_set(err, "%s is %d; a multiple of %s %d was expected", name, value, by, of);
}

static int check_sizes(const struct lm_config *cfg, int nranks, struct lm_error *err) {
  int64_t product = (int64_t)cfg->tp * cfg->cp * cfg->pp;
  if (nranks % product)
    return lm_error_set(err, "tp x cp x pp is %d x %d x %d; a divisor of the %d ranks was expected", cfg->tp, cfg->cp,
                        cfg->pp, nranks);
  if (cfg->sp && cfg->tp == 1) return lm_error_set(err, "sp is set, and tp is 1; tp above 1 was expected");
  if (stage_ranks(cfg, nranks) % cfg->etp)
    return lm_error_set(err, "etp is %d; a divisor of the %d ranks of a stage was expected", cfg->etp,
                        stage_ranks(cfg, nranks));
  if (cfg->etp > config_inner(cfg))
    return lm_error_set(err, "etp is %d; at most the inner size %d was expected", cfg->etp, config_inner(cfg));
  if (check_multiple(cfg->heads, cfg->tp, "heads", "tp", err)) return -1;
  if (check_multiple(config_inner(cfg), cfg->tp, "inner", "tp", err)) return -1;
  return check_multiple(cfg->context, cfg->tp * cfg->cp, "context", "cp x tp", err);
}

/* ---- pipeline stages ---- */

/* Floating-point operations of a layer's forward and backward for one token. */
static double layer_cost(const struct lm_config *cfg, int layer) {
  double hidden = cfg->hidden, cost = 3 * (8 * hidden * hidden + 2 * (double)cfg->context * hidden), moe;
  struct lm_moe_config config;
  if (cfg->experts.value[layer] == 0) return cost + 3 * 4 * hidden * (double)config_inner(cfg);
  moe_config(&config, cfg, layer, 1);
  LM_TRY(pmoe_layer_cost(&config.layer, &moe));
  return cost + moe;
}

static void cut_by_cost(struct lm_config *cfg, int count) {
  double cost[LM_MAX_LAYERS];
  int32_t layers[LM_MAX_LAYERS];
  for (int l = 0; l < cfg->layers; l++) cost[l] = layer_cost(cfg, l);
  int vocab = cfg->vocab > 0 ? cfg->vocab : 256;
  cost[cfg->layers - 1] += 6 * (double)cfg->hidden * vocab; /* the head's */
  LM_TRY(pmoe_partition_stages(cfg->layers, cost, count, layers));
  cfg->stages.count = count;
  for (int v = 0; v < count; v++) cfg->stages.value[v] = layers[v];
}

static int check_stages(struct lm_config *cfg, struct lm_error *err) {
  int interleaved = cfg->schedule == LM_INTERLEAVED;
  if (interleaved && cfg->pp == 1) return lm_error_set(err, "schedule is interleaved; pp above 1 was expected");
  if (cfg->stages.count == 0) {
    int count = interleaved ? 2 * cfg->pp : cfg->pp;
    if (count > cfg->layers)
      return lm_error_set(err, "layers is %d; at least one for each of the %d %sstages was expected", cfg->layers,
                          count, interleaved ? "(twice pp) " : "");
    cut_by_cost(cfg, count);
    return 0;
  }
  int sum = 0, count = cfg->stages.count;
  char text[512];
  config_write_list(&cfg->stages, text, sizeof text);
  for (int v = 0; v < count; v++) sum += cfg->stages.value[v];
  if (interleaved && (count % cfg->pp || count == cfg->pp))
    return lm_error_set(err, "stages is %s, %d numbers; interleaved, twice, three times ... pp %d were expected", text,
                        count, cfg->pp);
  if (!interleaved && count != cfg->pp)
    return lm_error_set(err, "stages is %s, %d numbers; as many as pp, %d, were expected", text, count, cfg->pp);
  if (sum != cfg->layers)
    return lm_error_set(err, "stages is %s, %d layers together; the model's %d were expected", text, sum, cfg->layers);
  return 0;
}

int config_check(struct lm_config *cfg, int nranks, struct lm_error *err) {
  if (cfg->hidden % cfg->heads)
    return lm_error_set(err, "hidden is %d; a multiple of the %d heads was expected", cfg->hidden, cfg->heads);
  if (spread(&cfg->experts, cfg->layers, "experts", err) || spread(&cfg->ep, cfg->layers, "ep", err)) return -1;
  if (check_sizes(cfg, nranks, err)) return -1;
  for (int l = 0; l < cfg->layers; l++)
    if (check_layer(cfg, l, nranks, err)) return -1;
  if (check_stages(cfg, err)) return -1;
  int micros = (cfg->batch + cfg->micro - 1) / cfg->micro, readers = nranks / (cfg->tp * cfg->cp * cfg->pp);
  if (micros < readers)
    return lm_error_set(err,
                        "batch is %d: in micro-batches of %d sequences that is work for %d of the %d %s; a larger "
                        "batch, a smaller micro or fewer ranks were expected",
                        cfg->batch, cfg->micro, micros, readers, readers == nranks ? "ranks" : "data-parallel ranks");
  if (cfg->warmup > cfg->steps && cfg->steps > 0)
    return lm_error_set(err, "warmup is %d; at most the %d steps were expected", cfg->warmup, cfg->steps);
  if (!*cfg->data)
    return lm_error_set(err, "data is missing; a text file, a folder of text or a token file was expected");
  return 0;
}
