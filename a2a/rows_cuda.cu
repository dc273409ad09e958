/* The row mover on CUDA. A block takes a token: its threads move 16 bytes of a row at a time, and add up choices in
 * their order. */
#include "core/elements.cuh"
extern "C" {
#include "a2a/rows.h"
}

using namespace pmoei;

enum { THREADS = 256, RUNS = 128, CHOICES = 128 };

/* The row of a choice; -1: none. */
__device__ static int64_t locate(const pmoei_row_map &map, int64_t choice) {
  int64_t slot = map.slot[choice];
  return slot < 0 ? -1 : map.first_row[map.expert[choice]] + slot;
}

/* A token's first choices, looked up once for all threads of its block. */
__device__ static void locate_all(const pmoei_row_map &map, int64_t token, int64_t *row) {
  for (int k = threadIdx.x; k < map.top_k && k < CHOICES; k += THREADS) row[k] = locate(map, token * map.top_k + k);
  __syncthreads();
}

/* ---- spread ---- */

/* Rows are bytes here: `units` of type U. */
template <typename U>
__global__ static void spread_kernel(pmoei_row_map map, int64_t units, rows_of<const U> x, rows_of<U> rows,
                                     const float *weight, const float *scale, float *row_weight) {
  int64_t t = blockIdx.x;
  const U *from = x.row(t);
  for (int64_t i = threadIdx.x; i < units; i += THREADS) {
    U value = from[i];
    for (int k = 0; k < map.top_k; k++) {
      int64_t choice = t * map.top_k + k, slot = map.slot[choice];
      if (slot >= 0) rows.row(map.first_row[map.expert[choice]] + slot)[i] = value;
    }
  }
  for (int k = threadIdx.x; row_weight && k < map.top_k; k += THREADS) {
    int64_t choice = t * map.top_k + k, slot = map.slot[choice];
    if (slot >= 0) row_weight[map.first_row[map.expert[choice]] + slot] = weight[choice] * (scale ? scale[t] : 1.0f);
  }
}

template <typename U> static rows_of<U> units_of(const pmoe_mat *mat) {
  return {static_cast<U *>(mat->data), mat->ld * (int64_t)pmoe_dtype_size(mat->dtype) / (int64_t)sizeof(U)};
}

template <typename U>
static void run_spread(const pmoe_ctx *ctx, const pmoei_row_map *map, const pmoe_mat *x, pmoe_mat *rows,
                       const float *weight, const float *scale, float *row_weight) {
  int64_t units = x->cols * (int64_t)pmoe_dtype_size(x->dtype) / (int64_t)sizeof(U);
  spread_kernel<U><<<(unsigned)map->tokens, THREADS, 0, pmoei_cuda_stream(ctx)>>>(
      *map, units, units_of<const U>(x), units_of<U>(rows), weight, scale, row_weight);
}

static pmoe_status spread(const pmoe_ctx *ctx, const pmoei_row_map *map, const pmoe_mat *x, pmoe_mat *rows,
                          const float *weight, const float *scale, float *row_weight) {
  if (map->tokens == 0) return PMOE_OK;
  if (aligned(x) && aligned(rows)) run_spread<uint4>(ctx, map, x, rows, weight, scale, row_weight);
  else if (pmoe_dtype_size(x->dtype) == 4) run_spread<uint32_t>(ctx, map, x, rows, weight, scale, row_weight);
  else run_spread<uint16_t>(ctx, map, x, rows, weight, scale, row_weight);
  return pmoei_cuda_launched("spread of rows");
}

/* ---- sum ---- */

template <typename T, typename Y> struct sum_args {
  rows_of<T> rows, branch;
  rows_of<Y> y;
  const float *weight, *scale, *branch_scale;
  int64_t cols;
  bool has_branch;
};

template <typename T, typename Y, int N> __global__ static void sum_kernel(pmoei_row_map map, sum_args<T, Y> a) {
  __shared__ int64_t first[CHOICES];
  __shared__ float weights[CHOICES];
  int64_t t = blockIdx.x;
  for (int k = threadIdx.x; k < map.top_k && k < CHOICES; k += THREADS)
    weights[k] = a.weight ? a.weight[t * map.top_k + k] : 1.0f;
  locate_all(map, t, first);
  float scale = a.scale ? a.scale[t] : 1.0f, branch_scale = a.branch_scale ? a.branch_scale[t] : 1.0f;
  for (int64_t j = threadIdx.x * N; j < a.cols; j += THREADS * N) {
    float sum[N] = {0}, part[N];
    for (int k = 0; k < map.top_k; k++) {
      int64_t choice = t * map.top_k + k, row = k < CHOICES ? first[k] : locate(map, choice);
      if (row < 0) continue;
      float weight = k < CHOICES ? weights[k] : a.weight ? a.weight[choice] : 1.0f;
      load<T, N>(part, a.rows.row(row) + j);
#pragma unroll
      for (int n = 0; n < N; n++) sum[n] += weight * part[n];
    }
    if (a.has_branch) load<T, N>(part, a.branch.row(t) + j);
#pragma unroll
    for (int n = 0; n < N; n++) {
      if (a.scale) sum[n] *= scale;
      if (a.has_branch) sum[n] += branch_scale * part[n];
    }
    store<Y, N>(a.y.row(t) + j, sum);
  }
}

