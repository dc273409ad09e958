/* A GPT-style decoder: token and position embedding, blocks of causal attention and an MLP or a pmoe layer with layer
 * norm before each, a last layer norm, and a head tied to the token embedding. */
#ifndef LM_MODEL_H
#define LM_MODEL_H
#include <pmoe/pmoe.h>

#include "config.h"
#include "ranks.h"

/* A parameter of this rank with its gradient and optimizer state, float32 all. The list holds every parameter of the
 * model once, in the same order on all ranks; names are unique ("layers.3.moe.experts.fc1.weight"). */
struct lm_param {
  char name[64];
  pmoe_dtype dtype; /* of data */
  int ndim;
  int64_t shape[3]; /* this rank's part; experts: [local experts, ...], and there may be none */
  int64_t numel;
  float *master, *grad, *adam_m, *adam_v;
  void *data;           /* what the model computes with: master itself if dtype is PMOE_F32, else its rounded copy */
  int32_t first_expert; /* global id of shape[0]'s first entry; -1: dense, the same on every rank */
  int32_t num_global_experts; /* 0: dense */
  int first_copy;             /* 1 on one of the ranks that hold the same values, which saves them */
  int decay;                  /* whether weight decay applies */
  int in_moe;                 /* whether it belongs to a pmoe layer, which sums its gradient over the ranks itself */
};

/* Sums over tokens, to be added up over micro-batches and ranks. */
struct lm_sums {
  double loss, aux, z; /* aux and z: times their micro-batch's tokens */
  double tokens, routed, dropped;
  double *expert_count; /* [model->num_experts_listed] choices of each expert, layer after layer */
};

struct lm_batch {
  int sequences, length;
  const int32_t *tokens, *targets; /* [sequences, length]; targets may be NULL in model_logits */
};

struct lm_layer; /* inside model.c and its siblings */
struct lm_acts;

struct lm_model {
  struct lm_config cfg; /* checked */
  int vocab;
  struct lm_ranks *ranks;
  int num_params;
  struct lm_param *params;
  /* Gradients of all parameters outside pmoe layers, one block. */
  float *dense_grad;
  int64_t dense_numel;
  struct lm_layer *layers;
  int num_experts_listed; /* over all layers */
  struct lm_acts *acts;
  double seconds[16]; /* by enum lm_part */
};

/* Where time goes. */
enum lm_part {
  LM_PART_DATA,
  LM_PART_EMBEDDING,
  LM_PART_NORM,
  LM_PART_LINEAR,
  LM_PART_ATTENTION,
  LM_PART_MLP,
  LM_PART_MOE,
  LM_PART_HEAD,
  LM_PART_EXCHANGE,
  LM_PART_OPTIMIZER,
  LM_PART_EVALUATION,
  LM_PART_REPORT,
  LM_NUM_PARTS
};

/* Collective over all ranks, as everything below. */
struct lm_model *model_create(const struct lm_config *cfg, int vocab, struct lm_ranks *ranks);
void model_destroy(struct lm_model *model);

/* Copies master into data where they differ. Not collective. */
void model_round_params(struct lm_model *model);

/* One micro-batch forward and backward: adds to the gradients (sums over tokens) and to sums. first_token: index of its
 * first token in the step. batch may be empty (sequences 0). */
void model_train(struct lm_model *model, const struct lm_batch *batch, uint64_t step, int64_t first_token,
                 struct lm_sums *sums);
/* Sum of the losses of a micro-batch, without gradients. */
double model_loss(struct lm_model *model, const struct lm_batch *batch);
/* Logits [vocab] of the last position of a batch of one sequence, or of none. */
void model_logits(struct lm_model *model, const struct lm_batch *batch, float *logits);

#endif
