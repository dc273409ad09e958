#include "core/ctx.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/config.h"
#include "core/gemm.h"
#include "core/parallel.h"
#ifdef PMOE_WITH_CUDA
#include "core/cuda.h"
#endif

void *pmoei_default_alloc(void *user, size_t bytes, size_t align, pmoe_mem kind, pmoe_stream stream) {
  (void)user, (void)kind, (void)stream;
  void *p = NULL;
  return posix_memalign(&p, align, bytes) == 0 ? p : NULL;
}

void pmoei_default_release(void *user, void *p, size_t bytes, pmoe_mem kind, pmoe_stream stream) {
  (void)user, (void)bytes, (void)kind, (void)stream;
  free(p);
}

pmoe_status pmoei_alloc_kind(pmoe_ctx *ctx, size_t bytes, pmoe_mem kind, const char *what, void *out_pointer) {
  void *p = NULL;
  if (bytes > 0) {
    size_t align = kind == PMOE_MEM_DEVICE ? PMOEI_DEVICE_ALIGN : PMOEI_ALIGN;
    p = ctx->allocator.alloc(ctx->allocator.user, bytes, align, kind, ctx->stream);
    if (!p) return pmoei_error(PMOE_ERR_NOMEM, "%s: the allocator gave no %zu bytes", what, bytes);
    ctx->memory.bytes += (int64_t)bytes;
    ctx->memory.allocations++;
    if (ctx->memory.bytes > ctx->memory.peak_bytes) ctx->memory.peak_bytes = ctx->memory.bytes;
  }
  memcpy(out_pointer, &p, sizeof p);
  return PMOE_OK;
}

void pmoei_free_kind(pmoe_ctx *ctx, void *p, size_t bytes, pmoe_mem kind) {
  if (!p) return;
  ctx->memory.bytes -= (int64_t)bytes;
  ctx->allocator.release(ctx->allocator.user, p, bytes, kind, ctx->stream);
}

pmoe_status pmoei_alloc_raw(pmoe_ctx *ctx, size_t bytes, const char *what, void *out_pointer) {
  return pmoei_alloc_kind(ctx, bytes, PMOE_MEM_HOST, what, out_pointer);
}

pmoe_status pmoei_alloc(pmoe_ctx *ctx, size_t bytes, const char *what, void *out_pointer) {
  PMOEI_TRY(pmoei_alloc_raw(ctx, bytes, what, out_pointer));
  void *p;
  memcpy(&p, out_pointer, sizeof p);
  if (p) memset(p, 0, bytes);
  return PMOE_OK;
}

void pmoei_free(pmoe_ctx *ctx, void *p, size_t bytes) { pmoei_free_kind(ctx, p, bytes, PMOE_MEM_HOST); }

static pmoe_status check_config(const pmoe_ctx_config *cfg) {
  PMOEI_REQUIRE((int)cfg->backend >= 0 && cfg->backend <= PMOE_BACKEND_CUDA,
                "cfg->backend is %d; a pmoe_backend was expected", (int)cfg->backend);
#ifndef PMOE_WITH_CUDA
  if (cfg->backend == PMOE_BACKEND_CUDA)
    return pmoei_error(PMOE_ERR_UNSUPPORTED, "cfg->backend is PMOE_BACKEND_CUDA; this library was built without CUDA");
#endif
  PMOEI_REQUIRE(cfg->cpu_threads >= 0 && cfg->cpu_threads <= 4096, "cfg->cpu_threads is %d; 0 to 4096 was expected",
                cfg->cpu_threads);
  return PMOE_OK;
}

static pmoe_allocator default_allocator(pmoe_backend backend) {
#ifdef PMOE_WITH_CUDA
  if (backend == PMOE_BACKEND_CUDA)
    return (pmoe_allocator){sizeof(pmoe_allocator), NULL, pmoei_cuda_default_alloc, pmoei_cuda_default_release};
#endif
  (void)backend;
  return (pmoe_allocator){sizeof(pmoe_allocator), NULL, pmoei_default_alloc, pmoei_default_release};
}

/* What multiplies: a provider of the CPU's, or the device. */
static pmoe_status open_backend(pmoe_ctx *ctx, const pmoe_ctx_config *cfg) {
#ifdef PMOE_WITH_CUDA
  if (ctx->backend == PMOE_BACKEND_CUDA) return pmoei_cuda_create(ctx, cfg);
#endif
  return pmoei_gemm_create(ctx, cfg->gemm, &ctx->gemm);
}

