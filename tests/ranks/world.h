/* One body for every rank: as threads of this process, or (built with PMOE_TEST_MPI) as the processes that mpirun
 * started. */
#ifndef TEST_WORLD_H
#define TEST_WORLD_H
#include "support/asserts.h"

#include <pmoe/pmoe.h>

#include "support/compare.h"

typedef struct world {
  int32_t rank, nranks;
  pmoe_ctx *ctx;
  pmoe_comm *comm;
  const void *arg;
} world;

/* Number of failures. Ranks may not leave through cmocka's assertions. */
typedef int (*world_body)(world *w);

/* Runs body on nranks ranks, each with a context of one thread and a time-out of a few seconds. A rank with failures
 * aborts its peers. The failures of all ranks; with MPI every rank gets the same sum, and other sizes than mpirun's
 * pass over. */
int world_run(int32_t nranks, world_body body, const void *arg);

/* The sizes worth trying: 2, 3, 4, 8 as threads, mpirun's own with MPI. */
int world_sizes(const int32_t **sizes);

/* assert_int_equal(world_run(...), 0) for every size. */
void world_run_all(world_body body, const void *arg);

/* MPI_Init and MPI_Finalize around the tests where it is built in. */
int world_main(const char *name, const struct CMUnitTest *tests, size_t count);

uint64_t world_now_ms(void);

#endif
