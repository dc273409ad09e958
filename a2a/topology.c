#include "a2a/topology.h"

#include <stdio.h>

#include "a2a/host_groups.h"
#include "a2a/rank_grid.h"
#include "core/config.h"

/* The two groups of one expert-parallel size. */
typedef struct ep_groups {
  int32_t ep;
  pmoe_comm *exchange, *expert_dp;
  bool tp_inside;
  struct ep_groups *next;
} ep_groups;

struct pmoe_topology {
  pmoe_ctx *ctx;
  pmoe_comm *stage, *tp, *dense_dp; /* ranks of this pipeline stage, and its parts for dense layers */
  pmoe_comm *micro_batch;           /* ranks that share a micro-batch's tokens: TP x CP */
  bool sp;
  bool from_host;       /* no size can be added, and there is no grid */
  pmoei_rank_grid grid; /* of the world, with the topology's own expert-parallel size */
  int32_t world_rank;
  int32_t own_ep, etp;
  ep_groups *groups;
};

static void destroy_groups(pmoe_ctx *ctx, ep_groups *groups) {
  pmoei_comm_release(groups->exchange);
  pmoei_comm_release(groups->expert_dp);
  pmoei_free(ctx, groups, sizeof *groups);
}

void pmoe_topology_destroy(pmoe_topology *topology) {
  if (!topology) return;
  pmoe_ctx *ctx = topology->ctx;
  for (ep_groups *groups = topology->groups; groups;) {
    ep_groups *next = groups->next;
    destroy_groups(ctx, groups);
    groups = next;
  }
  pmoei_comm_release(topology->micro_batch);
  pmoei_comm_release(topology->dense_dp);
  pmoei_comm_release(topology->tp);
  pmoei_comm_release(topology->stage);
  pmoei_free(ctx, topology, sizeof *topology);
  pmoei_ctx_release(ctx);
}

static pmoe_status topology_new(pmoe_ctx *ctx, pmoe_topology **out) {
  PMOEI_TRY(pmoei_alloc(ctx, sizeof **out, "topology", out));
  (*out)->ctx = ctx;
  pmoei_ctx_retain(ctx);
  return PMOE_OK;
}

static pmoe_comm *share(pmoe_comm *comm) {
  pmoei_comm_retain(comm);
  return comm;
}

/* A part of the stage: this rank alone, the stage itself where the order of its ranks will do, or a new communicator.
 */
static pmoe_status take_part(pmoe_topology *topology, int32_t size, bool in_order, int32_t color, int32_t key,
                             pmoe_comm **out) {
  if (size == 1) return pmoe_comm_self(topology->ctx, out);
  if (size < topology->stage->nranks || !in_order) return pmoe_comm_split(topology->stage, color, key, out);
  *out = share(topology->stage);
  return PMOE_OK;
}

static pmoe_status fill_groups(pmoe_topology *topology, ep_groups *groups) {
  pmoei_rank_grid grid = topology->grid;
  int32_t etp = topology->etp, whole = groups->ep * etp, copies = topology->stage->nranks / whole;
  grid.expert[PMOEI_AXIS_EP] = groups->ep;
  grid.expert[PMOEI_AXIS_DP] = copies;
  int32_t etp_rank = pmoei_rank_grid_coordinate(&grid, grid.expert, PMOEI_AXIS_TP, topology->world_rank);
  int32_t ep_rank = pmoei_rank_grid_coordinate(&grid, grid.expert, PMOEI_AXIS_EP, topology->world_rank);
  int32_t copy = pmoei_rank_grid_coordinate(&grid, grid.expert, PMOEI_AXIS_DP, topology->world_rank);
  int32_t place = ep_rank * etp + etp_rank;
  bool in_order = etp == 1 || groups->ep == 1 || pmoei_rank_grid_faster(&grid, PMOEI_AXIS_TP, PMOEI_AXIS_EP);
  PMOEI_TRY(take_part(topology, whole, in_order, copy, place, &groups->exchange));
  return take_part(topology, copies, true, place, copy, &groups->expert_dp);
}

/* Whether all ranks of this rank's TP group are in its exchange group: told by each group's first rank. `ranks` has
 * room for either. */
static pmoe_status gather_leaders(pmoe_topology *topology, ep_groups *groups, int64_t *ranks) {
  static const char what[] = "tensor-parallel and expert-parallel groups";
  int64_t leader = topology->stage->rank;
  PMOEI_TRY(pmoei_allgather(groups->exchange, what, &leader, ranks, sizeof leader));
  leader = ranks[0];
  PMOEI_TRY(pmoei_allgather(topology->tp, what, &leader, ranks, sizeof leader));
  for (int32_t i = 0; i < topology->tp->nranks; i++) groups->tp_inside = groups->tp_inside && ranks[i] == leader;
  return PMOE_OK;
}

