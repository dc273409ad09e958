/* Plan, dispatch and combine between ranks; beside them the transport's exchange alone, and a bare one of the same
 * bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "block.h"
#include "ceilings.h"
#include "commands.h"
#include "expert_params.h"
#include "report.h"
#include "timing.h"

#ifdef BENCH_WITH_MPI
#include <mpi.h>
#endif

enum { OP_PLAN, OP_DISPATCH, OP_COMBINE, OP_TRANSPORT, OP_BARE, NUM_OPS };
static const char *const names[OP_BARE] = {"exchange_plan", "exchange_dispatch", "exchange_combine",
                                           "exchange_transport"};

typedef struct exchange_run {
  bench_rank *rank;
  int64_t tokens, first_token, send_rows, recv_rows;
  size_t row_bytes;
  int32_t first_expert, num_experts;
  pmoe_a2a *a2a;
  pmoe_plan *plan;
  pmoe_routing routing;
  pmoe_mat x, y, rows;
  int64_t *counts; /* by destination: first, rows; by source: first, rows */
  bench_swap swap;
  bench_copy copy;
  bool mpi;
  bench_block routing_block;
  void *memory;
} exchange_run;

static pmoe_status plan(void *arg) {
  exchange_run *r = arg;
  BENCH_TRY(pmoe_plan_build(r->plan, &r->routing, NULL));
  return PMOE_OK;
}

static pmoe_status dispatch(void *arg) {
  exchange_run *r = arg;
  BENCH_TRY(pmoe_dispatch_forward(r->plan, &r->routing, &r->x, &r->rows, NULL));
  BENCH_TRY(pmoe_plan_finish(r->plan, NULL));
  return PMOE_OK;
}

static pmoe_status combine(void *arg) {
  exchange_run *r = arg;
  BENCH_TRY(pmoe_combine_forward(r->plan, &r->routing, &r->rows, NULL, &r->y, NULL));
  BENCH_TRY(pmoe_plan_finish(r->plan, NULL));
  return PMOE_OK;
}

#ifdef BENCH_WITH_MPI
/* MPI counts in int: rows are its elements. */
static pmoe_status alltoallv(void *arg) {
  const exchange_run *r = arg;
  int32_t n = r->rank->nranks;
  int *counts;
  BENCH_TRY(bench_alloc((size_t)(4 * n) * sizeof *counts, &counts));
  const int64_t *from[4] = {r->swap.send_rows, r->swap.send_first, r->swap.recv_rows, r->swap.recv_first};
  for (int i = 0; i < 4; i++)
    for (int32_t j = 0; j < n; j++) counts[i * n + j] = (int)from[i][j];
  MPI_Datatype row;
  MPI_Type_contiguous((int)r->row_bytes, MPI_BYTE, &row);
  MPI_Type_commit(&row);
  int failed = MPI_Alltoallv(r->swap.send, counts, counts + n, row, r->swap.recv, counts + 2 * n, counts + 3 * n, row,
                             MPI_COMM_WORLD);
  MPI_Type_free(&row);
  free(counts);
  return failed == MPI_SUCCESS ? PMOE_OK : PMOE_ERR_COMM;
}
#endif

/* ---- setup ---- */
static pmoe_status count_rows(exchange_run *r) {
  const bench_rank *rank = r->rank;
  int32_t n = rank->nranks, experts = rank->options->experts;
  int64_t *all;
  BENCH_TRY(bench_alloc((size_t)(4 * n) * sizeof *r->counts, &r->counts));
  BENCH_TRY(bench_alloc((size_t)n * (size_t)experts * sizeof *all, &all));
  int64_t *send_first = r->counts, *send_rows = send_first + n, *recv_first = send_rows + n,
          *recv_rows = recv_first + n;
  pmoe_status status = pmoe_comm_allgather(rank->comm, r->routing.expert_rows, all, (size_t)experts * sizeof *all);
  for (int32_t i = 0; i < n && status == PMOE_OK; i++) {
    int32_t first, num;
    status = pmoe_expert_block(experts, n, i, &first, &num);
    for (int32_t e = first; e < first + num; e++) send_rows[i] += r->routing.expert_rows[e];
    for (int32_t e = r->first_expert; e < r->first_expert + r->num_experts; e++)
      recv_rows[i] += all[(int64_t)i * experts + e];
    send_first[i] = r->send_rows, recv_first[i] = r->recv_rows;
    r->send_rows += send_rows[i], r->recv_rows += recv_rows[i];
  }
  free(all);
  r->swap = (bench_swap){rank->comm, NULL, NULL, r->row_bytes, send_first, send_rows, recv_first, recv_rows};
  return status < 0 ? bench_complain("count_rows", status) : status;
}

