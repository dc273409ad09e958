/* Takes the slot from choices beyond the capacity: a thread block for each overfull expert. */
#include "gating/radix_cuda.cuh"

struct priorities {
  const uint32_t *priority;
  __device__ uint32_t operator()(int64_t i) const { return priority[i]; }
};

/* Contenders lie in token order, so those that stay are numbered on the way. */
__global__ static void drop_contenders(const __grid_constant__ gate_job job) {
  __shared__ radix_room room;
  const pmoei_gate_call &call = job.call;
  int64_t begin = call.contested[blockIdx.x], n = call.contested[blockIdx.x + 1] - begin, ties, kept = 0;
  if (n == 0) return;
  priorities all = {call.priority + begin};
  uint32_t threshold = radix_threshold(all, n, call.capacity, &ties, &room), found;
  for (int64_t first = 0; first < n; first += RADIX_THREADS) {
    int64_t i = first + threadIdx.x;
    uint32_t priority = i < n ? all(i) : 0;
    bool tie = i < n && priority == threshold;
    int64_t rank = flags_before(tie, &found, &room);
    bool stays = i < n && (priority > threshold || (tie && rank < ties));
    ties -= found;
    int64_t slot = kept + flags_before(stays, &found, &room);
    kept += found;
    if (i < n) call.routing.slot[call.contender[begin + i]] = stays ? slot : -1;
  }
}

pmoe_status pmoei_gate_cuda_drop_contenders(pmoei_gate_call *call) {
  drop_contenders<<<(unsigned)call->gate->cfg.num_experts, RADIX_THREADS, 0, stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("drop_contenders");
}
