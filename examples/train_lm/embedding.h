/* Token and position embedding: x[t] = tokens[token_t] + positions[t mod length]. */
#ifndef LM_EMBEDDING_H
#define LM_EMBEDDING_H
#include <stdint.h>

struct lm_embedding {
  int64_t sequences, length, hidden;
  const int32_t *tokens; /* [sequences, length] */
};

/* Writes x [sequences, length, hidden]. */
void embedding_forward(struct lm_embedding size, float *x, const float *token_table, const float *position_table);
/* The tables' gradients are added to. */
void embedding_backward(struct lm_embedding size, float *dtoken_table, float *dposition_table, const float *dx);

#endif
