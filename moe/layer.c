/* Layers: creation, comparison of configurations across ranks, end. */
#include "moe/layer.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/config.h"
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
  layer->pre_cols = (int64_t)e->inner * (pmoei_act_gated(e->act) ? 2 : 1);
  layer->residual_pre_cols = has_branch ? (int64_t)r->inner * (pmoei_act_gated(r->act) ? 2 : 1) : 0;
  return PMOE_OK;
}

/* No size of a parameter may overflow; the parts' own checks have passed. */
static pmoe_status check_param_sizes(const pmoe_layer *layer) {
  const int64_t most = INT64_MAX / (int64_t)sizeof(float) / layer->cfg.hidden;
  PMOEI_REQUIRE(layer->pre_cols <= most / layer->gate_cfg.num_experts,
                "config->experts->inner is %d; parameters of less than 2^63 bytes were expected",
                layer->experts_cfg.inner);
  PMOEI_REQUIRE(layer->residual_pre_cols <= most,
                "config->residual->inner is %d; parameters of less than 2^63 bytes were expected",
                layer->residual_cfg.inner);
  return PMOE_OK;
}

/* Says in which part's configuration the error is. */
static pmoe_status in_part(const char *part, pmoe_status status) {
  return status == PMOE_OK ? PMOE_OK : pmoei_error(status, "%s: %s", part, pmoe_last_error());
}

/* The parts check their own configurations. The router and the branch need no group, so their errors are known before
 * any communication. */
static pmoe_status create_local_parts(pmoe_layer *layer) {
  pmoe_ctx *ctx = layer->ctx;
  PMOEI_TRY(
      in_part("gate", pmoe_gate_create(ctx, layer->cfg.hidden, layer->cfg.layer_id, &layer->gate_cfg, &layer->gate)));
  if (layer->cfg.residual)
    PMOEI_TRY(
        in_part("residual", pmoe_residual_create(ctx, layer->cfg.hidden, &layer->residual_cfg, &layer->residual)));
  return check_param_sizes(layer);
}

static pmoe_status create_spread_parts(pmoe_layer *layer) {
  pmoe_ctx *ctx = layer->ctx;
  const pmoe_gate_config *gate = &layer->gate_cfg;
  (void)pmoe_expert_block(gate->num_experts, layer->ep->nranks, layer->ep->rank, &layer->first_expert,
                          &layer->num_local);
  int64_t train, eval;
  int64_t tokens = layer->a2a_cfg.max_tokens;
  PMOEI_TRY(pmoei_gate_slots(gate, tokens, true, &train));
  PMOEI_TRY(pmoei_gate_slots(gate, tokens, false, &eval));
  /* Without a factor an expert can be chosen by every token. */
  if (gate->capacity_factor == 0 || train > tokens) train = tokens;
  if (gate->eval_capacity_factor == 0 || eval > tokens) eval = tokens;
  bool dropless = gate->capacity_factor == 0;
  int64_t capacity = dropless ? 0 : train > eval ? train : eval;
  PMOEI_TRY(pmoe_a2a_create(ctx, layer->ep, layer->cfg.hidden, layer->experts_cfg.dtype, gate->num_experts, capacity,
                            &layer->a2a_cfg, &layer->a2a));
  PMOEI_TRY(pmoe_experts_create(ctx, layer->cfg.hidden, layer->num_local, &layer->experts_cfg, &layer->experts));
  layer->a2a->layer_id = layer->cfg.layer_id;
  snprintf(layer->backward_name, sizeof layer->backward_name, "pmoe_layer_backward (layer %d)", layer->cfg.layer_id);
  pmoei_layer_list_params(layer);
  return pmoei_layer_create_balance(layer);
}

/* A probe of the experts' configuration before any group is known: no expert, the same checks. */
static pmoe_status check_experts_config(const pmoe_layer *layer) {
  pmoe_experts *probe;
  PMOEI_TRY(in_part("experts", pmoe_experts_create(layer->ctx, layer->cfg.hidden, 0, &layer->experts_cfg, &probe)));
  pmoe_experts_destroy(probe);
  return PMOE_OK;
}

static pmoe_status take_groups(pmoe_layer *layer, pmoe_topology *topology) {
  if (topology) {
    PMOEI_TRY(pmoe_topology_groups(topology, layer->cfg.ep, &layer->ep, &layer->expert_dp, &layer->dense_dp));
    pmoei_comm_retain(layer->ep);
    pmoei_comm_retain(layer->expert_dp);
    pmoei_comm_retain(layer->dense_dp);
    return PMOE_OK;
  }
  PMOEI_REQUIRE(layer->cfg.ep <= 1, "config->ep is %d without a topology; 0 or 1 was expected", layer->cfg.ep);
  PMOEI_TRY(pmoe_comm_self(layer->ctx, &layer->ep));
  layer->expert_dp = layer->dense_dp = layer->ep;
  pmoei_comm_retain(layer->ep);
  pmoei_comm_retain(layer->ep);
  return PMOE_OK;
}

static pmoe_status create(pmoe_layer *layer, pmoe_topology *topology, const pmoe_layer_config *config) {
  pmoe_status status = read_configs(layer, config);
  if (status == PMOE_OK) status = check_experts_config(layer);
  if (status == PMOE_OK) status = create_local_parts(layer);
  if (topology) {
    pmoe_comm *stage;
    PMOEI_TRY(
        pmoe_topology_groups(topology, 0, NULL, NULL, &stage)); /* its own size is there already: no communication */
    PMOEI_TRY(agree_on_config(stage, layer, status));
    PMOEI_TRY(take_groups(layer, topology));
    return pmoei_comm_agree(stage, "pmoe_layer_create", create_spread_parts(layer));
  }
  PMOEI_TRY(status);
  PMOEI_TRY(take_groups(layer, NULL));
  return create_spread_parts(layer);
}

pmoe_status pmoe_layer_create(pmoe_ctx *ctx, pmoe_topology *topology, const pmoe_layer_config *config,
                              pmoe_layer **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(out);
  pmoe_layer *layer;
  PMOEI_TRY(pmoei_alloc(ctx, sizeof *layer, "layer", &layer));
  layer->ctx = ctx;
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

size_t pmoei_layer_parts_scratch(const pmoe_layer *layer, int64_t tokens, int64_t rows) {
  size_t movement =
      pmoei_scratch_frame_bytes(pmoei_a2a_scratch_bytes(layer->a2a, tokens * layer->gate_cfg.top_k, rows));
  size_t branch = layer->residual ? pmoei_residual_scratch_bytes(layer->residual, tokens) : 0;
  /* under a movement runs the branch, or the experts' weight gradients */
  size_t under =
      movement + pmoei_scratch_frame_bytes(larger(branch, pmoei_experts_scratch_bytes(layer->experts, rows)));
  return larger(under,
                pmoei_scratch_frame_bytes(pmoei_gate_scratch_bytes(layer->gate, tokens, layer->cfg.max_sequences)));
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
  if (layer->ep) pmoei_comm_release(layer->ep);
  if (layer->expert_dp) pmoei_comm_release(layer->expert_dp);
  if (layer->dense_dp) pmoei_comm_release(layer->dense_dp);
  pmoei_free(ctx, layer, sizeof *layer);
  pmoei_ctx_release(ctx);
}

void pmoe_layer_destroy(pmoe_layer *layer) {
  if (layer) pmoei_layer_release(layer);
}
