/* The K best experts of each token. */
#include "gating/best_cuda.cuh"

enum { LEVELS = 8 }; /* choices that one pass finds */

template <int levels>
__global__ static void best(const __grid_constant__ gate_job job, const float *keys, int32_t *expert, bool picked) {
  const pmoei_gate_call &call = job.call;
  int64_t token = my_token();
  if (token >= call.tokens) return;
  bool masked = is_masked(call, token);
  int32_t top_k = job.cfg.top_k, *out = expert + token * top_k;
  best_list<levels> list = no_best<levels>();
  for (int32_t done = 0; done < top_k; done += levels) {
    next_best(&list, keys + token, call.padded, job.cfg.num_experts);
#pragma unroll
    for (int j = 0; j < levels; j++) {
      if (done + j >= top_k) break;
      bool none = masked || (picked && list.key[j] == key_of(-INFINITY));
      out[done + j] = none ? -1 : list.index[j];
    }
  }
}

pmoe_status pmoei_gate_cuda_best(pmoei_gate_call *call, const float *keys, int32_t *expert, bool picked) {
  if (call->blocks == 0) return PMOE_OK;
  int32_t top_k = call->gate->cfg.top_k;
  gate_job job = job_of(call);
  unsigned blocks = (unsigned)call->blocks;
  cudaStream_t stream = stream_of(call);
  if (top_k == 1) best<1><<<blocks, LANES, 0, stream>>>(job, keys, expert, picked);
  else if (top_k == 2) best<2><<<blocks, LANES, 0, stream>>>(job, keys, expert, picked);
  else if (top_k <= 4) best<4><<<blocks, LANES, 0, stream>>>(job, keys, expert, picked);
  else best<LEVELS><<<blocks, LANES, 0, stream>>>(job, keys, expert, picked);
  return pmoei_cuda_launched("best");
}

/* The best of the logits with noise, but for the expert `taken` (-1: none). */
__device__ static int32_t best_with_noise(const gate_job &job, int64_t token, int32_t taken) {
  const float *logit = job.call.logits + token;
  uint64_t global = (uint64_t)(job.call.step.first_token + token);
  uint32_t most = 0, word[4] = {0, 0, 0, 0};
  int32_t expert = -1;
  for (int32_t e = 0; e < job.cfg.num_experts; e++) {
    if (e % 4 == 0) pmoei_random4(job.gumbel_key, global, (uint64_t)e / 4, word);
    uint32_t here = word_at(word, e);
    uint32_t key = key_of(logit[e * job.call.padded] - pmoei_logf(-pmoei_logf(pmoei_uniform(here))));
    bool better = key > most && e != taken;
    most = better ? key : most;
    expert = better ? e : expert;
  }
  return expert;
}

/* K = 1 is sampled, and of K = 2 the second. */
__global__ static void sample(const __grid_constant__ gate_job job) {
  const pmoei_gate_call &call = job.call;
  int64_t token = my_token();
  if (token >= call.tokens) return;
  bool masked = is_masked(call, token);
  int32_t top_k = job.cfg.top_k, *out = call.routing.expert + token * top_k, first = -1;
  if (top_k == 2) {
    best_list<1> list = no_best<1>();
    next_best(&list, call.logits + token, call.padded, job.cfg.num_experts);
    first = list.index[0];
    out[0] = masked ? -1 : first;
  }
  out[top_k - 1] = masked ? -1 : best_with_noise(job, token, first);
}

pmoe_status pmoei_gate_cuda_sample(pmoei_gate_call *call) {
  if (call->blocks == 0) return PMOE_OK;
  sample<<<(unsigned)call->blocks, LANES, 0, stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("sample");
}
