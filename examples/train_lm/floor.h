/* What a step would take if it were matrix products alone. */
#ifndef LM_FLOOR_H
#define LM_FLOOR_H
#include "model.h"

struct lm_floor {
  double seconds;
  double cpu_seconds; /* of this process, all its ranks: what a shared machine cannot stretch */
};

/* The products with weights (attention's scores not counted) that this rank's micro-batches need for forward and
 * backward, experts under an even load: the median of a few runs. Collective: ranks measure side by side. */
struct lm_floor gemm_floor(struct lm_model *model, int micro_batches);

#endif
