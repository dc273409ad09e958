#include "ranks/layout.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

int64_t layout_draw(uint64_t seed, uint64_t place, int64_t below) {
  uint64_t x = seed * 0x9e3779b97f4a7c15u + place * 0xd1342543de82ef95u + 0x2545f4914f6cdd1du;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (int64_t)((x ^ (x >> 31)) % (uint64_t)below);
}

/* "seed 7: w8 tp2 cp1 pp1 ep4 etp1 sp, tp-cp-ep-dp-pp" */
static void layout_name(const layout_case *c, char *out, size_t size) {
  const layout *l = &c->layout;
  snprintf(out, size, "seed %" PRIu64 ": w%d tp%d cp%d pp%d ep%d etp%d%s, %s", c->seed, l->world, l->tp, l->cp, l->pp,
           l->ep, l->etp, l->sp ? " sp" : "", l->order ? l->order : "default order");
}

static pmoe_topology_config config_of(const layout *l) {
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.tp = l->tp;
  cfg.cp = l->cp;
  cfg.pp = l->pp;
  cfg.ep = l->ep;
  cfg.etp = l->etp;
  cfg.sp = l->sp;
  cfg.order = l->order;
  return cfg;
}

/* As a host would: a communicator for each kind of group. */
static pmoe_status from_groups(world *w, const layout *l, pmoe_topology **out) {
  enum { KINDS = 7 };
  static const char *const names[KINDS] = {"ep", "expt_dp", "dp_cp", "tp", "expt_tp", "tp_dp_cp", "tp_cp"};
  pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
  pmoe_comm **comms[KINDS] = {&groups.ep,  &groups.expert_dp, &groups.dense_dp,   &groups.tp,
                              &groups.etp, &groups.stage,     &groups.micro_batch};
  pmoe_topology_config cfg = config_of(l);
  int32_t ranks[8];
  pmoe_status status = PMOE_OK;
  for (int g = 0; g < KINDS && status == PMOE_OK; g++) {
    pmoe_rank_lists lists = {0, 0, ranks};
    status = pmoe_topology_ranks(w->nranks, &cfg, names[g], &lists);
    int32_t at = 0;
    while (ranks[at] != w->rank) at++;
    if (status == PMOE_OK)
      status =
          pmoe_comm_split_ranks(w->comm, ranks + at / lists.group_size * lists.group_size, lists.group_size, comms[g]);
  }
  groups.sp = l->sp;
  if (status == PMOE_OK) status = pmoe_topology_from_groups(w->ctx, &groups, out);
  for (int g = 0; g < KINDS; g++) pmoe_comm_destroy(*comms[g]);
  return status;
}

static int find_place(world *w, pmoe_topology *topology, const layout *l, layout_place *out) {
  int failures = 0;
  pmoe_comm *tp, *dense_dp;
  CHECK(failures, pmoe_topology_stage(topology, &tp, &out->stage) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_topology_groups(topology, 0, NULL, NULL, &dense_dp) == PMOE_OK, "%s", pmoe_last_error());
  out->tp = pmoe_comm_size(tp);
  out->sources = pmoe_comm_size(out->stage);
  out->source = pmoe_comm_rank(dense_dp) * out->tp + pmoe_comm_rank(tp);
  int32_t ranks[8], own[2] = {out->source, 0}, all[2 * RIG_MAX_RANKS];
  pmoe_rank_lists lists = {0, 0, ranks};
  pmoe_topology_config cfg = config_of(l);
  CHECK(failures, pmoe_topology_ranks(w->nranks, &cfg, "tp_cp", &lists) == PMOE_OK, "%s", pmoe_last_error());
  for (int32_t i = 0; i < w->nranks; i++)
    if (ranks[i] == w->rank) own[1] = i / lists.group_size;
  CHECK(failures, pmoe_comm_allgather(out->stage, own, all, sizeof own) == PMOE_OK, "%s", pmoe_last_error());
  for (int32_t i = 0; i < out->sources; i++) out->loss_group[all[2 * i]] = all[2 * i + 1];
  CHECK(failures, pmoe_topology_ranks(w->nranks, &cfg, "pp", &lists) == PMOE_OK, "%s", pmoe_last_error());
  for (int32_t i = 0; i < w->nranks; i++)
    if (ranks[i] == w->rank) out->stage_of_pipeline = i % lists.group_size;
  return failures;
}

