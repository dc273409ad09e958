/* Gradients of the logits: one thread a token. */
#include "gating/gate_cuda.cuh"

/* A token's choices in backward. */
typedef struct choices {
  const int32_t *expert; /* [K] */
  const int64_t *slot;
  const float *dweight, *logit;
  choice_scale scale;
  float sum;  /* of the scores that are divided by it */
  float mean; /* sum_k r_k g_k, if it is not shared out over all experts */
} choices;

__device__ static int32_t expert_of(const gate_job &job, const choices &own, int32_t k) {
  return valid_expert(own.expert[k], job.cfg.num_experts);
}

/* 0 for a choice that the division leaves out. */
__device__ static float score_of(const gate_job &job, const choices &own, int32_t k) {
  int32_t e = expert_of(job, own, k);
  if (e < 0 || (own.slot[k] < 0 && job.cfg.norm == PMOE_NORM_AFTER_DROP)) return 0;
  return choice_score(job, choice_logit(job, own.logit, e), own.scale);
}

__device__ static float weight_of(const choices &own, float score) { return own.sum < FLT_MIN ? 0 : score / own.sum; }

__device__ static float weight_grad_of(const gate_job &job, const choices &own, int32_t k) {
  return own.slot[k] >= 0 ? own.dweight[k] * job.cfg.weight_scale : 0;
}

/* The formula is in backward_cpu.c. Returns the mean to be shared out over all experts. */
__device__ static float prepare_choices(const gate_job &job, int64_t token, const token_scores &scores, choices *own) {
  const pmoei_gate_call &call = job.call;
  int32_t top_k = job.cfg.top_k;
  own->expert = call.routing.expert + token * top_k;
  own->slot = call.routing.slot + token * top_k;
  own->dweight = call.dweight + token * top_k;
  own->logit = call.logits + token;
  own->scale = scale_of(job, own->logit, own->expert, scores);
  own->sum = 0;
  for (int32_t k = 0; k < top_k; k++) own->sum += score_of(job, *own, k);
  if (job.cfg.norm == PMOE_NORM_NONE) own->sum = 1;
  float mean = 0;
  for (int32_t k = 0; k < top_k; k++)
    if (own->slot[k] >= 0) mean += weight_of(*own, score_of(job, *own, k)) * weight_grad_of(job, *own, k);
  bool divided = job.cfg.score == PMOE_SCORE_SOFTMAX || job.cfg.norm != PMOE_NORM_NONE;
  bool shared = pmoei_gate_shares_with_all(&job.cfg);
  own->mean = shared || !divided ? 0 : mean;
  return shared ? mean : 0;
}

__device__ static float choice_gradient(const gate_job &job, const choices &own, int32_t k) {
  float score = score_of(job, own, k), logit = choice_logit(job, own.logit, expert_of(job, own, k));
  float ratio = score == 0 ? 0 : pmoei_gate_slope_ratio(job.cfg.score, logit, score);
  return weight_of(own, score) * ((weight_grad_of(job, own, k) - own.mean) * ratio);
}

/* What the losses and a softmax over all experts give every logit: see backward_cpu.c. */
typedef struct dense_part {
  const float *own_slope; /* of the token's sequence, or NULL */
  float inverse;          /* 1 / sum; 0 where the token is in no loss and shares nothing */
  float shift;            /* what the losses' slopes are reduced by */
  float z;                /* z lse */
  bool in_losses;
} dense_part;

__device__ static float slope_of(const gate_job &job, const dense_part &dense, int32_t e) {
  float slope = job.call.slope[e];
  return dense.own_slope ? slope + dense.own_slope[e] : slope;
}

__device__ static dense_part weigh_dense(const gate_job &job, int64_t token, bool masked, const token_scores &scores,
                                         float shared) {
  const pmoei_gate_call &call = job.call;
  dense_part dense = {NULL, 0, shared, 0, job.losses && scores.finite && !masked};
  bool used = !masked && (pmoei_gate_shares_with_all(&job.cfg) || dense.in_losses) && !(scores.sum < FLT_MIN);
  dense.inverse = used ? 1 / scores.sum : 0;
  if (!dense.in_losses) return dense;
  int32_t sequence = call.num_sequences > 0 ? sequence_of(call, token) : -1;
  if (sequence >= 0) dense.own_slope = call.seq_slope + (int64_t)sequence * job.cfg.num_experts;
  float mean = 0;
  for (int32_t e = 0; e < job.cfg.num_experts && job.aux; e++)
    mean += raised(job.cfg.score, call.logits[e * call.padded + token], scores.max) * slope_of(job, dense, e);
  dense.shift += mean * dense.inverse;
  if (job.cfg.z_coef > 0) dense.z = call.slope[job.cfg.num_experts] * scores.lse;
  return dense;
}

