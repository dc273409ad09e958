#include <string.h>

#include "core/ctx.h"

static void drop_block(pmoe_ctx *ctx, pmoei_scratch_block *block) {
  if (!block->borrowed) pmoei_free(ctx, block->base, block->bytes);
  memset(block, 0, sizeof *block);
}

/* With no open frame: give piecemeal blocks back and remember their sum. */
static void settle(pmoe_ctx *ctx) {
  pmoei_scratch *s = &ctx->scratch;
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
    else drop_block(ctx, &s->block[i]);
  }
  s->num_blocks = kept;
  s->wanted = total;
}

static pmoe_status find_block(pmoe_ctx *ctx, size_t bytes, int32_t *index) {
  pmoei_scratch *s = &ctx->scratch;
  for (int32_t i = 0; i < s->num_blocks; i++) {
    if (s->block[i].bytes - s->block[i].used >= bytes) {
      *index = i;
      return PMOE_OK;
    }
  }
  /* An own block that no frame uses is too small: replace it rather than keep both. */
  for (int32_t i = s->num_blocks - 1; i >= 0 && s->num_frames == 0; i--) {
    if (!s->block[i].borrowed) {
      drop_block(ctx, &s->block[i]);
      s->block[i] = s->block[--s->num_blocks];
    }
  }
  if (s->num_blocks == PMOEI_SCRATCH_BLOCKS)
    return pmoei_error(PMOE_ERR_INTERNAL, "scratch: more than %d blocks", PMOEI_SCRATCH_BLOCKS);
  size_t size = bytes > s->wanted ? bytes : s->wanted;
  pmoei_scratch_block *block = &s->block[s->num_blocks];
  PMOEI_TRY(pmoei_alloc_raw(ctx, size, "scratch", &block->base));
  block->bytes = size;
  block->used = 0;
  block->borrowed = false;
  s->wanted = 0;
  *index = s->num_blocks++;
  return PMOE_OK;
}

pmoe_status pmoei_scratch_reserve(pmoe_ctx *ctx, size_t bytes) {
  int32_t unused;
  return find_block(ctx, bytes, &unused);
}

pmoe_status pmoei_scratch_open(pmoe_ctx *ctx, size_t bytes, void **base, int32_t *handle) {
  pmoei_scratch *s = &ctx->scratch;
  bytes = pmoei_scratch_frame_bytes(bytes);
  if (s->num_frames == PMOEI_SCRATCH_FRAMES)
    return pmoei_error(PMOE_ERR_INTERNAL, "scratch: more than %d frames", PMOEI_SCRATCH_FRAMES);
  int32_t index = 0;
  PMOEI_TRY(find_block(ctx, bytes, &index));
  pmoei_scratch_block *block = &s->block[index];
  *base = block->base + block->used;
#ifdef PMOEI_POISON
  memset(*base, 0xff, bytes);
#endif
  s->frame[s->num_frames] = (pmoei_scratch_frame){index, block->used, true};
  block->used += bytes;
  *handle = s->num_frames++;
  return PMOE_OK;
}

void pmoei_scratch_close(pmoe_ctx *ctx, int32_t handle) {
  pmoei_scratch *s = &ctx->scratch;
  s->frame[handle].open = false;
  while (s->num_frames > 0 && !s->frame[s->num_frames - 1].open) {
    pmoei_scratch_frame *top = &s->frame[--s->num_frames];
    s->block[top->block].used = top->before;
  }
  if (s->num_frames == 0) settle(ctx);
}

pmoe_status pmoe_ctx_set_scratch(pmoe_ctx *ctx, void *mem, size_t bytes) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE((uintptr_t)mem % PMOEI_ALIGN == 0, "mem is %p; %d-byte alignment was expected", mem, PMOEI_ALIGN);
  PMOEI_REQUIRE((mem == NULL) == (bytes == 0), "mem is %p with bytes %zu; give both or neither", mem, bytes);
  pmoei_scratch *s = &ctx->scratch;
  if (s->num_frames != 0)
    return pmoei_error(PMOE_ERR_STATE, "pmoe_ctx_set_scratch: a started movement has not been finished");
  for (int32_t i = 0; i < s->num_blocks; i++) drop_block(ctx, &s->block[i]);
  s->num_blocks = 0;
  s->wanted = 0;
  if (mem) s->block[s->num_blocks++] = (pmoei_scratch_block){mem, bytes, 0, true};
  return PMOE_OK;
}
