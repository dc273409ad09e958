/* Routers of a layer over several ranks: the selection bias and its update, logits and routings of the host's, the load
 * that a person reads, sequences that ranks share. */
#include "ranks/world.h"

#include <math.h>
#include <stdlib.h>

enum { H = 6, E = 4, K = 2, T = 9, MAX_PARAMS = 8 };

typedef struct bench {
  pmoe_topology *topology;
  pmoe_layer *layer;
  pmoe_stash *stash;
  int32_t num_params;
  pmoe_param param[MAX_PARAMS];
} bench;

static pmoe_gate_config gate_of(void) {
  pmoe_gate_config gate = PMOE_CONFIG_INIT(pmoe_gate_config);
  gate.num_experts = E;
  gate.top_k = K;
  return gate;
}

static float number(int64_t i) { return (float)((i * 7919 + 13) % 211 - 105) / 120.0f; }

/* group NULL: the losses' groups are the topology's. */
static int open_sharing(bench *b, world *w, int32_t tp, const pmoe_gate_config *gate, int32_t max_sequences,
                        pmoe_comm *group) {
  int failures = 0;
  memset(b, 0, sizeof *b);
  pmoe_topology_config topology = PMOE_CONFIG_INIT(pmoe_topology_config);
  topology.tp = tp;
  topology.ep = w->nranks;
  pmoe_experts_config experts = PMOE_CONFIG_INIT(pmoe_experts_config);
  experts.inner = 5;
  pmoe_layer_config cfg = PMOE_CONFIG_INIT(pmoe_layer_config);
  cfg.hidden = H;
  cfg.gate = gate;
  cfg.experts = &experts;
  cfg.max_sequences = max_sequences;
  cfg.micro_batch = cfg.loss_global = group;
  pmoe_stash_config stash = PMOE_CONFIG_INIT(pmoe_stash_config);
  stash.max_tokens = T;
  CHECK(failures, pmoe_topology_create(w->ctx, w->comm, &topology, &b->topology) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, failures || pmoe_layer_create(w->ctx, b->topology, &cfg, &b->layer) == PMOE_OK, "%s",
        pmoe_last_error());
  CHECK(failures, failures || pmoe_stash_create(b->layer, &stash, NULL, 0, &b->stash) == PMOE_OK, "%s",
        pmoe_last_error());
  b->num_params = failures ? 0 : pmoe_layer_num_params(b->layer);
  for (int32_t i = 0; i < b->num_params; i++) {
    pmoe_param *p = &b->param[i];
    p->size = sizeof *p;
    CHECK(failures, pmoe_layer_param(b->layer, i, p) == PMOE_OK, "%s", pmoe_last_error());
    p->data = calloc((size_t)p->numel + 1, sizeof(float));
    p->grad = p->reduce_group == PMOE_GROUP_NONE ? NULL : calloc((size_t)p->numel + 1, sizeof(float));
    CHECK(failures, pmoe_layer_bind_param(b->layer, i, p->data, p->grad) == PMOE_OK, "%s", pmoe_last_error());
  }
  CHECK(failures, failures || pmoe_layer_init_params(b->layer, 5, 0.5f) == PMOE_OK, "%s", pmoe_last_error());
  return failures;
}

static int open_layer(bench *b, world *w, int32_t tp, const pmoe_gate_config *gate, int32_t max_sequences) {
  return open_sharing(b, w, tp, gate, max_sequences, NULL);
}

static void close_layer(bench *b) {
  pmoe_stash_destroy(b->stash);
  pmoe_layer_destroy(b->layer);
  pmoe_topology_destroy(b->topology);
  for (int32_t i = 0; i < b->num_params; i++) {
    free(b->param[i].data);
    free(b->param[i].grad);
  }
}

static pmoe_param *param(bench *b, const char *name) {
  for (int32_t i = 0; i < b->num_params; i++)
    if (strcmp(b->param[i].name, name) == 0) return &b->param[i];
  return NULL;
}

typedef struct data {
  float x[T * H], y[T * H], dy[T * H], dx[T * H];
  pmoe_mat xm, ym, dym, dxm;
  pmoe_step step;
} data;