/* Collective over the stage. */
static pmoe_status compare_with_tp(pmoe_topology *topology, ep_groups *groups, const char *what) {
  groups->tp_inside = true;
  if (topology->tp->nranks == 1) return PMOE_OK;
  int32_t most = groups->exchange->nranks > topology->tp->nranks ? groups->exchange->nranks : topology->tp->nranks;
  void *ranks = NULL;
  int32_t scratch = -1;
  pmoe_status status = pmoei_scratch_open(topology->ctx, (size_t)most * sizeof(int64_t), &ranks, &scratch);
  status = pmoei_comm_agree(topology->stage, what, status);
  if (status == PMOE_OK) status = pmoei_comm_agree(topology->stage, what, gather_leaders(topology, groups, ranks));
  if (scratch >= 0) pmoei_scratch_close(topology->ctx, scratch);
  return status;
}

static pmoe_status prepare_groups(pmoe_topology *topology, int32_t ep, ep_groups **out) {
  int32_t ranks = topology->stage->nranks / topology->etp;
  PMOEI_REQUIRE(ranks % ep == 0, "ep is %d; a divisor of the %d ranks of the stage%s was expected", ep, ranks,
                topology->etp > 1 ? ", over etp," : "");
  PMOEI_TRY(pmoei_alloc(topology->ctx, sizeof **out, "expert-parallel groups", out));
  (*out)->ep = ep;
  return PMOE_OK;
}

/* All ranks of the stage get the groups or none does. */
static pmoe_status add_groups(pmoe_topology *topology, int32_t ep, ep_groups **out) {
  char what[PMOEI_WHAT_BYTES];
  snprintf(what, sizeof what, "expert-parallel groups of %d", ep);
  ep_groups *groups = NULL;
  pmoe_status status = pmoei_comm_agree(topology->stage, what, prepare_groups(topology, ep, &groups));
  if (status == PMOE_OK) status = pmoei_comm_agree(topology->stage, what, fill_groups(topology, groups));
  if (status == PMOE_OK) status = compare_with_tp(topology, groups, what);
  if (status != PMOE_OK) {
    if (groups) destroy_groups(topology->ctx, groups);
    return status;
  }
  groups->next = topology->groups;
  topology->groups = groups;
  *out = groups;
  return PMOE_OK;
}

static ep_groups *find_groups(const pmoe_topology *topology, int32_t ep) {
  for (ep_groups *groups = topology->groups; groups; groups = groups->next)
    if (groups->ep == ep) return groups;
  return NULL;
}

static pmoe_status groups_of(pmoe_topology *topology, int32_t ep, ep_groups **out) {
  PMOEI_REQUIRE(ep >= 0, "ep is %d; 0 or more was expected", ep);
  *out = find_groups(topology, ep > 0 ? ep : topology->own_ep);
  PMOEI_REQUIRE(*out || !topology->from_host, "ep is %d; this topology has the host's groups for %d%s", ep,
                topology->own_ep, topology->etp > 1 ? "" : ", and 1");
  return *out ? PMOE_OK : add_groups(topology, ep, out);
}

pmoe_status pmoe_topology_groups(pmoe_topology *topology, int32_t ep, pmoe_comm **ep_comm, pmoe_comm **expert_dp,
                                 pmoe_comm **dense_dp) {
  PMOEI_REQUIRE_POINTER(topology);
  ep_groups *groups;
  PMOEI_TRY(groups_of(topology, ep, &groups));
  if (ep_comm) *ep_comm = groups->exchange;
  if (expert_dp) *expert_dp = groups->expert_dp;
  if (dense_dp) *dense_dp = topology->dense_dp;
  return PMOE_OK;
}

pmoe_status pmoe_topology_stage(const pmoe_topology *topology, pmoe_comm **tp, pmoe_comm **stage) {
  PMOEI_REQUIRE_POINTER(topology);
  if (tp) *tp = topology->tp;
  if (stage) *stage = topology->stage;
  return PMOE_OK;
}

