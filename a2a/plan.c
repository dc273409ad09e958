/* Plans: who sends how many rows to whom, and where they lie. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "a2a/a2a.h"
#include "core/check.h"
#include "core/config.h"
#include "core/data.h"
#include "pmoe/topology.h"

static const char count_exchange[] = "pmoe: row counts";

static void lay_out_plan(pmoei_arena *arena, pmoe_plan *plan) {
  const pmoe_a2a *a2a = plan->a2a;
  int64_t ranks = a2a->ep->nranks, local = a2a->num_local;
  plan->first_row = pmoei_take(arena, a2a->num_experts, sizeof(int64_t));
  plan->send_first = pmoei_take(arena, ranks, sizeof(int64_t));
  plan->send_count = pmoei_take(arena, ranks, sizeof(int64_t));
  plan->recv_first = pmoei_take(arena, ranks, sizeof(int64_t));
  plan->recv_count = pmoei_take(arena, ranks, sizeof(int64_t));
  plan->send_real = pmoei_take(arena, ranks, sizeof(int64_t));
  plan->recv_real = pmoei_take(arena, ranks, sizeof(int64_t));
  plan->own_rows = pmoei_take(arena, a2a->num_experts, sizeof(int64_t));
  plan->expert_rows = pmoei_take(arena, local, sizeof(int64_t));
  plan->runs = pmoei_take(arena, local * ranks, sizeof(pmoei_row_run));
  plan->back_runs = pmoei_take(arena, local * ranks, sizeof(pmoei_row_run));
}

static size_t first_row_bytes(const pmoe_a2a *a2a) { return (size_t)a2a->num_experts * sizeof(int64_t); }

pmoe_status pmoe_plan_create(pmoe_a2a *a2a, pmoe_plan **out) {
  PMOEI_REQUIRE_POINTER(a2a);
  PMOEI_REQUIRE_POINTER(out);
  pmoe_plan *plan;
  PMOEI_TRY(pmoei_alloc(a2a->ctx, sizeof *plan, "plan", &plan));
  plan->a2a = a2a;
  plan->move.scratch = -1;
  pmoei_arena measure = {NULL, 0};
  lay_out_plan(&measure, plan);
  plan->bytes = measure.used;
  pmoe_status status = pmoei_pinned_alloc(a2a->ctx, plan->bytes, "plan arrays", &plan->block);
  if (status == PMOE_OK && pmoei_on_device(a2a->ctx))
    status = pmoei_data_alloc(a2a->ctx, first_row_bytes(a2a), "plan arrays", &plan->device_first_row);
  if (status != PMOE_OK) {
    pmoei_pinned_free(a2a->ctx, plan->block, plan->bytes);
    pmoei_free(a2a->ctx, plan, sizeof *plan);
    return status;
  }
  memset(plan->block, 0, plan->bytes);
  lay_out_plan(&(pmoei_arena){plan->block, 0}, plan);
  plan->map_first_row = plan->device_first_row ? plan->device_first_row : plan->first_row;
  pmoei_a2a_retain(a2a);
  *out = plan;
  return PMOE_OK;
}

void pmoe_plan_destroy(pmoe_plan *plan) {
  if (!plan) return;
  pmoe_a2a *a2a = plan->a2a;
  if (plan->move.motion != PMOEI_MOTION_NONE && a2a->ep->nranks > 1)
    pmoei_comm_fail(a2a->ep, PMOE_ERR_STATE, "it destroyed a plan whose rows were on their way");
  if (plan->move.scratch >= 0) pmoei_scratch_close(a2a->ctx, plan->move.scratch);
  pmoei_pinned_free(a2a->ctx, plan->block, plan->bytes);
  pmoei_data_free(a2a->ctx, plan->device_first_row, first_row_bytes(a2a));
  pmoei_free(a2a->ctx, plan, sizeof *plan);
  pmoei_a2a_release(a2a);
}

/* ---- the count exchange ---- */

static pmoei_count_record *record_of(const pmoe_a2a *a2a, int32_t rank) {
  return (pmoei_count_record *)(a2a->records + (size_t)rank * a2a->record_bytes);
}

