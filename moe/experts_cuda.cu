#include "core/elements.cuh"
#include "moe/activation_math.h"
#include "moe/experts_cuda.h"
extern "C" {
#include "moe/activation.h"
}

using namespace pmoei;

/* Rows of experts, neighbours in memory, handed to a kernel by value: blockIdx.y picks one. */
enum { SPANS = 64, THREADS = 256, SUM_COLUMNS = 32, SUM_LANES = 16 };
struct spans {
  int64_t first[SPANS], rows[SPANS];
  int32_t expert[SPANS];
};

/* Calls launch(spans, how many, most rows) until every expert that has rows has been in one. Without `apart` all rows
 * are one span. */
template <typename F> static pmoe_status each_span(const pmoei_experts_call *call, bool apart, F launch) {
  int64_t first = 0, most = 0;
  spans s;
  int n = 0;
  int32_t experts = apart ? call->experts->num_experts : 1;
  for (int32_t e = 0; e < experts; e++) {
    int64_t rows = apart ? call->rows[e] : call->x->rows;
    if (rows > 0) {
      s.first[n] = first, s.rows[n] = rows, s.expert[n] = e;
      most = rows > most ? rows : most;
      n++;
    }
    first += rows;
    if (n == SPANS || (e == experts - 1 && n > 0)) {
      PMOEI_TRY(launch(s, (unsigned)n, most));
      n = 0, most = 0;
    }
  }
  return PMOE_OK;
}

/* The scalar function of an activation, or of its gate. */
__device__ static float activate(pmoe_act act, float h, float *slope) {
  switch (act) {
  case PMOE_ACT_GELU:
  case PMOE_ACT_GEGLU: return pmoei_gelu(h, slope);
  case PMOE_ACT_GELU_TANH: return pmoei_gelu_tanh(h, slope);
  case PMOE_ACT_RELU: return pmoei_relu(h, slope);
  default: return pmoei_silu(h, slope);
  }
}

/* N numbers of a row, with the bias added if there is one. */
template <typename T, int N> __device__ static void load_biased(float *out, const T *row, const T *bias) {
  load<T, N>(out, row);
  if (!bias) return;
  float b[N];
  load<T, N>(b, bias);
#pragma unroll
  for (int i = 0; i < N; i++) out[i] += b[i];
}

/* ---- forward ---- */

template <typename T, int N>
__global__ static void activation_kernel(spans s, pmoe_act act, bool gated, int64_t inner, rows_of<T> pre,
                                         const T *bias, rows_of<T> a) {
  int64_t first = s.first[blockIdx.y], per_row = inner / N, count = s.rows[blockIdx.y] * per_row;
  if (bias) bias += s.expert[blockIdx.y] * (gated ? 2 * inner : inner);
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count; i += gridDim.x * (int64_t)THREADS) {
    int64_t row = first + i / per_row, j = i % per_row * N;
    float h[N], up[N], slope;
    load_biased<T, N>(h, pre.row(row) + j, bias ? bias + j : nullptr);
    if (gated) load_biased<T, N>(up, pre.row(row) + inner + j, bias ? bias + inner + j : nullptr);
#pragma unroll
    for (int n = 0; n < N; n++) {
      float value = activate(act, h[n], &slope);
      h[n] = gated ? value * up[n] : value;
    }
    store<T, N>(a.row(row) + j, h);
  }
}

/* Whether every row that starts at a column of the inner size does so at 16 bytes. */
static bool inner_aligned(const pmoe_experts *x, const pmoe_mat *a, const pmoe_mat *b, const void *bias) {
  size_t inner_bytes = (size_t)x->inner * pmoe_dtype_size(x->cfg.dtype);
  return aligned(a) && aligned(b) && inner_bytes % 16 == 0 && (uintptr_t)bias % 16 == 0;
}

