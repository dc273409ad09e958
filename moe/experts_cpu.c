/* Experts on the CPU. Tasks are (expert, block of rows) for everything that goes along rows, and (expert, block of a
 * weight's output features) for weight gradients, each the whole sum over the expert's rows: the split depends on sizes
 * alone, never on threads. */
#include <stdbool.h>
#include <string.h>

#include "core/dtype.h"
#include "core/gemm.h"
#include "core/parallel.h"
#include "core/simd.h"
#include "moe/activation.h"
#include "moe/ops.h"

enum {
  ROW_BLOCK = 256,
  GRAD_BLOCK = 1 << 18, /* elements of one weight-gradient task: small enough to balance, large enough for full speed */
  SUM_COLUMNS = 512,
  SUM_ROWS = 256
};

/* Rows of one expert, neighbours in every [R,...] matrix. */
typedef struct span {
  int64_t first, rows;
  int32_t expert;
} span;

typedef struct experts_run {
  const pmoei_experts_call *call;
  const pmoe_experts *experts;
  pmoe_mat pre, dpre; /* as given, or from scratch; data NULL: not kept */
  span *row_tasks;    /* of ROW_BLOCK rows at most */
  span *spans;        /* experts that have rows */
  char *tiles;        /* per thread: the activation and (when it is not kept) its pre-activation; or dact in float32 */
  size_t tile_bytes;
  int64_t tile_rows, num_row_tasks, num_spans, num_grad_tasks;
  bool dx_now; /* backward: the row tasks go on to dx */
  bool grad_fc1, grad_fc2;
  int32_t handle;
} experts_run;

typedef enum run_kind { RUN_FORWARD, RUN_BACKWARD } run_kind;

/* Lays out scratch. Upper bounds by `rows` alone, so that measuring for the layer and carving for a call are one. */
static void lay_out(experts_run *run, pmoei_arena *arena, run_kind kind, int64_t rows, bool own_pre, bool own_dpre) {
  const pmoe_experts *x = run->experts;
  size_t size = pmoe_dtype_size(x->cfg.dtype);
  int64_t tasks = x->num_experts + rows / ROW_BLOCK;
  run->row_tasks = pmoei_take(arena, tasks, sizeof *run->row_tasks);
  run->spans = pmoei_take(arena, x->num_experts, sizeof *run->spans);
  run->tile_rows = rows < ROW_BLOCK ? rows : ROW_BLOCK;
  pmoei_arena tile = {NULL, 0};
  if (kind == RUN_FORWARD) {
    pmoei_take(&tile, run->tile_rows * x->inner, size);
    if (own_pre) pmoei_take(&tile, run->tile_rows * x->inner1, size);
  } else {
    pmoei_take(&tile, run->tile_rows * x->inner, sizeof(float));
    if (own_pre) run->pre.data = pmoei_take(arena, rows, (size_t)x->inner1 * size);
    if (own_dpre) run->dpre.data = pmoei_take(arena, rows, (size_t)x->inner1 * size);
  }
  run->tile_bytes = tile.used;
  run->tiles = pmoei_take(arena, x->ctx->threads < tasks ? x->ctx->threads : tasks, tile.used);
}

static size_t experts_scratch(const pmoe_experts *experts, int64_t rows) {
  if (rows == 0) return 0;
  pmoei_arena forward = {NULL, 0}, backward = {NULL, 0};
  experts_run run = {.experts = experts};
  lay_out(&run, &forward, RUN_FORWARD, rows, true, false);
  lay_out(&run, &backward, RUN_BACKWARD, rows, experts->cfg.recompute_act != 0, true);
  return forward.used > backward.used ? forward.used : backward.used;
}

/* Most rows first, otherwise as they lie in memory, where neighbours share weights. Shell's sort: no memory, and few
 * spans. */
static void sort_largest_first(span *spans, int64_t n) {
  for (int64_t gap = n / 2; gap > 0; gap /= 2) {
    for (int64_t i = gap; i < n; i++) {
      span s = spans[i];
      int64_t j = i;
      for (; j >= gap; j -= gap) {
        const span *t = &spans[j - gap];
        if (t->rows > s.rows || (t->rows == s.rows && t->first < s.first)) break;
        spans[j] = *t;
      }
      spans[j] = s;
    }
  }
}

