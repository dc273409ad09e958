/* Experts on CUDA: cuBLAS for the products, a sweep between them. Matrices between products are those of all experts;
 * the gradient of the activation is formed where dpre will be. */
#include "moe/experts_cuda.h"
#include "core/cuda.h"
#include "moe/activation.h"
#include "moe/residual_cuda.h"

typedef struct experts_run {
  const pmoei_experts_call *call;
  const pmoe_experts *experts;
  pmoe_mat pre, dpre, a;  /* as given, or from scratch */
  pmoei_product *product; /* [num_experts] */
  int32_t frame;
} experts_run;

static pmoe_mat take(pmoei_arena *arena, pmoe_dtype dtype, int64_t rows, int64_t cols) {
  return (pmoe_mat){pmoei_take(arena, rows * cols, pmoe_dtype_size(dtype)), dtype, rows, cols, cols};
}

/* Without a pre to keep, the activation is formed on its place. */
static void lay_out(experts_run *run, pmoei_arena *arena, int64_t rows, bool forward, bool own_pre, bool own_dpre) {
  const pmoe_experts *x = run->experts;
  if (own_pre) run->pre = take(arena, x->cfg.dtype, rows, x->inner1);
  if (forward && !own_pre) run->a = take(arena, x->cfg.dtype, rows, x->inner);
  if (!forward && own_dpre) run->dpre = take(arena, x->cfg.dtype, rows, x->inner1);
  if (!forward || !own_pre) return;
  run->a = run->pre;
  run->a.cols = x->inner;
}

static size_t experts_scratch(const pmoe_experts *experts, int64_t rows) {
  experts_run run = {.experts = experts};
  pmoei_arena forward = {NULL, 0}, kept = {NULL, 0}, backward = {NULL, 0};
  lay_out(&run, &forward, rows, true, true, false);
  lay_out(&run, &kept, rows, true, false, false);
  lay_out(&run, &backward, rows, false, experts->cfg.recompute_act != 0, true);
  size_t most = forward.used > kept.used ? forward.used : kept.used;
  return most > backward.used ? most : backward.used;
}

static pmoe_status start(experts_run *run, const pmoei_experts_call *call, bool forward) {
  const pmoe_experts *x = call->experts;
  *run = (experts_run){.call = call, .experts = x, .product = x->product, .frame = -1};
  if (call->pre) run->pre = *call->pre;
  if (call->dpre) run->dpre = *call->dpre;
  pmoei_arena arena = {NULL, 0};
  lay_out(run, &arena, call->x->rows, forward, !call->pre, !call->dpre);
  void *base;
  PMOEI_TRY(pmoei_scratch_open(x->ctx, arena.used, &base, &run->frame));
  lay_out(run, &(pmoei_arena){base, 0}, call->x->rows, forward, !call->pre, !call->dpre);
  return PMOE_OK;
}

static pmoe_status finish(experts_run *run, pmoe_status status) {
  if (run->frame >= 0) pmoei_scratch_close(run->experts->ctx, run->frame);
  return status;
}

/* ---- products over all experts ---- */

/* c = a op(w) for each expert's rows, w [w_rows,w_cols] row-major. */
static pmoe_status along_rows(experts_run *run, const pmoe_mat *a, const void *w, int64_t w_rows, int64_t w_cols,
                              bool trans, bool accumulate, const pmoe_mat *c) {
  int64_t first = 0;
  for (int32_t e = 0; e < run->experts->num_experts; e++) {
    int64_t rows = run->call->rows[e];
    run->product[e] = (pmoei_product){.trans_b = trans, .accumulate = accumulate, .in = a->dtype, .out = c->dtype};
    pmoei_product *p = &run->product[e];
    p->m = rows, p->n = c->cols, p->k = a->cols;
    p->a = pmoei_row(a, first), p->lda = a->ld;
    p->b = (const char *)w + (size_t)(e * w_rows * w_cols) * pmoe_dtype_size(a->dtype), p->ldb = w_cols;
    p->c = pmoei_row(c, first), p->ldc = c->ld;
    first += rows;
  }
  return pmoei_cuda_products(run->experts->ctx, run->product, run->experts->num_experts);
}

/* grad [a's cols, b's cols] += aᵀ b over each expert's rows. */
static pmoe_status over_rows(experts_run *run, const pmoe_mat *a, const pmoe_mat *b, void *grad) {
  pmoe_dtype out = run->experts->cfg.grad_dtype;
  int64_t first = 0;
  for (int32_t e = 0; e < run->experts->num_experts; e++) {
    int64_t rows = run->call->rows[e];
    run->product[e] = (pmoei_product){.trans_a = true, .accumulate = true, .in = a->dtype, .out = out};
    pmoei_product *p = &run->product[e];
    p->m = a->cols, p->n = b->cols, p->k = rows;
    p->a = pmoei_row(a, first), p->lda = a->ld;
    p->b = pmoei_row(b, first), p->ldb = b->ld;
    p->c = (char *)grad + (size_t)(e * a->cols * b->cols) * pmoe_dtype_size(out), p->ldc = b->cols;
    first += rows;
  }
  return pmoei_cuda_products(run->experts->ctx, run->product, run->experts->num_experts);
}

