#include <math.h>

#include "core/config.h"
#include "core/dtype.h"
#include "core/simd.h"
#include "gating/gate_ops.h"

#define REQUIRE_SWITCH(value)                                                                                          \
  PMOEI_REQUIRE((value) == 0 || (value) == 1, "%s is %d; 0 or 1 was expected", #value, (int)(value))
#define REQUIRE_FACTOR(value)                                                                                          \
  PMOEI_REQUIRE((value) >= 0 && isfinite(value), "%s is %g; a finite number, 0 or more, was expected", #value,         \
                (double)(value))

#define REQUIRE_ENUM(value, type, last)                                                                                \
  PMOEI_REQUIRE((int)(value) >= 0 && (value) <= (last), "%s is %d; a " #type " was expected", #value, (int)(value))

/* What cannot be combined, and why. `what` names the setting that does not go with a choice or router. */
static pmoe_status check_combinations(const pmoe_gate_config *cfg) {
  bool topk = cfg->choice == PMOE_CHOICE_TOPK, experts_choose = cfg->choice == PMOE_CHOICE_EXPERT_CHOICE;
  bool aux = cfg->aux_coef > 0 || cfg->seq_aux_coef > 0 || cfg->global_aux_coef > 0, losses = aux || cfg->z_coef > 0;
  bool finished = cfg->router == PMOE_ROUTER_HOST_ROUTING;
  PMOEI_REQUIRE(!cfg->softmax_after_topk || cfg->score == PMOE_SCORE_SOFTMAX,
                "cfg->softmax_after_topk is 1 with score %d; PMOE_SCORE_SOFTMAX was expected", (int)cfg->score);
  PMOEI_REQUIRE(!cfg->selection_bias || topk,
                "cfg->selection_bias is 1 with choice %d; PMOE_CHOICE_TOPK was expected, the only one that compares "
                "scores with a bias",
                (int)cfg->choice);
  PMOEI_REQUIRE(!cfg->gumbel || (topk && !cfg->selection_bias && cfg->num_groups <= 1),
                "cfg->gumbel is 1; PMOE_CHOICE_TOPK without selection bias and groups was expected, since the noise is "
                "defined on plain logits");
  PMOEI_REQUIRE(!cfg->aux_plain_topk || aux, "cfg->aux_plain_topk is 1 without an auxiliary loss; 0 was expected");
  PMOEI_REQUIRE(!cfg->aux_first_choice_only || cfg->choice != PMOE_CHOICE_EXPERT_CHOICE,
                "cfg->aux_first_choice_only is 1 with PMOE_CHOICE_EXPERT_CHOICE; 0 was expected");
  PMOEI_REQUIRE(
      !experts_choose || !aux,
      "an auxiliary loss coefficient is set with PMOE_CHOICE_EXPERT_CHOICE; 0 was expected, since the experts' "
      "loads are even by construction");
  PMOEI_REQUIRE(!experts_choose || !cfg->softmax_after_topk,
                "cfg->softmax_after_topk is 1 with PMOE_CHOICE_EXPERT_CHOICE; 0 was expected, since experts compare "
                "scores before anything is chosen");
  PMOEI_REQUIRE(cfg->jitter == 0 || cfg->router == PMOE_ROUTER_LINEAR,
                "cfg->jitter is %g with router %d; 0 was expected, since the host made the logits", (double)cfg->jitter,
                (int)cfg->router);
  PMOEI_REQUIRE(!cfg->bias || cfg->router == PMOE_ROUTER_LINEAR,
                "cfg->bias is 1 with router %d; 0 was expected, since the host made the logits", (int)cfg->router);
  PMOEI_REQUIRE(!finished || cfg->choice == PMOE_CHOICE_GIVEN,
                "cfg->choice is %d with PMOE_ROUTER_HOST_ROUTING; PMOE_CHOICE_GIVEN was expected", (int)cfg->choice);
  PMOEI_REQUIRE(!finished || (!losses && cfg->norm == PMOE_NORM_NONE && !cfg->softmax_after_topk &&
                              cfg->score == PMOE_SCORE_SOFTMAX),
                "a loss, norm or score is set with PMOE_ROUTER_HOST_ROUTING; none was expected, since there are no "
                "logits and the weights are finished");
  return PMOE_OK;
}

static pmoe_status check_groups(const pmoe_gate_config *cfg) {
  PMOEI_REQUIRE(cfg->num_groups >= 0 && cfg->num_groups <= cfg->num_experts &&
                    (cfg->num_groups == 0 || cfg->num_experts % cfg->num_groups == 0),
                "cfg->num_groups is %d; 0 or a divisor of num_experts = %d was expected", cfg->num_groups,
                cfg->num_experts);
  if (cfg->num_groups == 0) {
    PMOEI_REQUIRE(cfg->groups_kept == 0 && !cfg->group_score_top2,
                  "cfg->groups_kept is %d and group_score_top2 %d without groups; 0 was expected", cfg->groups_kept,
                  cfg->group_score_top2);
    return PMOE_OK;
  }
  int32_t size = cfg->num_experts / cfg->num_groups;
  PMOEI_REQUIRE(cfg->choice == PMOE_CHOICE_TOPK,
                "cfg->num_groups is %d with choice %d; PMOE_CHOICE_TOPK was expected, the only one limited by groups",
                cfg->num_groups, (int)cfg->choice);
  PMOEI_REQUIRE(cfg->groups_kept >= 1 && cfg->groups_kept <= cfg->num_groups,
                "cfg->groups_kept is %d; 1 to num_groups = %d was expected", cfg->groups_kept, cfg->num_groups);
  PMOEI_REQUIRE(cfg->top_k <= (int64_t)cfg->groups_kept * size,
                "cfg->top_k is %d; at most the %lld experts of groups_kept = %d groups was expected", cfg->top_k,
                (long long)cfg->groups_kept * size, cfg->groups_kept);
  PMOEI_REQUIRE(!cfg->group_score_top2 || size >= 2,
                "cfg->group_score_top2 is 1 with groups of %d; groups of 2 or more were expected", size);
  return PMOE_OK;
}

pmoe_status pmoei_gate_check_config(int32_t hidden, int32_t layer_id, const pmoe_gate_config *cfg) {
  PMOEI_REQUIRE(hidden >= 1, "hidden is %d; at least 1 was expected", hidden);
  PMOEI_REQUIRE(layer_id >= 0, "layer_id is %d; 0 or more was expected", layer_id);
  PMOEI_REQUIRE(cfg->num_experts >= 1, "cfg->num_experts is %d; at least 1 was expected", cfg->num_experts);
  PMOEI_REQUIRE(cfg->top_k >= 1 && cfg->top_k <= cfg->num_experts,
                "cfg->top_k is %d; 1 to num_experts = %d was expected", cfg->top_k, cfg->num_experts);
  REQUIRE_ENUM(cfg->score, pmoe_score, PMOE_SCORE_SQRT_SOFTPLUS);
  REQUIRE_ENUM(cfg->norm, pmoe_norm, PMOE_NORM_AFTER_DROP);
  REQUIRE_ENUM(cfg->drop, pmoe_drop, PMOE_DROP_TOKEN_ORDER);
  REQUIRE_ENUM(cfg->router, pmoe_router, PMOE_ROUTER_HOST_ROUTING);
  REQUIRE_ENUM(cfg->choice, pmoe_choice, PMOE_CHOICE_EXPERT_CHOICE);
  REQUIRE_SWITCH(cfg->softmax_after_topk);
  REQUIRE_SWITCH(cfg->aux_first_choice_only);
  REQUIRE_SWITCH(cfg->gumbel);
  REQUIRE_SWITCH(cfg->bias);
  REQUIRE_SWITCH(cfg->selection_bias);
  REQUIRE_SWITCH(cfg->group_score_top2);
  REQUIRE_SWITCH(cfg->aux_plain_topk);
  REQUIRE_FACTOR(cfg->weight_scale);
  REQUIRE_FACTOR(cfg->aux_coef);
  REQUIRE_FACTOR(cfg->z_coef);
  REQUIRE_FACTOR(cfg->seq_aux_coef);
  REQUIRE_FACTOR(cfg->global_aux_coef);
  PMOEI_REQUIRE(cfg->jitter >= 0 && cfg->jitter < 1, "cfg->jitter is %g; 0 to below 1 was expected",
                (double)cfg->jitter);
  PMOEI_REQUIRE(cfg->top_k > 1 || cfg->norm == PMOE_NORM_NONE,
                "cfg->norm is %d with top_k = 1; PMOE_NORM_NONE was expected, since every weight would be 1 and the "
                "router would not learn",
                (int)cfg->norm);
  PMOEI_REQUIRE(cfg->top_k > 1 || !cfg->softmax_after_topk,
                "cfg->softmax_after_topk is 1 with top_k = 1; 0 was expected, since every weight would be 1 and the "
                "router would not learn");
  PMOEI_REQUIRE(!cfg->gumbel || cfg->top_k <= 2, "cfg->gumbel is 1 with top_k = %d; it is defined for top_k 1 and 2",
                cfg->top_k);
  PMOEI_TRY(check_combinations(cfg));
  PMOEI_TRY(check_groups(cfg));
  REQUIRE_FACTOR(cfg->capacity_factor);
  REQUIRE_FACTOR(cfg->eval_capacity_factor);
  PMOEI_REQUIRE(cfg->choice != PMOE_CHOICE_EXPERT_CHOICE || (cfg->capacity_factor > 0 && cfg->eval_capacity_factor > 0),
                "cfg->capacity_factor is %g and eval_capacity_factor %g with PMOE_CHOICE_EXPERT_CHOICE; both above 0 "
                "were expected, since they say how many tokens an expert takes",
                (double)cfg->capacity_factor, (double)cfg->eval_capacity_factor);
  int64_t capacity;
  PMOEI_TRY(pmoe_gate_capacity(0, cfg->num_experts, cfg->top_k, cfg->capacity_factor, cfg->min_capacity, &capacity));
  pmoe_status status =
      pmoe_gate_capacity(0, cfg->num_experts, cfg->top_k, cfg->eval_capacity_factor, cfg->min_capacity, &capacity);
  return status == PMOE_OK ? PMOE_OK : pmoei_error(status, "cfg->eval_capacity_factor: %s", pmoe_last_error());
}

/* Rows are bounded so that no product of sizes overflows, padding included. */
static pmoe_status check_mat(const pmoe_mat *mat, const char *name, int64_t cols) {
  PMOEI_REQUIRE(mat != NULL, "%s is NULL; a pointer was expected", name);
  PMOEI_REQUIRE(mat->dtype == PMOE_F32 || mat->dtype == PMOE_BF16,
                "%s->dtype is %s (%d); float32 or bfloat16 was expected", name, pmoe_dtype_name(mat->dtype),
                (int)mat->dtype);
  PMOEI_REQUIRE(mat->cols == cols, "%s->cols is %lld; hidden = %lld was expected", name, (long long)mat->cols,
                (long long)cols);
  PMOEI_REQUIRE(mat->ld >= mat->cols, "%s->ld is %lld; at least cols = %lld was expected", name, (long long)mat->ld,
                (long long)mat->cols);
  PMOEI_REQUIRE(mat->rows >= 0 && mat->rows <= (INT64_MAX >> 8) / mat->ld,
                "%s->rows is %lld; 0 to (2^55 - 1) / ld was expected", name, (long long)mat->rows);
  PMOEI_REQUIRE(mat->data != NULL || mat->rows == 0, "%s->data is NULL; a pointer to %lld rows was expected", name,
                (long long)mat->rows);
  return PMOE_OK;
}

static pmoe_status check_params(pmoe_gate_params *out, const pmoe_gate *gate, const pmoe_gate_params *params) {
  const pmoe_gate_config *cfg = &gate->cfg;
  bool linear = cfg->router == PMOE_ROUTER_LINEAR;
  *out = (pmoe_gate_params)PMOE_CONFIG_INIT(pmoe_gate_params);
  if (params || linear || cfg->selection_bias) PMOEI_TRY(PMOEI_CONFIG_READ(out, params));
  if (linear)
    PMOEI_REQUIRE(out->weight != NULL, "params->weight is NULL; [%d,%d] float32 was expected", cfg->num_experts,
                  gate->hidden);
  else PMOEI_REQUIRE(out->weight == NULL, "params->weight is set; NULL was expected where the host is the router");
  if (cfg->bias) PMOEI_REQUIRE(out->bias != NULL, "params->bias is NULL; [%d] float32 was expected", cfg->num_experts);
  else PMOEI_REQUIRE(out->bias == NULL, "params->bias is set; NULL was expected for a router without bias");
  if (cfg->selection_bias)
    PMOEI_REQUIRE(out->selection_bias != NULL, "params->selection_bias is NULL; [%d] float32 was expected",
                  cfg->num_experts);
  else
    PMOEI_REQUIRE(out->selection_bias == NULL,
                  "params->selection_bias is set; NULL was expected for a router without selection bias");
  return PMOE_OK;
}

pmoe_status pmoei_gate_check_step(pmoe_step *out, const pmoe_step *step, int64_t tokens) {
  *out = (pmoe_step)PMOE_CONFIG_INIT(pmoe_step);
  if (!step) return PMOE_OK;
  PMOEI_TRY(PMOEI_CONFIG_READ(out, step));
  PMOEI_REQUIRE(out->training == 0 || out->training == 1, "step->training is %d; 0 or 1 was expected", out->training);
  PMOEI_REQUIRE(out->first_token >= 0 && out->first_token <= INT64_MAX - tokens,
                "step->first_token is %lld; 0 or more, and room for %lld tokens, was expected",
                (long long)out->first_token, (long long)tokens);
  PMOEI_REQUIRE(out->recompute == 0 || out->recompute == 1, "step->recompute is %d; 0 or 1 was expected",
                out->recompute);
  PMOEI_REQUIRE(out->num_sequences >= 0, "step->num_sequences is %d; 0 or more was expected", out->num_sequences);
  PMOEI_REQUIRE(out->loss_tokens >= 0, "step->loss_tokens is %lld; 0 or more was expected",
                (long long)out->loss_tokens);
  PMOEI_REQUIRE(out->loss_sequences >= 0, "step->loss_sequences is %lld; 0 or more was expected",
                (long long)out->loss_sequences);
  int64_t expected = out->token_mask ? tokens : 0;
  PMOEI_REQUIRE(out->token_mask_len == expected, "step->token_mask_len is %lld; %lld was expected",
                (long long)out->token_mask_len, (long long)expected);
  return PMOE_OK;
}

/* Sequences are looked at where the sequence loss needs them. */
static pmoe_status check_sequences(const pmoei_gate_call *call) {
  const pmoe_step *step = &call->step;
  PMOEI_REQUIRE(step->num_sequences >= 1 || call->tokens == 0,
                "step->num_sequences is %d with seq_aux_coef; 1 or more was expected", step->num_sequences);
  if (!step->sequence)
    PMOEI_REQUIRE(
        step->num_sequences == 0 || call->tokens % step->num_sequences == 0,
        "step->sequence is NULL for %lld tokens in %d sequences; equal sequences, or the array, were expected",
        (long long)call->tokens, step->num_sequences);
  for (int64_t t = 0; t < call->tokens && step->sequence; t++)
    PMOEI_REQUIRE(step->sequence[t] >= 0 && step->sequence[t] < step->num_sequences,
                  "step->sequence[%lld] is %d; 0 to %d was expected", (long long)t, step->sequence[t],
                  step->num_sequences - 1);
  return PMOE_OK;
}

/* Ids in range, and each expert once per token. */
static pmoe_status check_given(const pmoei_gate_call *call) {
  int32_t top_k = call->gate->cfg.top_k, num_experts = call->gate->cfg.num_experts;
  for (int64_t t = 0; t < call->tokens; t++) {
    const int32_t *expert = call->step.expert + t * top_k;
    for (int32_t k = 0; k < top_k; k++) {
      PMOEI_REQUIRE(expert[k] >= -1 && expert[k] < num_experts,
                    "step->expert[%lld] is %d; -1 (none) to %d was expected", (long long)(t * top_k + k), expert[k],
                    num_experts - 1);
      for (int32_t j = 0; j < k; j++)
        PMOEI_REQUIRE(expert[k] < 0 || expert[j] != expert[k],
                      "step->expert has expert %d twice for token %lld; distinct experts were expected", expert[k],
                      (long long)t);
    }
  }
  return PMOE_OK;
}

static pmoe_status check_host_mat(const pmoe_mat *mat, const char *name, const pmoei_gate_call *call) {
  PMOEI_TRY(check_mat(mat, name, call->gate->cfg.num_experts));
  PMOEI_REQUIRE(mat->dtype == PMOE_F32, "%s->dtype is %s; float32 was expected", name, pmoe_dtype_name(mat->dtype));
  PMOEI_REQUIRE(mat->rows == call->tokens, "%s->rows is %lld; x->rows = %lld was expected", name, (long long)mat->rows,
                (long long)call->tokens);
  return PMOE_OK;
}

/* What the step must bring for this router and choice. */
static pmoe_status check_step_arrays(const pmoei_gate_call *call) {
  const pmoe_gate_config *cfg = &call->gate->cfg;
  const pmoe_step *step = &call->step;
  bool some = call->tokens > 0;
  if (cfg->seq_aux_coef > 0) PMOEI_TRY(check_sequences(call));
  PMOEI_REQUIRE(cfg->choice != PMOE_CHOICE_HASH || step->token_id || !some,
                "step->token_id is NULL; %lld token ids were expected by PMOE_CHOICE_HASH", (long long)call->tokens);
  PMOEI_REQUIRE(cfg->choice != PMOE_CHOICE_GIVEN || step->expert || !some,
                "step->expert is NULL; [%lld,%d] experts were expected by PMOE_CHOICE_GIVEN", (long long)call->tokens,
                cfg->top_k);
  PMOEI_REQUIRE(cfg->router != PMOE_ROUTER_HOST_ROUTING || step->weight || !some,
                "step->weight is NULL; [%lld,%d] float32 was expected by PMOE_ROUTER_HOST_ROUTING",
                (long long)call->tokens, cfg->top_k);
  if (cfg->router == PMOE_ROUTER_HOST_LOGITS) PMOEI_TRY(check_host_mat(step->logits, "step->logits", call));
  return cfg->choice == PMOE_CHOICE_GIVEN ? check_given(call) : PMOE_OK;
}

static pmoe_status check_routing(pmoe_routing *out, const pmoe_routing *routing, int64_t tokens) {
  PMOEI_TRY(PMOEI_CONFIG_READ(out, routing));
  PMOEI_REQUIRE(tokens == 0 || (out->expert && out->slot && out->weight),
                "routing->expert, slot or weight is NULL; three arrays for %lld tokens were expected",
                (long long)tokens);
  PMOEI_REQUIRE(out->expert_count && out->expert_rows,
                "routing->expert_count or expert_rows is NULL; two arrays were expected");
  return PMOE_OK;
}

static pmoe_status check_common(pmoei_gate_call *call, const pmoe_gate *gate, const pmoe_gate_params *params,
                                const pmoe_step *step, const pmoe_mat *x, const pmoe_routing *routing) {
  PMOEI_REQUIRE_POINTER(gate);
  PMOEI_TRY(check_params(&call->params, gate, params));
  PMOEI_TRY(check_mat(x, "x", gate->hidden));
  int64_t tokens = x->rows;
  PMOEI_REQUIRE(tokens <= (INT64_MAX >> 8) / gate->cfg.num_experts,
                "x->rows is %lld; at most (2^55 - 1) / num_experts was expected", (long long)tokens);
  PMOEI_TRY(pmoei_gate_check_step(&call->step, step, tokens));
  PMOEI_TRY(check_routing(&call->routing, routing, tokens));
  call->gate = gate;
  call->x = *x;
  call->tokens = tokens;
  call->blocks = (tokens + PMOEI_GATE_BLOCK - 1) / PMOEI_GATE_BLOCK;
  call->num_sequences = gate->cfg.seq_aux_coef > 0 ? call->step.num_sequences : 0;
  PMOEI_REQUIRE(call->routing.loss_sums || !pmoei_gate_has_losses(gate),
                "routing->loss_sums is NULL; [pmoe_gate_loss_rows,%d] int64 was expected by a router with losses",
                gate->cfg.num_experts + 1);
  return check_step_arrays(call);
}

pmoe_status pmoei_gate_check_forward(pmoei_gate_call *call, const pmoe_gate *gate, const pmoe_gate_params *params,
                                     const pmoe_step *step, const pmoe_mat *x, const pmoe_routing *routing,
                                     const pmoe_gate_stats *stats) {
  PMOEI_TRY(check_common(call, gate, params, step, x, routing));
  PMOEI_REQUIRE(!stats || (stats->size >= sizeof stats->size && stats->size <= 65536),
                "stats->size is %zu; initialise the struct with PMOE_CONFIG_INIT", stats->size);
  return pmoei_gate_slots(&gate->cfg, call->tokens, call->step.training, &call->capacity);
}

PMOEI_VECTORISED static bool any_outside(const int32_t *expert, int64_t n, int32_t num_experts) {
  int32_t outside = 0;
  for (int64_t i = 0; i < n; i++) outside |= expert[i] < -1 || expert[i] >= num_experts;
  return outside != 0;
}

static pmoe_status check_choices(const pmoei_gate_call *call) {
  const pmoe_routing *routing = &call->routing;
  const pmoe_gate_config *cfg = &call->gate->cfg;
  PMOEI_REQUIRE(routing->tokens == call->tokens, "routing->tokens is %lld; x->rows = %lld was expected",
                (long long)routing->tokens, (long long)call->tokens);
  PMOEI_REQUIRE(routing->num_experts == cfg->num_experts, "routing->num_experts is %d; %d was expected",
                routing->num_experts, cfg->num_experts);
  PMOEI_REQUIRE(routing->top_k == cfg->top_k, "routing->top_k is %d; %d was expected", routing->top_k, cfg->top_k);
  int64_t choices = call->tokens * cfg->top_k;
  if (!any_outside(routing->expert, choices, cfg->num_experts)) return PMOE_OK;
  for (int64_t i = 0; i < choices; i++)
    PMOEI_REQUIRE(routing->expert[i] >= -1 && routing->expert[i] < cfg->num_experts,
                  "routing->expert[%lld] is %d; -1 (masked) to %d was expected", (long long)i, routing->expert[i],
                  cfg->num_experts - 1);
  return PMOE_OK;
}

static pmoe_status check_input_grad(const pmoei_gate_call *call, const float *dweight, float loss_scale,
                                    const pmoe_mat *dx) {
  PMOEI_REQUIRE(dweight != NULL || call->tokens == 0, "dweight is NULL; [%lld,%d] float32 was expected",
                (long long)call->tokens, call->gate->cfg.top_k);
  PMOEI_REQUIRE(isfinite(loss_scale), "loss_scale is %g; a finite number was expected", (double)loss_scale);
  PMOEI_TRY(check_mat(dx, "dx", call->gate->hidden));
  PMOEI_REQUIRE(dx->rows == call->tokens, "dx->rows is %lld; x->rows = %lld was expected", (long long)dx->rows,
                (long long)call->tokens);
  PMOEI_REQUIRE(dx->dtype == PMOE_F32 || dx->dtype == call->x.dtype, "dx->dtype is %s; float32 or x's %s was expected",
                pmoe_dtype_name(dx->dtype), pmoe_dtype_name(call->x.dtype));
  return PMOE_OK;
}

pmoe_status pmoei_gate_check_backward(pmoei_gate_call *call, const pmoe_gate *gate, const pmoe_gate_params *params,
                                      const pmoe_step *step, const pmoe_mat *x, const pmoe_routing *routing,
                                      const float *dweight, float loss_scale, float *dlogits, const pmoe_mat *dx,
                                      pmoe_bwd which) {
  PMOEI_REQUIRE((int)which >= 0 && which <= PMOE_BWD_WEIGHT, "which is %d; a pmoe_bwd was expected", (int)which);
  PMOEI_TRY(check_common(call, gate, params, step, x, routing));
  PMOEI_TRY(check_choices(call));
  PMOEI_REQUIRE(dlogits != NULL || call->tokens == 0 || which == PMOE_BWD_ALL || gate->cfg.router != PMOE_ROUTER_LINEAR,
                "dlogits is NULL; [%lld,%d] float32 was expected by a backward in two parts", (long long)call->tokens,
                gate->cfg.num_experts);
  const pmoe_gate_config *cfg = &gate->cfg;
  if (which != PMOE_BWD_INPUT && cfg->router == PMOE_ROUTER_LINEAR) {
    PMOEI_REQUIRE(call->params.weight_grad != NULL, "params->weight_grad is NULL; [%d,%d] float32 was expected",
                  gate->cfg.num_experts, gate->hidden);
    PMOEI_REQUIRE(call->params.bias_grad != NULL || !cfg->bias, "params->bias_grad is NULL; [%d] float32 was expected",
                  cfg->num_experts);
  }
  if (which != PMOE_BWD_WEIGHT) {
    if (cfg->router == PMOE_ROUTER_HOST_LOGITS) PMOEI_TRY(check_host_mat(call->step.dlogits, "step->dlogits", call));
    PMOEI_REQUIRE(cfg->router != PMOE_ROUTER_HOST_ROUTING || call->step.dweight || call->tokens == 0,
                  "step->dweight is NULL; [%lld,%d] float32 was expected by PMOE_ROUTER_HOST_ROUTING",
                  (long long)call->tokens, cfg->top_k);
    PMOEI_TRY(check_input_grad(call, dweight, loss_scale, dx));
    call->dx = *dx;
  }
  call->dweight = dweight;
  call->loss_scale = loss_scale;
  call->dlogits = dlogits;
  call->backward = true;
  return PMOE_OK;
}