static void make_tasks(experts_run *run) {
  const int64_t *rows = run->call->rows;
  int64_t first = 0;
  for (int32_t e = 0; e < run->experts->num_experts; e++) {
    if (rows[e] > 0) run->spans[run->num_spans++] = (span){first, rows[e], e};
    for (int64_t r = 0; r < rows[e]; r += ROW_BLOCK) {
      int64_t n = rows[e] - r < ROW_BLOCK ? rows[e] - r : ROW_BLOCK;
      run->row_tasks[run->num_row_tasks++] = (span){first + r, n, e};
    }
    first += rows[e];
  }
  sort_largest_first(run->row_tasks, run->num_row_tasks);
  sort_largest_first(run->spans, run->num_spans);
}

static pmoe_status start(experts_run *run, const pmoei_experts_call *call, run_kind kind) {
  const pmoe_experts *x = call->experts;
  run->call = call;
  run->experts = x;
  int64_t rows = call->x->rows;
  pmoe_mat none = {NULL, x->cfg.dtype, rows, x->inner1, x->inner1};
  run->pre = call->pre ? *call->pre : none;
  run->dpre = call->dpre ? *call->dpre : none;
  pmoei_arena arena = {NULL, 0};
  lay_out(run, &arena, kind, rows, !call->pre, !call->dpre);
  void *base;
  PMOEI_TRY(pmoei_scratch_open(x->ctx, arena.used, &base, &run->handle));
  arena = (pmoei_arena){base, 0};
  lay_out(run, &arena, kind, rows, !call->pre, !call->dpre);
  make_tasks(run);
  return PMOE_OK;
}

static pmoe_status finish(experts_run *run) {
  pmoei_scratch_close(run->experts->ctx, run->handle);
  return pmoei_gemm_take_error(run->experts->ctx->gemm);
}

static pmoe_mat rows_of(const pmoe_mat *mat, int64_t first, int64_t rows) {
  return (pmoe_mat){pmoei_row(mat, first), mat->dtype, rows, mat->cols, mat->ld};
}

/* NULL stays NULL. */
static void *offset(const void *p, pmoe_dtype dtype, int64_t elements) {
  return p ? (char *)p + (size_t)elements * pmoe_dtype_size(dtype) : NULL;
}

/* The expert's part of a parameter with `count` elements per expert. */
static void *part(const void *p, pmoe_dtype dtype, int32_t expert, int64_t count) {
  return offset(p, dtype, expert * count);
}

/* c = a · op(w), w row-major with `w_cols` columns. */
static void multiply(const experts_run *run, int32_t thread, const pmoe_mat *a, const void *w, int64_t w_cols,
                     bool trans, bool accumulate, const pmoe_mat *c) {
  pmoei_product p = {.trans_b = trans, .accumulate = accumulate, .in = a->dtype, .out = c->dtype};
  p.m = a->rows, p.k = a->cols, p.n = c->cols;
  p.a = a->data, p.b = w, p.c = c->data;
  p.lda = a->ld, p.ldb = w_cols, p.ldc = c->ld;
  pmoei_gemm_run(run->experts->ctx->gemm, thread, &p);
}

static void compute_pre(const experts_run *run, const span *t, int32_t thread, const pmoe_mat *pre) {
  const pmoe_experts *x = run->experts;
  const void *w1 = part(run->call->params.fc1_weight, x->cfg.dtype, t->expert, x->inner1 * x->hidden);
  pmoe_mat in = rows_of(run->call->x, t->first, t->rows);
  multiply(run, thread, &in, w1, x->hidden, true, false, pre);
}

