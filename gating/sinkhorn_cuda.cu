/* Sinkhorn's iteration; the rule is in sinkhorn_cpu.c. All rounds are enqueued; once the factors have converged the
 * rest return at once. */
#include "gating/gate_cuda.cuh"

enum { MAX_ITERATIONS = 100, THREADS = 256 };
enum { TAKING_PART, CONVERGED }; /* in call->iteration */
#define TOLERANCE 1e-4
#define GUARD 1e-8

/* exp(x - max), and zeros for tokens that take no part. */
__global__ static void prepare(const __grid_constant__ gate_job job) {
  const pmoei_gate_call &call = job.call;
  int64_t token = my_token();
  int32_t num_experts = job.cfg.num_experts;
  bool here = token < call.tokens;
  token_scores scores = {0, 1, 0, false};
  if (here) find_extremes(job, call.logits + token, &scores);
  bool takes_part = here && scores.finite && !is_masked(call, token);
  call.token_factor[token] = takes_part;
  for (int64_t e = 0; e < num_experts; e++) {
    int64_t i = e * call.padded + token;
    call.selection[i] = takes_part ? pmoei_expf(call.logits[i] - scores.max) : 0;
  }
  int all = __syncthreads_count(takes_part);
  if (threadIdx.x == 0) atomicAdd((unsigned long long *)&call.iteration[TAKING_PART], (unsigned long long)all);
  if (blockIdx.x > 0) return;
  for (int32_t e = (int32_t)threadIdx.x; e < num_experts; e += LANES) call.expert_factor[e] = 1;
}

__device__ static bool is_done(const pmoei_gate_call &call) {
  return call.iteration[TAKING_PART] == 0 || call.iteration[CONVERGED] != 0;
}

/* A block's sum over its tokens for each of some experts. A column more keeps both ways as free of bank conflicts as
 * doubles can be. */
enum { TILE = 32 };
typedef double column_tile[TILE][LANES + 1];

__device__ static double sum_lanes(double *lane) {
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return lane[0];
}

/* A round's first half: the tokens' factors, and each block's part of the experts' sums. */
__global__ static void weigh_tokens(const __grid_constant__ gate_job job) {
  __shared__ column_tile tile;
  const pmoei_gate_call &call = job.call;
  if (is_done(call)) return;
  int64_t token = my_token(), num_experts = job.cfg.num_experts;
  const float *score = call.selection + token;
  double total = 0;
#pragma unroll 4
  for (int64_t e = 0; e < num_experts; e++) total += (double)score[e * call.padded] * call.expert_factor[e];
  double factor = total > 0 ? 1 / (double)call.iteration[TAKING_PART] / (total + GUARD) : 0;
  call.token_factor[token] = factor;
  for (int64_t first = 0; first < num_experts; first += TILE) {
    int64_t n = num_experts - first < TILE ? num_experts - first : TILE;
    for (int64_t e = 0; e < n; e++) tile[e][threadIdx.x] = (double)score[(first + e) * call.padded] * factor;
    __syncthreads();
    if (threadIdx.x < n) call.column_sum[blockIdx.x * num_experts + first + threadIdx.x] = sum_lanes(tile[threadIdx.x]);
    __syncthreads();
  }
}

/* Its second half: the experts' factors, and their mean change. One thread block. */
__global__ static void weigh_experts(const __grid_constant__ gate_job job) {
  __shared__ double room[32];
  const pmoei_gate_call &call = job.call;
  if (is_done(call)) return;
  int64_t num_experts = job.cfg.num_experts;
  double change = 0;
  for (int64_t e = threadIdx.x; e < num_experts; e += THREADS) {
    double sum = 0;
#pragma unroll 4
    for (int64_t b = 0; b < call.blocks; b++) sum += call.column_sum[b * num_experts + e];
    double factor = 1.0 / (double)num_experts / (sum + GUARD);
    change += fabs(factor - call.expert_factor[e]) / (double)num_experts;
    call.expert_factor[e] = factor;
  }
  change = block_sum(change, room);
  __syncthreads(); /* all have looked at the flag */
  if (threadIdx.x == 0 && change <= TOLERANCE) call.iteration[CONVERGED] = 1;
}

/* A token that took no part chooses by its logits. */
__global__ static void balance(const __grid_constant__ gate_job job) {
  const pmoei_gate_call &call = job.call;
  int64_t token = my_token();
  double factor = call.token_factor[token];
  if (token >= call.tokens) return;
  for (int64_t e = 0; e < job.cfg.num_experts; e++) {
    int64_t i = e * call.padded + token;
    double balanced = (double)call.selection[i] * call.expert_factor[e] * factor;
    call.selection[i] = factor > 0 ? (float)balanced : call.logits[i];
  }
}

pmoe_status pmoei_gate_cuda_sinkhorn(pmoei_gate_call *call) {
  if (call->blocks == 0) return PMOE_OK;
  gate_job job = job_of(call);
  unsigned blocks = (unsigned)call->blocks;
  cudaStream_t stream = stream_of(call);
  PMOEI_TRY(pmoei_data_zero(call->gate->ctx, call->iteration, 2 * sizeof *call->iteration));
  prepare<<<blocks, LANES, 0, stream>>>(job);
  PMOEI_TRY(pmoei_cuda_launched("prepare"));
  for (int i = 0; i < MAX_ITERATIONS; i++) {
    weigh_tokens<<<blocks, LANES, 0, stream>>>(job);
    weigh_experts<<<1, THREADS, 0, stream>>>(job);
    PMOEI_TRY(pmoei_cuda_launched("weigh_experts"));
  }
  balance<<<blocks, LANES, 0, stream>>>(job);
  return pmoei_cuda_launched("balance");
}
