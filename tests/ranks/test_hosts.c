/* Hosts that spread a training state: ZeRO-1 (each rank keeps a part of the optimizer's state), ZeRO-3 (and a part of
 * the parameters, gathered just before use), and one that stops in one layout and goes on in another. All train with
 * momentum, and must get what the reference gets with the whole state in one place. */
#include "ranks/layout.h"

#include <stdlib.h>

enum { STEPS = 4, MOST = 6 };
static const double rate = 0.3, momentum = 0.8;

static const layout layouts[] = {
    {4, 1, 1, 1, 2, 1, 0, NULL}, {4, 2, 1, 1, 2, 1, 0, NULL}, {4, 2, 1, 1, 2, 2, 1, NULL}, {6, 2, 1, 1, 3, 1, 1, NULL},
    {8, 2, 2, 1, 2, 2, 0, NULL}, {8, 2, 1, 2, 2, 1, 0, NULL}, {8, 4, 1, 1, 2, 2, 1, NULL}, {8, 1, 1, 1, 4, 1, 0, NULL},
};
enum { LAYOUTS = sizeof layouts / sizeof layouts[0] };

static layout_case case_of(int i) {
  layout_case c = {.layout = layouts[i], .spec = rig_spec_default(), .seed = 600 + (uint64_t)i, .most_tokens = MOST};
  c.spec.gate.num_experts = 5;
  c.spec.experts.act = PMOE_ACT_SWIGLU;
  c.spec.experts.bias = 1;
  c.spec.residual.mix = PMOE_MIX_LEARNED;
  c.spec.residual.inner = 9;
  c.spec.slack = 3.0;
  return c;
}

/* The ranks over which a parameter's gradient is summed, which hold copies of it. */
static pmoe_comm *copies_of(pmoe_topology *topology, const pmoe_param *p) {
  pmoe_comm *expert_dp = NULL, *dense_dp = NULL, *stage = NULL;
  if (pmoe_topology_groups(topology, 0, NULL, &expert_dp, &dense_dp) != PMOE_OK ||
      pmoe_topology_stage(topology, NULL, &stage) != PMOE_OK)
    return NULL;
  return p->reduce_group == PMOE_GROUP_EXPERT_DP  ? expert_dp
         : p->reduce_group == PMOE_GROUP_DENSE_DP ? dense_dp
                                                  : stage;
}

/* ---- the reference, with the whole state ---- */

typedef struct reference {
  double *velocity[ORACLE_TENSORS];
} reference;

static void reference_begin(reference *ref, const rig *r) {
  for (int t = 0; t < ORACLE_TENSORS; t++)
    ref->velocity[t] = calloc((size_t)r->model->tensor[t].numel + 1, sizeof *ref->velocity[t]);
}

static void reference_end(reference *ref) {
  for (int t = 0; t < ORACLE_TENSORS; t++) free(ref->velocity[t]);
}

static void reference_descend(reference *ref, rig *r, double scale) {
  for (int t = 0; t < ORACLE_TENSORS; t++)
    for (int64_t i = 0; i < r->model->tensor[t].numel; i++) {
      double *v = &ref->velocity[t][i];
      *v = momentum * *v + scale * r->model->tensor[t].grad[i];
      r->model->tensor[t].data[i] -= rate * *v;
    }
}

/* ---- a host that keeps 1/n of everything, or of the optimizer's state alone ---- */

typedef struct part {
  pmoe_comm *copies;
  int64_t size; /* of each rank's part; the last may reach beyond the end */
  int64_t first, count;
  float *velocity, *values; /* [count]; values: ZeRO-3 */
} part;

typedef struct host {
  rig *r;
  int keeps_all; /* parameters whole on each rank (ZeRO-1) */
  part part[RIG_MAX_PARAMS];
} host;