static void forward_task(void *arg, int64_t index, int32_t thread) {
  const experts_run *run = arg;
  const pmoe_experts *x = run->experts;
  const span *t = &run->row_tasks[index];
  pmoe_dtype dtype = x->cfg.dtype;
  char *tile = run->tiles + (size_t)thread * run->tile_bytes;
  pmoei_arena arena = {tile, 0};
  pmoe_mat a = {NULL, dtype, t->rows, x->inner, x->inner};
  a.data = pmoei_take(&arena, run->tile_rows * x->inner, pmoe_dtype_size(dtype));
  pmoe_mat pre = {arena.base + arena.used, dtype, t->rows, x->inner1, x->inner1};
  if (run->pre.data) pre = rows_of(&run->pre, t->first, t->rows);
  compute_pre(run, t, thread, &pre);
  pmoei_activation_forward(x->cfg.act, x->inner, &pre, part(run->call->params.fc1_bias, dtype, t->expert, x->inner1),
                           &a);
  pmoe_mat y = rows_of(run->call->y, t->first, t->rows);
  const void *b2 = part(run->call->params.fc2_bias, dtype, t->expert, x->hidden);
  for (int64_t r = 0; b2 && r < t->rows; r++) memcpy(pmoei_row(&y, r), b2, (size_t)x->hidden * pmoe_dtype_size(dtype));
  const void *w2 = part(run->call->params.fc2_weight, dtype, t->expert, x->hidden * x->inner);
  multiply(run, thread, &a, w2, x->inner, true, b2 != NULL, &y);
}

static pmoe_status experts_forward(const pmoei_experts_call *call, pmoe_stream stream) {
  (void)stream;
  experts_run run = {0};
  PMOEI_TRY(start(&run, call, RUN_FORWARD));
  pmoei_parallel(run.experts->ctx, run.num_row_tasks, forward_task, &run);
  return finish(&run);
}

static void dx_task(const experts_run *run, const span *t, int32_t thread) {
  const pmoe_experts *x = run->experts;
  const void *w1 = part(run->call->params.fc1_weight, x->cfg.dtype, t->expert, x->inner1 * x->hidden);
  pmoe_mat dpre = rows_of(&run->dpre, t->first, t->rows), dx = rows_of(run->call->dx, t->first, t->rows);
  multiply(run, thread, &dpre, w1, x->hidden, false, false, &dx);
}