static void fill(data *d, int64_t tokens, int64_t salt) {
  memset(d, 0, sizeof *d);
  for (int64_t i = 0; i < T * H; i++) {
    d->x[i] = number(i + salt);
    d->dy[i] = number(3 * i + salt + 1);
  }
  d->xm = (pmoe_mat){d->x, PMOE_F32, tokens, H, H};
  d->ym = (pmoe_mat){d->y, PMOE_F32, tokens, H, H};
  d->dym = (pmoe_mat){d->dy, PMOE_F32, tokens, H, H};
  d->dxm = (pmoe_mat){d->dx, PMOE_F32, tokens, H, H};
  d->step = (pmoe_step)PMOE_CONFIG_INIT(pmoe_step);
  d->step.training = 1;
}

static int forward(bench *b, data *d) {
  int failures = 0;
  CHECK(failures, pmoe_layer_forward(b->layer, b->stash, &d->step, &d->xm, &d->ym, NULL) == PMOE_OK, "%s",
        pmoe_last_error());
  return failures;
}

static int backward(bench *b, data *d) {
  int failures = 0;
  CHECK(failures, pmoe_layer_backward(b->layer, b->stash, 1, &d->dym, &d->dxm, PMOE_BWD_ALL, NULL) == PMOE_OK, "%s",
        pmoe_last_error());
  return failures;
}

static int add_counts(bench *b, int64_t *count) {
  int failures = 0;
  pmoe_routing routing = PMOE_CONFIG_INIT(pmoe_routing);
  CHECK(failures, pmoe_stash_routing(b->stash, &routing) == PMOE_OK, "%s", pmoe_last_error());
  for (int e = 0; e < E && !failures; e++) count[e] += routing.expert_count[e];
  return failures;
}

/* Two micro-batches of different tokens on every rank, one of them computed again, and an evaluation. */
static int bias_body(world *w) {
  bench b;
  data d;
  pmoe_gate_config gate = gate_of();
  gate.score = PMOE_SCORE_SIGMOID;
  gate.norm = PMOE_NORM_BEFORE_DROP;
  gate.selection_bias = 1;
  int failures = open_layer(&b, w, 1, &gate, 0);
  int64_t count[E] = {0}, all[E * 16], total[E] = {0}, sum = 0;
  float want[E] = {0}, centre = 0;
  for (int micro = 0; micro < 2 && !failures; micro++) {
    fill(&d, (w->rank * 2 + micro * 3) % (T + 1), w->rank * 100 + micro * 17);
    failures += forward(&b, &d);
    failures += add_counts(&b, count);
  }
  d.step.recompute = 1;
  if (!failures) failures += forward(&b, &d);
  d.step.recompute = d.step.training = 0;
  if (!failures) failures += forward(&b, &d);
  CHECK(failures, pmoe_comm_allgather(w->comm, count, all, sizeof count) == PMOE_OK, "%s", pmoe_last_error());
  for (int i = 0; i < E * w->nranks; i++) total[i % E] += all[i];
  for (int e = 0; e < E; e++) sum += total[e];
  for (int e = 0; e < E; e++) {
    want[e] = total[e] * E < sum ? 1 : total[e] * E > sum ? -1 : 0;
    centre += want[e] / E;
  }
  const float *bias = failures ? want : param(&b, "router.selection_bias")->data;
  CHECK(failures, pmoe_layer_update_selection_bias(b.layer, 0.125f, 0, NULL) == PMOE_OK, "%s", pmoe_last_error());
  for (int e = 0; e < E; e++)
    CHECK(failures, bias[e] == 0.125f * want[e], "bias %d: %g, expected %g", e, (double)bias[e],
          0.125 * (double)want[e]);
  /* Nothing was counted since: nothing changes, centred or not. */
  CHECK(failures, pmoe_layer_update_selection_bias(b.layer, 0.125f, 1, NULL) == PMOE_OK, "%s", pmoe_last_error());
  for (int e = 0; e < E; e++) CHECK(failures, bias[e] == 0.125f * want[e], "bias %d changed", e);
  /* The gradients' helpers pass it by. */
  fill(&d, T, w->rank);
  if (!failures) failures += forward(&b, &d) + backward(&b, &d);
  double sumsq = 0;
  CHECK(failures, pmoe_layer_reduce_grads(b.layer, 1, NULL) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_layer_grad_sumsq(b.layer, &sumsq, NULL) == PMOE_OK && sumsq > 0, "%s", pmoe_last_error());
  close_layer(&b);
  return failures;
}

