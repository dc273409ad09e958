/* A GPT-style decoder: token and position embedding, blocks of causal attention and an MLP or a pmoe layer with layer
 * norm before each, a last layer norm, and a head tied to the token embedding. Each rank holds some of its layers, and
 * of these its shards. */
#ifndef LM_MODEL_H
#define LM_MODEL_H
#include <pmoe/pmoe.h>

#include "catalog.h"
#include "config.h"
#include "param.h"
#include "ranks.h"

/* Sums over tokens, to be added up over micro-batches and ranks. */
struct lm_sums {
  double loss, aux, z; /* aux and z: times their micro-batch's tokens */
  double tokens, routed, dropped;
  double *expert_count; /* [model->num_experts_listed] choices of each expert, layer after layer */
};

/* Whole sequences, whatever part of them a rank computes. */
struct lm_batch {
  int sequences, length;           /* length: a multiple of CP x TP */
  const int32_t *tokens, *targets; /* [sequences, length]; targets may be NULL in model_logits */
};

/* The micro-batches that the ranks of one pipeline, TP and CP neighbours included, work at together. */
struct lm_feed {
  int64_t count;
  /* The index-th; good until the next call. */
  struct lm_batch (*read)(void *arg, int64_t index);
  void *arg;
};

struct lm_layer; /* inside model.c and its siblings */
struct lm_chunk;
struct lm_acts;

struct lm_model {
  struct lm_config cfg; /* checked */
  int vocab;
  struct lm_ranks *ranks;
  int num_params; /* of this rank */
  struct lm_param *params;
  struct lm_catalog catalog;
  /* Gradients of all parameters outside pmoe layers, those of one kind of sum after another. */
  float *dense_grad;
  int64_t dense_numel[LM_SUM_LAYER];
  struct lm_layer *layers; /* [cfg.layers], those elsewhere empty */
  int num_chunks;
  struct lm_chunk *chunks;
  int num_experts_listed; /* over all layers, wherever they are */
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
  LM_PART_SHARDS,
  LM_PART_PIPELINE,
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

/* Every micro-batch forward and backward, in the order of the pipeline's schedule: adds to the gradients (sums over
 * tokens) and to sums. first_token: index of the feed's first token in the step. */
void model_train(struct lm_model *model, const struct lm_feed *feed, uint64_t step, int64_t first_token,
                 struct lm_sums *sums);
/* Sum of the losses of this rank's tokens in the last stage, 0 in the others; without gradients. */
double model_loss(struct lm_model *model, const struct lm_feed *feed);
/* Logits [vocab] of position `last` of a batch of one sequence, or of none. Returns 1 on the rank that has them. */
int model_logits(struct lm_model *model, const struct lm_batch *batch, int last, float *logits);

#endif
