#include "core/elements.cuh"
extern "C" {
#include "moe/layer_ops.h"
}

using namespace pmoei;

enum { THREADS = 256, SQUARES_PER_BLOCK = 1 << 14 };

__global__ static void mask_kernel(int64_t tokens, const uint8_t *mask, float *scale, float *branch_scale) {
  int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x;
  if (t < tokens && !mask[t]) scale[t] = branch_scale[t] = 0;
}

static pmoe_status mask_scales(pmoe_ctx *ctx, int64_t tokens, const uint8_t *mask, float *scale, float *branch_scale) {
  if (tokens == 0) return PMOE_OK;
  mask_kernel<<<(unsigned)((tokens + THREADS - 1) / THREADS), THREADS, 0, pmoei_cuda_stream(ctx)>>>(tokens, mask, scale,
                                                                                                    branch_scale);
  return pmoei_cuda_launched("mask of the branch");
}

__global__ static void split_kernel(int64_t tokens, int top_k, const float *weight, const float *scale, float *dweight,
                                    float *dscale) {
  int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x;
  if (t >= tokens) return;
  float sum = 0;
  for (int64_t i = t * top_k; i < (t + 1) * top_k; i++) {
    sum += weight[i] * dweight[i];
    dweight[i] *= scale[t];
  }
  dscale[t] = sum;
}

static pmoe_status split_scale(pmoe_ctx *ctx, const pmoe_routing *r, const float *scale, float *dweight,
                               float *dscale) {
  if (r->tokens == 0) return PMOE_OK;
  split_kernel<<<(unsigned)((r->tokens + THREADS - 1) / THREADS), THREADS, 0, pmoei_cuda_stream(ctx)>>>(
      r->tokens, r->top_k, r->weight, scale, dweight, dscale);
  return pmoei_cuda_launched("split of the scale");
}

/* ---- rows: N neighbours a thread ---- */

/* to = sum, or to += from, in float32; the parts of a row lie `apart` rows from each other. */
template <typename To, typename From, int N>
__global__ static void rows_kernel(rows_of<To> to, rows_of<From> from, int64_t rows, int64_t cols, int parts,
                                   bool add) {
  int64_t per_row = cols / N, count = rows * per_row;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count; i += gridDim.x * (int64_t)THREADS) {
    int64_t row = i / per_row, col = i % per_row * N;
    float sum[N], part[N];
    if (add) load<To, N>(sum, to.row(row) + col);
    for (int p = 0; p < parts; p++) {
      load<From, N>(part, from.row(row + p * rows) + col);
#pragma unroll
      for (int n = 0; n < N; n++) sum[n] = p == 0 && !add ? part[n] : sum[n] + part[n];
    }
    store<To, N>(to.row(row) + col, sum);
  }
}

template <typename To, typename From>
static pmoe_status run_rows(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *from, int parts, bool add) {
  constexpr int N = pack_of<To> < pack_of<From> ? pack_of<To> : pack_of<From>;
  cudaStream_t stream = pmoei_cuda_stream(ctx);
  if (aligned(to) && aligned(from)) {
    rows_kernel<To, From, N><<<blocks_for(to->rows * (to->cols / N), THREADS), THREADS, 0, stream>>>(
        view<To>(to), view<From>(from), to->rows, to->cols, parts, add);
  } else {
    rows_kernel<To, From, 1><<<blocks_for(to->rows * to->cols, THREADS), THREADS, 0, stream>>>(
        view<To>(to), view<From>(from), to->rows, to->cols, parts, add);
  }
  return pmoei_cuda_launched("rows");
}

static pmoe_status add_rows(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *from) {
  if (to->rows == 0) return PMOE_OK;
  return with_type(from->dtype,
                   [&](auto element) { return run_rows<float, decltype(element)>(ctx, to, from, 1, true); });
}

static pmoe_status round_rows(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *from) {
  if (to->rows == 0) return PMOE_OK;
  return with_type(to->dtype,
                   [&](auto element) { return run_rows<decltype(element), float>(ctx, to, from, 1, false); });
}

static pmoe_status sum_parts(pmoe_ctx *ctx, const pmoe_mat *to, const pmoe_mat *parts) {
  if (to->rows == 0) return PMOE_OK;
  int count = (int)(parts->rows / to->rows);
  return with_type(to->dtype, [&](auto element) {
    using T = decltype(element);
    return run_rows<T, T>(ctx, to, parts, count, false);
  });
}

/* ---- shards ---- */

__global__ static void choices_kernel(pmoei_numbering n, int64_t choices, pmoe_routing from, pmoe_routing to) {
  int64_t at = blockIdx.x * (int64_t)THREADS + threadIdx.x, i = at / n.shards;
  if (i >= choices) return;
  to.expert[at] = from.expert[i] < 0 ? -1 : pmoei_virtual_id(&n, from.expert[i], (int32_t)(at % n.shards));
  to.slot[at] = from.slot[i];
  to.weight[at] = from.weight[i];
}

