/* The router's logits, and what it makes of x before and of its gradient behind. */
#include "gating/gate_cuda.cuh"

using pmoei::blocks_for;

enum { THREADS = 256 };

/* N = 4 or 1 neighbours a thread: four share one drawing of random numbers. */
template <int N> __device__ static void jitter(const gate_job &job, int64_t token, int64_t col, float *v) {
  float low = 1.0f - job.cfg.jitter, width = 2.0f * job.cfg.jitter;
  uint32_t word[4];
  pmoei_random4(job.jitter_key, (uint64_t)(job.call.step.first_token + token), (uint64_t)col / 4, word);
  if (N == 1) word[0] = word_at(word, col);
#pragma unroll
  for (int i = 0; i < N; i++) v[i] *= low + width * pmoei_uniform(word[i]);
}

template <typename T, int N>
__global__ static void widen(const __grid_constant__ gate_job job, pmoei::rows_of<T> x, int64_t first, int64_t rows,
                             bool zeros) {
  int64_t hidden = job.call.x.cols, per_row = hidden / N;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < rows * per_row; i += gridDim.x * (int64_t)THREADS) {
    int64_t row = i / per_row, col = i % per_row * N;
    float v[N] = {0};
    if (!zeros || !is_masked(job.call, first + row)) {
      pmoei::load<T, N>(v, x.row(first + row) + col);
      if (job.jitter) jitter<N>(job, first + row, col, v);
    }
    pmoei::store<float, N>(job.call.input + row * hidden + col, v);
  }
}

pmoe_status pmoei_gate_cuda_widen(const pmoei_gate_call *call, int64_t first, int64_t rows, bool zeros) {
  gate_job job = job_of(call);
  cudaStream_t stream = stream_of(call);
  const pmoe_mat *x = &call->x;
  return pmoei::with_type(x->dtype, [=](auto type) {
    using T = decltype(type);
    auto from = pmoei::view<T>(x);
    int64_t count = rows * x->cols;
    if (pmoei::aligned(x))
      widen<T, 4><<<blocks_for(count / 4, THREADS), THREADS, 0, stream>>>(job, from, first, rows, zeros);
    else widen<T, 1><<<blocks_for(count, THREADS), THREADS, 0, stream>>>(job, from, first, rows, zeros);
    return pmoei_cuda_launched("widen");
  });
}

__global__ static void add_bias(float *logits, int64_t padded, int64_t tokens, const float *bias, int32_t num_experts) {
  int64_t token = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  for (int64_t e = blockIdx.y; e < num_experts && token < tokens; e += gridDim.y) logits[e * padded + token] += bias[e];
}

/* Turns the host's rows of logits round, 32 x 32 at a time; 33 keeps the threads of a warp in different banks. */
__global__ static void turn_rows(float *logits, int64_t padded, const float *rows, int64_t ld, int64_t tokens,
                                 int32_t num_experts) {
  __shared__ float tile[32][33];
  int64_t first = (int64_t)blockIdx.x * 32, expert = (int64_t)blockIdx.y * 32;
  for (unsigned i = threadIdx.y; i < 32; i += blockDim.y)
    if (first + i < tokens && expert + threadIdx.x < num_experts)
      tile[i][threadIdx.x] = rows[(first + i) * ld + expert + threadIdx.x];
  __syncthreads();
  for (unsigned i = threadIdx.y; i < 32; i += blockDim.y)
    if (first + threadIdx.x < tokens && expert + i < num_experts)
      logits[(expert + i) * padded + first + threadIdx.x] = tile[threadIdx.x][i];
}

static pmoe_status host_logits(pmoei_gate_call *call) {
  const pmoe_mat *rows = call->step.logits;
  int32_t num_experts = call->gate->cfg.num_experts;
  dim3 grid((unsigned)((call->tokens + 31) / 32), (unsigned)((num_experts + 31) / 32)), threads(32, 8);
  turn_rows<<<grid, threads, 0, stream_of(call)>>>(call->logits, call->padded, (const float *)rows->data, rows->ld,
                                                   call->tokens, num_experts);
  return pmoei_cuda_launched("turn_rows");
}

static pmoe_status multiply(pmoei_gate_call *call, const void *input, int64_t ld, int64_t first, int64_t rows) {
  const pmoe_gate *gate = call->gate;
  pmoei_product product;
  memset(&product, 0, sizeof product);
  product.trans_b = true;
  product.in = product.out = PMOE_F32;
  product.m = gate->cfg.num_experts;
  product.n = rows;
  product.k = gate->hidden;
  product.a = call->params.weight;
  product.lda = gate->hidden;
  product.b = input;
  product.ldb = ld;
  product.c = call->logits + first;
  product.ldc = call->padded;
  return pmoei_cuda_product(gate->ctx, &product);
}

