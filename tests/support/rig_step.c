#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "support/rig.h"

static pmoe_mat new_mat(pmoe_dtype dtype, int64_t rows, int64_t cols, int64_t pad) {
  pmoe_mat mat = {NULL, dtype, rows, cols, cols + pad};
  size_t bytes = (size_t)(rows * mat.ld + 1) * pmoe_dtype_size(dtype);
  mat.data = malloc(bytes);
  test_poison(mat.data, bytes);
  return mat;
}

static void put_rows(pmoe_mat *mat, const double *values) {
  for (int64_t i = 0; i < mat->rows; i++)
    for (int64_t j = 0; j < mat->cols; j++) test_put(mat->data, mat->dtype, i * mat->ld + j, values[i * mat->cols + j]);
}

static void random_rows(const rig_step *s, pmoe_dtype dtype, double *out, int64_t n, uint64_t seed, double std) {
  oracle_fill(out, n, s->plan.seed * 16 + seed, std);
  for (int64_t i = 0; i < n; i++) out[i] = test_round(out[i], dtype);
}

void rig_step_begin(const rig *r, rig_step *s, const rig_plan *plan) {
  memset(s, 0, sizeof *s);
  s->plan = *plan;
  if (plan->num_ranks == 0) s->plan.num_ranks = 1;
  int32_t replicas = plan->replicas > 0 ? plan->replicas : 1, group = plan->rank / replicas;
  for (int32_t i = 0; i < s->plan.num_ranks; i++) {
    if (i == group * replicas) s->first = s->total;
    if (i == plan->rank) s->own_first = s->total;
    if (i / replicas == group) s->tokens += plan->rank_tokens[i];
    s->total += plan->rank_tokens[i];
  }
  s->own_tokens = plan->rank_tokens[plan->rank];
  int64_t h = r->spec.hidden;
  pmoe_dtype dtype = r->spec.experts.dtype;
  s->x_all = calloc((size_t)(s->total * h) + 1, sizeof(double));
  s->dy_all = calloc((size_t)(s->total * h) + 1, sizeof(double));
  random_rows(s, dtype, s->x_all, s->total * h, 1, plan->x_scale == 0.0 ? 1.0 : plan->x_scale);
  random_rows(s, dtype, s->dy_all, s->total * h, 2, 1.0);
  for (int64_t i = 0; plan->x && i < s->total * h; i++) s->x_all[i] = test_round(plan->x[i], dtype);
  for (int64_t i = 0; plan->dy && i < s->total * h; i++) s->dy_all[i] = test_round(plan->dy[i], dtype);
  s->x = new_mat(dtype, s->tokens, h, plan->pad);
  s->dy = new_mat(dtype, s->tokens, h, 2 * plan->pad);
  s->y = new_mat(dtype, s->tokens, h, plan->pad);
  s->dx = new_mat(dtype, s->tokens, h, 3 * plan->pad);
  put_rows(&s->x, s->x_all + s->first * h);
  put_rows(&s->dy, s->dy_all + s->first * h);
  s->step.size = sizeof s->step;
  s->step.training = plan->training;
  s->step.first_token = s->first;
  s->step.step = plan->step;
  if (!plan->masked) return;
  s->mask_all = calloc((size_t)s->total + 1, 1);
  for (int64_t t = 0; t < s->total; t++) s->mask_all[t] = (uint8_t)((t * 7 + 3) % 5 != 0 ? 1 + t % 3 : 0);
  s->step.token_mask = s->mask_all + s->first;
  s->step.token_mask_len = s->tokens;
}

void rig_step_end(rig_step *s) {
  void *arrays[] = {s->x_all,  s->dy_all,  s->mask_all,     s->x.data,    s->dy.data,
                    s->y.data, s->dx.data, s->given_expert, s->given_slot};
  for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
  memset(s, 0, sizeof *s);
}

pmoe_status rig_forward(rig *r, pmoe_stash *stash, rig_step *s) {
  return pmoe_layer_forward(r->layer, stash, &s->step, &s->x, &s->y, NULL);
}

