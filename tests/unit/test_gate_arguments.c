/* Every bad argument is refused with its name, and nothing is written; every failed allocation is survived. */
#include "test_gate_case.h"

#include "gating/gate_ops.h"

enum { T = 70, H = 6, E = 5, K = 2 };

static pmoe_gate_config good(void) {
  pmoe_gate_config cfg = gate_config(E, K);
  cfg.bias = 1;
  cfg.capacity_factor = 1;
  cfg.aux_coef = cfg.z_coef = 1;
  return cfg;
}

static void assert_refused(pmoe_status status, const char *word) {
  if (status != PMOE_ERR_ARG)
    fail_msg("status %s where an error naming %s was expected", pmoe_status_name(status), word);
  if (!strstr(pmoe_last_error(), word)) fail_msg("\"%s\" does not name %s", pmoe_last_error(), word);
}

static void refuse_config(pmoe_ctx *ctx, pmoe_gate_config cfg, const char *word) {
  pmoe_gate *gate = NULL;
  assert_refused(pmoe_gate_create(ctx, H, 0, &cfg, &gate), word);
  assert_null(gate);
}

#define BAD(field, value)                                                                                              \
  do {                                                                                                                 \
    pmoe_gate_config bad_ = good();                                                                                    \
    bad_.field = (value);                                                                                              \
    refuse_config(ctx, bad_, #field);                                                                                  \
  } while (0)

static void test_config(void **state) {
  (void)state;
  pmoe_ctx *ctx;
  pmoe_gate *gate = NULL;
  pmoe_gate_config cfg = good();
  assert_int_equal(pmoe_ctx_create(NULL, &ctx), PMOE_OK);
  BAD(num_experts, 0);
  BAD(num_experts, -3);
  BAD(top_k, 0);
  BAD(top_k, E + 1);
  BAD(score, (pmoe_score)7);
  BAD(norm, (pmoe_norm)3);
  BAD(norm, (pmoe_norm)-1);
  BAD(drop, (pmoe_drop)4);
  BAD(softmax_after_topk, 2);
  BAD(aux_first_choice_only, -1);
  BAD(gumbel, 2);
  BAD(bias, 9);
  BAD(weight_scale, -1.0f);
  BAD(weight_scale, NAN);
  BAD(aux_coef, -0.1f);
  BAD(aux_coef, INFINITY);
  BAD(z_coef, NAN);
  BAD(jitter, 1.0f);
  BAD(jitter, -0.1f);
  BAD(jitter, NAN);
  BAD(capacity_factor, -1.0f);
  BAD(capacity_factor, NAN);
  BAD(capacity_factor, 1e-7f);
  BAD(eval_capacity_factor, -1.0f);
  BAD(eval_capacity_factor, INFINITY);
  BAD(min_capacity, -1);
  cfg.top_k = 3;
  cfg.gumbel = 1;
  refuse_config(ctx, cfg, "gumbel");
  /* one choice whose weight would always be 1 */
  cfg = gate_config(E, 1);
  cfg.softmax_after_topk = 1;
  refuse_config(ctx, cfg, "softmax_after_topk");
  for (int norm = PMOE_NORM_BEFORE_DROP; norm <= PMOE_NORM_AFTER_DROP; norm++) {
    cfg = gate_config(E, 1);
    cfg.norm = (pmoe_norm)norm;
    refuse_config(ctx, cfg, "would not learn");
  }
  cfg = good();
  assert_refused(pmoe_gate_create(NULL, H, 0, &cfg, &gate), "ctx");
  assert_refused(pmoe_gate_create(ctx, H, 0, NULL, &gate), "cfg");
  assert_refused(pmoe_gate_create(ctx, H, 0, &cfg, NULL), "out");
  assert_refused(pmoe_gate_create(ctx, 0, 0, &cfg, &gate), "hidden");
  assert_refused(pmoe_gate_create(ctx, H, -1, &cfg, &gate), "layer_id");
  cfg.size = 0;
  assert_refused(pmoe_gate_create(ctx, H, 0, &cfg, &gate), "size");
  struct {
    pmoe_gate_config known;
    int64_t extra;
  } future = {good(), 1};
  future.known.size = sizeof future;
  assert_int_equal(pmoe_gate_create(ctx, H, 0, &future.known, &gate), PMOE_ERR_VERSION);
  assert_null(gate);
  pmoe_gate_destroy(NULL);
  pmoe_ctx_destroy(ctx);
}

static void test_capacity(void **state) {
  (void)state;
  int64_t capacity = 42;
  assert_refused(pmoe_gate_capacity(-1, 4, 1, 1, 0, &capacity), "tokens");
  assert_refused(pmoe_gate_capacity(1, 0, 1, 1, 0, &capacity), "num_experts");
  assert_refused(pmoe_gate_capacity(1, 4, 0, 1, 0, &capacity), "top_k");
  assert_refused(pmoe_gate_capacity(1, 4, 5, 1, 0, &capacity), "top_k");
  assert_refused(pmoe_gate_capacity(1, 4, 1, -1, 0, &capacity), "capacity_factor");
  assert_refused(pmoe_gate_capacity(1, 4, 1, NAN, 0, &capacity), "capacity_factor");
  assert_refused(pmoe_gate_capacity(1, 4, 1, 2e9f, 0, &capacity), "capacity_factor");
  assert_refused(pmoe_gate_capacity(1, 4, 1, 1, -1, &capacity), "min_capacity");
  assert_refused(pmoe_gate_capacity(INT64_MAX, 4, 2, 1, 0, &capacity), "tokens");
  assert_int_equal(capacity, 42);
  assert_refused(pmoe_gate_capacity(1, 4, 1, 1, 0, NULL), "capacity");
}

/* The arguments of a forward and a backward, to be spoilt one at a time. */
typedef struct arguments {
  gate_case *c;
  pmoe_gate *gate;
  pmoe_gate_params params, *params_pointer;
  pmoe_step step;
  pmoe_mat x, *x_pointer, dx, *dx_pointer;
  pmoe_routing routing, *routing_pointer;
  pmoe_gate_stats stats;
  float *dweight, *dlogits, loss_scale;
  pmoe_bwd which;
} arguments;

static arguments arguments_of(gate_case *c) {
  arguments a = {.c = c,
                 .gate = c->gate,
                 .params = c->params,
                 .step = c->step,
                 .x = mat_f32(c->x, T, H),
                 .dx = mat_f32(c->dx, T, H),
                 .routing = c->routing,
                 .stats = c->stats,
                 .dweight = c->dweight,
                 .dlogits = c->dlogits,
                 .loss_scale = 1};
  return a;
}

static void snapshot(const gate_case *c, unsigned char *out) {
  const void *what[] = {c->routing.expert,
                        c->routing.slot,
                        c->routing.weight,
                        c->routing.expert_count,
                        c->routing.expert_rows,
                        c->dx,
                        c->dw,
                        c->db,
                        c->dlogits};
  const size_t bytes[] = {T * K * 4, T * K * 8, T * K * 4, E * 8, E * 8, T * H * 4, E * H * 4, E * 4, T * E * 4};
  for (int i = 0; i < 9; i++) {
    memcpy(out, what[i], bytes[i]);
    out += bytes[i];
  }
}

enum { SNAPSHOT = T * K * 16 + E * 16 + T * H * 4 + E * H * 4 + E * 4 + T * E * 4 };

static void refuse(arguments *a, bool backward, const char *word) {
  static unsigned char before[SNAPSHOT], after[SNAPSHOT];
  snapshot(a->c, before);
  pmoe_routing routing = a->routing;
  pmoe_gate_stats stats = a->stats;
  pmoe_status status;
  if (backward)
    status = pmoe_gate_backward(a->gate, a->params_pointer, &a->step, a->x_pointer, a->routing_pointer, a->dweight,
                                a->loss_scale, a->dlogits, a->dx_pointer, a->which, NULL);
  else
    status = pmoe_gate_forward(a->gate, a->params_pointer, &a->step, a->x_pointer, a->routing_pointer, &a->stats, NULL);
  assert_refused(status, word);
  snapshot(a->c, after);
  assert_memory_equal(before, after, SNAPSHOT);
  assert_memory_equal(&routing, &a->routing, sizeof routing);
  assert_memory_equal(&stats, &a->stats, sizeof stats);
}

/* Both, if the forward has that argument. */
#define SPOIL(word, statement)                                                                                         \
  do {                                                                                                                 \
    for (int backward_ = 0; backward_ <= 1; backward_++) {                                                             \
      arguments a = arguments_of(c);                                                                                   \
      a.params_pointer = &a.params;                                                                                    \
      a.x_pointer = &a.x;                                                                                              \
      a.dx_pointer = &a.dx;                                                                                            \
      a.routing_pointer = &a.routing;                                                                                  \
      statement;                                                                                                       \
      refuse(&a, backward_ != 0, word);                                                                                \
    }                                                                                                                  \
  } while (0)
#define SPOIL_BACKWARD(word, statement)                                                                                \
  do {                                                                                                                 \
    arguments a = arguments_of(c);                                                                                     \
    a.params_pointer = &a.params;                                                                                      \
    a.x_pointer = &a.x;                                                                                                \
    a.dx_pointer = &a.dx;                                                                                              \
    a.routing_pointer = &a.routing;                                                                                    \
    statement;                                                                                                         \
    refuse(&a, true, word);                                                                                            \
  } while (0)

static void test_forward_and_backward(void **state) {
  (void)state;
  gate_case *c = case_new(good(), T, H, 1);
  mask_some(c, 5);
  case_forward(c);
  case_backward(c, 1);
  SPOIL("gate", a.gate = NULL);
  SPOIL("params", a.params_pointer = NULL);
  SPOIL("size", a.params.size = 0);
  SPOIL("params->weight", a.params.weight = NULL);
  SPOIL("params->bias", a.params.bias = NULL);
  SPOIL("x is NULL", a.x_pointer = NULL);
  SPOIL("x->data", a.x.data = NULL);
  SPOIL("x->dtype", a.x.dtype = PMOE_F16);
  SPOIL("x->dtype", a.x.dtype = (pmoe_dtype)9);
  SPOIL("x->cols", a.x.cols = H - 1);
  SPOIL("x->ld", a.x.ld = H - 1);
  SPOIL("x->rows", a.x.rows = -1);
  SPOIL("x->rows", a.x.rows = INT64_MAX / 2);
  SPOIL("step->training", a.step.training = 2);
  SPOIL("first_token", a.step.first_token = -1);
  SPOIL("first_token", a.step.first_token = INT64_MAX);
  SPOIL("token_mask_len", a.step.token_mask_len = T - 1);
  SPOIL("token_mask_len", a.step.token_mask = NULL);
  SPOIL("size", a.step.size = 3);
  SPOIL("routing", a.routing_pointer = NULL);
  SPOIL("size", a.routing.size = 0);
  SPOIL("routing->expert", a.routing.expert = NULL);
  SPOIL("slot", a.routing.slot = NULL);
  SPOIL("weight", a.routing.weight = NULL);
  SPOIL("expert_count", a.routing.expert_count = NULL);
  SPOIL("expert_rows", a.routing.expert_rows = NULL);
  SPOIL_BACKWARD("routing->tokens", a.routing.tokens = T + 1);
  SPOIL_BACKWARD("routing->num_experts", a.routing.num_experts = E - 1);
  SPOIL_BACKWARD("routing->top_k", a.routing.top_k = 1);
  SPOIL_BACKWARD("which", a.which = (pmoe_bwd)5);
  SPOIL_BACKWARD("dweight", a.dweight = NULL);
  SPOIL_BACKWARD("loss_scale", a.loss_scale = NAN);
  SPOIL_BACKWARD("dx", a.dx_pointer = NULL);
  SPOIL_BACKWARD("dx->rows", a.dx.rows = T - 1);
  SPOIL_BACKWARD("dx->cols", a.dx.cols = H + 1);
  SPOIL_BACKWARD("dx->dtype", a.dx.dtype = PMOE_BF16);
  SPOIL_BACKWARD("weight_grad", a.params.weight_grad = NULL);
  SPOIL_BACKWARD("bias_grad", a.params.bias_grad = NULL);
  SPOIL_BACKWARD("dlogits", a.dlogits = NULL; a.which = PMOE_BWD_INPUT);
  SPOIL_BACKWARD("dlogits", a.dlogits = NULL; a.which = PMOE_BWD_WEIGHT);
  c->routing.expert[7] = E;
  SPOIL_BACKWARD("routing->expert[7]", (void)a);
  c->routing.expert[7] = -2;
  SPOIL_BACKWARD("routing->expert[7]", (void)a);
  c->routing.expert[7] = 0;
  c->stats.size = 1;
  arguments last = arguments_of(c);
  last.params_pointer = &last.params;
  last.x_pointer = &last.x;
  last.routing_pointer = &last.routing;
  refuse(&last, false, "stats");
  case_free(c);
  pmoe_gate_config cfg = good();
  cfg.bias = 0;
  c = case_new(cfg, T, H, 1);
  case_forward(c);
  SPOIL("params->bias", a.params.bias = c->b);
  case_free(c);
}

/* An allocator that fails its n-th call. */
typedef struct failing {
  int64_t calls, fail_at, live;
} failing;

static void *failing_alloc(void *user, size_t bytes, size_t align, pmoe_mem kind, pmoe_stream stream) {
  (void)kind, (void)stream;
  failing *f = user;
  if (++f->calls == f->fail_at) return NULL;
  f->live++;
  return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void failing_release(void *user, void *p, size_t bytes, pmoe_mem kind, pmoe_stream stream) {
  (void)bytes, (void)kind, (void)stream;
  ((failing *)user)->live--;
  free(p);
}

static pmoe_status whole_life(failing *f, gate_case *c) {
  pmoe_allocator allocator = {sizeof allocator, f, failing_alloc, failing_release};
  pmoe_ctx_config ctx_cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  ctx_cfg.allocator = &allocator;
  ctx_cfg.cpu_threads = 2;
  pmoe_ctx *ctx = NULL;
  pmoe_gate *gate = NULL;
  pmoe_mat x = mat_f32(c->x, T, H), dx = mat_f32(c->dx, T, H);
  pmoe_status status = pmoe_ctx_create(&ctx_cfg, &ctx);
  if (status == PMOE_OK) status = pmoe_gate_create(ctx, H, 0, &c->cfg, &gate);
  if (status == PMOE_OK) status = pmoe_gate_forward(gate, &c->params, &c->step, &x, &c->routing, &c->stats, NULL);
  if (status == PMOE_OK)
    status =
        pmoe_gate_backward(gate, &c->params, &c->step, &x, &c->routing, c->dweight, 1, NULL, &dx, PMOE_BWD_ALL, NULL);
  pmoe_gate_destroy(gate);
  pmoe_ctx_destroy(ctx);
  return status;
}

static void test_allocation_failures(void **state) {
  (void)state;
  gate_case *c = case_new(good(), T, H, 1);
  failing f = {0};
  assert_int_equal(whole_life(&f, c), PMOE_OK);
  assert_int_equal(f.live, 0);
  int64_t calls = f.calls;
  assert_true(calls >= 4);
  for (int64_t n = 1; n <= calls; n++) {
    f = (failing){.fail_at = n};
    assert_int_equal(whole_life(&f, c), PMOE_ERR_NOMEM);
    assert_int_equal(f.live, 0);
  }
  case_free(c);
}

/* The announced scratch suffices: with it, steps take nothing from the allocator. */
static void test_scratch_bytes(void **state) {
  (void)state;
  gate_case *c = case_new(good(), T, H, 2);
  size_t bytes = (pmoei_gate_scratch_bytes(c->gate, T, 0) + 63) / 64 * 64;
  void *mem = aligned_alloc(64, bytes);
  assert_non_null(mem);
  assert_int_equal(pmoe_ctx_set_scratch(c->ctx, mem, bytes), PMOE_OK);
  pmoe_memory before = PMOE_CONFIG_INIT(pmoe_memory), after = before;
  assert_int_equal(pmoe_ctx_memory(c->ctx, &before), PMOE_OK);
  pmoe_mat x = mat_f32(c->x, T, H), dx = mat_f32(c->dx, T, H);
  for (int i = 0; i < 2; i++) {
    case_forward(c);
    case_backward(c, 1);
    assert_int_equal(pmoe_gate_backward(c->gate, &c->params, &c->step, &x, &c->routing, c->dweight, 1, NULL, &dx,
                                        PMOE_BWD_ALL, NULL),
                     PMOE_OK);
  }
  assert_int_equal(pmoe_ctx_memory(c->ctx, &after), PMOE_OK);
  assert_int_equal(before.allocations, after.allocations);
  case_free(c);
  free(mem);
}

/* Structs of an older and of a newer header. */
static void test_structs_grow(void **state) {
  (void)state;
  gate_case *c = case_new(good(), T, H, 1);
  struct {
    pmoe_gate_stats known;
    int64_t extra;
  } wide = {.known.size = sizeof wide, .extra = 5};
  pmoe_mat x = mat_f32(c->x, T, H);
  assert_int_equal(pmoe_gate_forward(c->gate, &c->params, &c->step, &x, &c->routing, &wide.known, NULL), PMOE_OK);
  assert_int_equal(wide.known.size, sizeof wide);
  assert_int_equal(wide.known.tokens, T);
  assert_int_equal(wide.extra, 0);
  pmoe_gate_stats narrow = {.size = offsetof(pmoe_gate_stats, nonfinite), .nonfinite = -7};
  assert_int_equal(pmoe_gate_forward(c->gate, &c->params, &c->step, &x, &c->routing, &narrow, NULL), PMOE_OK);
  assert_int_equal(narrow.tokens, T);
  assert_int_equal(narrow.nonfinite, -7);
  case_free(c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_config),
      cmocka_unit_test(test_capacity),
      cmocka_unit_test(test_forward_and_backward),
      cmocka_unit_test(test_allocation_failures),
      cmocka_unit_test(test_scratch_bytes),
      cmocka_unit_test(test_structs_grow),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