static int64_t *counts_of(const pmoe_a2a *a2a, int32_t rank) { return (int64_t *)(record_of(a2a, rank) + 1); }

static void fill_record(const pmoe_a2a *a2a, int64_t room, pmoe_status mine) {
  pmoei_count_record *own = record_of(a2a, a2a->ep->nranks);
  memset(own, 0, sizeof *own);
  own->status = mine;
  own->layer = a2a->layer_id;
  own->room = room;
  if (mine != PMOE_OK) snprintf(own->why, sizeof own->why, "%s", pmoe_last_error());
}

/* An error of any rank is an error of all. */
static pmoe_status judge_records(const pmoe_a2a *a2a) {
  for (int32_t rank = 0; rank < a2a->ep->nranks; rank++) {
    const pmoei_count_record *record = record_of(a2a, rank);
    if (record->status != PMOE_OK)
      return pmoei_error(PMOE_ERR_COMM, "rank %d of the expert-parallel group gave up with %s: %.*s", rank,
                         pmoe_status_name((pmoe_status)record->status), PMOEI_WHY_BYTES, record->why);
    if (record->layer != a2a->layer_id)
      return pmoei_error(PMOE_ERR_MISMATCH, "rank %d is in layer %d, but rank %d is in layer %" PRId64, a2a->ep->rank,
                         a2a->layer_id, rank, record->layer);
  }
  return PMOE_OK;
}

/* On a device the counts are not there yet: the record goes through the stream, the counts join it on the device, and
 * what all ranks have sent is on its way to the host when this returns. expert_rows is NULL with an error only. */
static pmoe_status send_from_device(pmoe_a2a *a2a, int64_t room, const int64_t *expert_rows, pmoe_status mine) {
  pmoe_ctx *ctx = a2a->ctx;
  if (pmoei_is_capturing(ctx))
    return pmoei_error(
        PMOE_ERR_UNSUPPORTED,
        "the stream is being captured, but the host must wait for row counts; fixed sizing with a capacity "
        "factor and without max_recv_rows was expected");
  int32_t ranks = a2a->ep->nranks;
  size_t rows_bytes = a2a->record_bytes - sizeof(pmoei_count_record);
  if (ranks == 1) {
    record_of(a2a, 0)->room = room;
    return expert_rows ? pmoei_data_copy(ctx, counts_of(a2a, 0), expert_rows, rows_bytes) : PMOE_OK;
  }
  fill_record(a2a, room, mine);
  char *own = a2a->device_records + (size_t)ranks * a2a->record_bytes;
  PMOEI_TRY(pmoei_data_copy(ctx, own, record_of(a2a, ranks), sizeof(pmoei_count_record)));
  if (expert_rows) PMOEI_TRY(pmoei_data_copy(ctx, own + sizeof(pmoei_count_record), expert_rows, rows_bytes));
  else PMOEI_TRY(pmoei_data_zero(ctx, own + sizeof(pmoei_count_record), rows_bytes));
  PMOEI_TRY(pmoei_allgather_data(a2a->ep, count_exchange, own, a2a->device_records, a2a->record_bytes));
  return pmoei_data_copy(ctx, a2a->records, a2a->device_records, (size_t)ranks * a2a->record_bytes);
}

static pmoe_status take_from_device(pmoe_a2a *a2a, pmoe_status mine) {
  if (a2a->ep->nranks == 1) {
    PMOEI_TRY(mine);
    return pmoei_data_wait(a2a->ctx);
  }
  char why[PMOEI_WHY_BYTES];
  snprintf(why, sizeof why, "%s", record_of(a2a, a2a->ep->nranks)->why);
  pmoe_status status = pmoei_comm_wait(a2a->ep, count_exchange);
  if (mine != PMOE_OK) return pmoei_error(mine, "%s", why);
  PMOEI_TRY(status);
  return judge_records(a2a);
}