pmoe_status pmoe_ctx_create(const pmoe_ctx_config *config, pmoe_ctx **out) {
  PMOEI_REQUIRE_POINTER(out);
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  if (config) PMOEI_TRY(PMOEI_CONFIG_READ(&cfg, config));
  PMOEI_TRY(check_config(&cfg));
  pmoe_allocator allocator = default_allocator(cfg.backend);
  if (cfg.allocator) {
    PMOEI_TRY(PMOEI_CONFIG_READ(&allocator, cfg.allocator));
    PMOEI_REQUIRE(allocator.alloc && allocator.release, "cfg->allocator lacks alloc or release; both were expected");
  }
  pmoe_ctx *ctx = allocator.alloc(allocator.user, sizeof *ctx, PMOEI_ALIGN, PMOE_MEM_HOST, NULL);
  if (!ctx) return pmoei_error(PMOE_ERR_NOMEM, "context: the allocator gave no %zu bytes", sizeof *ctx);
  memset(ctx, 0, sizeof *ctx);
  ctx->refs = 1;
  ctx->backend = cfg.backend == PMOE_BACKEND_CUDA ? PMOE_BACKEND_CUDA : PMOE_BACKEND_CPU;
  ctx->threads = cfg.cpu_threads > 0 ? cfg.cpu_threads : pmoei_default_threads();
  ctx->seed = cfg.seed;
  ctx->timeout_ns = cfg.timeout_ns ? cfg.timeout_ns : UINT64_C(600000000000);
  ctx->allocator = allocator;
  ctx->log = cfg.log;
  ctx->log_user = cfg.log_user;
  ctx->memory = (pmoe_memory){sizeof ctx->memory, sizeof *ctx, sizeof *ctx, 1};
  pmoe_status status = open_backend(ctx, &cfg);
  if (status != PMOE_OK) {
    pmoei_ctx_release(ctx);
    return status;
  }
  *out = ctx;
  return PMOE_OK;
}

void pmoei_ctx_retain(pmoe_ctx *ctx) { ctx->refs++; }

void pmoei_ctx_release(pmoe_ctx *ctx) {
  if (--ctx->refs > 0) return;
  pmoei_scratch_drop(ctx);
  pmoei_gemm_destroy(ctx, ctx->gemm);
#ifdef PMOE_WITH_CUDA
  pmoei_cuda_destroy(ctx);
#endif
  pmoe_allocator allocator = ctx->allocator;
  allocator.release(allocator.user, ctx, sizeof *ctx, PMOE_MEM_HOST, NULL);
}

void pmoe_ctx_destroy(pmoe_ctx *ctx) {
  if (ctx) pmoei_ctx_release(ctx);
}

pmoe_status pmoe_ctx_memory(const pmoe_ctx *ctx, pmoe_memory *out) {
  PMOEI_REQUIRE_POINTER(ctx);
  return PMOEI_STRUCT_WRITE(out, &ctx->memory);
}

void pmoe_ctx_reset_peak_memory(pmoe_ctx *ctx) {
  if (ctx) ctx->memory.peak_bytes = ctx->memory.bytes;
}

pmoe_status pmoe_ctx_gemm_info(const pmoe_ctx *ctx, pmoe_gemm_info *out) {
  PMOEI_REQUIRE_POINTER(ctx);
  pmoe_gemm_info info = PMOE_CONFIG_INIT(pmoe_gemm_info);
#ifdef PMOE_WITH_CUDA
  if (ctx->cuda) {
    pmoei_cuda_gemm_info(ctx, &info);
    return PMOEI_STRUCT_WRITE(out, &info);
  }
#endif
  pmoei_gemm_get_info(ctx->gemm, &info);
  info.threads = ctx->threads;
  return PMOEI_STRUCT_WRITE(out, &info);
}

void pmoei_log(const pmoe_ctx *ctx, pmoe_log_level level, const char *format, ...) {
  if (!ctx->log) return;
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  ctx->log(ctx->log_user, level, text);
}

uint64_t pmoei_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

float pmoei_ms_since(uint64_t *clock) {
  uint64_t before = *clock;
  *clock = pmoei_now_ns();
  return (float)((double)(*clock - before) * 1e-6);
}

int32_t pmoe_has_feature(const char *feature) {
  static const char *const built_in[] = {
#ifdef _OPENMP
      "openmp",
#endif
#ifdef PMOE_WITH_ONEDNN
      "onednn",
#endif
#ifdef PMOE_WITH_CBLAS
      "cblas",
#endif
#ifdef PMOE_WITH_MPI
      "mpi",
#endif
#ifdef PMOE_WITH_CUDA
      "cuda",
#endif
#ifdef PMOE_WITH_NCCL
      "nccl",
#endif
      NULL};
  for (int i = 0; feature && built_in[i]; i++)
    if (strcmp(feature, built_in[i]) == 0) return 1;
  return 0;
}