pmoe_status rig_backward(rig *r, pmoe_stash *stash, rig_step *s, pmoe_bwd which) {
  return pmoe_layer_backward(r->layer, stash, (float)s->plan.loss_scale, &s->dy,
                             which == PMOE_BWD_WEIGHT ? NULL : &s->dx, which, NULL);
}

void rig_replay(const rig *r, const pmoe_stash *stash, rig_step *s) {
  pmoe_routing routing = PMOE_CONFIG_INIT(pmoe_routing);
  if (pmoe_stash_routing(stash, &routing) != PMOE_OK) return;
  size_t n = (size_t)(s->own_tokens * r->spec.gate.top_k);
  s->given_expert = calloc(n + 1, sizeof *s->given_expert);
  s->given_slot = calloc(n + 1, sizeof *s->given_slot);
  memcpy(s->given_expert, routing.expert, n * sizeof *s->given_expert);
  memcpy(s->given_slot, routing.slot, n * sizeof *s->given_slot);
}

/* A matrix's padding between rows is the caller's. */
static int padding_touched(const pmoe_mat *mat) {
  for (int64_t i = 0; i < mat->rows; i++)
    for (int64_t j = mat->cols; j < mat->ld; j++)
      if (!isnan(test_get(mat->data, mat->dtype, i * mat->ld + j))) return 1;
  return 0;
}

/* Every expert's slots are 0, 1, 2, ... once each. */
static int check_slots(const pmoe_routing *routing, const char *label) {
  int failures = 0;
  for (int32_t e = 0; e < routing->num_experts; e++) {
    int64_t rows = routing->expert_rows[e], found = 0;
    uint8_t *seen = calloc((size_t)rows + 1, 1);
    for (int64_t i = 0; i < routing->tokens * routing->top_k; i++) {
      if (routing->expert[i] != e || routing->slot[i] < 0) continue;
      found++;
      if (routing->slot[i] < rows) seen[routing->slot[i]]++;
    }
    CHECK(failures, found == rows, "%s: expert %d has %lld slots in use, %lld rows", label, e, (long long)found,
          (long long)rows);
    for (int64_t i = 0; i < rows; i++)
      CHECK(failures, seen[i] == 1, "%s: slot %lld of expert %d", label, (long long)i, e);
    free(seen);
  }
  return failures;
}

static int check_routing(const rig *r, const pmoe_stash *stash, const rig_step *s, const oracle_result *expected) {
  int failures = 0;
  const char *label = s->plan.label;
  pmoe_routing routing = PMOE_CONFIG_INIT(pmoe_routing);
  pmoe_status status = pmoe_stash_routing(stash, &routing);
  CHECK(failures, status == PMOE_OK, "%s: %s", label, pmoe_last_error());
  if (failures) return failures;
  int64_t e = r->spec.gate.num_experts, k = r->spec.gate.top_k, base = s->own_first * k;
  CHECK(failures, routing.tokens == s->own_tokens && routing.top_k == k && routing.num_experts == e,
        "%s: routing's sizes", label);
  if (failures) return failures;
  CHECK(failures, routing.capacity == expected->capacity[s->plan.rank], "%s: capacity %lld, expected %lld", label,
        (long long)routing.capacity, (long long)expected->capacity[s->plan.rank]);
  for (int64_t i = 0; i < s->own_tokens * k && !failures; i++) {
    CHECK(failures, routing.expert[i] == expected->expert[base + i],
          "%s: token %lld choice %lld: expert %d, expected %d", label, (long long)(i / k), (long long)(i % k),
          routing.expert[i], expected->expert[base + i]);
    CHECK(failures, (routing.slot[i] < 0) == (expected->slot[base + i] < 0), "%s: token %lld choice %lld: kept %d",
          label, (long long)(i / k), (long long)(i % k), routing.slot[i] >= 0);
  }
  if (s->own_tokens > 0)
    failures += test_compare("routing weight", routing.weight, PMOE_F32, expected->weight + base, 1.0,
                             s->own_tokens * k, PMOE_F32);
  for (int64_t i = 0; i < e; i++)
    CHECK(failures,
          routing.expert_count[i] == expected->count[s->plan.rank * e + i] &&
              routing.expert_rows[i] == expected->rows[s->plan.rank * e + i],
          "%s: counts of expert %lld", label, (long long)i);
  for (int64_t i = 0; i < e; i++)
    CHECK(failures,
          routing.capacity == 0 || routing.expert_rows[i] == routing.expert_count[i] ||
              routing.expert_rows[i] == routing.capacity,
          "%s: expert %lld keeps %lld of %lld", label, (long long)i, (long long)routing.expert_rows[i],
          (long long)routing.expert_count[i]);
  return failures + check_slots(&routing, label);
}

