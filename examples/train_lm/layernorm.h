/* Layer norm: y = (x - mean) rstd weight + bias, each row [n] by itself. */
#ifndef LM_LAYERNORM_H
#define LM_LAYERNORM_H
#include <stdint.h>

/* Writes y [rows, n], mean and rstd [rows]. */
void layernorm_forward(float *y, float *mean, float *rstd, const float *x, const float *weight, const float *bias,
                       int64_t rows, int64_t n);
/* dx, dweight and dbias are added to. */
void layernorm_backward(float *dx, float *dweight, float *dbias, const float *dy, const float *x, const float *weight,
                        const float *mean, const float *rstd, int64_t rows, int64_t n);

#endif
