/* Sums over blocks of tokens, and what the losses make of them. */
#include "gating/gate_cuda.cuh"

/* A thread for an expert and a run of blocks: threads of a warp have neighbouring experts. */
enum { EXPERTS = 32, RUNS = 16, THREADS = 256 };

static unsigned groups_of(int32_t num_experts) { return (unsigned)((num_experts + EXPERTS - 1) / EXPERTS); }

/* One thread block sums up all tallies. */
__device__ static void total_tallies(const gate_job &job) {
  __shared__ long long room[32];
  __shared__ double z_room[32];
  const pmoei_gate_call &call = job.call;
  long long masked = 0, nonfinite = 0, live = 0;
  double z_sum = 0;
  for (int64_t b = threadIdx.y * EXPERTS + threadIdx.x; b < call.blocks; b += EXPERTS * RUNS) {
    masked += call.tally[b].masked;
    nonfinite += call.tally[b].nonfinite;
    live += call.tally[b].live;
    z_sum += call.tally[b].z_sum;
  }
  masked = block_sum(masked, room);
  nonfinite = block_sum(nonfinite, room);
  live = block_sum(live, room);
  z_sum = block_sum(z_sum, z_room);
  if (threadIdx.x > 0 || threadIdx.y > 0) return;
  call.result->totals.masked = masked;
  call.result->totals.nonfinite = nonfinite;
  call.result->totals.live = live;
  call.result->totals.z_sum = z_sum;
  call.result->losses.aux = call.result->losses.seq_aux = call.result->losses.global_aux = call.result->losses.z = 0;
  if (job.losses) call.routing.loss_sums[job.cfg.num_experts] = live;
}

typedef struct run_sums {
  int64_t count, loss_count;
  double prob;
} run_sums;

/* Of all runs: an array for each number, so that neighbouring threads are in neighbouring banks. */
typedef struct run_room {
  int64_t count[RUNS][EXPERTS], loss_count[RUNS][EXPERTS];
  double prob[RUNS][EXPERTS];
} run_room;

__device__ static void write_totals(const gate_job &job, int64_t e, const run_sums &all) {
  const pmoei_gate_call &call = job.call;
  bool full = call.capacity > 0 && all.count > call.capacity;
  call.routing.expert_count[e] = call.picks ? call.picks[e] : all.count;
  call.routing.expert_rows[e] = full ? call.capacity : all.count;
  if (job.losses) call.routing.loss_sums[e] = all.loss_count;
  if (job.aux) call.prob_total[e] = all.prob;
}

/* Sums over blocks; each block's counts become its first slots. Sums of probabilities are taken by runs of blocks, then
 * over the runs, so that their order is always the same. */
__global__ static void total(const __grid_constant__ gate_job job) {
  __shared__ run_room room;
  const pmoei_gate_call &call = job.call;
  int64_t num_experts = job.cfg.num_experts, e = blockIdx.x * (int64_t)EXPERTS + threadIdx.x;
  int64_t length = (call.blocks + RUNS - 1) / RUNS, begin = threadIdx.y * length;
  int64_t end = e >= num_experts ? begin : begin + length < call.blocks ? begin + length : call.blocks;
  run_sums sum = {0, 0, 0}, all = {0, 0, 0};
  int64_t first = 0;
#pragma unroll 4
  for (int64_t b = begin; b < end; b++) {
    sum.count += call.block_count[b * num_experts + e];
    if (!job.aux) continue;
    sum.loss_count += call.loss_count[b * num_experts + e];
    sum.prob += (double)call.prob_sum[b * num_experts + e];
  }
  room.count[threadIdx.y][threadIdx.x] = sum.count;
  room.loss_count[threadIdx.y][threadIdx.x] = sum.loss_count;
  room.prob[threadIdx.y][threadIdx.x] = sum.prob;
  __syncthreads();
  for (unsigned r = 0; r < RUNS; r++) {
    int64_t count = room.count[r][threadIdx.x];
    first += r < threadIdx.y ? count : 0;
    all.count += count;
    all.loss_count += room.loss_count[r][threadIdx.x];
    all.prob += room.prob[r][threadIdx.x];
  }
  for (int64_t b = begin; b < end; b++) {
    int64_t here = call.block_count[b * num_experts + e];
    call.block_count[b * num_experts + e] = first;
    first += here;
  }
  if (e < num_experts && threadIdx.y == 0) write_totals(job, e, all);
  if (blockIdx.x == 0) total_tallies(job);
}

pmoe_status pmoei_gate_cuda_total(pmoei_gate_call *call) {
  dim3 threads(EXPERTS, RUNS);
  total<<<groups_of(call->gate->cfg.num_experts), threads, 0, stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("total");
}

__global__ static void add_to_step(const __grid_constant__ gate_job job, bool anew) {
  int64_t num_experts = job.cfg.num_experts, i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
  const int64_t *global = seq_sums(job, job.call.num_sequences);
  if (i <= num_experts) job.global_sums[i] = (anew ? 0 : job.global_sums[i]) + global[i];
  if (i < num_experts) job.global_prob[i] = (anew ? 0 : job.global_prob[i]) + job.call.prob_total[i];
}

pmoe_status pmoei_gate_cuda_add_to_step(pmoei_gate_call *call, bool anew) {
  unsigned blocks = (unsigned)(call->gate->cfg.num_experts / THREADS + 1);
  add_to_step<<<blocks, THREADS, 0, stream_of(call)>>>(job_of(call), anew);
  return pmoei_cuda_launched("add_to_step");
}