static pmoe_status make_memory(exchange_run *r) {
  const bench_options *o = r->rank->options;
  size_t tokens = (size_t)r->tokens * r->row_bytes, send = (size_t)r->send_rows * r->row_bytes,
         recv = (size_t)r->recv_rows * r->row_bytes;
  BENCH_TRY(bench_alloc(2 * tokens + 2 * recv + 2 * send + 6 * 64, &r->memory));
  char *at = r->memory;
  r->x = (pmoe_mat){at, o->dtype, r->tokens, o->hidden, o->hidden}, at += (tokens + 63) / 64 * 64;
  r->y = (pmoe_mat){at, o->dtype, r->tokens, o->hidden, o->hidden}, at += (tokens + 63) / 64 * 64;
  r->rows = (pmoe_mat){at, o->dtype, r->recv_rows, o->hidden, o->hidden}, at += (recv + 63) / 64 * 64;
  r->swap.recv = at, at += (recv + 63) / 64 * 64;
  r->swap.send = at, at += (send + 63) / 64 * 64;
  r->copy = (bench_copy){r->rank->ctx, at, r->swap.send, send};
  bench_fill(o, BENCH_DY, 0, r->send_rows * o->hidden, (void *)r->swap.send);
  return bench_tokens(o, r->first_token, r->tokens, r->x.data);
}

static pmoe_status make(exchange_run *r) {
  bench_rank *rank = r->rank;
  const bench_options *o = rank->options;
  r->tokens = bench_num_tokens(rank), r->first_token = bench_first_token(rank);
  r->row_bytes = (size_t)o->hidden * pmoe_dtype_size(o->dtype);
  r->mpi = strcmp(pmoe_comm_transport(rank->comm), "mpi") == 0;
  BENCH_TRY(pmoe_expert_block(o->experts, rank->nranks, rank->rank, &r->first_expert, &r->num_experts));
  pmoe_routing there;
  BENCH_TRY(bench_routing(o, NULL, r->first_token, r->tokens, &r->routing, &r->routing_block, &there));
  pmoe_a2a_config cfg = PMOE_CONFIG_INIT(pmoe_a2a_config);
  BENCH_TRY(pmoe_a2a_create(rank->ctx, rank->comm, o->hidden, o->dtype, o->experts, 0, &cfg, &r->a2a));
  BENCH_TRY(pmoe_plan_create(r->a2a, &r->plan));
  pmoe_status status = count_rows(r);
  return status == PMOE_OK ? make_memory(r) : status;
}

static void end(exchange_run *r) {
  pmoe_plan_destroy(r->plan);
  pmoe_a2a_destroy(r->a2a);
  free(r->counts);
  free(r->memory);
  bench_block_destroy(&r->routing_block);
}

/* ---- check ---- */
/* What the owner of an expert does to its rows, so that a mixed-up way back shows. */
static double factor(const bench_options *o, int32_t expert) { return 1.0 + (double)expert / o->experts; }

/* Rows lie by expert, then by source rank and slot: in the order of global tokens. Then each is multiplied by its
 * expert's factor. */
static void check_rows(exchange_run *r, double *x, bench_error *error) {
  const bench_options *o = r->rank->options;
  int32_t chosen[BENCH_MAX_TOP_K];
  int64_t row = 0;
  for (int32_t e = r->first_expert; e < r->first_expert + r->num_experts; e++)
    for (int64_t t = 0; t < o->tokens; t++) {
      bench_choose(o, t, chosen);
      for (int32_t k = 0; k < o->top_k; k++) {
        if (chosen[k] != e) continue;
        bench_row(o, BENCH_X, t, x);
        for (int64_t h = 0; h < o->hidden; h++) {
          bench_compare(error, (double)bench_load(o->dtype, r->rows.data, row * o->hidden + h), x[h]);
          bench_store(o->dtype, r->rows.data, row * o->hidden + h, (float)(x[h] * factor(o, e)));
        }
        row++;
      }
    }
}

