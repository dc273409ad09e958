/* Balance between experts: the sums that a loss takes over ranks, the selection bias, and what a person wants to see of
 * the load. */
#include <math.h>
#include <string.h>

#include "core/config.h"
#include "core/data.h"
#include "moe/layer.h"

static pmoe_status sum_over(void *user, int64_t *inout, int64_t n, pmoe_stream stream) {
  (void)stream;
  return pmoei_allreduce(user, "router losses", inout, n, PMOEI_SUM_I64);
}

static pmoe_loss_sum sum_of(pmoe_comm *comm) {
  return comm && comm->nranks > 1 ? (pmoe_loss_sum){comm, sum_over} : (pmoe_loss_sum){NULL, NULL};
}

static void take_comm(pmoe_comm **to, pmoe_comm *comm) {
  *to = comm;
  if (comm) pmoei_comm_retain(comm);
}

pmoe_status pmoei_layer_create_balance(pmoe_layer *layer) {
  int64_t experts = layer->gate_cfg.num_experts;
  pmoe_comm *micro = layer->cfg.micro_batch ? layer->cfg.micro_batch : layer->groups.micro_batch;
  pmoe_comm *global = layer->cfg.loss_global ? layer->cfg.loss_global : layer->groups.stage;
  if (pmoei_gate_has_losses(layer->gate)) take_comm(&layer->micro_batch, micro);
  if (layer->gate_cfg.global_aux_coef > 0) take_comm(&layer->loss_global, global);
  PMOEI_TRY(pmoe_gate_set_loss_sums(layer->gate, sum_of(layer->micro_batch), sum_of(layer->loss_global)));
  layer->load.values.size = sizeof layer->load.values;
  PMOEI_TRY(pmoei_alloc(layer->ctx, (size_t)experts * sizeof *layer->load.count, "load", &layer->load.count));
  return pmoei_alloc(layer->ctx, (size_t)experts * sizeof *layer->load.share, "load", &layer->load.share);
}

void pmoei_layer_destroy_balance(pmoe_layer *layer) {
  size_t experts = (size_t)layer->gate_cfg.num_experts;
  pmoei_free(layer->ctx, layer->load.count, experts * sizeof *layer->load.count);
  pmoei_free(layer->ctx, layer->load.share, experts * sizeof *layer->load.share);
  pmoei_comm_release(layer->micro_batch);
  pmoei_comm_release(layer->loss_global);
}

bool pmoei_layer_shares_losses(const pmoe_layer *layer) {
  return (layer->micro_batch && layer->micro_batch->nranks > 1) ||
         (layer->loss_global && layer->loss_global->nranks > 1);
}

pmoe_status pmoei_layer_agree_on_losses(pmoe_layer *layer, pmoe_status mine) {
  pmoe_comm *comms[] = {layer->micro_batch, layer->loss_global};
  for (int i = 0; i < 2; i++)
    if (comms[i] && comms[i]->nranks > 1) mine = pmoei_comm_agree_in_step(comms[i], "pmoe_layer_forward", mine);
  return mine;
}

size_t pmoei_layer_loss_scratch(const pmoe_layer *layer) {
  int64_t numbers = pmoei_gate_loss_rows(layer->gate, layer->cfg.max_sequences) * (layer->gate_cfg.num_experts + 1);
  pmoe_comm *comms[] = {layer->micro_batch, layer->loss_global};
  size_t most = 0;
  for (int i = 0; i < 2; i++) {
    if (!comms[i] || comms[i]->nranks == 1) continue;
    size_t bytes = pmoei_scratch_frame_bytes(pmoei_allreduce_scratch_bytes(comms[i], numbers, PMOEI_SUM_I64));
    most = bytes > most ? bytes : most;
  }
  return most;
}

void pmoei_layer_fail_losses(pmoe_layer *layer, pmoe_status status) {
  pmoe_comm *comms[] = {layer->micro_batch, layer->loss_global};
  for (int i = 0; i < 2; i++)
    if (comms[i] && comms[i]->nranks > 1) (void)pmoei_comm_fail(comms[i], status, NULL);
}

/* ---- load ---- */

