/* Dispatch and combine, forward and backward: one movement out to the experts' owners, one back. */
#include <inttypes.h>
#include <string.h>

#include "a2a/a2a.h"
#include "core/check.h"
#include "core/config.h"
#include "core/data.h"

/* ---- staging ---- */

static pmoe_mat staging(pmoei_arena *arena, const pmoe_a2a *a2a, int64_t rows) {
  size_t row_bytes = (size_t)a2a->hidden * pmoe_dtype_size(a2a->dtype);
  return (pmoe_mat){pmoei_take(arena, rows, row_bytes), a2a->dtype, rows, a2a->hidden, a2a->hidden};
}

static void lay_out_staging(pmoei_arena *arena, const pmoe_a2a *a2a, int64_t send_rows, int64_t recv_rows, bool values,
                            pmoei_movement *move) {
  move->sent = staging(arena, a2a, send_rows);
  move->sent_value = pmoei_take(arena, values ? send_rows : 0, sizeof(float));
  move->owned = staging(arena, a2a, recv_rows);
  move->owned_value = pmoei_take(arena, values ? recv_rows : 0, sizeof(float));
  if (!values) move->sent_value = move->owned_value = NULL;
}

size_t pmoei_a2a_scratch_bytes(const pmoe_a2a *a2a, int64_t send_rows, int64_t recv_rows) {
  int32_t ranks = a2a->ep->nranks;
  if (ranks == 1) return 0;
  if (a2a->cfg.sizing == PMOE_SIZING_FIXED) {
    send_rows = 0;
    for (int32_t to = 0; to < ranks; to++) send_rows += pmoei_a2a_bucket(a2a, to);
    recv_rows = pmoei_a2a_bucket(a2a, a2a->ep->rank) * ranks;
  }
  pmoei_movement move;
  pmoei_arena measure = {NULL, 0};
  lay_out_staging(&measure, a2a, send_rows, recv_rows, true, &move);
  return measure.used;
}

/* With one local expert and no padding the exchange's order (by source rank) already is the rows' order. */
static bool lies_as_exchanged(const pmoe_plan *plan, const pmoe_mat *rows) {
  const pmoe_a2a *a2a = plan->a2a;
  return a2a->num_local == 1 && a2a->cfg.sizing == PMOE_SIZING_EAGER && rows->ld == rows->cols;
}

static pmoe_status open_staging(pmoe_plan *plan, pmoe_mat *rows, float *row_value, bool values) {
  pmoei_movement *move = &plan->move;
  move->direct = lies_as_exchanged(plan, rows);
  int64_t owned = move->direct ? 0 : plan->staged_recv;
  pmoei_arena arena = {NULL, 0};
  lay_out_staging(&arena, plan->a2a, plan->staged_send, owned, values, move);
  void *base;
  PMOEI_TRY(pmoei_scratch_open(plan->a2a->ctx, arena.used, &base, &move->scratch));
  arena = (pmoei_arena){base, 0};
  lay_out_staging(&arena, plan->a2a, plan->staged_send, owned, values, move);
  if (move->direct) {
    move->owned = *rows;
    move->owned_value = row_value;
  }
  return PMOE_OK;
}

/* Padding is sent too, so it is defined: zero. */
static pmoe_status zero_padding(const pmoe_a2a *a2a, const int64_t *first, const int64_t *real, const int64_t *count,
                                pmoe_mat *rows, float *value) {
  for (int32_t rank = 0; rank < a2a->ep->nranks; rank++) {
    int64_t pad = count[rank] - real[rank], at = first[rank] + real[rank];
    PMOEI_TRY(pmoei_data_zero_rows(a2a->ctx, rows, at, pad));
    if (value) PMOEI_TRY(pmoei_data_zero(a2a->ctx, value + at, (size_t)pad * sizeof *value));
  }
  return PMOE_OK;
}

/* With constant counts padding lies behind each expert's own rows, which the host does not know. */
static pmoe_status zero_all(const pmoe_a2a *a2a, const pmoe_mat *rows, float *value) {
  if (!a2a->constant) return PMOE_OK;
  PMOEI_TRY(pmoei_data_zero_rows(a2a->ctx, rows, 0, rows->rows));
  return value ? pmoei_data_zero(a2a->ctx, value, (size_t)rows->rows * sizeof *value) : PMOE_OK;
}

/* Whether all blocks of an exchange are of one size. */
static bool is_uniform(const pmoe_a2a *a2a) { return a2a->constant && a2a->num_experts % a2a->ep->nranks == 0; }

