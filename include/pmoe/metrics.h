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
  float ms_gate, ms_plan, ms_dispatch, ms_experts, ms_residual,
      ms_combine;                      /* forward; the host's clock, or the device's (0 in a captured graph) */
  float ms_backward;                   /* all parts that have run */
  float seq_aux_loss, global_aux_loss; /* like aux_loss */
  float load_cv;                       /* coefficient of variation of this rank's choices per expert */
} pmoe_metrics;

/* A layer's load on this rank over its training forwards, recomputed ones left out: the latest, and moving averages
 * (new = decay old + (1 - decay) latest, started with the first; pmoe_layer_config.load_decay). The arrays are the
 * layer's and hold until its next forward. */
typedef struct pmoe_load {
  size_t size;
  int64_t forwards; /* that counted; 0: all else is 0 */
  int32_t num_experts;
  const int64_t *expert_count;                     /* [E] choices before dropping, of the latest */
  const float *expert_share;                       /* [E] moving average of each expert's share of the choices */
  float max_over_mean, cv, entropy, dropped_share; /* of the latest */
  float mean_max_over_mean, mean_cv, mean_entropy, mean_dropped_share; /* moving averages */
} pmoe_load;

#ifdef __cplusplus
extern "C" {
#endif

/* PMOE_PENDING while the device is not through with what this stash has enqueued; PMOE_ERR_STATE before the first
 * forward. */
PMOE_API pmoe_status pmoe_stash_metrics(const pmoe_stash *stash, pmoe_metrics *out);

/* Neither waits nor communicates. */
PMOE_API pmoe_status pmoe_layer_load(const pmoe_layer *layer, pmoe_load *out);

#ifdef __cplusplus
}
#endif
#endif
