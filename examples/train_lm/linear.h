/* Linear layers over CBLAS: y = x wT + b with x [rows, in], w [out, in], b [out], y [rows, out]. Work is split by sizes
 * alone, so that the bits do not depend on the number of threads. */
#ifndef LM_LINEAR_H
#define LM_LINEAR_H
#include <stdint.h>

struct lm_linear {
  int64_t rows, in, out;
};

/* y is written; bias may be NULL. */
void linear_forward(struct lm_linear size, float *y, const float *x, const float *weight, const float *bias);
/* dx is written. */
void linear_backward_input(struct lm_linear size, float *dx, const float *dy, const float *weight);
/* dweight and dbias (may be NULL) are added to. */
void linear_backward_weight(struct lm_linear size, float *dweight, float *dbias, const float *dy, const float *x);

/* sum_r dy[r, :] is added to dbias. */
void bias_backward(float *dbias, const float *dy, int64_t rows, int64_t n);
/* out = a + b; out may be a or b. */
void add(float *out, const float *a, const float *b, int64_t n);

#endif
