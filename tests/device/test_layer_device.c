/* What only a device has: steps that nobody waits for, graphs, float16, and the ways to multiply. */
#include "ranks/world.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "support/rig.h"

/* These calls are to go on while the device works. */
#undef pmoe_layer_forward
#undef pmoe_layer_backward

enum { TOKENS = 20, STEPS = 3 };

static rig_spec fixed_spec(void) {
  rig_spec spec = rig_spec_default();
  spec.gate.capacity_factor = 1.25f;
  spec.gate.eval_capacity_factor = 1.25f;
  spec.a2a.sizing = PMOE_SIZING_FIXED;
  spec.a2a.max_tokens = TOKENS;
  spec.residual.mix = PMOE_MIX_LEARNED;
  return spec;
}

typedef struct bench {
  rig r;
  rig_step s;
  pmoe_stash *stash;
} bench;

static int open_bench(bench *b, pmoe_ctx *ctx, pmoe_topology *topology, const rig_spec *spec, const rig_plan *plan) {
  int failures = 0;
  CHECK(failures, rig_create(&b->r, ctx, topology, spec) == PMOE_OK, "%s", pmoe_last_error());
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = TOKENS;
  CHECK(failures, pmoe_stash_create(b->r.layer, &cfg, NULL, 0, &b->stash) == PMOE_OK, "%s", pmoe_last_error());
  rig_step_begin(&b->r, &b->s, plan);
  return failures;
}

static void close_bench(bench *b) {
  rig_step_end(&b->s);
  pmoe_stash_destroy(b->stash);
  rig_destroy(&b->r);
}

static int enqueue(bench *b, cudaStream_t stream) {
  int failures = 0;
  CHECK(failures, pmoe_layer_forward(b->r.layer, b->stash, &b->s.step, &b->s.x, &b->s.y, stream) == PMOE_OK, "%s",
        pmoe_last_error());
  CHECK(failures,
        pmoe_layer_backward(b->r.layer, b->stash, (float)b->s.plan.loss_scale, &b->s.dy, &b->s.dx, PMOE_BWD_ALL,
                            stream) == PMOE_OK,
        "%s", pmoe_last_error());
  return failures;
}

static int wait_for(cudaStream_t stream) {
  int failures = 0;
  cudaError_t error = cudaStreamSynchronize(stream);
  CHECK(failures, error == cudaSuccess, "%s", cudaGetErrorString(error));
  return failures;
}

/* Bits of y, dx and gradients after one step with gradients from zero. */
static int same_bits(const bench *b, const void *expected, size_t bytes, const char *what) {
  int failures = 0;
  size_t got;
  void *bits = rig_snapshot(&b->r, &b->s, &got);
  CHECK(failures, got == bytes && memcmp(bits, expected, bytes) == 0, "%s: other bits", what);
  free(bits);
  return failures;
}

/* A step in a graph, which forbids every call that waits, gives what it gave outside, each time it runs. */
static int captured(world *w) {
  int failures = 0;
  pmoe_topology *topology = NULL;
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.ep = w->nranks;
  CHECK(failures, pmoe_topology_create(w->ctx, w->comm, &cfg, &topology) == PMOE_OK, "%s", pmoe_last_error());
  rig_spec spec = fixed_spec();
  rig_plan plan = {
      .label = "graph", .num_ranks = w->nranks, .rank = w->rank, .training = 1, .loss_scale = 1, .seed = 3};
  for (int p = 0; p < w->nranks; p++) plan.rank_tokens[p] = TOKENS - p;
  bench b = {0};
  failures += open_bench(&b, w->ctx, topology, &spec, &plan);
  cudaStream_t stream = NULL;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  CHECK(failures, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "no stream");
  if (failures == 0) failures += enqueue(&b, stream) + wait_for(stream);
  size_t bytes = 0;
  void *bits = rig_snapshot(&b.r, &b.s, &bytes);
  CHECK(failures, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess, "no capture");
  failures += enqueue(&b, stream);
  CHECK(failures, cudaStreamEndCapture(stream, &graph) == cudaSuccess && graph, "the capture was broken");
  CHECK(failures, failures || cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "no graph");
  for (int i = 0; i < STEPS && failures == 0; i++) {
    rig_zero_grads(&b.r);
    memset(b.s.y.data, 0xff, (size_t)(b.s.y.rows * b.s.y.ld) * sizeof(float));
    CHECK(failures, cudaGraphLaunch(exec, stream) == cudaSuccess, "no launch");
    failures += wait_for(stream) + same_bits(&b, bits, bytes, "graph");
  }
  pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
  CHECK(failures, pmoe_stash_metrics(b.stash, &m) == PMOE_OK && m.tokens == TOKENS - w->rank, "%s", pmoe_last_error());
  free(bits);
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
  close_bench(&b);
  pmoe_topology_destroy(topology);
  return failures;
}

