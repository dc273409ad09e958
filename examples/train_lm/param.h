/* A parameter of this rank with its gradient and optimizer state, and where its part lies in the whole. */
#ifndef LM_PARAM_H
#define LM_PARAM_H
#include <pmoe/pmoe.h>

/* Over which ranks a gradient is summed: those of the stage, CP x DP of it, or as its pmoe layer does. */
enum lm_sum { LM_SUM_STAGE, LM_SUM_DENSE_DP, LM_SUM_LAYER };

/* Names are unique in a model ("layers.3.moe.experts.fc1.weight"). Numbers are float32 all. */
struct lm_param {
  char name[64];
  int order;        /* its place in the model, the same on all ranks and in all layouts */
  pmoe_dtype dtype; /* of data */
  int ndim;
  int64_t shape[3]; /* this rank's part; experts: [local experts, ...], and there may be none */
  int64_t numel;
  float *master, *grad, *adam_m, *adam_v;
  void *data;           /* what the model computes with: master itself if dtype is PMOE_F32, else its rounded copy */
  int32_t first_expert; /* global id of shape[0]'s first entry; -1: no experts */
  int32_t num_global_experts; /* 0: no experts */
  /* As in pmoe_param: entry i of shape[shard_dim] is entry i / shard_count * shard_total + shard_first + i mod
   * shard_count of the whole. -1: not spread. */
  int shard_dim;
  int64_t shard_first, shard_count, shard_total;
  enum lm_sum sum;
  int counted;    /* 1 on one of the ranks of each whole model (lm_ranks.model) that hold it, for dense parameters */
  int first_copy; /* 1 on one of all ranks that hold the same values, which saves them */
  int decay;      /* whether weight decay applies */
};

/* A rank's part of one expert, or of a dense parameter: `count` runs of `length` numbers that are neighbours in the
 * whole, of which run i begins at number first + i * stride there. */
struct lm_runs {
  int64_t count, length, first, stride;
};
struct lm_runs param_runs(const struct lm_param *p);
/* Experts in this rank's part; a dense parameter is one, or none if its numbers are elsewhere. */
int64_t param_units(const struct lm_param *p);
/* The whole parameter. */
void param_whole_shape(const struct lm_param *p, int64_t shape[3]);

static inline int64_t runs_place(const struct lm_runs *runs, int64_t i) {
  return runs->first + i / runs->length * runs->stride + i % runs->length;
}

/* Makes p, whole so far, this rank's part of `parts`: `blocks` equal runs of shape[dim] are split each. */
void param_shard(struct lm_param *p, int dim, int blocks, int parts, int part);

/* normal(0, std); a number depends on seed, name and place in the whole alone. */
void param_fill_normal(struct lm_param *p, uint64_t seed, float std);

#endif