static int bias_error_body(world *w) {
  bench b;
  pmoe_gate_config gate = gate_of();
  int failures = open_layer(&b, w, 1, &gate, 0);
  CHECK(failures, pmoe_layer_update_selection_bias(b.layer, 0.1f, 0, NULL) == PMOE_ERR_STATE, "no bias");
  close_layer(&b);
  gate.selection_bias = 1;
  failures += open_layer(&b, w, 1, &gate, 0);
#ifndef TEST_ON_DEVICE_H /* where steps agree on nothing */
  /* One rank is wrong: it says so, the others say which. */
  float rate = w->rank == w->nranks - 1 ? NAN : 0.1f;
  pmoe_status status = pmoe_layer_update_selection_bias(b.layer, rate, 0, NULL);
  CHECK(failures, status == (w->rank == w->nranks - 1 ? PMOE_ERR_ARG : PMOE_ERR_COMM), "%s", pmoe_last_error());
#endif
  CHECK(failures, pmoe_layer_update_selection_bias(b.layer, 0.1f, 0, NULL) == PMOE_OK, "%s", pmoe_last_error());
  close_layer(&b);
  return failures;
}

/* The host computes the layer's own logits, or takes its routing: the same outputs, and gradients that add up to the
 * learned router's. tp > 1: all ranks bring the same tokens, and each routes a slice. */
static int host_body(world *w, int32_t tp) {
  bench own, host;
  data d, e;
  static const pmoe_router kinds[] = {PMOE_ROUTER_HOST_LOGITS, PMOE_ROUTER_HOST_ROUTING};
  pmoe_gate_config gate = gate_of();
  int64_t tokens = tp > 1 ? T : (w->rank * 4 + 3) % (T + 1), salt = tp > 1 ? 0 : w->rank * 50;
  int failures = open_layer(&own, w, tp, &gate, 0);
  fill(&d, tokens, salt);
  if (!failures) failures += forward(&own, &d) + backward(&own, &d);
  if (failures) return failures;
  const float *router = param(&own, "router.weight")->data;
  float logits[T * E], dlogits[T * E], weight[T * K], dweight[T * K];
  int32_t expert[T * K];
  for (int64_t t = 0; t < tokens; t++) {
    double score[E], sum = 0;
    for (int i = 0; i < E; i++) {
      double dot = 0;
      for (int j = 0; j < H; j++) dot += (double)router[i * H + j] * (double)d.x[t * H + j];
      logits[t * E + i] = (float)dot;
      sum += score[i] = exp(dot);
    }
    for (int k = 0; k < K; k++) {
      int best = -1;
      for (int i = 0; i < E; i++)
        if ((best < 0 || score[i] > score[best]) && (k == 0 || i != expert[t * K])) best = i;
      expert[t * K + k] = best;
      weight[t * K + k] = (float)(score[best] / sum);
    }
  }
  for (int kind = 0; kind < 2; kind++) {
    gate.router = kinds[kind];
    gate.choice = kind ? PMOE_CHOICE_GIVEN : PMOE_CHOICE_TOPK;
    failures += open_layer(&host, w, tp, &gate, 0);
    if (failures) break;
    CHECK(failures, !param(&host, "router.weight"), "a host's router has a parameter");
    fill(&e, tokens, salt);
    memset(dlogits, 0x7f, sizeof dlogits);
    memset(dweight, 0x7f, sizeof dweight);
    pmoe_mat lm = {logits, PMOE_F32, tokens, E, E}, dlm = {dlogits, PMOE_F32, tokens, E, E};
    if (kind) e.step.expert = expert, e.step.weight = weight, e.step.dweight = dweight;
    else e.step.logits = &lm, e.step.dlogits = &dlm;
    failures += forward(&host, &e);
    if (!failures) failures += backward(&host, &e);
    for (int64_t i = 0; i < tokens * H; i++)
      CHECK(failures, fabsf(e.y[i] - d.y[i]) <= 1e-5f * (1 + fabsf(d.y[i])), "y %d: %g, expected %g", (int)i,
            (double)e.y[i], (double)d.y[i]);
    if (tp > 1) {
      CHECK(failures, pmoe_comm_allreduce(w->comm, dlogits, kind ? 0 : tokens * E, PMOE_F32) == PMOE_OK, "%s",
            pmoe_last_error());
      CHECK(failures, pmoe_comm_allreduce(w->comm, dweight, kind ? tokens * K : 0, PMOE_F32) == PMOE_OK, "%s",
            pmoe_last_error());
    }
    for (int64_t t = 0; t < tokens && !failures; t++) {
      double score[E], sum = 0, dot = 0, dlogit[E];
      for (int i = 0; i < E; i++) sum += score[i] = exp((double)logits[t * E + i]);
      for (int i = 0; i < E; i++) score[i] /= sum;
      for (int k = 0; k < K && kind; k++) dot += (double)dweight[t * K + k] * score[expert[t * K + k]];
      for (int i = 0; i < E; i++) {
        dlogit[i] = kind ? -score[i] * dot : (double)dlogits[t * E + i];
        for (int k = 0; k < K && kind; k++)
          if (expert[t * K + k] == i) dlogit[i] += score[i] * (double)dweight[t * K + k];
      }
      for (int j = 0; j < H; j++) { /* what the learned router adds to dx */
        double want = (double)d.dx[t * H + j], got = (double)e.dx[t * H + j];
        for (int i = 0; i < E; i++) got += dlogit[i] * (double)router[i * H + j];
        CHECK(failures, fabs(got - want) <= 2e-5 * (1 + fabs(want)), "dx: %g, expected %g", got, want);
      }
    }
    close_layer(&host);
  }
  close_layer(&own);
  return failures;
}

