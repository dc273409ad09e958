#include "parallel.h"

#ifdef _OPENMP
#include <omp.h>

void lm_set_threads(int threads) { omp_set_num_threads(threads); }
int lm_threads(void) { return omp_get_max_threads(); }
int lm_cores(void) { return omp_get_num_procs(); }

void lm_parallel(int64_t num_tasks, lm_task task, void *arg) {
  int threads = num_tasks < lm_threads() ? (int)num_tasks : lm_threads();
  if (threads < 1) return;
#pragma omp parallel num_threads(threads)
  {
    omp_set_num_threads(1); /* of this region alone: tells a BLAS called by a task to stay on the task's thread */
    int thread = omp_get_thread_num();
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < num_tasks; i++) task(arg, i, thread);
  }
}

#else

void lm_set_threads(int threads) { (void)threads; }
int lm_threads(void) { return 1; }
int lm_cores(void) { return 1; }

void lm_parallel(int64_t num_tasks, lm_task task, void *arg) {
  for (int64_t i = 0; i < num_tasks; i++) task(arg, i, 0);
}

#endif
