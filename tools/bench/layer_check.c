#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layer_setup.h"
#include "ranks.h"

enum { SAMPLED_TOKENS = 4 };
enum { ERROR_Y, ERROR_DX, ERROR_GRADS, NUM_ERRORS };

typedef struct checker {
  bench_layer_setup *setup;
  bench_router_reference router;
  double *x, *dy, *dout, *y, *dx, *pre, *act, *out, *dlogits; /* pre, act, out: [K + 1] of them, the branch's last */
  float *mix;                                                 /* [2,H], then [2] */
  double scale[2];                                            /* what experts and branch are multiplied by */
  void *memory;
} checker;

static pmoe_status make(bench_layer_setup *s, checker *c) {
  const bench_options *o = s->options;
  int64_t h = o->hidden, k = o->top_k + 1, f1 = bench_inner1(o);
  *c = (checker){.setup = s, .scale = {1, 0}};
  c->mix = (float *)(void *)s->mix.host;
  pmoe_status status = bench_router_create(o, &c->router);
  if (status < 0) return status;
  double *at;
  status = bench_alloc((size_t)(5 * h + k * (f1 + o->inner + h) + o->experts) * sizeof *at, &at);
  if (status < 0) return status;
  c->memory = at;
  c->x = at, c->dy = at + h, c->dout = at + 2 * h, c->y = at + 3 * h, c->dx = at + 4 * h;
  c->pre = at + 5 * h, c->act = c->pre + k * f1, c->out = c->act + k * o->inner, c->dlogits = c->out + k * h;
  return PMOE_OK;
}

/* The coefficients of the token in x. */
static void mix_token(checker *c) {
  int64_t h = c->setup->options->hidden;
  if (!c->setup->options->residual) return;
  double logit[2] = {(double)c->mix[2 * h], (double)c->mix[2 * h + 1]};
  for (int64_t i = 0; i < h; i++)
    for (int j = 0; j < 2; j++) logit[j] += (double)c->mix[j * h + i] * c->x[i];
  c->scale[0] = 1 / (1 + exp(logit[1] - logit[0]));
  c->scale[1] = 1 - c->scale[0];
}

/* The branch's part of y and dx; dmoe is dy . the experts' output. */
static void add_branch(checker *c, double dmoe) {
  const bench_options *o = c->setup->options;
  int64_t h = o->hidden, k = o->top_k;
  double *pre = c->pre + k * bench_inner1(o), *out = c->out + k * h, dmlp = 0;
  bench_expert_forward(o, o->experts, c->x, pre, c->act + k * o->inner, out);
  for (int64_t i = 0; i < h; i++) {
    c->y[i] += c->scale[1] * out[i];
    dmlp += c->dy[i] * out[i];
    c->dout[i] = c->scale[1] * c->dy[i];
  }
  bench_expert_backward(o, o->experts, pre, c->dout, c->dx);
  double dlogit = c->scale[0] * c->scale[1] * (dmoe - dmlp);
  for (int64_t i = 0; i < h; i++) c->dx[i] += dlogit * ((double)c->mix[i] - (double)c->mix[h + i]);
}

/* y_t and dx_t of the token in x and dy. */
static void compute_token(checker *c) {
  const bench_options *o = c->setup->options;
  int64_t h = o->hidden, f1 = bench_inner1(o);
  double dweight[BENCH_MAX_TOP_K] = {0}, dmoe = 0;
  memset(c->y, 0, (size_t)h * sizeof *c->y);
  memset(c->dx, 0, (size_t)h * sizeof *c->dx);
  bench_router_forward(&c->router, c->x);
  mix_token(c);
  for (int32_t k = 0; k < o->top_k; k++) {
    int32_t expert = c->router.expert[k];
    double weight = c->router.prob[expert], *out = c->out + k * h;
    bench_expert_forward(o, expert, c->x, c->pre + k * f1, c->act + k * o->inner, out);
    for (int64_t i = 0; i < h; i++) {
      c->y[i] += c->scale[0] * weight * out[i];
      dweight[k] += c->scale[0] * c->dy[i] * out[i];
      dmoe += c->dy[i] * weight * out[i];
      c->dout[i] = c->scale[0] * weight * c->dy[i];
    }
    bench_expert_backward(o, expert, c->pre + k * f1, c->dout, c->dx);
  }
  bench_router_backward(&c->router, dweight, c->dlogits);
  for (int64_t e = 0; e < o->experts; e++)
    for (int64_t i = 0; i < h; i++) c->dx[i] += c->dlogits[e] * (double)c->router.weight[e * h + i];
  if (o->residual) add_branch(c, dmoe);
}

