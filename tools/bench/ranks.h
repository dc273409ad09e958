/* The ranks of a run: this process alone, threads of it, or the processes of mpirun. */
#ifndef BENCH_RANKS_H
#define BENCH_RANKS_H
#include <pmoe/pmoe.h>

#include "options.h"

struct bench_device;

typedef struct bench_rank {
  const bench_options *options;
  struct bench_device *device; /* NULL on the CPU */
  pmoe_ctx *ctx;
  pmoe_comm *comm;
  int32_t rank, nranks;
  int32_t threads; /* of all ranks together */
  int32_t wrong;   /* results that did not agree with the reference */
  int32_t lines;   /* reported so far */
} bench_rank;

/* Runs body once per rank and returns the exit status. */
int bench_run_ranks(const bench_options *options, int many, pmoe_status (*body)(bench_rank *rank));

/* This rank's part of the tokens. */
int64_t bench_first_token(const bench_rank *rank);
int64_t bench_num_tokens(const bench_rank *rank);

/* A context with `threads` threads and the provider that the options name. */
pmoe_status bench_ctx(const bench_options *options, int32_t threads, pmoe_ctx **out);

/* Memory whose every page has been touched; prints and returns ERR_NOMEM where there is none. */
pmoe_status bench_alloc(size_t bytes, void *out_pointer);

/* Prints what failed, with the library's sentence, and returns from the calling function. */
#define BENCH_TRY(call)                                                                                                \
  do {                                                                                                                 \
    pmoe_status bench_status_ = (call);                                                                                \
    if (bench_status_ < 0) return bench_complain(#call, bench_status_);                                                \
  } while (0)
pmoe_status bench_complain(const char *call, pmoe_status status);

#endif
