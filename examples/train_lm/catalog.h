/* All parameters of a model, whichever ranks hold them. */
#ifndef LM_CATALOG_H
#define LM_CATALOG_H
#include "param.h"
#include "ranks.h"

/* What one rank has of a parameter, and must save. */
struct lm_holding {
  int64_t first, units; /* experts; of a dense parameter 0 and 1. units 0: nothing */
  struct lm_runs runs;
  int32_t local; /* its index in that rank's list */
};

struct lm_entry {
  char name[64];
  int order, ndim, experts; /* experts 0: a dense parameter */
  int64_t shape[3];         /* the whole */
  int64_t unit_numel;       /* of an expert, or of the dense parameter */
  struct lm_holding *by;    /* [nranks] */
};

struct lm_catalog {
  int count;
  struct lm_entry *entry; /* in the model's order */
  struct lm_holding *holdings;
};

/* Collective over all ranks, all of which get the same. */
void catalog_make(struct lm_catalog *catalog, const struct lm_param *params, int count, struct lm_ranks *ranks);
void catalog_free(struct lm_catalog *catalog);

#endif
