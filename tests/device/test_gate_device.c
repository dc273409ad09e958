/* The router on a device, its arrays in the device's own memory: the CPU's choices, element types, wrong numbers in
 * arrays that nobody can check, and capture in a graph. */
#include "unit/test_gate_case.h"

#include <cuda_runtime_api.h>

#include "core/data.h"
#include "core/dtype.h"
#include "gating/gate_ops.h"

static void check(cudaError_t error) {
  if (error != cudaSuccess) fail_msg("%s", cudaGetErrorString(error));
}

/* The same gate on the CPU. The device that was current stays so. */
static void use_cpu(gate_case *c) {
  int device;
  check(cudaGetDevice(&device));
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 1;
  cfg.seed = c->seed;
  pmoe_gate_destroy(c->gate);
  pmoe_ctx_destroy(c->ctx);
  assert_int_equal((pmoe_ctx_create)(&cfg, &c->ctx), PMOE_OK);
  assert_int_equal(pmoe_gate_create(c->ctx, (int32_t)c->H, c->layer, &c->cfg, &c->gate), PMOE_OK);
  check(cudaSetDevice(device));
}

enum { MAX_ARRAYS = 24 };
static void *taken[MAX_ARRAYS];
static int arrays;

static void *on_device(const void *host, size_t bytes) {
  void *p;
  check(cudaMalloc(&p, bytes > 0 ? bytes : 1));
  if (host) check(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice));
  assert_true(arrays < MAX_ARRAYS);
  taken[arrays++] = p;
  return p;
}

static void free_arrays(void) {
  while (arrays > 0) check(cudaFree(taken[--arrays]));
}

static void fetch(void *host, const void *device, size_t bytes) {
  check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
}

/* The case's arrays on the device; the case keeps its own. */
static gate_case moved(const gate_case *c) {
  gate_case d = *c;
  size_t E = (size_t)c->cfg.num_experts, T = (size_t)c->T, H = (size_t)c->H, K = (size_t)c->cfg.top_k;
  d.x = on_device(c->x, T * H * 4);
  d.w = on_device(c->w, E * H * 4);
  d.dx = on_device(c->dx, T * H * 4);
  d.dw = on_device(c->dw, E * H * 4);
  d.dweight = on_device(c->dweight, T * K * 4);
  d.dlogits = on_device(NULL, T * E * 4);
  d.mask = on_device(c->mask, T);
  d.params.weight = c->params.weight ? d.w : NULL;
  d.params.weight_grad = c->params.weight ? d.dw : NULL;
  d.params.bias = c->cfg.bias ? on_device(c->b, E * 4) : NULL;
  d.params.bias_grad = c->cfg.bias ? on_device(c->db, E * 4) : NULL;
  d.params.selection_bias = c->cfg.selection_bias ? on_device(c->selection_bias, E * 4) : NULL;
  if (c->step.token_mask) d.step.token_mask = d.mask;
  d.routing.expert = on_device(NULL, T * K * 4);
  d.routing.slot = on_device(NULL, T * K * 8);
  d.routing.weight = on_device(NULL, T * K * 4);
  d.routing.expert_count = on_device(NULL, E * 8);
  d.routing.expert_rows = on_device(NULL, E * 8);
  d.routing.loss_sums = on_device(NULL, (MAX_SEQUENCES + 2) * (E + 1) * 8);
  return d;
}

static void fetch_routing(gate_case *c, const gate_case *d) {
  size_t E = (size_t)c->cfg.num_experts, n = (size_t)c->T * (size_t)c->cfg.top_k;
  fetch(c->routing.expert, d->routing.expert, n * 4);
  fetch(c->routing.slot, d->routing.slot, n * 8);
  fetch(c->routing.weight, d->routing.weight, n * 4);
  fetch(c->routing.expert_count, d->routing.expert_count, E * 8);
  fetch(c->routing.expert_rows, d->routing.expert_rows, E * 8);
}

static void assert_near(const float *a, const float *b, size_t n, float tolerance) {
  for (size_t i = 0; i < n; i++)
    if (!(fabsf(a[i] - b[i]) <= tolerance) && !(isnan(a[i]) && isnan(b[i])))
      fail_msg("number %zu is %g, the CPU's %g", i, (double)a[i], (double)b[i]);
}

