#include "ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

#ifdef BENCH_WITH_MPI
#include <pmoe/mpi.h>
#endif

pmoe_status bench_complain(const char *call, pmoe_status status) {
  int length = (int)strcspn(call, " (");
  fprintf(stderr, "pmoe-bench: %.*s: %s: %s\n", length, call, pmoe_status_name(status), pmoe_last_error());
  return status;
}

pmoe_status bench_alloc(size_t bytes, void *out_pointer) {
  void *p = NULL;
  if (posix_memalign(&p, 64, bytes ? bytes : 64) != 0) {
    fprintf(stderr, "pmoe-bench: no %zu bytes of memory\n", bytes);
    return PMOE_ERR_NOMEM;
  }
  memset(p, 0, bytes);
  memcpy(out_pointer, &p, sizeof p);
  return PMOE_OK;
}

static int64_t share_before(const bench_rank *rank, int32_t index) {
  return rank->options->tokens * index / rank->nranks;
}
int64_t bench_first_token(const bench_rank *rank) { return share_before(rank, rank->rank); }
int64_t bench_num_tokens(const bench_rank *rank) {
  return share_before(rank, rank->rank + 1) - share_before(rank, rank->rank);
}

pmoe_status bench_ctx(const bench_options *options, int32_t threads, pmoe_ctx **out) {
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = threads;
  cfg.gemm = options->gemm;
  cfg.backend = options->backend;
  BENCH_TRY(pmoe_ctx_create(&cfg, out));
  return PMOE_OK;
}

/* Threads of all ranks together: as asked for, or what one rank would use by itself. */
static pmoe_status total_threads(const bench_options *options, int32_t *out) {
  *out = options->threads;
  if (*out > 0) return PMOE_OK;
  pmoe_ctx *ctx;
  BENCH_TRY(bench_ctx(options, 0, &ctx));
  pmoe_gemm_info info = PMOE_CONFIG_INIT(pmoe_gemm_info);
  pmoe_status status = pmoe_ctx_gemm_info(ctx, &info);
  pmoe_ctx_destroy(ctx);
  *out = info.threads;
  return status;
}

static pmoe_status own_ctx(const bench_options *options, bench_rank *rank) {
  BENCH_TRY(total_threads(options, &rank->threads));
  int32_t share = rank->threads / rank->nranks;
  pmoe_status status = bench_ctx(options, share > 0 ? share : 1, &rank->ctx);
  if (status < 0 || !bench_on_device(options)) return status;
  return bench_device_open(rank->ctx, &rank->device);
}

static void drop_ctx(bench_rank *rank) {
  pmoe_comm_destroy(rank->comm);
  if (rank->device) rank->device->close(rank->device);
  pmoe_ctx_destroy(rank->ctx);
}

static int exit_status(pmoe_status status, int32_t wrong) {
  if (status < 0) return BENCH_EXIT_ERROR;
  return wrong > 0 ? BENCH_EXIT_WRONG : 0;
}

/* ---- ranks as threads ---- */
typedef struct rank_thread {
  bench_rank rank;
  pmoe_hub *hub;
  pmoe_status (*body)(bench_rank *rank);
  pmoe_status status;
} rank_thread;

static pmoe_status run_thread(rank_thread *self) {
  bench_rank *rank = &self->rank;
  pmoe_status status = own_ctx(rank->options, rank);
  if (status == PMOE_OK)
    status = rank->nranks == 1 ? pmoe_comm_self(rank->ctx, &rank->comm)
                               : pmoe_comm_from_hub(rank->ctx, self->hub, rank->rank, &rank->comm);
  if (status == PMOE_OK) status = self->body(rank);
  if (status < 0 && rank->comm) pmoe_comm_abort(rank->comm, pmoe_last_error());
  drop_ctx(rank);
  return status;
}

static void *thread_main(void *arg) {
  rank_thread *self = arg;
  self->status = run_thread(self);
  return NULL;
}

static pmoe_status join_threads(rank_thread *ranks, pthread_t *thread, int32_t n, int32_t *wrong) {
  for (int32_t i = 1; i < n; i++)
    if (pthread_create(&thread[i], NULL, thread_main, &ranks[i]) != 0) {
      fprintf(stderr, "pmoe-bench: no thread for rank %d\n", i);
      exit(BENCH_EXIT_ERROR); /* the ranks that run already would wait for ever */
    }
  thread_main(&ranks[0]);
  pmoe_status status = PMOE_OK;
  for (int32_t i = 0; i < n; i++) {
    if (i > 0) pthread_join(thread[i], NULL);
    if (ranks[i].status < 0 && status == PMOE_OK) status = ranks[i].status;
    *wrong += ranks[i].rank.wrong;
  }
  return status;
}

static int run_threads(const bench_options *options, pmoe_status (*body)(bench_rank *rank)) {
  int32_t n = options->ranks, wrong = 0;
  rank_thread *ranks = calloc((size_t)n, sizeof *ranks);
  pthread_t *thread = calloc((size_t)n, sizeof *thread);
  pmoe_hub *hub = NULL;
  pmoe_status status = ranks && thread ? PMOE_OK : PMOE_ERR_NOMEM;
  if (status == PMOE_OK && n > 1) status = pmoe_hub_create(n, &hub);
  if (status == PMOE_OK) {
    for (int32_t i = 0; i < n; i++)
      ranks[i] = (rank_thread){.rank = {.options = options, .rank = i, .nranks = n}, .hub = hub, .body = body};
    status = join_threads(ranks, thread, n, &wrong);
  } else {
    bench_complain("ranks", status);
  }
  pmoe_hub_destroy(hub);
  free(thread);
  free(ranks);
  return exit_status(status, wrong);
}

/* ---- ranks of mpirun ---- */
#ifdef BENCH_WITH_MPI
static int under_mpirun(void) { return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE") || getenv("PMIX_RANK"); }

static int run_mpi(const bench_options *options, pmoe_status (*body)(bench_rank *rank)) {
  if (MPI_Init(NULL, NULL) != MPI_SUCCESS) return BENCH_EXIT_ERROR;
  bench_rank rank = {.options = options};
  MPI_Comm_rank(MPI_COMM_WORLD, &rank.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &rank.nranks);
  pmoe_status status = own_ctx(options, &rank);
  if (status == PMOE_OK) {
    status = pmoe_comm_from_mpi(rank.ctx, MPI_COMM_WORLD, &rank.comm);
    if (status < 0) bench_complain("pmoe_comm_from_mpi", status);
  }
  if (status == PMOE_OK) status = body(&rank);
  if (status < 0) MPI_Abort(MPI_COMM_WORLD, BENCH_EXIT_ERROR);
  int32_t wrong = 0;
  MPI_Allreduce(&rank.wrong, &wrong, 1, MPI_INT32_T, MPI_SUM, MPI_COMM_WORLD);
  drop_ctx(&rank);
  MPI_Finalize();
  return exit_status(status, wrong);
}
#endif

int bench_run_ranks(const bench_options *options, int many, pmoe_status (*body)(bench_rank *rank)) {
#ifdef BENCH_WITH_MPI
  if (many && options->ranks == 1 && under_mpirun() && !bench_on_device(options)) return run_mpi(options, body);
#endif
  (void)many;
  return run_threads(options, body);
}
