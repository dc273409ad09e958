#include "ranks/world.h"

#include <time.h>

uint64_t world_now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

typedef struct world_job {
  world_body body;
  const void *arg;
} world_job;

static void run_body(rank_env *env, void *arg) {
  const world_job *job = arg;
  world w = {env->rank, env->nranks, env->ctx, env->world, env->memory, job->arg};
  int failures = job->body(&w);
  if (failures > 0) fprintf(stderr, "rank %d of %d: %d failures\n", w.rank, w.nranks, failures);
  check(failures == 0);
}

static void run(ranks_config config, world_body body, const void *arg) {
  world_job job = {body, arg};
  config.timeout_ns = (uint64_t)WORLD_TIMEOUT_MS * 1000000u;
  run_ranks_with(&config, run_body, &job);
}

void world_run(int32_t nranks, world_body body, const void *arg) { run((ranks_config){.nranks = nranks}, body, arg); }

void world_run_callbacks(int32_t nranks, world_body body, const void *arg) {
  run((ranks_config){.nranks = nranks, .transport = RANKS_CALLBACKS}, body, arg);
}

void world_run_threaded(int32_t nranks, int32_t cpu_threads, world_body body, const void *arg) {
  run((ranks_config){.nranks = nranks, .cpu_threads = cpu_threads}, body, arg);
}

void world_run_all(world_body body, const void *arg) {
  static const int32_t sizes[] = {2, 3, 4, 8};
  for (int i = 0; i < 4; i++) world_run(sizes[i], body, arg);
}

int world_main(const char *name, const struct CMUnitTest *tests, size_t count) {
  ranks_begin(NULL, NULL);
  return ranks_end(_cmocka_run_group_tests(name, tests, count, NULL, NULL));
}
