/* Every matrix-multiply provider that is built in, against double precision. */
#include <math.h>
#include <pmoe/pmoe.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "core/dtype.h"
#include "core/gemm.h"
#include "core/parallel.h"
#include "support/failing_alloc.h"

static const char *const all_names[] = {"onednn", "cblas", "plain"};

static bool is_built_in(const char *name) { return strcmp(name, "plain") == 0 || pmoe_has_feature(name); }

static pmoe_ctx *make_ctx(const char *gemm, int32_t threads) {
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.gemm = gemm;
  cfg.cpu_threads = threads;
  pmoe_ctx *ctx = NULL;
  assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_OK);
  return ctx;
}

static double value_at(int64_t i, int64_t seed) { return (double)((i * 7919 + seed * 104729) % 257 - 128) / 64.0; }

static double load(const void *p, pmoe_dtype dtype, int64_t i) {
  return dtype == PMOE_F32 ? (double)((const float *)p)[i] : (double)pmoei_bf16_to_f32(((const pmoei_bf16 *)p)[i]);
}

/* rows x cols with `pad` more elements a row; the padding is NaN. Values are exact in bf16. */
static void *make_matrix(pmoe_dtype dtype, int64_t rows, int64_t cols, int64_t pad, int64_t seed) {
  size_t bytes = (size_t)(rows * (cols + pad)) * pmoe_dtype_size(dtype);
  void *p = malloc(bytes + 1);
  assert_non_null(p);
  memset(p, 0xff, bytes + 1);
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < cols; c++) {
      float v = (float)value_at(r * cols + c, seed);
      pmoei_from_f32((char *)p + (size_t)(r * (cols + pad) + c) * pmoe_dtype_size(dtype), dtype, &v, 1);
    }
  }
  return p;
}

typedef struct product_test {
  pmoei_product p;
  pmoei_gemm *gemm;
} product_test;

static void run_task(void *arg, int64_t index, int32_t thread) {
  (void)index;
  product_test *t = arg;
  pmoei_gemm_run(t->gemm, thread, &t->p);
}

static void run(pmoe_ctx *ctx, const pmoei_product *p) {
  product_test t = {*p, ctx->gemm};
  pmoei_parallel(ctx, 1, run_task, &t);
  assert_int_equal(pmoei_gemm_take_error(ctx->gemm), PMOE_OK);
}

static pmoei_product make_product(int flags, pmoe_dtype in, pmoe_dtype out, int64_t m, int64_t n, int64_t k,
                                  int64_t pad) {
  pmoei_product p = {.trans_a = flags & 1,
                     .trans_b = flags & 2,
                     .accumulate = flags & 4,
                     .in = in,
                     .out = out,
                     .m = m,
                     .n = n,
                     .k = k};
  p.lda = (p.trans_a ? m : k) + pad;
  p.ldb = (p.trans_b ? k : n) + pad;
  p.ldc = n + pad;
  p.a = make_matrix(in, p.trans_a ? k : m, p.trans_a ? m : k, pad, 1);
  p.b = make_matrix(in, p.trans_b ? n : k, p.trans_b ? k : n, pad, 2);
  p.c = make_matrix(out, m, n, pad, 3);
  /* without accumulation nothing may be read from C */
  if (!p.accumulate) memset(p.c, 0xff, (size_t)(m * p.ldc) * pmoe_dtype_size(out));
  return p;
}

static void free_product(pmoei_product *p) {
  free((void *)p->a);
  free((void *)p->b);
  free(p->c);
}

