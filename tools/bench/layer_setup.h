/* A layer with its parameters and one micro-batch, and the check of what it computes. */
#ifndef BENCH_LAYER_SETUP_H
#define BENCH_LAYER_SETUP_H
#include "expert_params.h"

typedef struct bench_layer_setup {
  const bench_options *options;
  pmoe_topology *topology;
  pmoe_layer *layer;
  pmoe_stash *stash;
  bench_device *device;               /* NULL on the CPU */
  bench_expert_params params, branch; /* branch: the dense one's, which is expert E; num 0 without */
  bench_block router, mix;            /* weights, then gradients; mix: [2,H] and [2] */
  int32_t first_expert, num_experts;
  int64_t first_token, tokens;
  pmoe_mat x, y, dy, dx; /* the host's */
  bench_block batch;     /* which these four lie in */
  void *graph[2];        /* of forward and of backward; NULL: they are called */
} bench_layer_setup;

/* comm NULL: one rank alone. device NULL: on the CPU. Collective over comm. */
pmoe_status bench_layer_create(const bench_options *o, pmoe_ctx *ctx, pmoe_comm *comm, bench_device *device,
                               int64_t first_token, int64_t tokens, bench_layer_setup *out);
void bench_layer_destroy(bench_layer_setup *setup);
/* arg is a bench_layer_setup. Collective. */
pmoe_status bench_layer_forward(void *arg);
pmoe_status bench_layer_backward(void *arg);
/* From now on both replay graphs of themselves. */
pmoe_status bench_layer_capture(bench_layer_setup *setup);

/* Runs both once more on zeroed gradients and compares the routing, sampled rows of y and dx, and sampled expert
 * gradients with the reference. A wrong routing gives NaN. Collective. */
pmoe_status bench_layer_check(bench_layer_setup *setup, double *forward_error, double *backward_error);

#endif
