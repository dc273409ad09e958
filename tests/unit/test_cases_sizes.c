/* Offsets past 2^31 elements, in memory that is only reserved: what is touched is small. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#endif
#include "support/asserts.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "support/rig.h"

static void *reserve(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

/* Rows so far apart that the last starts past 2^32 elements, in x, y, dy and dx of a whole layer. */
static void test_row_times_stride_past_32_bits(void **state) {
  (void)state;
  enum { ROWS = 5 };
  const int64_t ld = (INT64_C(1) << 30) + 3;
  size_t bytes = (size_t)(ROWS * ld) * sizeof(float);
  pmoe_ctx *ctx;
  assert_ok(pmoe_ctx_create(NULL, &ctx));
  rig r;
  rig_spec spec = rig_spec_default();
  spec.residual.mix = PMOE_MIX_LEARNED;
  assert_ok(rig_create(&r, ctx, NULL, &spec));
  rig_plan plan = {.label = "far rows", .rank_tokens = {ROWS}, .training = 1, .loss_scale = 1.0, .seed = 4};
  rig_step s;
  rig_step_begin(&r, &s, &plan);
  pmoe_mat *mats[] = {&s.x, &s.dy, &s.y, &s.dx};
  void *far[4] = {NULL}, *near[4];
  int reserved = 1;
  for (int m = 0; m < 4; m++) reserved &= (far[m] = reserve(bytes)) != NULL;
  if (!reserved) {
    print_message("no address space for the test\n");
    skip();
  }
  for (int m = 0; m < 4; m++) {
    near[m] = mats[m]->data;
    for (int64_t t = 0; t < ROWS; t++)
      memcpy((float *)far[m] + t * ld, (float *)near[m] + t * spec.hidden, (size_t)spec.hidden * sizeof(float));
    mats[m]->data = far[m];
    mats[m]->ld = ld;
  }
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = ROWS;
  pmoe_stash *stash;
  assert_ok(pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash));
  assert_ok(rig_forward(&r, stash, &s));
  assert_ok(rig_backward(&r, stash, &s, PMOE_BWD_ALL));
  for (int m = 0; m < 4; m++) {
    for (int64_t t = 0; t < ROWS; t++)
      memcpy((float *)near[m] + t * spec.hidden, (float *)far[m] + t * ld, (size_t)spec.hidden * sizeof(float));
    mats[m]->data = near[m];
    mats[m]->ld = spec.hidden;
    munmap(far[m], bytes);
  }
  assert_int_equal(rig_check(&r, stash, &s, 1) + rig_check_grads(&r, 1.0, "far rows"), 0);
  pmoe_stash_destroy(stash);
  rig_step_end(&s);
  rig_destroy(&r);
  pmoe_ctx_destroy(ctx);
}

/* So many experts that the last one's weights start past 2^31 elements; it alone gets a row. */
static void test_expert_times_weights_past_32_bits(void **state) {
  (void)state;
  enum { EXPERTS = 66000, H = 181, F = 181 };
  const int64_t each = (int64_t)H * F, last = (EXPERTS - 1) * each;
  assert_true(last > INT32_MAX);
  size_t bytes = (size_t)(EXPERTS * each) * 2;
  void *memory[4];
  for (int i = 0; i < 4; i++) {
    memory[i] = reserve(bytes);
    if (memory[i]) continue;
    print_message("no address space for the test\n");
    skip();
  }
  pmoe_ctx *ctx;
  assert_ok(pmoe_ctx_create(NULL, &ctx));
  pmoe_experts_config cfg = PMOE_CONFIG_INIT(pmoe_experts_config);
  cfg.inner = F;
  cfg.act = PMOE_ACT_RELU;
  cfg.dtype = cfg.grad_dtype = PMOE_BF16;
  pmoe_experts *experts;
  assert_ok(pmoe_experts_create(ctx, H, EXPERTS, &cfg, &experts));
  pmoe_experts_params params = PMOE_CONFIG_INIT(pmoe_experts_params);
  params.fc1_weight = memory[0];
  params.fc2_weight = memory[1];
  params.fc1_weight_grad = memory[2];
  params.fc2_weight_grad = memory[3];
  for (int i = 0; i < H; i++) { /* h = x, y = 2 a */
    test_put((uint16_t *)memory[0] + last, PMOE_BF16, i * H + i, 1.0);
    test_put((uint16_t *)memory[1] + last, PMOE_BF16, i * F + i, 2.0);
  }
  int64_t *rows = calloc(EXPERTS, sizeof *rows);
  rows[EXPERTS - 1] = 1;
  uint16_t x[H], y[H], pre[F], dy[H], dx[H];
  for (int i = 0; i < H; i++) {
    test_put(x, PMOE_BF16, i, (double)(i % 7) - 3.0);
    test_put(dy, PMOE_BF16, i, (double)(i % 5));
  }
  pmoe_mat xm = {x, PMOE_BF16, 1, H, H}, ym = {y, PMOE_BF16, 1, H, H}, prem = {pre, PMOE_BF16, 1, F, F};
  pmoe_mat dym = {dy, PMOE_BF16, 1, H, H}, dxm = {dx, PMOE_BF16, 1, H, H};
  assert_ok(pmoe_experts_forward(experts, &params, rows, &xm, &prem, &ym, NULL));
  assert_ok(
      pmoe_experts_backward(experts, &params, rows, &xm, &prem, NULL, &dym, NULL, &dxm, NULL, PMOE_BWD_ALL, NULL));
  for (int i = 0; i < H; i++) {
    double in = (double)(i % 7) - 3.0, up = (double)(i % 5), on = in > 0.0;
    assert_true(test_get(y, PMOE_BF16, i) == 2.0 * in * on);
    assert_true(test_get(dx, PMOE_BF16, i) == 2.0 * up * on);
    assert_true(test_get((uint16_t *)memory[2] + last, PMOE_BF16, i * H + 6) == 2.0 * up * on * 3.0);
    assert_true(test_get((uint16_t *)memory[3] + last, PMOE_BF16, i * F + 6) == up * 3.0);
  }
  free(rows);
  pmoe_experts_destroy(experts);
  pmoe_ctx_destroy(ctx);
  for (int i = 0; i < 4; i++) munmap(memory[i], bytes);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_row_times_stride_past_32_bits),
      cmocka_unit_test(test_expert_times_weights_past_32_bits),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
