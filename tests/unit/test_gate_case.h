/* A case to test the router on: one gate with its parameters, tokens and results. */
#ifndef TEST_GATE_CASE_H
#define TEST_GATE_CASE_H
#include <float.h>
#include <math.h>
#include <pmoe/pmoe.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "core/random.h"

enum { MAX_SEQUENCES = 8 };

typedef struct gate_case {
  pmoe_ctx *ctx;
  pmoe_gate *gate;
  pmoe_gate_config cfg;
  int64_t T, H;
  int32_t layer;
  uint64_t seed;
  float *x, *w, *b, *dw, *db; /* dw, db: parameter gradients */
  float *dx, *dweight, *dlogits, *selection_bias;
  uint8_t *mask;
  pmoe_step step;
  pmoe_gate_params params;
  pmoe_routing routing;
  pmoe_gate_stats stats;
} gate_case;

static inline void *room(size_t count, size_t size) {
  size_t bytes = count * size > 0 ? count * size : 1;
  void *p = malloc(bytes);
  assert_non_null(p);
  memset(p, 0xff, bytes);
  return p;
}

static inline float draw(uint64_t *state) { /* uniform in (-1, 1) */
  *state = pmoei_mix64(*state + 1);
  return 2.0f * pmoei_uniform((uint32_t)(*state >> 32)) - 1.0f;
}

static inline pmoe_gate_config gate_config(int32_t num_experts, int32_t top_k) {
  pmoe_gate_config cfg = PMOE_CONFIG_INIT(pmoe_gate_config);
  cfg.num_experts = num_experts;
  cfg.top_k = top_k;
  return cfg;
}

/* Random tokens and parameters; training, no mask. */
static inline gate_case *case_new(pmoe_gate_config cfg, int64_t T, int64_t H, int32_t threads) {
  gate_case *c = calloc(1, sizeof *c);
  assert_non_null(c);
  size_t E = (size_t)cfg.num_experts, K = (size_t)cfg.top_k, t = (size_t)T, h = (size_t)H;
  c->cfg = cfg;
  c->T = T;
  c->H = H;
  c->layer = 3;
  c->seed = 77;
  pmoe_ctx_config ctx_cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  ctx_cfg.cpu_threads = threads;
  ctx_cfg.seed = c->seed;
  assert_int_equal(pmoe_ctx_create(&ctx_cfg, &c->ctx), PMOE_OK);
  assert_int_equal(pmoe_gate_create(c->ctx, (int32_t)H, c->layer, &cfg, &c->gate), PMOE_OK);
  c->x = room(t * h, 4);
  c->dx = room(t * h, 4);
  c->w = room(E * h, 4);
  c->dw = room(E * h, 4);
  c->b = room(E, 4);
  c->db = room(E, 4);
  c->dweight = room(t * K, 4);
  c->dlogits = room(t * E, 4);
  c->mask = room(t, 1);
  uint64_t state = 5;
  for (size_t i = 0; i < t * h; i++) c->x[i] = draw(&state);
  for (size_t i = 0; i < E * h; i++) c->w[i] = draw(&state);
  for (size_t i = 0; i < E; i++) c->b[i] = draw(&state);
  for (size_t i = 0; i < t * K; i++) c->dweight[i] = draw(&state);
  c->step = (pmoe_step)PMOE_CONFIG_INIT(pmoe_step);
  c->step.training = 1;
  c->step.step = 9;
  c->step.first_token = 1000;
  c->params = (pmoe_gate_params)PMOE_CONFIG_INIT(pmoe_gate_params);
  c->params.weight = c->w;
  c->params.bias = cfg.bias ? c->b : NULL;
  c->params.weight_grad = c->dw;
  c->params.bias_grad = cfg.bias ? c->db : NULL;
  c->selection_bias = room(E, 4);
  for (size_t i = 0; i < E; i++) c->selection_bias[i] = 0.3f * draw(&state);
  if (cfg.selection_bias) c->params.selection_bias = c->selection_bias;
  if (cfg.router != PMOE_ROUTER_LINEAR) {
    c->params.weight = NULL;
    c->params.weight_grad = NULL;
  }
  c->routing = (pmoe_routing)PMOE_CONFIG_INIT(pmoe_routing);
  c->routing.expert = room(t * K, 4);
  c->routing.slot = room(t * K, 8);
  c->routing.weight = room(t * K, 4);
  c->routing.expert_count = room(E, 8);
  c->routing.expert_rows = room(E, 8);
  c->routing.loss_sums = room((MAX_SEQUENCES + 2) * (E + 1), 8);
  c->stats = (pmoe_gate_stats)PMOE_CONFIG_INIT(pmoe_gate_stats);
  return c;
}

static inline void case_free(gate_case *c) {
  pmoe_gate_destroy(c->gate);
  pmoe_ctx_destroy(c->ctx);
  void *all[] = {c->x,
                 c->dx,
                 c->w,
                 c->dw,
                 c->b,
                 c->db,
                 c->dweight,
                 c->dlogits,
                 c->mask,
                 c->routing.expert,
                 c->routing.slot,
                 c->routing.weight,
                 c->routing.expert_count,
                 c->routing.expert_rows,
                 c->routing.loss_sums,
                 c->selection_bias};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  free(c);
}

static inline void use_mask(gate_case *c) {
  c->step.token_mask = c->mask;
  c->step.token_mask_len = c->T;
}

static inline void mask_some(gate_case *c, int every) {
  for (int64_t t = 0; t < c->T; t++) c->mask[t] = t % every != 1;
  use_mask(c);
}

static inline bool is_masked(const gate_case *c, int64_t t) { return c->step.token_mask && !c->mask[t]; }

static inline pmoe_mat mat_f32(float *data, int64_t rows, int64_t cols) {
  return (pmoe_mat){data, PMOE_F32, rows, cols, cols};
}

static inline void case_forward(gate_case *c) {
  pmoe_mat x = mat_f32(c->x, c->T, c->H);
  assert_int_equal(pmoe_gate_forward(c->gate, &c->params, &c->step, &x, &c->routing, &c->stats, NULL), PMOE_OK);
}

/* Gradients start from zero. */
static inline void case_backward(gate_case *c, float loss_scale) {
  memset(c->dx, 0, (size_t)(c->T * c->H) * 4);
  memset(c->dw, 0, (size_t)(c->cfg.num_experts * c->H) * 4);
  memset(c->db, 0, (size_t)c->cfg.num_experts * 4);
  pmoe_mat x = mat_f32(c->x, c->T, c->H), dx = mat_f32(c->dx, c->T, c->H);
  assert_int_equal(pmoe_gate_backward(c->gate, &c->params, &c->step, &x, &c->routing, c->dweight, loss_scale,
                                      c->dlogits, &dx, PMOE_BWD_ALL, NULL),
                   PMOE_OK);
}

#endif
