/* Every operation against plain double-precision code, and its backward against that code's central differences. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "examples/train_lm/attention.h"
#include "examples/train_lm/bf16.h"
#include "examples/train_lm/embedding.h"
#include "examples/train_lm/error.h"
#include "examples/train_lm/layernorm.h"
#include "examples/train_lm/linear.h"
#include "examples/train_lm/loss.h"
#include "examples/train_lm/parallel.h"

static float *noise(int64_t n, uint32_t seed) {
  float *x = lm_alloc((size_t)n, sizeof *x);
  for (int64_t i = 0; i < n; i++) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = (float)(seed >> 8) / (float)(1 << 23) - 1.0f;
  }
  return x;
}

/* What a written output holds before: anything that is left shows. */
static float *poison(int64_t n) {
  float *x = lm_alloc((size_t)n, sizeof *x);
  for (int64_t i = 0; i < n; i++) x[i] = NAN;
  return x;
}

static void assert_close(double got, double expected, double tolerance, const char *what, int64_t at) {
  if (fabs(got - expected) <= tolerance * (1 + fabs(expected))) return;
  fail_msg("%s[%lld] is %.9g; %.9g was expected", what, (long long)at, got, expected);
}

/* gradient[i] + 1 must be in `got` at a sample of places: gradients are added to, and the tests start them at 1;
 * written ones pass added = 0. */
static void check_gradient(double (*loss)(void *), void *arg, float *input, int64_t n, const float *got, int added,
                           const char *what) {
  int64_t step = n > 60 ? n / 53 : 1;
  for (int64_t i = 0; i < n; i += step) {
    float keep = input[i];
    input[i] = keep + 1e-3f;
    double high = loss(arg), x_high = (double)input[i];
    input[i] = keep - 1e-3f;
    double low = loss(arg), x_low = (double)input[i];
    input[i] = keep;
    assert_close((double)got[i] - added, (high - low) / (x_high - x_low), 2e-4, what, i);
  }
}

static float *ones(int64_t n) {
  float *x = lm_alloc((size_t)n, sizeof *x);
  for (int64_t i = 0; i < n; i++) x[i] = 1.0f;
  return x;
}

/* ---- linear ---- */

struct linear_case {
  struct lm_linear size;
  float *x, *w, *b, *c; /* loss = sum c y */
};

static double linear_y(const struct linear_case *t, int64_t r, int64_t o) {
  double sum = t->b ? (double)t->b[o] : 0;
  for (int64_t i = 0; i < t->size.in; i++) sum += (double)t->x[r * t->size.in + i] * (double)t->w[o * t->size.in + i];
  return sum;
}

static double linear_loss(void *arg) {
  const struct linear_case *t = arg;
  double sum = 0;
  for (int64_t r = 0; r < t->size.rows; r++)
    for (int64_t o = 0; o < t->size.out; o++) sum += (double)t->c[r * t->size.out + o] * linear_y(t, r, o);
  return sum;
}