static void close_movement(pmoe_plan *plan) {
  if (plan->move.scratch >= 0) pmoei_scratch_close(plan->a2a->ctx, plan->move.scratch);
  memset(&plan->move, 0, sizeof plan->move);
  plan->move.scratch = -1;
}

/* Whether values travel along is the same on every rank, with rows or without. */
static void set_parts(pmoei_exchange *exchange, const pmoe_mat *send, const float *send_value, const pmoe_mat *recv,
                      float *recv_value, bool values) {
  exchange->part[0] = (pmoei_part){send->data, recv->data, (size_t)send->cols * pmoe_dtype_size(send->dtype)};
  exchange->num_parts = 1;
  if (values) exchange->part[exchange->num_parts++] = (pmoei_part){send_value, recv_value, sizeof(float)};
}

/* ---- out: tokens to rows ---- */

static pmoe_status start_out(pmoe_plan *plan, const char *what, const pmoei_row_map *map, const pmoe_mat *x,
                             const float *weight, const float *scale, pmoe_mat *rows, float *row_value) {
  const pmoe_a2a *a2a = plan->a2a;
  pmoei_movement *move = &plan->move;
  move->motion = PMOEI_MOTION_OUT;
  if (a2a->ep->nranks == 1) {
    PMOEI_TRY(zero_all(a2a, rows, row_value));
    return a2a->rows_ops->spread(a2a->ctx, map, x, rows, weight, scale, row_value);
  }
  move->rows = *rows;
  move->row_value = row_value;
  bool values = weight != NULL;
  PMOEI_TRY(open_staging(plan, rows, row_value, values));
  PMOEI_TRY(zero_all(a2a, &move->sent, move->sent_value));
  PMOEI_TRY(a2a->rows_ops->spread(a2a->ctx, map, x, &move->sent, weight, scale, move->sent_value));
  PMOEI_TRY(zero_padding(a2a, plan->send_first, plan->send_real, plan->send_count, &move->sent, move->sent_value));
  move->exchange = (pmoei_exchange){.what = what,
                                    .send_first = plan->send_first,
                                    .send_rows = plan->send_count,
                                    .recv_first = plan->recv_first,
                                    .recv_rows = plan->recv_count,
                                    .uniform = is_uniform(a2a)};
  set_parts(&move->exchange, &move->sent, move->sent_value, &move->owned, move->owned_value, values);
  return pmoei_exchange_start(a2a->ep, &move->exchange);
}

static pmoe_status end_out(pmoe_plan *plan) {
  const pmoe_a2a *a2a = plan->a2a;
  pmoei_movement *move = &plan->move;
  if (move->direct) return PMOE_OK;
  return a2a->rows_ops->copy_runs(a2a->ctx, (int64_t)a2a->num_local * a2a->ep->nranks, plan->runs, &move->owned,
                                  &move->rows, move->owned_value, move->row_value);
}

/* ---- back: rows to tokens ---- */

static pmoe_status start_back(pmoe_plan *plan, const char *what, const pmoei_row_map *map, const pmoe_mat *rows,
                              const float *row_value, const pmoei_row_sum *sum, float *token_value) {
  const pmoe_a2a *a2a = plan->a2a;
  pmoei_movement *move = &plan->move;
  move->motion = PMOEI_MOTION_BACK;
  if (a2a->ep->nranks == 1) {
    pmoei_row_sum here = *sum;
    here.rows = rows;
    PMOEI_TRY(a2a->rows_ops->sum(a2a->ctx, map, &here));
    return token_value ? a2a->rows_ops->pick(a2a->ctx, map, row_value, token_value) : PMOE_OK;
  }
  move->map = *map;
  move->sum = *sum;
  move->tokens = *sum->y;
  if (sum->branch) move->branch = *sum->branch;
  move->token_value = token_value;
  pmoe_mat source = *rows;
  float *source_value = (float *)row_value; /* only read */
  bool values = sum->weight == NULL;        /* backward: the rows' values come back, and the sum needs no weights */
  PMOEI_TRY(open_staging(plan, &source, source_value, values));
  if (!move->direct) {
    PMOEI_TRY(a2a->rows_ops->copy_runs(a2a->ctx, (int64_t)a2a->num_local * a2a->ep->nranks, plan->back_runs, rows,
                                       &move->owned, row_value, move->owned_value));
    PMOEI_TRY(zero_padding(a2a, plan->recv_first, plan->recv_real, plan->recv_count, &move->owned, move->owned_value));
  }
  move->exchange = (pmoei_exchange){.what = what,
                                    .send_first = plan->recv_first,
                                    .send_rows = plan->recv_count,
                                    .recv_first = plan->send_first,
                                    .recv_rows = plan->send_count,
                                    .uniform = is_uniform(a2a)};
  set_parts(&move->exchange, &move->owned, move->owned_value, &move->sent, move->sent_value, values);
  return pmoei_exchange_start(a2a->ep, &move->exchange);
}

