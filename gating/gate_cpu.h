/* What the CPU back end's files share. A tile holds one block of tokens side by side, [E, PMOEI_GATE_BLOCK]: one lane
 * per token, so that softmax and top-k run over experts without any reduction across lanes. */
#ifndef PMOEI_GATE_CPU_H
#define PMOEI_GATE_CPU_H
#include "core/vmath.h"
#include "gating/gate_ops.h"

enum {
  LANES = PMOEI_GATE_BLOCK,
  LEVELS = 8,             /* choices that one pass of top-k finds */
  EXPERTS_PER_TASK = 128, /* where tasks run over experts */
  WEIGHT_GRAD_ROWS = 256, /* one product of the weight gradient: tokens, */
  WEIGHT_GRAD_COLS = 64,  /* columns of H, */
  WEIGHT_GRAD_EXPERTS = 512
};

/* One thread's working memory. */
typedef struct pmoei_gate_tile {
  float *logits;     /* [E,LANES]; after pmoei_gate_raise_logits: unnormalised scores */
  float *kept;       /* [E,LANES] the logits after that, where backward needs both */
  float *selection;  /* [E,LANES] what the choice compares, if not the logits */
  float *open;       /* [E,LANES] those not chosen yet, for K > LEVELS */
  float *input;      /* x in float32; see pmoei_gate_input */
  int32_t *expert;   /* [K,LANES] choices; -1: none */
  float *value;      /* [K,LANES] their logits, then scores */
  float *chosen;     /* [K,LANES] logits of the choices */
  float *ratio;      /* [K] */
  int32_t *plain;    /* [K,LANES] choices that the losses count, if not the choices */
  float *group;      /* [num_groups,LANES] group scores */
  float *best;       /* [max(K, num_groups),LANES] */
  int32_t *which;    /* the same */
  uint8_t *in_group; /* [num_groups,LANES] kept */
  float *slope;      /* [E,LANES] for the sequence loss */
  uint32_t *key;     /* [E] */
  uint64_t *order;   /* [2 max(K, groups kept)] */
  float max[LANES], sum[LANES];
  float lse[LANES];      /* log(sum exp logits), with a z-loss */
  uint8_t finite[LANES]; /* all logits are */
  uint8_t masked[LANES]; /* also lanes past the last token */
} pmoei_gate_tile;

typedef struct pmoei_gate_span {
  int64_t first, rows; /* tokens of a block */
} pmoei_gate_span;

static inline pmoei_gate_span pmoei_gate_block(const pmoei_gate_call *call, int64_t block) {
  int64_t first = block * PMOEI_GATE_BLOCK, rest = call->tokens - first;
  return (pmoei_gate_span){first, rest < PMOEI_GATE_BLOCK ? rest : PMOEI_GATE_BLOCK};
}

/* scores_cpu.c */

/* Columns [col, col + cols) of `rows` tokens from `first` on as the router sees them, in float32: in place where
 * possible, else in `buffer`. Tokens for which masked[row] is set become zeros (NULL: none). *ld is the distance of
 * rows. */
const float *pmoei_gate_input(const pmoei_gate_call *call, float *buffer, int64_t first, int64_t rows, int64_t col,
                              int64_t cols, const uint8_t *masked, int64_t *ld);
/* Fills tile->logits; lanes past the last token are zero. */
void pmoei_gate_logits(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block, int32_t thread);
/* tile->max and finite, from the logits. */
void pmoei_gate_extremes(const pmoei_gate_call *call, pmoei_gate_tile *tile);
/* Turns [E,LANES] logits into scores but for a division by their sum, which is left in tile->sum: exp(logit - max) for
 * a softmax, else the scores themselves. */
void pmoei_gate_raise(const pmoei_gate_call *call, pmoei_gate_tile *tile, float *logits);
/* The same for tile->logits; with a z-loss fills tile->lse. */
void pmoei_gate_raise_logits(const pmoei_gate_call *call, pmoei_gate_tile *tile);
/* Turns tile->value from logits into scores. */
void pmoei_gate_scores(const pmoei_gate_call *call, pmoei_gate_tile *tile);
/* Whether those scores, or a loss, need pmoei_gate_raise_logits. */
bool pmoei_gate_needs_raise(const pmoe_gate *gate);

