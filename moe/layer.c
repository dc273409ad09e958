/* Layers: creation, comparison of configurations across ranks, end. */
#include "moe/layer.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/config.h"
#include "core/data.h"
#include "core/dtype.h"

/* ---- comparison across ranks ---- */

enum { MAX_FIELDS = 64, WHY_BYTES = 192 };

/* What the ranks of a stage must agree on, as numbers; and whether this rank's own checks passed. */
typedef struct config_record {
  int64_t status;
  int64_t value[MAX_FIELDS];
  char why[WHY_BYTES];
} config_record;

typedef struct field_list {
  int32_t count;
  const char *name[MAX_FIELDS];
  int64_t value[MAX_FIELDS];
} field_list;

static void add_int(field_list *list, const char *name, int64_t value) {
  list->name[list->count] = name;
  list->value[list->count++] = value;
}

static void add_float(field_list *list, const char *name, float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  add_int(list, name, bits);
}

#define ADD_INT(list, cfg, field) add_int((list), #field, (int64_t)(cfg)->field)
#define ADD_FLOAT(list, cfg, field) add_float((list), #field, (cfg)->field)

static int64_t group_size(const pmoe_comm *comm) { return comm ? comm->nranks : 0; }

static void list_fields(const pmoe_layer *layer, field_list *list) {
  const pmoe_gate_config *gate = &layer->gate_cfg;
  const pmoe_a2a_config *a2a = &layer->a2a_cfg;
  const pmoe_experts_config *experts = &layer->experts_cfg;
  const pmoe_residual_config *residual = &layer->residual_cfg;
  ADD_INT(list, &layer->cfg, hidden);
  ADD_INT(list, &layer->cfg, layer_id);
  ADD_INT(list, &layer->cfg, ep);
  ADD_INT(list, gate, num_experts);
  ADD_INT(list, gate, top_k);
  ADD_INT(list, gate, score);
  ADD_INT(list, gate, softmax_after_topk);
  ADD_INT(list, gate, norm);
  ADD_FLOAT(list, gate, weight_scale);
  ADD_FLOAT(list, gate, capacity_factor);
  ADD_FLOAT(list, gate, eval_capacity_factor);
  ADD_INT(list, gate, min_capacity);
  ADD_INT(list, gate, drop);
  ADD_FLOAT(list, gate, aux_coef);
  ADD_FLOAT(list, gate, z_coef);
  ADD_INT(list, gate, aux_first_choice_only);
  ADD_FLOAT(list, gate, jitter);
  ADD_INT(list, gate, gumbel);
  add_int(list, "gate bias", gate->bias);
  ADD_INT(list, gate, router);
  ADD_INT(list, gate, choice);
  ADD_INT(list, gate, selection_bias);
  ADD_INT(list, gate, num_groups);
  ADD_INT(list, gate, groups_kept);
  ADD_INT(list, gate, group_score_top2);
  ADD_FLOAT(list, gate, seq_aux_coef);
  ADD_FLOAT(list, gate, global_aux_coef);
  ADD_INT(list, gate, aux_plain_topk);
  ADD_INT(list, &layer->cfg, max_sequences);
  add_int(list, "micro_batch's size", group_size(layer->cfg.micro_batch));
  add_int(list, "loss_global's size", group_size(layer->cfg.loss_global));
  ADD_INT(list, a2a, sizing);
  ADD_INT(list, a2a, max_recv_rows);
  ADD_INT(list, a2a, max_tokens);
  ADD_INT(list, experts, inner);
  ADD_INT(list, experts, act);
  add_int(list, "experts bias", experts->bias);
  ADD_INT(list, experts, dtype);
  ADD_INT(list, experts, grad_dtype);
  ADD_INT(list, experts, recompute_act);
  ADD_INT(list, residual, mix);
  add_int(list, "residual inner", residual->inner);
  add_int(list, "residual act", residual->act);
  add_int(list, "residual bias", residual->bias);
  add_int(list, "seed", (int64_t)layer->ctx->seed);
}