static void check_product(pmoe_ctx *ctx, const pmoei_product *p) {
  run(ctx, p);
  for (int64_t i = 0; i < p->m; i++) {
    for (int64_t j = 0; j < p->n; j++) {
      double want = p->accumulate ? value_at(i * p->n + j, 3) : 0, size = fabs(want);
      for (int64_t l = 0; l < p->k; l++) {
        double term = load(p->a, p->in, p->trans_a ? l * p->lda + i : i * p->lda + l) *
                      load(p->b, p->in, p->trans_b ? j * p->ldb + l : l * p->ldb + j);
        want += term;
        size += fabs(term);
      }
      double got = load(p->c, p->out, i * p->ldc + j), limit = 3e-7 * size;
      if (p->out == PMOE_BF16) limit += fabs(want) * 0x1p-8; /* one rounding: half a unit in the last place */
      if (!(fabs(got - want) <= limit))
        fail_msg("%lldx%lldx%lld %d%d%d %d->%d [%lld,%lld]: %g, expected %g", (long long)p->m, (long long)p->n,
                 (long long)p->k, p->trans_a, p->trans_b, p->accumulate, (int)p->in, (int)p->out, (long long)i,
                 (long long)j, got, want);
    }
    for (int64_t j = p->n; j < p->ldc; j++) assert_true(isnan(load(p->c, p->out, i * p->ldc + j)));
  }
}

static void test_products(void **state) {
  (void)state;
  static const int64_t sizes[][4] = {/* m, n, k, pad */
                                     {1, 1, 1, 0},      {5, 3, 7, 1},      {8, 16, 32, 0},  {15, 33, 64, 0},
                                     {16, 64, 65, 3},   {17, 130, 300, 0}, {64, 64, 64, 0}, {97, 129, 257, 5},
                                     {130, 520, 40, 0}, {3, 600, 520, 0},  {0, 4, 4, 0},    {4, 0, 4, 0},
                                     {4, 5, 0, 2}};
  static const pmoe_dtype types[][2] = {{PMOE_F32, PMOE_F32}, {PMOE_BF16, PMOE_F32}, {PMOE_BF16, PMOE_BF16}};
  for (int i = 0; i < 3; i++) {
    if (!is_built_in(all_names[i])) continue;
    pmoe_ctx *ctx = make_ctx(all_names[i], 2);
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
      for (int flags = 0; flags < 8; flags++) {
        for (int t = 0; t < 3; t++) {
          pmoei_product p =
              make_product(flags, types[t][0], types[t][1], sizes[s][0], sizes[s][1], sizes[s][2], sizes[s][3]);
          check_product(ctx, &p);
          free_product(&p);
        }
      }
    }
    pmoe_ctx_destroy(ctx);
  }
}

/* More layouts than any cache of prepared products holds, twice over; the second round must give the same bits. */
static void test_many_shapes_repeat(void **state) {
  (void)state;
  enum { SHAPES = 100 };
  for (int i = 0; i < 3; i++) {
    if (!is_built_in(all_names[i])) continue;
    pmoe_ctx *ctx = make_ctx(all_names[i], 1);
    for (int type = 0; type < 2; type++) {
      static float first[SHAPES][SHAPES + 16][8];
      for (int round = 0; round < 2; round++) {
        for (int64_t s = 0; s < SHAPES; s++) {
          pmoei_product p = make_product(2, type ? PMOE_BF16 : PMOE_F32, PMOE_F32, s + 16, 8, 40, 0);
          if (round == 0) check_product(ctx, &p);
          else run(ctx, &p);
          if (round == 0) memcpy(first[s], p.c, (size_t)(p.m * p.n) * sizeof(float));
          else assert_memory_equal(first[s], p.c, (size_t)(p.m * p.n) * sizeof(float));
          free_product(&p);
        }
      }
    }
    pmoe_ctx_destroy(ctx);
  }
}

typedef struct grid {
  pmoei_product p;
  pmoei_gemm *gemm;
  int64_t block;
} grid;

static void grid_task(void *arg, int64_t index, int32_t thread) {
  const grid *g = arg;
  pmoei_product p = g->p;
  p.m = g->block;
  p.a = (const char *)p.a + (size_t)(index * g->block * p.lda) * pmoe_dtype_size(p.in);
  p.c = (char *)p.c + (size_t)(index * g->block * p.ldc) * pmoe_dtype_size(p.out);
  pmoei_gemm_run(g->gemm, thread, &p);
}

