/* Ground floor: status, growing structs, scratch, random numbers, dtypes. */
#include <pmoe/pmoe.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "core/config.h"
#include "core/ctx.h"
#include "core/dtype.h"
#include "core/parallel.h"
#include "core/random.h"

static void test_status_names(void **state) {
  (void)state;
  assert_string_equal(pmoe_status_name(PMOE_OK), "PMOE_OK");
  assert_string_equal(pmoe_status_name(PMOE_ERR_TIMEOUT), "PMOE_ERR_TIMEOUT");
  assert_string_equal(pmoe_status_text(PMOE_ERR_NOMEM), "allocation failed");
  assert_string_equal(pmoe_status_name((pmoe_status)77), "PMOE_UNKNOWN");
  assert_int_equal(pmoe_version(), 100);
}

static void test_error_may_quote_itself(void **state) {
  (void)state;
  assert_int_equal(pmoei_error(PMOE_ERR_ARG, "x is %d", 3), PMOE_ERR_ARG);
  pmoei_error(PMOE_ERR_COMM, "outer: %s", pmoe_last_error());
  assert_string_equal(pmoe_last_error(), "outer: x is 3");
}

/* A struct of a future header: today's fields and one more. */
typedef struct future_config {
  pmoe_ctx_config known;
  int64_t extra;
} future_config;

static void test_structs_grow(void **state) {
  (void)state;
  pmoe_ctx *ctx = NULL;
  future_config cfg = {0};
  cfg.known.size = sizeof cfg;
  assert_int_equal(pmoe_ctx_create(&cfg.known, &ctx), PMOE_OK);
  pmoe_ctx_destroy(ctx);
  cfg.extra = 1;
  ctx = NULL;
  assert_int_equal(pmoe_ctx_create(&cfg.known, &ctx), PMOE_ERR_VERSION);
  assert_null(ctx);
  pmoe_ctx_config none = {0};
  assert_int_equal(pmoe_ctx_create(&none, &ctx), PMOE_ERR_ARG);
  assert_non_null(strstr(pmoe_last_error(), "size"));

  struct {
    pmoe_memory known;
    int64_t extra;
  } out = {.known.size = sizeof out, .extra = 5};
  pmoe_memory source = {sizeof source, 1, 2, 3};
  assert_int_equal(PMOEI_STRUCT_WRITE(&out, &source), PMOE_OK);
  assert_int_equal(out.known.allocations, 3);
  assert_int_equal(out.known.size, sizeof out);
  assert_int_equal(out.extra, 0);
  pmoe_memory old = {.size = offsetof(pmoe_memory, allocations), .allocations = 9};
  assert_int_equal(PMOEI_STRUCT_WRITE(&old, &source), PMOE_OK);
  assert_int_equal(old.peak_bytes, 2);
  assert_int_equal(old.allocations, 9);
}

static void test_scratch_settles_in_one_block(void **state) {
  (void)state;
  pmoe_ctx *ctx;
  assert_int_equal(pmoe_ctx_create(NULL, &ctx), PMOE_OK);
  for (int round = 0; round < 3; round++) {
    pmoe_memory before = PMOE_CONFIG_INIT(pmoe_memory), after = before;
    pmoe_ctx_memory(ctx, &before);
    void *a, *b, *c;
    int32_t ha, hb, hc;
    assert_int_equal(pmoei_scratch_open(ctx, 1000, &a, &ha), PMOE_OK);
    assert_int_equal(pmoei_scratch_open(ctx, 100000, &b, &hb), PMOE_OK);
    memset(a, 1, 1000);
    memset(b, 2, 100000);
    pmoei_scratch_close(ctx, ha); /* not the last opened */
    assert_int_equal(pmoei_scratch_open(ctx, 50, &c, &hc), PMOE_OK);
    assert_true((char *)c + 50 <= (char *)b || (char *)c >= (char *)b + 100000);
    pmoei_scratch_close(ctx, hc);
    pmoei_scratch_close(ctx, hb);
    pmoe_ctx_memory(ctx, &after);
    if (round == 2) assert_int_equal(after.allocations, before.allocations);
  }
  assert_int_equal(pmoe_ctx_set_scratch(ctx, (void *)8, 64), PMOE_ERR_ARG);
  void *mem = aligned_alloc(64, 4096);
  assert_int_equal(pmoe_ctx_set_scratch(ctx, mem, 4096), PMOE_OK);
  void *a;
  int32_t h;
  assert_int_equal(pmoei_scratch_open(ctx, 4096, &a, &h), PMOE_OK);
  assert_ptr_equal(a, mem);
  assert_int_equal(pmoe_ctx_set_scratch(ctx, NULL, 0), PMOE_ERR_STATE);
  pmoei_scratch_close(ctx, h);
  pmoe_ctx_destroy(ctx);
  free(mem);
}

