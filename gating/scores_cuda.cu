/* From choices to weights and counts: one thread a token. */
#include "gating/gate_cuda.cuh"
#include "gating/masks_cuda.cuh"

/* How many of the block's tokens chose each expert, by the first `counted` choices; those of tokens that are
 * `included`. */
template <typename Count>
__device__ static void count_choices(uint32_t *masks, const int32_t *expert, int32_t counted, bool included,
                                     int32_t num_experts, Count *count) {
  for (int32_t first = 0; first < num_experts; first += MASKED_EXPERTS) {
    int32_t n = num_experts - first < MASKED_EXPERTS ? num_experts - first : MASKED_EXPERTS;
    mark_choices(masks, expert, included ? counted : 0, first, n);
    for (int32_t e = (int32_t)threadIdx.x; e < n; e += LANES) count[first + e] = (Count)count_of(masks, n, e);
    __syncthreads();
  }
}

__device__ static void count_for_sequence(const gate_job &job, const int32_t *expert, int32_t sequence) {
  if (sequence < 0) return;
  unsigned long long *sums = (unsigned long long *)seq_sums(job, sequence);
  atomicAdd(sums + job.cfg.num_experts, 1ull);
  for (int32_t k = 0; k < job.counted; k++)
    if (expert[k] >= 0) atomicAdd(sums + expert[k], 1ull);
}

/* An expert's column of probabilities in pairs, then pairs of pairs: the CPU's order. */
__device__ static float sum_lanes(const float *lane) {
  float part[LANES / 2];
#pragma unroll
  for (int l = 0; l < LANES / 2; l++) part[l] = lane[l] + lane[l + LANES / 2];
#pragma unroll
  for (int half = LANES / 4; half > 0; half /= 2)
#pragma unroll
    for (int l = 0; l < half; l++) part[l] += part[l + half];
  return part[0];
}

__device__ static long long fixed_point(float value) { return __double2ll_rn((double)value * PMOEI_GATE_FIXED); }

__device__ static void add_fixed(int64_t *sum, long long value) {
  atomicAdd((unsigned long long *)sum, (unsigned long long)value);
}

/* The sequence that all tokens of the block which have one share, or -1. */
__device__ static int32_t common_sequence(int32_t mine) {
  __shared__ int32_t most;
  if (threadIdx.x == 0) most = -1;
  __syncthreads();
  if (mine >= 0) atomicMax(&most, mine);
  __syncthreads();
  int32_t common = most;
  return __syncthreads_and(mine < 0 || mine == common) ? common : -1;
}

/* Rows of one expert each, one token a column. A row more than the threads of a warp need keeps both directions free of
 * bank conflicts. */
typedef float lane_tile[LANES][LANES + 1];

/* The block's share of the aux losses' probabilities. `factor`: 1 / sum, or 0 for a token in no loss. */
__device__ static void sum_probabilities(const gate_job &job, lane_tile tile, const float *logit, float max,
                                         float factor, int32_t sequence) {
  const pmoei_gate_call &call = job.call;
  int64_t num_experts = job.cfg.num_experts;
  int32_t common = call.num_sequences > 0 ? common_sequence(sequence) : -1;
  unsigned mine = threadIdx.x;
  for (int64_t first = 0; first < num_experts; first += LANES) {
    int64_t n = num_experts - first < LANES ? num_experts - first : LANES;
    for (int64_t e = 0; e < n; e++) {
      float p = factor != 0 ? raised(job.cfg.score, logit[(first + e) * call.padded], max) * factor : 0.0f;
      tile[e][mine] = p;
      if (sequence >= 0 && common < 0) add_fixed(call.seq_prob + sequence * num_experts + first + e, fixed_point(p));
    }
    __syncthreads();
    if (mine < n) {
      call.prob_sum[blockIdx.x * num_experts + first + mine] = sum_lanes(tile[mine]);
      long long sum = 0;
      for (int l = 0; l < LANES && common >= 0; l++) sum += fixed_point(tile[mine][l]);
      if (common >= 0) add_fixed(call.seq_prob + common * num_experts + first + mine, sum);
    }
    __syncthreads();
  }
}