/* Logits are the host's, so the choices must be the very same: many ties, some NaN and infinities. */
static void compare_with_cpu(pmoe_gate_config cfg, int64_t T) {
  cfg.router = PMOE_ROUTER_HOST_LOGITS;
  size_t E = (size_t)cfg.num_experts, n = (size_t)T * (size_t)cfg.top_k;
  gate_case *cpu = case_new(cfg, T, 4, 1), *c = case_new(cfg, T, 4, 1);
  float *logits = room((size_t)T * E, 4), *gradient = room((size_t)T * E, 4), *want = room((size_t)T * E, 4);
  uint64_t seed = 11;
  for (size_t i = 0; i < (size_t)T * E; i++) {
    float r = draw(&seed);
    logits[i] = r > 0.99f ? NAN : r < -0.99f ? -INFINITY : floorf(8 * r) / 4;
  }
  use_cpu(cpu);
  mask_some(c, 5);
  mask_some(cpu, 5);
  pmoe_mat rows = mat_f32(logits, T, cfg.num_experts), back = mat_f32(want, T, cfg.num_experts);
  cpu->step.logits = &rows;
  cpu->step.dlogits = &back;
  case_forward(cpu);
  case_backward(cpu, 0.5f);
  gate_case d = moved(c);
  pmoe_mat device_rows = rows, device_back = back, x = mat_f32(d.x, T, 4), dx = mat_f32(d.dx, T, 4);
  device_rows.data = on_device(logits, (size_t)T * E * 4);
  device_back.data = d.dlogits;
  d.step.logits = &device_rows;
  d.step.dlogits = &device_back;
  assert_int_equal(pmoe_gate_forward(d.gate, &d.params, &d.step, &x, &d.routing, &d.stats, NULL), PMOE_OK);
  assert_int_equal(
      pmoe_gate_backward(d.gate, &d.params, &d.step, &x, &d.routing, d.dweight, 0.5f, NULL, &dx, PMOE_BWD_ALL, NULL),
      PMOE_OK);
  fetch_routing(c, &d);
  fetch(gradient, d.dlogits, (size_t)T * E * 4);
  assert_memory_equal(c->routing.expert, cpu->routing.expert, n * 4);
  assert_memory_equal(c->routing.slot, cpu->routing.slot, n * 8);
  assert_memory_equal(c->routing.expert_count, cpu->routing.expert_count, E * 8);
  assert_memory_equal(c->routing.expert_rows, cpu->routing.expert_rows, E * 8);
  assert_near(c->routing.weight, cpu->routing.weight, n, 1e-6f);
  assert_near(gradient, want, (size_t)T * E, 1e-6f);
  assert_near(&d.stats.aux_loss, &cpu->stats.aux_loss, 1, 1e-6f);
  assert_near(&d.stats.z_loss, &cpu->stats.z_loss, 1, 1e-5f);
  assert_true(d.stats.nonfinite == cpu->stats.nonfinite && d.stats.masked == cpu->stats.masked);
  free_arrays();
  free(logits);
  free(gradient);
  free(want);
  case_free(c);
  case_free(cpu);
}

static void test_choices_are_the_cpus(void **state) {
  (void)state;
  for (int drop = 0; drop <= PMOE_DROP_TOKEN_ORDER; drop++)
    for (int32_t K = 1; K <= 20; K = K * 2 + 1) {
      pmoe_gate_config cfg = gate_config(70, K);
      cfg.drop = (pmoe_drop)drop;
      cfg.capacity_factor = drop ? 0.8f : 0;
      cfg.aux_coef = 0.1f;
      cfg.z_coef = 0.01f;
      cfg.norm = K > 1 ? PMOE_NORM_AFTER_DROP : PMOE_NORM_NONE;
      compare_with_cpu(cfg, 333);
    }
  pmoe_gate_config cfg = gate_config(70, 3);
  cfg.capacity_factor = cfg.eval_capacity_factor = 2;
  cfg.choice = PMOE_CHOICE_EXPERT_CHOICE;
  compare_with_cpu(cfg, 333);
  cfg = gate_config(3000, 5); /* more experts than one piece of masks, and than threads of the scan */
  cfg.capacity_factor = 1;
  compare_with_cpu(cfg, 130);
}

