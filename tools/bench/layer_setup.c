#include "layer_setup.h"

#include <stdio.h>
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

static pmoe_status bind_mlp(bench_layer_setup *s, const char *part, const bench_expert_params *params) {
  static const char *const names[4] = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"};
  for (int i = 0; i < 4; i++) {
    char name[64];
    snprintf(name, sizeof name, "%s.%s", part, names[i]);
    if (i % 2 == 0 || s->options->bias) BENCH_TRY(bind(s, name, params->data[i].data, params->grad[i].data));
  }
  return PMOE_OK;
}

static pmoe_status bind_all(bench_layer_setup *s) {
  const bench_options *o = s->options;
  BENCH_TRY(bind(s, "router.weight", s->router.data, s->router.data + s->router.bytes / 2));
  BENCH_TRY(bind_mlp(s, "experts", &s->params));
  if (!o->residual) return PMOE_OK;
  BENCH_TRY(bind_mlp(s, "residual", &s->branch));
  char *grad = s->mix.data + s->mix.bytes / 2;
  size_t weight = 2 * (size_t)o->hidden * sizeof(float);
  BENCH_TRY(bind(s, "residual.mix.weight", s->mix.data, grad));
  BENCH_TRY(bind(s, "residual.mix.bias", s->mix.data + weight, grad + weight));
  return PMOE_OK;
}

/* On any rank. */
static int64_t most_tokens(const bench_options *o, const pmoe_comm *comm) {
  int64_t ranks = comm ? pmoe_comm_size(comm) : 1;
  return (o->tokens + ranks - 1) / ranks;
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
  gate.capacity_factor = gate.eval_capacity_factor = o->capacity_factor;
  pmoe_a2a_config a2a = PMOE_CONFIG_INIT(pmoe_a2a_config);
  a2a.sizing = o->sizing;
  if (o->sizing == PMOE_SIZING_FIXED) a2a.max_tokens = most_tokens(o, comm);
  pmoe_residual_config residual = PMOE_CONFIG_INIT(pmoe_residual_config);
  residual.mix = o->residual ? PMOE_MIX_LEARNED : PMOE_MIX_NONE;
  residual.inner = o->inner, residual.act = o->act, residual.bias = o->bias;
  pmoe_experts_config experts = bench_experts_config(o);
  pmoe_layer_config cfg = PMOE_CONFIG_INIT(pmoe_layer_config);
  cfg.hidden = o->hidden, cfg.gate = &gate, cfg.experts = &experts, cfg.a2a = &a2a;
  if (o->residual) cfg.residual = &residual;
  BENCH_TRY(pmoe_layer_create(ctx, s->topology, &cfg, &s->layer));
  pmoe_stash_config stash = PMOE_CONFIG_INIT(pmoe_stash_config);
  stash.max_tokens = s->tokens;
  BENCH_TRY(pmoe_stash_create(s->layer, &stash, NULL, 0, &s->stash));
  return PMOE_OK;
}

static pmoe_status make_batch(bench_layer_setup *s) {
  const bench_options *o = s->options;
  size_t bytes = ((size_t)(s->tokens * o->hidden) * pmoe_dtype_size(o->dtype) + 63) / 64 * 64;
  pmoe_status status = bench_block_create(s->device, 4 * bytes, &s->batch);
  if (status < 0) return status;
  pmoe_mat *mats[4] = {&s->x, &s->y, &s->dy, &s->dx};
  for (int i = 0; i < 4; i++)
    *mats[i] = (pmoe_mat){s->batch.host + (size_t)i * bytes, o->dtype, s->tokens, o->hidden, o->hidden};
  bench_fill(o, BENCH_DY, s->first_token * o->hidden, s->tokens * o->hidden, s->dy.data);
  status = bench_tokens(o, s->first_token, s->tokens, s->x.data);
  return status == PMOE_OK ? bench_block_push(&s->batch) : status;
}

