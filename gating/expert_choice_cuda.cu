/* Experts choose tokens: each its C best by score. */
#include "gating/radix_cuda.cuh"

/* What experts compare. -inf for tokens that are masked, whose score is NaN, or that switched the expert off. */
__global__ static void score_tokens(const __grid_constant__ gate_job job) {
  const pmoei_gate_call &call = job.call;
  int64_t token = my_token();
  if (token >= call.tokens) return;
  bool softmax = job.cfg.score == PMOE_SCORE_SOFTMAX, masked = is_masked(call, token);
  token_scores scores = {0, 1, 0, true};
  if (softmax) {
    find_extremes(job, call.logits + token, &scores);
    scores.sum = sum_raised(job, call.logits + token, PMOE_SCORE_SOFTMAX, scores.max);
  }
  for (int64_t e = 0; e < job.cfg.num_experts; e++) {
    int64_t i = e * call.padded + token;
    float value = raised(job.cfg.score, call.logits[i], scores.max);
    if (softmax) value /= scores.sum;
    bool candidate = !masked && call.logits[i] != -INFINITY && value == value;
    call.selection[i] = candidate ? value : -INFINITY;
  }
}

struct scores_of_expert {
  const float *score;
  __device__ uint32_t operator()(int64_t i) const { return pmoei_gate_order_key(score[i]); }
};

__device__ static int64_t count_candidates(const scores_of_expert &key, int64_t tokens, radix_room *room) {
  int64_t candidates = 0;
  uint32_t none = pmoei_gate_order_key(-INFINITY), found;
  for (int64_t first = 0; first < tokens; first += RADIX_THREADS) {
    int64_t i = first + threadIdx.x;
    flags_before(i < tokens && key(i) > none, &found, room);
    candidates += found;
  }
  return candidates;
}

/* A thread block for an expert. Leaves the scores of those that it picks, and -inf for the others. */
__global__ static void pick(const __grid_constant__ gate_job job) {
  __shared__ radix_room room;
  const pmoei_gate_call &call = job.call;
  float *score = call.selection + blockIdx.x * call.padded;
  scores_of_expert key = {score};
  int64_t candidates = count_candidates(key, call.tokens, &room), ties = 0;
  int64_t wanted = candidates < call.capacity ? candidates : call.capacity;
  uint32_t threshold = UINT32_MAX, found;
  if (wanted > 0) threshold = radix_threshold(key, call.tokens, wanted, &ties, &room);
  for (int64_t first = 0; first < call.tokens; first += RADIX_THREADS) {
    int64_t i = first + threadIdx.x;
    uint32_t here = i < call.tokens ? key(i) : 0;
    bool tie = i < call.tokens && here == threshold;
    int64_t rank = flags_before(tie, &found, &room);
    bool picked = here > threshold || (tie && rank < ties);
    ties -= found;
    if (i < call.tokens && !picked) score[i] = -INFINITY;
  }
  if (threadIdx.x == 0) call.picks[blockIdx.x] = wanted;
}

pmoe_status pmoei_gate_cuda_expert_choice(pmoei_gate_call *call) {
  if (call->blocks > 0) {
    score_tokens<<<(unsigned)call->blocks, LANES, 0, stream_of(call)>>>(job_of(call));
    PMOEI_TRY(pmoei_cuda_launched("score_tokens"));
  }
  pick<<<(unsigned)call->gate->cfg.num_experts, RADIX_THREADS, 0, stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("pick");
}
