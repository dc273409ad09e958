#include "a2a/rank_grid.h"

#include <stdbool.h>
#include <string.h>

#include "core/config.h"

static const char *const axis_names[PMOEI_AXES] = {"tp", "cp", "ep", "dp", "pp"};

static bool is_word(const char *text, size_t length, const char *word) {
  return length == strlen(word) && memcmp(text, word, length) == 0;
}

static bool find_axis(const char *text, size_t length, pmoei_axis *axis) {
  for (int i = 0; i < PMOEI_AXES; i++) {
    *axis = (pmoei_axis)i;
    if (is_word(text, length, axis_names[i])) return true;
  }
  return false;
}

/* Reads "tp-cp-ep-dp-pp". Axes that are not named come last; they must then have size 1, which the caller checks. */
static pmoe_status read_order(const char *order, pmoei_axis *axes, bool *named) {
  int count = 0;
  for (const char *token = order; token;) {
    size_t length = strcspn(token, "-");
    pmoei_axis axis;
    PMOEI_REQUIRE(find_axis(token, length, &axis), "cfg->order is \"%s\"; \"%.*s\" is none of tp, cp, ep, dp, pp",
                  order, (int)length, token);
    PMOEI_REQUIRE(!named[axis], "cfg->order is \"%s\"; it names %s twice", order, axis_names[axis]);
    named[axis] = true;
    axes[count++] = axis;
    token = token[length] ? token + length + 1 : NULL;
  }
  for (int i = 0; i < PMOEI_AXES; i++)
    if (!named[i]) axes[count++] = (pmoei_axis)i;
  return PMOE_OK;
}

/* The size that makes `parts` (a product of three) times it the world. */
static pmoe_status left_over(int32_t world, int32_t a, int32_t b, int32_t c, const char *names, int32_t *out) {
  int64_t parts = (int64_t)a * b; /* at most 2^62; beyond world it divides nothing, whatever c is */
  parts = parts > world ? parts : parts * c;
  PMOEI_REQUIRE(parts <= world && world % parts == 0, "world is %d; a multiple of %s (%d * %d * %d) was expected",
                world, names, a, b, c);
  *out = world / (int32_t)parts;
  return PMOE_OK;
}

static int32_t stride(const pmoei_rank_grid *grid, const int32_t *sizes, pmoei_axis axis) {
  int32_t stride = 1;
  for (int i = 0; grid->order[i] != axis; i++) stride *= sizes[grid->order[i]];
  return stride;
}

static pmoe_status set_sizes(const pmoe_topology_config *cfg, const bool *named, const char *order,
                             pmoei_rank_grid *grid) {
  const int32_t given[] = {cfg->tp, cfg->cp, cfg->pp, cfg->ep, cfg->etp};
  static const char *const names[] = {"tp", "cp", "pp", "ep", "etp"};
  int32_t size[5];
  for (int i = 0; i < 5; i++) {
    PMOEI_REQUIRE(given[i] >= 0, "cfg->%s is %d; 0 or more was expected", names[i], given[i]);
    size[i] = given[i] > 0 ? given[i] : 1;
  }
  PMOEI_REQUIRE(cfg->sp == 0 || cfg->sp == 1, "cfg->sp is %d; 0 or 1 was expected", cfg->sp);
  int32_t tp = size[0], cp = size[1], pp = size[2], ep = size[3], etp = size[4], dp = 1, edp = 1;
  PMOEI_TRY(left_over(grid->world, tp, cp, pp, "tp*cp*pp", &dp));
  PMOEI_TRY(left_over(grid->world, etp, ep, pp, "etp*ep*pp", &edp));
  const int32_t dense[PMOEI_AXES] = {tp, cp, 1, dp, pp}, expert[PMOEI_AXES] = {etp, 1, ep, edp, pp};
  memcpy(grid->dense, dense, sizeof dense);
  memcpy(grid->expert, expert, sizeof expert);
  for (int i = 0; i < PMOEI_AXES; i++)
    PMOEI_REQUIRE(named[i] || (dense[i] == 1 && expert[i] == 1), "cfg->order is \"%s\"; it lacks %s, whose size is %d",
                  order, axis_names[i], dense[i] > expert[i] ? dense[i] : expert[i]);
  return PMOE_OK;
}

pmoe_status pmoei_rank_grid_make(int32_t world, const pmoe_topology_config *config, pmoei_rank_grid *out) {
  PMOEI_REQUIRE(world >= 1, "world is %d; 1 or more was expected", world);
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  if (config) PMOEI_TRY(pmoei_config_read(&cfg, sizeof cfg, config, "cfg"));
  pmoei_rank_grid grid = {.world = world};
  const char *order = cfg.order ? cfg.order : "tp-cp-ep-dp-pp";
  bool named[PMOEI_AXES] = {false};
  PMOEI_TRY(read_order(order, grid.order, named));
  PMOEI_TRY(set_sizes(&cfg, named, order, &grid));
  /* Equal strides: both grids cut the world into the same pipeline stages. */
  int32_t dense = stride(&grid, grid.dense, PMOEI_AXIS_PP), expert = stride(&grid, grid.expert, PMOEI_AXIS_PP);
  PMOEI_REQUIRE(grid.dense[PMOEI_AXIS_PP] == 1 || dense == expert,
                "cfg->order is \"%s\"; neighbouring pipeline stages are %d ranks apart for dense and %d for expert "
                "layers (put pp last)",
                order, dense, expert);
  grid.sp = cfg.sp;
  *out = grid;
  return PMOE_OK;
}

