/* Gradients over ranks, their norm, and AdamW. */
#ifndef LM_OPTIMIZER_H
#define LM_OPTIMIZER_H
#include "model.h"

void gradients_zero(struct lm_model *model);
/* Sums every gradient over the ranks that hold its parameter and multiplies it by scale. Collective. */
void gradients_reduce(struct lm_model *model, float scale);
/* Root of the sum of squares over the whole model, every expert once; the same on all ranks. Collective. */
double gradients_norm(struct lm_model *model);

/* Of step `step` (from 0): a linear rise over the warm-up, then a cosine down to a tenth. */
float learning_rate(const struct lm_config *cfg, int64_t step);

/* One step, the step-th (from 1), with gradients times grad_scale; then master is rounded into data. */
void adamw_step(struct lm_model *model, float rate, float grad_scale, int64_t step);

#endif