static pmoe_status make_router(bench_layer_setup *s) {
  const bench_options *o = s->options;
  pmoe_status status =
      bench_block_create(s->device, 2 * (size_t)o->experts * (size_t)o->hidden * sizeof(float), &s->router);
  if (status < 0) return status;
  bench_router(o, (float *)(void *)s->router.host);
  return bench_block_push(&s->router);
}

static pmoe_status make_branch(bench_layer_setup *s) {
  const bench_options *o = s->options;
  if (!o->residual) return PMOE_OK;
  int64_t n = 2 * (int64_t)o->hidden + 2;
  pmoe_status status = bench_block_create(s->device, 2 * (size_t)n * sizeof(float), &s->mix);
  if (status < 0) return status;
  bench_fill(o, BENCH_MIX, 0, n, s->mix.host);
  status = bench_block_push(&s->mix);
  return status == PMOE_OK ? bench_params_create(o, s->device, o->experts, 1, &s->branch) : status;
}

pmoe_status bench_layer_create(const bench_options *o, pmoe_ctx *ctx, pmoe_comm *comm, bench_device *device,
                               int64_t first_token, int64_t tokens, bench_layer_setup *out) {
  *out = (bench_layer_setup){.options = o, .device = device, .first_token = first_token, .tokens = tokens};
  pmoe_status status = make_layer(out, ctx, comm);
  if (status == PMOE_OK) status = make_router(out);
  if (status == PMOE_OK) status = bench_params_create(o, device, out->first_expert, out->num_experts, &out->params);
  if (status == PMOE_OK) status = make_branch(out);
  if (status == PMOE_OK) status = make_batch(out);
  return status == PMOE_OK ? bind_all(out) : status;
}

void bench_layer_destroy(bench_layer_setup *s) {
  pmoe_stash_destroy(s->stash);
  pmoe_layer_destroy(s->layer);
  pmoe_topology_destroy(s->topology);
  bench_params_destroy(&s->params);
  bench_params_destroy(&s->branch);
  bench_block_destroy(&s->router);
  bench_block_destroy(&s->mix);
  bench_block_destroy(&s->batch);
}

static pmoe_stream stream_of(const bench_layer_setup *s) { return s->device ? s->device->stream : NULL; }

pmoe_status bench_layer_forward(void *arg) {
  bench_layer_setup *s = arg;
  if (s->graph[0]) return s->device->launch(s->device, s->graph[0]);
  pmoe_step step = PMOE_CONFIG_INIT(pmoe_step);
  step.training = 1;
  step.first_token = s->first_token;
  pmoe_mat x = bench_block_mat(&s->batch, &s->x), y = bench_block_mat(&s->batch, &s->y);
  BENCH_TRY(pmoe_layer_forward(s->layer, s->stash, &step, &x, &y, stream_of(s)));
  return PMOE_OK;
}

pmoe_status bench_layer_backward(void *arg) {
  bench_layer_setup *s = arg;
  if (s->graph[1]) return s->device->launch(s->device, s->graph[1]);
  pmoe_mat dy = bench_block_mat(&s->batch, &s->dy), dx = bench_block_mat(&s->batch, &s->dx);
  BENCH_TRY(pmoe_layer_backward(s->layer, s->stash, 1.0f, &dy, &dx, PMOE_BWD_ALL, stream_of(s)));
  return PMOE_OK;
}

/* One step is run before: it takes the memory that a capture could not. */
pmoe_status bench_layer_capture(bench_layer_setup *s) {
  bench_device *device = s->device;
  void *graph[2] = {NULL, NULL};
  pmoe_status status = bench_layer_forward(s);
  if (status == PMOE_OK) status = bench_layer_backward(s);
  if (status == PMOE_OK) status = device->wait(device);
  if (status == PMOE_OK) status = device->capture(device, bench_layer_forward, s, &graph[0]);
  if (status == PMOE_OK) status = device->capture(device, bench_layer_backward, s, &graph[1]);
  s->graph[0] = graph[0], s->graph[1] = graph[1];
  return status;
}
