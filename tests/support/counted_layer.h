/* A small layer over an allocator that counts, for tests of what is refused: on the main thread, one rank. */
#ifndef TEST_COUNTED_LAYER_H
#define TEST_COUNTED_LAYER_H
#include "support/asserts.h"

#include <math.h>
#include <stdlib.h>

#include "support/failing_alloc.h"
#include "support/rig.h"

enum { T = 5 };

/* A context over an allocator that counts, a layer that works, a stash that has not run and a micro-batch. */
typedef struct bench {
  failing_alloc memory;
  pmoe_ctx *ctx;
  rig r;
  rig_step s;
  pmoe_stash *stash;
} bench;

static inline void set_up_split(bench *b, int split) {
  memset(b, 0, sizeof *b);
  pmoe_allocator table = failing_alloc_table(&b->memory);
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 1;
  cfg.allocator = &table;
  assert_ok(pmoe_ctx_create(&cfg, &b->ctx));
  rig_spec spec = rig_spec_default();
  spec.experts.bias = 1;
  spec.residual.mix = PMOE_MIX_LEARNED;
  assert_ok(rig_create(&b->r, b->ctx, NULL, &spec));
  pmoe_stash_config stash = PMOE_CONFIG_INIT(pmoe_stash_config);
  stash.max_tokens = T;
  stash.split_backward = split;
  assert_ok(pmoe_stash_create(b->r.layer, &stash, NULL, 0, &b->stash));
  rig_plan plan = {.label = "bad input", .rank_tokens = {T}, .training = 1, .loss_scale = 1.0, .seed = 2};
  rig_step_begin(&b->r, &b->s, &plan);
}

static inline void set_up(bench *b) { set_up_split(b, 0); }

static inline void take_down(bench *b) {
  pmoe_stash_destroy(b->stash);
  rig_step_end(&b->s);
  rig_destroy(&b->r);
  pmoe_ctx_destroy(b->ctx);
  assert_int_equal(b->memory.held_bytes, 0);
  assert_int_equal(b->memory.held_blocks, 0);
}

/* Whatever was refused before, the right calls work. */
static inline void assert_still_works(bench *b) {
  rig_zero_grads(&b->r);
  assert_ok(rig_forward(&b->r, b->stash, &b->s));
  assert_ok(rig_backward(&b->r, b->stash, &b->s, PMOE_BWD_ALL));
  assert_int_equal(rig_check(&b->r, b->stash, &b->s, 1) + rig_check_grads(&b->r, 1.0, "after refusals"), 0);
}

static inline void assert_untouched(const pmoe_mat *mat) {
  for (int64_t i = 0; i < mat->rows * mat->cols; i++) assert_true(isnan(test_get(mat->data, mat->dtype, i)));
}

#endif