static pmoe_status compare(const pmoe_comm *comm, const field_list *mine, const config_record *records) {
  for (int32_t rank = 0; rank < comm->nranks; rank++)
    if (records[rank].status != PMOE_OK)
      return pmoei_error(PMOE_ERR_COMM, "pmoe_layer_create: rank %d gave up with %s: %.*s", rank,
                         pmoe_status_name((pmoe_status)records[rank].status), WHY_BYTES, records[rank].why);
  for (int32_t rank = 1; rank < comm->nranks; rank++)
    for (int32_t i = 0; i < mine->count; i++)
      if (records[rank].value[i] != records[0].value[i])
        return pmoei_error(PMOE_ERR_MISMATCH,
                           "pmoe_layer_create: %s is %" PRId64 " on rank 0 and %" PRId64
                           " on rank %d (layer_id %d here)",
                           mine->name[i], records[0].value[i], records[rank].value[i], rank, (int)mine->value[1]);
  return PMOE_OK;
}

/* Collective, also for a rank whose own checks came out as an error. */
static pmoe_status agree_on_config(pmoe_comm *comm, const pmoe_layer *layer, pmoe_status mine) {
  if (comm->nranks == 1) return mine;
  field_list fields = {0};
  list_fields(layer, &fields);
  size_t bytes = sizeof(config_record) * ((size_t)comm->nranks + 1);
  config_record *records;
  pmoe_status status = pmoei_alloc(layer->ctx, bytes, "layer comparison", &records);
  if (status != PMOE_OK) return pmoei_comm_fail(comm, mine != PMOE_OK ? mine : status, NULL);
  config_record *own = &records[comm->nranks];
  own->status = mine;
  if (mine != PMOE_OK) snprintf(own->why, sizeof own->why, "%s", pmoe_last_error());
  memcpy(own->value, fields.value, sizeof own->value);
  status = pmoei_allgather(comm, "pmoe_layer_create", own, records, sizeof *own);
  if (mine != PMOE_OK) status = pmoei_error(mine, "%s", own->why);
  else if (status == PMOE_OK) status = compare(comm, &fields, records);
  pmoei_free(layer->ctx, records, bytes);
  return status;
}

/* ---- creation ---- */

static pmoe_status read_configs(pmoe_layer *layer, const pmoe_layer_config *config) {
  pmoe_layer_config cfg;
  PMOEI_TRY(PMOEI_CONFIG_READ(&cfg, config));
  PMOEI_REQUIRE(cfg.hidden > 0, "config->hidden is %d; 1 or more was expected", cfg.hidden);
  PMOEI_REQUIRE(cfg.ep >= 0, "config->ep is %d; 0 or more was expected", cfg.ep);
  PMOEI_TRY(pmoei_config_read(&layer->gate_cfg, sizeof layer->gate_cfg, cfg.gate, "config->gate"));
  PMOEI_TRY(pmoei_config_read(&layer->experts_cfg, sizeof layer->experts_cfg, cfg.experts, "config->experts"));
  layer->a2a_cfg.size = sizeof layer->a2a_cfg;
  if (cfg.a2a) PMOEI_TRY(pmoei_config_read(&layer->a2a_cfg, sizeof layer->a2a_cfg, cfg.a2a, "config->a2a"));
  PMOEI_REQUIRE(layer->a2a_cfg.max_tokens >= 0 && layer->a2a_cfg.max_tokens <= PMOEI_MAX_ROWS,
                "config->a2a->max_tokens is %" PRId64 "; 0 to %" PRId64 " was expected", layer->a2a_cfg.max_tokens,
                PMOEI_MAX_ROWS);
  if (cfg.residual)
    PMOEI_TRY(pmoei_config_read(&layer->residual_cfg, sizeof layer->residual_cfg, cfg.residual, "config->residual"));
  PMOEI_REQUIRE(cfg.max_sequences >= 0 && (cfg.max_sequences > 0) == (layer->gate_cfg.seq_aux_coef > 0),
                "config->max_sequences is %d with seq_aux_coef %g; 1 or more with that loss, 0 without, was expected",
                cfg.max_sequences, (double)layer->gate_cfg.seq_aux_coef);
  PMOEI_REQUIRE(cfg.load_decay >= 0 && cfg.load_decay < 1, "config->load_decay is %g; 0 to below 1 was expected",
                (double)cfg.load_decay);
  layer->cfg = cfg;
  if (cfg.load_decay == 0) layer->cfg.load_decay = 0.99f;
  layer->cfg.gate = &layer->gate_cfg;
  layer->cfg.experts = &layer->experts_cfg;
  layer->cfg.a2a = &layer->a2a_cfg;
  bool has_branch = cfg.residual && layer->residual_cfg.mix != PMOE_MIX_NONE;
  layer->cfg.residual = has_branch ? &layer->residual_cfg : NULL;
  pmoe_residual_config *r = &layer->residual_cfg;
  const pmoe_experts_config *e = &layer->experts_cfg;
  PMOEI_REQUIRE(!has_branch || (int)r->dtype == 0 || r->dtype == e->dtype,
                "config->residual->dtype is %s; the experts' %s was expected", pmoe_dtype_name(r->dtype),
                pmoe_dtype_name(e->dtype));
  PMOEI_REQUIRE(!has_branch || (int)r->grad_dtype == 0 || r->grad_dtype == e->grad_dtype,
                "config->residual->grad_dtype is %s; the experts' %s was expected", pmoe_dtype_name(r->grad_dtype),
                pmoe_dtype_name(e->grad_dtype));
  r->dtype = e->dtype;
  r->grad_dtype = e->grad_dtype;
  return PMOE_OK;
}

