/* What a step would take if it were matrix products alone. */
#ifndef LM_FLOOR_H
#define LM_FLOOR_H
#include "model.h"

/* Seconds of the products with weights (attention's scores not counted) that this rank's micro-batches need for forward
 * and backward, experts under an even load, as the median of a few runs. Collective: ranks measure side by side. */
double gemm_floor(struct lm_model *model, int micro_batches);

#endif
