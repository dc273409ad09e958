/* Gradients of the router's weight and bias. */
#include "gating/gate_cuda.cuh"

static pmoe_status multiply(pmoei_gate_call *call, const void *input, int64_t ld, int64_t first, int64_t rows) {
  const pmoe_gate *gate = call->gate;
  int64_t num_experts = gate->cfg.num_experts;
  pmoei_product product;
  memset(&product, 0, sizeof product);
  product.trans_a = product.accumulate = true;
  product.in = product.out = PMOE_F32;
  product.m = num_experts;
  product.n = gate->hidden;
  product.k = rows;
  product.a = call->dlogits + first * num_experts;
  product.lda = num_experts;
  product.b = input;
  product.ldb = ld;
  product.c = call->params.weight_grad;
  product.ldc = gate->hidden;
  return pmoei_cuda_product(gate->ctx, &product);
}

static pmoe_status weight_gradient(pmoei_gate_call *call) {
  /* A masked token's x may be anything, NaN too, and 0 times that must stay 0. */
  bool masked = call->step.token_mask != NULL, jitter = call->step.training && call->gate->cfg.jitter > 0;
  if (call->x.dtype == PMOE_F32 && !jitter && !masked) return multiply(call, call->x.data, call->x.ld, 0, call->tokens);
  for (int64_t first = 0; first < call->tokens; first += call->input_rows) {
    int64_t rows = call->tokens - first < call->input_rows ? call->tokens - first : call->input_rows;
    PMOEI_TRY(pmoei_gate_cuda_widen(call, first, rows, masked));
    PMOEI_TRY(multiply(call, call->input, call->gate->hidden, first, rows));
  }
  return PMOE_OK;
}

/* A thread block for a slice of rows and some neighbouring experts; threads of a warp have neighbours. */
enum { EXPERTS = 32, RUNS = 16, THREADS = 256 };

__global__ static void sum_columns(const float *dlogits, int64_t tokens, int64_t num_experts, double *sum) {
  __shared__ double run[RUNS][EXPERTS];
  int64_t e = blockIdx.y * (int64_t)EXPERTS + threadIdx.x, begin = blockIdx.x * (int64_t)PMOEI_GATE_SLICE;
  int64_t end = begin + PMOEI_GATE_SLICE < tokens ? begin + PMOEI_GATE_SLICE : tokens;
  double mine = 0;
#pragma unroll 4
  for (int64_t t = begin + threadIdx.y; t < end && e < num_experts; t += RUNS)
    mine += (double)dlogits[t * num_experts + e];
  run[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.y > 0 || e >= num_experts) return;
  for (int r = 1; r < RUNS; r++) mine += run[r][threadIdx.x];
  sum[blockIdx.x * num_experts + e] = mine;
}

__global__ static void add_sums(const double *sum, int64_t slices, int64_t num_experts, float *bias_grad) {
  int64_t e = blockIdx.x * (int64_t)THREADS + threadIdx.x;
  if (e >= num_experts) return;
  double all = 0;
  for (int64_t s = 0; s < slices; s++) all += sum[s * num_experts + e];
  bias_grad[e] += (float)all;
}

static pmoe_status bias_gradient(pmoei_gate_call *call) {
  int64_t num_experts = call->gate->cfg.num_experts, slices = (call->tokens + PMOEI_GATE_SLICE - 1) / PMOEI_GATE_SLICE;
  dim3 grid((unsigned)slices, (unsigned)((num_experts + EXPERTS - 1) / EXPERTS)), threads(EXPERTS, RUNS);
  sum_columns<<<grid, threads, 0, stream_of(call)>>>(call->dlogits, call->tokens, num_experts, call->partial_sum);
  PMOEI_TRY(pmoei_cuda_launched("sum_columns"));
  unsigned blocks = (unsigned)((num_experts + THREADS - 1) / THREADS);
  add_sums<<<blocks, THREADS, 0, stream_of(call)>>>(call->partial_sum, slices, num_experts, call->params.bias_grad);
  return pmoei_cuda_launched("add_sums");
}

pmoe_status pmoei_gate_cuda_weight_grad(pmoei_gate_call *call) {
  const pmoe_gate *gate = call->gate;
  if (gate->cfg.router != PMOE_ROUTER_LINEAR || call->tokens == 0) return PMOE_OK;
  PMOEI_TRY(weight_gradient(call));
  return gate->cfg.bias ? bias_gradient(call) : PMOE_OK;
}