static pmoe_status compute_pre(experts_run *run) {
  const pmoe_experts *x = run->experts;
  return along_rows(run, run->call->x, run->call->params.fc1_weight, x->inner1, x->hidden, true, false, &run->pre);
}

/* ---- the table's entries ---- */

static pmoe_status forward(experts_run *run) {
  const pmoei_experts_call *call = run->call;
  const pmoe_experts *x = run->experts;
  PMOEI_TRY(compute_pre(run));
  PMOEI_TRY(pmoei_cuda_activate(call, &run->pre, &run->a));
  bool bias = call->params.fc2_bias != NULL;
  if (bias) PMOEI_TRY(pmoei_cuda_fill_bias(call));
  return along_rows(run, &run->a, call->params.fc2_weight, x->hidden, x->inner, true, bias, call->y);
}

static pmoe_status experts_forward(const pmoei_experts_call *call, pmoe_stream stream) {
  (void)stream;
  experts_run run;
  pmoe_status status = start(&run, call, true);
  return finish(&run, status == PMOE_OK ? forward(&run) : status);
}

static pmoe_status backward_act(experts_run *run) {
  const pmoei_experts_call *call = run->call;
  const pmoe_experts *x = run->experts;
  if (x->cfg.recompute_act) PMOEI_TRY(compute_pre(run));
  pmoe_mat dact = run->dpre;
  dact.cols = x->inner;
  PMOEI_TRY(along_rows(run, call->dy, call->params.fc2_weight, x->hidden, x->inner, false, false, &dact));
  return pmoei_cuda_activate_backward(call, &run->pre, &run->dpre);
}

static pmoe_status backward_dx(experts_run *run) {
  const pmoe_experts *x = run->experts;
  return along_rows(run, &run->dpre, run->call->params.fc1_weight, x->inner1, x->hidden, false, false, run->call->dx);
}

/* pre's first columns hold the weighted activation. */
static pmoe_status backward_fc2(experts_run *run) {
  const pmoei_experts_call *call = run->call;
  pmoe_mat a = run->pre;
  a.cols = run->experts->inner;
  PMOEI_TRY(over_rows(run, call->dy, &a, call->params.fc2_weight_grad));
  if (!call->params.fc2_bias_grad || !run->experts->cfg.bias) return PMOE_OK;
  return pmoei_cuda_sum_rows(call, call->dy, call->row_weight, call->params.fc2_bias_grad);
}

static pmoe_status backward_fc1(experts_run *run) {
  const pmoei_experts_call *call = run->call;
  PMOEI_TRY(over_rows(run, &run->dpre, call->x, call->params.fc1_weight_grad));
  if (!run->experts->cfg.bias) return PMOE_OK;
  return pmoei_cuda_sum_rows(call, &run->dpre, NULL, call->params.fc1_bias_grad);
}

static pmoe_status backward(experts_run *run, pmoe_bwd which) {
  bool dx_over_dy = which == PMOE_BWD_ALL && run->call->dx->data == run->call->dy->data;
  if (which != PMOE_BWD_WEIGHT) PMOEI_TRY(backward_act(run));
  if (dx_over_dy) PMOEI_TRY(backward_fc2(run)); /* dy's last reader */
  if (which != PMOE_BWD_WEIGHT) PMOEI_TRY(backward_dx(run));
  if (which != PMOE_BWD_INPUT && !dx_over_dy) PMOEI_TRY(backward_fc2(run));
  return which != PMOE_BWD_INPUT ? backward_fc1(run) : PMOE_OK;
}

static pmoe_status experts_backward(const pmoei_experts_call *call, pmoe_bwd which, pmoe_stream stream) {
  (void)stream;
  experts_run run;
  pmoe_status status = start(&run, call, false);
  return finish(&run, status == PMOE_OK ? backward(&run, which) : status);
}

const pmoei_moe_ops pmoei_moe_cuda = {
    .experts_forward = experts_forward,
    .experts_backward = experts_backward,
    .experts_scratch = experts_scratch,
    .mix_forward = pmoei_mix_forward_cuda,
    .mix_backward_input = pmoei_mix_backward_input_cuda,
    .mix_backward_weight = pmoei_mix_backward_weight_cuda,
};
