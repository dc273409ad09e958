/* Text that a model makes up. */
#ifndef LM_SAMPLE_H
#define LM_SAMPLE_H
#include "data.h"
#include "model.h"

/* Prints the beginning of the held-out part and `count` tokens that the model puts after it, on rank 0. Collective. */
void sample_print(struct lm_model *model, const struct lm_data *data, int count);

#endif
