#include <string.h>

#include "core/simd.h"
#include "gating/gate_cpu.h"

/* Sixteen tokens in one vector: compiled for wider or narrower registers, this is what keeps the best choices in them.
 */
enum { WIDTH = 16, MAX_INSERTED = 64 };
typedef float vector __attribute__((vector_size(WIDTH * 4)));
typedef int32_t ivector __attribute__((vector_size(WIDTH * 4)));

/* Insertion into a sorted list of `levels` per lane, best first; a later equal stays behind. Where fewer keys than
 * that exceed -inf, the rest of the list is expert -1. Writes `wanted` <= levels rows. `levels` is a constant at every
 * call, which unrolls the inner loop. */
static inline __attribute__((always_inline)) void insert_all(const float *restrict logits, int64_t num_experts,
                                                             const int levels, int64_t wanted, int32_t *restrict expert,
                                                             float *restrict value) {
  for (int first = 0; first < LANES; first += WIDTH) {
    vector best[LEVELS];
    ivector which[LEVELS];
    for (int k = 0; k < levels; k++) {
      best[k] = (vector){0} - INFINITY;
      which[k] = (ivector){0} - 1;
    }
    for (int64_t e = 0; e < num_experts; e++) {
      vector v;
      memcpy(&v, logits + e * LANES + first, sizeof v);
      ivector carried = (ivector)v, index = (ivector){0} + (int32_t)e; /* v, then what it pushed down */
      for (int k = 0; k < levels; k++) {
        ivector better = v > best[k], old = (ivector)best[k], old_index = which[k];
        best[k] = (vector)((better & carried) | (~better & old));
        carried = (better & old) | (~better & carried);
        which[k] = (better & index) | (~better & old_index);
        index = (better & old_index) | (~better & index);
      }
    }
    for (int64_t k = 0; k < wanted; k++) {
      memcpy(expert + k * LANES + first, &which[k], sizeof which[k]);
      memcpy(value + k * LANES + first, &best[k], sizeof best[k]);
    }
  }
}

PMOEI_VECTORISED static void insert(const float *restrict logits, int64_t num_experts, int64_t wanted,
                                    int32_t *restrict expert, float *restrict value) {
  if (wanted == 1) insert_all(logits, num_experts, 1, wanted, expert, value);
  else if (wanted == 2) insert_all(logits, num_experts, 2, wanted, expert, value);
  else if (wanted <= 4) insert_all(logits, num_experts, 4, wanted, expert, value);
  else insert_all(logits, num_experts, LEVELS, wanted, expert, value);
}

/* What comes after a choice: the logits below it, and its equals with a higher index; -inf for the rest. */
PMOEI_VECTORISED static void keep_open(float *restrict open, const float *restrict logits, int64_t num_experts,
                                       const int32_t *restrict expert, const float *restrict value) {
  for (int64_t e = 0; e < num_experts; e++) {
    for (int l = 0; l < LANES; l++) {
      float v = logits[e * LANES + l];
      bool after = (v < value[l]) | ((v == value[l]) & ((int32_t)e > expert[l]));
      open[e * LANES + l] = after ? v : -INFINITY;
    }
  }
}

/* Radix selection: fixes the threshold byte by byte from the top. */
uint32_t pmoei_gate_threshold(const uint32_t *key, int64_t n, int64_t k, int64_t *ties) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t histogram[256] = {0};
    for (int64_t i = 0; i < n; i++) histogram[(key[i] >> shift) & 255u] += (key[i] & mask) == prefix;
    int digit = 255;
    while (histogram[digit] < k) k -= histogram[digit--];
    prefix |= (uint32_t)digit << shift;
    mask |= 255u << shift;
  }
  *ties = k;
  return prefix;
}

