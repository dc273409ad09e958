/* The configuration of a MoE layer, as pmoe_layer_create takes it. */
#ifndef LM_MOE_H
#define LM_MOE_H
#include "config.h"

struct lm_moe_config {
  pmoe_gate_config gate;
  pmoe_experts_config experts;
  pmoe_residual_config residual;
  pmoe_layer_config layer; /* points to the others */
};

/* Of layer `layer`, which has experts, with expert-parallel size ep. */
void moe_config(struct lm_moe_config *out, const struct lm_config *cfg, int layer, int ep);
/* Of an MLP or an expert whose inner size here is `inner`. */
pmoe_experts_config mlp_config(const struct lm_config *cfg, int inner);

#endif