PMOEI_VECTORISED static float dot_f32(int64_t n, const float *a, const float *b) {
  float sum = 0;
  PMOEI_SIMD_SUM(sum) for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

PMOEI_VECTORISED static float dot_bf16(int64_t n, const pmoei_bf16 *a, const pmoei_bf16 *b) {
  float sum = 0;
  PMOEI_SIMD_SUM(sum) for (int64_t i = 0; i < n; i++) sum += pmoei_bf16_to_f32(a[i]) * pmoei_bf16_to_f32(b[i]);
  return sum;
}

/* dy_r . y_r has a part from the bias of y, which the activation side does not see. */
static void add_bias_part(const pmoe_mat *dy, const void *b2, float *drow_weight) {
  for (int64_t r = 0; r < dy->rows; r++)
    drow_weight[r] +=
        dy->dtype == PMOE_F32 ? dot_f32(dy->cols, pmoei_row(dy, r), b2) : dot_bf16(dy->cols, pmoei_row(dy, r), b2);
}

static void backward_task(void *arg, int64_t index, int32_t thread) {
  const experts_run *run = arg;
  const pmoe_experts *x = run->experts;
  const span *t = &run->row_tasks[index];
  pmoe_dtype dtype = x->cfg.dtype;
  pmoe_mat pre = rows_of(&run->pre, t->first, t->rows), dpre = rows_of(&run->dpre, t->first, t->rows);
  if (x->cfg.recompute_act) compute_pre(run, t, thread, &pre);
  pmoe_mat dact = {run->tiles + (size_t)thread * run->tile_bytes, PMOE_F32, t->rows, x->inner, x->inner};
  pmoe_mat dy = rows_of(run->call->dy, t->first, t->rows);
  const void *w2 = part(run->call->params.fc2_weight, dtype, t->expert, x->hidden * x->inner);
  multiply(run, thread, &dy, w2, x->inner, false, false, &dact);
  pmoei_activation_grad grad = {
      .act = x->cfg.act, .inner = x->inner, .rows = t->rows, .dact = &dact, .pre = &pre, .dpre = &dpre};
  grad.bias = part(run->call->params.fc1_bias, dtype, t->expert, x->inner1);
  if (run->call->row_weight) grad.row_weight = run->call->row_weight + t->first;
  if (run->call->drow_weight) grad.drow_weight = run->call->drow_weight + t->first;
  pmoei_activation_backward(&grad);
  const void *b2 = part(run->call->params.fc2_bias, dtype, t->expert, x->hidden);
  if (b2 && grad.drow_weight) add_bias_part(&dy, b2, grad.drow_weight);
  if (run->dx_now) dx_task(run, t, thread);
}

PMOEI_VECTORISED static void add_row_f32(int64_t n, const float *row, float weight, float *restrict sum) {
  for (int64_t i = 0; i < n; i++) sum[i] += weight * row[i];
}

PMOEI_VECTORISED static void add_row_bf16(int64_t n, const pmoei_bf16 *row, float weight, float *restrict sum) {
  for (int64_t i = 0; i < n; i++) sum[i] += weight * pmoei_bf16_to_f32(row[i]);
}

/* grad += the sum of the rows, each times its weight: in blocks of rows, so that the error of long sums stays small. */
static void sum_rows(const pmoe_mat *rows, const float *weight, void *grad, pmoe_dtype grad_dtype) {
  size_t size = pmoe_dtype_size(rows->dtype);
  for (int64_t j = 0; j < rows->cols; j += SUM_COLUMNS) {
    int64_t n = rows->cols - j < SUM_COLUMNS ? rows->cols - j : SUM_COLUMNS;
    float total[SUM_COLUMNS] = {0}, old[SUM_COLUMNS];
    for (int64_t r0 = 0; r0 < rows->rows; r0 += SUM_ROWS) {
      int64_t end = rows->rows - r0 < SUM_ROWS ? rows->rows : r0 + SUM_ROWS;
      float sum[SUM_COLUMNS] = {0};
      for (int64_t r = r0; r < end; r++) {
        const void *row = (const char *)pmoei_row(rows, r) + (size_t)j * size;
        float w = weight ? weight[r] : 1.0f;
        if (rows->dtype == PMOE_F32) add_row_f32(n, row, w, sum);
        else add_row_bf16(n, row, w, sum);
      }
      add_row_f32(n, sum, 1.0f, total);
    }
    void *to = (char *)grad + (size_t)j * pmoe_dtype_size(grad_dtype);
    pmoei_to_f32(old, to, grad_dtype, n);
    add_row_f32(n, old, 1.0f, total);
    pmoei_from_f32(to, grad_dtype, total, n);
  }
}

/* One weight's gradient: out-features [first, first + outs) of dout [rows,outs]ᵀ · in [rows,ins], and the bias's. */
typedef struct grad_side {
  pmoe_mat dout, in;
  void *weight_grad, *bias_grad;
  const float *bias_weight;
} grad_side;

static void grad_block(const experts_run *run, int32_t thread, const grad_side *side, int64_t block,
                       int64_t block_outs) {
  pmoe_dtype dtype = side->dout.dtype, grad_dtype = run->experts->cfg.grad_dtype;
  int64_t first = block * block_outs,
          outs = side->dout.cols - first < block_outs ? side->dout.cols - first : block_outs;
  pmoe_mat dout = side->dout;
  dout.data = offset(dout.data, dtype, first);
  dout.cols = outs;
  pmoei_product p = {.trans_a = true, .accumulate = true, .in = dtype, .out = grad_dtype};
  p.m = outs, p.k = dout.rows, p.n = side->in.cols;
  p.a = dout.data, p.b = side->in.data, p.c = offset(side->weight_grad, grad_dtype, first * p.n);
  p.lda = dout.ld, p.ldb = side->in.ld, p.ldc = p.n;
  pmoei_gemm_run(run->experts->ctx->gemm, thread, &p);
  if (side->bias_grad) sum_rows(&dout, side->bias_weight, offset(side->bias_grad, grad_dtype, first), grad_dtype);
}

/* Out-features per block of a weight gradient with `ins` columns. */
static int64_t block_outs(int64_t ins) { return GRAD_BLOCK / ins < 64 ? 64 : GRAD_BLOCK / ins / 64 * 64; }
static int64_t num_blocks(int64_t outs, int64_t ins) { return (outs + block_outs(ins) - 1) / block_outs(ins); }

static void grad_task(const experts_run *run, int64_t index, int32_t thread) {
  const pmoe_experts *x = run->experts;
  const pmoei_experts_call *call = run->call;
  pmoe_dtype grad_dtype = x->cfg.grad_dtype;
  int64_t blocks2 = run->grad_fc2 ? num_blocks(x->hidden, x->inner) : 0;
  int64_t blocks1 = run->grad_fc1 ? num_blocks(x->inner1, x->hidden) : 0;
  const span *s = &run->spans[index / (blocks1 + blocks2)];
  int64_t block = index % (blocks1 + blocks2);
  grad_side side;
  if (block < blocks2) {
    side.dout = rows_of(call->dy, s->first, s->rows);
    side.in = rows_of(&run->pre, s->first, s->rows);
    side.in.cols = x->inner;
    side.weight_grad = part(call->params.fc2_weight_grad, grad_dtype, s->expert, x->hidden * x->inner);
    side.bias_grad =
        part(x->cfg.bias && !x->no_output_bias ? call->params.fc2_bias_grad : NULL, grad_dtype, s->expert, x->hidden);
    side.bias_weight = call->row_weight ? call->row_weight + s->first : NULL;
    /* pre holds weighted activations: dy itself needs no weight, except for the bias */
    grad_block(run, thread, &side, block, block_outs(x->inner));
  } else {
    side.dout = rows_of(&run->dpre, s->first, s->rows);
    side.in = rows_of(call->x, s->first, s->rows);
    side.weight_grad = part(call->params.fc1_weight_grad, grad_dtype, s->expert, x->inner1 * x->hidden);
    side.bias_grad = part(x->cfg.bias ? call->params.fc1_bias_grad : NULL, grad_dtype, s->expert, x->inner1);
    side.bias_weight = NULL; /* dpre is weighted already */
    grad_block(run, thread, &side, block - blocks2, block_outs(x->hidden));
  }
}

/* Weight-gradient tasks, then (when dx had to wait) row tasks. */
static void late_task(void *arg, int64_t index, int32_t thread) {
  const experts_run *run = arg;
  if (index < run->num_grad_tasks) grad_task(run, index, thread);
  else dx_task(run, &run->row_tasks[index - run->num_grad_tasks], thread);
}

static void run_late(experts_run *run, bool fc1, bool fc2, bool dx) {
  const pmoe_experts *x = run->experts;
  run->grad_fc1 = fc1;
  run->grad_fc2 = fc2;
  int64_t blocks = (fc1 ? num_blocks(x->inner1, x->hidden) : 0) + (fc2 ? num_blocks(x->hidden, x->inner) : 0);
  run->num_grad_tasks = run->num_spans * blocks;
  pmoei_parallel(x->ctx, run->num_grad_tasks + (dx ? run->num_row_tasks : 0), late_task, run);
}

static pmoe_status experts_backward(const pmoei_experts_call *call, pmoe_bwd which, pmoe_stream stream) {
  (void)stream;
  experts_run run = {0};
  PMOEI_TRY(start(&run, call, RUN_BACKWARD));
  bool dx_over_dy = which == PMOE_BWD_ALL && call->dx->data == call->dy->data; /* then dy's last reader comes first */
  run.dx_now = !dx_over_dy;
  if (which != PMOE_BWD_WEIGHT) pmoei_parallel(run.experts->ctx, run.num_row_tasks, backward_task, &run);
  if (dx_over_dy) {
    run_late(&run, false, true, false);
    run_late(&run, true, false, true);
  } else if (which != PMOE_BWD_INPUT) {
    run_late(&run, true, true, false);
  }
  return finish(&run);
}

const pmoei_moe_ops pmoei_moe_cpu = {
    experts_forward,
    experts_backward,
    experts_scratch,
    pmoei_mix_forward_cpu,
    pmoei_mix_backward_input_cpu,
    pmoei_mix_backward_weight_cpu,
};
