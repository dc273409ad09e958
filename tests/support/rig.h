/* A layer and the reference with the same parameters, on one rank or on one of many, and steps that run and compare
 * both. */
#ifndef TEST_RIG_H
#define TEST_RIG_H
#include <pmoe/pmoe.h>

#include "oracle/oracle.h"
#include "support/compare.h"

enum { RIG_MAX_RANKS = 8, RIG_MAX_PARAMS = 16 };

typedef struct rig_spec {
  int32_t hidden, ep, layer_id;
  int32_t max_sequences;
  double slack; /* widens the tolerances of outputs and gradients, for tests that draw their cases; 0: 1 */
  pmoe_gate_config gate;
  pmoe_a2a_config a2a;
  pmoe_experts_config experts;
  pmoe_residual_config residual; /* mix NONE: the layer is given none */
} rig_spec;
/* H=12, F=10, E=4, K=2, GELU, float32, dropless, eager. */
rig_spec rig_spec_default(void);

typedef struct rig {
  rig_spec spec;
  pmoe_ctx *ctx; /* borrowed */
  pmoe_layer *layer;
  oracle_model *model;
  int32_t num_params;
  pmoe_param param[RIG_MAX_PARAMS];
  oracle_tensor *tensor[RIG_MAX_PARAMS];
} rig;

/* Creates and binds; the library's status. Collective as pmoe_layer_create is. */
pmoe_status rig_create(rig *r, pmoe_ctx *ctx, pmoe_topology *topology, const rig_spec *spec);
void rig_destroy(rig *r);
/* Copies the reference's parameters, rounded to each parameter's dtype on both sides, into the library's. */
void rig_load(rig *r);
/* Both sides' gradients. */
void rig_zero_grads(rig *r);
/* Index of a parameter by name, or -1. */
int32_t rig_param(const rig *r, const char *name);
/* Which element of the reference's tensor is element i of this rank's part of a parameter. */
int64_t rig_element(const rig *r, int32_t param, int64_t i);
/* Every gradient of the library against scale times the reference's. Number of failures. */
int rig_check_grads(const rig *r, double scale, const char *label);
/* pmoe_layer_grad_sumsq, which is collective, against scale^2 times the reference's. */
int rig_check_sumsq(const rig *r, double scale);
/* One step of plain gradient descent on both sides, from the reference's and the library's own gradients. */
void rig_descend(rig *r, double rate, double grad_scale);

/* What a step is to be; zero means: one rank, evaluation, no mask, dense rows. */
typedef struct rig_plan {
  const char *label;
  int32_t num_ranks, rank;
  int64_t rank_tokens[RIG_MAX_RANKS]; /* which each rank routes */
  int32_t loss_group[RIG_MAX_RANKS];  /* ranks that share their losses have one number; set with share_losses */
  int32_t share_losses;
  int32_t replicas; /* that many neighbouring ranks are handed the tokens of them all; 0: 1 */
  int32_t training, masked;
  int32_t replay; /* the reference takes the library's choices (random features); one rank only */
  int32_t pad;    /* elements between rows */
  double loss_scale;
  double x_scale; /* 0: 1 */
  uint64_t seed;
  uint64_t step;
  const double *x, *dy; /* [all tokens,H] to take instead of random ones */
} rig_plan;

/* One micro-batch: every rank's data, this rank's part of it in the library's terms, and outputs that start poisoned.
 */
typedef struct rig_step {
  rig_plan plan;
  int64_t total, first, tokens;  /* of all ranks; those handed to the library */
  int64_t own_first, own_tokens; /* those this rank routes */
  double *x_all, *dy_all;
  uint8_t *mask_all;
  pmoe_mat x, dy, y, dx;
  pmoe_step step;
  int32_t *given_expert; /* of this rank, when replaying */
  int64_t *given_slot;
} rig_step;

void rig_step_begin(const rig *r, rig_step *s, const rig_plan *plan);
void rig_step_end(rig_step *s);
pmoe_status rig_forward(rig *r, pmoe_stash *stash, rig_step *s);
pmoe_status rig_backward(rig *r, pmoe_stash *stash, rig_step *s, pmoe_bwd which);
/* Takes the library's choices for the reference's. */
void rig_replay(const rig *r, const pmoe_stash *stash, rig_step *s);
/* Runs the reference, which adds to its gradients, and compares outputs, routing and metrics. dx only after a backward.
 */
int rig_check(rig *r, const pmoe_stash *stash, const rig_step *s, int backward);

/* y, dx and every gradient of the library, byte for byte, back to back; malloc'ed. */
void *rig_snapshot(const rig *r, const rig_step *s, size_t *bytes);

/* A rig with one stash and one micro-batch. Asserts (main thread). */
typedef struct rig_bench {
  rig r;
  rig_step s;
  pmoe_stash *stash;
  pmoe_routing routing; /* of the latest forward, with its metrics */
  pmoe_metrics metrics;
} rig_bench;
void rig_bench_create(rig_bench *b, pmoe_ctx *ctx, const rig_spec *spec, const rig_plan *plan);
/* H = E and the router's weight is the identity: the rows of x are the logits. */
void rig_bench_create_logits(rig_bench *b, pmoe_ctx *ctx, rig_spec spec, const double *logits, int64_t tokens);
void rig_bench_destroy(rig_bench *b);
void rig_bench_forward(rig_bench *b);
void rig_bench_step(rig_bench *b); /* forward and backward */
/* Outputs and every gradient against the reference. */
void rig_bench_check(rig_bench *b);
/* One training micro-batch on one rank. */
rig_plan rig_plan_of(const char *label, int64_t tokens, uint64_t seed);

/* Everything above in one: create a stash, forward, backward (in two parts if split), check the lot. Gradients are
 * zeroed before and compared after, unless `accumulate`. */
int rig_run(rig *r, const rig_plan *plan, int split, int accumulate);

#endif
