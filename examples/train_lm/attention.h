/* Causal self-attention of sequences side by side. A row of qkv [sequences, length, 3 hidden] holds q, k and v of all
 * heads; the probabilities are never kept: backward makes them again from the log-sums. */
#ifndef LM_ATTENTION_H
#define LM_ATTENTION_H
#include <stddef.h>
#include <stdint.h>

struct lm_attention {
  int64_t sequences, length, heads, hidden; /* heads divides hidden */
};

/* Floats of scratch for `threads` threads. */
size_t attention_scratch(struct lm_attention size, int threads);

/* out [sequences, length, hidden] and logsum [sequences, heads, length] are written. */
void attention_forward(struct lm_attention size, float *out, float *logsum, const float *qkv, float *scratch);
/* dqkv is written. */
void attention_backward(struct lm_attention size, float *dqkv, const float *dout, const float *qkv, const float *out,
                        const float *logsum, float *scratch);

#endif
