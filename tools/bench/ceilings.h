/* What a stage cannot beat. The GEMM floor has to run on the library's own provider and threads, which no public header
 * reaches: these functions live with the tests (tests/bench/ceilings.c), which see the library's inside. */
#ifndef BENCH_CEILINGS_H
#define BENCH_CEILINGS_H
#include <pmoe/pmoe.h>

/* The products of a stage and nothing else, over rows that lie sorted in memory of their own. */
typedef struct bench_floor bench_floor;

typedef struct bench_floor_shape {
  int64_t hidden, inner, inner1; /* inner1: 2F if gated */
  pmoe_dtype dtype;
  int32_t num_experts;
  const int64_t *rows; /* [num_experts] */
} bench_floor_shape;

/* Tries several schedules for each part and keeps the fastest. */
pmoe_status bench_floor_experts(pmoe_ctx *ctx, const bench_floor_shape *shape, bench_floor **out);
/* logits; then logits again, dx and dWg */
pmoe_status bench_floor_gate(pmoe_ctx *ctx, int64_t tokens, int64_t hidden, int64_t experts, bench_floor **out);
void bench_floor_destroy(bench_floor *floor);
/* arg is a bench_floor */
pmoe_status bench_floor_forward(void *arg);
pmoe_status bench_floor_backward(void *arg);

/* A copy of `bytes` from src to dst by all threads of ctx, each a piece of its own. arg is a bench_copy. */
typedef struct bench_copy {
  pmoe_ctx *ctx;
  void *dst;
  const void *src;
  size_t bytes;
} bench_copy;
pmoe_status bench_copy_run(void *arg);

/* exp of n numbers from `in` to `out`, as fast as the library can. arg is a bench_exp. */
typedef struct bench_exp {
  pmoe_ctx *ctx;
  const float *in;
  float *out;
  int64_t n;
} bench_exp;
pmoe_status bench_exp_run(void *arg);

/* The transport's exchange alone: rows that lie by destination go, and lie by source when they come. arg is a
 * bench_swap. */
typedef struct bench_swap {
  pmoe_comm *comm;
  const void *send;
  void *recv;
  size_t row_bytes;
  const int64_t *send_first, *send_rows, *recv_first, *recv_rows; /* [ranks] */
} bench_swap;
pmoe_status bench_swap_run(void *arg);

#endif
