/* The one place where threads are started. */
#ifndef PMOEI_PARALLEL_H
#define PMOEI_PARALLEL_H
#include "core/ctx.h"

/* Task `index` run by thread `thread` in [0, ctx->threads). Which thread gets which task varies from run to run:
 * results must not depend on it. Matrix products inside a task run on the task's thread alone. */
typedef void (*pmoei_task)(void *arg, int64_t index, int32_t thread);

/* Runs tasks 0 .. num_tasks-1, handed out in that order, and returns when all are done. */
void pmoei_parallel(const pmoe_ctx *ctx, int64_t num_tasks, pmoei_task task, void *arg);

/* What cpu_threads = 0 means. */
int32_t pmoei_default_threads(void);

#endif