static void test_arena_saturates(void **state) {
  (void)state;
  pmoei_arena arena = {NULL, 0};
  assert_null(pmoei_take(&arena, 3, 4));
  assert_int_equal(arena.used, PMOEI_ALIGN);
  pmoei_take(&arena, INT64_MAX, 8);
  pmoei_take(&arena, INT64_MAX, 8);
  assert_true(arena.used == SIZE_MAX / 2);
}

static void test_philox_known_answers(void **state) {
  (void)state; /* Random123's published known-answer vectors for philox4x32-10 */
  uint32_t out[4];
  pmoei_random4(0, 0, 0, out);
  assert_int_equal(out[0], 0x6627e8d5u);
  assert_int_equal(out[1], 0xe169c58du);
  assert_int_equal(out[2], 0xbc57ac4cu);
  assert_int_equal(out[3], 0x9b00dbd8u);
  pmoei_random4(UINT64_MAX, UINT64_MAX, UINT64_MAX, out);
  assert_int_equal(out[0], 0x408f276du);
  assert_int_equal(out[3], 0x6d5451fdu);
  assert_true(pmoei_uniform(0) > 0.0f && pmoei_uniform(UINT32_MAX) < 1.0f);
}

static void test_bf16_rounding(void **state) {
  (void)state;
  assert_int_equal(pmoei_f32_to_bf16(1.0f), 0x3f80);
  assert_int_equal(pmoei_f32_to_bf16(1.00390625f), 0x3f80); /* tie to even */
  assert_int_equal(pmoei_f32_to_bf16(1.01171875f), 0x3f82);
  uint32_t nan_bits = 0x7f800001u, max_bits = 0x7f7fffffu;
  float nan, max, back;
  memcpy(&nan, &nan_bits, 4);
  memcpy(&max, &max_bits, 4);
  back = pmoei_bf16_to_f32(pmoei_f32_to_bf16(nan));
  assert_true(back != back);
  assert_int_equal(pmoei_f32_to_bf16(max), 0x7f80); /* overflows to infinity */
  float many[37], wide[37];
  pmoei_bf16 half[37];
  for (int i = 0; i < 37; i++) many[i] = (float)(i * i) * 0.37f - 9.0f;
  pmoei_from_f32(half, PMOE_BF16, many, 37);
  pmoei_to_f32(wide, half, PMOE_BF16, 37);
  for (int i = 0; i < 37; i++) assert_true(wide[i] == pmoei_bf16_to_f32(pmoei_f32_to_bf16(many[i])));
}

static void mark(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  ((int *)arg)[index]++;
}

static void test_parallel_runs_each_task_once(void **state) {
  (void)state;
  pmoe_ctx *ctx;
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 3;
  assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_OK);
  int hit[100] = {0};
  pmoei_parallel(ctx, 100, mark, hit);
  pmoei_parallel(ctx, 0, mark, hit);
  for (int i = 0; i < 100; i++) assert_int_equal(hit[i], 1);
  pmoe_ctx_destroy(ctx);
}

static void test_context_arguments(void **state) {
  (void)state;
  pmoe_ctx *ctx = NULL;
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  assert_int_equal(pmoe_ctx_create(&cfg, NULL), PMOE_ERR_ARG);
  cfg.cpu_threads = -1;
  assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_ERR_ARG);
  assert_non_null(strstr(pmoe_last_error(), "-1"));
  cfg.cpu_threads = 1;
  cfg.backend = PMOE_BACKEND_CUDA;
  assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_ERR_UNSUPPORTED);
  cfg.backend = PMOE_BACKEND_AUTO;
  cfg.gemm = "abacus";
  assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_ERR_ARG);
  assert_null(ctx);
  pmoe_ctx_destroy(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_status_names),      cmocka_unit_test(test_error_may_quote_itself),
      cmocka_unit_test(test_structs_grow),      cmocka_unit_test(test_scratch_settles_in_one_block),
      cmocka_unit_test(test_arena_saturates),   cmocka_unit_test(test_philox_known_answers),
      cmocka_unit_test(test_bf16_rounding),     cmocka_unit_test(test_parallel_runs_each_task_once),
      cmocka_unit_test(test_context_arguments),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
