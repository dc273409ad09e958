#include <string.h>

#include "core/dtype.h"
#include "core/parallel.h"
#include "core/simd.h"
#include "core/vmath_act.h"
#include "moe/ops.h"

enum { TOKENS = 64, COLUMNS = 256 }; /* per task; COLUMNS also bounds what is converted at a time */

PMOEI_VECTORISED static float dot(int64_t n, const float *a, const float *b) {
  float sum = 0;
  PMOEI_SIMD_SUM(sum) for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

PMOEI_VECTORISED static void add_scaled(int64_t n, float scale, const float *in, float *out) {
  PMOEI_SIMD for (int64_t i = 0; i < n; i++) out[i] += scale * in[i];
}

/* Columns [first, first + n) of a row in float32: where they lie, or converted into `buffer`. */
static const float *columns(const pmoe_mat *mat, int64_t row, int64_t first, int64_t n, float *buffer) {
  const char *p = (const char *)pmoei_row(mat, row) + (size_t)first * pmoe_dtype_size(mat->dtype);
  if (mat->dtype == PMOE_F32) return (const float *)p;
  pmoei_to_f32(buffer, p, mat->dtype, n);
  return buffer;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static void forward_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const pmoei_mix_call *c = arg;
  int64_t end = smaller(c->x->rows, (index + 1) * TOKENS);
  for (int64_t t = index * TOKENS; t < end; t++) {
    float logit[2] = {0, 0}, buffer[COLUMNS];
    for (int64_t j = 0; j < c->hidden; j += COLUMNS) {
      int64_t n = smaller(COLUMNS, c->hidden - j);
      const float *x = columns(c->x, t, j, n, buffer);
      for (int32_t o = 0; o < c->outputs; o++) logit[o] += dot(n, x, c->weight + o * c->hidden + j);
    }
    for (int32_t o = 0; c->bias && o < c->outputs; o++) logit[o] += c->bias[o];
    bool two = c->outputs == 2; /* a softmax of two is a sigmoid of their difference */
    c->scale[t] = two ? pmoei_sigmoid(logit[0] - logit[1]) : 1.0f;
    c->branch_scale[t] = c->outputs == 0 ? 1.0f : pmoei_sigmoid(two ? logit[1] - logit[0] : logit[0]);
  }
}

pmoe_status pmoei_mix_forward_cpu(const pmoei_mix_call *call, pmoe_stream stream) {
  (void)stream;
  pmoei_parallel(call->ctx, (call->x->rows + TOKENS - 1) / TOKENS, forward_task, (void *)call);
  return PMOE_OK;
}

static void input_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const pmoei_mix_call *c = arg;
  int64_t end = smaller(c->x->rows, (index + 1) * TOKENS);
  size_t size = pmoe_dtype_size(c->dx->dtype);
  for (int64_t t = index * TOKENS; t < end; t++) {
    float *d = c->dmix + 2 * t, sum[COLUMNS];
    float branch = c->branch_scale[t], slope = branch * (c->outputs == 2 ? c->scale[t] : 1.0f - branch);
    float to_branch = slope * (c->dbranch_scale[t] - (c->outputs == 2 ? c->dscale[t] : 0.0f));
    d[0] = c->outputs == 2 ? -to_branch : to_branch;
    d[1] = c->outputs == 2 ? to_branch : 0.0f;
    for (int64_t j = 0; j < c->hidden; j += COLUMNS) {
      int64_t n = smaller(COLUMNS, c->hidden - j);
      void *dx = (char *)pmoei_row(c->dx, t) + (size_t)j * size;
      pmoei_to_f32(sum, dx, c->dx->dtype, n);
      for (int32_t o = 0; o < c->outputs; o++) add_scaled(n, d[o], c->weight + o * c->hidden + j, sum);
      pmoei_from_f32(dx, c->dx->dtype, sum, n);
    }
  }
}

pmoe_status pmoei_mix_backward_input_cpu(const pmoei_mix_call *call, pmoe_stream stream) {
  (void)stream;
  pmoei_parallel(call->ctx, (call->x->rows + TOKENS - 1) / TOKENS, input_task, (void *)call);
  return PMOE_OK;
}

/* A task sums its columns over all tokens, so the order of the sum does not depend on threads; in blocks, which keeps
 * the error of long sums small. */
static void weight_task(void *arg, int64_t index, int32_t thread) {
  (void)thread;
  const pmoei_mix_call *c = arg;
  int64_t first = index * COLUMNS, n = smaller(COLUMNS, c->hidden - first);
  float total[2][COLUMNS] = {{0}}, bias[2] = {0, 0}, buffer[COLUMNS];
  for (int64_t begin = 0; begin < c->x->rows; begin += TOKENS) {
    float sum[2][COLUMNS] = {{0}}, bias_sum[2] = {0, 0};
    for (int64_t t = begin; t < smaller(c->x->rows, begin + TOKENS); t++) {
      const float *x = columns(c->x, t, first, n, buffer);
      for (int32_t o = 0; o < c->outputs; o++) {
        add_scaled(n, c->dmix[2 * t + o], x, sum[o]);
        bias_sum[o] += c->dmix[2 * t + o];
      }
    }
    for (int32_t o = 0; o < c->outputs; o++) {
      add_scaled(n, 1.0f, sum[o], total[o]);
      bias[o] += bias_sum[o];
    }
  }
  for (int32_t o = 0; o < c->outputs; o++) {
    add_scaled(n, 1.0f, total[o], c->weight_grad + o * c->hidden + first);
    if (c->bias_grad && index == 0) c->bias_grad[o] += bias[o];
  }
}

pmoe_status pmoei_mix_backward_weight_cpu(const pmoei_mix_call *call, pmoe_stream stream) {
  (void)stream;
  pmoei_parallel(call->ctx, (call->hidden + COLUMNS - 1) / COLUMNS, weight_task, (void *)call);
  return PMOE_OK;
}
