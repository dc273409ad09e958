/* Token and position embedding: x[t] = tokens[token_t] + positions[position_t]. */
#ifndef LM_EMBEDDING_H
#define LM_EMBEDDING_H
#include <stdint.h>

/* Rows of sequences whose positions begin at first_position and that are `length` long each; row 0 is the first_row-th
 * of all of them. */
struct lm_embedding {
  int64_t rows, hidden, first_row, length, first_position;
  const int32_t *tokens; /* [rows] */
};

/* Writes x [rows, hidden]. */
void embedding_forward(struct lm_embedding size, float *x, const float *token_table, const float *position_table);
/* The tables' gradients are added to. */
void embedding_backward(struct lm_embedding size, float *dtoken_table, float *dposition_table, const float *dx);

#endif