/* Every rank's record in rank order. */
static pmoe_status exchange_counts(pmoe_a2a *a2a, int64_t room, const int64_t *expert_rows, pmoe_status mine) {
  int32_t ranks = a2a->ep->nranks;
  if (ranks == 1) {
    record_of(a2a, 0)->room = room;
    if (expert_rows) memcpy(counts_of(a2a, 0), expert_rows, (size_t)a2a->num_experts * sizeof *expert_rows);
    return mine;
  }
  fill_record(a2a, room, mine);
  pmoei_count_record *own = record_of(a2a, ranks);
  if (expert_rows) memcpy(counts_of(a2a, ranks), expert_rows, (size_t)a2a->num_experts * sizeof *expert_rows);
  else memset(counts_of(a2a, ranks), 0, (size_t)a2a->num_experts * sizeof(int64_t));
  pmoe_status status = pmoei_allgather(a2a->ep, count_exchange, own, a2a->records, a2a->record_bytes);
  if (mine != PMOE_OK) return pmoei_error(mine, "%s", own->why);
  PMOEI_TRY(status);
  return judge_records(a2a);
}

pmoe_status pmoei_a2a_refuse(pmoe_a2a *a2a, pmoe_status mine) {
  if (!pmoei_on_device(a2a->ctx)) return exchange_counts(a2a, 0, NULL, mine);
  if (a2a->constant) return mine;
  PMOEI_TRY(send_from_device(a2a, 0, NULL, mine));
  return take_from_device(a2a, mine);
}

/* ---- from counts to offsets ---- */

static int64_t rows_between(const pmoe_a2a *a2a, int32_t from, int32_t to) {
  int32_t first, count;
  (void)pmoe_expert_block(a2a->num_experts, a2a->ep->nranks, to, &first, &count);
  int64_t sum = 0;
  for (int32_t e = first; e < first + count; e++) sum += counts_of(a2a, from)[e];
  return sum;
}

/* Every rank sees all counts, so every rank finds the same excess and returns the same error. */
static pmoe_status check_bounds(const pmoe_a2a *a2a) {
  int32_t ranks = a2a->ep->nranks;
  bool fixed = a2a->cfg.sizing == PMOE_SIZING_FIXED;
  for (int32_t to = 0; to < ranks; to++) {
    int64_t total = 0, bucket = pmoei_a2a_bucket(a2a, to), room = record_of(a2a, to)->room;
    for (int32_t from = 0; from < ranks; from++) {
      int64_t rows = rows_between(a2a, from, to);
      total += rows;
      PMOEI_REQUIRE(!fixed || rows <= bucket,
                    "routing sends %" PRId64 " rows from rank %d to rank %d; fixed sizing has room for %" PRId64
                    " (raise max_recv_rows or lower the capacity factor)",
                    rows, from, to, bucket);
    }
    PMOEI_REQUIRE(room == 0 || total <= room,
                  "routing sends %" PRId64 " rows to rank %d; its stash was made for max_recv_rows %" PRId64, total, to,
                  room);
    PMOEI_REQUIRE(fixed || a2a->cfg.max_recv_rows == 0 || total <= a2a->cfg.max_recv_rows,
                  "routing sends %" PRId64 " rows to rank %d; max_recv_rows is %" PRId64, total, to,
                  a2a->cfg.max_recv_rows);
  }
  return PMOE_OK;
}

static void set_token_side(pmoe_plan *plan) {
  const pmoe_a2a *a2a = plan->a2a;
  bool fixed = a2a->cfg.sizing == PMOE_SIZING_FIXED && a2a->ep->nranks > 1;
  const int64_t *mine = counts_of(a2a, a2a->ep->rank);
  int64_t staged = 0;
  plan->send_rows = 0;
  for (int32_t to = 0; to < a2a->ep->nranks; to++) {
    int32_t first, count;
    (void)pmoe_expert_block(a2a->num_experts, a2a->ep->nranks, to, &first, &count);
    int64_t row = staged;
    for (int32_t e = first; e < first + count; e++) {
      plan->first_row[e] = row;
      plan->own_rows[e] = mine[e];
      row += mine[e];
    }
    plan->send_first[to] = staged;
    plan->send_real[to] = row - staged;
    plan->send_count[to] = fixed ? pmoei_a2a_bucket(a2a, to) : plan->send_real[to];
    plan->send_rows += plan->send_real[to];
    staged += plan->send_count[to];
  }
  plan->staged_send = staged;
}

