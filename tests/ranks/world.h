/* One body for every rank, as threads or as MPI processes (support/ranks.h), for bodies that count failures instead of
 * leaving at the first. */
#ifndef TEST_WORLD_H
#define TEST_WORLD_H
#include "support/asserts.h"

#include <pmoe/pmoe.h>

#include "support/compare.h"
#include "support/ranks.h"

typedef struct world {
  int32_t rank, nranks;
  pmoe_ctx *ctx;
  pmoe_comm *comm;
  failing_alloc *memory; /* the context's */
  const void *arg;
} world;

/* Number of failures; a rank that has any makes its peers' collectives fail. */
typedef int (*world_body)(world *w);

/* On nranks ranks, with contexts of one thread and a time-out of WORLD_TIMEOUT_MS. Under mpirun sizes other than its
 * own pass over. */
enum { WORLD_TIMEOUT_MS = 20000 };
void world_run(int32_t nranks, world_body body, const void *arg);
void world_run_callbacks(int32_t nranks, world_body body, const void *arg); /* over the test's own collectives */

void world_run_threaded(int32_t nranks, int32_t cpu_threads, world_body body, const void *arg);

/* For the sizes worth trying: 2, 3, 4, 8 as threads, mpirun's own with MPI. */
void world_run_all(world_body body, const void *arg);

/* A main for tests that run on both. */
int world_main(const char *name, const struct CMUnitTest *tests, size_t count);

uint64_t world_now_ms(void);

#endif
