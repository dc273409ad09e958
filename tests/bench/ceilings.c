#include "tools/bench/ceilings.h"

#include <stdlib.h>
#include <string.h>

#include "a2a/transport.h"
#include "core/dtype.h"
#include "core/gemm.h"
#include "core/parallel.h"
#include "core/simd.h"
#include "core/vmath.h"

enum { MAX_CHAIN = 2, NUM_PHASES = 3, NUM_BLOCKS = 4, MAX_BUFFERS = 8 };

/* Products of one expert that share m, one after another on the same rows of C. */
typedef struct chain {
  pmoei_product product[MAX_CHAIN];
  int32_t length;
} chain;

typedef struct task {
  const chain *chain;
  int64_t first, rows;
} task;

/* One parallel region. */
typedef struct phase {
  chain *chains;
  task *tasks;
  int64_t num_chains, num_tasks;
} phase;

struct bench_floor {
  pmoe_ctx *ctx;
  phase phase[NUM_PHASES]; /* forward; backward along rows; weight gradients */
  int32_t num_phases;
  void *buffer[MAX_BUFFERS];
  int32_t num_buffers;
};

/* ---- running ---- */
static void run_task(void *arg, int64_t index, int32_t thread) {
  const bench_floor *f = ((void **)arg)[0];
  const task *t = &((const phase *)((void **)arg)[1])->tasks[index];
  for (int32_t i = 0; i < t->chain->length; i++) {
    pmoei_product p = t->chain->product[i];
    p.m = t->rows;
    p.a = (const char *)p.a + (size_t)(p.trans_a ? t->first : t->first * p.lda) * pmoe_dtype_size(p.in);
    p.c = (char *)p.c + (size_t)(t->first * p.ldc) * pmoe_dtype_size(p.out);
    pmoei_gemm_run(f->ctx->gemm, thread, &p);
  }
}

static void run_phase(bench_floor *f, const phase *p) {
  void *arg[2] = {f, (void *)p};
  pmoei_parallel(f->ctx, p->num_tasks, run_task, arg);
}

pmoe_status bench_floor_forward(void *arg) {
  bench_floor *f = arg;
  run_phase(f, &f->phase[0]);
  return pmoei_gemm_take_error(f->ctx->gemm);
}

pmoe_status bench_floor_backward(void *arg) {
  bench_floor *f = arg;
  for (int32_t i = 1; i < f->num_phases; i++) run_phase(f, &f->phase[i]);
  return pmoei_gemm_take_error(f->ctx->gemm);
}

/* ---- schedules ---- */
static int larger_first(const void *a, const void *b) {
  const task *s = a, *t = b;
  if (s->rows != t->rows) return s->rows < t->rows ? 1 : -1;
  if (s->chain != t->chain) return s->chain < t->chain ? -1 : 1;
  return s->first < t->first ? -1 : 1;
}

static int64_t chain_rows(const chain *c) { return c->product[0].m; }

static pmoe_status cut(phase *p, int64_t block) {
  free(p->tasks);
  int64_t n = 0;
  for (int64_t c = 0; c < p->num_chains; c++) n += (chain_rows(&p->chains[c]) + block - 1) / block;
  p->num_tasks = 0;
  p->tasks = malloc((size_t)(n + 1) * sizeof *p->tasks);
  if (!p->tasks) return PMOE_ERR_NOMEM;
  for (int64_t c = 0; c < p->num_chains; c++)
    for (int64_t first = 0, m = chain_rows(&p->chains[c]); first < m; first += block)
      p->tasks[p->num_tasks++] = (task){&p->chains[c], first, m - first < block ? m - first : block};
  qsort(p->tasks, (size_t)p->num_tasks, sizeof *p->tasks, larger_first);
  return PMOE_OK;
}

