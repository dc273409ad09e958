/* The reference: the whole layer of any number of ranks, computed by one, in double precision and with plain loops. It
 * shares nothing with the library but the words of the public headers. Random features (jitter, Gumbel noise, random
 * drops) enter as given choices. */
#ifndef TEST_ORACLE_H
#define TEST_ORACLE_H
#include <pmoe/layer.h>

enum {
  ORACLE_ROUTER_WEIGHT,
  ORACLE_ROUTER_BIAS,
  ORACLE_FC1_WEIGHT,
  ORACLE_FC1_BIAS,
  ORACLE_FC2_WEIGHT,
  ORACLE_FC2_BIAS,
  ORACLE_MLP_FC1_WEIGHT,
  ORACLE_MLP_FC1_BIAS,
  ORACLE_MLP_FC2_WEIGHT,
  ORACLE_MLP_FC2_BIAS,
  ORACLE_MIX_WEIGHT,
  ORACLE_MIX_BIAS,
  ORACLE_TENSORS
};

typedef struct oracle_tensor {
  const char *name;
  int64_t numel;      /* 0: this configuration has no such parameter */
  int64_t per_expert; /* elements of one expert; 0: dense */
  double *data, *grad;
} oracle_tensor;

typedef struct oracle_model {
  int64_t hidden;
  pmoe_gate_config gate;
  pmoe_experts_config experts;
  pmoe_residual_config residual;
  oracle_tensor tensor[ORACLE_TENSORS];
} oracle_model;

typedef struct oracle_batch {
  int64_t tokens;             /* of all ranks */
  int32_t num_ranks;          /* source ranks: capacity, losses and statistics are each rank's own */
  const int64_t *rank_tokens; /* [num_ranks]; NULL for one rank */
  const int32_t *loss_group;  /* [num_ranks] ranks of one number share their losses; NULL: each has its own */
  int32_t training;
  double loss_scale;
  const double *x, *dy;        /* [T,H]; dy NULL: forward alone */
  const uint8_t *mask;         /* [T] or NULL */
  const int32_t *given_expert; /* [T,K] choices to replay, with given_slot [T,K] (negative: dropped); or NULL */
  const int64_t *given_slot;
} oracle_batch;

/* All arrays belong to the result. */
typedef struct oracle_result {
  int64_t tokens;
  int32_t num_ranks;
  double *y, *dx;            /* [T,H] */
  double *logits, *raw;      /* [T,E] raw: scores */
  double *prob;              /* [T,E] scores divided by their sum */
  int32_t *expert;           /* [T,K]; -1 for masked tokens */
  int64_t *slot;             /* [T,K] place in the order of keeping, or -1 */
  double *score, *weight;    /* [T,K] before normalisation; finished */
  double *dweight;           /* [T,K] */
  int64_t *count, *rows;     /* [ranks,E] choices before and after dropping */
  int64_t *capacity;         /* [ranks] 0: dropless */
  double *aux_loss, *z_loss; /* [ranks] each rank's share */
  double *global_aux_loss;   /* [ranks] */
  double *moe, *mlp;         /* [T,H] */
  double *mix;               /* [T,2] scale and branch_scale */
} oracle_result;

/* residual NULL: none. Parameters and gradients start at zero. */
oracle_model *oracle_model_create(int32_t hidden, const pmoe_gate_config *gate, const pmoe_experts_config *experts,
                                  const pmoe_residual_config *residual);
void oracle_model_destroy(oracle_model *model);
void oracle_zero_grads(oracle_model *model);
/* Every parameter from a seed: weights of about 1/sqrt(fan-in), biases of about 0.1. */
void oracle_model_fill(oracle_model *model, uint64_t seed);

/* n values, normal(0, std), of the seed alone. */
void oracle_fill(double *out, int64_t n, uint64_t seed, double std);

/* Forward, and backward where batch->dy is set; parameter gradients are added to. */
oracle_result *oracle_run(oracle_model *model, const oracle_batch *batch);
void oracle_result_destroy(oracle_result *result);

/* sum(dy * y) + loss_scale * (all ranks' losses): what the gradients are the gradients of. */
double oracle_objective(oracle_model *model, const oracle_batch *batch);

/* The parts, for one rank's tokens [first, first + tokens). */
int64_t oracle_capacity(int64_t tokens, int32_t num_experts, int32_t top_k, double factor, int32_t min_capacity);
void oracle_gate_forward(const oracle_model *model, const oracle_batch *batch, int32_t rank, int64_t first,
                         int64_t tokens, oracle_result *result);
/* Once all ranks' tokens have been routed. */
void oracle_losses(const oracle_model *model, const oracle_batch *batch, oracle_result *result);
void oracle_gate_backward(oracle_model *model, const oracle_batch *batch, int32_t rank, int64_t first, int64_t tokens,
                          oracle_result *result);

double oracle_act(pmoe_act act, const double *pre, int64_t i, int64_t inner);
int oracle_act_gated(pmoe_act act);
/* One row through one feed-forward network. Biases may be NULL. */
typedef struct oracle_ffn {
  pmoe_act act;
  int64_t hidden, inner;
  const double *w1, *b1, *w2, *b2;
  double *dw1, *db1, *dw2, *db2;
} oracle_ffn;
void oracle_ffn_forward(const oracle_ffn *ffn, const double *x, double *y);
/* Adds to dx and to the parameter gradients. */
void oracle_ffn_backward(const oracle_ffn *ffn, const double *x, const double *dy, double *dx);

#endif
