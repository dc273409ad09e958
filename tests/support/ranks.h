/* Runs one test body on several ranks: threads of this process, or (linked with tests/mpi/ranks_mpi.c, under mpirun)
 * MPI processes. Each rank has its own context and communicator. A check that fails ends its rank's body, makes the
 * peers' collectives fail too, and fails the test on the main thread once all ranks are back: cmocka's own assertions
 * work on the main thread alone. */
#ifndef TEST_RANKS_H
#define TEST_RANKS_H
#include <pmoe/comm.h>
#include <pmoe/ctx.h>
#include <stdbool.h>

#include "support/failing_alloc.h"

typedef struct rank_env {
  pmoe_ctx *ctx;
  pmoe_comm *world;
  int32_t rank, nranks;
  failing_alloc *memory; /* the context's allocator: what it still holds when all has ended is a failure */
} rank_env;

typedef void (*rank_body)(rank_env *env, void *arg);

typedef enum ranks_transport { RANKS_NATIVE, RANKS_CALLBACKS } ranks_transport;

typedef struct ranks_config {
  int32_t nranks;
  ranks_transport transport; /* threads or MPI; or callbacks on the test's own collectives over them */
  uint64_t timeout_ns;       /* of the contexts; 0: 60 s */
  int32_t cpu_threads;       /* of each rank; 0: 1 */
} ranks_config;

/* arg is shared by the ranks that are threads. Under MPI: with more ranks than mpirun started, does nothing; with
 * fewer, the others wait. */
void run_ranks(int32_t nranks, rank_body body, void *arg);
void run_ranks_with(const ranks_config *config, rank_body body, void *arg);
/* On 1, 2, 3, 4 and 8 ranks, natively and by callbacks. */
void run_ranks_all(rank_body body, void *arg);
/* 1 if the ranks are MPI processes. */
bool ranks_are_processes(void);

/* First and last in main. Under MPI only rank 0 writes to stdout. */
void ranks_begin(int *argc, char ***argv);
int ranks_end(int failures);

/* For bodies, and for functions that they call. */
#define check(condition) rank_check((condition), #condition, __FILE__, __LINE__)
#define check_ok(call) rank_check_status((call), PMOE_OK, NULL, #call, __FILE__, __LINE__)
#define check_status(call, status) rank_check_status((call), (status), NULL, #call, __FILE__, __LINE__)
/* The call fails with this status and a sentence that has `word` in it. */
#define check_refused(call, status, word) rank_check_status((call), (status), (word), #call, __FILE__, __LINE__)

void rank_check(bool condition, const char *text, const char *file, int line);
void rank_check_status(pmoe_status got, pmoe_status expected, const char *word, const char *call, const char *file,
                       int line);

/* Between ranks.c and the two ways to start ranks. */
typedef struct ranks_job {
  const ranks_config *config;
  rank_body body;
  void *arg;
  /* Makes the rank's communicator. */
  pmoe_status (*connect)(pmoe_ctx *ctx, int32_t rank, void *launcher, pmoe_comm **out);
  void *launcher;
} ranks_job;

enum { RANKS_TEXT = 1024 };
/* Runs the body on the calling thread; failure[0] is 0 if all went well. */
void ranks_run_one(const ranks_job *job, int32_t rank, char failure[RANKS_TEXT]);
/* Runs the job on all ranks; gives the first failure's text. */
void ranks_launch(ranks_job *job, char failure[RANKS_TEXT]);

#endif
