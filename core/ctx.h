/* The context's inside: memory, scratch, log. */
#ifndef PMOEI_CTX_H
#define PMOEI_CTX_H
#include <pmoe/ctx.h>
#include <stdbool.h>

#include "core/arena.h"
#include "core/status.h"

struct pmoei_gemm;
struct pmoei_cuda;

typedef struct pmoei_scratch_block {
  char *base;
  size_t bytes, used;
  bool borrowed;
} pmoei_scratch_block;

typedef struct pmoei_scratch_frame {
  int32_t block;
  size_t before; /* the block's `used` before this frame */
  bool open;
} pmoei_scratch_frame;

enum { PMOEI_SCRATCH_BLOCKS = 32, PMOEI_SCRATCH_FRAMES = 64 };

/* Temporaries as a stack of frames. Steps that need no more than ever before allocate nothing: when the last frame
 * closes, blocks that came piecemeal are given back and the next opening takes their sum in one. */
typedef struct pmoei_scratch {
  pmoei_scratch_block block[PMOEI_SCRATCH_BLOCKS];
  pmoei_scratch_frame frame[PMOEI_SCRATCH_FRAMES];
  int32_t num_blocks, num_frames;
  size_t wanted; /* bytes of the single block to take next */
  int32_t held;
} pmoei_scratch;

struct pmoe_ctx {
  int32_t refs; /* the creator and every object made from the context */
  pmoe_backend backend;
  int32_t threads;
  uint64_t seed, timeout_ns;
  pmoe_allocator allocator;
  void (*log)(void *user, int level, const char *text);
  void *log_user;
  struct pmoei_gemm *gemm; /* NULL on CUDA */
  struct pmoei_cuda *cuda; /* NULL on the CPU */
  pmoe_stream stream;      /* of the call under way */
  pmoei_scratch scratch;   /* data memory (core/data.h) */
  pmoei_scratch host;      /* the host's, on CUDA; else unused */
  pmoe_memory memory;
};

void pmoei_ctx_retain(pmoe_ctx *ctx);
void pmoei_ctx_release(pmoe_ctx *ctx);

/* Host memory, zeroed, PMOEI_ALIGN-aligned, for long-lived objects. ERR_NOMEM names `what`. bytes == 0 gives *out =
 * NULL. */
pmoe_status pmoei_alloc(pmoe_ctx *ctx, size_t bytes, const char *what, void *out_pointer);
/* The same without zeroing, for large blocks. */
pmoe_status pmoei_alloc_raw(pmoe_ctx *ctx, size_t bytes, const char *what, void *out_pointer);
void pmoei_free(pmoe_ctx *ctx, void *p, size_t bytes);
/* The library's own allocator of the host's memory. */
void *pmoei_default_alloc(void *user, size_t bytes, size_t align, pmoe_mem kind, pmoe_stream stream);
void pmoei_default_release(void *user, void *p, size_t bytes, pmoe_mem kind, pmoe_stream stream);
/* Of any kind, unset. */
pmoe_status pmoei_alloc_kind(pmoe_ctx *ctx, size_t bytes, pmoe_mem kind, const char *what, void *out_pointer);
void pmoei_free_kind(pmoe_ctx *ctx, void *p, size_t bytes, pmoe_mem kind);

/* Bytes that a frame of that size takes. */
static inline size_t pmoei_scratch_frame_bytes(size_t bytes) {
  return bytes == 0 ? PMOEI_ALIGN : (bytes + PMOEI_ALIGN - 1) / PMOEI_ALIGN * PMOEI_ALIGN;
}
/* Room in one block for frames of these bytes together, so that they need not be taken one by one. */
pmoe_status pmoei_scratch_reserve(pmoe_ctx *ctx, size_t bytes);
/* A frame of temporaries until pmoei_scratch_close with the same handle. Frames may close in any order. Builds with
 * PMOE_POISON fill it with NaN patterns (0xff), so that nothing relies on what was there. */
pmoe_status pmoei_scratch_open(pmoe_ctx *ctx, size_t bytes, void **base, int32_t *handle);
/* The same for what the host itself works with. */
pmoe_status pmoei_scratch_open_host(pmoe_ctx *ctx, size_t bytes, void **base, int32_t *handle);
void pmoei_scratch_close(pmoe_ctx *ctx, int32_t handle);
/* While held, frames that close keep their memory: work on another stream may still need it. Nothing changes on the
 * CPU. */
void pmoei_scratch_hold(pmoe_ctx *ctx);
void pmoei_scratch_release(pmoe_ctx *ctx);
/* At the context's end. */
void pmoei_scratch_drop(pmoe_ctx *ctx);

void pmoei_log(const pmoe_ctx *ctx, pmoe_log_level level, const char *format, ...) PMOEI_PRINTF(3, 4);

/* Monotonic clock. */
uint64_t pmoei_now_ns(void);
/* Milliseconds since *clock, which becomes now. */
float pmoei_ms_since(uint64_t *clock);

#endif