template <typename T, int N>
static pmoe_status activate_rows(const pmoei_experts_call *call, const pmoe_mat *pre, const pmoe_mat *a) {
  const pmoe_experts *x = call->experts;
  const T *bias = static_cast<const T *>(call->params.fc1_bias);
  return each_span(call, bias != nullptr, [&](const spans &s, unsigned n, int64_t most) {
    dim3 grid(blocks_for(most * (x->inner / N), THREADS), n);
    activation_kernel<T, N><<<grid, THREADS, 0, pmoei_cuda_stream(x->ctx)>>>(s, x->cfg.act, pmoei_act_gated(x->cfg.act),
                                                                             x->inner, view<T>(pre), bias, view<T>(a));
    return pmoei_cuda_launched("activation");
  });
}

pmoe_status pmoei_cuda_activate(const pmoei_experts_call *call, const pmoe_mat *pre, const pmoe_mat *a) {
  bool wide = inner_aligned(call->experts, pre, a, call->params.fc1_bias);
  return with_type(call->experts->cfg.dtype, [&](auto element) {
    using T = decltype(element);
    return wide ? activate_rows<T, pack_of<T>>(call, pre, a) : activate_rows<T, 1>(call, pre, a);
  });
}

/* ---- backward ---- */

template <typename T> struct backward_rows {
  pmoe_act act;
  bool gated;
  int64_t inner, hidden;
  rows_of<T> pre, dpre, dy;
  const T *b1, *b2;
  const float *row_weight;
  float *drow_weight;
};

template <typename T> __device__ static float dot(const T *a, const T *b, int64_t n) {
  float sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) sum += to_float(a[i]) * to_float(b[i]);
  return sum;
}

/* A block a row, for the sum over it. */
template <typename T, int N> __global__ static void backward_kernel(spans s, backward_rows<T> g) {
  __shared__ float room[THREADS / 32];
  int64_t row = s.first[blockIdx.y] + blockIdx.x, expert = s.expert[blockIdx.y];
  if (blockIdx.x >= s.rows[blockIdx.y]) return;
  T *pre = g.pre.row(row), *dpre = g.dpre.row(row);
  const T *b1 = g.b1 ? g.b1 + expert * (g.gated ? 2 * g.inner : g.inner) : nullptr;
  float weight = g.row_weight ? g.row_weight[row] : 1.0f, sum = 0;
  for (int64_t j = threadIdx.x * N; j < g.inner; j += THREADS * N) {
    float d[N], h[N], up[N];
    load<T, N>(d, dpre + j);
    load_biased<T, N>(h, pre + j, b1 ? b1 + j : nullptr);
    if (g.gated) load_biased<T, N>(up, pre + g.inner + j, b1 ? b1 + g.inner + j : nullptr);
#pragma unroll
    for (int n = 0; n < N; n++) {
      float slope, gate = activate(g.act, h[n], &slope), u = g.gated ? up[n] : 1.0f, wd = weight * d[n];
      sum += d[n] * (gate * u);
      d[n] = wd * u * slope;
      up[n] = wd * gate;
      h[n] = weight * (gate * u);
    }
    store<T, N>(dpre + j, d);
    if (g.gated) store<T, N>(dpre + g.inner + j, up);
    store<T, N>(pre + j, h);
  }
  if (!g.drow_weight) return;
  if (g.b2) sum += dot(g.dy.row(row), g.b2 + expert * g.hidden, g.hidden);
  sum = block_sum(sum, room);
  if (threadIdx.x == 0) g.drow_weight[row] = sum;
}

template <typename T, int N>
static pmoe_status activate_backward(const pmoei_experts_call *call, const pmoe_mat *pre, const pmoe_mat *dpre) {
  const pmoe_experts *x = call->experts;
  backward_rows<T> g = {x->cfg.act,
                        pmoei_act_gated(x->cfg.act),
                        x->inner,
                        x->hidden,
                        view<T>(pre),
                        view<T>(dpre),
                        view<T>(call->dy),
                        static_cast<const T *>(call->params.fc1_bias),
                        static_cast<const T *>(call->params.fc2_bias),
                        call->row_weight,
                        call->drow_weight};
  return each_span(call, g.b1 || g.b2, [&](const spans &s, unsigned n, int64_t most) {
    dim3 grid((unsigned)most, n); /* at most 2^30 rows */
    backward_kernel<T, N><<<grid, THREADS, 0, pmoei_cuda_stream(x->ctx)>>>(s, g);
    return pmoei_cuda_launched("activation's backward");
  });
}

