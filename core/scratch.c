#include <string.h>

#include "core/data.h"

/* Handles of the host's own stack, where a context has two. */
enum { HOST_HANDLE = 1 << 16 };

static bool is_host(const pmoe_ctx *ctx, const pmoei_scratch *s) { return s == &ctx->host; }

static void drop_block(pmoe_ctx *ctx, const pmoei_scratch *s, pmoei_scratch_block *block) {
  if (block->borrowed) {
  } else if (is_host(ctx, s)) pmoei_free(ctx, block->base, block->bytes);
  else pmoei_data_free(ctx, block->base, block->bytes);
  memset(block, 0, sizeof *block);
}

/* With no open frame: give piecemeal blocks back and remember their sum. */
static void settle(pmoe_ctx *ctx, pmoei_scratch *s) {
  int32_t owned = 0;
  size_t total = 0;
  for (int32_t i = 0; i < s->num_blocks; i++) {
    owned += !s->block[i].borrowed;
    if (!s->block[i].borrowed) total += s->block[i].bytes;
  }
  if (owned <= 1) return;
  int32_t kept = 0;
  for (int32_t i = 0; i < s->num_blocks; i++) {
    if (s->block[i].borrowed) s->block[kept++] = s->block[i];
    else drop_block(ctx, s, &s->block[i]);
  }
  s->num_blocks = kept;
  s->wanted = total;
}

static pmoe_status find_block(pmoe_ctx *ctx, pmoei_scratch *s, size_t bytes, int32_t *index) {
  for (int32_t i = 0; i < s->num_blocks; i++) {
    if (s->block[i].bytes - s->block[i].used >= bytes) {
      *index = i;
      return PMOE_OK;
    }
  }
  /* An own block that no frame uses is too small: replace it rather than keep both. */
  for (int32_t i = s->num_blocks - 1; i >= 0 && s->num_frames == 0; i--) {
    if (!s->block[i].borrowed) {
      drop_block(ctx, s, &s->block[i]);
      s->block[i] = s->block[--s->num_blocks];
    }
  }
  if (s->num_blocks == PMOEI_SCRATCH_BLOCKS)
    return pmoei_error(PMOE_ERR_INTERNAL, "scratch: more than %d blocks", PMOEI_SCRATCH_BLOCKS);
  size_t size = bytes > s->wanted ? bytes : s->wanted;
  pmoei_scratch_block *block = &s->block[s->num_blocks];
  PMOEI_TRY(is_host(ctx, s) ? pmoei_alloc_raw(ctx, size, "scratch", &block->base)
                            : pmoei_data_alloc(ctx, size, "scratch", &block->base));
  block->bytes = size;
  block->used = 0;
  block->borrowed = false;
  s->wanted = 0;
  *index = s->num_blocks++;
  return PMOE_OK;
}

pmoe_status pmoei_scratch_reserve(pmoe_ctx *ctx, size_t bytes) {
  int32_t unused;
  return find_block(ctx, &ctx->scratch, bytes, &unused);
}

static pmoe_status open_frame(pmoe_ctx *ctx, pmoei_scratch *s, size_t bytes, void **base, int32_t *handle) {
  bytes = pmoei_scratch_frame_bytes(bytes);
  if (s->num_frames == PMOEI_SCRATCH_FRAMES)
    return pmoei_error(PMOE_ERR_INTERNAL, "scratch: more than %d frames", PMOEI_SCRATCH_FRAMES);
  int32_t index = 0;
  PMOEI_TRY(find_block(ctx, s, bytes, &index));
  pmoei_scratch_block *block = &s->block[index];
  *base = block->base + block->used;
#ifdef PMOEI_POISON
  if (is_host(ctx, s) || !pmoei_on_device(ctx)) memset(*base, 0xff, bytes);
#endif
  s->frame[s->num_frames] = (pmoei_scratch_frame){index, block->used, true};
  block->used += bytes;
  *handle = s->num_frames++;
  return PMOE_OK;
}

pmoe_status pmoei_scratch_open(pmoe_ctx *ctx, size_t bytes, void **base, int32_t *handle) {
  return open_frame(ctx, &ctx->scratch, bytes, base, handle);
}

pmoe_status pmoei_scratch_open_host(pmoe_ctx *ctx, size_t bytes, void **base, int32_t *handle) {
  if (!pmoei_on_device(ctx)) return open_frame(ctx, &ctx->scratch, bytes, base, handle);
  PMOEI_TRY(open_frame(ctx, &ctx->host, bytes, base, handle));
  *handle += HOST_HANDLE;
  return PMOE_OK;
}

static void drop_closed(pmoe_ctx *ctx, pmoei_scratch *s) {
  while (s->num_frames > 0 && !s->frame[s->num_frames - 1].open) {
    pmoei_scratch_frame *top = &s->frame[--s->num_frames];
    s->block[top->block].used = top->before;
  }
  if (s->num_frames == 0) settle(ctx, s);
}

void pmoei_scratch_close(pmoe_ctx *ctx, int32_t handle) {
  pmoei_scratch *s = handle >= HOST_HANDLE ? &ctx->host : &ctx->scratch;
  s->frame[handle % HOST_HANDLE].open = false;
  if (s->held == 0) drop_closed(ctx, s);
}

void pmoei_scratch_hold(pmoe_ctx *ctx) { ctx->scratch.held += pmoei_on_device(ctx); }

void pmoei_scratch_release(pmoe_ctx *ctx) {
  if (!pmoei_on_device(ctx) || --ctx->scratch.held > 0) return;
  drop_closed(ctx, &ctx->scratch);
}

void pmoei_scratch_drop(pmoe_ctx *ctx) {
  pmoei_scratch *both[] = {&ctx->scratch, &ctx->host};
  for (int i = 0; i < 2; i++) {
    for (int32_t b = 0; b < both[i]->num_blocks; b++) drop_block(ctx, both[i], &both[i]->block[b]);
    both[i]->num_blocks = 0;
  }
}

pmoe_status pmoe_ctx_set_scratch(pmoe_ctx *ctx, void *mem, size_t bytes) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE((uintptr_t)mem % PMOEI_ALIGN == 0, "mem is %p; %d-byte alignment was expected", mem, PMOEI_ALIGN);
  PMOEI_REQUIRE((mem == NULL) == (bytes == 0), "mem is %p with bytes %zu; give both or neither", mem, bytes);
  pmoei_scratch *s = &ctx->scratch;
  if (s->num_frames != 0)
    return pmoei_error(PMOE_ERR_STATE, "pmoe_ctx_set_scratch: a started movement has not been finished");
  for (int32_t i = 0; i < s->num_blocks; i++) drop_block(ctx, s, &s->block[i]);
  s->num_blocks = 0;
  s->wanted = 0;
  if (mem) s->block[s->num_blocks++] = (pmoei_scratch_block){mem, bytes, 0, true};
  return PMOE_OK;
}
