/* The numbers a run works on. Each is a function of its place alone, so that any rank, and the reference, can make any
 * of them. */
#ifndef BENCH_DATA_H
#define BENCH_DATA_H
#include "options.h"

typedef enum bench_stream {
  BENCH_X,
  BENCH_DY,
  BENCH_ROUTER,
  BENCH_FC1_WEIGHT, /* these four: index = expert * elements of one expert + place; expert E is the dense branch */
  BENCH_FC1_BIAS,
  BENCH_FC2_WEIGHT,
  BENCH_FC2_BIAS,
  BENCH_ROW_WEIGHT,
  BENCH_CHOICE,
  BENCH_MIX /* [2,H] weights, [2] biases */
} bench_stream;

/* Uniform in [-1, 1). */
float bench_value(const bench_options *o, bench_stream stream, int64_t index);
/* The same times the stream's scale, rounded to the run's dtype where the stream has it. */
float bench_element(const bench_options *o, bench_stream stream, int64_t index);
/* Elements first .. first+n-1 in the stream's dtype. */
void bench_fill(const bench_options *o, bench_stream stream, int64_t first, int64_t n, void *out);

/* 2F for gated activations, else F. */
int32_t bench_inner1(const bench_options *o);

/* A token's K experts, best first, by the pattern. */
void bench_choose(const bench_options *o, int64_t token, int32_t *expert);
/* Row `row` of a stream of rows, H elements. A row of BENCH_X is a token, whose choices come out as bench_choose says
 * when it meets bench_router's weight: a code in its first E columns. */
void bench_row(const bench_options *o, bench_stream stream, int64_t row, double *out);
/* Wg [E,H] */
void bench_router(const bench_options *o, float *weight);
/* n rows of BENCH_X from first_token on, in the run's dtype. */
pmoe_status bench_tokens(const bench_options *o, int64_t first_token, int64_t n, void *out);

float bench_load(pmoe_dtype dtype, const void *p, int64_t i);
void bench_store(pmoe_dtype dtype, void *p, int64_t i, float value);

/* A routing made by hand from bench_choose for n tokens; weights 1/2 + 1/4 uniform. Its arrays lie in a block, which
 * the caller destroys; `there` is the same with the library's side of it. */
struct bench_block;
struct bench_device;
pmoe_status bench_routing(const bench_options *o, struct bench_device *device, int64_t first_token, int64_t n,
                          pmoe_routing *out, struct bench_block *block, pmoe_routing *there);

#endif
