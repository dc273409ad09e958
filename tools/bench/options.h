/* What the command line asks for. */
#ifndef BENCH_OPTIONS_H
#define BENCH_OPTIONS_H
#include <pmoe/pmoe.h>

typedef enum bench_pattern { BENCH_BALANCED, BENCH_MULTINOMIAL, BENCH_ZIPF, BENCH_ONE } bench_pattern;

typedef struct bench_options {
  int64_t tokens;
  int32_t hidden, inner, experts, top_k;
  int32_t threads, ranks;
  pmoe_dtype dtype;
  pmoe_act act;
  int32_t bias;
  bench_pattern pattern;
  int32_t warmup, iters, check, json;
  uint64_t seed;
  const char *gemm; /* NULL: the library's choice */
  pmoe_backend backend;
  pmoe_sizing sizing;
  float capacity_factor; /* 0: dropless */
  int32_t graph;         /* steps are captured once and replayed */
  int32_t residual;      /* a dense branch beside the experts, mixed by learned coefficients */
} bench_options;

/* Which groups of options a command has beside those that all have. */
typedef enum bench_needs {
  BENCH_NEEDS_SHAPE = 0,
  BENCH_NEEDS_EXPERTS = 1,
  BENCH_NEEDS_RANKS = 2,
  BENCH_NEEDS_LAYER = 4
} bench_needs;

enum { BENCH_MAX_TOP_K = 64 };
enum { BENCH_EXIT_WRONG = 1, BENCH_EXIT_USAGE = 2, BENCH_EXIT_ERROR = 3 };

/* Reads argv[1..]; a mistake ends the program with BENCH_EXIT_USAGE and says why. */
void bench_parse(int argc, char **argv, const char *doc, int needs, bench_options *out);

const char *bench_pattern_name(bench_pattern pattern);
const char *bench_act_name(pmoe_act act);
const char *bench_dtype_name(pmoe_dtype dtype);
/* Whether results are computed on a device. */
int bench_on_device(const bench_options *options);

#endif