static void host_begin(host *h, rig *r, pmoe_topology *topology, int keeps_all) {
  memset(h, 0, sizeof *h);
  h->r = r;
  h->keeps_all = keeps_all;
  for (int32_t p = 0; p < r->num_params; p++) {
    part *own = &h->part[p];
    int64_t n = r->param[p].numel;
    own->copies = copies_of(topology, &r->param[p]);
    int32_t ranks = pmoe_comm_size(own->copies);
    own->size = (n + ranks - 1) / ranks;
    own->first = own->size * pmoe_comm_rank(own->copies);
    if (own->first > n) own->first = n;
    own->count = own->first + own->size < n ? own->size : n - own->first;
    own->velocity = calloc((size_t)own->size + 1, sizeof(float));
    own->values = calloc((size_t)own->size + 1, sizeof(float));
    if (own->count > 0) memcpy(own->values, (float *)r->param[p].data + own->first, (size_t)own->count * sizeof(float));
  }
}

static void host_end(host *h) {
  for (int32_t p = 0; p < h->r->num_params; p++) {
    free(h->part[p].velocity);
    free(h->part[p].values);
  }
}

/* The whole of what each rank has `count` of, as an all-gather of equal parts. */
static pmoe_status gather(const part *own, const float *values, float *whole, int64_t n) {
  int32_t ranks = pmoe_comm_size(own->copies);
  float *parts = calloc((size_t)(own->size * ranks) + 1, sizeof *parts);
  pmoe_status status = pmoe_comm_allgather(own->copies, values, parts, (size_t)own->size * sizeof *values);
  if (n > 0) memcpy(whole, parts, (size_t)n * sizeof *parts);
  free(parts);
  return status;
}

/* Parameters appear at new addresses just before use; gradients too, if they are wanted. */
static int bind(host *h, int with_grads) {
  int failures = 0;
  for (int32_t p = 0; p < h->r->num_params; p++) {
    pmoe_param *param = &h->r->param[p];
    size_t bytes = (size_t)param->numel * sizeof(float) + 1;
    param->data = malloc(bytes);
    param->grad = with_grads ? calloc(bytes, 1) : NULL;
    CHECK(failures, gather(&h->part[p], h->part[p].values, param->data, param->numel) == PMOE_OK, "%s",
          pmoe_last_error());
    CHECK(failures, pmoe_layer_bind_param(h->r->layer, p, param->data, param->grad) == PMOE_OK, "%s",
          pmoe_last_error());
  }
  return failures;
}

static int unbind(host *h) {
  int failures = 0;
  for (int32_t p = 0; p < h->r->num_params; p++) {
    pmoe_param *param = &h->r->param[p];
    CHECK(failures, pmoe_layer_bind_param(h->r->layer, p, NULL, NULL) == PMOE_OK, "%s", pmoe_last_error());
    free(param->data);
    free(param->grad);
    param->data = param->grad = NULL;
  }
  return failures;
}

/* This rank's part of each gradient, summed over the copies: the host's reduce-scatter. */
static int update(host *h, double scale, bool summed) {
  int failures = 0;
  for (int32_t p = 0; p < h->r->num_params; p++) {
    pmoe_param *param = &h->r->param[p];
    part *own = &h->part[p];
    float *grad = param->grad;
    if (!summed)
      CHECK(failures, pmoe_comm_allreduce(own->copies, grad, param->numel, PMOE_F32) == PMOE_OK, "%s",
            pmoe_last_error());
    for (int64_t i = 0; i < own->count; i++) {
      double g = (double)grad[own->first + i] * (summed ? 1.0 : scale);
      own->velocity[i] = (float)(momentum * (double)own->velocity[i] + g);
      own->values[i] -= (float)rate * own->velocity[i];
    }
    if (h->keeps_all && param->numel > 0)
      CHECK(failures, gather(own, own->values, param->data, param->numel) == PMOE_OK, "%s", pmoe_last_error());
    else if (h->keeps_all) CHECK(failures, gather(own, own->values, NULL, 0) == PMOE_OK, "%s", pmoe_last_error());
  }
  return failures;
}