static void check_tokens(const exchange_run *r, double *x, bench_error *error) {
  const bench_options *o = r->rank->options;
  for (int64_t t = 0; t < r->tokens; t++) {
    double sum = 0;
    for (int64_t i = t * o->top_k; i < (t + 1) * o->top_k; i++)
      sum += (double)r->routing.weight[i] * factor(o, r->routing.expert[i]);
    bench_row(o, BENCH_X, r->first_token + t, x);
    for (int64_t h = 0; h < o->hidden; h++)
      bench_compare(error, (double)bench_load(o->dtype, r->y.data, t * o->hidden + h), sum * x[h]);
  }
}

static pmoe_status check(exchange_run *r, bench_error *errors) {
  double *x;
  BENCH_TRY(bench_alloc((size_t)r->rank->options->hidden * sizeof *x, &x));
  pmoe_status status = plan(r);
  if (status == PMOE_OK) status = dispatch(r);
  if (status == PMOE_OK) check_rows(r, x, &errors[OP_DISPATCH]);
  if (status == PMOE_OK) status = combine(r);
  if (status == PMOE_OK) check_tokens(r, x, &errors[OP_COMBINE]);
  free(x);
  pmoe_plan_info info = PMOE_CONFIG_INIT(pmoe_plan_info);
  BENCH_TRY(pmoe_plan_get_info(r->plan, &info));
  bench_compare(&errors[OP_PLAN], (double)info.recv_rows, (double)r->recv_rows);
  bench_compare(&errors[OP_PLAN], (double)info.send_rows, (double)r->send_rows);
  return status;
}

/* ---- measurement ---- */
static pmoe_status report(exchange_run *r, const bench_op *ops, const bench_error *errors) {
  const bench_options *o = r->rank->options;
  for (int i = 0; i < OP_BARE; i++) {
    bench_result result = {.name = names[i], .peak_bytes = -1, .saved_bytes = -1, .error = bench_relative(&errors[i])};
    if (i == OP_COMBINE) result.tolerance = o->dtype == PMOE_F32 ? 1e-6 : 1e-2;
    bench_set_times(&result, ops[i].ms, o->iters);
    if (i != OP_PLAN) {
      double bare = bench_median(ops[OP_BARE].ms, o->iters);
      result.bytes = 2.0 * (double)(o->tokens * o->top_k) * (double)r->row_bytes;
      if (!r->mpi) result.copy_ms = bare;
      else
        bench_add_extra(&result, "alltoallv_ms", bare),
            bench_add_extra(&result, "share_alltoallv", bare / result.median_ms);
    }
    BENCH_TRY(bench_report(r->rank, &result));
  }
  return PMOE_OK;
}

static pmoe_status measure(exchange_run *r) {
  double *times = NULL;
  bench_error errors[NUM_OPS] = {{0, 0}};
  bench_op ops[NUM_OPS] = {{plan, r, NULL},
                           {dispatch, r, NULL},
                           {combine, r, NULL},
                           {bench_swap_run, &r->swap, NULL},
                           {bench_copy_run, &r->copy, NULL}};
#ifdef BENCH_WITH_MPI
  if (r->mpi) ops[OP_BARE] = (bench_op){alltoallv, r, NULL};
#endif
  pmoe_status status = bench_measure(r->rank, ops, NUM_OPS, &times);
  if (status == PMOE_OK && r->rank->options->check) status = check(r, errors);
  if (status == PMOE_OK) status = report(r, ops, errors);
  free(times);
  return status;
}

pmoe_status bench_exchange(bench_rank *rank) {
  if (rank->device) {
    fprintf(stderr, "pmoe-bench: exchange runs on the CPU only: one device has nobody to exchange with\n");
    return PMOE_ERR_UNSUPPORTED;
  }
  exchange_run r = {.rank = rank};
  pmoe_status status = make(&r);
  if (status == PMOE_OK) status = measure(&r);
  end(&r);
  return status;
}
