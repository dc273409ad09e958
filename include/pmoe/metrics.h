/* What the latest forward and backward of a stash did. Reading never communicates and never waits. */
#ifndef PMOE_METRICS_H
#define PMOE_METRICS_H
#include <pmoe/types.h>

typedef struct pmoe_metrics {
  size_t size;
  int64_t tokens, masked;   /* that this rank routes, and how many of them are masked */
  int64_t routed, dropped;  /* choices with and without a slot */
  int64_t nonfinite;        /* tokens with a NaN or infinite logit */
  int64_t recv_rows;        /* R */
  int64_t bytes_sent;       /* to other ranks, in all movements since forward began */
  int64_t saved_bytes;      /* what the stash keeps for backward at this T and R */
  float aux_loss, z_loss;   /* of this rank's micro-batch, with their coefficients */
  float load_max_over_mean; /* of this rank's choices per expert */
  float entropy;            /* of the same, in nats; ln E is balanced */
  float ms_gate, ms_plan, ms_dispatch, ms_experts, ms_residual, ms_combine; /* forward, host clock */
  float ms_backward;                                                        /* all parts that have run */
} pmoe_metrics;

#ifdef __cplusplus
extern "C" {
#endif

/* PMOE_PENDING while the step is not finished; PMOE_ERR_STATE before the first forward. */
PMOE_API pmoe_status pmoe_stash_metrics(const pmoe_stash *stash, pmoe_metrics *out);

#ifdef __cplusplus
}
#endif
#endif
