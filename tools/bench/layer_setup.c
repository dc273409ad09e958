#include "layer_setup.h"

#include <stdlib.h>
#include <string.h>

#include "ranks.h"

static pmoe_status bind(bench_layer_setup *s, const char *name, void *data, void *grad) {
  pmoe_param param = PMOE_CONFIG_INIT(pmoe_param);
  for (int32_t i = 0; i < pmoe_layer_num_params(s->layer); i++) {
    BENCH_TRY(pmoe_layer_param(s->layer, i, &param));
    if (strcmp(param.name, name) == 0) {
      BENCH_TRY(pmoe_layer_bind_param(s->layer, i, data, grad));
      return PMOE_OK;
    }
  }
  return PMOE_ERR_INTERNAL;
}

static pmoe_status bind_all(bench_layer_setup *s) {
  static const char *const names[4] = {"experts.fc1.weight", "experts.fc1.bias", "experts.fc2.weight",
                                       "experts.fc2.bias"};
  BENCH_TRY(bind(s, "router.weight", s->router, s->router_grad));
  for (int i = 0; i < 4; i++)
    if (i % 2 == 0 || s->options->bias) BENCH_TRY(bind(s, names[i], s->params.data[i], s->params.grad[i]));
  return PMOE_OK;
}

static pmoe_status make_layer(bench_layer_setup *s, pmoe_ctx *ctx, pmoe_comm *comm) {
  const bench_options *o = s->options;
  if (comm && pmoe_comm_size(comm) > 1) {
    pmoe_topology_config topology = PMOE_CONFIG_INIT(pmoe_topology_config);
    topology.ep = pmoe_comm_size(comm);
    BENCH_TRY(pmoe_topology_create(ctx, comm, &topology, &s->topology));
    BENCH_TRY(pmoe_expert_block(o->experts, topology.ep, pmoe_comm_rank(comm), &s->first_expert, &s->num_experts));
  } else {
    s->num_experts = o->experts;
  }
  pmoe_gate_config gate = PMOE_CONFIG_INIT(pmoe_gate_config);
  gate.num_experts = o->experts, gate.top_k = o->top_k;
  pmoe_experts_config experts = bench_experts_config(o);
  pmoe_layer_config cfg = PMOE_CONFIG_INIT(pmoe_layer_config);
  cfg.hidden = o->hidden, cfg.gate = &gate, cfg.experts = &experts;
  BENCH_TRY(pmoe_layer_create(ctx, s->topology, &cfg, &s->layer));
  pmoe_stash_config stash = PMOE_CONFIG_INIT(pmoe_stash_config);
  stash.max_tokens = s->tokens;
  BENCH_TRY(pmoe_stash_create(s->layer, &stash, NULL, 0, &s->stash));
  return PMOE_OK;
}

static pmoe_status make_batch(bench_layer_setup *s) {
  const bench_options *o = s->options;
  size_t bytes = ((size_t)(s->tokens * o->hidden) * pmoe_dtype_size(o->dtype) + 63) / 64 * 64;
  BENCH_TRY(bench_alloc(4 * bytes, &s->memory));
  pmoe_mat *mats[4] = {&s->x, &s->y, &s->dy, &s->dx};
  for (int i = 0; i < 4; i++)
    *mats[i] = (pmoe_mat){(char *)s->memory + (size_t)i * bytes, o->dtype, s->tokens, o->hidden, o->hidden};
  bench_fill(o, BENCH_DY, s->first_token * o->hidden, s->tokens * o->hidden, s->dy.data);
  return bench_tokens(o, s->first_token, s->tokens, s->x.data);
}

pmoe_status bench_layer_create(const bench_options *o, pmoe_ctx *ctx, pmoe_comm *comm, int64_t first_token,
                               int64_t tokens, bench_layer_setup *out) {
  *out = (bench_layer_setup){.options = o, .first_token = first_token, .tokens = tokens};
  pmoe_status status = make_layer(out, ctx, comm);
  if (status < 0) return status;
  size_t router = (size_t)o->experts * (size_t)o->hidden;
  BENCH_TRY(bench_alloc(2 * router * sizeof(float), &out->router));
  out->router_grad = out->router + router;
  bench_router(o, out->router);
  status = bench_params_create(o, out->first_expert, out->num_experts, &out->params);
  if (status == PMOE_OK) status = make_batch(out);
  return status == PMOE_OK ? bind_all(out) : status;
}

void bench_layer_destroy(bench_layer_setup *s) {
  pmoe_stash_destroy(s->stash);
  pmoe_layer_destroy(s->layer);
  pmoe_topology_destroy(s->topology);
  bench_params_destroy(&s->params);
  free(s->router);
  free(s->memory);
}

pmoe_status bench_layer_forward(void *arg) {
  bench_layer_setup *s = arg;
  pmoe_step step = PMOE_CONFIG_INIT(pmoe_step);
  step.training = 1;
  step.first_token = s->first_token;
  BENCH_TRY(pmoe_layer_forward(s->layer, s->stash, &step, &s->x, &s->y, NULL));
  return PMOE_OK;
}

pmoe_status bench_layer_backward(void *arg) {
  bench_layer_setup *s = arg;
  BENCH_TRY(pmoe_layer_backward(s->layer, s->stash, 1.0f, &s->dy, &s->dx, PMOE_BWD_ALL, NULL));
  return PMOE_OK;
}