/* In the order of tokens, in thread 0. */
__device__ static double sum_squares(float *room, float value) {
  double sum = 0;
  room[threadIdx.x] = value;
  __syncthreads();
  for (int l = 0; l < LANES && threadIdx.x == 0; l++) sum += (double)room[l] * (double)room[l];
  __syncthreads();
  return sum;
}

__device__ static void tally_block(const gate_job &job, bool here, bool masked, bool live, double z_sum) {
  int32_t all_masked = __syncthreads_count(here && masked), all_live = __syncthreads_count(live),
          all = __syncthreads_count(here);
  pmoei_gate_tally tally = {all_masked, all - all_masked - all_live, all_live, z_sum};
  if (threadIdx.x == 0) job.call.tally[blockIdx.x] = tally;
}

/* Weights are the host's own, or scores. */
__device__ static void write_weights(const gate_job &job, int64_t token, const token_scores &scores) {
  const pmoei_gate_call &call = job.call;
  const int32_t *expert = call.routing.expert + token * job.cfg.top_k;
  float *weight = call.routing.weight + token * job.cfg.top_k;
  const float *logit = call.logits + token;
  if (job.cfg.router == PMOE_ROUTER_HOST_ROUTING) {
    for (int32_t k = 0; k < job.cfg.top_k; k++)
      weight[k] = expert[k] < 0 ? 0 : call.step.weight[token * job.cfg.top_k + k];
    return;
  }
  choice_scale scale = scale_of(job, logit, expert, scores);
  for (int32_t k = 0; k < job.cfg.top_k; k++)
    weight[k] = expert[k] < 0 ? 0 : choice_score(job, choice_logit(job, logit, expert[k]), scale);
}

__device__ static bool finite_weights(const gate_job &job, int64_t token) {
  bool finite = true;
  for (int32_t k = 0; k < job.cfg.top_k; k++) {
    int64_t i = token * job.cfg.top_k + k;
    finite &= job.call.routing.expert[i] < 0 || isfinite(job.call.step.weight[i]);
  }
  return finite;
}

__global__ static void score(const __grid_constant__ gate_job job) {
  extern __shared__ uint32_t masks[];
  __shared__ lane_tile tile;
  const pmoei_gate_call &call = job.call;
  int64_t token = my_token();
  bool here = token < call.tokens, masked = !here || is_masked(call, token);
  int32_t num_experts = job.cfg.num_experts, top_k = job.cfg.top_k;
  const int32_t *expert = call.routing.expert + token * top_k;
  const float *logit = call.logits + token;
  token_scores scores = {0, 1, 0, true};
  if (here && job.cfg.router == PMOE_ROUTER_HOST_ROUTING) scores.finite = finite_weights(job, token);
  else if (here) score_token(job, logit, &scores);
  bool live = !masked && scores.finite;

  count_choices(masks, expert, top_k, here, num_experts, call.block_count + blockIdx.x * (int64_t)num_experts);
  if (job.aux) {
    const int32_t *own = call.plain ? call.plain + token * top_k : expert;
    int32_t sequence = live && call.num_sequences > 0 ? sequence_of(call, token) : -1;
    count_choices(masks, own, job.counted, live, num_experts, call.loss_count + blockIdx.x * (int64_t)num_experts);
    if (sequence >= 0) count_for_sequence(job, own, sequence);
    /* Scores that sum to nothing have no probabilities. */
    float factor = live && scores.sum >= FLT_MIN ? 1.0f / scores.sum : 0.0f;
    sum_probabilities(job, tile, logit, scores.max, factor, sequence);
  }
  double z_sum = job.cfg.z_coef > 0 ? sum_squares(tile[0], live ? scores.lse : 0.0f) : 0;
  tally_block(job, here, masked, live, z_sum);
  if (here) write_weights(job, token, scores);
}

pmoe_status pmoei_gate_cuda_score(pmoei_gate_call *call) {
  if (call->blocks == 0) return PMOE_OK;
  score<<<(unsigned)call->blocks, LANES, mask_bytes(call->gate->cfg.num_experts), stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("score");
}