static void test_threads_at_once(void **state) {
  (void)state;
  for (int i = 0; i < 3; i++) {
    if (!is_built_in(all_names[i])) continue;
    for (int type = 0; type < 2; type++) {
      pmoei_product p = make_product(2, type ? PMOE_BF16 : PMOE_F32, PMOE_F32, 24 * 20, 70, 90, 0);
      float *kept = malloc((size_t)(p.m * p.n) * sizeof(float));
      assert_non_null(kept);
      for (int32_t threads = 1; threads <= 4; threads++) {
        pmoe_ctx *ctx = make_ctx(all_names[i], threads);
        for (int repeat = 0; repeat < 2; repeat++) {
          grid g = {p, ctx->gemm, 20};
          memset(p.c, 0xff, (size_t)(p.m * p.n) * sizeof(float));
          pmoei_parallel(ctx, 24, grid_task, &g);
          assert_int_equal(pmoei_gemm_take_error(ctx->gemm), PMOE_OK);
          if (threads == 1 && repeat == 0) memcpy(kept, p.c, (size_t)(p.m * p.n) * sizeof(float));
          assert_memory_equal(kept, p.c, (size_t)(p.m * p.n) * sizeof(float));
        }
        pmoe_ctx_destroy(ctx);
      }
      free(kept);
      free_product(&p);
    }
  }
}

static void test_nan_is_confined(void **state) {
  (void)state;
  for (int i = 0; i < 3; i++) {
    if (!is_built_in(all_names[i])) continue;
    pmoe_ctx *ctx = make_ctx(all_names[i], 1);
    for (int type = 0; type < 2; type++) {
      pmoei_product p = make_product(2, type ? PMOE_BF16 : PMOE_F32, PMOE_F32, 20, 9, 11, 0);
      memset((char *)p.a + (size_t)(13 * p.lda + 4) * pmoe_dtype_size(p.in), 0xff, pmoe_dtype_size(p.in));
      run(ctx, &p);
      for (int64_t j = 0; j < 20 * 9; j++) assert_int_equal(isnan(((float *)p.c)[j]) != 0, j / 9 == 13);
      free_product(&p);
    }
    pmoe_ctx_destroy(ctx);
  }
}

/* A library's refusal is kept until it is asked for, then forgotten. */
static void test_errors_are_kept(void **state) {
  (void)state;
  for (int i = 0; i < 2; i++) {
    if (!is_built_in(all_names[i])) continue;
    pmoe_ctx *ctx = make_ctx(all_names[i], 1);
    pmoei_product good = make_product(0, PMOE_F32, PMOE_F32, 4, 4, 4, 0), bad = good;
    if (i == 0) bad.lda = 1;               /* shorter than a row */
    else bad.lda = (int64_t)INT32_MAX + 1; /* beyond CBLAS's int */
    product_test t = {bad, ctx->gemm};
    pmoei_parallel(ctx, 1, run_task, &t);
    t.p = good;
    pmoei_parallel(ctx, 1, run_task, &t);
    assert_int_equal(pmoei_gemm_take_error(ctx->gemm), PMOE_ERR_INTERNAL);
    assert_non_null(strstr(pmoe_last_error(), "matrix product failed"));
    assert_int_equal(pmoei_gemm_take_error(ctx->gemm), PMOE_OK);
    free_product(&good);
    pmoe_ctx_destroy(ctx);
  }
}