/* No size of a parameter may overflow; the parts' own checks have passed. */
static pmoe_status check_param_sizes(const pmoe_layer *layer) {
  const int64_t most = INT64_MAX / (int64_t)sizeof(float) / layer->cfg.hidden;
  PMOEI_REQUIRE(2 * (int64_t)layer->experts_cfg.inner <= most / layer->gate_cfg.num_experts,
                "config->experts->inner is %d; parameters of less than 2^63 bytes were expected",
                layer->experts_cfg.inner);
  PMOEI_REQUIRE(2 * (int64_t)layer->residual_cfg.inner <= most,
                "config->residual->inner is %d; parameters of less than 2^63 bytes were expected",
                layer->residual_cfg.inner);
  return PMOE_OK;
}

/* Says in which part's configuration the error is. */
static pmoe_status in_part(const char *part, pmoe_status status) {
  return status == PMOE_OK ? PMOE_OK : pmoei_error(status, "%s: %s", part, pmoe_last_error());
}

/* The parts check their own configurations. The router needs no group, and probes of the others (of no expert, of the
 * whole branch) pass the same checks, so that errors are known before any communication. */
static pmoe_status check_parts(pmoe_layer *layer) {
  pmoe_ctx *ctx = layer->ctx;
  pmoe_experts *experts;
  PMOEI_TRY(in_part("experts", pmoe_experts_create(ctx, layer->cfg.hidden, 0, &layer->experts_cfg, &experts)));
  pmoe_experts_destroy(experts);
  PMOEI_TRY(
      in_part("gate", pmoe_gate_create(ctx, layer->cfg.hidden, layer->cfg.layer_id, &layer->gate_cfg, &layer->gate)));
  if (layer->cfg.residual) {
    pmoe_residual *residual;
    PMOEI_TRY(in_part("residual", pmoe_residual_create(ctx, layer->cfg.hidden, &layer->residual_cfg, &residual)));
    pmoe_residual_destroy(residual);
  }
  return check_param_sizes(layer);
}

/* Which part of the experts and of the branch is this rank's, and which tokens. */
static pmoe_status take_shares(pmoe_layer *layer) {
  const pmoei_layer_groups *groups = &layer->groups;
  const pmoe_experts_config *e = &layer->experts_cfg;
  const pmoe_residual_config *r = &layer->residual_cfg;
  int32_t tp = groups->tp->nranks, ep = groups->exchange->nranks / groups->etp, etp_rank;
  PMOEI_REQUIRE(e->inner >= groups->etp, "config->experts->inner is %d; at least etp (%d) was expected", e->inner,
                groups->etp);
  etp_rank = groups->exchange->rank % groups->etp;
  (void)pmoe_expert_block(layer->gate_cfg.num_experts, ep, groups->exchange->rank / groups->etp, &layer->first_expert,
                          &layer->num_local);
  layer->inner = pmoei_block_of(e->inner, groups->etp, etp_rank);
  layer->pre_cols = layer->inner.count * (pmoei_act_gated(e->act) ? 2 : 1);
  layer->replicated = tp > 1 && !groups->sp;
  PMOEI_TRY(pmoei_alloc(layer->ctx, 4 * (size_t)tp * sizeof(int64_t), "token lists", &layer->tp_lists));
  if (!layer->cfg.residual) return PMOE_OK;
  PMOEI_REQUIRE(r->inner >= tp, "config->residual->inner is %d; at least tp (%d) was expected", r->inner, tp);
  layer->sharded_branch = tp > 1;
  layer->residual_inner = pmoei_block_of(r->inner, tp, groups->tp->rank);
  layer->residual_pre_cols = layer->residual_inner.count * (pmoei_act_gated(r->act) ? 2 : 1);
  if (layer->sharded_branch && !layer->replicated)
    PMOEI_TRY(pmoei_alloc(layer->ctx, 2 * (size_t)tp * sizeof(int64_t), "token counts", &layer->tp_counts));
  return PMOE_OK;
}

