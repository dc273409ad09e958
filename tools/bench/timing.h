/* Operations measured in turn, so that what disturbs the machine disturbs all of them alike. */
#ifndef BENCH_TIMING_H
#define BENCH_TIMING_H
#include "ranks.h"

/* run is called on every rank, between barriers; NULL: this rank waits. ms gets one time per measured iteration: from
 * the first rank's start to the last one's end. */
typedef struct bench_op {
  pmoe_status (*run)(void *arg);
  void *arg;
  double *ms;
} bench_op;

/* Runs the operations one after another, warmup + iters times. Their ms are taken in one block at *times, which the
 * caller frees. */
pmoe_status bench_measure(bench_rank *rank, bench_op *ops, int num_ops, double **times);

double bench_now_ms(void);
/* Sorts nothing: works on a copy. */
double bench_median(const double *values, int n);
double bench_min(const double *values, int n);
/* out[i] = a[i] + b[i] */
void bench_add(double *out, const double *a, const double *b, int n);

#endif