static int step(host *h, reference *ref, const layout_case *c, const layout_place *place, uint64_t n) {
  int failures = 0;
  rig *r = h->r;
  rig_plan plan = {.label = "host", .training = 1, .loss_scale = 1.0, .seed = c->seed + n, .step = n};
  layout_draw_tokens(c, place, n, &plan);
  rig_step s;
  oracle_zero_grads(r->model);
  if (h->keeps_all) rig_zero_grads(r);
  rig_step_begin(r, &s, &plan);
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = MOST * place->tp;
  pmoe_stash *stash = NULL;
  CHECK(failures, pmoe_stash_create(r->layer, &cfg, NULL, 0, &stash) == PMOE_OK, "%s", pmoe_last_error());
  if (!h->keeps_all) failures += bind(h, 0);
  CHECK(failures, rig_forward(r, stash, &s) == PMOE_OK, "%s", pmoe_last_error());
  if (!h->keeps_all) failures += unbind(h) + bind(h, 1);
  CHECK(failures, rig_backward(r, stash, &s, PMOE_BWD_ALL) == PMOE_OK, "%s", pmoe_last_error());
  if (!failures) failures += rig_check(r, stash, &s, 1);
  double scale = (double)(float)(1.0 / (double)(s.total + 1));
  if (h->keeps_all) {
    CHECK(failures, pmoe_layer_reduce_grads(r->layer, (float)scale, NULL) == PMOE_OK, "%s", pmoe_last_error());
    failures += rig_check_grads(r, scale, "host");
  }
  if (!failures) failures += update(h, scale, h->keeps_all != 0);
  if (!h->keeps_all) failures += unbind(h);
  reference_descend(ref, r, scale);
  pmoe_stash_destroy(stash);
  rig_step_end(&s);
  return failures;
}

/* Parameters and the optimizer's state, this rank's parts of them, against the whole. */
static int check_state(const host *h, const reference *ref) {
  int failures = 0;
  const rig *r = h->r;
  for (int32_t p = 0; p < r->num_params; p++) {
    const part *own = &h->part[p];
    double *values = calloc((size_t)own->size + 1, sizeof *values),
           *velocity = calloc((size_t)own->size + 1, sizeof *velocity);
    for (int64_t i = 0; i < own->count; i++) {
      int64_t at = rig_element(r, p, own->first + i);
      values[i] = r->tensor[p]->data[at];
      velocity[i] = ref->velocity[r->tensor[p] - r->model->tensor][at];
    }
    pmoe_mat got = {own->values, PMOE_F32, 1, own->count, own->count};
    failures += test_compare_within(r->param[p].name, &got, values, 1.0, test_tolerance_wide(PMOE_F32, 3.0));
    got.data = own->velocity;
    failures += test_compare_within(r->param[p].name, &got, velocity, 1.0, test_tolerance_wide(PMOE_F32, 3.0));
    free(values);
    free(velocity);
  }
  return failures;
}

static int train_spread(world *w, int keeps_all) {
  const layout_case *c = w->arg;
  pmoe_topology *topology = NULL;
  layout_place place = {0};
  rig r = {0};
  int failures = layout_open(w, c, &topology, &place, &r);
  if (failures) return failures;
  host h;
  reference ref;
  host_begin(&h, &r, topology, keeps_all);
  reference_begin(&ref, &r);
  if (!keeps_all) failures += unbind(&h);
  for (uint64_t n = 0; n < STEPS && !failures; n++) failures += step(&h, &ref, c, &place, n);
  if (!failures) failures += check_state(&h, &ref);
  reference_end(&ref);
  host_end(&h);
  rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return failures;
}

static int zero_1(world *w) { return train_spread(w, 1); }
static int zero_3(world *w) { return train_spread(w, 0); }

static void each(world_body body) {
  for (int i = 0; i < LAYOUTS; i++) {
    layout_case c = case_of(i);
    world_run(c.layout.world, body, &c);
  }
}

static void test_zero_1(void **state) {
  (void)state;
  each(zero_1);
}

static void test_zero_3(void **state) {
  (void)state;
  each(zero_3);
}

/* ---- stopping in one layout and going on in another ---- */

/* A checkpoint by name and place in the whole parameter, as pmoe_param tells them. */
typedef struct checkpoint {
  layout_case c;
  uint64_t begin, end; /* steps */
  float *values[ORACLE_TENSORS], *velocity[ORACLE_TENSORS];
} checkpoint;

static void save(const host *h, checkpoint *to) {
  for (int32_t p = 0; p < h->r->num_params; p++) {
    int64_t t = h->r->tensor[p] - h->r->model->tensor;
    for (int64_t i = 0; i < h->part[p].count; i++) {
      int64_t at = rig_element(h->r, p, h->part[p].first + i);
      to->values[t][at] = h->part[p].values[i];
      to->velocity[t][at] = h->part[p].velocity[i];
    }
  }
}