static void set_owner_side(pmoe_plan *plan) {
  const pmoe_a2a *a2a = plan->a2a;
  int32_t ranks = a2a->ep->nranks;
  bool fixed = a2a->cfg.sizing == PMOE_SIZING_FIXED && ranks > 1;
  int64_t staged = 0;
  for (int32_t from = 0; from < ranks; from++) {
    plan->recv_first[from] = staged;
    plan->recv_real[from] = rows_between(a2a, from, a2a->ep->rank);
    plan->recv_count[from] = fixed ? pmoei_a2a_bucket(a2a, a2a->ep->rank) : plan->recv_real[from];
    staged += plan->recv_count[from];
  }
  plan->staged_recv = staged;
  int64_t row = 0, run = 0;
  for (int32_t local = 0; local < a2a->num_local; local++) {
    plan->expert_rows[local] = 0;
    for (int32_t from = 0; from < ranks; from++, run++) {
      int64_t source = plan->recv_first[from];
      for (int32_t before = 0; before < local; before++) source += counts_of(a2a, from)[a2a->first_expert + before];
      int64_t rows = counts_of(a2a, from)[a2a->first_expert + local];
      plan->runs[run] = (pmoei_row_run){source, row, rows};
      plan->back_runs[run] = (pmoei_row_run){row, source, rows};
      plan->expert_rows[local] += rows;
      row += rows;
    }
  }
  plan->recv_rows = row;
}

static pmoe_status check_routing(const pmoe_plan *plan, const pmoe_routing *routing) {
  pmoe_routing r;
  PMOEI_TRY(PMOEI_CONFIG_READ(&r, routing));
  const pmoe_a2a *a2a = plan->a2a;
  PMOEI_REQUIRE(r.num_experts == a2a->num_experts, "routing->num_experts is %d; %d was expected", r.num_experts,
                a2a->num_experts);
  PMOEI_REQUIRE(r.top_k > 0, "routing->top_k is %d; 1 or more was expected", r.top_k);
  PMOEI_REQUIRE(r.tokens >= 0 && r.tokens <= PMOEI_MAX_ROWS / r.top_k,
                "routing->tokens is %" PRId64 "; 0 to %" PRId64 " was expected", r.tokens, PMOEI_MAX_ROWS / r.top_k);
  PMOEI_REQUIRE(a2a->cfg.max_tokens == 0 || r.tokens <= a2a->cfg.max_tokens,
                "routing->tokens is %" PRId64 "; at most max_tokens (%" PRId64 ") was expected", r.tokens,
                a2a->cfg.max_tokens);
  PMOEI_REQUIRE(r.expert_rows != NULL, "routing->expert_rows is NULL; a pointer was expected");
  if (pmoei_on_device(a2a->ctx)) return PMOE_OK; /* they are looked at when they have come to the host */
  for (int32_t e = 0; e < r.num_experts; e++)
    PMOEI_REQUIRE(r.expert_rows[e] >= 0 && r.expert_rows[e] <= r.tokens * r.top_k,
                  "routing->expert_rows[%d] is %" PRId64 "; 0 to tokens * top_k (%" PRId64 ") was expected", e,
                  r.expert_rows[e], r.tokens * r.top_k);
  return PMOE_OK;
}

/* Counts that the device made, or that came from other ranks. */
static pmoe_status check_counts(const pmoe_a2a *a2a) {
  for (int32_t rank = 0; rank < a2a->ep->nranks; rank++)
    for (int32_t e = 0; e < a2a->num_experts; e++)
      PMOEI_REQUIRE(counts_of(a2a, rank)[e] >= 0 && counts_of(a2a, rank)[e] <= PMOEI_MAX_ROWS,
                    "routing->expert_rows[%d] is %" PRId64 " on rank %d; 0 to %" PRId64 " was expected", e,
                    counts_of(a2a, rank)[e], rank, PMOEI_MAX_ROWS);
  return PMOE_OK;
}

/* Every rank sends every expert the same number of rows, so nothing has to be told. */
static void set_constant_counts(const pmoe_a2a *a2a) {
  for (int32_t rank = 0; rank < a2a->ep->nranks; rank++)
    for (int32_t e = 0; e < a2a->num_experts; e++) counts_of(a2a, rank)[e] = a2a->capacity;
}