static void test_a_step_in_a_graph(void **state) {
  (void)state;
  for (int32_t n = 1; n <= 4; n *= 2) world_run(n, captured, NULL);
}

static int eager_in_a_graph(world *w) {
  int failures = 0;
  rig_spec spec = rig_spec_default();
  rig_plan plan = rig_plan_of("eager", TOKENS, 1);
  bench b = {0};
  cudaStream_t stream = NULL;
  cudaGraph_t graph = NULL;
  failures += open_bench(&b, w->ctx, NULL, &spec, &plan);
  CHECK(failures, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "no stream");
  failures += enqueue(&b, stream) + wait_for(stream);
  CHECK(failures, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess, "no capture");
  CHECK(failures,
        pmoe_layer_forward(b.r.layer, b.stash, &b.s.step, &b.s.x, &b.s.y, stream) == PMOE_ERR_UNSUPPORTED &&
            strstr(pmoe_last_error(), "captured"),
        "%s", pmoe_last_error());
  (void)cudaStreamEndCapture(stream, &graph);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
  close_bench(&b);
  return failures;
}

static void test_eager_sizing_in_a_graph_is_refused(void **state) {
  (void)state;
  world_run(1, eager_in_a_graph, NULL);
}

/* Two micro-batches in flight, forwards before backwards, with nobody waiting in between: the same bits as one by one.
 */
static int in_flight(world *w) {
  int failures = 0;
  rig_spec spec = fixed_spec();
  bench b[2];
  memset(b, 0, sizeof b);
  void *bits[2];
  size_t bytes[2];
  for (int i = 0; i < 2; i++) {
    rig_plan plan = rig_plan_of("in flight", TOKENS - i, 5 + (uint64_t)i);
    failures += open_bench(&b[i], w->ctx, NULL, &spec, &plan) + enqueue(&b[i], NULL) + wait_for(NULL);
    bits[i] = rig_snapshot(&b[i].r, &b[i].s, &bytes[i]);
    rig_zero_grads(&b[i].r);
  }
  for (int i = 0; i < 2; i++)
    CHECK(failures, pmoe_layer_forward(b[i].r.layer, b[i].stash, &b[i].s.step, &b[i].s.x, &b[i].s.y, NULL) == PMOE_OK,
          "%s", pmoe_last_error());
  pmoe_metrics m = PMOE_CONFIG_INIT(pmoe_metrics);
  pmoe_status early = pmoe_stash_metrics(b[1].stash, &m);
  CHECK(failures, early == PMOE_PENDING || early == PMOE_OK, "%s", pmoe_last_error());
  for (int i = 1; i >= 0; i--)
    CHECK(failures,
          pmoe_layer_backward(b[i].r.layer, b[i].stash, 1, &b[i].s.dy, &b[i].s.dx, PMOE_BWD_ALL, NULL) == PMOE_OK, "%s",
          pmoe_last_error());
  failures += wait_for(NULL);
  for (int i = 0; i < 2; i++) {
    failures += same_bits(&b[i], bits[i], bytes[i], "in flight");
    CHECK(failures, pmoe_stash_metrics(b[i].stash, &m) == PMOE_OK && m.tokens == TOKENS - i, "%s", pmoe_last_error());
    free(bits[i]);
    close_bench(&b[i]);
  }
  return failures;
}

static void test_steps_that_nobody_waits_for(void **state) {
  (void)state;
  world_run(1, in_flight, NULL);
}

