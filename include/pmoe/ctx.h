/* Context: one rank's back end, threads, memory and log. No state is global; any number of contexts may live in a
 * process. A context, and everything made from it, is used by one thread at a time. */
#ifndef PMOE_CTX_H
#define PMOE_CTX_H
#include <pmoe/types.h>

typedef enum pmoe_backend { PMOE_BACKEND_AUTO, PMOE_BACKEND_CPU, PMOE_BACKEND_CUDA } pmoe_backend;
typedef enum pmoe_mem { PMOE_MEM_HOST, PMOE_MEM_PINNED, PMOE_MEM_DEVICE } pmoe_mem;
typedef enum pmoe_log_level { PMOE_LOG_ERROR, PMOE_LOG_WARN, PMOE_LOG_INFO } pmoe_log_level;

#ifdef __cplusplus
extern "C" {
#endif

/* The host's memory: what the library takes while a context lives comes from here, apart from hubs, MPI's bookkeeping
 * and what matrix libraries keep for themselves. `align` is a power of two up to 4096. alloc returns NULL when out of
 * memory; release gets the same bytes and kind back. Called from the thread that calls the library. On CUDA `stream` is
 * that of the call under way: memory may be used there from then on, and what is enqueued there when it is released
 * still uses it (cudaMallocAsync and cudaFreeAsync, or cudaFree, which waits). NULL: the library's own; malloc,
 * cudaMallocHost and cudaMalloc. */
typedef struct pmoe_allocator {
  size_t size;
  void *user;
  void *(*alloc)(void *user, size_t bytes, size_t align, pmoe_mem kind, pmoe_stream stream);
  void (*release)(void *user, void *p, size_t bytes, pmoe_mem kind, pmoe_stream stream);
} pmoe_allocator;

typedef struct pmoe_ctx_config {
  size_t size;
  pmoe_backend backend;            /* AUTO: CPU */
  int32_t device;                  /* CUDA device ordinal, which calls leave current; unused on the CPU */
  int32_t cpu_threads;             /* threads of this rank; 0: what OpenMP would use (OMP_NUM_THREADS or all cores) */
  uint64_t seed;                   /* of the router's jitter, Gumbel noise and random drops */
  uint64_t timeout_ns;             /* how long a collective waits for its peers; 0: 10 minutes */
  const pmoe_allocator *allocator; /* copied; NULL: the library's own (malloc) */
  void (*log)(void *user, int level, const char *text); /* NULL: silent. One line, no newline */
  void *log_user;
  /* "onednn", "cblas" or "plain"; NULL: the first of these that is built in. On CUDA "cublas", or "cublas-grouped":
   * experts of different sizes in one call of cuBLAS rather than side by side; NULL: "cublas" */
  const char *gemm;
} pmoe_ctx_config;

/* cfg may be NULL (all defaults). On success *out is a context that pmoe_ctx_destroy ends.
 * Errors: ERR_ARG (bad value), ERR_UNSUPPORTED (back end or GEMM provider not built in), ERR_NOMEM, ERR_VERSION. */
PMOE_API pmoe_status pmoe_ctx_create(const pmoe_ctx_config *cfg, pmoe_ctx **out);

/* NULL is allowed. Objects made from the context keep it alive until they are destroyed too. */
PMOE_API void pmoe_ctx_destroy(pmoe_ctx *ctx);

/* Hands over memory for temporaries (64-byte aligned, borrowed until the context ends or the call is made again with
 * NULL). Step functions then allocate no scratch as long as it suffices (see pmoe_layer_scratch_bytes); a call that
 * needs more takes the rest from the allocator. ERR_STATE while a call that uses scratch is unfinished. */
PMOE_API pmoe_status pmoe_ctx_set_scratch(pmoe_ctx *ctx, void *mem, size_t bytes);

/* What the context holds from its allocator now and at most since the last reset, and how often it asked. */
typedef struct pmoe_memory {
  size_t size;
  int64_t bytes, peak_bytes, allocations;
} pmoe_memory;
PMOE_API pmoe_status pmoe_ctx_memory(const pmoe_ctx *ctx, pmoe_memory *out);
PMOE_API void pmoe_ctx_reset_peak_memory(pmoe_ctx *ctx);

/* Which matrix multiply runs, and on what. Strings are static or live as long as the context. */
typedef struct pmoe_gemm_info {
  size_t size;
  const char *provider; /* "onednn", "cblas", "plain", "cublas", "cublas-grouped" */
  const char *library;  /* name and version, e.g. "oneDNN 2.6.3" */
  const char *isa;      /* instruction set or core name that the library reports */
  const char *bf16;     /* how bf16 products run: "native" or "widened to float32" */
  const char *warning;  /* NULL, or why this will be slow */
  int32_t threads;
} pmoe_gemm_info;
PMOE_API pmoe_status pmoe_ctx_gemm_info(const pmoe_ctx *ctx, pmoe_gemm_info *out);

/* 1 if built in, else 0. Features: "openmp", "onednn", "cblas", "mpi", "cuda", "nccl". Unknown names give 0. */
PMOE_API int32_t pmoe_has_feature(const char *feature);

#ifdef __cplusplus
}
#endif
#endif