__device__ static float dense_gradient(const gate_job &job, const dense_part &dense, const token_scores &scores,
                                       float logit, int32_t e) {
  if (dense.inverse == 0 && (job.cfg.score == PMOE_SCORE_SOFTMAX || !dense.in_losses)) return 0;
  float score = raised(job.cfg.score, logit, scores.max), slope = dense.in_losses ? slope_of(job, dense, e) : 0;
  if (job.cfg.score == PMOE_SCORE_SOFTMAX) return score * dense.inverse * (slope - dense.shift + dense.z);
  if (!dense.in_losses) return 0;
  float ratio = pmoei_gate_slope_ratio(job.cfg.score, logit, score);
  float gradient = score * dense.inverse * (slope - dense.shift) * ratio;
  return dense.z != 0 ? gradient + dense.z * pmoei_expf(logit - scores.lse) : gradient;
}

enum { TILE = 32, THREADS = 256 };

/* Gradients are made by token and written by row of experts; a column more keeps both ways free of bank conflicts. */
__global__ static void gradient(const __grid_constant__ gate_job job, float *out, int64_t ld) {
  __shared__ float tile[TILE][LANES + 1];
  const pmoei_gate_call &call = job.call;
  int64_t token = my_token(), first = token - threadIdx.x;
  int32_t num_experts = job.cfg.num_experts;
  bool here = token < call.tokens, masked = !here || is_masked(call, token);
  token_scores scores = {0, 1, 0, true};
  choices own;
  dense_part dense = {NULL, 0, 0, 0, false};
  if (!masked) {
    score_token(job, call.logits + token, &scores);
    float shared = prepare_choices(job, token, scores, &own);
    dense = weigh_dense(job, token, masked, scores, shared);
  }
  for (int32_t begin = 0; begin < num_experts; begin += TILE) {
    int32_t n = num_experts - begin < TILE ? num_experts - begin : TILE;
    for (int32_t e = 0; e < n; e++)
      tile[e][threadIdx.x] =
          masked ? 0 : dense_gradient(job, dense, scores, call.logits[(begin + e) * call.padded + token], begin + e);
    __syncthreads();
    int32_t e = (int32_t)threadIdx.x % TILE;
    for (int64_t row = threadIdx.x / TILE; row < LANES && first + row < call.tokens && e < n; row += LANES / TILE)
      out[(first + row) * ld + begin + e] = tile[e][row];
    __syncthreads();
  }
  for (int32_t k = 0; k < job.cfg.top_k && !masked; k++) {
    int32_t e = expert_of(job, own, k);
    if (e >= 0) out[token * ld + e] += choice_gradient(job, own, k);
  }
}

/* The weights came finished: theirs is the gradient, of those that have a slot. */
__global__ static void return_weight_gradient(const __grid_constant__ gate_job job) {
  const pmoei_gate_call &call = job.call;
  int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i < call.tokens * job.cfg.top_k)
    call.step.dweight[i] = call.routing.slot[i] < 0 ? 0 : call.dweight[i] * job.cfg.weight_scale;
}

pmoe_status pmoei_gate_cuda_input_grad(pmoei_gate_call *call) {
  const pmoe_gate *gate = call->gate;
  if (call->tokens == 0) return PMOE_OK;
  unsigned blocks = (unsigned)call->blocks;
  if (gate->cfg.router == PMOE_ROUTER_HOST_ROUTING) {
    unsigned all = (unsigned)((call->tokens * gate->cfg.top_k + THREADS - 1) / THREADS);
    return_weight_gradient<<<all, THREADS, 0, stream_of(call)>>>(job_of(call));
    return pmoei_cuda_launched("return_weight_gradient");
  }
  bool host = gate->cfg.router == PMOE_ROUTER_HOST_LOGITS;
  PMOEI_TRY(pmoei_gate_cuda_logits(call));
  if (pmoei_gate_has_losses(gate)) PMOEI_TRY(pmoei_gate_cuda_slopes(call));
  float *out = host ? (float *)call->step.dlogits->data : call->dlogits;
  gradient<<<blocks, LANES, 0, stream_of(call)>>>(job_of(call), out,
                                                  host ? call->step.dlogits->ld : gate->cfg.num_experts);
  PMOEI_TRY(pmoei_cuda_launched("gradient"));
  return host ? PMOE_OK : pmoei_gate_cuda_add_to_dx(call);
}