/* Steps on one stash, enqueued faster than the device works them off: none is missing in the load. */
static int load_of_all(world *w) {
  int failures = 0;
  rig_spec spec = rig_spec_default();
  rig_plan plan = rig_plan_of("load", TOKENS, 4);
  bench b;
  memset(&b, 0, sizeof b);
  failures += open_bench(&b, w->ctx, NULL, &spec, &plan);
  for (int i = 0; i < STEPS && failures == 0; i++) failures += enqueue(&b, NULL);
  pmoe_load load = PMOE_CONFIG_INIT(pmoe_load);
  CHECK(failures, pmoe_layer_load(b.r.layer, &load) == PMOE_OK && load.forwards == STEPS, "%d steps in the load",
        (int)load.forwards);
  failures += wait_for(NULL);
  close_bench(&b);
  return failures;
}

static void test_load_of_steps_that_nobody_waits_for(void **state) {
  (void)state;
  world_run(1, load_of_all, NULL);
}

/* float16 against the reference, at its precision; and refused on the CPU. */
static int half(world *w) {
  int failures = 0;
  rig_spec spec = rig_spec_default();
  spec.hidden = 16;
  spec.experts.inner = 24;
  spec.experts.act = PMOE_ACT_SWIGLU;
  spec.experts.dtype = PMOE_F16;
  spec.residual.mix = PMOE_MIX_GATED_SUM;
  spec.residual.dtype = PMOE_F16;
  rig_plan plan = rig_plan_of("float16", TOKENS, 9);
  rig r;
  CHECK(failures, rig_create(&r, w->ctx, NULL, &spec) == PMOE_OK, "%s", pmoe_last_error());
  if (!failures) failures += rig_run(&r, &plan, 0, 0);
  rig_destroy(&r);
  pmoe_ctx *cpu;
  CHECK(failures, (pmoe_ctx_create)(NULL, &cpu) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, rig_create(&r, cpu, NULL, &spec) == PMOE_ERR_ARG && strstr(pmoe_last_error(), "float16"), "%s",
        pmoe_last_error());
  pmoe_ctx_destroy(cpu);
  return failures;
}

static void test_float16(void **state) {
  (void)state;
  world_run(1, half, NULL);
}

/* One by one on several streams, and grouped in one call. */
static void test_ways_to_multiply(void **state) {
  (void)state;
  const char *ways[] = {"cublas", "cublas-grouped"};
  for (int i = 0; i < 2; i++) {
    pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
    cfg.gemm = ways[i];
    pmoe_ctx *ctx;
    assert_ok(pmoe_ctx_create(&cfg, &ctx));
    pmoe_gemm_info info = PMOE_CONFIG_INIT(pmoe_gemm_info);
    assert_ok(pmoe_ctx_gemm_info(ctx, &info));
    assert_string_equal(info.provider, ways[i]);
    rig_spec spec = rig_spec_default();
    rig_plan plan = rig_plan_of(ways[i], TOKENS, 2);
    rig r;
    assert_ok(rig_create(&r, ctx, NULL, &spec));
    assert_int_equal(rig_run(&r, &plan, 0, 0), 0);
    rig_destroy(&r);
    pmoe_ctx_destroy(ctx);
  }
}

static void test_bad_contexts(void **state) {
  (void)state;
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.backend = PMOE_BACKEND_CUDA;
  pmoe_ctx *ctx = NULL;
  cfg.device = 99;
  assert_int_equal((pmoe_ctx_create)(&cfg, &ctx), PMOE_ERR_ARG);
  assert_non_null(strstr(pmoe_last_error(), "cfg->device is 99"));
  cfg.device = 0;
  cfg.gemm = "onednn";
  assert_int_equal((pmoe_ctx_create)(&cfg, &ctx), PMOE_ERR_ARG);
  assert_non_null(strstr(pmoe_last_error(), "cublas-grouped"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_step_in_a_graph),
      cmocka_unit_test(test_eager_sizing_in_a_graph_is_refused),
      cmocka_unit_test(test_steps_that_nobody_waits_for),
      cmocka_unit_test(test_load_of_steps_that_nobody_waits_for),
      cmocka_unit_test(test_float16),
      cmocka_unit_test(test_ways_to_multiply),
      cmocka_unit_test(test_bad_contexts),
  };
  return world_main("layer on a device", tests, sizeof tests / sizeof tests[0]);
}