static void sort_descending(uint64_t *restrict a, uint64_t *restrict other, int64_t n) {
  enum { RUN = 16 };
  for (int64_t begin = 0; begin < n; begin += RUN) {
    int64_t end = begin + RUN < n ? begin + RUN : n;
    for (int64_t i = begin + 1; i < end; i++) {
      uint64_t item = a[i];
      int64_t j = i;
      for (; j > begin && a[j - 1] < item; j--) a[j] = a[j - 1];
      a[j] = item;
    }
  }
  for (int64_t run = RUN; run < n; run *= 2) {
    for (int64_t begin = 0; begin < n; begin += 2 * run) {
      int64_t middle = begin + run < n ? begin + run : n, end = middle + run < n ? middle + run : n;
      int64_t i = begin, j = middle;
      for (int64_t at = begin; at < end; at++) other[at] = j == end || (i < middle && a[i] > a[j]) ? a[i++] : a[j++];
    }
    memcpy(a, other, (size_t)n * sizeof *a);
  }
}

/* Any k, and too few keys above -inf (the others are -inf or NaN): one lane. */
static void best_of_lane(const float *keys, int64_t n, int64_t k, int32_t *index, float *value, pmoei_gate_tile *tile,
                         int64_t lane) {
  int64_t ties, found = 0;
  for (int64_t e = 0; e < n; e++) tile->key[e] = pmoei_gate_order_key(keys[e * LANES + lane]);
  uint32_t threshold = pmoei_gate_threshold(tile->key, n, k, &ties);
  for (int64_t e = 0; found < k; e++) {
    bool tie = tile->key[e] == threshold && ties > 0;
    if (tile->key[e] <= threshold && !tie) continue;
    ties -= tie;
    tile->order[found++] =
        (uint64_t)tile->key[e] << 32 | (UINT32_MAX - (uint32_t)e); /* of equal keys the lower index is larger */
  }
  sort_descending(tile->order, tile->order + k, k);
  for (int64_t i = 0; i < k; i++) {
    uint32_t e = UINT32_MAX - (uint32_t)tile->order[i];
    index[i * LANES + lane] = (int32_t)e;
    value[i * LANES + lane] = keys[(int64_t)e * LANES + lane];
  }
}

void pmoei_gate_best(const float *keys, int64_t n, int64_t k, int32_t *index, float *value, float *open,
                     pmoei_gate_tile *tile) {
  bool inserted = k <= MAX_INSERTED;
  const float *left = keys;
  for (int64_t done = 0; done < k && inserted; done += LEVELS) {
    int32_t *to = index + done * LANES;
    float *to_value = value + done * LANES;
    if (done > 0) {
      keep_open(open, keys, n, to - LANES, to_value - LANES);
      left = open;
    }
    insert(left, n, k - done < LEVELS ? k - done : LEVELS, to, to_value);
  }
  const int32_t *last = index + (k - 1) * LANES;
  for (int64_t l = 0; l < LANES; l++)
    if (!inserted || last[l] < 0) best_of_lane(keys, n, k, index, value, tile, l);
}

/* The best of tile->selection but for the experts in `taken` (-1: none). */
PMOEI_VECTORISED static void best_but(const float *restrict selection, int64_t num_experts,
                                      const int32_t *restrict taken, int32_t *restrict expert) {
  uint32_t best[LANES];
  for (int l = 0; l < LANES; l++) {
    best[l] = 0;
    expert[l] = -1;
  }
  for (int64_t e = 0; e < num_experts; e++) {
    for (int l = 0; l < LANES; l++) {
      uint32_t key = pmoei_gate_order_key(selection[e * LANES + l]) + 1u; /* above "none yet" even for NaN */
      bool better = key > best[l] && taken[l] != (int32_t)e;
      best[l] = better ? key : best[l];
      expert[l] = better ? (int32_t)e : expert[l];
    }
  }
}

void pmoei_gate_sample(const pmoei_gate_call *call, pmoei_gate_tile *tile) {
  int64_t num_experts = call->gate->cfg.num_experts, last = (int64_t)(call->gate->cfg.top_k - 1) * LANES;
  int32_t taken[LANES], sampled[LANES];
  if (last > 0) {
    pmoei_gate_best(tile->logits, num_experts, 2, tile->expert, tile->value, tile->open, tile);
    memcpy(taken, tile->expert, sizeof taken);
  } else {
    memset(taken, 0xff, sizeof taken);
  }
  best_but(tile->selection, num_experts, taken, sampled);
  for (int64_t l = 0; l < LANES; l++) {
    tile->expert[last + l] = sampled[l];
    tile->value[last + l] = tile->logits[(int64_t)sampled[l] * LANES + l];
  }
}
