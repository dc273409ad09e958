#include "moe/clock.h"

#include <string.h>

#include "core/data.h"
#ifdef PMOE_WITH_CUDA
#include "core/cuda.h"
#endif

pmoe_status pmoei_clock_create(pmoe_ctx *ctx, pmoei_clock *clock) {
#ifdef PMOE_WITH_CUDA
  for (int i = 0; i < PMOEI_NUM_MARKS && pmoei_on_device(ctx); i++)
    PMOEI_CUDA_TRY(cudaEventCreate((cudaEvent_t *)&clock->event[i]));
#endif
  (void)ctx, (void)clock;
  return PMOE_OK;
}

void pmoei_clock_destroy(pmoe_ctx *ctx, pmoei_clock *clock) {
#ifdef PMOE_WITH_CUDA
  for (int i = 0; i < PMOEI_NUM_MARKS; i++)
    if (clock->event[i]) (void)cudaEventDestroy(clock->event[i]);
#endif
  (void)ctx, (void)clock;
}

pmoe_status pmoei_clock_start(pmoe_ctx *ctx, pmoei_clock *clock) {
  memset(clock->set, 0, sizeof clock->set);
  clock->captured = pmoei_is_capturing(ctx);
  return pmoei_clock_mark(ctx, clock, PMOEI_MARK_FORWARD);
}

pmoe_status pmoei_clock_mark(pmoe_ctx *ctx, pmoei_clock *clock, pmoei_mark mark) {
  if (clock->captured) return PMOE_OK;
  clock->set[mark] = true;
#ifdef PMOE_WITH_CUDA
  if (pmoei_on_device(ctx)) PMOEI_CUDA_TRY(cudaEventRecord(clock->event[mark], pmoei_cuda_stream(ctx)));
#endif
  if (!pmoei_on_device(ctx)) clock->ns[mark] = pmoei_now_ns();
  return PMOE_OK;
}

static pmoe_status query(const pmoe_ctx *ctx, const pmoei_clock *clock, pmoei_mark mark) {
#ifdef PMOE_WITH_CUDA
  if (pmoei_on_device(ctx)) {
    cudaError_t error = cudaEventQuery(clock->event[mark]);
    return error == cudaErrorNotReady ? PMOE_PENDING : pmoei_cuda_status(error, "cudaEventQuery");
  }
#endif
  (void)ctx, (void)clock, (void)mark;
  return PMOE_OK;
}

pmoe_status pmoei_clock_reached(const pmoe_ctx *ctx, const pmoei_clock *clock) {
  for (int i = 0; i < PMOEI_NUM_MARKS; i++) {
    pmoe_status status = clock->set[i] ? query(ctx, clock, (pmoei_mark)i) : PMOE_OK;
    if (status != PMOE_OK) return status;
  }
  return PMOE_OK;
}

bool pmoei_clock_passed(const pmoe_ctx *ctx, const pmoei_clock *clock, pmoei_mark mark) {
  return clock->set[mark] && query(ctx, clock, mark) == PMOE_OK;
}

float pmoei_clock_between(const pmoe_ctx *ctx, const pmoei_clock *clock, pmoei_mark from, pmoei_mark to) {
  float ms = 0;
  if (!clock->set[from] || !clock->set[to]) return 0;
#ifdef PMOE_WITH_CUDA
  if (pmoei_on_device(ctx)) {
    if (cudaEventElapsedTime(&ms, clock->event[from], clock->event[to]) != cudaSuccess) (void)cudaGetLastError();
    return ms;
  }
#endif
  (void)ctx, (void)ms;
  return (float)((double)(clock->ns[to] - clock->ns[from]) * 1e-6);
}
