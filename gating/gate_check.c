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

pmoe_status pmoei_gate_check_config(int32_t hidden, int32_t layer_id, const pmoe_gate_config *cfg) {
  PMOEI_REQUIRE(hidden >= 1, "hidden is %d; at least 1 was expected", hidden);
  PMOEI_REQUIRE(layer_id >= 0, "layer_id is %d; 0 or more was expected", layer_id);
  PMOEI_REQUIRE(cfg->num_experts >= 1, "cfg->num_experts is %d; at least 1 was expected", cfg->num_experts);
  PMOEI_REQUIRE(cfg->top_k >= 1 && cfg->top_k <= cfg->num_experts,
                "cfg->top_k is %d; 1 to num_experts = %d was expected", cfg->top_k, cfg->num_experts);
  PMOEI_REQUIRE(cfg->score == PMOE_SCORE_SOFTMAX, "cfg->score is %d; a pmoe_score was expected", (int)cfg->score);
  PMOEI_REQUIRE((int)cfg->norm >= 0 && cfg->norm <= PMOE_NORM_AFTER_DROP, "cfg->norm is %d; a pmoe_norm was expected",
                (int)cfg->norm);
  PMOEI_REQUIRE((int)cfg->drop >= 0 && cfg->drop <= PMOE_DROP_RANDOM, "cfg->drop is %d; a pmoe_drop was expected",
                (int)cfg->drop);
  REQUIRE_SWITCH(cfg->softmax_after_topk);
  REQUIRE_SWITCH(cfg->aux_first_choice_only);
  REQUIRE_SWITCH(cfg->gumbel);
  REQUIRE_SWITCH(cfg->bias);
  REQUIRE_FACTOR(cfg->weight_scale);
  REQUIRE_FACTOR(cfg->aux_coef);
  REQUIRE_FACTOR(cfg->z_coef);
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
  REQUIRE_FACTOR(cfg->capacity_factor);
  REQUIRE_FACTOR(cfg->eval_capacity_factor);
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
  PMOEI_TRY(PMOEI_CONFIG_READ(out, params));
  PMOEI_REQUIRE(out->weight != NULL, "params->weight is NULL; [%d,%d] float32 was expected", gate->cfg.num_experts,
                gate->hidden);
  if (gate->cfg.bias)
    PMOEI_REQUIRE(out->bias != NULL, "params->bias is NULL; [%d] float32 was expected", gate->cfg.num_experts);
  else PMOEI_REQUIRE(out->bias == NULL, "params->bias is set; NULL was expected for a router without bias");
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
  int64_t expected = out->token_mask ? tokens : 0;
  PMOEI_REQUIRE(out->token_mask_len == expected, "step->token_mask_len is %lld; %lld was expected",
                (long long)out->token_mask_len, (long long)expected);
  return PMOE_OK;
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
  return PMOE_OK;
}

pmoe_status pmoei_gate_check_forward(pmoei_gate_call *call, const pmoe_gate *gate, const pmoe_gate_params *params,
                                     const pmoe_step *step, const pmoe_mat *x, const pmoe_routing *routing,
                                     const pmoe_gate_stats *stats) {
  PMOEI_TRY(check_common(call, gate, params, step, x, routing));
  PMOEI_REQUIRE(!stats || (stats->size >= sizeof stats->size && stats->size <= 65536),
                "stats->size is %zu; initialise the struct with PMOE_CONFIG_INIT", stats->size);
  const pmoe_gate_config *cfg = &gate->cfg;
  float factor = call->step.training ? cfg->capacity_factor : cfg->eval_capacity_factor;
  return pmoe_gate_capacity(call->tokens, cfg->num_experts, cfg->top_k, factor, cfg->min_capacity, &call->capacity);
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
  PMOEI_REQUIRE(dlogits != NULL || call->tokens == 0 || which == PMOE_BWD_ALL,
                "dlogits is NULL; [%lld,%d] float32 was expected by a backward in two parts", (long long)call->tokens,
                gate->cfg.num_experts);
  if (which != PMOE_BWD_INPUT) {
    PMOEI_REQUIRE(call->params.weight_grad != NULL, "params->weight_grad is NULL; [%d,%d] float32 was expected",
                  gate->cfg.num_experts, gate->hidden);
    PMOEI_REQUIRE(call->params.bias_grad != NULL || !gate->cfg.bias,
                  "params->bias_grad is NULL; [%d] float32 was expected", gate->cfg.num_experts);
  }
  if (which != PMOE_BWD_WEIGHT) {
    PMOEI_TRY(check_input_grad(call, dweight, loss_scale, dx));
    call->dx = *dx;
  }
  call->dweight = dweight;
  call->loss_scale = loss_scale;
  call->dlogits = dlogits;
  call->backward = true;
  return PMOE_OK;
}
