/* The ranks of a run: threads of this process, or, under mpirun, processes. */
#ifndef LM_RANKS_H
#define LM_RANKS_H
#include <pmoe/pmoe.h>

#include "config.h"
#include "layout.h"

struct lm_mail;

/* One rank's view. */
struct lm_ranks {
  int rank, nranks;
  int threads; /* of this rank */
  struct lm_layout at;
  pmoe_ctx *ctx;
  pmoe_topology *topology; /* of this rank's pipeline stage */
  struct lm_mail *mail;
  pmoe_comm *world;
  pmoe_comm *stage, *tp, *cp;
  pmoe_comm *dense_dp; /* CP x DP: the same shards of dense parameters */
  pmoe_comm *model;    /* TP x PP: together one whole dense model */
  pmoe_comm *ends; /* this rank and the one beside it in the first or last stage; NULL in others, and for one stage */
};

/* Joins MPI if mpirun started this process; *nranks becomes its number of processes. Then ranks_end must be called. */
void ranks_begin(int *argc, char ***argv, int *nranks);
void ranks_end(void);
/* 1 on the one process that speaks to the user. */
int ranks_is_first_process(void);
/* Whether ranks are processes. */
int ranks_are_processes(void);

/* Runs body on every rank and returns when all are done. cfg is checked for nranks ranks. */
void ranks_run(const struct lm_config *cfg, int nranks, void (*body)(struct lm_ranks *ranks, void *arg), void *arg);

/* values[i] becomes its sum over the ranks of comm, added in their order. Collective. */
void ranks_sum(pmoe_comm *comm, double *values, int64_t n);

/* Ends every process of the run. */
_Noreturn void ranks_abort(int status);

#endif
