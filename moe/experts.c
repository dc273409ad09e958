#include <stdbool.h>
#include <string.h>

#include "core/check.h"
#include "core/config.h"
#include "core/data.h"
#include "core/gemm.h"
#include "moe/activation.h"
#include "moe/ops.h"

static pmoe_status check_config(const pmoe_ctx *ctx, int32_t hidden, int32_t num_local_experts,
                                const pmoe_experts_config *cfg) {
  PMOEI_REQUIRE(hidden > 0, "hidden is %d; at least 1 was expected", hidden);
  PMOEI_REQUIRE(num_local_experts >= 0, "num_local_experts is %d; at least 0 was expected", num_local_experts);
  PMOEI_REQUIRE(cfg->inner > 0, "cfg->inner is %d; at least 1 was expected", cfg->inner);
  PMOEI_REQUIRE((int)cfg->act >= 0 && cfg->act <= PMOE_ACT_GEGLU, "cfg->act is %d; a pmoe_act was expected",
                (int)cfg->act);
  PMOEI_REQUIRE(cfg->bias == 0 || cfg->bias == 1, "cfg->bias is %d; 0 or 1 was expected", cfg->bias);
  PMOEI_TRY(pmoei_check_dtype(ctx, cfg->dtype, "cfg->dtype"));
  PMOEI_REQUIRE(cfg->grad_dtype == PMOE_F32 || cfg->grad_dtype == cfg->dtype,
                "cfg->grad_dtype is %s; float32 or cfg->dtype (%s) was expected", pmoe_dtype_name(cfg->grad_dtype),
                pmoe_dtype_name(cfg->dtype));
  PMOEI_REQUIRE(cfg->recompute_act == 0 || cfg->recompute_act == 1, "cfg->recompute_act is %d; 0 or 1 was expected",
                cfg->recompute_act);
  return PMOE_OK;
}

static const pmoei_moe_ops *choose_ops(const pmoe_ctx *ctx) {
#ifdef PMOE_WITH_CUDA
  if (pmoei_on_device(ctx)) return &pmoei_moe_cuda;
#endif
  (void)ctx;
  return &pmoei_moe_cpu;
}

static size_t product_bytes(const pmoe_experts *experts) {
  return (size_t)experts->num_experts * sizeof *experts->product;
}

pmoe_status pmoe_experts_create(pmoe_ctx *ctx, int32_t hidden, int32_t num_local_experts,
                                const pmoe_experts_config *config, pmoe_experts **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(out);
  pmoe_experts_config cfg;
  PMOEI_TRY(PMOEI_CONFIG_READ(&cfg, config));
  PMOEI_TRY(check_config(ctx, hidden, num_local_experts, &cfg));
  pmoe_experts *experts;
  PMOEI_TRY(pmoei_alloc(ctx, sizeof *experts, "experts", &experts));
  pmoei_ctx_retain(ctx);
  experts->ctx = ctx;
  experts->ops = choose_ops(ctx);
  experts->cfg = cfg;
  experts->hidden = hidden;
  experts->inner = cfg.inner;
  experts->inner1 = pmoei_act_gated(cfg.act) ? 2 * (int64_t)cfg.inner : cfg.inner;
  experts->num_experts = num_local_experts;
  pmoe_status status =
      pmoei_on_device(ctx) ? pmoei_alloc(ctx, product_bytes(experts), "experts", &experts->product) : PMOE_OK;
  if (status != PMOE_OK) {
    pmoe_experts_destroy(experts);
    return status;
  }
  *out = experts;
  return PMOE_OK;
}

void pmoe_experts_destroy(pmoe_experts *experts) {
  if (!experts) return;
  pmoe_ctx *ctx = experts->ctx;
  pmoei_free(ctx, experts->product, product_bytes(experts));
  pmoei_free(ctx, experts, sizeof *experts);
  pmoei_ctx_release(ctx);
}

size_t pmoei_experts_scratch_bytes(const pmoe_experts *experts, int64_t rows) {
  return experts->ops->experts_scratch(experts, rows);
}

static pmoe_status check_pointer(bool wanted, const void *p, const char *name) {
  PMOEI_REQUIRE(!wanted || p, "params->%s is NULL; memory was expected", name);
  return PMOE_OK;
}

static pmoe_status read_params(const pmoe_experts *experts, const pmoe_experts_params *params, bool data, bool grads,
                               pmoe_experts_params *out) {
  PMOEI_TRY(PMOEI_CONFIG_READ(out, params));
  data = data && experts->num_experts > 0;
  grads = grads && experts->num_experts > 0;
  bool bias = experts->cfg.bias != 0, bias2 = bias && !experts->no_output_bias;
  PMOEI_TRY(check_pointer(data, out->fc1_weight, "fc1_weight"));
  PMOEI_TRY(check_pointer(data, out->fc2_weight, "fc2_weight"));
  PMOEI_TRY(check_pointer(data && bias, out->fc1_bias, "fc1_bias"));
  PMOEI_TRY(check_pointer(data && bias2, out->fc2_bias, "fc2_bias"));
  PMOEI_TRY(check_pointer(grads, out->fc1_weight_grad, "fc1_weight_grad"));
  PMOEI_TRY(check_pointer(grads, out->fc2_weight_grad, "fc2_weight_grad"));
  PMOEI_TRY(check_pointer(grads && bias, out->fc1_bias_grad, "fc1_bias_grad"));
  PMOEI_TRY(check_pointer(grads && bias2, out->fc2_bias_grad, "fc2_bias_grad"));
  if (!bias) out->fc1_bias = NULL;
  if (!bias2) out->fc2_bias = out->fc2_bias_grad = NULL;
  return PMOE_OK;
}

