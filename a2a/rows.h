/* The row mover: two directions between tokens and the rows of their choices. */
#ifndef PMOEI_ROWS_H
#define PMOEI_ROWS_H
#include "core/ctx.h"

/* Where the choices of every token lie: choice (t,k) with slot >= 0 is row first_row[expert] + slot of the row buffer.
 */
typedef struct pmoei_row_map {
  int64_t tokens;
  int32_t top_k;
  const int32_t *expert;    /* [tokens, top_k] */
  const int64_t *slot;      /* [tokens, top_k] */
  const int64_t *first_row; /* [experts]; like the two above data memory */
} pmoei_row_map;

/* y_t = scale_t (sum_k weight_tk row(t,k)) + branch_scale_t branch_t, summed in float32 in the order of k. NULL means 1
 * (weight, scale, branch_scale) or no branch. y has the rows' dtype or float32. */
typedef struct pmoei_row_sum {
  const pmoe_mat *rows;
  const float *weight, *scale, *branch_scale;
  const pmoe_mat *branch;
  pmoe_mat *y;
} pmoei_row_sum;

/* Contiguous runs of rows copied from one place to another: [num_runs] */
typedef struct pmoei_row_run {
  int64_t from, to, rows;
} pmoei_row_run;

typedef struct pmoei_rows_ops {
  /* row(t,k) = x_t, and row_weight[row(t,k)] = scale_t weight_tk if row_weight is not NULL (scale NULL: 1) */
  pmoe_status (*spread)(const pmoe_ctx *ctx, const pmoei_row_map *map, const pmoe_mat *x, pmoe_mat *rows,
                        const float *weight, const float *scale, float *row_weight);
  pmoe_status (*sum)(const pmoe_ctx *ctx, const pmoei_row_map *map, const pmoei_row_sum *sum);
  /* value_tk = row_value[row(t,k)], 0 where there is no row */
  pmoe_status (*pick)(const pmoe_ctx *ctx, const pmoei_row_map *map, const float *row_value, float *value);
  /* whole runs of rows, and of row_value if both are not NULL */
  pmoe_status (*copy_runs)(const pmoe_ctx *ctx, int64_t num_runs, const pmoei_row_run *runs, const pmoe_mat *from,
                           pmoe_mat *to, const float *from_value, float *to_value);
} pmoei_rows_ops;

extern const pmoei_rows_ops pmoei_rows_cpu, pmoei_rows_cuda;

#endif
