#include <pmoe/pmoe.h>
#include <stdio.h>

#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    if ((call) != PMOE_OK) return fprintf(stderr, "%s\n", pmoe_last_error()), 1;                                       \
  } while (0)

int main(void) {
  enum { T = 64, H = 32, E = 8, F = 64 }; /* tokens, hidden size, experts, their inner size */
  static float x[T * H], y[T * H], dy[T * H], dx[T * H], data[65536], grad[65536];
  for (int i = 0; i < T * H; i++) x[i] = (float)(i * 37 % 101) / 101, dy[i] = 1;
  pmoe_mat mx = {x, PMOE_F32, T, H, H}, my = {y, PMOE_F32, T, H, H};
  pmoe_mat mdx = {dx, PMOE_F32, T, H, H}, mdy = {dy, PMOE_F32, T, H, H};

  pmoe_gate_config gate = PMOE_CONFIG_INIT(pmoe_gate_config);
  gate.num_experts = E, gate.top_k = 2, gate.norm = PMOE_NORM_AFTER_DROP;
  pmoe_experts_config experts = PMOE_CONFIG_INIT(pmoe_experts_config);
  experts.inner = F, experts.act = PMOE_ACT_SWIGLU;
  pmoe_layer_config cfg = PMOE_CONFIG_INIT(pmoe_layer_config);
  cfg.hidden = H, cfg.gate = &gate, cfg.experts = &experts;
  pmoe_ctx *ctx;
  pmoe_layer *layer;
  TRY(pmoe_ctx_create(NULL, &ctx));
  TRY(pmoe_layer_create(ctx, NULL, &cfg, &layer));

  int64_t used = 0; /* parameters and gradients live in the host's memory, wherever it wants them */
  for (int i = 0; i < pmoe_layer_num_params(layer); i++) {
    pmoe_param p = PMOE_CONFIG_INIT(pmoe_param);
    TRY(pmoe_layer_param(layer, i, &p));
    TRY(pmoe_layer_bind_param(layer, i, data + used, grad + used));
    used += p.numel;
  }
  TRY(pmoe_layer_init_params(layer, 1, 0.1f));

  pmoe_stash *stash; /* what forward keeps for backward: one per micro-batch in flight */
  pmoe_stash_config stash_cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  stash_cfg.max_tokens = T;
  TRY(pmoe_stash_create(layer, &stash_cfg, NULL, 0, &stash));
  TRY(pmoe_layer_forward(layer, stash, NULL, &mx, &my, NULL));
  TRY(pmoe_layer_backward(layer, stash, 1, &mdy, &mdx, PMOE_BWD_ALL, NULL)); /* adds to grad, writes dx */
  printf("%d parameters, y[0] = %g, dx[0] = %g\n", (int)used, (double)y[0], (double)dx[0]);
  pmoe_stash_destroy(stash);
  pmoe_layer_destroy(layer);
  pmoe_ctx_destroy(ctx);
  return 0;
}
