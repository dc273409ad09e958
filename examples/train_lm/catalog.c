#include "catalog.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

/* What travels: a rank's description of a parameter of its list. */
struct line {
  char name[64];
  int32_t used, order, ndim, experts;
  int64_t shape[3];
  int whole; /* whether shape is right: a rank without numbers may not know it */
  struct lm_holding holding;
};

static struct line describe(const struct lm_param *p, int local) {
  struct line line = {.used = 1, .order = p->order, .ndim = p->ndim, .experts = p->num_global_experts};
  memcpy(line.name, p->name, sizeof line.name);
  param_whole_shape(p, line.shape);
  line.whole = p->numel > 0;
  line.holding = (struct lm_holding){.first = p->num_global_experts > 0 ? p->first_expert : 0, .local = local};
  line.holding.runs = param_runs(p);
  line.holding.units = p->first_copy && p->numel > 0 ? param_units(p) : 0;
  return line;
}

static int compare(const void *a, const void *b) {
  const struct line *x = *(const struct line *const *)a, *y = *(const struct line *const *)b;
  return (x->order > y->order) - (x->order < y->order);
}

/* Every rank's lines, `each` of them a rank, and the used ones in the model's order. */
static struct line *gather(const struct lm_param *params, int count, struct lm_ranks *ranks, int *each) {
  int *counts = lm_alloc((size_t)ranks->nranks, sizeof *counts);
  LM_TRY(pmoe_comm_allgather(ranks->world, &count, counts, sizeof count));
  *each = 1;
  for (int r = 0; r < ranks->nranks; r++) *each = counts[r] > *each ? counts[r] : *each;
  free(counts);
  struct line *mine = lm_alloc((size_t)*each, sizeof *mine);
  struct line *all = lm_alloc((size_t)*each * (size_t)ranks->nranks, sizeof *all);
  for (int i = 0; i < count; i++) mine[i] = describe(&params[i], i);
  LM_TRY(pmoe_comm_allgather(ranks->world, mine, all, (size_t)*each * sizeof *mine));
  free(mine);
  return all;
}

static void take_line(struct lm_entry *entry, const struct line *line, int rank) {
  memcpy(entry->name, line->name, sizeof entry->name);
  entry->order = line->order, entry->ndim = line->ndim, entry->experts = line->experts;
  entry->by[rank] = line->holding;
  if (!line->whole) return;
  memcpy(entry->shape, line->shape, sizeof entry->shape);
  entry->unit_numel = 1;
  for (int d = line->experts > 0 ? 1 : 0; d < line->ndim; d++) entry->unit_numel *= line->shape[d];
}

void catalog_make(struct lm_catalog *catalog, const struct lm_param *params, int count, struct lm_ranks *ranks) {
  int each, used = 0;
  struct line *all = gather(params, count, ranks, &each);
  const struct line **sorted = lm_alloc((size_t)each * (size_t)ranks->nranks, sizeof *sorted);
  for (int i = 0; i < each * ranks->nranks; i++)
    if (all[i].used) sorted[used++] = &all[i];
  qsort(sorted, (size_t)used, sizeof *sorted, compare);
  *catalog = (struct lm_catalog){.entry = lm_alloc((size_t)used, sizeof *catalog->entry)};
  catalog->holdings = lm_alloc((size_t)used * (size_t)ranks->nranks, sizeof *catalog->holdings);
  for (int i = 0; i < used; i++) {
    if (i == 0 || sorted[i]->order != sorted[i - 1]->order) {
      catalog->entry[catalog->count].by = catalog->holdings + (size_t)catalog->count * (size_t)ranks->nranks;
      catalog->count++;
    }
    take_line(&catalog->entry[catalog->count - 1], sorted[i], (int)((sorted[i] - all) / each));
  }
  free(sorted);
  free(all);
}

void catalog_free(struct lm_catalog *catalog) {
  free(catalog->holdings);
  free(catalog->entry);
  *catalog = (struct lm_catalog){0};
}