static pmoe_status check_rows(const pmoe_experts *experts, const int64_t *rows, const pmoe_mat *x) {
  PMOEI_REQUIRE(rows || experts->num_experts == 0, "rows is NULL; %d row counts were expected", experts->num_experts);
  PMOEI_REQUIRE_POINTER(x);
  PMOEI_REQUIRE(x->rows >= 0, "x->rows is %lld; at least 0 was expected", (long long)x->rows);
  int64_t left = x->rows;
  for (int32_t e = 0; e < experts->num_experts; e++) {
    PMOEI_REQUIRE(rows[e] >= 0, "rows[%d] is %lld; at least 0 was expected", e, (long long)rows[e]);
    PMOEI_REQUIRE(rows[e] <= left, "rows sums to more than x->rows, which is %lld", (long long)x->rows);
    left -= rows[e];
  }
  PMOEI_REQUIRE(left == 0, "rows sums to %lld; x->rows, which is %lld, was expected", (long long)(x->rows - left),
                (long long)x->rows);
  return pmoei_check_mat(x, "x", experts->cfg.dtype, x->rows, experts->hidden);
}

pmoe_status pmoe_experts_forward(pmoe_experts *experts, const pmoe_experts_params *params, const int64_t *rows,
                                 const pmoe_mat *x, pmoe_mat *pre, pmoe_mat *y, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(experts);
  pmoei_experts_call call = {.experts = experts, .rows = rows, .x = x, .pre = pre, .y = y};
  PMOEI_TRY(read_params(experts, params, true, false, &call.params));
  PMOEI_TRY(check_rows(experts, rows, x));
  PMOEI_REQUIRE(!pre || !experts->cfg.recompute_act, "pre is set although cfg->recompute_act is 1; NULL was expected");
  if (pre) PMOEI_TRY(pmoei_check_mat(pre, "pre", experts->cfg.dtype, x->rows, experts->inner1));
  PMOEI_TRY(pmoei_check_mat(y, "y", experts->cfg.dtype, x->rows, experts->hidden));
  PMOEI_TRY(pmoei_ctx_enter(experts->ctx, stream));
  return x->rows == 0 ? PMOE_OK : experts->ops->experts_forward(&call, stream);
}

static pmoe_status check_backward(const pmoei_experts_call *call, pmoe_bwd which) {
  const pmoe_experts *experts = call->experts;
  pmoe_dtype dtype = experts->cfg.dtype;
  int64_t total = call->x->rows;
  bool all = which == PMOE_BWD_ALL;
  PMOEI_TRY(pmoei_check_mat(call->dy, "dy", dtype, total, experts->hidden));
  if (call->pre || !all || !experts->cfg.recompute_act)
    PMOEI_TRY(pmoei_check_mat(call->pre, "pre", dtype, total, experts->inner1));
  if (call->dpre || !all) PMOEI_TRY(pmoei_check_mat(call->dpre, "dpre", dtype, total, experts->inner1));
  if (which == PMOE_BWD_WEIGHT) return PMOE_OK;
  PMOEI_TRY(pmoei_check_mat(call->dx, "dx", dtype, total, experts->hidden));
  bool same = call->dx->data == call->dy->data && total > 0;
  PMOEI_REQUIRE(!same || all, "dx is dy's memory, which WEIGHT will need; other memory was expected");
  PMOEI_REQUIRE(!same || call->dx->ld == call->dy->ld, "dx->ld is %lld on dy's memory; %lld was expected",
                (long long)call->dx->ld, (long long)call->dy->ld);
  return PMOE_OK;
}

pmoe_status pmoe_experts_backward(pmoe_experts *experts, const pmoe_experts_params *params, const int64_t *rows,
                                  const pmoe_mat *x, pmoe_mat *pre, const float *row_weight, const pmoe_mat *dy,
                                  pmoe_mat *dpre, pmoe_mat *dx, float *drow_weight, pmoe_bwd which,
                                  pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(experts);
  PMOEI_REQUIRE((int)which >= 0 && which <= PMOE_BWD_WEIGHT, "which is %d; a pmoe_bwd was expected", (int)which);
  pmoei_experts_call call = {.experts = experts, .rows = rows, .x = x, .dy = dy, .pre = pre, .dpre = dpre, .dx = dx};
  call.row_weight = row_weight;
  call.drow_weight = drow_weight;
  PMOEI_TRY(read_params(experts, params, which != PMOE_BWD_WEIGHT, which != PMOE_BWD_INPUT, &call.params));
  PMOEI_TRY(check_rows(experts, rows, x));
  PMOEI_TRY(check_backward(&call, which));
  PMOEI_TRY(pmoei_ctx_enter(experts->ctx, stream));
  return x->rows == 0 ? PMOE_OK : experts->ops->experts_backward(&call, which, stream);
}
