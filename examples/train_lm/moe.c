#include "moe.h"

pmoe_experts_config mlp_config(const struct lm_config *cfg, int inner) {
  pmoe_experts_config experts = PMOE_CONFIG_INIT(pmoe_experts_config);
  experts.inner = inner;
  experts.act = PMOE_ACT_GELU;
  experts.bias = 1;
  experts.dtype = cfg->dtype;
  experts.grad_dtype = PMOE_F32;
  return experts;
}

void moe_config(struct lm_moe_config *out, const struct lm_config *cfg, int layer, int ep) {
  *out = (struct lm_moe_config){PMOE_CONFIG_INIT(pmoe_gate_config), mlp_config(cfg, config_inner(cfg)),
                                PMOE_CONFIG_INIT(pmoe_residual_config), PMOE_CONFIG_INIT(pmoe_layer_config)};
  out->gate.num_experts = cfg->experts.value[layer];
  out->gate.top_k = cfg->topk;
  out->gate.norm = cfg->topk > 1 ? PMOE_NORM_AFTER_DROP : PMOE_NORM_NONE;
  out->gate.capacity_factor = out->gate.eval_capacity_factor = cfg->capacity;
  out->gate.aux_coef = cfg->aux;
  out->gate.z_coef = cfg->z;
  out->residual.mix = cfg->residual;
  out->residual.inner = out->experts.inner;
  out->residual.act = out->experts.act;
  out->residual.bias = out->experts.bias;
  out->layer.hidden = cfg->hidden;
  out->layer.layer_id = layer;
  out->layer.ep = ep;
  out->layer.gate = &out->gate;
  out->layer.experts = &out->experts;
  out->layer.residual = cfg->residual == PMOE_MIX_NONE ? NULL : &out->residual;
}
