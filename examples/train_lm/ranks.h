/* The ranks of a run: threads of this process, or, under mpirun, processes. */
#ifndef LM_RANKS_H
#define LM_RANKS_H
#include <pmoe/pmoe.h>

#include "config.h"

/* One rank's view. */
struct lm_ranks {
  int rank, nranks;
  int threads; /* of this rank */
  pmoe_ctx *ctx;
  pmoe_comm *world;
  pmoe_topology *topology;
};

/* Joins MPI if mpirun started this process; *nranks becomes its number of processes. Then ranks_end must be called. */
void ranks_begin(int *argc, char ***argv, int *nranks);
void ranks_end(void);
/* 1 on the one process that speaks to the user. */
int ranks_is_first_process(void);

/* Runs body on every rank and returns when all are done. */
void ranks_run(const struct lm_config *cfg, int nranks, void (*body)(struct lm_ranks *ranks, void *arg), void *arg);

/* Ends every process of the run. */
_Noreturn void ranks_abort(void);

#endif