/* The load over experts as the metrics define it. */
static void load_of(const int64_t *count, int64_t n, double *max_over_mean, double *entropy) {
  double sum = 0.0, top = 0.0;
  for (int64_t i = 0; i < n; i++) {
    sum += (double)count[i];
    top = fmax(top, (double)count[i]);
  }
  *max_over_mean = sum > 0.0 ? top * (double)n / sum : 0.0;
  *entropy = 0.0;
  for (int64_t i = 0; i < n; i++)
    if (count[i] > 0) *entropy -= (double)count[i] / sum * log((double)count[i] / sum);
}

static int check_metrics(const rig *r, const pmoe_stash *stash, const rig_step *s, const oracle_result *expected) {
  int failures = 0;
  const char *label = s->plan.label;
  pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
  pmoe_status status = pmoe_stash_metrics(stash, &m);
  CHECK(failures, status == PMOE_OK, "%s: %s", label, pmoe_last_error());
  int64_t e = r->spec.gate.num_experts, k = r->spec.gate.top_k, routed = 0, chosen = 0, masked = 0;
  for (int64_t i = 0; i < e; i++) {
    routed += expected->rows[s->plan.rank * e + i];
    chosen += expected->count[s->plan.rank * e + i];
  }
  for (int64_t t = 0; s->mask_all && t < s->own_tokens; t++) masked += !s->mask_all[s->own_first + t];
  double load, entropy;
  load_of(expected->count + s->plan.rank * e, e, &load, &entropy);
  CHECK(failures, m.tokens == s->own_tokens && m.masked == masked, "%s: %lld tokens, %lld masked", label,
        (long long)m.tokens, (long long)m.masked);
  CHECK(failures, m.routed == routed && m.dropped == chosen - routed && chosen == (s->own_tokens - masked) * k,
        "%s: %lld routed, %lld dropped", label, (long long)m.routed, (long long)m.dropped);
  CHECK(failures, m.nonfinite == 0, "%s: %lld", label, (long long)m.nonfinite);
  bool padded = false;
#ifdef TEST_ON_DEVICE_H
  padded = r->spec.a2a.sizing == PMOE_SIZING_FIXED && r->spec.a2a.max_recv_rows == 0;
#endif
  if (s->plan.num_ranks == 1)
    CHECK(failures, (padded ? m.recv_rows >= routed : m.recv_rows == routed) && m.bytes_sent == 0, "%s: rows received",
          label);
  double aux = expected->aux_loss[s->plan.rank], z = expected->z_loss[s->plan.rank];
  failures += test_compare_one("aux_loss", (double)m.aux_loss, aux, 2e-6 * (1.0 + fabs(aux)));
  failures += test_compare_one("z_loss", (double)m.z_loss, z, 2e-6 * (1.0 + fabs(z)));
  double global = expected->global_aux_loss[s->plan.rank];
  failures += test_compare_one("global_aux_loss", (double)m.global_aux_loss, global, 2e-6 * (1.0 + fabs(global)));
  failures += test_compare_one("load_max_over_mean", (double)m.load_max_over_mean, load, 1e-5);
  failures += test_compare_one("entropy", (double)m.entropy, entropy, 1e-5);
  return failures;
}