static pmoe_status end_back(pmoe_plan *plan) {
  const pmoe_a2a *a2a = plan->a2a;
  pmoei_movement *move = &plan->move;
  move->sum.rows = &move->sent;
  move->sum.y = &move->tokens;
  if (move->sum.branch) move->sum.branch = &move->branch;
  PMOEI_TRY(a2a->rows_ops->sum(a2a->ctx, &move->map, &move->sum));
  if (!move->token_value) return PMOE_OK;
  return a2a->rows_ops->pick(a2a->ctx, &move->map, move->sent_value, move->token_value);
}

/* ---- public ---- */

static pmoe_status check_choices(const pmoe_plan *plan, const pmoe_routing *r) {
  PMOEI_REQUIRE(r->expert && r->slot, "routing->expert or routing->slot is NULL; both were expected");
  if (pmoei_on_device(plan->a2a->ctx)) return PMOE_OK; /* what is there cannot be read here */
  for (int64_t choice = 0; choice < r->tokens * r->top_k; choice++) {
    if (r->slot[choice] < 0) continue;
    int32_t expert = r->expert[choice];
    PMOEI_REQUIRE(expert >= 0 && expert < plan->a2a->num_experts,
                  "routing->expert[%" PRId64 "] is %d; 0 to %d was expected", choice, expert,
                  plan->a2a->num_experts - 1);
    PMOEI_REQUIRE(r->slot[choice] < plan->own_rows[expert],
                  "routing->slot[%" PRId64 "] is %" PRId64 "; the plan was built with %" PRId64 " rows for expert %d",
                  choice, r->slot[choice], plan->own_rows[expert], expert);
  }
  return PMOE_OK;
}

static pmoe_status make_map(const pmoe_plan *plan, const pmoe_routing *routing, pmoei_row_map *map) {
  if (!plan->built) return pmoei_error(PMOE_ERR_STATE, "plan has not been built; call pmoe_plan_build first");
  if (plan->move.motion != PMOEI_MOTION_NONE)
    return pmoei_error(PMOE_ERR_STATE, "plan: a movement is under way; call pmoe_plan_finish first");
  pmoe_routing r;
  PMOEI_TRY(PMOEI_CONFIG_READ(&r, routing));
  PMOEI_REQUIRE(r.tokens == plan->tokens && r.top_k == plan->top_k,
                "routing has %" PRId64 " tokens and top_k %d; the plan was built with %" PRId64 " and %d", r.tokens,
                r.top_k, plan->tokens, plan->top_k);
  PMOEI_TRY(check_choices(plan, &r));
  *map = (pmoei_row_map){r.tokens, r.top_k, r.expert, r.slot, plan->map_first_row};
  return PMOE_OK;
}

/* An error on one rank would leave its peers waiting: they are told. */
static pmoe_status settle(pmoe_plan *plan, pmoe_status status) {
  return status == PMOE_OK ? PMOE_OK : pmoei_comm_fail(plan->a2a->ep, status, NULL);
}

static pmoe_status started(pmoe_plan *plan, pmoe_status status) {
  if (status != PMOE_OK) close_movement(plan);
  return status;
}

static pmoe_status dispatch_forward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *x, pmoe_mat *rows) {
  pmoei_row_map map;
  PMOEI_TRY(make_map(plan, routing, &map));
  PMOEI_TRY(pmoei_check_mat(x, "x", plan->a2a->dtype, plan->tokens, plan->a2a->hidden));
  PMOEI_TRY(pmoei_check_mat(rows, "rows", plan->a2a->dtype, plan->recv_rows, plan->a2a->hidden));
  return started(plan, start_out(plan, "pmoe: dispatch forward", &map, x, NULL, NULL, rows, NULL));
}

pmoe_status pmoe_dispatch_forward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *x, pmoe_mat *rows,
                                  pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(plan);
  PMOEI_TRY(pmoei_ctx_enter(plan->a2a->ctx, stream));
  return settle(plan, dispatch_forward(plan, routing, x, rows));
}