bool pmoei_rank_grid_faster(const pmoei_rank_grid *grid, pmoei_axis a, pmoei_axis b) {
  for (int i = 0; i < PMOEI_AXES; i++)
    if (grid->order[i] == a || grid->order[i] == b) return grid->order[i] == a;
  return false;
}

int32_t pmoei_rank_grid_coordinate(const pmoei_rank_grid *grid, const int32_t *sizes, pmoei_axis axis, int32_t rank) {
  return rank / stride(grid, sizes, axis) % sizes[axis];
}

typedef struct group_kind {
  const char *name;
  bool expert;
  bool spans[PMOEI_AXES]; /* tp cp ep dp pp */
} group_kind;

static const group_kind group_kinds[] = {
    {"tp", false, {1, 0, 0, 0, 0}},    {"cp", false, {0, 1, 0, 0, 0}},       {"dp", false, {0, 0, 0, 1, 0}},
    {"pp", false, {0, 0, 0, 0, 1}},    {"dp_cp", false, {0, 1, 0, 1, 0}},    {"tp_cp", false, {1, 1, 0, 0, 0}},
    {"tp_dp", false, {1, 0, 0, 1, 0}}, {"tp_dp_cp", false, {1, 1, 0, 1, 0}}, {"mp", false, {1, 0, 0, 0, 1}},
    {"ep", true, {0, 0, 1, 0, 0}},     {"expt_tp", true, {1, 0, 0, 0, 0}},   {"expt_dp", true, {0, 0, 0, 1, 0}},
    {"tp_ep", true, {1, 0, 1, 0, 0}},  {"tp_ep_pp", true, {1, 0, 1, 0, 1}}};

/* The rank whose coordinates on the axes with spans[axis] == which are the digits of `index`, and 0 on the others. */
static int32_t place(const pmoei_rank_grid *grid, const int32_t *sizes, const bool *spans, bool which, int32_t index) {
  int32_t rank = 0, step = 1;
  for (int i = 0; i < PMOEI_AXES; i++) {
    pmoei_axis axis = grid->order[i];
    if (spans[axis] == which) {
      rank += index % sizes[axis] * step;
      index /= sizes[axis];
    }
    step *= sizes[axis];
  }
  return rank;
}

pmoe_status pmoe_topology_ranks(int32_t world, const pmoe_topology_config *cfg, const char *group,
                                pmoe_rank_lists *out) {
  PMOEI_REQUIRE_POINTER(group);
  PMOEI_REQUIRE_POINTER(out);
  PMOEI_REQUIRE_POINTER(out->ranks);
  const group_kind *kind = NULL;
  for (size_t i = 0; i < sizeof group_kinds / sizeof group_kinds[0]; i++)
    if (strcmp(group, group_kinds[i].name) == 0) kind = &group_kinds[i];
  PMOEI_REQUIRE(kind,
                "group is \"%s\"; a dense group (tp cp dp pp dp_cp tp_cp tp_dp tp_dp_cp mp) or an expert group "
                "(ep expt_tp expt_dp tp_ep tp_ep_pp) was expected",
                group);
  pmoei_rank_grid grid;
  PMOEI_TRY(pmoei_rank_grid_make(world, cfg, &grid));
  const int32_t *sizes = kind->expert ? grid.expert : grid.dense;
  out->group_size = 1;
  for (int i = 0; i < PMOEI_AXES; i++) out->group_size *= kind->spans[i] ? sizes[i] : 1;
  out->num_groups = world / out->group_size;
  for (int32_t g = 0; g < out->num_groups; g++)
    for (int32_t i = 0; i < out->group_size; i++)
      out->ranks[g * out->group_size + i] =
          place(&grid, sizes, kind->spans, false, g) + place(&grid, sizes, kind->spans, true, i);
  return PMOE_OK;
}

pmoe_status pmoe_expert_block(int32_t num_experts, int32_t ep, int32_t rank, int32_t *first, int32_t *count) {
  PMOEI_REQUIRE(num_experts >= 0, "num_experts is %d; 0 or more was expected", num_experts);
  PMOEI_REQUIRE(ep >= 1, "ep is %d; 1 or more was expected", ep);
  PMOEI_REQUIRE(rank >= 0 && rank < ep, "rank is %d; 0 to %d was expected", rank, ep - 1);
  PMOEI_REQUIRE_POINTER(first);
  PMOEI_REQUIRE_POINTER(count);
  int32_t small = num_experts / ep, larger = num_experts % ep;
  *first = rank * small + (rank < larger ? rank : larger);
  *count = small + (rank < larger);
  return PMOE_OK;
}