/* The second of two runs: the first lets the provider prepare. Very long ones are not repeated. */
static double time_of(bench_floor *f, const phase *p) {
  double ms = 0;
  for (int i = 0; i < 2 && ms < 2000; i++) {
    uint64_t clock = pmoei_now_ns();
    run_phase(f, p);
    ms = (double)pmoei_ms_since(&clock);
  }
  return ms;
}

static pmoe_status tune(bench_floor *f, phase *p) {
  static const int64_t blocks[NUM_BLOCKS] = {128, 256, 512, INT64_MAX / 2};
  int best = 0;
  double best_ms = 0;
  for (int i = 0; i < NUM_BLOCKS; i++) {
    PMOEI_TRY(cut(p, blocks[i]));
    double ms = time_of(f, p);
    if (i == 0 || ms < best_ms) best = i, best_ms = ms;
  }
  return cut(p, blocks[best]);
}

/* ---- building ---- */
/* Numbers of ordinary size: zeros, infinities and denormals have speeds of their own. */
static pmoe_status take(bench_floor *f, pmoe_dtype dtype, int64_t n, void **out) {
  size_t size = pmoe_dtype_size(dtype);
  if (posix_memalign(out, PMOEI_ALIGN, ((size_t)n + 1) * size) != 0) return PMOE_ERR_NOMEM;
  f->buffer[f->num_buffers++] = *out;
  enum { PERIOD = 4099 };
  float value[PERIOD];
  uint32_t state = 1;
  for (int i = 0; i < PERIOD; i++) {
    state = state * 1664525u + 1013904223u;
    value[i] = ((float)(state >> 8) * 0x1p-23f - 1.0f) * 0.05f;
  }
  for (int64_t i = 0; i < n; i += PERIOD)
    pmoei_from_f32((char *)*out + (size_t)i * size, dtype, value, n - i < PERIOD ? n - i : PERIOD);
  return PMOE_OK;
}

static const void *at(const void *p, pmoe_dtype dtype, int64_t element) {
  return (const char *)p + (size_t)element * pmoe_dtype_size(dtype);
}

typedef struct buffers {
  void *x, *pre, *y, *dpre; /* rows */
  void *w1, *w2, *g1, *g2;  /* experts */
} buffers;

/* Row-major c[m,n] = op(a) op(b) with tightly packed operands. */
static pmoei_product product(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, pmoe_dtype in,
                             pmoe_dtype out) {
  pmoei_product p = {
      .trans_a = trans_a, .trans_b = trans_b, .accumulate = trans_a, .in = in, .out = out, .m = m, .n = n, .k = k};
  p.lda = trans_a ? m : k;
  p.ldb = trans_b ? k : n;
  p.ldc = n;
  return p;
}

static void set(pmoei_product *p, const void *a, const void *b, const void *c) { p->a = a, p->b = b, p->c = (void *)c; }

/* The six products of one expert with n rows from row `first` on. Gated activations hand fc2 the first half of pre's
 * columns. */
static void expert_chains(bench_floor *f, const bench_floor_shape *s, const buffers *b, int32_t expert, int64_t first,
                          int64_t n) {
  int64_t h = s->hidden, i = s->inner, i1 = s->inner1;
  pmoe_dtype d = s->dtype;
  const void *x = at(b->x, d, first * h), *y = at(b->y, d, first * h), *pre = at(b->pre, d, first * i1),
             *dpre = at(b->dpre, d, first * i1);
  const void *w1 = at(b->w1, d, expert * i1 * h), *w2 = at(b->w2, d, expert * h * i);
  const void *g1 = at(b->g1, PMOE_F32, expert * i1 * h), *g2 = at(b->g2, PMOE_F32, expert * h * i);

  chain *c = &f->phase[0].chains[f->phase[0].num_chains++];
  *c = (chain){{product(false, true, n, i1, h, d, d), product(false, true, n, h, i, d, d)}, 2};
  set(&c->product[0], x, w1, pre);
  set(&c->product[1], pre, w2, y);
  c->product[1].lda = i1;

  c = &f->phase[1].chains[f->phase[1].num_chains++];
  *c = (chain){{product(false, false, n, i, h, d, d), product(false, false, n, h, i1, d, d)}, 2};
  set(&c->product[0], y, w2, dpre);
  c->product[0].ldc = i1;
  set(&c->product[1], dpre, w1, x);

  c = &f->phase[2].chains[f->phase[2].num_chains++];
  *c = (chain){{product(true, false, h, i, n, d, PMOE_F32)}, 1};
  set(&c->product[0], y, pre, g2);
  c->product[0].ldb = i1;
  c = &f->phase[2].chains[f->phase[2].num_chains++];
  *c = (chain){{product(true, false, i1, h, n, d, PMOE_F32)}, 1};
  set(&c->product[0], dpre, x, g1);
}