static int host_ep_body(world *w) { return host_body(w, 1); }
static int host_tp_body(world *w) { return host_body(w, w->nranks); }

static int load_body(world *w) {
  bench b;
  data d;
  pmoe_gate_config gate = gate_of();
  gate.capacity_factor = 0.5f;
  int failures = open_layer(&b, w, 1, &gate, 0);
  pmoe_load load = PMOE_CONFIG_INIT(pmoe_load);
  CHECK(failures, pmoe_layer_load(b.layer, &load) == PMOE_OK && load.forwards == 0 && load.cv == 0, "before: %s",
        pmoe_last_error());
  float share[E] = {0}, mean_cv = 0;
  for (int n = 0; n < 3 && !failures; n++) {
    fill(&d, T, w->rank * 31 + n * 7);
    failures += forward(&b, &d);
    int64_t count[E] = {0};
    failures += add_counts(&b, count);
    pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
    CHECK(failures, pmoe_stash_metrics(b.stash, &m) == PMOE_OK, "%s", pmoe_last_error());
    CHECK(failures, pmoe_layer_load(b.layer, &load) == PMOE_OK, "%s", pmoe_last_error());
    CHECK(failures, load.forwards == n + 1 && load.num_experts == E, "%d forwards", (int)load.forwards);
    double mean = (double)(T * K) / E, variance = 0;
    for (int e = 0; e < E; e++) {
      float latest = (float)count[e] / (T * K);
      share[e] = n == 0 ? latest : 0.99f * share[e] + 0.01f * latest;
      variance += ((double)count[e] - mean) * ((double)count[e] - mean) / E;
      CHECK(failures, load.expert_count[e] == count[e], "count");
      CHECK(failures, fabsf(load.expert_share[e] - share[e]) < 1e-6f, "share");
    }
    float cv = (float)(sqrt(variance) / mean);
    mean_cv = n == 0 ? cv : 0.99f * mean_cv + 0.01f * cv;
    CHECK(failures, fabsf(load.cv - cv) < 1e-5f && fabsf(load.mean_cv - mean_cv) < 1e-5f, "cv");
    CHECK(failures, load.cv == m.load_cv && load.entropy == m.entropy && load.max_over_mean == m.load_max_over_mean,
          "not the metrics'");
    CHECK(failures, fabsf(load.dropped_share - (float)m.dropped / (T * K)) < 1e-6f && load.dropped_share > 0,
          "dropped");
  }
  d.step.training = 0;
  if (!failures) failures += forward(&b, &d);
  CHECK(failures, pmoe_layer_load(b.layer, &load) == PMOE_OK && load.forwards == 3, "evaluation counts");
  close_layer(&b);
  return failures;
}