static int load(host *h, const checkpoint *from) {
  int failures = 0;
  for (int32_t p = 0; p < h->r->num_params; p++) {
    int64_t t = h->r->tensor[p] - h->r->model->tensor;
    for (int64_t i = 0; i < h->part[p].count; i++) {
      int64_t at = rig_element(h->r, p, h->part[p].first + i);
      h->part[p].values[i] = from->values[t][at];
      h->part[p].velocity[i] = from->velocity[t][at];
    }
    CHECK(failures, gather(&h->part[p], h->part[p].values, h->r->param[p].data, h->r->param[p].numel) == PMOE_OK, "%s",
          pmoe_last_error());
  }
  return failures;
}

/* The reference runs all steps from the first; the layer those of this layout. Tokens do not depend on the layout. */
static int continue_training(world *w) {
  checkpoint *cp = (checkpoint *)w->arg;
  pmoe_topology *topology = NULL;
  layout_place place = {0};
  rig r = {0};
  int failures = layout_open(w, &cp->c, &topology, &place, &r);
  if (failures) return failures;
  host h;
  reference ref;
  host_begin(&h, &r, topology, 1);
  reference_begin(&ref, &r);
  if (cp->begin > 0) failures += load(&h, cp);
  for (uint64_t n = 0; n < cp->end && !failures; n++) {
    if (n >= cp->begin) {
      failures += step(&h, &ref, &cp->c, &place, n);
      continue;
    }
    /* What the first layout did, on the reference's side alone. */
    rig_plan plan = {.label = "before", .training = 1, .loss_scale = 1.0, .seed = cp->c.seed + n, .step = n};
    layout_draw_tokens(&cp->c, &place, n, &plan);
    rig_step s;
    rig_step_begin(&r, &s, &plan);
    oracle_batch batch = {.tokens = s.total,
                          .num_ranks = s.plan.num_ranks,
                          .rank_tokens = s.plan.rank_tokens,
                          .training = 1,
                          .loss_scale = 1.0,
                          .x = s.x_all,
                          .dy = s.dy_all};
    oracle_zero_grads(r.model);
    oracle_result_destroy(oracle_run(r.model, &batch));
    reference_descend(&ref, &r, (double)(float)(1.0 / (double)(s.total + 1)));
    rig_step_end(&s);
  }
  if (!failures) failures += check_state(&h, &ref);
  if (!failures) save(&h, cp);
  reference_end(&ref);
  host_end(&h);
  rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_another_layout_goes_on(void **state) {
  (void)state;
  if (ranks_are_processes()) return; /* the checkpoint is in memory */
  for (int from = 0; from < LAYOUTS; from++)
    for (int to = 0; to < LAYOUTS; to += 3) {
      if (layouts[from].pp > 1 || layouts[to].pp > 1) continue;
      checkpoint cp = {.c = case_of(from), .end = 2};
      cp.c.even = 24;                                         /* tokens in all, however many ranks */
      cp.c.spec.gate.aux_coef = cp.c.spec.gate.z_coef = 0.0f; /* means over each rank's tokens */
      oracle_model *sizes =
          oracle_model_create(cp.c.spec.hidden, &cp.c.spec.gate, &cp.c.spec.experts, &cp.c.spec.residual);
      for (int t = 0; t < ORACLE_TENSORS; t++) {
        cp.values[t] = calloc((size_t)sizes->tensor[t].numel + 1, sizeof(float));
        cp.velocity[t] = calloc((size_t)sizes->tensor[t].numel + 1, sizeof(float));
      }
      oracle_model_destroy(sizes);
      world_run(layouts[from].world, continue_training, &cp);
      cp.begin = 2;
      cp.end = 4;
      cp.c.layout = layouts[to];
      world_run(layouts[to].world, continue_training, &cp);
      for (int t = 0; t < ORACLE_TENSORS; t++) {
        free(cp.values[t]);
        free(cp.velocity[t]);
      }
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_zero_1), cmocka_unit_test(test_zero_3),
                                     cmocka_unit_test(test_another_layout_goes_on)};
  return world_main("hosts that spread their state", tests, sizeof tests / sizeof tests[0]);
}