static pmoe_status new_floor(pmoe_ctx *ctx, int32_t num_phases, int64_t num_chains, bench_floor **out) {
  bench_floor *f = calloc(1, sizeof *f);
  if (!f) return pmoei_error(PMOE_ERR_NOMEM, "no memory for a floor");
  *out = f;
  pmoei_ctx_retain(ctx);
  f->ctx = ctx;
  f->num_phases = num_phases;
  for (int32_t i = 0; i < num_phases; i++) {
    f->phase[i].chains = calloc((size_t)num_chains + 1, sizeof(chain));
    if (!f->phase[i].chains) return pmoei_error(PMOE_ERR_NOMEM, "no memory for a floor");
  }
  return PMOE_OK;
}

static pmoe_status finish_floor(bench_floor *f, pmoe_status status, bench_floor **out) {
  for (int32_t i = 0; i < f->num_phases && status == PMOE_OK; i++) status = tune(f, &f->phase[i]);
  if (status == PMOE_OK) status = pmoei_gemm_take_error(f->ctx->gemm);
  if (status == PMOE_OK) {
    *out = f;
    return PMOE_OK;
  }
  bench_floor_destroy(f);
  return status;
}

pmoe_status bench_floor_experts(pmoe_ctx *ctx, const bench_floor_shape *s, bench_floor **out) {
  bench_floor *f = NULL;
  pmoe_status status = new_floor(ctx, NUM_PHASES, 2 * (int64_t)s->num_experts, &f);
  if (!f) return status;
  int64_t rows = 0, e = s->num_experts;
  for (int32_t i = 0; i < e; i++) rows += s->rows[i];
  buffers b = {0};
  if (status == PMOE_OK) status = take(f, s->dtype, rows * s->hidden, &b.x);
  if (status == PMOE_OK) status = take(f, s->dtype, rows * s->inner1, &b.pre);
  if (status == PMOE_OK) status = take(f, s->dtype, rows * s->hidden, &b.y);
  if (status == PMOE_OK) status = take(f, s->dtype, rows * s->inner1, &b.dpre);
  if (status == PMOE_OK) status = take(f, s->dtype, e * s->inner1 * s->hidden, &b.w1);
  if (status == PMOE_OK) status = take(f, s->dtype, e * s->hidden * s->inner, &b.w2);
  if (status == PMOE_OK) status = take(f, PMOE_F32, e * s->inner1 * s->hidden, &b.g1);
  if (status == PMOE_OK) status = take(f, PMOE_F32, e * s->hidden * s->inner, &b.g2);
  int64_t first = 0;
  for (int32_t i = 0; i < e && status == PMOE_OK; first += s->rows[i++])
    if (s->rows[i] > 0) expert_chains(f, s, &b, i, first, s->rows[i]);
  return finish_floor(f, status, out);
}

