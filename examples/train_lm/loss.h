/* Softmax cross-entropy. */
#ifndef LM_LOSS_H
#define LM_LOSS_H
#include <stdint.h>

/* logits [rows, vocab]; loss [rows] gets -log softmax(logits)[target]. gradient 1: logits become the loss's gradient,
 * softmax - one-hot. Rows are independent, and loss holds what the caller adds up. */
void loss_forward_backward(float *logits, float *loss, const int32_t *targets, int64_t rows, int64_t vocab,
                           int gradient);

#endif