static pmoe_status combine_forward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *rows,
                                   const pmoe_branch *branch, pmoe_mat *y) {
  const pmoe_a2a *a2a = plan->a2a;
  pmoei_row_map map;
  PMOEI_TRY(make_map(plan, routing, &map));
  PMOEI_TRY(pmoei_check_mat(rows, "rows", a2a->dtype, plan->recv_rows, a2a->hidden));
  PMOEI_TRY(pmoei_check_mat_or_f32(y, "y", a2a->dtype, plan->tokens, a2a->hidden));
  PMOEI_REQUIRE(routing->weight != NULL, "routing->weight is NULL; a pointer was expected");
  pmoei_row_sum sum = {.weight = routing->weight, .y = y};
  if (branch) {
    if (branch->branch)
      PMOEI_TRY(pmoei_check_mat_or_f32(branch->branch, "branch->branch", a2a->dtype, plan->tokens, a2a->hidden));
    sum.scale = branch->scale;
    sum.branch_scale = branch->branch_scale;
    sum.branch = branch->branch;
  }
  return started(plan, start_back(plan, "pmoe: combine forward", &map, rows, NULL, &sum, NULL));
}

pmoe_status pmoe_combine_forward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *rows,
                                 const pmoe_branch *branch, pmoe_mat *y, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(plan);
  PMOEI_TRY(pmoei_ctx_enter(plan->a2a->ctx, stream));
  return settle(plan, combine_forward(plan, routing, rows, branch, y));
}

static pmoe_status combine_backward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *dy,
                                    const float *scale, pmoe_mat *drows, float *row_weight) {
  const pmoe_a2a *a2a = plan->a2a;
  pmoei_row_map map;
  PMOEI_TRY(make_map(plan, routing, &map));
  PMOEI_TRY(pmoei_check_mat(dy, "dy", a2a->dtype, plan->tokens, a2a->hidden));
  PMOEI_TRY(pmoei_check_mat(drows, "drows", a2a->dtype, plan->recv_rows, a2a->hidden));
  PMOEI_REQUIRE(routing->weight != NULL, "routing->weight is NULL; a pointer was expected");
  PMOEI_REQUIRE(row_weight || plan->recv_rows == 0, "row_weight is NULL; a pointer was expected");
  return started(plan, start_out(plan, "pmoe: combine backward", &map, dy, routing->weight, scale, drows, row_weight));
}

pmoe_status pmoe_combine_backward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *dy, const float *scale,
                                  pmoe_mat *drows, float *row_weight, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(plan);
  PMOEI_TRY(pmoei_ctx_enter(plan->a2a->ctx, stream));
  return settle(plan, combine_backward(plan, routing, dy, scale, drows, row_weight));
}

static pmoe_status dispatch_backward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *drows,
                                     const float *drow_weight, pmoe_mat *dx, float *dweight) {
  const pmoe_a2a *a2a = plan->a2a;
  pmoei_row_map map;
  PMOEI_TRY(make_map(plan, routing, &map));
  PMOEI_TRY(pmoei_check_mat(drows, "drows", a2a->dtype, plan->recv_rows, a2a->hidden));
  PMOEI_TRY(pmoei_check_mat_or_f32(dx, "dx", a2a->dtype, plan->tokens, a2a->hidden));
  PMOEI_REQUIRE(drow_weight || plan->recv_rows == 0, "drow_weight is NULL; a pointer was expected");
  PMOEI_REQUIRE(dweight || plan->tokens == 0, "dweight is NULL; a pointer was expected");
  pmoei_row_sum sum = {.y = dx};
  return started(plan, start_back(plan, "pmoe: dispatch backward", &map, drows, drow_weight, &sum, dweight));
}

pmoe_status pmoe_dispatch_backward(pmoe_plan *plan, const pmoe_routing *routing, const pmoe_mat *drows,
                                   const float *drow_weight, pmoe_mat *dx, float *dweight, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(plan);
  PMOEI_TRY(pmoei_ctx_enter(plan->a2a->ctx, stream));
  return settle(plan, dispatch_backward(plan, routing, drows, drow_weight, dx, dweight));
}

pmoe_status pmoe_plan_finish(pmoe_plan *plan, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(plan);
  PMOEI_TRY(pmoei_ctx_enter(plan->a2a->ctx, stream));
  pmoei_movement *move = &plan->move;
  if (move->motion == PMOEI_MOTION_NONE)
    return pmoei_error(PMOE_ERR_STATE, "pmoe_plan_finish: no movement is under way");
  pmoe_status status = PMOE_OK;
  if (plan->a2a->ep->nranks > 1) {
    status = pmoei_exchange_finish(plan->a2a->ep, &move->exchange);
    if (status == PMOE_OK) status = move->motion == PMOEI_MOTION_OUT ? end_out(plan) : end_back(plan);
  }
  close_movement(plan);
  return settle(plan, status);
}