int rig_check(rig *r, const pmoe_stash *stash, const rig_step *s, int backward) {
  int failures = 0;
  char what[160];
  oracle_batch batch = {.tokens = s->total,
                        .num_ranks = s->plan.num_ranks,
                        .rank_tokens = s->plan.rank_tokens,
                        .loss_group = s->plan.share_losses ? s->plan.loss_group : NULL,
                        .training = s->plan.training,
                        .loss_scale = (double)(float)s->plan.loss_scale,
                        .x = s->x_all,
                        .dy = backward ? s->dy_all : NULL,
                        .mask = s->mask_all,
                        .given_expert = s->given_expert,
                        .given_slot = s->given_slot};
  oracle_result *expected = oracle_run(r->model, &batch);
  int64_t first = s->first * r->spec.hidden;
  failures += check_routing(r, stash, s, expected);
  failures += check_metrics(r, stash, s, expected);
  snprintf(what, sizeof what, "%s: y", s->plan.label);
  test_tolerance tolerance = test_tolerance_wide(r->spec.experts.dtype, r->spec.slack);
  failures += test_compare_within(what, &s->y, expected->y + first, 1.0, tolerance);
  snprintf(what, sizeof what, "%s: dx", s->plan.label);
  if (backward) failures += test_compare_within(what, &s->dx, expected->dx + first, 1.0, tolerance);
  CHECK(failures, !padding_touched(&s->y) && !padding_touched(&s->dx), "%s: padding between rows was written",
        s->plan.label);
  oracle_result_destroy(expected);
  return failures;
}

void *rig_snapshot(const rig *r, const rig_step *s, size_t *bytes) {
  size_t row = (size_t)r->spec.hidden * pmoe_dtype_size(r->spec.experts.dtype), used = 0;
  *bytes = 2 * (size_t)s->tokens * row;
  for (int32_t p = 0; p < r->num_params; p++)
    *bytes += (size_t)r->param[p].numel * pmoe_dtype_size(r->param[p].grad_dtype);
  char *out = malloc(*bytes + 1);
  const pmoe_mat *mats[] = {&s->y, &s->dx};
  for (int m = 0; m < 2; m++)
    for (int64_t i = 0; i < s->tokens; i++, used += row)
      memcpy(out + used, (char *)mats[m]->data + (size_t)(i * mats[m]->ld) * pmoe_dtype_size(mats[m]->dtype), row);
  for (int32_t p = 0; p < r->num_params; p++) {
    size_t n = (size_t)r->param[p].numel * pmoe_dtype_size(r->param[p].grad_dtype);
    memcpy(out + used, r->param[p].grad, n);
    used += n;
  }
  return out;
}

static int run_in_stash(rig *r, pmoe_stash *stash, rig_step *s, int split) {
  int failures = 0;
  const char *label = s->plan.label;
  pmoe_status status = rig_forward(r, stash, s);
  CHECK(failures, status == PMOE_OK, "%s: forward: %s", label, pmoe_last_error());
  if (failures) return failures;
  status = rig_backward(r, stash, s, split ? PMOE_BWD_INPUT : PMOE_BWD_ALL);
  CHECK(failures, status == PMOE_OK, "%s: backward: %s", label, pmoe_last_error());
  if (split) {
    status = rig_backward(r, stash, s, PMOE_BWD_WEIGHT);
    CHECK(failures, status == PMOE_OK, "%s: backward, weights: %s", label, pmoe_last_error());
  }
  if (s->plan.replay) rig_replay(r, stash, s);
  return failures ? failures : rig_check(r, stash, s, 1);
}

int rig_run(rig *r, const rig_plan *plan, int split, int accumulate) {
  int failures = 0;
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = plan->rank_tokens[plan->rank];
  cfg.split_backward = split;
  pmoe_stash *stash = NULL;
  pmoe_status status = pmoe_stash_create(r->layer, &cfg, NULL, 0, &stash);
  CHECK(failures, status == PMOE_OK, "%s: stash: %s", plan->label, pmoe_last_error());
  if (failures) return failures;
  rig_step step;
  rig_step_begin(r, &step, plan);
  if (!accumulate) rig_zero_grads(r);
  failures += run_in_stash(r, stash, &step, split);
  if (!accumulate && plan->num_ranks <= 1) failures += rig_check_grads(r, 1.0, plan->label);
  rig_step_end(&step);
  pmoe_stash_destroy(stash);
  return failures;
}