/* Sequences cut over the ranks of a TP group: each rank's share of the loss, and all of it together, are one rank's. */
static int sequences_body(world *w) {
  bench b, alone;
  data d, one;
  pmoe_gate_config gate = gate_of();
  gate.seq_aux_coef = 0.5f;
  int32_t sequence[T];
  for (int t = 0; t < T; t++) sequence[t] = t % 3;
  int failures = open_layer(&b, w, w->nranks, &gate, 3);
  fill(&d, T, 4);
  d.step.sequence = sequence;
  d.step.num_sequences = 3;
  if (!failures) failures += forward(&b, &d) + backward(&b, &d);
  pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics), whole = PMOE_CONFIG_INIT(pmoe_metrics);
  CHECK(failures, pmoe_stash_metrics(b.stash, &m) == PMOE_OK, "%s", pmoe_last_error());
  float loss = m.seq_aux_loss;
  CHECK(failures, pmoe_comm_allreduce(w->comm, &loss, 1, PMOE_F32) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_comm *self = NULL;
  CHECK(failures, pmoe_comm_self(w->ctx, &self) == PMOE_OK, "%s", pmoe_last_error());
  world single = *w;
  single.rank = 0;
  single.nranks = 1;
  single.comm = self;
  failures += open_layer(&alone, &single, 1, &gate, 3);
  fill(&one, T, 4);
  one.step.sequence = sequence;
  one.step.num_sequences = 3;
  if (!failures) failures += forward(&alone, &one) + backward(&alone, &one);
  CHECK(failures, failures || pmoe_stash_metrics(alone.stash, &whole) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, fabsf(loss - whole.seq_aux_loss) <= 1e-6f * (1 + whole.seq_aux_loss), "loss %g, expected %g",
        (double)loss, (double)whole.seq_aux_loss);
  for (int i = 0; i < T * H && !failures; i++)
    CHECK(failures, fabsf(d.dx[i] - one.dx[i]) <= 1e-5f * (1 + fabsf(one.dx[i])), "dx %d: %g, expected %g", i,
          (double)d.dx[i], (double)one.dx[i]);
#ifndef TEST_ON_DEVICE_H
  /* One rank brings too many sequences: all return. */
  d.step.num_sequences = w->rank == 0 ? 4 : 3;
  pmoe_status status = failures ? PMOE_OK : pmoe_layer_forward(b.layer, b.stash, &d.step, &d.xm, &d.ym, NULL);
  CHECK(failures, failures || status == (w->rank == 0 ? PMOE_ERR_ARG : PMOE_ERR_COMM), "%s", pmoe_last_error());
  if (!failures) d.step.num_sequences = 3, failures += forward(&b, &d);
#endif
  close_layer(&alone);
  pmoe_comm_destroy(self);
  close_layer(&b);
  return failures;
}

/* Groups of the host's: data-parallel ranks that hold parts of one micro-batch. The losses and their gradients are
 * those of one rank with all tokens. */
