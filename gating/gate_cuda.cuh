/* What the router's kernels share. Logits lie [E,padded]: a thread has a token to itself and goes over the experts,
 * neighbours read neighbouring numbers, and no sum goes across threads. A thread block is a block of tokens, unless a
 * kernel says otherwise. */
#ifndef PMOEI_GATE_CUDA_CUH
#define PMOEI_GATE_CUDA_CUH
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>

#include "core/cuda.h"
#include "core/elements.cuh"
extern "C" {
#include "core/random.h"
}
#include "gating/gate_cuda.h"

using pmoei::block_sum;

enum { LANES = PMOEI_GATE_BLOCK };

/* What kernels see of a call. */
typedef struct gate_job {
  pmoei_gate_call call; /* without its gate, which is the host's */
  pmoe_gate_config cfg;
  uint64_t jitter_key, gumbel_key, drop_key, hash_key;
  int32_t counted; /* choices per token that the aux losses count */
  bool losses, aux;
  bool raise; /* scores or losses need the scores of all experts */
  bool jitter;
  /* The gate's own: where choices are counted for later (NULL: they are not), and what its global loss divides, over
   * the step so far where `of_step` and that had live tokens. */
  int64_t *choice_count;
  int64_t *global_sums;
  double *global_prob;
  bool of_step;
} gate_job;

static inline gate_job job_of(const pmoei_gate_call *call) {
  const pmoe_gate *gate = call->gate;
  uint64_t seed = gate->ctx->seed, layer = (uint64_t)gate->layer_id, step = call->step.step;
  gate_job job;
  job.call = *call;
  job.call.gate = NULL;
  job.cfg = gate->cfg;
  job.jitter_key = pmoei_random_key(seed, PMOEI_RANDOM_JITTER, layer, step);
  job.gumbel_key = pmoei_random_key(seed, PMOEI_RANDOM_GUMBEL, layer, step);
  job.drop_key = pmoei_random_key(seed, PMOEI_RANDOM_DROP, layer, step);
  job.hash_key = pmoei_random_key(seed, PMOEI_RANDOM_HASH, layer, 0);
  job.counted = pmoei_gate_counted(gate);
  job.losses = pmoei_gate_has_losses(gate);
  job.aux = pmoei_gate_has_aux(gate);
  job.raise = job.losses || (gate->cfg.score == PMOE_SCORE_SOFTMAX && !gate->cfg.softmax_after_topk);
  job.jitter = call->step.training && gate->cfg.jitter > 0;
  job.choice_count = call->counts_for_later ? gate->choice_count : NULL;
  job.global_sums = gate->global_sums;
  job.global_prob = gate->global_prob;
  job.of_step = pmoei_gate_is_of_step(call);
  return job;
}

static inline cudaStream_t stream_of(const pmoei_gate_call *call) { return pmoei_cuda_stream(call->gate->ctx); }

/* ---- tokens ---- */

__device__ static inline int64_t my_token(void) { return (int64_t)blockIdx.x * LANES + threadIdx.x; }

__device__ static inline bool is_masked(const pmoei_gate_call &call, int64_t token) {
  return call.step.token_mask && !call.step.token_mask[token];
}

/* An expert's number, or -1 where it is none: arrays of the host's are not checked before. */
__device__ static inline int32_t valid_expert(int32_t expert, int32_t num_experts) {
  return expert >= 0 && expert < num_experts ? expert : -1;
}

/* Likewise a token's sequence. */
__device__ static inline int32_t sequence_of(const pmoei_gate_call &call, int64_t token) {
  if (!call.step.sequence) return (int32_t)(token / (call.tokens / call.num_sequences));
  int32_t sequence = call.step.sequence[token];
  return sequence >= 0 && sequence < call.num_sequences ? sequence : -1;
}

__device__ static inline int64_t *seq_sums(const gate_job &job, int64_t sequence) {
  return job.call.routing.loss_sums + (1 + sequence) * (job.cfg.num_experts + 1);
}

/* ---- scores ---- */

/* A score but for the division by the sum of all. */
__device__ static inline float raised(pmoe_score score, float logit, float max) {
  if (score == PMOE_SCORE_SOFTMAX) return pmoei_expf(logit - max);
  return score == PMOE_SCORE_SIGMOID ? pmoei_sigmoid(logit) : pmoei_sqrt_softplus(logit);
}

typedef struct token_scores {
  float max, sum; /* of the logits; of the raised ones */
  float lse;      /* log(sum exp logits), with a z-loss */
  bool finite;
} token_scores;

__device__ static inline void find_extremes(const gate_job &job, const float *logit, token_scores *out) {
  float max = -INFINITY, zero = 0;
#pragma unroll 8
  for (int32_t e = 0; e < job.cfg.num_experts; e++) {
    float v = logit[e * job.call.padded];
    max = v > max ? v : max;
    zero += v * 0.0f; /* NaN from the first NaN or infinity on */
  }
  out->max = max;
  out->finite = zero == 0;
}

__device__ static inline float sum_raised(const gate_job &job, const float *logit, pmoe_score score, float max) {
  float sum = 0;
#pragma unroll 4
  for (int32_t e = 0; e < job.cfg.num_experts; e++) sum += raised(score, logit[e * job.call.padded], max);
  return sum;
}

__device__ static inline void score_token(const gate_job &job, const float *logit, token_scores *out) {
  find_extremes(job, logit, out);
  out->sum = 1;
  out->lse = 0;
  if (!job.raise) return;
  out->sum = sum_raised(job, logit, job.cfg.score, out->max);
  if (job.cfg.z_coef == 0) return;
  bool softmax = job.cfg.score == PMOE_SCORE_SOFTMAX;
  out->lse = out->max + pmoei_logf(softmax ? out->sum : sum_raised(job, logit, PMOE_SCORE_SOFTMAX, out->max));
}

/* What the scores of a token's choices are made from. */
typedef struct choice_scale {
  float max, sum; /* what a softmax subtracts and divides by */
} choice_scale;

__device__ static inline float choice_logit(const gate_job &job, const float *logit, int32_t expert) {
  return expert < 0 ? -INFINITY : logit[expert * job.call.padded];
}

__device__ static inline choice_scale scale_of(const gate_job &job, const float *logit, const int32_t *expert,
                                               const token_scores &scores) {
  choice_scale scale = {scores.max, scores.sum};
  if (!job.cfg.softmax_after_topk) return scale;
  scale = {-INFINITY, 0};
  int32_t num_experts = job.cfg.num_experts;
  for (int32_t k = 0; k < job.cfg.top_k; k++) {
    float v = choice_logit(job, logit, valid_expert(expert[k], num_experts));
    scale.max = v > scale.max ? v : scale.max;
  }
  for (int32_t k = 0; k < job.cfg.top_k; k++)
    scale.sum += pmoei_expf(choice_logit(job, logit, valid_expert(expert[k], num_experts)) - scale.max);
  return scale;
}

__device__ static inline float choice_score(const gate_job &job, float logit, choice_scale scale) {
  float score = raised(job.cfg.score, logit, scale.max);
  return job.cfg.score == PMOE_SCORE_SOFTMAX ? score / scale.sum : score;
}

/* ---- random numbers ---- */

/* Number i of those that are drawn four at a time; without an index, which would put them into local memory. */
__device__ static inline uint32_t word_at(const uint32_t word[4], int64_t i) {
  return i % 4 == 0 ? word[0] : i % 4 == 1 ? word[1] : i % 4 == 2 ? word[2] : word[3];
}

#endif
