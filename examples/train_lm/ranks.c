#include "ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "error.h"
#include "parallel.h"

#ifdef LM_WITH_MPI
#include <pmoe/mpi.h>

static int mpi_runs;

/* What the launchers of Open MPI, MPICH and those that speak PMIx tell the processes that they start. */
static int started_by_mpirun(void) {
  return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_RANK") || getenv("PMIX_RANK");
}

void ranks_begin(int *argc, char ***argv, int *nranks) {
  if (!started_by_mpirun()) return;
  int provided;
  MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided); /* only the thread that calls pmoe calls MPI */
  mpi_runs = 1;
  MPI_Comm_size(MPI_COMM_WORLD, nranks);
}

void ranks_end(void) {
  if (mpi_runs) MPI_Finalize();
}

int ranks_is_first_process(void) {
  int rank = 0;
  if (mpi_runs) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank == 0;
}

void ranks_abort(void) {
  fflush(NULL);
  if (mpi_runs) MPI_Abort(MPI_COMM_WORLD, 1);
  _exit(1);
}

static int ranks_here(int nranks) {
  if (!mpi_runs) return nranks;
  MPI_Comm node;
  int count;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
  MPI_Comm_size(node, &count);
  MPI_Comm_free(&node);
  return count;
}

static pmoe_comm *world_of(pmoe_ctx *ctx, pmoe_hub *hub, int rank) {
  pmoe_comm *world;
  if (mpi_runs) LM_TRY(pmoe_comm_from_mpi(ctx, MPI_COMM_WORLD, &world));
  else LM_TRY(pmoe_comm_from_hub(ctx, hub, rank, &world));
  return world;
}

static int processes(void) { return mpi_runs; }

#else

void ranks_begin(int *argc, char ***argv, int *nranks) { (void)argc, (void)argv, (void)nranks; }
void ranks_end(void) {}
int ranks_is_first_process(void) { return 1; }

void ranks_abort(void) {
  fflush(NULL);
  _exit(1);
}

static int ranks_here(int nranks) { return nranks; }

static pmoe_comm *world_of(pmoe_ctx *ctx, pmoe_hub *hub, int rank) {
  pmoe_comm *world;
  LM_TRY(pmoe_comm_from_hub(ctx, hub, rank, &world));
  return world;
}

static int processes(void) { return 0; }

#endif

struct rank_thread {
  pthread_t thread;
  const struct lm_config *cfg;
  pmoe_hub *hub; /* NULL with MPI */
  int rank, threads;
  void (*body)(struct lm_ranks *ranks, void *arg);
  void *arg;
};

static void *run_rank(void *arg) {
  const struct rank_thread *self = arg;
  lm_set_threads(self->threads);
  struct lm_ranks ranks = {.threads = self->threads};
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = self->threads;
  cfg.seed = self->cfg->seed;
  LM_TRY(pmoe_ctx_create(&cfg, &ranks.ctx));
  ranks.world = world_of(ranks.ctx, self->hub, self->rank);
  ranks.rank = pmoe_comm_rank(ranks.world);
  ranks.nranks = pmoe_comm_size(ranks.world);
  LM_TRY(pmoe_topology_create(ranks.ctx, ranks.world, NULL, &ranks.topology));
  self->body(&ranks, self->arg);
  pmoe_topology_destroy(ranks.topology);
  pmoe_comm_destroy(ranks.world);
  pmoe_ctx_destroy(ranks.ctx);
  return NULL;
}

void ranks_run(const struct lm_config *cfg, int nranks, void (*body)(struct lm_ranks *ranks, void *arg), void *arg) {
  int share = lm_cores() / ranks_here(nranks), local = processes() ? 1 : nranks;
  struct rank_thread *all = lm_alloc((size_t)local, sizeof *all);
  pmoe_hub *hub = NULL;
  if (!processes()) LM_TRY(pmoe_hub_create(nranks, &hub));
  for (int r = 0; r < local; r++) {
    all[r] = (struct rank_thread){.cfg = cfg, .hub = hub, .rank = r, .body = body, .arg = arg};
    all[r].threads = cfg->threads > 0 ? cfg->threads : share > 0 ? share : 1;
    if (r > 0 && pthread_create(&all[r].thread, NULL, run_rank, &all[r])) lm_fatal("rank %d: no thread to be had", r);
  }
  run_rank(&all[0]);
  for (int r = 1; r < local; r++) pthread_join(all[r].thread, NULL);
  pmoe_hub_destroy(hub);
  free(all);
}
