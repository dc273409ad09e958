/* The router: which K experts each token goes to, with what weight and in which slot.
 *
 * logits = x Wgᵀ (+ bias), accumulated in float32 whatever x's dtype. docs/numerics.md gives each formula and its
 * source. */
#ifndef PMOE_GATE_H
#define PMOE_GATE_H
#include <pmoe/types.h>

/* Where logits and weights come from. LINEAR: the learned router. HOST_LOGITS: pmoe_step.logits, for a router that the
 * host owns; backward gives their gradient. HOST_ROUTING: pmoe_step.expert and weight, finished; backward gives the
 * weights' gradient. The last two have no parameters. */
typedef enum pmoe_router { PMOE_ROUTER_LINEAR, PMOE_ROUTER_HOST_LOGITS, PMOE_ROUTER_HOST_ROUTING } pmoe_router;
/* What a logit becomes. SOFTMAX over the experts; SIGMOID 1 / (1 + exp(-x)); SQRT_SOFTPLUS sqrt(log(1 + exp(x))). */
typedef enum pmoe_score { PMOE_SCORE_SOFTMAX, PMOE_SCORE_SIGMOID, PMOE_SCORE_SQRT_SOFTPLUS } pmoe_score;
/* Who chooses whom; weights always come from the scores of the chosen.
 * TOPK           a token takes its K best experts
 * SINKHORN       in training, its K best after the logits of all tokens of this call were balanced (Sinkhorn's
 *                iteration, docs/router.md); TOPK otherwise. The choice has no gradient
 * ROUND_ROBIN    global token t takes experts (t K + k) mod E: exactly even, for benchmarks
 * HASH           K distinct experts drawn by token id (pmoe_step.token_id), seed and layer: fixed for ever
 * GIVEN          pmoe_step.expert: a recorded routing, or a table of the host's
 * EXPERT_CHOICE  an expert takes its C best tokens, C = max(min_capacity, ceil(T cf / E)), so cf is the mean number of
 *                experts per token. K is the room per token: with K < E a token taken by more keeps its K best, and the
 *                others count as dropped. Not causal: a token's experts depend on later tokens */
typedef enum pmoe_choice {
  PMOE_CHOICE_TOPK,
  PMOE_CHOICE_SINKHORN,
  PMOE_CHOICE_ROUND_ROBIN,
  PMOE_CHOICE_HASH,
  PMOE_CHOICE_GIVEN,
  PMOE_CHOICE_EXPERT_CHOICE
} pmoe_choice;
/* Who loses when an expert has more choices than slots. POSITION keeps all first choices in token order, then all
 * second choices, and so on. PROBS keeps the largest scores (before normalisation). RANDOM keeps a seeded random subset
 * when training, and is POSITION otherwise. TOKEN_ORDER keeps the earliest tokens, first choice or not. Ties: the
 * earlier token stays. */
typedef enum pmoe_drop { PMOE_DROP_POSITION, PMOE_DROP_PROBS, PMOE_DROP_RANDOM, PMOE_DROP_TOKEN_ORDER } pmoe_drop;
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
  float aux_coef;                /* load-balancing loss of a micro-batch: coef E sum_e f_e P_e */
  float z_coef;                  /* z-loss: coef mean_t logsumexp(logits_t)^2 */
  int32_t aux_first_choice_only; /* f counts first choices instead of all K */
  float jitter;   /* training only: the router sees x times uniform(1 - jitter, 1 + jitter), element-wise */
  int32_t gumbel; /* training only, K <= 2: Gumbel noise on the last choice's selection (the first for K = 1) */
  int32_t bias;   /* 1: logits have a learned bias [E] */
  pmoe_router router;
  pmoe_choice choice;
  /* 1: pmoe_gate_params.selection_bias [E] is added to the scores (with softmax_after_topk: to the logits) for the
   * choice only; weights and losses never see it. See pmoe_selection_bias_update. */
  int32_t selection_bias;
  /* Group-limited choice: experts form num_groups equal groups of neighbours, of which a token may use the groups_kept
   * best. A group's score is the sum of its K / groups_kept best scores (selection bias included), or of its 2 best
   * with group_score_top2. 0: no groups. */
  int32_t num_groups, groups_kept, group_score_top2;
  float seq_aux_coef;     /* the same loss within each sequence (pmoe_step.sequence), mean over sequences */
  float global_aux_coef;  /* the same with f over all ranks of the global group and all micro-batches of a step */
  int32_t aux_plain_topk; /* 1: f counts the K best scores without selection bias and groups, instead of the choices */
} pmoe_gate_config;

/* Sums n numbers over the ranks that share a loss, in place. Called by pmoe_gate_forward once per call, on every rank,
 * whatever the data. Returns PMOE_OK or what pmoe_gate_forward shall return. A layer brings its own. */
typedef struct pmoe_loss_sum {
  void *user;
  pmoe_status (*sum)(void *user, int64_t *inout, int64_t n, pmoe_stream stream);
} pmoe_loss_sum;

