/* The router's logits, and what it makes of x before and of its gradient behind. */
#include "gating/gate_cuda.cuh"

enum { THREADS = 256 };

static unsigned blocks_for(int64_t n) { return (unsigned)((n + THREADS - 1) / THREADS); }

/* A thread for four columns of a token. */
__global__ static void widen(const __grid_constant__ gate_job job, row_view x, int64_t first, int64_t rows,
                             bool zeros) {
  int64_t hidden = x.mat.cols, groups = (hidden + 3) / 4;
  int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x, row = index / groups, col = index % groups * 4;
  if (row >= rows) return;
  int64_t n = hidden - col < 4 ? hidden - col : 4;
  float4 v = make_float4(0, 0, 0, 0);
  if (!zeros || !is_masked(job.call, first + row)) {
    v = load_columns(x, first + row, col, n);
    if (job.jitter) v = times(v, jitter_of(job, first + row, col));
  }
  row_view out = {{job.call.input, PMOE_F32, rows, hidden, hidden}, hidden % 4 == 0};
  store_columns(out, row, col, n, v);
}

pmoe_status pmoei_gate_cuda_widen(const pmoei_gate_call *call, int64_t first, int64_t rows, bool zeros) {
  int64_t groups = (call->x.cols + 3) / 4;
  widen<<<blocks_for(rows * groups), THREADS, 0, stream_of(call)>>>(job_of(call), view_rows(&call->x), first, rows,
                                                                    zeros);
  return pmoei_cuda_launched("widen");
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
  dim3 grid(blocks_for(call->tokens), (unsigned)(num_experts < 1024 ? num_experts : 1024));
  add_bias<<<grid, THREADS, 0, stream_of(call)>>>(call->logits, call->padded, call->tokens, call->params.bias,
                                                  num_experts);
  return pmoei_cuda_launched("add_bias");
}

pmoe_status pmoei_gate_cuda_logits(pmoei_gate_call *call) {
  if (call->tokens == 0) return PMOE_OK;
  return call->gate->cfg.router == PMOE_ROUTER_HOST_LOGITS ? host_logits(call) : linear_logits(call);
}

/* ---- backward ---- */

/* dx += what the product left in call->input, through the jitter. A thread for four columns of a token. */
__global__ static void add_rows(const __grid_constant__ gate_job job, row_view dx, int64_t first, int64_t rows) {
  int64_t hidden = dx.mat.cols, groups = (hidden + 3) / 4;
  int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x, row = index / groups, col = index % groups * 4;
  if (row >= rows) return;
  int64_t n = hidden - col < 4 ? hidden - col : 4;
  row_view in = {{job.call.input, PMOE_F32, rows, hidden, hidden}, hidden % 4 == 0};
  float4 v = load_columns(in, row, col, n), old = load_columns(dx, first + row, col, n);
  if (job.jitter) v = times(v, jitter_of(job, first + row, col));
  store_columns(dx, first + row, col, n, make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w));
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
  int64_t groups = (dx->cols + 3) / 4;
  for (int64_t first = 0; first < call->tokens; first += call->input_rows) {
    int64_t rows = call->tokens - first < call->input_rows ? call->tokens - first : call->input_rows;
    PMOEI_TRY(multiply_back(call, call->input, gate->hidden, first, rows, false));
    add_rows<<<blocks_for(rows * groups), THREADS, 0, stream_of(call)>>>(job_of(call), view_rows(dx), first, rows);
    PMOEI_TRY(pmoei_cuda_launched("add_rows"));
  }
  return PMOE_OK;
}