pmoe_status pmoei_cuda_activate_backward(const pmoei_experts_call *call, const pmoe_mat *pre, const pmoe_mat *dpre) {
  bool wide = inner_aligned(call->experts, pre, dpre, call->params.fc1_bias);
  return with_type(call->experts->cfg.dtype, [&](auto element) {
    using T = decltype(element);
    return wide ? activate_backward<T, pack_of<T>>(call, pre, dpre) : activate_backward<T, 1>(call, pre, dpre);
  });
}

/* ---- biases ---- */

template <typename T> __global__ static void fill_kernel(spans s, int64_t cols, const T *bias, rows_of<T> y) {
  int64_t first = s.first[blockIdx.y], count = s.rows[blockIdx.y] * cols;
  bias += s.expert[blockIdx.y] * cols;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count; i += gridDim.x * (int64_t)THREADS)
    y.row(first + i / cols)[i % cols] = bias[i % cols];
}

pmoe_status pmoei_cuda_fill_bias(const pmoei_experts_call *call) {
  const pmoe_experts *x = call->experts;
  return with_type(x->cfg.dtype, [&](auto element) {
    using T = decltype(element);
    return each_span(call, true, [&](const spans &s, unsigned n, int64_t most) {
      dim3 grid(blocks_for(most * x->hidden, THREADS), n);
      fill_kernel<T><<<grid, THREADS, 0, pmoei_cuda_stream(x->ctx)>>>(
          s, x->hidden, static_cast<const T *>(call->params.fc2_bias), view<T>(call->y));
      return pmoei_cuda_launched("fill with the bias");
    });
  });
}

/* A warp's lanes are columns, so that rows are read whole sectors at a time; every SUM_LANES-th row is one thread's,
 * and their sums are added in order. */
template <typename T, typename G>
__global__ static void sum_kernel(spans s, int64_t cols, rows_of<T> rows, const float *weight, G *grad) {
  __shared__ float part[SUM_LANES][SUM_COLUMNS];
  int64_t first = s.first[blockIdx.y], end = first + s.rows[blockIdx.y];
  int64_t col = blockIdx.x * (int64_t)SUM_COLUMNS + threadIdx.x;
  float sum = 0;
  for (int64_t r = first + threadIdx.y; r < end && col < cols; r += SUM_LANES)
    sum += (weight ? weight[r] : 1.0f) * to_float(rows.row(r)[col]);
  part[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= cols) return;
  for (int i = 1; i < SUM_LANES; i++) sum += part[i][threadIdx.x];
  G *to = grad + s.expert[blockIdx.y] * cols + col;
  *to = from_float<G>(to_float(*to) + sum);
}

template <typename T, typename G>
static pmoe_status sum_rows(const pmoei_experts_call *call, const pmoe_mat *rows, const float *weight, void *grad) {
  return each_span(call, true, [&](const spans &s, unsigned n, int64_t most) {
    (void)most;
    dim3 grid(blocks_for(rows->cols, SUM_COLUMNS), n), block(SUM_COLUMNS, SUM_LANES);
    sum_kernel<T, G><<<grid, block, 0, pmoei_cuda_stream(call->experts->ctx)>>>(s, rows->cols, view<T>(rows), weight,
                                                                                static_cast<G *>(grad));
    return pmoei_cuda_launched("sum of rows");
  });
}

pmoe_status pmoei_cuda_sum_rows(const pmoei_experts_call *call, const pmoe_mat *rows, const float *weight, void *grad) {
  bool wide = call->experts->cfg.grad_dtype == PMOE_F32;
  return with_type(call->experts->cfg.dtype, [&](auto element) {
    using T = decltype(element);
    return wide ? sum_rows<T, float>(call, rows, weight, grad) : sum_rows<T, T>(call, rows, weight, grad);
  });
}
