/* Slots: numbered in token order within each expert, by bits within a block of tokens and the counts of the blocks
 * before. */
#include "gating/gate_cuda.cuh"
#include "gating/masks_cuda.cuh"

/* Larger stays; among equals the earlier token stays. */
__device__ static uint32_t priority_of(const gate_job &job, int64_t token, int32_t k) {
  const pmoei_gate_call &call = job.call;
  if (job.cfg.drop == PMOE_DROP_RANDOM && call.step.training) {
    uint32_t word[4];
    pmoei_random4(job.drop_key, (uint64_t)(call.step.first_token + token), (uint64_t)k, word);
    return ~word[0]; /* the smallest stay */
  }
  if (job.cfg.drop == PMOE_DROP_PROBS) return pmoei_gate_order_key(call.routing.weight[token * job.cfg.top_k + k]);
  return job.cfg.drop == PMOE_DROP_TOKEN_ORDER ? 0 : (uint32_t)(job.cfg.top_k - k);
}

__device__ static void finish_weights(const gate_job &job, int64_t token) {
  const int64_t *slot = job.call.routing.slot + token * job.cfg.top_k;
  float *weight = job.call.routing.weight + token * job.cfg.top_k, sum = 0;
  for (int32_t k = 0; k < job.cfg.top_k; k++)
    if (slot[k] >= 0 || job.cfg.norm == PMOE_NORM_BEFORE_DROP) sum += weight[k];
  if (job.cfg.norm == PMOE_NORM_NONE) sum = 1;
  /* Survivors whose scores vanish beside the dropped ones weigh nothing, rather than 0/0. */
  for (int32_t k = 0; k < job.cfg.top_k; k++)
    weight[k] = slot[k] < 0 || sum < FLT_MIN ? 0 : weight[k] / sum * job.cfg.weight_scale;
}

/* By the first thread block. */
__device__ static void count_for_later(const gate_job &job) {
  if (blockIdx.x > 0 || !job.choice_count) return;
  for (int32_t e = (int32_t)threadIdx.x; e < job.cfg.num_experts; e += LANES)
    job.choice_count[e] += job.call.routing.expert_count[e];
}

/* Slots of the thread's choices among experts [base, base + n). */
__device__ static void number_choices(const gate_job &job, const uint32_t *masks, int64_t token, int32_t base,
                                      int32_t n, bool drops) {
  const pmoei_gate_call &call = job.call;
  int64_t num_experts = job.cfg.num_experts;
  for (int32_t k = 0; k < job.cfg.top_k; k++) {
    int64_t i = token * job.cfg.top_k + k;
    int32_t e = call.routing.expert[i];
    if (e < base || e >= base + n) continue;
    int64_t slot = call.block_count[blockIdx.x * num_experts + e] + rank_of(masks, n, e - base);
    call.routing.slot[i] = slot;
    if (!drops || call.contested[e] == call.contested[e + 1]) continue;
    int64_t at = call.contested[e] + slot;
    call.contender[at] = i;
    call.priority[at] = priority_of(job, token, k);
  }
}

__global__ static void number(const __grid_constant__ gate_job job, bool drops) {
  extern __shared__ uint32_t masks[];
  const pmoei_gate_call &call = job.call;
  int64_t token = my_token();
  bool here = token < call.tokens;
  int32_t num_experts = job.cfg.num_experts, top_k = job.cfg.top_k;
  const int32_t *expert = call.routing.expert + token * top_k;
  for (int32_t k = 0; k < top_k && here; k++)
    if (expert[k] < 0) call.routing.slot[token * top_k + k] = -1;
  for (int32_t base = 0; base < num_experts; base += MASKED_EXPERTS) {
    int32_t n = num_experts - base < MASKED_EXPERTS ? num_experts - base : MASKED_EXPERTS;
    mark_choices(masks, expert, here ? top_k : 0, base, n);
    if (here) number_choices(job, masks, token, base, n, drops);
    __syncthreads();
  }
  if (drops) return;
  if (here) finish_weights(job, token);
  count_for_later(job);
}

static pmoe_status number_tokens(pmoei_gate_call *call, bool drops) {
  if (call->blocks == 0) return PMOE_OK;
  size_t bytes = mask_bytes(call->gate->cfg.num_experts);
  number<<<(unsigned)call->blocks, LANES, bytes, stream_of(call)>>>(job_of(call), drops);
  return pmoei_cuda_launched("number");
}

__global__ static void finish(const __grid_constant__ gate_job job) {
  int64_t token = my_token();
  if (token < job.call.tokens) finish_weights(job, token);
  count_for_later(job);
}

/* ---- capacity ---- */

enum { SCAN = 1024 }; /* threads of the one block that goes over the experts */

/* Where the choices of each overfull expert are listed. */
__global__ static void contest(const __grid_constant__ gate_job job) {
  __shared__ int64_t room[32], before;
  const pmoei_gate_call &call = job.call;
  int32_t num_experts = job.cfg.num_experts;
  if (threadIdx.x == 0) before = 0;
  __syncthreads();
  for (int32_t first = 0; first < num_experts; first += SCAN) {
    int32_t e = first + (int32_t)threadIdx.x;
    int64_t count = e < num_experts ? call.routing.expert_count[e] : 0;
    int64_t mine = count > call.capacity ? count : 0, end = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
      int64_t other = __shfl_up_sync(0xffffffffu, end, distance);
      if (threadIdx.x % 32 >= distance) end += other;
    }
    if (threadIdx.x % 32 == 31) room[threadIdx.x / 32] = end;
    __syncthreads();
    int64_t base = before;
    for (unsigned w = 0; w < threadIdx.x / 32; w++) base += room[w];
    if (e < num_experts) call.contested[e] = base + end - mine;
    if (e == num_experts - 1) call.contested[num_experts] = base + end;
    __syncthreads();
    if (threadIdx.x == SCAN - 1) before = base + end;
    __syncthreads();
  }
}

pmoe_status pmoei_gate_cuda_drop(pmoei_gate_call *call) {
  if (!call->contested) return PMOE_OK; /* experts that choose take no more than they have room for */
  contest<<<1, SCAN, 0, stream_of(call)>>>(job_of(call));
  PMOEI_TRY(pmoei_cuda_launched("contest"));
  PMOEI_TRY(number_tokens(call, true));
  return pmoei_gate_cuda_drop_contenders(call);
}

pmoe_status pmoei_gate_cuda_place(pmoei_gate_call *call) {
  if (!call->contested) return number_tokens(call, false);
  if (call->blocks == 0) return PMOE_OK;
  finish<<<(unsigned)call->blocks, LANES, 0, stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("finish");
}
