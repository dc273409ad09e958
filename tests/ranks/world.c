#include "ranks/world.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#ifdef PMOE_TEST_MPI
#include <pmoe/mpi.h>
#endif

enum { TIMEOUT_SECONDS = 20 };

uint64_t world_now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

static pmoe_status new_ctx(pmoe_ctx **ctx) {
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 1;
  cfg.seed = 5;
  cfg.timeout_ns = (uint64_t)TIMEOUT_SECONDS * 1000000000u;
  return pmoe_ctx_create(&cfg, ctx);
}

/* With a communicator made, the body; then everything is taken down again. */
static int run_body(world *w, pmoe_status made, world_body body) {
  int failures = 0;
  CHECK(failures, made == PMOE_OK, "rank %d: %s", w->rank, pmoe_last_error());
  if (failures == 0) failures = body(w);
  if (failures > 0) {
    fprintf(stderr, "rank %d of %d: %d failures\n", w->rank, w->nranks, failures);
    if (w->comm) pmoe_comm_abort(w->comm, "a check failed");
  }
  pmoe_comm_destroy(w->comm);
  pmoe_ctx_destroy(w->ctx);
  return failures;
}

#ifdef PMOE_TEST_MPI
static int mpi_size(void) {
  int size;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

int world_run(int32_t nranks, world_body body, const void *arg) {
  if (nranks != mpi_size()) return 0;
  world w = {.nranks = nranks, .arg = arg};
  int rank, total = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  w.rank = rank;
  pmoe_status made = new_ctx(&w.ctx);
  if (made == PMOE_OK) made = pmoe_comm_from_mpi(w.ctx, MPI_COMM_WORLD, &w.comm);
  int failures = run_body(&w, made, body);
  MPI_Allreduce(&failures, &total, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  return total;
}

int world_sizes(const int32_t **sizes) {
  static int32_t own;
  own = mpi_size();
  *sizes = &own;
  return 1;
}

int world_main(const char *name, const struct CMUnitTest *tests, size_t count) {
  MPI_Init(NULL, NULL);
  int failed = _cmocka_run_group_tests(name, tests, count, NULL, NULL);
  MPI_Finalize();
  return failed;
}
#else
typedef struct rank_thread {
  world w;
  pmoe_hub *hub;
  world_body body;
  int failures;
} rank_thread;

static void *rank_main(void *arg) {
  rank_thread *t = arg;
  pmoe_status made = new_ctx(&t->w.ctx);
  if (made == PMOE_OK) made = pmoe_comm_from_hub(t->w.ctx, t->hub, t->w.rank, &t->w.comm);
  t->failures = run_body(&t->w, made, t->body);
  return NULL;
}

int world_run(int32_t nranks, world_body body, const void *arg) {
  pmoe_hub *hub;
  if (pmoe_hub_create(nranks, &hub) != PMOE_OK) return 1;
  rank_thread *ranks = calloc((size_t)nranks, sizeof *ranks);
  pthread_t *threads = calloc((size_t)nranks, sizeof *threads);
  int failures = 0;
  for (int32_t r = 0; r < nranks; r++) {
    ranks[r] = (rank_thread){.w = {.rank = r, .nranks = nranks, .arg = arg}, .hub = hub, .body = body};
    if (pthread_create(&threads[r], NULL, rank_main, &ranks[r]) != 0) abort();
  }
  for (int32_t r = 0; r < nranks; r++) {
    pthread_join(threads[r], NULL);
    failures += ranks[r].failures;
  }
  free(ranks);
  free(threads);
  pmoe_hub_destroy(hub);
  return failures;
}

int world_sizes(const int32_t **sizes) {
  static const int32_t all[] = {2, 3, 4, 8};
  *sizes = all;
  return 4;
}

int world_main(const char *name, const struct CMUnitTest *tests, size_t count) {
  return _cmocka_run_group_tests(name, tests, count, NULL, NULL);
}
#endif

void world_run_all(world_body body, const void *arg) {
  const int32_t *sizes;
  int count = world_sizes(&sizes);
  for (int i = 0; i < count; i++) assert_int_equal(world_run(sizes[i], body, arg), 0);
}