/* With the same tokens on the ranks of a TP group each routes a slice; the first ones are larger. */
void layout_draw_tokens(const layout_case *c, const layout_place *p, uint64_t step, rig_plan *plan) {
  plan->num_ranks = p->sources;
  plan->rank = p->source;
  bool replicated = p->tp > 1 && !c->layout.sp;
  plan->replicas = replicated ? p->tp : 1;
  plan->share_losses = 1;
  memcpy(plan->loss_group, p->loss_group, sizeof plan->loss_group);
  for (int32_t group = 0; group < p->sources / plan->replicas; group++) {
    uint64_t at = step * 16 + (uint64_t)group;
    int64_t all = layout_draw(c->seed, at, c->most_tokens * plan->replicas + 1);
    if (layout_draw(c->seed, 900 + at, 6) == 0) all = 0;
    if (c->even > 0) all = c->even / (p->sources / plan->replicas);
    for (int32_t i = 0; i < plan->replicas; i++)
      plan->rank_tokens[group * plan->replicas + i] = all / plan->replicas + (i < all % plan->replicas);
  }
}

/* What the gradients are the gradients of, summed over all ranks. */
static int check_loss(rig *r, const pmoe_stash *stash, const rig_step *s, pmoe_comm *stage) {
  int failures = 0;
  pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
  CHECK(failures, pmoe_stash_metrics(stash, &m) == PMOE_OK, "%s", pmoe_last_error());
  double loss = (double)(float)s->plan.loss_scale * (double)(m.aux_loss + m.z_loss + m.global_aux_loss), square = 0.0;
  for (int64_t t = 0; t < s->own_tokens; t++)
    for (int64_t j = 0; j < r->spec.hidden; j++) {
      double y = test_get(s->y.data, s->y.dtype, (s->own_first - s->first + t) * s->y.ld + j);
      loss += s->dy_all[(s->own_first + t) * r->spec.hidden + j] * y;
      square += y * y;
    }
  float sum[2] = {(float)loss, (float)square};
  CHECK(failures, pmoe_comm_allreduce(stage, sum, 2, PMOE_F32) == PMOE_OK, "%s", pmoe_last_error());
  oracle_batch batch = {.tokens = s->total,
                        .num_ranks = s->plan.num_ranks,
                        .rank_tokens = s->plan.rank_tokens,
                        .loss_group = s->plan.share_losses ? s->plan.loss_group : NULL,
                        .training = s->plan.training,
                        .loss_scale = (double)(float)s->plan.loss_scale,
                        .x = s->x_all,
                        .dy = s->dy_all,
                        .mask = s->mask_all};
  /* The terms are about as large as y, whatever their sum is. */
  double expected = oracle_objective(r->model, &batch), size = 1.0 + sqrt((double)sum[1]) + fabs(expected);
  double tolerance = (r->spec.experts.dtype == PMOE_F32 ? 2e-5 : 1e-2) * size;
  if (r->spec.slack != 0.0) tolerance *= r->spec.slack;
  return failures + test_compare_one("loss of all ranks", (double)sum[0], expected, tolerance);
}

static int run_step(rig *r, const layout_case *c, const layout_place *p, const rig_plan *plan) {
  int failures = 0;
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = c->most_tokens * p->tp;
  cfg.split_backward = c->split;
  pmoe_stash *stash = NULL;
  rig_step s;
  rig_step_begin(r, &s, plan);
  pmoe_status status = pmoe_stash_create(r->layer, &cfg, NULL, 0, &stash);
  if (status == PMOE_OK) status = rig_forward(r, stash, &s);
  CHECK(failures, status == PMOE_OK, "%s: forward: %s", plan->label, pmoe_last_error());
  if (!failures) failures += check_loss(r, stash, &s, p->stage);
  if (!failures) status = rig_backward(r, stash, &s, c->split ? PMOE_BWD_INPUT : PMOE_BWD_ALL);
  if (!failures && status == PMOE_OK && c->split) status = rig_backward(r, stash, &s, PMOE_BWD_WEIGHT);
  CHECK(failures, status == PMOE_OK, "%s: backward: %s", plan->label, pmoe_last_error());
  if (!failures) failures += rig_check(r, stash, &s, 1);
  rig_step_end(&s);
  pmoe_stash_destroy(stash);
  return failures;
}