/* Rows of 16 bits, many enough for several pieces of x in float32. */
static void run_type(pmoe_dtype dtype, int64_t T, int64_t H, bool jitter) {
  pmoe_gate_config cfg = gate_config(2, 1);
  cfg.jitter = jitter ? 0.25f : 0;
  cfg.bias = 1;
  gate_case *cpu = case_new(cfg, T, H, 1), *c = case_new(cfg, T, H, 1);
  size_t cells = (size_t)(T * H);
  use_cpu(cpu);
  uint16_t *bits = room(cells, 2);
  for (size_t i = 0; i < cells; i++) {
    c->x[i] = cpu->x[i] = roundf(16 * c->x[i]) / 16; /* the same in every type */
    bits[i] = dtype == PMOE_BF16 ? pmoei_f32_to_bf16(c->x[i]) : pmoei_f32_to_f16(c->x[i]);
  }
  mask_some(c, 3);
  mask_some(cpu, 3);
  case_forward(cpu);
  case_backward(cpu, 1);
  memset(c->dw, 0, (size_t)(2 * H) * 4);
  memset(c->db, 0, 8);
  gate_case d = moved(c);
  pmoe_mat x = {on_device(bits, cells * 2), dtype, T, H, H}, dx = {on_device(NULL, cells * 2), dtype, T, H, H};
  check(cudaMemset(dx.data, 0, cells * 2));
  assert_int_equal(pmoe_gate_forward(d.gate, &d.params, &d.step, &x, &d.routing, &d.stats, NULL), PMOE_OK);
  assert_int_equal(
      pmoe_gate_backward(d.gate, &d.params, &d.step, &x, &d.routing, d.dweight, 1, d.dlogits, &dx, PMOE_BWD_ALL, NULL),
      PMOE_OK);
  fetch_routing(c, &d);
  assert_near(c->routing.weight, cpu->routing.weight, (size_t)T, 1e-6f * sqrtf((float)H) + 1e-5f);
  fetch(c->dw, d.dw, (size_t)(2 * H) * 4);
  fetch(c->db, d.params.bias_grad, 8);
  fetch(bits, dx.data, cells * 2);
  assert_near(c->dw, cpu->dw, (size_t)(2 * H), 1e-3f);
  assert_near(c->db, cpu->db, 2, 1e-4f);
  for (size_t i = 0; i < cells; i++)
    c->dx[i] = dtype == PMOE_BF16 ? pmoei_bf16_to_f32(bits[i]) : pmoei_f16_to_f32(bits[i]);
  assert_near(c->dx, cpu->dx, cells, 1e-2f);
  free_arrays();
  free(bits);
  case_free(c);
  case_free(cpu);
}

static void test_element_types(void **state) {
  (void)state;
  for (int jitter = 0; jitter <= 1; jitter++) {
    run_type(PMOE_F16, 130, 40, jitter);
    run_type(PMOE_F16, 130, 37, jitter);
    run_type(PMOE_BF16, 130, 35, jitter);
  }
  if (!getenv("PTXVM_RACE")) run_type(PMOE_BF16, 65, 65600, false); /* looking for races takes memory */
}

/* Numbers out of range are none; a second choice of the same expert is none either. */
static void test_wrong_numbers(void **state) {
  (void)state;
  pmoe_gate_config cfg = gate_config(4, 3);
  cfg.choice = PMOE_CHOICE_GIVEN;
  cfg.seq_aux_coef = 1;
  gate_case *c = case_new(cfg, 2, 4, 1);
  const int32_t given[] = {7, 1, 1, -5, 0, 3}, sequence[] = {-1, 2}, want[] = {-1, 1, -1, -1, 0, 3};
  gate_case d = moved(c);
  d.step.expert = on_device(given, sizeof given);
  d.step.sequence = on_device(sequence, sizeof sequence);
  d.step.num_sequences = 2;
  pmoe_mat x = mat_f32(d.x, 2, 4), dx = mat_f32(d.dx, 2, 4);
  assert_int_equal(pmoe_gate_forward(d.gate, &d.params, &d.step, &x, &d.routing, &d.stats, NULL), PMOE_OK);
  fetch_routing(c, &d);
  assert_memory_equal(c->routing.expert, want, sizeof want);
  assert_true(d.stats.routed == 3 && d.stats.seq_aux_loss == 0);
  check(cudaMemcpy(d.routing.expert, given, sizeof given, cudaMemcpyHostToDevice));
  assert_int_equal(
      pmoe_gate_backward(d.gate, &d.params, &d.step, &x, &d.routing, d.dweight, 1, d.dlogits, &dx, PMOE_BWD_ALL, NULL),
      PMOE_OK);
  free_arrays();
  case_free(c);
}

