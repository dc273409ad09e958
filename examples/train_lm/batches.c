#include "batches.h"

#include <stdlib.h>

void batches_create(struct lm_batches *batches, const struct lm_config *cfg, const struct lm_data *data) {
  *batches = (struct lm_batches){.cfg = cfg, .data = data};
  batches->tokens = lm_alloc((size_t)(cfg->micro * cfg->context), sizeof *batches->tokens);
  batches->targets = lm_alloc((size_t)(cfg->micro * cfg->context), sizeof *batches->targets);
}

void batches_destroy(struct lm_batches *batches) {
  free(batches->tokens);
  free(batches->targets);
}

static struct lm_batch read_batch(void *arg, int64_t index) {
  const struct lm_batches *b = arg;
  int micro = b->cfg->micro, context = b->cfg->context;
  struct lm_batch batch = {0, context, b->tokens, b->targets};
  if (index >= b->count) return batch;
  for (int64_t i = (b->begin + index) * micro; batch.sequences < micro && i < b->sequences; i++, batch.sequences++) {
    int64_t start = b->held_out ? data_held_out_start(b->data, context, i, b->sequences)
                                : data_train_start(b->data, context, b->cfg->seed, b->step, i);
    data_read(b->data, start, context, b->tokens + (int64_t)batch.sequences * context);
    data_read(b->data, start + 1, context, b->targets + (int64_t)batch.sequences * context);
  }
  return batch;
}

static struct lm_feed share_out(struct lm_batches *b, const struct lm_layout *at) {
  int64_t micro = b->cfg->micro, all = (b->sequences + micro - 1) / micro;
  b->begin = all * at->dp_rank / at->dp;
  b->count = all * (at->dp_rank + 1) / at->dp - b->begin;
  return (struct lm_feed){(all + at->dp - 1) / at->dp, read_batch, b};
}

struct lm_feed batches_of_step(struct lm_batches *b, const struct lm_layout *at, uint64_t step) {
  b->held_out = 0, b->step = step, b->sequences = b->cfg->batch;
  return share_out(b, at);
}

struct lm_feed batches_held_out(struct lm_batches *b, const struct lm_layout *at, int64_t sequences) {
  b->held_out = 1, b->sequences = sequences;
  return share_out(b, at);
}