/* ---- values and slopes ---- */

/* Whether the global loss is taken over the step so far. */
__device__ static bool is_in_step(const gate_job &job) {
  return job.of_step && job.global_sums[job.cfg.num_experts] > 0;
}

__device__ static double mean_tokens(const gate_job &job, int64_t live) {
  return pmoei_gate_mean_over(job.call.step.loss_tokens, live);
}

/* Sums are counts, then live tokens. */
__device__ static double loss_slope(const gate_job &job, float coef, const int64_t *sums, int64_t expert,
                                    double tokens) {
  int32_t num_experts = job.cfg.num_experts;
  return pmoei_gate_loss_slope(coef, num_experts, sums[expert], sums[num_experts], job.counted, tokens);
}

/* The sequences that the mean is taken over; in every thread. */
__device__ static double mean_sequences(const gate_job &job) {
  __shared__ long long room[32], all;
  long long live = 0;
  for (int64_t s = threadIdx.x; s < job.call.num_sequences; s += THREADS)
    live += seq_sums(job, s)[job.cfg.num_experts] > 0;
  live = block_sum(live, room);
  if (threadIdx.x == 0) all = live;
  __syncthreads();
  return pmoei_gate_mean_over(job.call.step.loss_sequences, all);
}

__device__ static double seq_slope(const gate_job &job, int64_t sequence, int64_t expert, double sequences) {
  const int64_t *sums = seq_sums(job, sequence);
  double live = (double)pmoei_at_least_one(sums[job.cfg.num_experts]);
  return loss_slope(job, job.cfg.seq_aux_coef, sums, expert, live * sequences);
}

__device__ static double value_over(const gate_job &job, float coef, const int64_t *sums, const double *prob,
                                    double *room) {
  double value = 0, tokens = mean_tokens(job, sums[job.cfg.num_experts]);
  for (int64_t e = threadIdx.x; e < job.cfg.num_experts; e += THREADS)
    value += loss_slope(job, coef, sums, e, tokens) * prob[e];
  return block_sum(value, room);
}

__device__ static double seq_value(const gate_job &job, double *room) {
  int64_t num_experts = job.cfg.num_experts;
  double value = 0, sequences = mean_sequences(job);
  for (int64_t i = threadIdx.x; i < job.call.num_sequences * num_experts; i += THREADS)
    value +=
        seq_slope(job, i / num_experts, i % num_experts, sequences) * ((double)job.call.seq_prob[i] / PMOEI_GATE_FIXED);
  return block_sum(value, room);
}

/* One thread block. */
__global__ static void losses(const __grid_constant__ gate_job job) {
  __shared__ double room[32];
  const pmoei_gate_call &call = job.call;
  const int64_t *micro = call.routing.loss_sums;
  pmoei_gate_losses value = {0, 0, 0, 0};
  if (job.cfg.aux_coef > 0) value.aux = value_over(job, job.cfg.aux_coef, micro, call.prob_total, room);
  if (job.cfg.seq_aux_coef > 0) value.seq_aux = seq_value(job, room);
  if (job.cfg.global_aux_coef > 0) {
    bool in_step = is_in_step(job);
    value.global_aux =
        value_over(job, job.cfg.global_aux_coef, in_step ? job.global_sums : seq_sums(job, call.num_sequences),
                   in_step ? job.global_prob : call.prob_total, room);
  }
  if (threadIdx.x > 0) return;
  value.z = (double)job.cfg.z_coef * call.result->totals.z_sum / mean_tokens(job, micro[job.cfg.num_experts]);
  call.result->losses = value;
}

pmoe_status pmoei_gate_cuda_losses(pmoei_gate_call *call) {
  losses<<<1, THREADS, 0, stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("losses");
}

/* A row of thread blocks for the slopes of all tokens, then one for each sequence. */
__global__ static void slopes(const __grid_constant__ gate_job job) {
  const pmoei_gate_call &call = job.call;
  const int64_t *micro = call.routing.loss_sums;
  int64_t num_experts = job.cfg.num_experts, e = blockIdx.x * (int64_t)THREADS + threadIdx.x;
  double scale = (double)call.loss_scale;
  if (blockIdx.y == 0) {
    double tokens = mean_tokens(job, micro[num_experts]);
    double slope = job.cfg.aux_coef > 0 && e < num_experts ? loss_slope(job, job.cfg.aux_coef, micro, e, tokens) : 0;
    if (job.cfg.global_aux_coef > 0 && e < num_experts) {
      const int64_t *global = is_in_step(job) ? job.global_sums : seq_sums(job, call.num_sequences);
      slope += loss_slope(job, job.cfg.global_aux_coef, global, e, mean_tokens(job, global[num_experts]));
    }
    if (e < num_experts) call.slope[e] = (float)(scale * slope);
    if (e == num_experts) call.slope[e] = (float)(scale * 2 * (double)job.cfg.z_coef / tokens);
    return;
  }
  double sequences = mean_sequences(job);
  for (int64_t s = blockIdx.y - 1; s < call.num_sequences && e < num_experts; s += gridDim.y - 1)
    call.seq_slope[s * num_experts + e] = (float)(scale * seq_slope(job, s, e, sequences));
}

pmoe_status pmoei_gate_cuda_slopes(pmoei_gate_call *call) {
  int32_t rows = call->num_sequences < 1024 ? call->num_sequences : 1024;
  dim3 grid((unsigned)(call->gate->cfg.num_experts / THREADS + 1), (unsigned)rows + 1);
  slopes<<<grid, THREADS, 0, stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("slopes");
}
