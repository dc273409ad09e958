#include "moe/tensor_parallel.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/check.h"
#include "core/data.h"
#include "core/dtype.h"
#include "moe/layer.h"

bool pmoei_tp_used(const pmoe_layer *layer) { return layer->replicated || layer->sharded_branch; }

/* ---- agreement ---- */

pmoei_tokens pmoei_tp_most_tokens(const pmoe_layer *layer, int64_t max_tokens) {
  int32_t tp = layer->groups.tp->nranks;
  pmoei_tokens most = {max_tokens, max_tokens, max_tokens};
  if (layer->replicated) most.own = pmoei_block_of(max_tokens, tp, layer->groups.tp->rank).count;
  if (!layer->sharded_branch) most.branch = most.own;
  else if (!layer->replicated) most.branch = max_tokens * tp;
  return most;
}

/* Different tokens on every rank: each hears how many the others bring, and that a stash has room for them. */
static pmoe_status share_counts(pmoe_layer *layer, pmoe_stash *stash, int64_t given) {
  pmoe_comm *tp = layer->groups.tp;
  const int64_t mine[2] = {given, stash->cfg.max_tokens};
  PMOEI_TRY(pmoei_allgather(tp, "pmoe: tokens of the tensor-parallel group", mine, layer->tp_counts, sizeof mine));
  int64_t total = 0, least = INT64_MAX;
  for (int32_t p = 0; p < tp->nranks; p++) {
    stash->tp_tokens[p] = layer->tp_counts[2 * p];
    total += layer->tp_counts[2 * p];
    if (layer->tp_counts[2 * p + 1] < least) least = layer->tp_counts[2 * p + 1];
  }
  PMOEI_REQUIRE(total <= least * tp->nranks,
                "the tensor-parallel group brings %" PRId64 " tokens; a stash of it was made for max_tokens %" PRId64
                ", which has room for %" PRId64,
                total, least, least * tp->nranks);
  stash->tokens = (pmoei_tokens){given, given, total};
  return PMOE_OK;
}

pmoe_status pmoei_tp_meet(pmoe_layer *layer, pmoe_stash *stash, int64_t given, pmoe_status mine) {
  pmoe_comm *tp = layer->groups.tp;
  char what[PMOEI_WHAT_BYTES];
  if (layer->replicated)
    snprintf(what, sizeof what, "pmoe_layer_forward (layer %d, %" PRId64 " tokens)", layer->cfg.layer_id, given);
  else snprintf(what, sizeof what, "pmoe_layer_forward (layer %d)", layer->cfg.layer_id);
  if (pmoei_tp_used(layer)) mine = pmoei_comm_agree_in_step(tp, what, mine);
  PMOEI_TRY(mine);
  if (!layer->replicated && layer->sharded_branch) return share_counts(layer, stash, given);
  stash->tokens = (pmoei_tokens){given, given, given};
  if (!layer->replicated) return PMOE_OK;
  for (int32_t p = 0; p < tp->nranks; p++) stash->tp_tokens[p] = pmoei_block_of(given, tp->nranks, p).count;
  stash->tokens.own = stash->tp_tokens[tp->rank];
  if (!layer->sharded_branch) stash->tokens.branch = stash->tokens.own;
  return PMOE_OK;
}

pmoe_status pmoei_tp_settle(pmoe_layer *layer, const char *what, pmoe_status mine) {
  if (!pmoei_tp_used(layer) || layer->groups.tp_inside_exchange) return mine;
  pmoe_status all = pmoei_comm_agree_in_step(layer->groups.tp, what, mine);
  /* Peers in the exchange that are no peers of the failed rank have heard nothing and go on. */
  return mine == PMOE_OK && all != PMOE_OK ? pmoei_comm_fail(layer->groups.exchange, all, NULL) : all;
}

pmoe_status pmoei_layer_agree(pmoe_layer *layer, const char *what, pmoe_status mine) {
  if (pmoei_tp_used(layer)) mine = pmoei_comm_agree_in_step(layer->groups.tp, what, mine);
  return pmoei_tp_settle(layer, what, pmoei_comm_agree_in_step(layer->groups.exchange, what, mine));
}

