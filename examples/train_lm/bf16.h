/* bfloat16 as its 16 bits: the upper half of a float32, rounded to nearest even. */
#ifndef LM_BF16_H
#define LM_BF16_H
#include <pmoe/types.h>

/* Copies n numbers from float32 to dtype, or back. */
void from_f32(void *to, pmoe_dtype dtype, const float *from, int64_t n);
void to_f32(float *to, const void *from, pmoe_dtype dtype, int64_t n);

#endif