static void move_average(float *average, float latest, float decay, bool first) {
  *average = first ? latest : decay * *average + (1 - decay) * latest;
}

void pmoei_layer_note_load(pmoe_layer *layer, const pmoe_step *step, const pmoe_gate_stats *stats,
                           const int64_t *expert_count) {
  if (!step->training || step->recompute) return;
  pmoe_load *load = &layer->load.values;
  int32_t experts = layer->gate_cfg.num_experts;
  int64_t choices = 0;
  bool first = load->forwards++ == 0;
  float decay = layer->cfg.load_decay;
  for (int32_t e = 0; e < experts; e++) {
    layer->load.count[e] = expert_count[e];
    choices += expert_count[e];
  }
  load->max_over_mean = stats->load_max_over_mean;
  load->cv = stats->load_cv;
  load->entropy = stats->entropy;
  load->dropped_share = stats->dropped_share;
  for (int32_t e = 0; e < experts; e++) {
    float share = choices > 0 ? (float)((double)expert_count[e] / (double)choices) : 0;
    move_average(&layer->load.share[e], share, decay, first);
  }
  move_average(&load->mean_max_over_mean, load->max_over_mean, decay, first);
  move_average(&load->mean_cv, load->cv, decay, first);
  move_average(&load->mean_entropy, load->entropy, decay, first);
  move_average(&load->mean_dropped_share, load->dropped_share, decay, first);
}

pmoe_status pmoe_layer_load(const pmoe_layer *layer, pmoe_load *out) {
  PMOEI_REQUIRE_POINTER(layer);
  pmoe_load load = layer->load.values;
  load.num_experts = layer->gate_cfg.num_experts;
  load.expert_count = layer->load.count;
  load.expert_share = layer->load.share;
  return PMOEI_STRUCT_WRITE(out, &load);
}

/* ---- selection bias ---- */

static pmoe_status check_update(const pmoe_layer *layer, float rate, int32_t centred, float **bias) {
  for (int32_t i = 0; i < layer->num_params; i++)
    if (layer->kind[i] == PMOEI_SELECTION_BIAS) *bias = layer->param[i].data;
  if (!layer->gate_cfg.selection_bias)
    return pmoei_error(PMOE_ERR_STATE, "pmoe_layer_update_selection_bias: this layer's router has no selection bias");
  if (!*bias)
    return pmoei_error(PMOE_ERR_STATE,
                       "parameter router.selection_bias has no data; bind it with pmoe_layer_bind_param first");
  PMOEI_REQUIRE(isfinite(rate) && rate >= 0, "rate is %g; a finite number, 0 or more, was expected", (double)rate);
  PMOEI_REQUIRE(centred == 0 || centred == 1, "centred is %d; 0 or 1 was expected", centred);
  return PMOE_OK;
}

pmoe_status pmoe_layer_update_selection_bias(pmoe_layer *layer, float rate, int32_t centred, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_TRY(pmoei_ctx_enter(layer->ctx, stream));
  int32_t experts = layer->gate_cfg.num_experts;
  size_t bytes = (size_t)experts * sizeof(int64_t);
  float *bias = NULL;
  int64_t *count;
  int32_t scratch = -1;
  pmoe_status status = check_update(layer, rate, centred, &bias);
  if (status == PMOE_OK) status = pmoei_scratch_open(layer->ctx, bytes, (void **)&count, &scratch);
  status = pmoei_comm_agree_in_step(layer->groups.stage, "pmoe_layer_update_selection_bias", status);
  if (status == PMOE_OK) status = pmoei_data_copy(layer->ctx, count, pmoei_gate_counts(layer->gate), bytes);
  if (status == PMOE_OK) status = pmoei_gate_clear_counts(layer->gate);
  if (status == PMOE_OK)
    status = pmoei_allreduce(layer->groups.stage, "router.selection_bias", count, experts, PMOEI_SUM_I64);
  if (status == PMOE_OK) status = pmoei_selection_bias_update(layer->ctx, experts, count, rate, centred, bias);
  if (scratch >= 0) pmoei_scratch_close(layer->ctx, scratch);
  return status;
}