static pmoe_status linear_logits(pmoei_gate_call *call) {
  const pmoe_gate *gate = call->gate;
  if (call->x.dtype == PMOE_F32 && !(call->step.training && gate->cfg.jitter > 0)) {
    PMOEI_TRY(multiply(call, call->x.data, call->x.ld, 0, call->tokens));
  } else {
    for (int64_t first = 0; first < call->tokens; first += call->input_rows) {
      int64_t rows = call->tokens - first < call->input_rows ? call->tokens - first : call->input_rows;
      PMOEI_TRY(pmoei_gate_cuda_widen(call, first, rows, false));
      PMOEI_TRY(multiply(call, call->input, gate->hidden, first, rows));
    }
  }
  if (!gate->cfg.bias) return PMOE_OK;
  int32_t num_experts = gate->cfg.num_experts;
  dim3 grid((unsigned)((call->tokens + THREADS - 1) / THREADS), (unsigned)(num_experts < 1024 ? num_experts : 1024));
  add_bias<<<grid, THREADS, 0, stream_of(call)>>>(call->logits, call->padded, call->tokens, call->params.bias,
                                                  num_experts);
  return pmoei_cuda_launched("add_bias");
}

pmoe_status pmoei_gate_cuda_logits(pmoei_gate_call *call) {
  if (call->tokens == 0) return PMOE_OK;
  return call->gate->cfg.router == PMOE_ROUTER_HOST_LOGITS ? host_logits(call) : linear_logits(call);
}

/* ---- backward ---- */

/* dx += what the product left in call->input, through the jitter. */
template <typename T, int N>
__global__ static void add_rows(const __grid_constant__ gate_job job, pmoei::rows_of<T> dx, int64_t first,
                                int64_t rows) {
  int64_t hidden = job.call.dx.cols, per_row = hidden / N;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < rows * per_row; i += gridDim.x * (int64_t)THREADS) {
    int64_t row = i / per_row, col = i % per_row * N;
    float v[N], sum[N];
    pmoei::load<float, N>(v, job.call.input + row * hidden + col);
    pmoei::load<T, N>(sum, dx.row(first + row) + col);
    if (job.jitter) jitter<N>(job, first + row, col, v);
#pragma unroll
    for (int n = 0; n < N; n++) sum[n] += v[n];
    pmoei::store<T, N>(dx.row(first + row) + col, sum);
  }
}

static pmoe_status add_input_to(const pmoei_gate_call *call, int64_t first, int64_t rows) {
  gate_job job = job_of(call);
  cudaStream_t stream = stream_of(call);
  const pmoe_mat *dx = &call->dx;
  return pmoei::with_type(dx->dtype, [=](auto type) {
    using T = decltype(type);
    auto to = pmoei::view<T>(dx);
    int64_t count = rows * dx->cols;
    if (pmoei::aligned(dx))
      add_rows<T, 4><<<blocks_for(count / 4, THREADS), THREADS, 0, stream>>>(job, to, first, rows);
    else add_rows<T, 1><<<blocks_for(count, THREADS), THREADS, 0, stream>>>(job, to, first, rows);
    return pmoei_cuda_launched("add_rows");
  });
}

static pmoe_status multiply_back(pmoei_gate_call *call, void *out, int64_t ld, int64_t first, int64_t rows,
                                 bool accumulate) {
  const pmoe_gate *gate = call->gate;
  pmoei_product product;
  memset(&product, 0, sizeof product);
  product.accumulate = accumulate;
  product.in = product.out = PMOE_F32;
  product.m = rows;
  product.n = gate->hidden;
  product.k = gate->cfg.num_experts;
  product.a = call->dlogits + first * gate->cfg.num_experts;
  product.lda = gate->cfg.num_experts;
  product.b = call->params.weight;
  product.ldb = gate->hidden;
  product.c = out;
  product.ldc = ld;
  return pmoei_cuda_product(gate->ctx, &product);
}

pmoe_status pmoei_gate_cuda_add_to_dx(pmoei_gate_call *call) {
  const pmoe_gate *gate = call->gate;
  pmoe_mat *dx = &call->dx;
  if (dx->dtype == PMOE_F32 && !(call->step.training && gate->cfg.jitter > 0))
    return multiply_back(call, dx->data, dx->ld, 0, call->tokens, true);
  for (int64_t first = 0; first < call->tokens; first += call->input_rows) {
    int64_t rows = call->tokens - first < call->input_rows ? call->tokens - first : call->input_rows;
    PMOEI_TRY(multiply_back(call, call->input, gate->hidden, first, rows, false));
    PMOEI_TRY(add_input_to(call, first, rows));
  }
  return PMOE_OK;
}
