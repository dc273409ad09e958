/* The router: which K experts each token goes to, with what weight and in which slot.
 *
 * logits = x Wgᵀ (+ bias), accumulated in float32 whatever x's dtype. docs/numerics.md gives each formula and its
 * source. */
#ifndef PMOE_GATE_H
#define PMOE_GATE_H
#include <pmoe/types.h>

typedef enum pmoe_score { PMOE_SCORE_SOFTMAX } pmoe_score;
/* Who loses when an expert has more choices than slots. POSITION keeps all first choices in token order, then all
 * second choices, and so on. PROBS keeps the largest scores (before normalisation). RANDOM keeps a seeded random subset
 * when training, and is POSITION otherwise. Ties: the earlier token stays. */
typedef enum pmoe_drop { PMOE_DROP_POSITION, PMOE_DROP_PROBS, PMOE_DROP_RANDOM } pmoe_drop;
/* Whether the K weights of a token are divided by their sum: not at all, over all K choices, or over those that kept a
 * slot. A sum below the smallest normal float32 makes the weights 0. */
typedef enum pmoe_norm { PMOE_NORM_NONE, PMOE_NORM_BEFORE_DROP, PMOE_NORM_AFTER_DROP } pmoe_norm;

typedef struct pmoe_gate_config {
  size_t size;
  int32_t num_experts; /* E, over all ranks */
  int32_t top_k;       /* K, 1 <= K <= E */
  pmoe_score score;
  int32_t softmax_after_topk; /* 0: softmax over all E, then choose; 1: choose, then softmax over the K chosen */
  pmoe_norm norm;             /* refused for K = 1, where it (like softmax_after_topk) would make every weight 1 */
  float weight_scale;         /* multiplies the finished weights; 0: 1 */
  float capacity_factor;      /* C = max(min_capacity, ceil(T K cf / E)) slots per expert and rank, cf read to 1e-6; 0:
                                 dropless */
  float eval_capacity_factor; /* the same when not training; 0: dropless */
  int32_t min_capacity;       /* 0: 1 */
  pmoe_drop drop;
  float aux_coef;                /* load-balancing loss: coef E sum_e f_e P_e over this rank's unmasked tokens */
  float z_coef;                  /* z-loss: coef mean_t logsumexp(logits_t)^2 */
  int32_t aux_first_choice_only; /* f counts first choices instead of all K */
  float jitter;   /* training only: the router sees x times uniform(1 - jitter, 1 + jitter), element-wise */
  int32_t gumbel; /* training only, K <= 2: Gumbel noise on the last choice's selection (the first for K = 1) */
  int32_t bias;   /* 1: logits have a learned bias [E] */
} pmoe_gate_config;

/* One step's facts. token_mask, when not NULL, has token_mask_len == T bytes; a zero byte takes that token out of
 * routing, slots, losses and statistics. `step` and `first_token` (the global index of this rank's token 0) key the
 * random numbers, so that they do not depend on the parallel layout. */
typedef struct pmoe_step {
  size_t size;
  int32_t training;
  uint64_t step;
  int64_t first_token;
  const uint8_t *token_mask;
  int64_t token_mask_len;
} pmoe_step;

/* Where every choice goes. The arrays are the caller's, for at least `tokens` tokens; pmoe_gate_forward fills them and
 * sets the numbers. Slots number an expert's surviving choices in token order. A masked token has expert -1, slot -1,
 * weight 0; a dropped choice keeps its expert and has slot -1, weight 0. */
typedef struct pmoe_routing {
  size_t size;
  int64_t tokens;        /* T */
  int32_t num_experts;   /* E */
  int32_t top_k;         /* K */
  int64_t capacity;      /* C of this call; 0: dropless */
  int32_t *expert;       /* [T,K] best first; ties: lower index */
  int64_t *slot;         /* [T,K] 0 <= slot < expert_rows[expert], or -1 */
  float *weight;         /* [T,K] */
  int64_t *expert_count; /* [E] choices before dropping */
  int64_t *expert_rows;  /* [E] choices that have a slot */
} pmoe_routing;

typedef struct pmoe_gate_stats {
  size_t size;
  int64_t tokens, masked;   /* T, and how many of them are masked */
  int64_t routed, dropped;  /* choices with a slot, and without */
  int64_t nonfinite;        /* tokens with a NaN or infinite logit; they count in no loss */
  float aux_loss, z_loss;   /* with their coefficients */
  float load_max_over_mean; /* of expert_count; 0 if there are no choices */
  float entropy;            /* of expert_count as a distribution, in nats */
} pmoe_gate_stats;

/* Parameters and gradients, float32; gradients are added to. weight [E,H], bias [E] (NULL unless cfg.bias). Gradient
 * pointers may be NULL in forward. */
typedef struct pmoe_gate_params {
  size_t size;
  const float *weight, *bias;
  float *weight_grad, *bias_grad;
} pmoe_gate_params;

#ifdef __cplusplus
extern "C" {
#endif

/* C for T tokens (masked ones included) by the rule of pmoe_gate_config, in integers; 0 for cf = 0 (dropless). */
PMOE_API pmoe_status pmoe_gate_capacity(int64_t tokens, int32_t num_experts, int32_t top_k, float capacity_factor,
                                        int32_t min_capacity, int64_t *capacity);

/* layer_id keys the random numbers. ERR_ARG for values out of range and for combinations that make no sense, with the
 * reason. */
PMOE_API pmoe_status pmoe_gate_create(pmoe_ctx *ctx, int32_t hidden, int32_t layer_id, const pmoe_gate_config *cfg,
                                      pmoe_gate **out);
PMOE_API void pmoe_gate_destroy(pmoe_gate *gate);

/* x [T,H] float32 or bfloat16. NaN logits rank below all others; -inf switches an expert off for a token. step NULL:
 * evaluation, no mask. Fills routing and, if not NULL, stats. Not collective. */
PMOE_API pmoe_status pmoe_gate_forward(pmoe_gate *gate, const pmoe_gate_params *params, const pmoe_step *step,
                                       const pmoe_mat *x, pmoe_routing *routing, pmoe_gate_stats *stats,
                                       pmoe_stream stream);

/* Same step, x, params and routing as forward (scores are computed again from x; the choices are not). dweight [T,K]:
 * gradient of the loss with respect to routing->weight. loss_scale multiplies the gradients of the aux and z losses. dx
 * [T,H], float32 or x's dtype: the router's part is *added*. dlogits [T,E] float32 is written by ALL and INPUT and read
 * by WEIGHT; NULL is allowed for ALL. dx is not touched by WEIGHT, the parameter gradients not by INPUT. Not
 * collective. */
PMOE_API pmoe_status pmoe_gate_backward(pmoe_gate *gate, const pmoe_gate_params *params, const pmoe_step *step,
                                        const pmoe_mat *x, const pmoe_routing *routing, const float *dweight,
                                        float loss_scale, float *dlogits, pmoe_mat *dx, pmoe_bwd which,
                                        pmoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
