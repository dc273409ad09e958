/* Moves rows of a model's shape (H 1,024 in bfloat16, 8 experts, top-2) with every kernel of the row mover, for the
 * interpreter to count what they touch. */
#include <cuda_runtime_api.h>
#include <pmoe/pmoe.h>
#include <stdio.h>
#include <stdlib.h>

#include "a2a/rows.h"
#include "core/data.h"

enum { TOKENS = 96, HIDDEN = 1024, EXPERTS = 8, TOP_K = 2, ROWS = TOKENS * TOP_K };

static void *take(size_t bytes, const void *from) {
  void *p = NULL;
  if (cudaMalloc(&p, bytes) != cudaSuccess || cudaMemset(p, 0, bytes) != cudaSuccess) abort();
  if (from && cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice) != cudaSuccess) abort();
  return p;
}

static pmoe_mat matrix(int64_t rows, pmoe_dtype dtype) {
  return (pmoe_mat){take((size_t)rows * HIDDEN * pmoe_dtype_size(dtype), NULL), dtype, rows, HIDDEN, HIDDEN};
}

int main(void) {
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.backend = PMOE_BACKEND_CUDA;
  pmoe_ctx *ctx;
  if (pmoe_ctx_create(&cfg, &ctx) != PMOE_OK) {
    fprintf(stderr, "%s\n", pmoe_last_error());
    return 1;
  }
  int32_t expert[ROWS];
  int64_t slot[ROWS], first[EXPERTS], next[EXPERTS] = {0};
  float weight[ROWS];
  for (int i = 0; i < ROWS; i++) {
    expert[i] = (i * 5 + i / TOP_K) % EXPERTS;
    slot[i] = next[expert[i]]++;
    weight[i] = 0.5f;
  }
  for (int e = 0, row = 0; e < EXPERTS; row += (int)next[e++]) first[e] = row;
  pmoei_row_map map = {TOKENS, TOP_K, take(sizeof expert, expert), take(sizeof slot, slot), take(sizeof first, first)};
  pmoe_mat x = matrix(TOKENS, PMOE_BF16), rows = matrix(ROWS, PMOE_BF16), other = matrix(ROWS, PMOE_BF16);
  pmoe_mat y = matrix(TOKENS, PMOE_BF16), sums = matrix(TOKENS, PMOE_F32);
  pmoei_row_sum sum = {.rows = &rows, .weight = take(sizeof weight, weight), .y = &y};
  pmoei_row_run runs[EXPERTS];
  for (int e = 0; e < EXPERTS; e++) runs[e] = (pmoei_row_run){first[e], first[e], next[e]};
  int failed = pmoei_rows_cuda.spread(ctx, &map, &x, &rows, NULL, NULL, NULL) != PMOE_OK;
  failed |= pmoei_rows_cuda.sum(ctx, &map, &sum) != PMOE_OK;
  sum.y = &sums;
  failed |= pmoei_rows_cuda.sum(ctx, &map, &sum) != PMOE_OK;
  failed |= pmoei_rows_cuda.copy_runs(ctx, EXPERTS, runs, &rows, &other, NULL, NULL) != PMOE_OK;
  failed |= pmoei_data_wait(ctx) != PMOE_OK;
  if (failed) fprintf(stderr, "%s\n", pmoe_last_error());
  pmoe_ctx_destroy(ctx);
  return failed;
}