template <typename T, typename Y>
static void run_sum(const pmoe_ctx *ctx, const pmoei_row_map *map, const pmoei_row_sum *s) {
  sum_args<T, Y> a = {view<T>(s->rows), {}, view<Y>(s->y), s->weight, s->scale, s->branch_scale, s->y->cols, false};
  if (s->branch) a.branch = view<T>(s->branch), a.has_branch = true;
  constexpr int N = pack_of<T> < pack_of<Y> ? pack_of<T> : pack_of<Y>;
  bool wide = aligned(s->rows) && aligned(s->y) && (!s->branch || aligned(s->branch));
  cudaStream_t stream = pmoei_cuda_stream(ctx);
  if (wide) sum_kernel<T, Y, N><<<(unsigned)map->tokens, THREADS, 0, stream>>>(*map, a);
  else sum_kernel<T, Y, 1><<<(unsigned)map->tokens, THREADS, 0, stream>>>(*map, a);
}

static pmoe_status sum(const pmoe_ctx *ctx, const pmoei_row_map *map, const pmoei_row_sum *s) {
  if (map->tokens == 0) return PMOE_OK;
  return with_type(s->rows->dtype, [&](auto element) {
    using T = decltype(element);
    if (s->y->dtype == PMOE_F32) run_sum<T, float>(ctx, map, s);
    else run_sum<T, T>(ctx, map, s);
    return pmoei_cuda_launched("sum of rows");
  });
}

/* ---- pick ---- */

__global__ static void pick_kernel(pmoei_row_map map, const float *row_value, float *value) {
  int64_t choice = blockIdx.x * (int64_t)THREADS + threadIdx.x;
  if (choice >= map.tokens * map.top_k) return;
  int64_t row = locate(map, choice);
  value[choice] = row < 0 ? 0.0f : row_value[row];
}

static pmoe_status pick(const pmoe_ctx *ctx, const pmoei_row_map *map, const float *row_value, float *value) {
  int64_t choices = map->tokens * map->top_k;
  if (choices == 0) return PMOE_OK;
  pick_kernel<<<(unsigned)((choices + THREADS - 1) / THREADS), THREADS, 0, pmoei_cuda_stream(ctx)>>>(*map, row_value,
                                                                                                     value);
  return pmoei_cuda_launched("pick of row values");
}

/* ---- runs ---- */

/* Handed to the kernel by value; blockIdx.y picks one. */
struct some_runs {
  pmoei_row_run at[RUNS];
};

template <typename U>
__global__ static void runs_kernel(some_runs runs, int64_t units, rows_of<const U> from, rows_of<U> to,
                                   const float *from_value, float *to_value) {
  pmoei_row_run run = runs.at[blockIdx.y];
  for (int64_t r = blockIdx.x; r < run.rows; r += gridDim.x) {
    const U *source = from.row(run.from + r);
    U *target = to.row(run.to + r);
    for (int64_t i = threadIdx.x; i < units; i += THREADS) target[i] = source[i];
    if (from_value && threadIdx.x == 0) to_value[run.to + r] = from_value[run.from + r];
  }
}

template <typename U>
static pmoe_status run_runs(const pmoe_ctx *ctx, int64_t num_runs, const pmoei_row_run *runs, const pmoe_mat *from,
                            pmoe_mat *to, const float *from_value, float *to_value) {
  int64_t units = to->cols * (int64_t)pmoe_dtype_size(to->dtype) / (int64_t)sizeof(U);
  for (int64_t i = 0; i < num_runs;) {
    some_runs some = {};
    unsigned n = 0;
    int64_t most = 0;
    for (; i < num_runs && n < RUNS; i++) {
      if (runs[i].rows == 0) continue;
      some.at[n++] = runs[i];
      most = runs[i].rows > most ? runs[i].rows : most;
    }
    if (n == 0) break;
    dim3 grid((unsigned)(most < 65535 ? most : 65535), n);
    runs_kernel<U><<<grid, THREADS, 0, pmoei_cuda_stream(ctx)>>>(some, units, units_of<const U>(from), units_of<U>(to),
                                                                 to_value ? from_value : nullptr, to_value);
    PMOEI_TRY(pmoei_cuda_launched("copy of runs"));
  }
  return PMOE_OK;
}

static pmoe_status copy_runs(const pmoe_ctx *ctx, int64_t num_runs, const pmoei_row_run *runs, const pmoe_mat *from,
                             pmoe_mat *to, const float *from_value, float *to_value) {
  if (aligned(from) && aligned(to)) return run_runs<uint4>(ctx, num_runs, runs, from, to, from_value, to_value);
  if (pmoe_dtype_size(to->dtype) == 4) return run_runs<uint32_t>(ctx, num_runs, runs, from, to, from_value, to_value);
  return run_runs<uint16_t>(ctx, num_runs, runs, from, to, from_value, to_value);
}

extern "C" const pmoei_rows_ops pmoei_rows_cuda = {spread, sum, pick, copy_runs};