pmoe_status pmoei_topology_layer_groups(pmoe_topology *topology, int32_t ep, pmoei_layer_groups *out) {
  ep_groups *groups;
  PMOEI_TRY(groups_of(topology, ep, &groups));
  *out = (pmoei_layer_groups){.exchange = groups->exchange,
                              .expert_dp = groups->expert_dp,
                              .dense_dp = topology->dense_dp,
                              .tp = topology->tp,
                              .stage = topology->stage,
                              .micro_batch = topology->micro_batch,
                              .etp = topology->etp,
                              .sp = topology->sp,
                              .tp_inside_exchange = groups->tp_inside};
  return PMOE_OK;
}

/* ---- from sizes ---- */

static pmoe_status prepare(pmoe_ctx *ctx, const pmoe_comm *world, const pmoe_topology_config *cfg, pmoe_topology **out,
                           pmoe_topology **topology) {
  PMOEI_REQUIRE_POINTER(out);
  pmoei_rank_grid grid;
  PMOEI_TRY(pmoei_rank_grid_make(world->nranks, cfg, &grid));
  PMOEI_TRY(topology_new(ctx, topology));
  (*topology)->grid = grid;
  (*topology)->world_rank = world->rank;
  (*topology)->own_ep = grid.expert[PMOEI_AXIS_EP];
  (*topology)->etp = grid.expert[PMOEI_AXIS_TP];
  (*topology)->sp = grid.sp != 0 && grid.dense[PMOEI_AXIS_TP] > 1;
  return PMOE_OK;
}

/* Ranks with other sizes or orders show as ranks in another call, with both texts. */
static pmoe_status agree_on_grid(pmoe_comm *world, const pmoei_rank_grid *grid) {
  static const char *const names[PMOEI_AXES] = {"tp", "cp", "ep", "dp", "pp"};
  char what[PMOEI_WHAT_BYTES];
  int length = snprintf(what, sizeof what, "pmoe_topology_create(tp %d, cp %d, pp %d, ep %d, etp %d, sp %d, ",
                        grid->dense[PMOEI_AXIS_TP], grid->dense[PMOEI_AXIS_CP], grid->dense[PMOEI_AXIS_PP],
                        grid->expert[PMOEI_AXIS_EP], grid->expert[PMOEI_AXIS_TP], grid->sp);
  for (int i = 0; i < PMOEI_AXES && length < (int)sizeof what; i++)
    length += snprintf(what + length, sizeof what - (size_t)length, "%s%s", names[grid->order[i]],
                       i + 1 < PMOEI_AXES ? "-" : ")");
  return pmoei_comm_agree(world, what, PMOE_OK);
}

/* The dense layers' groups, inside the stage. */
static pmoe_status connect_dense(pmoe_topology *topology) {
  const pmoei_rank_grid *grid = &topology->grid;
  pmoe_comm *stage = topology->stage;
  int32_t tp = grid->dense[PMOEI_AXIS_TP];
  int32_t tp_rank = pmoei_rank_grid_coordinate(grid, grid->dense, PMOEI_AXIS_TP, topology->world_rank);
  int32_t cp_rank = pmoei_rank_grid_coordinate(grid, grid->dense, PMOEI_AXIS_CP, topology->world_rank);
  int32_t dp_rank = pmoei_rank_grid_coordinate(grid, grid->dense, PMOEI_AXIS_DP, topology->world_rank);
  int32_t copy = dp_rank * grid->dense[PMOEI_AXIS_CP] + cp_rank;
  int32_t shared = tp * grid->dense[PMOEI_AXIS_CP];
  PMOEI_TRY(take_part(topology, tp, true, copy, tp_rank, &topology->tp));
  PMOEI_TRY(take_part(topology, shared, true, dp_rank, stage->rank, &topology->micro_batch));
  return take_part(topology, stage->nranks / tp, true, tp_rank, stage->rank, &topology->dense_dp);
}

static pmoe_status connect(pmoe_topology *topology, pmoe_comm *world) {
  const pmoei_rank_grid *grid = &topology->grid;
  PMOEI_TRY(agree_on_grid(world, grid));
  if (grid->dense[PMOEI_AXIS_PP] == 1) topology->stage = share(world);
  else {
    int32_t stage = pmoei_rank_grid_coordinate(grid, grid->dense, PMOEI_AXIS_PP, world->rank);
    PMOEI_TRY(pmoe_comm_split(world, stage, world->rank, &topology->stage));
  }
  ep_groups *groups;
  pmoe_status status = pmoei_comm_agree(topology->stage, "pmoe_topology_create", connect_dense(topology));
  if (status == PMOE_OK) status = add_groups(topology, topology->own_ep, &groups);
  return pmoei_comm_agree(world, "pmoe_topology_create", status);
}