pmoe_status bench_floor_gate(pmoe_ctx *ctx, int64_t tokens, int64_t hidden, int64_t experts, bench_floor **out) {
  bench_floor *f = NULL;
  pmoe_status status = new_floor(ctx, 3, 1, &f);
  if (!f) return status;
  void *x, *dx, *logits, *w, *g;
  if (status == PMOE_OK) status = take(f, PMOE_F32, tokens * hidden, &x);
  if (status == PMOE_OK) status = take(f, PMOE_F32, tokens * hidden, &dx);
  if (status == PMOE_OK) status = take(f, PMOE_F32, tokens * experts, &logits);
  if (status == PMOE_OK) status = take(f, PMOE_F32, experts * hidden, &w);
  if (status == PMOE_OK) status = take(f, PMOE_F32, experts * hidden, &g);
  if (status != PMOE_OK) return finish_floor(f, status, out);
  pmoei_product forward = product(false, true, tokens, experts, hidden, PMOE_F32, PMOE_F32);
  set(&forward, x, w, logits);
  pmoei_product to_x = product(false, false, tokens, hidden, experts, PMOE_F32, PMOE_F32);
  set(&to_x, logits, w, dx);
  to_x.accumulate = true;
  pmoei_product to_w = product(true, false, experts, hidden, tokens, PMOE_F32, PMOE_F32);
  set(&to_w, logits, x, g);
  f->phase[0].chains[f->phase[0].num_chains++] = (chain){{forward}, 1};
  f->phase[1].chains[f->phase[1].num_chains++] = (chain){{forward, to_x}, 2};
  f->phase[2].chains[f->phase[2].num_chains++] = (chain){{to_w}, 1};
  return finish_floor(f, status, out);
}

void bench_floor_destroy(bench_floor *f) {
  if (!f) return;
  for (int32_t i = 0; i < f->num_phases; i++) {
    free(f->phase[i].chains);
    free(f->phase[i].tasks);
  }
  for (int32_t i = 0; i < f->num_buffers; i++) free(f->buffer[i]);
  pmoei_ctx_release(f->ctx);
  free(f);
}

/* ---- copy ---- */
static void copy_piece(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const bench_copy *c = arg;
  size_t pieces = (size_t)c->ctx->threads, piece = (c->bytes / pieces + 63) / 64 * 64;
  size_t first = (size_t)index * piece;
  if (first >= c->bytes) return;
  memcpy((char *)c->dst + first, (const char *)c->src + first, c->bytes - first < piece ? c->bytes - first : piece);
}

pmoe_status bench_copy_run(void *arg) {
  bench_copy *c = arg;
  pmoei_parallel(c->ctx, c->ctx->threads, copy_piece, c);
  return PMOE_OK;
}

/* ---- exponentiation ---- */
enum { NUMBERS_PER_TASK = 1 << 13 };

PMOEI_VECTORISED static void exponentiate(float *restrict out, const float *restrict in, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = pmoei_expf(in[i]);
}

static void exponentiate_piece(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const bench_exp *e = arg;
  int64_t first = index * NUMBERS_PER_TASK, rest = e->n - first;
  exponentiate(e->out + first, e->in + first, rest < NUMBERS_PER_TASK ? rest : NUMBERS_PER_TASK);
}

pmoe_status bench_exp_run(void *arg) {
  bench_exp *e = arg;
  pmoei_parallel(e->ctx, (e->n + NUMBERS_PER_TASK - 1) / NUMBERS_PER_TASK, exponentiate_piece, e);
  return PMOE_OK;
}

/* ---- exchange ---- */
pmoe_status bench_swap_run(void *arg) {
  const bench_swap *s = arg;
  pmoei_exchange exchange = {.what = "bench_swap", .num_parts = 1, .part = {{s->send, s->recv, s->row_bytes}}};
  exchange.send_first = s->send_first, exchange.send_rows = s->send_rows;
  exchange.recv_first = s->recv_first, exchange.recv_rows = s->recv_rows;
  PMOEI_TRY(pmoei_exchange_start(s->comm, &exchange));
  return pmoei_exchange_finish(s->comm, &exchange);
}