static void test_info(void **state) {
  (void)state;
  const char *expected_default = NULL;
  for (int i = 0; i < 3; i++) {
    if (!is_built_in(all_names[i])) continue;
    if (!expected_default) expected_default = all_names[i];
    pmoe_ctx *ctx = make_ctx(all_names[i], 3);
    pmoe_gemm_info info = PMOE_CONFIG_INIT(pmoe_gemm_info);
    assert_int_equal(pmoe_ctx_gemm_info(ctx, &info), PMOE_OK);
    assert_string_equal(info.provider, all_names[i]);
    assert_int_equal(info.threads, 3);
    assert_true(strlen(info.library) > 3 && strlen(info.isa) > 2);
    assert_true(strcmp(info.bf16, "native") == 0 || strcmp(info.bf16, "widened to float32") == 0);
    if (i != 0) assert_string_equal(info.bf16, "widened to float32");
    if (i == 2) assert_non_null(strstr(info.warning, "portable C"));
    pmoe_ctx_destroy(ctx);
  }
  pmoe_ctx *ctx = make_ctx(NULL, 1);
  pmoe_gemm_info info = PMOE_CONFIG_INIT(pmoe_gemm_info);
  assert_int_equal(pmoe_ctx_gemm_info(ctx, &info), PMOE_OK);
  assert_string_equal(info.provider, expected_default);
  pmoe_ctx_destroy(ctx);
}

static void keep_line(void *user, int level, const char *text) {
  assert_int_equal(level, PMOE_LOG_WARN);
  strncpy(user, text, 255);
}

static void test_warnings_reach_the_log(void **state) {
  (void)state;
  char line[256] = "";
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.gemm = "plain";
  cfg.log = keep_line;
  cfg.log_user = line;
  pmoe_ctx *ctx = NULL;
  assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_OK);
  assert_non_null(strstr(line, "portable C"));
  pmoe_ctx_destroy(ctx);
}

static void test_unknown_names(void **state) {
  (void)state;
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  pmoe_ctx *ctx = NULL;
  static const char *const wrong[] = {"mkl", "", "oneDNN", "plain "};
  for (int i = 0; i < 4; i++) {
    cfg.gemm = wrong[i];
    assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_ERR_ARG);
    for (int j = 0; j < 3; j++)
      assert_int_equal(strstr(pmoe_last_error(), all_names[j]) != NULL, is_built_in(all_names[j]));
    assert_null(ctx);
  }
  for (int i = 0; i < 2; i++) {
    if (is_built_in(all_names[i])) continue;
    cfg.gemm = all_names[i];
    assert_int_equal(pmoe_ctx_create(&cfg, &ctx), PMOE_ERR_UNSUPPORTED);
    assert_non_null(strstr(pmoe_last_error(), "plain"));
    assert_null(ctx);
  }
}

static void test_allocation_failures(void **state) {
  (void)state;
  for (int i = 0; i < 3; i++) {
    if (!is_built_in(all_names[i])) continue;
    pmoe_status status = PMOE_ERR_NOMEM;
    for (int64_t n = 1; status != PMOE_OK; n++) {
      failing_alloc f = {.fail_at = n};
      pmoe_allocator allocator = failing_alloc_table(&f);
      pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
      cfg.allocator = &allocator;
      cfg.gemm = all_names[i];
      cfg.cpu_threads = 2;
      pmoe_ctx *ctx = NULL;
      status = pmoe_ctx_create(&cfg, &ctx);
      if (status != PMOE_OK) assert_int_equal(status, PMOE_ERR_NOMEM);
      pmoe_ctx_destroy(ctx);
      assert_int_equal(f.held_bytes, 0);
      assert_int_equal(f.held_blocks, 0);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_products),
      cmocka_unit_test(test_many_shapes_repeat),
      cmocka_unit_test(test_threads_at_once),
      cmocka_unit_test(test_nan_is_confined),
      cmocka_unit_test(test_errors_are_kept),
      cmocka_unit_test(test_info),
      cmocka_unit_test(test_warnings_reach_the_log),
      cmocka_unit_test(test_unknown_names),
      cmocka_unit_test(test_allocation_failures),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