static pmoe_status create_exchange(pmoe_layer *layer) {
  const pmoe_gate_config *gate = &layer->gate_cfg;
  pmoe_a2a_config cfg = layer->a2a_cfg;
  if (layer->replicated) cfg.max_tokens = pmoei_block_of(cfg.max_tokens, layer->groups.tp->nranks, 0).count;
  int64_t train, eval, tokens = cfg.max_tokens;
  PMOEI_TRY(pmoei_gate_slots(gate, tokens, true, &train));
  PMOEI_TRY(pmoei_gate_slots(gate, tokens, false, &eval));
  /* Without a factor an expert can be chosen by every token. */
  if (gate->capacity_factor == 0 || train > tokens) train = tokens;
  if (gate->eval_capacity_factor == 0 || eval > tokens) eval = tokens;
  bool dropless = gate->capacity_factor == 0;
  int64_t capacity = dropless ? 0 : train > eval ? train : eval;
  PMOEI_REQUIRE(gate->num_experts <= INT32_MAX / layer->groups.etp,
                "config->gate->num_experts is %d; at most %d was expected with etp %d", gate->num_experts,
                INT32_MAX / layer->groups.etp, layer->groups.etp);
  PMOEI_TRY(pmoe_a2a_create(layer->ctx, layer->groups.exchange, layer->cfg.hidden, layer->experts_cfg.dtype,
                            gate->num_experts * layer->groups.etp, capacity, &cfg, &layer->a2a));
  layer->a2a->layer_id = layer->cfg.layer_id;
  return PMOE_OK;
}

static pmoe_status create_spread_parts(pmoe_layer *layer) {
  PMOEI_TRY(take_shares(layer));
  PMOEI_TRY(create_exchange(layer));
  pmoe_experts_config experts = layer->experts_cfg;
  experts.inner = (int32_t)layer->inner.count;
  PMOEI_TRY(pmoe_experts_create(layer->ctx, layer->cfg.hidden, layer->num_local, &experts, &layer->experts));
  layer->experts->no_output_bias = layer->inner.first > 0;
  if (layer->cfg.residual) {
    pmoe_residual_config residual = layer->residual_cfg;
    residual.inner = (int32_t)layer->residual_inner.count;
    PMOEI_TRY(pmoe_residual_create(layer->ctx, layer->cfg.hidden, &residual, &layer->residual));
    if (layer->residual_inner.first > 0) pmoei_residual_drop_output_bias(layer->residual);
  }
  snprintf(layer->backward_name, sizeof layer->backward_name, "pmoe_layer_backward (layer %d)", layer->cfg.layer_id);
  pmoei_layer_list_params(layer);
  return pmoei_layer_create_balance(layer);
}

static pmoe_status take_groups(pmoe_layer *layer, pmoe_topology *topology) {
  if (topology) {
    PMOEI_TRY(pmoei_topology_layer_groups(topology, layer->cfg.ep, &layer->groups));
    pmoei_layer_groups_retain(&layer->groups);
    return PMOE_OK;
  }
  PMOEI_REQUIRE(layer->cfg.ep <= 1, "config->ep is %d without a topology; 0 or 1 was expected", layer->cfg.ep);
  pmoe_comm *self;
  PMOEI_TRY(pmoe_comm_self(layer->ctx, &self));
  layer->groups = (pmoei_layer_groups){.exchange = self,
                                       .expert_dp = self,
                                       .dense_dp = self,
                                       .tp = self,
                                       .stage = self,
                                       .micro_batch = self,
                                       .etp = 1,
                                       .tp_inside_exchange = true};
  pmoei_layer_groups_retain(&layer->groups);
  pmoei_comm_release(self); /* the groups have their own references */
  return PMOE_OK;
}

