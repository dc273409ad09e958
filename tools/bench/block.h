/* Memory that the host fills and looks at, and that the library works on: the same memory on the CPU, two copies with a
 * device. */
#ifndef BENCH_BLOCK_H
#define BENCH_BLOCK_H
#include "device.h"

typedef struct bench_block {
  bench_device *device; /* NULL on the CPU */
  char *host, *data;    /* data: what the library sees */
  size_t bytes;
} bench_block;

/* Zeros. Where that fails, and when it is zeroed, destroying it is allowed. */
pmoe_status bench_block_create(bench_device *device, size_t bytes, bench_block *out);
void bench_block_destroy(bench_block *block);

/* What the library sees of the host's p, which lies in the block; NULL of NULL. */
void *bench_block_at(const bench_block *block, const void *p);
pmoe_mat bench_block_mat(const bench_block *block, const pmoe_mat *mat);

/* To the library's side, and back; nothing on the CPU. */
pmoe_status bench_block_push(const bench_block *block);
pmoe_status bench_block_pull(const bench_block *block, const void *p, size_t bytes);
/* Zeros on the library's side. */
pmoe_status bench_block_zero(const bench_block *block);

#endif
