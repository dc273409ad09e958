#include <stdbool.h>

#include "core/check.h"
#include "core/config.h"
#include "core/data.h"
#include "moe/ops.h"

struct pmoe_residual {
  pmoe_ctx *ctx;
  pmoe_residual_config cfg;
  pmoe_experts *mlp;
  int64_t hidden;
  int32_t outputs; /* of the coefficients' little product */
};

pmoe_status pmoe_residual_create(pmoe_ctx *ctx, int32_t hidden, const pmoe_residual_config *config,
                                 pmoe_residual **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(out);
  pmoe_residual_config cfg;
  PMOEI_TRY(PMOEI_CONFIG_READ(&cfg, config));
  PMOEI_REQUIRE((int)cfg.mix > PMOE_MIX_NONE && cfg.mix <= PMOE_MIX_GATED_SUM,
                "cfg->mix is %d; PMOE_MIX_LEARNED, _SUM or _GATED_SUM was expected", (int)cfg.mix);
  pmoe_experts_config mlp = PMOE_CONFIG_INIT(pmoe_experts_config);
  mlp.inner = cfg.inner;
  mlp.act = cfg.act;
  mlp.bias = cfg.bias;
  mlp.dtype = cfg.dtype;
  mlp.grad_dtype = cfg.grad_dtype;
  pmoe_residual *residual;
  PMOEI_TRY(pmoei_alloc(ctx, sizeof *residual, "residual", &residual));
  pmoe_status status = pmoe_experts_create(ctx, hidden, 1, &mlp, &residual->mlp);
  if (status != PMOE_OK) {
    pmoei_free(ctx, residual, sizeof *residual);
    return status;
  }
  pmoei_ctx_retain(ctx);
  residual->ctx = ctx;
  residual->cfg = cfg;
  residual->hidden = hidden;
  residual->outputs = cfg.mix == PMOE_MIX_LEARNED ? 2 : cfg.mix == PMOE_MIX_GATED_SUM ? 1 : 0;
  *out = residual;
  return PMOE_OK;
}

void pmoe_residual_destroy(pmoe_residual *residual) {
  if (!residual) return;
  pmoe_ctx *ctx = residual->ctx;
  pmoe_experts_destroy(residual->mlp);
  pmoei_free(ctx, residual, sizeof *residual);
  pmoei_ctx_release(ctx);
}

size_t pmoei_residual_scratch_bytes(const pmoe_residual *residual, int64_t tokens) {
  pmoei_arena dmix = {NULL, 0};
  if (residual->outputs) pmoei_take(&dmix, 2 * tokens, sizeof(float));
  size_t mlp = pmoei_experts_scratch_bytes(residual->mlp, tokens);
  return mlp > dmix.used ? mlp : dmix.used;
}

static pmoe_status check_pointer(bool wanted, const void *p, const char *name) {
  PMOEI_REQUIRE(!wanted || p, "%s is NULL; memory was expected", name);
  return PMOE_OK;
}

static pmoe_status read_params(const pmoe_residual *residual, const pmoe_residual_params *params, bool grads,
                               pmoe_residual_params *out) {
  PMOEI_TRY(PMOEI_CONFIG_READ(out, params));
  bool mix = residual->outputs > 0, bias = residual->outputs == 2;
  PMOEI_TRY(check_pointer(mix, out->mix_weight, "params->mix_weight"));
  PMOEI_TRY(check_pointer(bias, out->mix_bias, "params->mix_bias"));
  PMOEI_TRY(check_pointer(mix && grads, out->mix_weight_grad, "params->mix_weight_grad"));
  PMOEI_TRY(check_pointer(bias && grads, out->mix_bias_grad, "params->mix_bias_grad"));
  return PMOE_OK;
}

void pmoei_residual_drop_output_bias(pmoe_residual *residual) { residual->mlp->no_output_bias = true; }

static pmoe_status check_coefficients(const pmoe_residual *residual, const pmoe_residual_params *params, int64_t rows,
                                      const float *scale, const float *branch_scale, pmoe_residual_params *out) {
  PMOEI_TRY(read_params(residual, params, false, out));
  PMOEI_TRY(check_pointer(rows > 0, scale, "scale"));
  return check_pointer(rows > 0, branch_scale, "branch_scale");
}

pmoe_status pmoei_residual_mlp_forward(pmoe_residual *residual, const pmoe_residual_params *params, const pmoe_mat *x,
                                       pmoe_mat *pre, pmoe_mat *mlp, pmoe_stream stream) {
  pmoe_residual_params p;
  PMOEI_TRY(PMOEI_CONFIG_READ(&p, params));
  return pmoe_experts_forward(residual->mlp, &p.mlp, &x->rows, x, pre, mlp, stream);
}

pmoe_status pmoei_residual_mix_forward(pmoe_residual *residual, const pmoe_residual_params *params, const pmoe_mat *x,
                                       float *scale, float *branch_scale, pmoe_stream stream) {
  pmoe_residual_params p;
  PMOEI_TRY(check_coefficients(residual, params, x->rows, scale, branch_scale, &p));
  pmoei_mix_call call = {.ctx = residual->ctx, .hidden = residual->hidden, .outputs = residual->outputs, .x = x};
  call.weight = p.mix_weight;
  call.bias = residual->outputs == 2 ? p.mix_bias : NULL;
  call.scale = scale;
  call.branch_scale = branch_scale;
  return residual->mlp->ops->mix_forward(&call, stream);
}