pmoe_status pmoe_topology_create(pmoe_ctx *ctx, pmoe_comm *world, const pmoe_topology_config *cfg,
                                 pmoe_topology **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(world);
  pmoe_topology *topology = NULL;
  pmoe_status status = pmoei_comm_agree(world, __func__, prepare(ctx, world, cfg, out, &topology));
  if (status == PMOE_OK) status = connect(topology, world);
  if (status == PMOE_OK) *out = topology;
  else pmoe_topology_destroy(topology);
  return status;
}

/* ---- from the host's groups ---- */

static pmoe_status share_or_self(pmoe_ctx *ctx, pmoe_comm *comm, pmoe_comm **out) {
  if (!comm) return pmoe_comm_self(ctx, out);
  *out = share(comm);
  return PMOE_OK;
}

static pmoe_status adopt(pmoe_topology *topology, int32_t ep, pmoe_comm *expert_dp, ep_groups **out) {
  PMOEI_TRY(pmoei_alloc(topology->ctx, sizeof **out, "expert-parallel groups", out));
  **out = (ep_groups){.ep = ep, .expert_dp = share(expert_dp), .next = topology->groups};
  topology->groups = *out;
  return PMOE_OK;
}

/* What needs no communication. */
static pmoe_status adopt_all(pmoe_ctx *ctx, const pmoe_groups *groups, pmoe_topology **out) {
  PMOEI_TRY(topology_new(ctx, out));
  pmoe_topology *topology = *out;
  topology->stage = share(groups->stage);
  topology->dense_dp = share(groups->dense_dp);
  topology->from_host = true;
  topology->own_ep = groups->ep->nranks;
  topology->etp = groups->etp ? groups->etp->nranks : 1;
  topology->sp = groups->sp && groups->tp && groups->tp->nranks > 1;
  PMOEI_TRY(share_or_self(ctx, groups->tp, &topology->tp));
  PMOEI_TRY(share_or_self(ctx, groups->micro_batch, &topology->micro_batch));
  ep_groups *own, *alone;
  PMOEI_TRY(adopt(topology, topology->own_ep, groups->expert_dp, &own));
  if (topology->etp == 1) own->exchange = share(groups->ep);
  else if (topology->own_ep == 1) own->exchange = share(groups->etp);
  if (topology->own_ep == 1 || topology->etp > 1) return PMOE_OK;
  PMOEI_TRY(adopt(topology, 1, groups->stage, &alone));
  return pmoe_comm_self(ctx, &alone->exchange);
}

static pmoe_status join_blocks(pmoe_topology *topology, const pmoei_host_place *place) {
  static const char what[] = "pmoe_topology_from_groups";
  for (ep_groups *groups = topology->groups; groups; groups = groups->next) {
    pmoe_status status = PMOE_OK;
    if (!groups->exchange)
      status = pmoe_comm_split(topology->stage, place->block, place->ep_rank * topology->etp + place->etp_rank,
                               &groups->exchange);
    PMOEI_TRY(pmoei_comm_agree(topology->stage, what, status));
    PMOEI_TRY(compare_with_tp(topology, groups, what));
  }
  return PMOE_OK;
}

pmoe_status pmoe_topology_from_groups(pmoe_ctx *ctx, const pmoe_groups *groups, pmoe_topology **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(out);
  pmoe_groups given;
  PMOEI_TRY(pmoei_config_read(&given, sizeof given, groups, "groups"));
  pmoei_host_place place;
  PMOEI_TRY(pmoei_host_groups_check(ctx, &given, &place));
  pmoe_topology *topology = NULL;
  pmoe_status status = pmoei_comm_agree(given.stage, __func__, adopt_all(ctx, &given, &topology));
  if (status == PMOE_OK) status = join_blocks(topology, &place);
  if (status == PMOE_OK) *out = topology;
  else pmoe_topology_destroy(topology);
  return status;
}

/* ---- layers' references ---- */

static void each_group(const pmoei_layer_groups *groups, void (*visit)(pmoe_comm *comm)) {
  pmoe_comm *const comms[] = {groups->exchange, groups->expert_dp, groups->dense_dp,
                              groups->tp,       groups->stage,     groups->micro_batch};
  for (size_t i = 0; i < sizeof comms / sizeof comms[0]; i++)
    if (comms[i]) visit(comms[i]);
}

void pmoei_layer_groups_retain(const pmoei_layer_groups *groups) { each_group(groups, pmoei_comm_retain); }

void pmoei_layer_groups_release(const pmoei_layer_groups *groups) { each_group(groups, pmoei_comm_release); }
