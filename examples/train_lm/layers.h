/* The inside of a model, for the files that build it and run it. */
#ifndef LM_LAYERS_H
#define LM_LAYERS_H
#include "attention.h"
#include "model.h"

/* Pointers into the model's list of parameters; a layer has either an mlp or a moe. */
struct lm_layer {
  struct lm_param *norm1_weight, *norm1_bias, *qkv_weight, *qkv_bias, *proj_weight, *proj_bias;
  struct lm_param *norm2_weight, *norm2_bias;
  struct lm_param *fc1_weight, *fc1_bias, *fc2_weight, *fc2_bias; /* of the mlp */
  pmoe_experts *mlp;
  pmoe_layer *moe;
  pmoe_stash *stash;
  int experts, first_listed; /* place of its expert 0 in lm_sums.expert_count */
};

/* What forward keeps of a layer for backward. T tokens, H hidden. */
struct lm_layer_acts {
  float *x;                     /* [T,H] the layer's input */
  float *norm1, *mean1, *rstd1; /* [T,H], [T], [T] */
  float *qkv, *logsum, *att;    /* [T,3H], [T,heads], [T,H] */
  float *x2;                    /* [T,H] after attention */
  float *norm2, *mean2, *rstd2;
  void *mlp_x, *mlp_pre; /* [T,H], [T,F] in the model's dtype; mlp_x is norm2 if that is float32 */
};

struct lm_acts {
  int64_t max_tokens;
  struct lm_layer_acts *layer;
  float *x, *norm, *mean, *rstd; /* after the last layer */
  float *logits, *loss;          /* [head_rows, vocab], [head_rows] */
  int64_t head_rows;
  float *dx, *dnorm, *datt, *dqkv; /* [T,H], [T,H], [T,H], [T,3H] */
  void *mlp_y;                     /* [T,H] in the model's dtype: y forward, dy and dx backward */
  void *mlp_dx;
  float *attention_scratch;
  void *pmoe_scratch;
};

/* The parameters outside the layers. */
enum { LM_TOKEN_TABLE, LM_POSITION_TABLE, LM_FINAL_NORM_WEIGHT, LM_FINAL_NORM_BIAS };

struct lm_acts *acts_create(const struct lm_model *model);
void acts_destroy(struct lm_model *model);

/* Seconds of a clock that never goes back, and of processor time that this process has used. */
double lm_now(void);
double lm_cpu_now(void);

#endif