pmoe_status pmoe_residual_forward(pmoe_residual *residual, const pmoe_residual_params *params, const pmoe_mat *x,
                                  pmoe_mat *pre, float *scale, float *branch_scale, pmoe_mat *mlp, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(residual);
  PMOEI_REQUIRE_POINTER(x);
  pmoe_residual_params unused;
  PMOEI_TRY(check_coefficients(residual, params, x->rows, scale, branch_scale, &unused));
  PMOEI_TRY(pmoei_ctx_enter(residual->ctx, stream));
  PMOEI_TRY(pmoei_residual_mlp_forward(residual, params, x, pre, mlp, stream));
  return pmoei_residual_mix_forward(residual, params, x, scale, branch_scale, stream);
}

pmoe_status pmoe_residual_backward(pmoe_residual *residual, const pmoe_residual_params *params, const pmoe_mat *x,
                                   pmoe_mat *pre, const float *branch_scale, const pmoe_mat *dy, pmoe_mat *dpre,
                                   pmoe_mat *dx, float *dbranch_scale, pmoe_bwd which, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(residual);
  PMOEI_REQUIRE_POINTER(x);
  pmoe_residual_params p;
  PMOEI_TRY(PMOEI_CONFIG_READ(&p, params));
  bool mix = residual->outputs > 0;
  PMOEI_TRY(check_pointer(x->rows > 0, branch_scale, "branch_scale"));
  PMOEI_TRY(check_pointer(mix && x->rows > 0 && which != PMOE_BWD_WEIGHT, dbranch_scale, "dbranch_scale"));
  return pmoe_experts_backward(residual->mlp, &p.mlp, &x->rows, x, pre, branch_scale, dy, dpre, dx, dbranch_scale,
                               which, stream);
}

static pmoe_status check_mix_input(const pmoei_mix_call *call) {
  bool rows = call->x->rows > 0;
  PMOEI_TRY(check_pointer(rows && call->outputs == 2, call->scale, "scale"));
  PMOEI_TRY(check_pointer(rows && call->outputs == 2, call->dscale, "dscale"));
  PMOEI_TRY(check_pointer(rows, call->branch_scale, "branch_scale"));
  PMOEI_TRY(check_pointer(rows, call->dbranch_scale, "dbranch_scale"));
  PMOEI_REQUIRE_POINTER(call->dx);
  bool f32 = call->dx->dtype == PMOE_F32;
  return pmoei_check_mat(call->dx, "dx", f32 ? PMOE_F32 : call->x->dtype, call->x->rows, call->hidden);
}

pmoe_status pmoe_residual_mix_backward(pmoe_residual *residual, const pmoe_residual_params *params, const pmoe_mat *x,
                                       const float *scale, const float *branch_scale, const float *dscale,
                                       const float *dbranch_scale, float *dmix, pmoe_mat *dx, pmoe_bwd which,
                                       pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(residual);
  PMOEI_REQUIRE((int)which >= 0 && which <= PMOE_BWD_WEIGHT, "which is %d; a pmoe_bwd was expected", (int)which);
  pmoe_residual_params p;
  PMOEI_TRY(read_params(residual, params, which != PMOE_BWD_INPUT, &p));
  if (residual->outputs == 0) return PMOE_OK;
  PMOEI_REQUIRE_POINTER(x);
  PMOEI_TRY(pmoei_check_mat(x, "x", residual->cfg.dtype, x->rows, residual->hidden));
  /* backward reads the coefficients only; one struct serves both directions */
  pmoei_mix_call call = {.ctx = residual->ctx, .hidden = residual->hidden, .outputs = residual->outputs, .x = x};
  call.weight = p.mix_weight;
  call.scale = (float *)scale;
  call.branch_scale = (float *)branch_scale;
  call.dscale = dscale;
  call.dbranch_scale = dbranch_scale;
  call.dx = dx;
  call.weight_grad = p.mix_weight_grad;
  call.bias_grad = residual->outputs == 2 ? p.mix_bias_grad : NULL;
  if (which != PMOE_BWD_WEIGHT) PMOEI_TRY(check_mix_input(&call));
  if (which != PMOE_BWD_ALL) PMOEI_TRY(check_pointer(x->rows > 0, dmix, "dmix"));
  if (x->rows == 0) return PMOE_OK;
  PMOEI_TRY(pmoei_ctx_enter(residual->ctx, stream));
  int32_t handle = -1;
  void *scratch = dmix;
  if (!dmix) PMOEI_TRY(pmoei_scratch_open(residual->ctx, (size_t)x->rows * 2 * sizeof(float), &scratch, &handle));
  call.dmix = scratch;
  pmoe_status status = PMOE_OK;
  if (which != PMOE_BWD_WEIGHT) status = residual->mlp->ops->mix_backward_input(&call, stream);
  if (which != PMOE_BWD_INPUT && status == PMOE_OK) status = residual->mlp->ops->mix_backward_weight(&call, stream);
  if (!dmix) pmoei_scratch_close(residual->ctx, handle);
  return status;
}
