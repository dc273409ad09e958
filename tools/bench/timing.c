#include "timing.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device.h"

double bench_now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

typedef struct span {
  double start, end;
} span;

/* Ranks on one machine share a clock. */
static pmoe_status elapsed(bench_rank *rank, span mine, span *all, double *ms) {
  all[0] = mine;
  if (rank->nranks > 1) BENCH_TRY(pmoe_comm_allgather(rank->comm, &mine, all, sizeof mine));
  span whole = all[0];
  for (int32_t i = 1; i < rank->nranks; i++) {
    if (all[i].start < whole.start) whole.start = all[i].start;
    if (all[i].end > whole.end) whole.end = all[i].end;
  }
  *ms = whole.end - whole.start;
  return PMOE_OK;
}

static pmoe_status measure_once(bench_rank *rank, const bench_op *op, span *all, double *ms) {
  if (rank->nranks > 1) BENCH_TRY(pmoe_comm_barrier(rank->comm));
  double now = bench_now_ms();
  span mine = {now, now};
  if (op->run) {
    pmoe_status status = op->run(op->arg);
    if (status < 0) return status;
    mine.end = bench_now_ms();
  } else {
    mine.start = 1e300, mine.end = 0;
  }
  return elapsed(rank, mine, all, ms);
}

pmoe_status bench_measure(bench_rank *rank, bench_op *ops, int num_ops, double **times) {
  int warmup = rank->options->warmup, iters = rank->options->iters;
  span *all;
  BENCH_TRY(bench_alloc((size_t)(num_ops * iters) * sizeof **times, times));
  for (int i = 0; i < num_ops; i++) ops[i].ms = *times + (size_t)i * (size_t)iters;
  if (rank->device) return rank->device->measure(rank->device, rank->options, ops, num_ops);
  pmoe_status status = bench_alloc((size_t)rank->nranks * sizeof *all, &all);
  if (status < 0) return status;
  for (int i = 0; i < warmup + iters && status == PMOE_OK; i++)
    for (int j = 0; j < num_ops && status == PMOE_OK; j++) {
      double ms = 0;
      status = measure_once(rank, &ops[j], all, &ms);
      if (i >= warmup) ops[j].ms[i - warmup] = ms;
    }
  free(all);
  return status;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double bench_median(const double *values, int n) {
  double *sorted = malloc((size_t)n * sizeof *sorted);
  if (!sorted) return values[0];
  memcpy(sorted, values, (size_t)n * sizeof *sorted);
  qsort(sorted, (size_t)n, sizeof *sorted, ascending);
  double median = n % 2 ? sorted[n / 2] : 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]);
  free(sorted);
  return median;
}

double bench_min(const double *values, int n) {
  double least = values[0];
  for (int i = 1; i < n; i++)
    if (values[i] < least) least = values[i];
  return least;
}

void bench_add(double *out, const double *a, const double *b, int n) {
  for (int i = 0; i < n; i++) out[i] = a[i] + b[i];
}
