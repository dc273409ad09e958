#include "core/parallel.h"

#ifdef _OPENMP
#include <omp.h>

int32_t pmoei_default_threads(void) { return omp_get_max_threads(); }

void pmoei_parallel(const pmoe_ctx *ctx, int64_t num_tasks, pmoei_task task, void *arg) {
  int threads = num_tasks < ctx->threads ? (int)num_tasks : ctx->threads;
  if (threads < 1) return;
    /* Even one thread opens a region: the thread count set inside it is the region's own, and tells the libraries that
     * the tasks call (BLAS, oneDNN) to stay on their thread. It is gone when the region ends. */
#pragma omp parallel num_threads(threads)
  {
    omp_set_num_threads(1);
    int32_t thread = omp_get_thread_num();
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < num_tasks; i++) task(arg, i, thread);
  }
}

#else

int32_t pmoei_default_threads(void) { return 1; }

void pmoei_parallel(const pmoe_ctx *ctx, int64_t num_tasks, pmoei_task task, void *arg) {
  (void)ctx;
  for (int64_t i = 0; i < num_tasks; i++) task(arg, i, 0);
}

#endif