pmoe_status pmoei_layer_fail(pmoe_layer *layer, pmoe_status status) {
  if (pmoei_tp_used(layer)) pmoei_comm_fail(layer->groups.tp, status, NULL);
  return pmoei_comm_fail(layer->groups.exchange, status, NULL);
}

/* ---- rows ---- */

int64_t pmoei_tp_own_first(const pmoe_stash *stash) {
  int64_t first = 0;
  for (int32_t p = 0; p < stash->layer->groups.tp->rank; p++) first += stash->tp_tokens[p];
  return first;
}

pmoe_mat pmoei_tp_own_rows(const pmoe_stash *stash, const pmoe_mat *mat) {
  pmoe_mat own = *mat;
  if (!stash->layer->replicated) return own;
  own.rows = stash->tokens.own;
  if (own.data) own.data = pmoei_row(mat, pmoei_tp_own_first(stash));
  return own;
}

/* Matrices whose rows lie back to back. */
typedef struct room {
  pmoe_mat own, all;
  float *all_value;
} room;

static bool packed(const pmoe_mat *mat) { return mat->ld == mat->cols || mat->rows < 2; }

/* `parts`: room for the whole group's parts of the own rows, to be summed. */
static void lay_out(pmoei_arena *arena, int32_t tp, const pmoe_mat *own, const pmoe_mat *all, bool parts, bool values,
                    room *r) {
  size_t size = own ? pmoe_dtype_size(own->dtype) : 0;
  if (own && parts) {
    r->all = (pmoe_mat){NULL, own->dtype, own->rows * tp, own->cols, own->cols};
    r->all.data = pmoei_take(arena, r->all.rows * r->all.cols, size);
  } else if (own) {
    r->own = *own;
    r->all = *all;
    r->own.ld = r->all.ld = own->cols;
    if (!packed(own)) r->own.data = pmoei_take(arena, own->rows * own->cols, size);
    if (!packed(all)) r->all.data = pmoei_take(arena, all->rows * all->cols, size);
  }
  if (parts && values) r->all_value = pmoei_take(arena, own->rows * tp, sizeof(float));
}

size_t pmoei_tp_scratch_bytes(const pmoe_layer *layer, int64_t own, int64_t all) {
  if (!pmoei_tp_used(layer)) return 0;
  int32_t tp = layer->groups.tp->nranks;
  int64_t cols = layer->cfg.hidden;
  /* Rows that lie apart, of both; and more than any group's own rows times tp. */
  pmoe_mat apart = {NULL, layer->experts_cfg.dtype, own, cols, cols + 1}, wide = apart;
  wide.rows = all;
  room unused;
  pmoei_arena gather = {NULL, 0}, sum = {NULL, 0};
  lay_out(&gather, tp, &apart, &wide, false, true, &unused);
  lay_out(&sum, tp, &apart, &wide, true, true, &unused);
  return gather.used > sum.used ? gather.used : sum.used;
}

static pmoe_status open_room(const pmoe_stash *stash, const pmoei_tp_rows *rows, bool parts, room *r, int32_t *handle) {
  int32_t tp = stash->layer->groups.tp->nranks;
  bool values = rows->own_value != NULL;
  *r = (room){0};
  pmoei_arena measure = {NULL, 0};
  lay_out(&measure, tp, rows->own, rows->all, parts, values, r);
  void *base;
  PMOEI_TRY(pmoei_scratch_open(stash->layer->ctx, measure.used, &base, handle));
  lay_out(&(pmoei_arena){base, 0}, tp, rows->own, rows->all, parts, values, r);
  return PMOE_OK;
}

static pmoe_status exchange(pmoe_stash *stash, pmoei_exchange *x) {
  pmoe_comm *tp = stash->layer->groups.tp;
  for (int32_t p = 0; p < tp->nranks; p++)
    if (p != tp->rank) stash->metrics.bytes_sent += x->send_rows[p] * (int64_t)x->part[0].row_bytes;
  return pmoei_exchange_now(tp, x);
}

