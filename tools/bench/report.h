/* One line per result: a table row or a JSON object. */
#ifndef BENCH_REPORT_H
#define BENCH_REPORT_H
#include <stdbool.h>

#include "ranks.h"

/* A further key of the JSON object, printed below the table row. */
typedef struct bench_extra {
  const char *name;
  double value;
} bench_extra;

enum { BENCH_MAX_EXTRAS = 12 };

/* Times in ms; a ceiling of 0 was not measured. flops and bytes of one iteration; peak and saved are bytes, -1 if they
 * do not apply. */
typedef struct bench_result {
  const char *name;
  bool has_inner;
  double median_ms, min_ms;
  double floor_ms, twin_ms, copy_ms;
  double flops, bytes;
  int64_t peak_bytes, saved_bytes;
  double error, tolerance; /* largest deviation from the reference, relative to its largest value; NaN fails */
  bench_extra extra[BENCH_MAX_EXTRAS];
  int num_extras;
} bench_result;

/* From the samples of a measured operation. */
void bench_set_times(bench_result *result, const double *ms, int n);
void bench_add_extra(bench_result *result, const char *name, double value);

/* Counts a wrong result in rank->wrong; rank 0 prints, with the largest error of all ranks. Collective. */
pmoe_status bench_report(bench_rank *rank, const bench_result *result);

#endif