static void check_token(checker *c, int64_t local, bench_error *errors) {
  const bench_layer_setup *s = c->setup;
  const bench_options *o = s->options;
  bench_row(o, BENCH_X, s->first_token + local, c->x);
  bench_row(o, BENCH_DY, s->first_token + local, c->dy);
  compute_token(c);
  for (int64_t h = 0; h < o->hidden; h++) {
    bench_compare(&errors[ERROR_Y], (double)bench_load(o->dtype, s->y.data, local * o->hidden + h), c->y[h]);
    bench_compare(&errors[ERROR_DX], (double)bench_load(o->dtype, s->dx.data, local * o->hidden + h), c->dx[h]);
  }
}

/* Tokens of every rank reach an expert, this rank's the branch. */
static pmoe_status check_feature(checker *c, const bench_expert_params *params, int32_t local, int32_t feature,
                                 bench_error *error) {
  const bench_layer_setup *s = c->setup;
  const bench_options *o = s->options;
  bool branch = params == &s->branch;
  bench_feature f;
  pmoe_status status = bench_feature_create(o, params->first + local, feature, &f);
  if (status < 0) return status;
  int32_t chosen[BENCH_MAX_TOP_K];
  int64_t first = branch ? s->first_token : 0, last = branch ? first + s->tokens : o->tokens;
  for (int64_t t = first; t < last; t++) {
    bool comes = branch;
    bench_choose(o, t, chosen);
    for (int32_t k = 0; k < o->top_k; k++) comes = comes || chosen[k] == f.expert;
    if (!comes) continue;
    bench_row(o, BENCH_X, t, c->x);
    bench_row(o, BENCH_DY, t, c->dy);
    mix_token(c);
    if (!branch) bench_router_forward(&c->router, c->x);
    bench_feature_add(&f, c->x, c->dy, branch ? c->scale[1] : c->scale[0] * c->router.prob[f.expert]);
  }
  status = bench_params_compare(params, local, &f, error);
  bench_feature_destroy(&f);
  return status;
}

/* Every choice of every token of this rank as the codes in x ask for it. */
static pmoe_status routing_is_right(const bench_layer_setup *s, bool *right) {
  const bench_options *o = s->options;
  pmoe_routing routing = PMOE_CONFIG_INIT(pmoe_routing);
  BENCH_TRY(pmoe_stash_routing(s->stash, &routing));
  int32_t want[BENCH_MAX_TOP_K], *fetched = NULL;
  const int32_t *expert = routing.expert;
  *right = routing.tokens == s->tokens;
  if (s->device && *right) {
    size_t bytes = (size_t)(s->tokens * o->top_k) * sizeof *fetched;
    BENCH_TRY(bench_alloc(bytes, &fetched));
    pmoe_status status = s->device->copy(s->device, fetched, expert, bytes);
    if (status < 0) return status;
    expert = fetched;
  }
  for (int64_t t = 0; t < s->tokens && *right; t++) {
    bench_choose(o, s->first_token + t, want);
    *right = memcmp(want, expert + t * o->top_k, (size_t)o->top_k * sizeof *want) == 0;
  }
  free(fetched);
  return PMOE_OK;
}

static pmoe_status compare(checker *c, double *forward_error, double *backward_error) {
  bench_layer_setup *s = c->setup;
  bench_error errors[NUM_ERRORS] = {{0, 0}};
  for (int64_t i = 0; s->tokens > 0 && i < SAMPLED_TOKENS; i++)
    check_token(c, s->tokens * (2 * i + 1) / (2 * SAMPLED_TOKENS), errors);
  if (s->num_experts > 0) {
    pmoe_status status = check_feature(c, &s->params, 0, 0, &errors[ERROR_GRADS]);
    if (status < 0) return status;
    status = check_feature(c, &s->params, s->num_experts - 1, s->options->inner - 1, &errors[ERROR_GRADS]);
    if (status < 0) return status;
  }
  if (s->options->residual) {
    pmoe_status status = check_feature(c, &s->branch, 0, s->options->inner / 2, &errors[ERROR_GRADS]);
    if (status < 0) return status;
  }
  *forward_error = bench_relative(&errors[ERROR_Y]);
  *backward_error = bench_worst(&errors[ERROR_DX], NUM_ERRORS - ERROR_DX);
  return PMOE_OK;
}

pmoe_status bench_layer_check(bench_layer_setup *s, double *forward_error, double *backward_error) {
  pmoe_status status = bench_params_zero_grads(&s->params);
  if (status == PMOE_OK && s->options->residual) status = bench_params_zero_grads(&s->branch);
  if (status == PMOE_OK) status = bench_layer_forward(s);
  if (status == PMOE_OK) status = bench_layer_backward(s);
  if (status == PMOE_OK) status = bench_block_pull(&s->batch, s->batch.host, s->batch.bytes);
  if (status < 0) return status;
  bool right = false;
  status = routing_is_right(s, &right);
  if (status < 0) return status;
  checker c;
  status = make(s, &c);
  if (status == PMOE_OK) status = compare(&c, forward_error, backward_error);
  if (!right) *forward_error = NAN;
  bench_router_destroy(&c.router);
  free(c.memory);
  return status;
}
