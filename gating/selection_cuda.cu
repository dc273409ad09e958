/* Limits on a token's choice: the selection bias, and groups of experts. One thread a token. */
#include "gating/best_cuda.cuh"

enum { LEVELS = 8 };

/* What scores are compared: probabilities or the like; logits where the softmax comes after the choice. An expert whose
 * logit is -inf is switched off, whatever its bias. */
__device__ static void compare_scores(const gate_job &job, const float *logit, float *selection) {
  int64_t padded = job.call.padded;
  const float *bias = job.cfg.selection_bias ? job.call.params.selection_bias : NULL;
  bool softmax = job.cfg.score == PMOE_SCORE_SOFTMAX;
  token_scores scores = {0, 1, 0, true};
  if (softmax && !job.cfg.softmax_after_topk) {
    find_extremes(job, logit, &scores);
    scores.sum = sum_raised(job, logit, PMOE_SCORE_SOFTMAX, scores.max);
  }
  float factor = 1 / scores.sum;
  for (int32_t e = 0; e < job.cfg.num_experts; e++) {
    float v = logit[e * padded], score = job.cfg.softmax_after_topk ? v : raised(job.cfg.score, v, scores.max);
    float value = bias ? score * factor + bias[e] : score * factor;
    selection[e * padded] = v == -INFINITY ? v : value;
  }
}

/* A group's score is the sum of its best. */
__device__ static float score_group(const gate_job &job, const float *keys, int32_t size, int32_t summed) {
  best_list<LEVELS> list = no_best<LEVELS>();
  float sum = 0;
  for (int32_t done = 0; done < summed; done += LEVELS) {
    next_best(&list, keys, job.call.padded, size);
#pragma unroll
    for (int j = 0; j < LEVELS; j++) {
      if (done + j >= summed) break;
      float key = keys[list.index[j] * job.call.padded];
      sum = done + j == 0 ? key : sum + key;
    }
  }
  return sum;
}

/* Experts outside the kept groups rank below everything. */
__device__ static void keep_groups(const gate_job &job, const float *group, float *selection) {
  int64_t padded = job.call.padded;
  int32_t kept = job.cfg.groups_kept, size = job.cfg.num_experts / job.cfg.num_groups, last = -1;
  uint32_t last_key = 0; /* of the worst group that is kept */
  best_list<LEVELS> list = no_best<LEVELS>();
  for (int32_t done = 0; done < kept; done += LEVELS) {
    next_best(&list, group, padded, job.cfg.num_groups);
#pragma unroll
    for (int j = 0; j < LEVELS; j++) {
      if (done + j >= kept) break;
      last = list.index[j];
      last_key = list.key[j];
    }
  }
  for (int32_t g = 0; g < job.cfg.num_groups; g++) {
    uint32_t key = key_of(group[g * padded]);
    if (key > last_key || (key == last_key && g <= last)) continue;
    for (int32_t e = g * size; e < (g + 1) * size; e++) selection[e * padded] = NAN;
  }
}

__global__ static void limit(const __grid_constant__ gate_job job) {
  const pmoei_gate_call &call = job.call;
  int64_t token = my_token(), padded = call.padded;
  if (token >= call.tokens) return;
  const float *logit = call.logits + token;
  float *selection = call.selection + token, *group = call.group + token;
  int32_t groups = job.cfg.num_groups;
  compare_scores(job, logit, selection);
  if (groups <= 1) return;
  int32_t size = job.cfg.num_experts / groups;
  int32_t summed = job.cfg.group_score_top2 ? 2 : job.cfg.top_k / job.cfg.groups_kept;
  for (int32_t g = 0; g < groups; g++)
    group[g * padded] = score_group(job, selection + g * size * padded, size, summed < 1 ? 1 : summed);
  /* Within the groups the logits rank like the scores, and do not saturate. */
  for (int32_t e = 0; e < job.cfg.num_experts && !job.cfg.selection_bias; e++)
    selection[e * padded] = logit[e * padded];
  keep_groups(job, group, selection);
}

pmoe_status pmoei_gate_cuda_limit(pmoei_gate_call *call) {
  if (call->blocks == 0) return PMOE_OK;
  limit<<<(unsigned)call->blocks, LANES, 0, stream_of(call)>>>(job_of(call));
  return pmoei_cuda_launched("limit");
}
