/* The activation between an expert's two products, with everything pointwise around it in the same sweep. */
#ifndef PMOEI_ACTIVATION_H
#define PMOEI_ACTIVATION_H
#include <pmoe/experts.h>

static inline bool pmoei_act_gated(pmoe_act act) { return act == PMOE_ACT_SWIGLU || act == PMOE_ACT_GEGLU; }

/* `inner` is F. pre [rows,F1] holds the product x W1ᵀ without bias; bias [F1], of pre's dtype, may be NULL.
 * out [rows,F] = act(pre + bias). */
void pmoei_activation_forward(pmoe_act act, int64_t inner, const pmoe_mat *pre, const void *bias, pmoe_mat *out);

/* What the backward sweep works on; `rows` rows each. */
typedef struct pmoei_activation_grad {
  pmoe_act act;
  int64_t inner, rows;
  const void *bias;
  const pmoe_mat *dact;    /* [rows,F] float32: gradient of the unweighted activation */
  const float *row_weight; /* [rows], NULL: all 1 */
  pmoe_mat *pre;           /* [rows,F1]; its first F columns become row_weight * act(pre + bias) */
  pmoe_mat *dpre;          /* [rows,F1] written: row_weight * dact * act'(pre + bias) */
  float *drow_weight;      /* [rows] written: dact . act(pre + bias); NULL: not wanted */
} pmoei_activation_grad;
void pmoei_activation_backward(const pmoei_activation_grad *grad);

#endif