static pmoe_status check_plan(const pmoe_plan *plan, const pmoe_routing *routing, pmoe_status mine) {
  PMOEI_TRY(mine);
  PMOEI_TRY(check_routing(plan, routing));
  if (plan->move.motion != PMOEI_MOTION_NONE)
    return pmoei_error(PMOE_ERR_STATE, "plan: a movement is under way; call pmoe_plan_finish first");
  return PMOE_OK;
}

pmoe_status pmoei_plan_send_counts(pmoe_plan *plan, const pmoe_routing *routing, pmoe_status mine) {
  pmoe_a2a *a2a = plan->a2a;
  mine = check_plan(plan, routing, mine);
  plan->built = false;
  if (!pmoei_on_device(a2a->ctx) || a2a->constant) return mine;
  pmoe_status sent = send_from_device(a2a, plan->room, mine == PMOE_OK ? routing->expert_rows : NULL, mine);
  return mine != PMOE_OK ? mine : sent;
}

static pmoe_status take_counts(pmoe_plan *plan, const pmoe_routing *routing, pmoe_status mine) {
  pmoe_a2a *a2a = plan->a2a;
  if (!pmoei_on_device(a2a->ctx))
    return exchange_counts(a2a, plan->room, mine == PMOE_OK ? routing->expert_rows : NULL, mine);
  if (a2a->constant) {
    PMOEI_TRY(mine);
    set_constant_counts(a2a);
    return PMOE_OK;
  }
  PMOEI_TRY(take_from_device(a2a, mine));
  return check_counts(a2a);
}

pmoe_status pmoei_plan_take_counts(pmoe_plan *plan, const pmoe_routing *routing, pmoe_status mine) {
  pmoe_a2a *a2a = plan->a2a;
  PMOEI_TRY(take_counts(plan, routing, mine));
  PMOEI_TRY(check_bounds(a2a));
  plan->tokens = routing->tokens;
  plan->top_k = routing->top_k;
  set_token_side(plan);
  set_owner_side(plan);
  if (plan->device_first_row)
    PMOEI_TRY(pmoei_data_copy(a2a->ctx, plan->device_first_row, plan->first_row, first_row_bytes(a2a)));
  size_t row_bytes = (size_t)a2a->hidden * pmoe_dtype_size(a2a->dtype);
  plan->bytes_sent = (plan->staged_send - plan->send_count[a2a->ep->rank]) * (int64_t)row_bytes;
  plan->bytes_returned = (plan->staged_recv - plan->recv_count[a2a->ep->rank]) * (int64_t)row_bytes;
  plan->built = true;
  return PMOE_OK;
}

pmoe_status pmoei_plan_settle(pmoe_plan *plan, const pmoe_routing *routing, pmoe_status mine) {
  mine = pmoei_plan_send_counts(plan, routing, mine);
  return pmoei_plan_take_counts(plan, routing, mine);
}

pmoe_status pmoe_plan_build(pmoe_plan *plan, const pmoe_routing *routing, pmoe_stream stream) {
  PMOEI_REQUIRE_POINTER(plan);
  PMOEI_TRY(pmoei_ctx_enter(plan->a2a->ctx, stream));
  return pmoei_plan_settle(plan, routing, PMOE_OK);
}

pmoe_status pmoe_plan_get_info(const pmoe_plan *plan, pmoe_plan_info *out) {
  PMOEI_REQUIRE_POINTER(plan);
  if (!plan->built) return pmoei_error(PMOE_ERR_STATE, "pmoe_plan_get_info: the plan has not been built");
  pmoe_plan_info info = PMOE_CONFIG_INIT(pmoe_plan_info);
  info.send_rows = plan->send_rows;
  info.recv_rows = plan->recv_rows;
  info.first_expert = plan->a2a->first_expert;
  info.num_experts = plan->a2a->num_local;
  info.expert_rows = plan->expert_rows;
  info.bytes_sent = plan->bytes_sent;
  return PMOEI_STRUCT_WRITE(out, &info);
}
