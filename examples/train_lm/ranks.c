#include "ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "error.h"
#include "mail.h"
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
  mpi_runs = 0;
}

int ranks_is_first_process(void) {
  int rank = 0;
  if (mpi_runs) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank == 0;
}

void ranks_abort(int status) {
  fflush(NULL);
  if (mpi_runs) MPI_Abort(MPI_COMM_WORLD, status);
  _exit(status);
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

int ranks_are_processes(void) { return mpi_runs; }

#else

void ranks_begin(int *argc, char ***argv, int *nranks) { (void)argc, (void)argv, (void)nranks; }
void ranks_end(void) {}
int ranks_is_first_process(void) { return 1; }

void ranks_abort(int status) {
  fflush(NULL);
  _exit(status);
}

static int ranks_here(int nranks) { return nranks; }

static pmoe_comm *world_of(pmoe_ctx *ctx, pmoe_hub *hub, int rank) {
  pmoe_comm *world;
  LM_TRY(pmoe_comm_from_hub(ctx, hub, rank, &world));
  return world;
}

int ranks_are_processes(void) { return 0; }

#endif

/* ---- groups ---- */

static void open_groups(struct lm_ranks *ranks, const struct lm_config *cfg) {
  struct lm_layout at = ranks->at = layout_of(cfg, ranks->nranks, ranks->rank);
  pmoe_topology_config topology = PMOE_CONFIG_INIT(pmoe_topology_config);
  topology.tp = at.tp, topology.cp = at.cp, topology.pp = at.pp, topology.etp = cfg->etp, topology.sp = at.sp;
  LM_TRY(pmoe_topology_create(ranks->ctx, ranks->world, &topology, &ranks->topology));
  LM_TRY(pmoe_topology_stage(ranks->topology, &ranks->tp, &ranks->stage));
  LM_TRY(pmoe_topology_groups(ranks->topology, 1, NULL, NULL, &ranks->dense_dp));
  int column = at.tp_rank + at.tp * at.dp_rank; /* of ranks that differ in context and stage */
  LM_TRY(pmoe_comm_split(ranks->world, column + at.tp * at.dp * at.pp_rank, 0, &ranks->cp));
  LM_TRY(pmoe_comm_split(ranks->world, at.cp_rank + at.cp * at.dp_rank, 0, &ranks->model));
  int end = at.pp > 1 && (at.pp_rank == 0 || at.pp_rank == at.pp - 1);
  LM_TRY(pmoe_comm_split(ranks->world, end ? layout_rank_in_stage(&at, 0) : -1, 0, &ranks->ends));
}

static void close_groups(struct lm_ranks *ranks) {
  pmoe_comm_destroy(ranks->ends);
  pmoe_comm_destroy(ranks->model);
  pmoe_comm_destroy(ranks->cp);
  pmoe_topology_destroy(ranks->topology);
}

void ranks_sum(pmoe_comm *comm, double *values, int64_t n) {
  int nranks = pmoe_comm_size(comm);
  double *all = lm_alloc((size_t)(n * nranks), sizeof *all);
  LM_TRY(pmoe_comm_allgather(comm, values, all, (size_t)n * sizeof *values));
  for (int64_t i = 0; i < n; i++) {
    values[i] = 0;
    for (int r = 0; r < nranks; r++) values[i] += all[r * n + i];
  }
  free(all);
}

/* ---- life ---- */

struct rank_thread {
  pthread_t thread;
  const struct lm_config *cfg;
  pmoe_hub *hub; /* NULL with MPI */
  struct lm_mail *mail;
  int rank, threads;
  void (*body)(struct lm_ranks *ranks, void *arg);
  void *arg;
};

static void *run_rank(void *arg) {
  const struct rank_thread *self = arg;
  lm_set_threads(self->threads);
  struct lm_ranks ranks = {.threads = self->threads, .mail = self->mail};
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = self->threads;
  cfg.seed = self->cfg->seed;
  LM_TRY(pmoe_ctx_create(&cfg, &ranks.ctx));
  ranks.world = world_of(ranks.ctx, self->hub, self->rank);
  ranks.rank = pmoe_comm_rank(ranks.world);
  ranks.nranks = pmoe_comm_size(ranks.world);
  open_groups(&ranks, self->cfg);
  self->body(&ranks, self->arg);
  close_groups(&ranks);
  pmoe_comm_destroy(ranks.world);
  pmoe_ctx_destroy(ranks.ctx);
  return NULL;
}

void ranks_run(const struct lm_config *cfg, int nranks, void (*body)(struct lm_ranks *ranks, void *arg), void *arg) {
  int share = lm_cores() / ranks_here(nranks), local = ranks_are_processes() ? 1 : nranks;
  struct rank_thread *all = lm_alloc((size_t)local, sizeof *all);
  struct lm_mail *mail = mail_create(nranks);
  pmoe_hub *hub = NULL;
  if (!ranks_are_processes()) LM_TRY(pmoe_hub_create(nranks, &hub));
  for (int r = 0; r < local; r++) {
    all[r] = (struct rank_thread){.cfg = cfg, .hub = hub, .mail = mail, .rank = r, .body = body, .arg = arg};
    all[r].threads = cfg->threads > 0 ? cfg->threads : share > 0 ? share : 1;
    if (r > 0 && pthread_create(&all[r].thread, NULL, run_rank, &all[r])) lm_fatal("rank %d: no thread to be had", r);
  }
  run_rank(&all[0]);
  for (int r = 1; r < local; r++) pthread_join(all[r].thread, NULL);
  mail_destroy(mail);
  pmoe_hub_destroy(hub);
  free(all);
}