static pmoe_status create(pmoe_layer *layer, pmoe_topology *topology, const pmoe_layer_config *config) {
  pmoe_status status = read_configs(layer, config);
  if (status == PMOE_OK) status = check_parts(layer);
  if (topology) {
    pmoe_comm *stage;
    PMOEI_TRY(pmoe_topology_stage(topology, NULL, &stage));
    PMOEI_TRY(agree_on_config(stage, layer, status));
    PMOEI_TRY(take_groups(layer, topology));
    return pmoei_comm_agree(stage, "pmoe_layer_create", create_spread_parts(layer));
  }
  PMOEI_TRY(status);
  PMOEI_TRY(take_groups(layer, NULL));
  return create_spread_parts(layer);
}

static const pmoei_layer_ops *choose_ops(const pmoe_ctx *ctx) {
#ifdef PMOE_WITH_CUDA
  if (pmoei_on_device(ctx)) return &pmoei_layer_ops_cuda;
#endif
  (void)ctx;
  return &pmoei_layer_ops_cpu;
}

pmoe_status pmoe_layer_create(pmoe_ctx *ctx, pmoe_topology *topology, const pmoe_layer_config *config,
                              pmoe_layer **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(out);
  pmoe_layer *layer;
  PMOEI_TRY(pmoei_alloc(ctx, sizeof *layer, "layer", &layer));
  layer->ctx = ctx;
  layer->ops = choose_ops(ctx);
  layer->refs = 1;
  pmoei_ctx_retain(ctx);
  pmoe_status status = create(layer, topology, config);
  if (status != PMOE_OK) {
    pmoei_layer_release(layer);
    return status;
  }
  *out = layer;
  return PMOE_OK;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }
static int64_t larger_count(int64_t a, int64_t b) { return a > b ? a : b; }

size_t pmoei_layer_parts_scratch(const pmoe_layer *layer, pmoei_tokens tokens, int64_t rows) {
  int64_t choices = tokens.own * layer->gate_cfg.top_k * layer->groups.etp;
  size_t movement = pmoei_scratch_frame_bytes(pmoei_a2a_scratch_bytes(layer->a2a, choices, rows));
  size_t branch = layer->residual ? pmoei_residual_scratch_bytes(layer->residual, tokens.branch) : 0;
  size_t tp = pmoei_tp_scratch_bytes(layer, tokens.own, larger_count(tokens.given, tokens.branch));
  /* under a movement runs the branch with its own movements, or the experts' weight gradients */
  size_t under = larger(larger(branch, tp), pmoei_experts_scratch_bytes(layer->experts, rows));
  size_t gate = pmoei_scratch_frame_bytes(pmoei_gate_scratch_bytes(layer->gate, tokens.own, layer->cfg.max_sequences)) +
                pmoei_layer_loss_scratch(layer);
  return larger(movement + pmoei_scratch_frame_bytes(under), gate);
}

void pmoei_layer_retain(pmoe_layer *layer) { layer->refs++; }

void pmoei_layer_release(pmoe_layer *layer) {
  if (--layer->refs > 0) return;
  pmoe_ctx *ctx = layer->ctx;
  pmoei_layer_destroy_balance(layer);
  pmoe_gate_destroy(layer->gate);
  pmoe_residual_destroy(layer->residual);
  pmoe_experts_destroy(layer->experts);
  pmoe_a2a_destroy(layer->a2a);
  if (layer->tp_counts) pmoei_free(ctx, layer->tp_counts, 2 * (size_t)layer->groups.tp->nranks * sizeof(int64_t));
  if (layer->tp_lists) pmoei_free(ctx, layer->tp_lists, 4 * (size_t)layer->groups.tp->nranks * sizeof(int64_t));
  pmoei_layer_groups_release(&layer->groups);
  pmoei_free(ctx, layer, sizeof *layer);
  pmoei_ctx_release(ctx);
}

void pmoe_layer_destroy(pmoe_layer *layer) {
  if (layer) pmoei_layer_release(layer);
}