static int train_step(rig *r, const layout_case *c, const layout_place *p, uint64_t n, const char *name) {
  int failures = 0;
  char label[192];
  snprintf(label, sizeof label, "%s, step %d source %d", name, (int)n, p->source);
  rig_plan plan = {.label = label, .training = 1, .loss_scale = 1.5, .seed = c->seed + n, .step = n};
  plan.masked = c->masked;
  plan.pad = (int)layout_draw(c->seed, n, 3);
  layout_draw_tokens(c, p, n, &plan);
  rig_zero_grads(r);
  failures += run_step(r, c, p, &plan);
  int64_t total = 1;
  for (int32_t i = 0; i < plan.num_ranks; i++) total += plan.rank_tokens[i];
  double scale = (double)(float)(1.0 / (double)total);
  pmoe_status status = failures ? PMOE_ERR_STATE : pmoe_layer_reduce_grads(r->layer, (float)scale, NULL);
  CHECK(failures, status == PMOE_OK, "%s: reduce: %s", label, pmoe_last_error());
  if (failures) return failures;
  failures += rig_check_grads(r, scale, label);
  failures += rig_check_sumsq(r, scale);
  rig_descend(r, 0.5, scale);
  if (r->spec.experts.dtype != PMOE_F32) rig_load(r);
  return failures;
}

int layout_topology(world *w, const layout *l, pmoe_topology **topology, layout_place *place) {
  int failures = 0;
  pmoe_topology_config cfg = config_of(l);
  CHECK(failures, pmoe_topology_create(w->ctx, w->comm, &cfg, topology) == PMOE_OK, "%s", pmoe_last_error());
  return failures ? failures : find_place(w, *topology, l, place);
}

int layout_open(world *w, const layout_case *c, pmoe_topology **topology, layout_place *place, rig *r) {
  int failures = 0;
  char name[128];
  layout_name(c, name, sizeof name);
  if (c->host_groups) {
    CHECK(failures, from_groups(w, &c->layout, topology) == PMOE_OK, "%s: %s", name, pmoe_last_error());
    if (!failures) failures += find_place(w, *topology, &c->layout, place);
  } else {
    failures += layout_topology(w, &c->layout, topology, place);
  }
  rig_spec spec = c->spec;
  spec.ep = c->layout.ep;
  spec.layer_id = place->stage_of_pipeline;
  pmoe_status status = failures ? PMOE_ERR_STATE : rig_create(r, w->ctx, *topology, &spec);
  CHECK(failures, status == PMOE_OK, "%s: %s", name, pmoe_last_error());
  return failures;
}

pmoe_stash_config layout_stash(const layout_case *c, int split) {
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = c->most_tokens * c->layout.tp;
  cfg.split_backward = split;
  return cfg;
}

pmoe_status layout_step(rig *r, pmoe_stash *stash, rig_step *s, int split) {
  pmoe_status status = rig_forward(r, stash, s);
  if (status == PMOE_OK) status = rig_backward(r, stash, s, split ? PMOE_BWD_INPUT : PMOE_BWD_ALL);
  if (status == PMOE_OK && split) status = rig_backward(r, stash, s, PMOE_BWD_WEIGHT);
  return status;
}

void layout_begin(const layout_case *c, const layout_place *p, const rig *r, uint64_t n, rig_step *s) {
  rig_plan plan = {.label = "step", .training = 1, .loss_scale = 1.0, .seed = c->seed + n, .step = n};
  plan.pad = (int)(n % 3);
  layout_draw_tokens(c, p, n, &plan);
  rig_step_begin(r, s, &plan);
}

int layout_train(world *w) {
  const layout_case *c = w->arg;
  char name[128];
  layout_name(c, name, sizeof name);
  pmoe_topology *topology = NULL;
  layout_place p = {0};
  rig r = {0};
  int failures = layout_open(w, c, &topology, &p, &r);
  if (!failures && c->pile_up) {
    r.model->tensor[ORACLE_ROUTER_BIAS].data[0] = 40.0;
    rig_load(&r);
  }
  for (int n = 0; n < c->steps && !failures; n++) failures += train_step(&r, c, &p, (uint64_t)n, name);
  if (r.layer) rig_destroy(&r);
  pmoe_topology_destroy(topology);
  return failures;
}
