#include "block.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pmoe_status bench_block_create(bench_device *device, size_t bytes, bench_block *out) {
  *out = (bench_block){.device = device, .bytes = bytes};
  if (!device) {
    BENCH_TRY(bench_alloc(bytes, &out->host));
    out->data = out->host;
    return PMOE_OK;
  }
  /* Pages that nobody fills are never touched: gradients are many. */
  out->host = calloc(bytes ? bytes : 1, 1);
  if (!out->host) {
    fprintf(stderr, "pmoe-bench: no %zu bytes of memory\n", bytes);
    return PMOE_ERR_NOMEM;
  }
  void *data = NULL;
  pmoe_status status = device->take(device, bytes, &data);
  out->data = data;
  return status == PMOE_OK ? bench_block_zero(out) : status;
}

void bench_block_destroy(bench_block *block) {
  if (block->device && block->data) block->device->give_back(block->device, block->data);
  free(block->host);
  *block = (bench_block){0};
}

void *bench_block_at(const bench_block *block, const void *p) {
  return p ? block->data + ((const char *)p - block->host) : NULL;
}

pmoe_mat bench_block_mat(const bench_block *block, const pmoe_mat *mat) {
  pmoe_mat there = *mat;
  there.data = bench_block_at(block, mat->data);
  return there;
}

pmoe_status bench_block_push(const bench_block *block) {
  if (!block->device) return PMOE_OK;
  return block->device->copy(block->device, block->data, block->host, block->bytes);
}

pmoe_status bench_block_pull(const bench_block *block, const void *p, size_t bytes) {
  if (!block->device || bytes == 0) return PMOE_OK;
  return block->device->copy(block->device, block->host + ((const char *)p - block->host), bench_block_at(block, p),
                             bytes);
}

pmoe_status bench_block_zero(const bench_block *block) {
  if (block->device) return block->device->zero(block->device, block->data, block->bytes);
  memset(block->host, 0, block->bytes);
  return PMOE_OK;
}