/* One step's facts. token_mask, when not NULL, has token_mask_len == T bytes; a zero byte takes that token out of
 * routing, slots, losses and statistics. `step` and `first_token` (the global index of this rank's token 0) key the
 * random numbers, so that they do not depend on the parallel layout. Arrays are borrowed until the backward is done.
 * In a layer whose TP group shares its tokens (no sequence parallelism) arrays are of all of them, each rank uses its
 * slice, and dweight and dlogits are zero elsewhere: sum them over TP. */
typedef struct pmoe_step {
  size_t size;
  int32_t training;
  uint64_t step;
  int64_t first_token;
  const uint8_t *token_mask;
  int64_t token_mask_len;
  /* 1: this forward repeats an earlier one (activation recomputation): it counts neither for the selection bias, nor
   * for the global loss, nor for moving averages. */
  int32_t recompute;
  /* seq_aux_coef: [T] each token's sequence, 0 to num_sequences - 1, in any order; NULL: equal runs of
   * T / num_sequences tokens. Ranks that share a micro-batch (context parallel) give the same num_sequences. */
  int32_t num_sequences;
  const int32_t *sequence;
  /* Denominators of the losses' means; 0: the live tokens, and the sequences with any, of this micro-batch (of all
   * ranks that share it). Give a whole step's totals to make values and gradients the same however it is cut into ranks
   * and micro-batches. */
  int64_t loss_tokens, loss_sequences;
  const int32_t *token_id; /* [T] HASH */
  const int32_t *expert;   /* [T,K] GIVEN, HOST_ROUTING: distinct per token; -1: no choice */
  const float *weight;     /* [T,K] HOST_ROUTING */
  float *dweight;          /* [T,K] HOST_ROUTING: written by backward (INPUT or ALL) */
  const pmoe_mat *logits;  /* [T,E] float32 HOST_LOGITS */
  const pmoe_mat *dlogits; /* [T,E] float32 HOST_LOGITS: written by backward (INPUT or ALL) */
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
  /* [pmoe_gate_loss_rows, E + 1] what the losses divide: per scope the counted choices of each expert, then live
   * tokens, summed over the ranks that share the loss. Kept for backward; may be NULL if there are no losses. */
  int64_t *loss_sums;
} pmoe_routing;

typedef struct pmoe_gate_stats {
  size_t size;
  int64_t tokens, masked;   /* T, and how many of them are masked */
  int64_t routed, dropped;  /* choices with a slot, and without */
  int64_t nonfinite;        /* tokens with a NaN or infinite logit; they count in no loss */
  float aux_loss, z_loss;   /* with their coefficients; this rank's share where ranks share a loss: shares add up */
  float load_max_over_mean; /* of expert_count; 0 if there are no choices */
  float entropy;            /* of expert_count as a distribution, in nats */
  float seq_aux_loss;       /* like aux_loss */
  float global_aux_loss;    /* the same of all micro-batches of this step so far */
  float load_cv;            /* coefficient of variation of expert_count (standard deviation / mean) */
  float dropped_share;      /* dropped / choices */
} pmoe_gate_stats;

/* Parameters and gradients, float32; gradients are added to. weight [E,H], bias [E] (NULL unless cfg.bias),
 * selection_bias [E] (NULL unless cfg.selection_bias; no gradient). All NULL without a router of pmoe's own. Gradient
 * pointers may be NULL in forward. */
typedef struct pmoe_gate_params {
  size_t size;
  const float *weight, *bias;
  float *weight_grad, *bias_grad;
  const float *selection_bias;
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

/* The ranks that share a loss: `micro_batch` for aux, sequence and z-loss (ranks that split the tokens of one
 * micro-batch: context parallel, sequence parallel), `global` for global_aux_coef. A NULL function: this rank alone. */
PMOE_API pmoe_status pmoe_gate_set_loss_sums(pmoe_gate *gate, pmoe_loss_sum micro_batch, pmoe_loss_sum global);
/* Rows of pmoe_routing.loss_sums for a step with that many sequences; 0 without losses. */
PMOE_API pmoe_status pmoe_gate_loss_rows(const pmoe_gate *gate, int32_t num_sequences, int64_t *rows);

/* Loss-free load balancing (Wang et al. 2024, arXiv:2408.15664): bias_e += rate sign(mean - count_e), sign(0) = 0; with
 * `centred` the mean of the changes is subtracted from each. count [E]: choices of one whole step over all ranks.
 * Local, on the host's arrays. */
PMOE_API pmoe_status pmoe_selection_bias_update(int32_t num_experts, const int64_t *count, float rate, int32_t centred,
                                                float *bias);
/* Choices per expert [E] of this rank's training forwards (recomputed ones left out) since the last take, which sets
 * them to zero. */
PMOE_API pmoe_status pmoe_gate_take_counts(pmoe_gate *gate, int64_t *count);

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
