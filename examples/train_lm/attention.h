/* Causal self-attention of sequences side by side. The probabilities are never kept: backward makes them again from the
 * log-sums. */
#ifndef LM_ATTENTION_H
#define LM_ATTENTION_H
#include <stddef.h>
#include <stdint.h>

/* Queries are the positions [first, first + length) of each sequence, keys those before and their own. heads divides
 * width. */
struct lm_attention {
  int64_t sequences, length, first, heads, width;
};

/* q [sequences * length rows], kv [sequences * (first + length) rows]: k, then v, `width` numbers each. Rows are as far
 * apart as the strides say. */
struct lm_qkv {
  const float *q, *kv;
  int64_t q_stride, kv_stride;
};

/* Floats of scratch for `threads` threads. */
size_t attention_scratch(struct lm_attention size, int threads);

/* out [sequences, length, width] and logsum [sequences, heads, length] are written. */
void attention_forward(struct lm_attention size, float *out, float *logsum, struct lm_qkv in, float *scratch);
/* dq and dkv are written, with the strides of q and kv. */
void attention_backward(struct lm_attention size, float *dq, float *dkv, const float *dout, struct lm_qkv in,
                        const float *out, const float *logsum, float *scratch);

#endif
