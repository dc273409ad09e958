/* A layer with its parameters and one micro-batch, and the check of what it computes. */
#ifndef BENCH_LAYER_SETUP_H
#define BENCH_LAYER_SETUP_H
#include "expert_params.h"

typedef struct bench_layer_setup {
  const bench_options *options;
  pmoe_topology *topology;
  pmoe_layer *layer;
  pmoe_stash *stash;
  bench_expert_params params;
  float *router, *router_grad;
  int32_t first_expert, num_experts;
  int64_t first_token, tokens;
  pmoe_mat x, y, dy, dx;
  void *memory;
} bench_layer_setup;

/* comm NULL: one rank alone. Collective over comm. */
pmoe_status bench_layer_create(const bench_options *o, pmoe_ctx *ctx, pmoe_comm *comm, int64_t first_token,
                               int64_t tokens, bench_layer_setup *out);
void bench_layer_destroy(bench_layer_setup *setup);
/* arg is a bench_layer_setup. Collective. */
pmoe_status bench_layer_forward(void *arg);
pmoe_status bench_layer_backward(void *arg);

/* Runs both once more on zeroed gradients and compares the routing, sampled rows of y and dx, and sampled expert
 * gradients with the reference. A wrong routing gives NaN. Collective. */
pmoe_status bench_layer_check(bench_layer_setup *setup, double *forward_error, double *backward_error);

#endif
