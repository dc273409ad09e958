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
  float *logits;    /* [E,LANES]; after pmoei_gate_softmax: exp(logit - max) */
  float *selection; /* [E,LANES] logits with Gumbel noise, or those not chosen yet */
  float *input;     /* x in float32; see pmoei_gate_input */
  int32_t *expert;  /* [K,LANES] choices */
  float *value;     /* [K,LANES] their logits, then scores */
  uint32_t *key;    /* [E] */
  uint64_t *order;  /* [2 K] */
  float max[LANES], sum[LANES];
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
/* tile->logits = exp(logit - max), tile->sum their sum. */
void pmoei_gate_softmax(const pmoei_gate_call *call, pmoei_gate_tile *tile);
/* Turns tile->value from logits into scores. */
void pmoei_gate_scores(const pmoei_gate_call *call, pmoei_gate_tile *tile);
/* Whether those scores, or a loss, need the softmax over all experts. */
bool pmoei_gate_needs_softmax(const pmoe_gate *gate);

/* topk_cpu.c */

/* Fills tile->expert and tile->value from the logits and, with Gumbel noise, tile->selection. */
void pmoei_gate_select(const pmoei_gate_call *call, pmoei_gate_tile *tile);
/* The threshold for keeping the k largest of n keys (1 <= k <= n): every key above it, and the first *ties that equal
 * it. */
uint32_t pmoei_gate_threshold(const uint32_t *key, int64_t n, int64_t k, int64_t *ties);
/* Unsigned integers in the order of floats; NaN, whatever its sign, below everything. Both zeros are equal. */
static inline uint32_t pmoei_gate_order_key(float value) {
  uint32_t bits = pmoei_bits_of(value + 0.0f);
  uint32_t key = bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
  return value == value ? key : 0;
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
void pmoei_gate_count_live(const pmoei_gate_call *call, const pmoei_gate_tile *tile, int64_t block);
/* Its share of the losses' values, after pmoei_gate_softmax and pmoei_gate_count_live. */
void pmoei_gate_sum_losses(const pmoei_gate_call *call, const pmoei_gate_tile *tile, int64_t block);
/* log(sum exp) of each lane, after pmoei_gate_softmax. */
void pmoei_gate_logsumexp(const pmoei_gate_tile *tile, float *out);

/* The table's entries, one file each. */
pmoe_status pmoei_gate_route(pmoei_gate_call *call);
pmoe_status pmoei_gate_total(pmoei_gate_call *call);
pmoe_status pmoei_gate_drop(pmoei_gate_call *call);
pmoe_status pmoei_gate_place(pmoei_gate_call *call);
pmoe_status pmoei_gate_input_grad(pmoei_gate_call *call);
pmoe_status pmoei_gate_weight_grad(pmoei_gate_call *call);

#endif