/* topk_cpu.c */

/* The k best of n rows of keys [n,LANES] in every lane, best first, ties: lower index; NaN below all. Writes indices
 * and keys [k,LANES]. `open` [n,LANES] is needed for k > LEVELS, and may not be `keys`. */
void pmoei_gate_best(const float *keys, int64_t n, int64_t k, int32_t *index, float *value, float *open,
                     pmoei_gate_tile *tile);
/* With Gumbel noise in tile->selection: K = 1 is sampled, and of K = 2 the second. Fills tile->expert and value. */
void pmoei_gate_sample(const pmoei_gate_call *call, pmoei_gate_tile *tile);
/* The threshold for keeping the k largest of n keys (1 <= k <= n): every key above it, and the first *ties that equal
 * it. */
uint32_t pmoei_gate_threshold(const uint32_t *key, int64_t n, int64_t k, int64_t *ties);

/* choose_cpu.c */

/* Fills tile->expert and tile->value (logits) by the configured choice. */
void pmoei_gate_choose(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block);
/* tile->value = the logits of tile->expert; -inf where there is none. */
void pmoei_gate_gather(const pmoei_gate_call *call, pmoei_gate_tile *tile);

/* selection_cpu.c: selection bias and groups. Leaves what is compared in tile->selection. */
void pmoei_gate_limit(const pmoei_gate_call *call, pmoei_gate_tile *tile);

/* Choices that look at all tokens, from call->all_logits: before pmoei_gate_choose runs over blocks. */
void pmoei_gate_sinkhorn(pmoei_gate_call *call);
void pmoei_gate_sinkhorn_select(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block);
void pmoei_gate_expert_choice(pmoei_gate_call *call);
void pmoei_gate_expert_choice_select(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block);

static inline float *pmoei_gate_all(const pmoei_gate_call *call, float *all, int64_t block) {
  return all + block * LANES * call->gate->cfg.num_experts;
}

/* noise_cpu.c */

/* row[i] *= the jitter of (token, col + i), for n columns; col is a multiple of 4. */
void pmoei_gate_jitter(const pmoei_gate_call *call, int64_t token, int64_t col, float *row, int64_t n);
/* tile->selection = logits + Gumbel noise. */
void pmoei_gate_gumbel(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block);
bool pmoei_gate_has_jitter(const pmoei_gate_call *call);
bool pmoei_gate_has_gumbel(const pmoei_gate_call *call);
/* priority[i] of the choices contender[i] for the random drop. */
void pmoei_gate_random_priority(const pmoei_gate_call *call, int64_t begin, int64_t end);

/* losses_cpu.c */

/* A block's share of live tokens and counts for the losses, from tile->expert, finite and masked. */
void pmoei_gate_count_live(const pmoei_gate_call *call, pmoei_gate_tile *tile, int64_t block);
/* Its share of the losses' values, after pmoei_gate_raise_logits. */
void pmoei_gate_sum_losses(const pmoei_gate_call *call, const pmoei_gate_tile *tile, int64_t block);
/* call->slope and seq_slope from routing.loss_sums; returns the z-loss's factor of logsumexp. */
float pmoei_gate_slopes(pmoei_gate_call *call);

/* The table's entries, one file each. */
pmoe_status pmoei_gate_route(pmoei_gate_call *call);
pmoe_status pmoei_gate_total(pmoei_gate_call *call);
pmoe_status pmoei_gate_add_to_step(pmoei_gate_call *call, bool anew);
pmoe_status pmoei_gate_losses_value(pmoei_gate_call *call);
pmoe_status pmoei_gate_drop(pmoei_gate_call *call);
pmoe_status pmoei_gate_place(pmoei_gate_call *call);
pmoe_status pmoei_gate_input_grad(pmoei_gate_call *call);
pmoe_status pmoei_gate_weight_grad(pmoei_gate_call *call);

#endif