__global__ static void experts_kernel(pmoei_numbering n, pmoe_routing from, pmoe_routing to) {
  int32_t at = (int32_t)(blockIdx.x * THREADS + threadIdx.x), e = at / n.shards;
  if (e >= from.num_experts) return;
  int32_t shard = pmoei_virtual_id(&n, e, at % n.shards);
  to.expert_count[shard] = from.expert_count[e];
  to.expert_rows[shard] = from.expert_rows[e];
}

static pmoe_status shards_route(pmoe_ctx *ctx, const pmoei_numbering *n, const pmoe_routing *from, pmoe_routing *to) {
  int64_t choices = from->tokens * from->top_k, experts = (int64_t)from->num_experts * n->shards;
  cudaStream_t stream = pmoei_cuda_stream(ctx);
  if (choices > 0)
    choices_kernel<<<(unsigned)((choices * n->shards + THREADS - 1) / THREADS), THREADS, 0, stream>>>(*n, choices,
                                                                                                      *from, *to);
  experts_kernel<<<(unsigned)((experts + THREADS - 1) / THREADS), THREADS, 0, stream>>>(*n, *from, *to);
  return pmoei_cuda_launched("choices of shards");
}

__global__ static void shards_sum_kernel(int64_t choices, int shards, const float *moved, float *dweight) {
  int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
  if (i >= choices) return;
  float sum = moved[i * shards];
  for (int s = 1; s < shards; s++) sum += moved[i * shards + s];
  dweight[i] = sum;
}

static pmoe_status shards_sum(pmoe_ctx *ctx, int64_t choices, int32_t shards, const float *moved, float *dweight) {
  if (choices == 0) return PMOE_OK;
  shards_sum_kernel<<<(unsigned)((choices + THREADS - 1) / THREADS), THREADS, 0, pmoei_cuda_stream(ctx)>>>(
      choices, shards, moved, dweight);
  return pmoei_cuda_launched("sum over shards");
}

/* ---- gradients ---- */

template <typename T> __global__ static void scale_kernel(T *grad, int64_t n, float scale) {
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < n; i += gridDim.x * (int64_t)THREADS)
    grad[i] = from_float<T>(to_float(grad[i]) * scale);
}

static pmoe_status scale_grad(pmoe_ctx *ctx, void *grad, pmoe_dtype dtype, int64_t n, float scale) {
  if (n == 0) return PMOE_OK;
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    scale_kernel<T>
        <<<blocks_for(n, 4 * THREADS), THREADS, 0, pmoei_cuda_stream(ctx)>>>(static_cast<T *>(grad), n, scale);
    return pmoei_cuda_launched("scale of a gradient");
  });
}

template <typename T> __global__ static void square_kernel(const T *grad, int64_t n, double *partial) {
  __shared__ double room[THREADS / 32];
  int64_t begin = blockIdx.x * (int64_t)SQUARES_PER_BLOCK;
  int64_t end = begin + SQUARES_PER_BLOCK < n ? begin + SQUARES_PER_BLOCK : n;
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
    double value = to_float(grad[i]);
    sum += value * value;
  }
  sum = block_sum(sum, room);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ static void add_kernel(const double *partial, int64_t n, double *total) {
  __shared__ double room[THREADS / 32];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) sum += partial[i];
  sum = block_sum(sum, room);
  if (threadIdx.x == 0) *total += sum;
}

static pmoe_status add_squares(pmoe_ctx *ctx, const void *grad, pmoe_dtype dtype, int64_t n, double *sum) {
  if (n == 0) return PMOE_OK;
  int64_t blocks = (n + SQUARES_PER_BLOCK - 1) / SQUARES_PER_BLOCK;
  void *base;
  int32_t frame;
  PMOEI_TRY(pmoei_scratch_open(ctx, (size_t)blocks * sizeof(double), &base, &frame));
  double *partial = static_cast<double *>(base);
  cudaStream_t stream = pmoei_cuda_stream(ctx);
  pmoe_status status = with_type(dtype, [&](auto element) {
    using T = decltype(element);
    square_kernel<T><<<(unsigned)blocks, THREADS, 0, stream>>>(static_cast<const T *>(grad), n, partial);
    add_kernel<<<1, THREADS, 0, stream>>>(partial, blocks, sum);
    return pmoei_cuda_launched("sum of squares");
  });
  pmoei_scratch_close(ctx, frame);
  return status;
}

extern "C" const pmoei_layer_ops pmoei_layer_ops_cuda = {mask_scales,  split_scale, add_rows,   round_rows, sum_parts,
                                                         shards_route, shards_sum,  scale_grad, add_squares};
