/* Any layout of ranks against the reference: a layer trained for some steps, with different tokens everywhere, and all
 * of its results and gradients compared. */
#ifndef TEST_LAYOUT_H
#define TEST_LAYOUT_H
#include "ranks/world.h"

#include "support/rig.h"

typedef struct layout {
  int32_t world, tp, cp, pp, ep, etp, sp;
  const char *order;
} layout;

typedef struct layout_case {
  layout layout;
  rig_spec spec; /* ep is the layout's; layer_id counts pipeline stages */
  int masked, split, pile_up, steps;
  int64_t even;    /* tokens of all ranks together, evenly spread; 0: drawn */
  int host_groups; /* the topology comes from communicators instead of sizes */
  uint64_t seed;
  int64_t most_tokens; /* of one rank; tokens are drawn from 0 to it */
} layout_case;

/* This rank's place among the ranks that route tokens: TP neighbours are neighbours. */
typedef struct layout_place {
  int32_t sources, source, tp, stage_of_pipeline;
  pmoe_comm *stage;
  int32_t loss_group[RIG_MAX_RANKS]; /* of each source: those of one micro-batch share their losses */
} layout_place;

/* A topology and this rank's place in it. Number of failures. */
int layout_topology(world *w, const layout *l, pmoe_topology **topology, layout_place *place);

/* The parts of layout_train: a topology and this rank's place in it, a layer and its reference, the tokens of a step.
 * Numbers of failures. */
int layout_open(world *w, const layout_case *c, pmoe_topology **topology, layout_place *place, rig *r);
void layout_draw_tokens(const layout_case *c, const layout_place *place, uint64_t step, rig_plan *plan);

/* The pieces of one step: a stash that is large enough, the tokens of step n, forward and backward (in two parts). */
pmoe_stash_config layout_stash(const layout_case *c, int split);
void layout_begin(const layout_case *c, const layout_place *p, const rig *r, uint64_t n, rig_step *s);
pmoe_status layout_step(rig *r, pmoe_stash *stash, rig_step *s, int split);

/* The body of a rank, for world_run(c->layout.world, layout_train, c). */
int layout_train(world *w);

/* A number of [0, below) by a seed and a place. */
int64_t layout_draw(uint64_t seed, uint64_t place, int64_t below);

#endif
