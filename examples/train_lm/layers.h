/* The inside of a model, for the files that build it and run it. */
#ifndef LM_LAYERS_H
#define LM_LAYERS_H
#include "attention.h"
#include "model.h"

/* Pointers into the model's list of parameters; a layer has either an mlp or a moe, or is another rank's. */
struct lm_layer {
  struct lm_param *norm1_weight, *norm1_bias, *qkv_weight, *qkv_bias, *proj_weight, *proj_bias;
  struct lm_param *norm2_weight, *norm2_bias;
  struct lm_param *fc1_weight, *fc1_bias, *fc2_weight, *fc2_bias; /* of the mlp */
  pmoe_experts *mlp;
  pmoe_layer *moe;
  int experts, first_listed; /* place of its expert 0 in lm_sums.expert_count */
};

/* What forward keeps of a layer for backward. T: all tokens of the rank's sequences; R: the rows it holds (T, or with
 * sequence parallelism T/TP); H hidden; h and F: this rank's part of the heads' width and of the inner size. */
struct lm_layer_acts {
  float *x;                     /* [R,H] the layer's input */
  float *norm1, *mean1, *rstd1; /* [R,H], [R], [R] */
  float *norm1_all;             /* [T,H]; norm1 if R is T */
  float *qkv, *logsum, *att;    /* [T,3h], [T,heads], [T,h] */
  float *kv;                    /* [sequences, keys, 2h] with context parallelism */
  float *x2;                    /* [R,H] after attention */
  float *norm2, *mean2, *rstd2; /* [R,H], [R], [R] */
  void *mlp_x, *mlp_x_all;      /* [R,H], [T,H] in the model's dtype; mlp_x is norm2 if that is float32, mlp_x_all
                                   mlp_x if R is T or the layer has experts */
  void *mlp_pre;                /* [T,F] in the model's dtype */
  pmoe_stash *stash;
};

/* A micro-batch in flight in one chunk. */
struct lm_slot {
  struct lm_rows rows;
  int32_t *tokens, *targets;   /* [R] */
  int64_t first_token;         /* in the step */
  struct lm_layer_acts *layer; /* of the chunk's layers */
  float *x;                    /* [R,H] what the chunk's last layer gives */
};

/* A virtual pipeline stage: consecutive layers. */
struct lm_chunk {
  int stage, num_stages; /* virtual ones; the first embeds, the last has the head */
  int first_layer, num_layers;
  /* Outside the layers; NULL where they are elsewhere. */
  struct lm_param *token_table, *position_table, *final_norm_weight, *final_norm_bias;
  int num_slots;
  struct lm_slot **slot;
};

/* Memory that chunks and micro-batches share. */
struct lm_acts {
  int64_t max_tokens;        /* T at most */
  float *norm, *mean, *rstd; /* of the last norm, own rows */
  float *logits, *loss;      /* [head_rows, vocab], [head_rows] */
  int64_t head_rows;
  float *dx;               /* [R,H] gradient of a layer's output, then of its input */
  float *dx_all;           /* [T,H]; dx if TP is 1 */
  float *part;             /* [T,H] a shard's part of a sum */
  float *datt, *dqkv;      /* [T,h], [T,3h] */
  float *kv_mine, *kv_all; /* with context parallelism: [T,2h], [CP,T,2h] */
  float *dkv;              /* [sequences, keys, 2h] */
  void *mlp_y;             /* [T,H] in the model's dtype: y forward, dy backward */
  void *mlp_dx;            /* [T,H] in the model's dtype */
  float *attention_scratch;
  void *zero_bias; /* [H] in the model's dtype, where another shard adds the bias */
  float *zero_bias_grad;
  void *pmoe_scratch;
};

struct lm_acts *acts_create(const struct lm_model *model);
void acts_destroy(struct lm_model *model);
/* Gives the chunk at least that many slots. */
void acts_grow(const struct lm_model *model, struct lm_chunk *chunk, int64_t slots);

/* Seconds of a clock that never goes back, and of processor time that this process has used. */
double lm_now(void);
double lm_cpu_now(void);

#endif