static int given_groups_body(world *w) {
  enum { PART = 3, MOST = 8 };
  bench b, alone;
  data d;
  static const pmoe_score scores[] = {PMOE_SCORE_SOFTMAX, PMOE_SCORE_SIGMOID};
  int failures = 0;
  for (int i = 0; i < 2 && !failures && w->nranks <= MOST; i++) {
    pmoe_gate_config gate = gate_of();
    gate.score = scores[i];
    gate.aux_coef = 0.4f;
    gate.global_aux_coef = 0.3f;
    gate.z_coef = 0.2f;
    failures += open_sharing(&b, w, 1, &gate, 0, w->comm);
    int64_t own = w->rank % (PART + 1);
    fill(&d, own, w->rank * 40);
    memset(d.dy, 0, sizeof d.dy);
    if (!failures) failures += forward(&b, &d) + backward(&b, &d);
    pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
    CHECK(failures, failures || pmoe_stash_metrics(b.stash, &m) == PMOE_OK, "%s", pmoe_last_error());
    float got[3] = {m.aux_loss, m.global_aux_loss, m.z_loss}, x[MOST * PART * H], dx[MOST * PART * H];
    CHECK(failures, pmoe_comm_allreduce(w->comm, got, 3, PMOE_F32) == PMOE_OK, "%s", pmoe_last_error());
    CHECK(failures, pmoe_comm_allgather(w->comm, d.x, x, PART * H * sizeof(float)) == PMOE_OK, "%s", pmoe_last_error());
    int64_t total = 0, first = 0;
    float all[MOST * PART * H], y[MOST * PART * H], dy[MOST * PART * H] = {0};
    for (int r = 0; r < w->nranks; r++) {
      int64_t tokens = r % (PART + 1);
      if (r == w->rank) first = total;
      memcpy(all + total * H, x + r * PART * H, (size_t)(tokens * H) * sizeof(float));
      total += tokens;
    }
    pmoe_comm *self = NULL;
    CHECK(failures, pmoe_comm_self(w->ctx, &self) == PMOE_OK, "%s", pmoe_last_error());
    world single = {.nranks = 1, .ctx = w->ctx, .comm = self, .memory = w->memory};
    failures += open_layer(&alone, &single, 1, &gate, 0);
    pmoe_stash_config stash = PMOE_CONFIG_INIT(pmoe_stash_config);
    stash.max_tokens = MOST * PART;
    pmoe_stash_destroy(alone.stash);
    alone.stash = NULL;
    CHECK(failures, failures || pmoe_stash_create(alone.layer, &stash, NULL, 0, &alone.stash) == PMOE_OK, "%s",
          pmoe_last_error());
    data one = d;
    one.xm = (pmoe_mat){all, PMOE_F32, total, H, H};
    one.ym = (pmoe_mat){y, PMOE_F32, total, H, H};
    one.dym = (pmoe_mat){dy, PMOE_F32, total, H, H};
    one.dxm = (pmoe_mat){dx, PMOE_F32, total, H, H};
    if (!failures) failures += forward(&alone, &one) + backward(&alone, &one);
    CHECK(failures, failures || pmoe_stash_metrics(alone.stash, &m) == PMOE_OK, "%s", pmoe_last_error());
    float want[3] = {m.aux_loss, m.global_aux_loss, m.z_loss};
    for (int l = 0; l < 3; l++)
      CHECK(failures, fabsf(got[l] - want[l]) <= 2e-6f * (1 + want[l]) && want[l] > 0, "loss %d: %g, expected %g", l,
            (double)got[l], (double)want[l]);
    for (int64_t j = 0; j < own * H && !failures; j++)
      CHECK(failures, fabsf(d.dx[j] - dx[first * H + j]) <= 1e-6f + 1e-5f * fabsf(dx[first * H + j]),
            "dx %d: %g, expected %g", (int)j, (double)d.dx[j], (double)dx[first * H + j]);
    close_layer(&alone);
    pmoe_comm_destroy(self);
    close_layer(&b);
  }
  return failures;
}

static void test_given_groups(void **state) {
  (void)state;
  world_run_all(given_groups_body, NULL);
}

static void test_selection_bias(void **state) {
  (void)state;
  world_run_all(bias_body, NULL);
  world_run_all(bias_error_body, NULL);
}
static void test_host_routers(void **state) {
  (void)state;
  world_run_all(host_ep_body, NULL);
  world_run_all(host_tp_body, NULL);
}
static void test_load(void **state) {
  (void)state;
  world_run_all(load_body, NULL);
}
static void test_sequences(void **state) {
  (void)state;
  world_run_all(sequences_body, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_selection_bias), cmocka_unit_test(test_host_routers),
                                     cmocka_unit_test(test_load), cmocka_unit_test(test_sequences),
                                     cmocka_unit_test(test_given_groups)};
  return world_main("layer router", tests, sizeof tests / sizeof tests[0]);
}