/* Forward and backward in a graph, run on other tokens than those it was captured with. Nothing waits, and the report
 * is there when the stream has passed. */
static void test_capture(void **state) {
  (void)state;
  enum { T = 200, E = 20, H = 12 };
  pmoe_gate_config cfg = gate_config(E, 2);
  cfg.capacity_factor = 1;
  cfg.aux_coef = cfg.global_aux_coef = cfg.seq_aux_coef = 0.1f;
  cfg.norm = PMOE_NORM_AFTER_DROP;
  gate_case *other = case_new(cfg, T, H, 1), *c = case_new(cfg, T, H, 1); /* on another device */
  int device;
  check(cudaGetDevice(&device));
  c->step.num_sequences = other->step.num_sequences = 4;
  for (int i = 0; i < T * H; i++) other->x[i] = c->x[T * H - 1 - i];
  case_forward(other);
  check(cudaSetDevice(device));
  gate_case d = moved(c);
  pmoe_mat x = mat_f32(d.x, T, H), dx = mat_f32(d.dx, T, H);
  pmoei_gate_report *report;
  assert_int_equal(pmoei_pinned_alloc(d.ctx, pmoei_gate_report_bytes(d.gate), "report", &report), PMOE_OK);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t runnable;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int pass = 0; pass < 2; pass++) { /* the first takes the scratch */
    if (pass == 1) check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    d.step.step = (uint64_t)pass;
    assert_int_equal(pmoei_gate_forward(d.gate, &d.params, &d.step, &x, &d.routing, report, stream), PMOE_OK);
    assert_int_equal(
        (pmoe_gate_backward)(d.gate, &d.params, &d.step, &x, &d.routing, d.dweight, 1, NULL, &dx, PMOE_BWD_ALL, stream),
        PMOE_OK);
    if (pass == 0) check(cudaStreamSynchronize(stream));
  }
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&runnable, graph, 0));
  check(cudaMemcpy(d.x, other->x, T * H * 4, cudaMemcpyHostToDevice));
  check(cudaGraphLaunch(runnable, stream));
  check(cudaStreamSynchronize(stream));
  pmoe_gate_stats stats = pmoei_gate_statistics(d.gate, report);
  fetch_routing(c, &d);
  assert_memory_equal(c->routing.expert, other->routing.expert, T * 2 * 4);
  assert_memory_equal(c->routing.slot, other->routing.slot, T * 2 * 8);
  assert_memory_equal(c->routing.weight, other->routing.weight, T * 2 * 4);
  assert_true(stats.routed == other->stats.routed && stats.aux_loss == other->stats.aux_loss);
  assert_true(stats.seq_aux_loss == other->stats.seq_aux_loss);
  assert_true(stats.global_aux_loss == other->stats.global_aux_loss);
  check(cudaGraphExecDestroy(runnable));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  pmoei_pinned_free(d.ctx, report, pmoei_gate_report_bytes(d.gate));
  c->ctx->stream = NULL;
  free_arrays();
  case_free(c);
  case_free(other);
}

static void test_bias_update(void **state) {
  (void)state;
  enum { E = 300 };
  gate_case *c = case_new(gate_config(E, 2), 100, 8, 1);
  int64_t count[E], zero[E] = {0};
  float bias[E] = {0}, want[E] = {0};
  case_forward(c);
  for (int centred = 0; centred <= 1; centred++) {
    float *device_bias = on_device(bias, sizeof bias);
    assert_int_equal(pmoei_selection_bias_update(c->ctx, E, pmoei_gate_counts(c->gate), 0.001f, centred, device_bias),
                     PMOE_OK);
    fetch(bias, device_bias, sizeof bias);
    assert_int_equal(pmoe_selection_bias_update(E, c->routing.expert_count, 0.001f, centred, want), PMOE_OK);
    assert_near(bias, want, E, 1e-9f);
  }
  assert_int_equal(pmoei_gate_clear_counts(c->gate), PMOE_OK);
  assert_int_equal(pmoe_gate_take_counts(c->gate, count), PMOE_OK);
  assert_memory_equal(count, zero, sizeof zero);
  free_arrays();
  case_free(c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_choices_are_the_cpus), cmocka_unit_test(test_element_types),
      cmocka_unit_test(test_wrong_numbers),        cmocka_unit_test(test_capture),
      cmocka_unit_test(test_bias_update),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