static void add_part(pmoei_exchange *x, const void *send, void *recv, size_t row_bytes) {
  x->part[x->num_parts++] = (pmoei_part){send, recv, row_bytes};
}

static size_t row_bytes(const pmoe_mat *mat) { return (size_t)mat->cols * pmoe_dtype_size(mat->dtype); }

/* One exchange's lists: the layer's, for nothing else uses them while one is under way. */
typedef struct lists {
  int64_t *first, *rows, *other_first, *other_rows;
} lists;

static lists lists_of(const pmoe_layer *layer) {
  int64_t *at = layer->tp_lists, tp = layer->groups.tp->nranks;
  return (lists){at, at + tp, at + 2 * tp, at + 3 * tp};
}

static pmoe_status gather(pmoe_stash *stash, const pmoei_tp_rows *rows, room *r) {
  pmoe_ctx *ctx = stash->layer->ctx;
  lists l = lists_of(stash->layer);
  int64_t next = 0;
  for (int32_t p = 0; p < stash->layer->groups.tp->nranks; p++) {
    l.first[p] = next;
    l.rows[p] = stash->tp_tokens[p];
    next += l.rows[p];
    l.other_first[p] = 0;
    l.other_rows[p] = stash->tokens.own;
  }
  if (rows->own && r->own.data != rows->own->data) PMOEI_TRY(pmoei_data_copy_rows(ctx, &r->own, rows->own));
  pmoei_exchange x = {.what = rows->what,
                      .send_first = l.other_first,
                      .send_rows = l.other_rows,
                      .recv_first = l.first,
                      .recv_rows = l.rows};
  if (rows->own) add_part(&x, r->own.data, r->all.data, row_bytes(rows->own));
  if (rows->own_value) add_part(&x, rows->own_value, rows->all_value, sizeof(float));
  PMOEI_TRY(exchange(stash, &x));
  if (rows->own && r->all.data != rows->all->data) PMOEI_TRY(pmoei_data_copy_rows(ctx, rows->all, &r->all));
  return PMOE_OK;
}

pmoe_status pmoei_tp_gather(pmoe_stash *stash, const pmoei_tp_rows *rows) {
  room r;
  int32_t handle;
  PMOEI_TRY(open_room(stash, rows, false, &r, &handle));
  pmoe_status status = gather(stash, rows, &r);
  pmoei_scratch_close(stash->layer->ctx, handle);
  return status;
}

static pmoe_status sum(pmoe_stash *stash, const pmoei_tp_rows *rows, room *r) {
  const pmoe_layer *layer = stash->layer;
  int32_t tp = layer->groups.tp->nranks;
  lists l = lists_of(layer);
  int64_t next = 0, own = stash->tokens.own;
  for (int32_t p = 0; p < tp; p++) {
    l.first[p] = next;
    l.rows[p] = stash->tp_tokens[p];
    next += l.rows[p];
    l.other_first[p] = p * own;
    l.other_rows[p] = own;
  }
  pmoei_exchange x = {.what = rows->what,
                      .send_first = l.first,
                      .send_rows = l.rows,
                      .recv_first = l.other_first,
                      .recv_rows = l.other_rows};
  add_part(&x, rows->all->data, r->all.data, row_bytes(rows->all));
  if (rows->own_value) add_part(&x, rows->all_value, r->all_value, sizeof(float));
  PMOEI_TRY(exchange(stash, &x));
  PMOEI_TRY(layer->ops->sum_parts(layer->ctx, rows->own, &r->all));
  if (!rows->own_value) return PMOE_OK;
  const pmoe_mat values = {r->all_value, PMOE_F32, own * tp, 1, 1}, sums = {rows->own_value, PMOE_F32, own, 1, 1};
  return layer->ops->sum_parts(layer->ctx, &sums, &values);
}

pmoe_status pmoei_tp_sum(pmoe_stash *stash, const pmoei_tp_rows *rows) {
  room r;
  int32_t handle;
  PMOEI_TRY(open_room(stash, rows, true, &r, &handle));
  pmoe_status status = sum(stash, rows, &r);
  pmoei_scratch_close(stash->layer->ctx, handle);
  return status;
}
