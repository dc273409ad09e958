/* Choices that compare nothing, and the update of the selection bias. */
#include "gating/gate_cuda.cuh"

__global__ static void round_robin(const __grid_constant__ gate_job job) {
  int64_t token = my_token();
  if (token >= job.call.tokens) return;
  bool masked = is_masked(job.call, token);
  uint64_t top_k = (uint64_t)job.cfg.top_k, num_experts = (uint64_t)job.cfg.num_experts;
  uint64_t place = (uint64_t)(job.call.step.first_token + token) % num_experts * top_k % num_experts;
  for (uint64_t k = 0; k < top_k; k++)
    job.call.routing.expert[token * top_k + k] = masked ? -1 : (int32_t)((place + k) % num_experts);
}

pmoe_status pmoei_gate_cuda_round_robin(pmoei_gate_call *call) {
  if (call->blocks == 0) return PMOE_OK;
  round_robin<<<(unsigned)call->blocks, LANES, 0, stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("round_robin");
}

/* Of the experts left after k choices, the one at a random place. `sorted` holds the choices so far in order. */
__device__ static int32_t draw_another(int32_t place, int32_t *sorted, int64_t stride, int32_t k) {
  int32_t at = 0;
  while (at < k && sorted[at * stride] <= place + at) at++;
  for (int32_t i = k; i > at; i--) sorted[i * stride] = sorted[(i - 1) * stride];
  sorted[at * stride] = place + at;
  return place + at;
}

__global__ static void hash(const __grid_constant__ gate_job job) {
  const pmoei_gate_call &call = job.call;
  int64_t token = my_token();
  if (token >= call.tokens) return;
  bool masked = is_masked(call, token);
  uint32_t word[4] = {0, 0, 0, 0};
  for (int32_t k = 0; k < job.cfg.top_k; k++) {
    if (k % 4 == 0) pmoei_random4(job.hash_key, (uint64_t)(uint32_t)call.step.token_id[token], (uint64_t)k / 4, word);
    uint32_t here = word_at(word, k);
    uint32_t left = (uint32_t)(job.cfg.num_experts - k);
    int32_t place = (int32_t)((uint64_t)here * left >> 32);
    int32_t expert = draw_another(place, call.drawn + token, call.padded, k);
    call.routing.expert[token * job.cfg.top_k + k] = masked ? -1 : expert;
  }
}

pmoe_status pmoei_gate_cuda_hash(pmoei_gate_call *call) {
  if (call->blocks == 0) return PMOE_OK;
  hash<<<(unsigned)call->blocks, LANES, 0, stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("hash");
}

/* What is no expert, or was chosen before, is none. */
__global__ static void given(const __grid_constant__ gate_job job) {
  const pmoei_gate_call &call = job.call;
  int64_t token = my_token();
  if (token >= call.tokens) return;
  bool masked = is_masked(call, token);
  const int32_t *from = call.step.expert + token * job.cfg.top_k;
  for (int32_t k = 0; k < job.cfg.top_k; k++) {
    int32_t expert = masked ? -1 : valid_expert(from[k], job.cfg.num_experts);
    for (int32_t j = 0; j < k && expert >= 0; j++)
      if (from[j] == expert) expert = -1;
    call.routing.expert[token * job.cfg.top_k + k] = expert;
  }
}

pmoe_status pmoei_gate_cuda_given(pmoei_gate_call *call) {
  if (call->blocks == 0) return PMOE_OK;
  given<<<(unsigned)call->blocks, LANES, 0, stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("given");
}

enum { THREADS = 256 };

/* One thread block. */
__global__ static void update_bias(int32_t num_experts, const int64_t *count, float rate, bool centred, float *bias) {
  __shared__ long long room[32], all;
  __shared__ double mean;
  long long total = 0, signs = 0;
  for (int32_t e = (int32_t)threadIdx.x; e < num_experts; e += THREADS) total += count[e];
  total = block_sum(total, room);
  if (threadIdx.x == 0) all = total;
  __syncthreads();
  total = all;
  for (int32_t e = (int32_t)threadIdx.x; e < num_experts; e += THREADS)
    signs += pmoei_sign_below_mean(total, num_experts, count[e]);
  signs = block_sum(signs, room);
  if (threadIdx.x == 0) mean = centred ? (double)signs / num_experts : 0;
  __syncthreads();
  for (int32_t e = (int32_t)threadIdx.x; e < num_experts; e += THREADS)
    bias[e] = pmoei_moved_bias(bias[e], rate, pmoei_sign_below_mean(total, num_experts, count[e]), mean);
}

pmoe_status pmoei_gate_cuda_update_bias(pmoe_ctx *ctx, int32_t num_experts, const int64_t *count, float rate,
                                        int32_t centred, float *bias) {
  update_bias<<<1, THREADS, 0, pmoei_cuda_stream(ctx)>>>(num_experts, count, rate, centred != 0, bias);
  return pmoei_cuda_launched("update_bias");
}