static void run_linear(int64_t rows, int64_t in, int64_t out, int with_bias) {
  struct linear_case t = {{rows, in, out}, noise(rows * in, 1), noise(out * in, 2), NULL, noise(rows * out, 4)};
  if (with_bias) t.b = noise(out, 3);
  float *y = poison(rows * out), *dx = poison(rows * in), *dw = ones(out * in), *db = ones(out);
  linear_forward(t.size, y, t.x, t.w, t.b);
  linear_backward_input(t.size, dx, t.c, t.w);
  linear_backward_weight(t.size, dw, with_bias ? db : NULL, t.c, t.x);
  for (int64_t i = 0; i<rows * out; i += rows * out> 1000 ? 97 : 1)
    assert_close((double)y[i], linear_y(&t, i / out, i % out), 1e-4, "y", i);
  check_gradient(linear_loss, &t, t.x, rows * in, dx, 0, "dx");
  check_gradient(linear_loss, &t, t.w, out * in, dw, 1, "dweight");
  if (with_bias) check_gradient(linear_loss, &t, t.b, out, db, 1, "dbias");
  float *all[] = {t.x, t.w, t.b, t.c, y, dx, dw, db};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void linear_matches(void **state) {
  (void)state;
  run_linear(5, 3, 7, 1);
  run_linear(1, 1, 1, 1);
  run_linear(257, 6, 515, 1); /* more than one tile either way */
  run_linear(9, 16, 4, 0);
  run_linear(0, 3, 2, 1);
}

static void add_sums(void **state) {
  (void)state;
  float *a = noise(70001, 1), *b = noise(70001, 2), *out = poison(70001);
  add(out, a, b, 70001);
  for (int i = 0; i < 70001; i++) assert_true(out[i] == a[i] + b[i]);
  add(a, a, b, 70001);
  assert_memory_equal(a, out, 70001 * sizeof *a);
  free(a), free(b), free(out);
}

/* ---- layer norm ---- */

struct norm_case {
  int64_t rows, n;
  float *x, *w, *b, *c;
};

static double norm_y(const struct norm_case *t, int64_t r, int64_t i) {
  double mean = 0, var = 0;
  for (int64_t j = 0; j < t->n; j++) mean += (double)t->x[r * t->n + j] / (double)t->n;
  for (int64_t j = 0; j < t->n; j++) var += pow((double)t->x[r * t->n + j] - mean, 2) / (double)t->n;
  return ((double)t->x[r * t->n + i] - mean) / sqrt(var + 1e-5) * (double)t->w[i] + (double)t->b[i];
}

static double norm_loss(void *arg) {
  const struct norm_case *t = arg;
  double sum = 0;
  for (int64_t i = 0; i < t->rows * t->n; i++) sum += (double)t->c[i] * norm_y(t, i / t->n, i % t->n);
  return sum;
}

static void run_norm(int64_t rows, int64_t n) {
  struct norm_case t = {rows, n, noise(rows * n, 1), noise(n, 2), noise(n, 3), noise(rows * n, 4)};
  float *y = poison(rows * n), *mean = poison(rows), *rstd = poison(rows);
  float *dx = ones(rows * n), *dw = ones(n), *db = ones(n);
  layernorm_forward(y, mean, rstd, t.x, t.w, t.b, rows, n);
  layernorm_backward(dx, dw, db, t.c, t.x, t.w, mean, rstd, rows, n);
  for (int64_t i = 0; i < rows * n; i++) assert_close((double)y[i], norm_y(&t, i / n, i % n), 1e-4, "y", i);
  check_gradient(norm_loss, &t, t.x, rows * n, dx, 1, "dx");
  check_gradient(norm_loss, &t, t.w, n, dw, 1, "dweight");
  check_gradient(norm_loss, &t, t.b, n, db, 1, "dbias");
  float *all[] = {t.x, t.w, t.b, t.c, y, mean, rstd, dx, dw, db};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void layernorm_matches(void **state) {
  (void)state;
  run_norm(3, 5);
  run_norm(37, 131);
  run_norm(0, 4);
}

/* ---- attention ---- */

struct attention_case {
  struct lm_attention size;
  struct lm_qkv in;
  float *c;
};

static void attention_row(const struct attention_case *t, int64_t s, int64_t h, int64_t i, double *out) {
  int64_t d = t->size.width / t->size.heads, keys = t->size.first + t->size.length;
  const float *q = t->in.q + (s * t->size.length + i) * t->in.q_stride + h * d;
  double sum = 0;
  for (int64_t a = 0; a < d; a++) out[a] = 0;
  for (int64_t j = 0; j <= t->size.first + i; j++) {
    const float *k = t->in.kv + (s * keys + j) * t->in.kv_stride + h * d, *v = k + t->size.width;
    double dot = 0;
    for (int64_t a = 0; a < d; a++) dot += (double)q[a] * (double)k[a];
    double e = exp(dot / sqrt((double)d));
    sum += e;
    for (int64_t a = 0; a < d; a++) out[a] += e * (double)v[a];
  }
  for (int64_t a = 0; a < d; a++) out[a] /= sum;
}

static double attention_loss(void *arg) {
  const struct attention_case *t = arg;
  int64_t d = t->size.width / t->size.heads;
  double sum = 0, out[16];
  for (int64_t s = 0; s < t->size.sequences; s++)
    for (int64_t h = 0; h < t->size.heads; h++)
      for (int64_t i = 0; i < t->size.length; i++) {
        attention_row(t, s, h, i, out);
        for (int64_t a = 0; a < d; a++)
          sum += (double)t->c[(s * t->size.length + i) * t->size.width + h * d + a] * out[a];
      }
  return sum;
}

/* Queries with keys and values of their own, or, packed, all three in one row (first is 0 then). */
static void run_attention(struct lm_attention size, int packed) {
  int64_t rows = size.sequences * size.length, keys = size.sequences * (size.first + size.length), w = size.width;
  int64_t n = rows * w, d = w / size.heads, q_stride = packed ? 3 * w : w, kv_stride = packed ? 3 * w : 2 * w;
  float *q = noise(rows * q_stride, 1), *dq = poison(rows * q_stride);
  float *kv = packed ? q + w : noise(keys * kv_stride, 2), *dkv = packed ? dq + w : poison(keys * kv_stride);
  struct attention_case t = {size, {q, kv, q_stride, kv_stride}, noise(n, 3)};
  float *out = poison(n), *logsum = poison(rows * size.heads);
  float *scratch = poison((int64_t)attention_scratch(size, lm_threads()));
  attention_forward(size, out, logsum, t.in, scratch);
  attention_backward(size, dq, dkv, t.c, t.in, out, logsum, scratch);
  double row[16];
  for (int64_t i = 0; i < n; i += d) {
    int64_t token = i / w;
    attention_row(&t, token / size.length, i % w / d, token % size.length, row);
    for (int64_t a = 0; a < d; a++) assert_close((double)out[i + a], row[a], 1e-5, "out", i + a);
  }
  check_gradient(attention_loss, &t, q, rows * q_stride, dq, 0, packed ? "dqkv" : "dq");
  if (!packed) check_gradient(attention_loss, &t, kv, keys * kv_stride, dkv, 0, "dkv");
  float *all[] = {q, t.c, out, logsum, dq, scratch, packed ? NULL : kv, packed ? NULL : dkv};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void attention_matches(void **state) {
  (void)state;
  run_attention((struct lm_attention){2, 5, 0, 2, 6}, 1);
  run_attention((struct lm_attention){1, 1, 0, 1, 1}, 1);
  run_attention((struct lm_attention){2, 150, 0, 3, 12}, 1); /* more than one block of queries */
  run_attention((struct lm_attention){1, 64, 0, 1, 8}, 0);
  run_attention((struct lm_attention){0, 7, 0, 2, 6}, 1);
  run_attention((struct lm_attention){2, 5, 10, 2, 6}, 0); /* the last third of a sequence */
  run_attention((struct lm_attention){2, 70, 67, 1, 4}, 0);
}

static void attention_stands_large_scores(void **state) {
  (void)state;
  struct lm_attention size = {1, 70, 0, 1, 4};
  float *qkv = noise(70 * 12, 5), *out = poison(70 * 4), *logsum = poison(70);
  float *scratch = poison((int64_t)attention_scratch(size, lm_threads()));
  for (int i = 0; i < 70 * 12; i++)
    if (i % 12 < 8) qkv[i] *= 60; /* scores in the thousands */
  attention_forward(size, out, logsum, (struct lm_qkv){qkv, qkv + 4, 12, 12}, scratch);
  for (int i = 0; i < 70 * 4; i++) assert_true(fabsf(out[i]) <= 1.0f);
  free(qkv), free(out), free(logsum), free(scratch);
}

/* ---- embedding ---- */

struct embedding_case {
  struct lm_embedding size;
  float *token, *position, *c;
};

static double embedding_loss(void *arg) {
  const struct embedding_case *t = arg;
  double sum = 0;
  for (int64_t i = 0; i < t->size.rows; i++) {
    int64_t position = t->size.first_position + (t->size.first_row + i) % t->size.length;
    for (int64_t j = 0; j < t->size.hidden; j++)
      sum += (double)t->c[i * t->size.hidden + j] * ((double)t->token[t->size.tokens[i] * t->size.hidden + j] +
                                                     (double)t->position[position * t->size.hidden + j]);
  }
  return sum;
}

static void embedding_matches(void **state) {
  (void)state;
  /* Rows 30 to 120 of three sequences' positions 5 to 45. */
  enum { ROWS = 91, FIRST = 30, LENGTH = 41, BEFORE = 5, POSITIONS = 50, HIDDEN = 67, VOCAB = 11 };
  int32_t tokens[ROWS];
  for (int i = 0; i < ROWS; i++) tokens[i] = i * i % VOCAB;
  int64_t n = ROWS * HIDDEN;
  struct embedding_case t = {{ROWS, HIDDEN, FIRST, LENGTH, BEFORE, tokens},
                             noise(VOCAB * HIDDEN, 1),
                             noise(POSITIONS * HIDDEN, 2),
                             noise(n, 3)};
  float *x = poison(n), *dtoken = ones(VOCAB * HIDDEN), *dposition = ones(POSITIONS * HIDDEN);
  embedding_forward(t.size, x, t.token, t.position);
  embedding_backward(t.size, dtoken, dposition, t.c);
  for (int64_t i = 0; i < n; i++)
    assert_true(x[i] == t.token[tokens[i / HIDDEN] * HIDDEN + i % HIDDEN] +
                            t.position[(BEFORE + (FIRST + i / HIDDEN) % LENGTH) * HIDDEN + i % HIDDEN]);
  check_gradient(embedding_loss, &t, t.token, VOCAB * HIDDEN, dtoken, 1, "dtoken");
  check_gradient(embedding_loss, &t, t.position, POSITIONS * HIDDEN, dposition, 1, "dposition");
  free(t.token), free(t.position), free(t.c), free(x), free(dtoken), free(dposition);
}

/* ---- loss ---- */

struct loss_case {
  int64_t rows, vocab;
  float *logits;
  int32_t *targets;
};

static double loss_of_row(const struct loss_case *t, int64_t r) {
  double sum = 0;
  for (int64_t i = 0; i < t->vocab; i++) sum += exp((double)t->logits[r * t->vocab + i]);
  return log(sum) - (double)t->logits[r * t->vocab + t->targets[r]];
}

static double loss_sum(void *arg) {
  const struct loss_case *t = arg;
  double sum = 0;
  for (int64_t r = 0; r < t->rows; r++) sum += loss_of_row(t, r);
  return sum;
}

static void run_loss(int64_t rows, int64_t vocab, float scale) {
  struct loss_case t = {rows, vocab, noise(rows * vocab, 1), lm_alloc((size_t)rows, sizeof(int32_t))};
  for (int64_t r = 0; r < rows; r++) t.targets[r] = (int32_t)(r * 7 % vocab);
  for (int64_t i = 0; i < rows * vocab; i++) t.logits[i] *= scale;
  float *copy = poison(rows * vocab), *loss = poison(rows), *again = poison(rows);
  memcpy(copy, t.logits, (size_t)(rows * vocab) * sizeof *copy);
  loss_forward_backward(copy, again, t.targets, rows, vocab, 0);
  memcpy(copy, t.logits, (size_t)(rows * vocab) * sizeof *copy);
  loss_forward_backward(copy, loss, t.targets, rows, vocab, 1);
  for (int64_t r = 0; r < rows; r++) assert_close((double)loss[r], loss_of_row(&t, r), 1e-5, "loss", r);
  assert_memory_equal(loss, again, (size_t)rows * sizeof *loss);
  check_gradient(loss_sum, &t, t.logits, rows * vocab, copy, 0, "dlogits");
  free(t.logits), free(t.targets), free(copy), free(loss), free(again);
}

static void loss_matches(void **state) {
  (void)state;
  run_loss(4, 3, 2);
  run_loss(100, 257, 4);
  run_loss(3, 20000, 8); /* one row to a task */
  run_loss(2, 1, 1);
  run_loss(0, 5, 1);
}

static void loss_stands_large_logits(void **state) {
  (void)state;
  float logits[] = {-1e30f, 0, 3e4f, 3e4f}, loss[2] = {NAN, NAN};
  int32_t targets[] = {1, 0};
  loss_forward_backward(logits, loss, targets, 2, 2, 1);
  assert_true(loss[0] == 0.0f);
  assert_close((double)loss[1], log(2), 1e-6, "loss", 1);
  assert_true(logits[0] == 0.0f || logits[0] < 1e-30f);
  assert_close((double)logits[2], -0.5, 1e-6, "dlogits", 2);
}

/* ---- numbers ---- */

static void exp_is_exact_enough(void **state) {
  (void)state;
  for (float x = -87.0f; x < 88.0f; x += 0.0137f)
    assert_true(fabs((double)lm_exp(x) / exp((double)x) - 1) < 3e-7 + 1e-7 * fabs((double)x));
  assert_true(lm_exp(-1e30f) < 2e-38f);
}

static void bf16_rounds_to_even(void **state) {
  (void)state;
  const uint32_t bits[] = {0x3f800000, 0x3f808000, 0x3f818000, 0x3f808001,
                           0x7f800000, 0xff7fffff, 0x7f800001, 0x80000000};
  const uint16_t expected[] = {0x3f80, 0x3f80, 0x3f82, 0x3f81, 0x7f80, 0xff80, 0x7fc0, 0x8000};
  float in[8], back[8];
  uint16_t out[8];
  memcpy(in, bits, sizeof in);
  from_f32(out, PMOE_BF16, in, 8);
  assert_memory_equal(out, expected, sizeof out);
  to_f32(back, out, PMOE_BF16, 8);
  for (int i = 0; i < 8; i++) {
    uint32_t wide = (uint32_t)expected[i] << 16;
    assert_memory_equal(&back[i], &wide, sizeof wide);
  }
  float *x = noise(40000, 9), *y = poison(40000);
  from_f32(y, PMOE_F32, x, 40000);
  assert_memory_equal(x, y, 40000 * sizeof *x);
  free(x), free(y);
}

/* ---- threads change nothing ---- */

static void threads_do_not_matter(void **state) {
  (void)state;
  struct lm_linear size = {600, 70, 600};
  struct lm_attention attention = {2, 130, 0, 2, 16};
  float *x = noise(600 * 70, 1), *w = noise(600 * 70, 2), *qkv = noise(2 * 130 * 48, 3), *result[3][4];
  for (int threads = 1; threads <= 3; threads++) {
    float **r = result[threads - 1];
    lm_set_threads(threads);
    r[0] = poison(600 * 600), r[1] = ones(600 * 70), r[2] = poison(2 * 130 * 16), r[3] = poison(2 * 130 * 48);
    float *logsum = poison(2 * 2 * 130), *scratch = poison((int64_t)attention_scratch(attention, threads));
    linear_forward(size, r[0], x, w, NULL);
    linear_backward_weight(size, r[1], NULL, r[0], x);
    struct lm_qkv in = {qkv, qkv + 16, 48, 48};
    attention_forward(attention, r[2], logsum, in, scratch);
    attention_backward(attention, r[3], r[3] + 16, r[2], in, r[2], logsum, scratch);
    free(logsum), free(scratch);
  }
  const size_t bytes[] = {600 * 600 * 4, 600 * 70 * 4, 2 * 130 * 16 * 4, 2 * 130 * 48 * 4};
  for (int i = 0; i < 4; i++) {
    assert_memory_equal(result[0][i], result[1][i], bytes[i]);
    assert_memory_equal(result[0][i], result[2][i], bytes[i]);
    for (int threads = 0; threads < 3; threads++) free(result[threads][i]);
  }
  free(x), free(w), free(qkv);
}

int main(void) {
  lm_set_threads(2);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(linear_matches),        cmocka_unit_test(add_sums),
      cmocka_unit_test(layernorm_matches),     cmocka_unit_test(attention_matches),
      cmocka_unit_test(embedding_matches),     cmocka_unit_test(attention_stands_large_scores),
      cmocka_unit_test(loss_matches),          cmocka_unit_test(loss_stands_large_logits),
      cmocka_unit_test(bf16_rounds_to_even),   cmocka_unit_test(exp_is_exact_enough),
      cmocka_unit_test(threads_do_not_matter),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
