#include "a2a/host_groups.h"

#include <stdio.h>
#include <string.h>

#include "a2a/rank_grid.h"
#include "a2a/transport.h"
#include "core/config.h"

/* The two groups of one expert-parallel size. */
typedef struct ep_groups {
  int32_t ep;
  pmoe_comm *ep_comm, *expert_dp;
  struct ep_groups *next;
} ep_groups;

struct pmoe_topology {
  pmoe_ctx *ctx;
  pmoe_comm *stage; /* ranks of this pipeline stage; without tensor parallelism they all see different tokens */
  bool from_host;   /* no size can be added */
  bool dp_first;    /* the expert-data-parallel coordinate varies faster than the expert-parallel one */
  int32_t own_ep;
  ep_groups *groups;
};

static void destroy_groups(pmoe_ctx *ctx, ep_groups *groups) {
  pmoei_comm_release(groups->ep_comm);
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

/* A part of the stage: itself, this rank alone, or a new communicator. */
static pmoe_status take_part(pmoe_topology *topology, int32_t size, int32_t color, int32_t key, pmoe_comm **out) {
  if (size == 1) return pmoe_comm_self(topology->ctx, out);
  if (size < topology->stage->nranks) return pmoe_comm_split(topology->stage, color, key, out);
  *out = share(topology->stage);
  return PMOE_OK;
}

static pmoe_status fill_groups(pmoe_topology *topology, ep_groups *groups) {
  int32_t ep = groups->ep, edp = topology->stage->nranks / ep, rank = topology->stage->rank;
  int32_t ep_rank = topology->dp_first ? rank / edp : rank % ep, edp_rank = topology->dp_first ? rank % edp : rank / ep;
  PMOEI_TRY(take_part(topology, ep, edp_rank, ep_rank, &groups->ep_comm));
  return take_part(topology, edp, ep_rank, edp_rank, &groups->expert_dp);
}

static pmoe_status prepare_groups(pmoe_topology *topology, int32_t ep, ep_groups **out) {
  PMOEI_REQUIRE(topology->stage->nranks % ep == 0, "ep is %d; a divisor of the %d ranks of dense_dp was expected", ep,
                topology->stage->nranks);
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

pmoe_status pmoe_topology_groups(pmoe_topology *topology, int32_t ep, pmoe_comm **ep_comm, pmoe_comm **expert_dp,
                                 pmoe_comm **dense_dp) {
  PMOEI_REQUIRE_POINTER(topology);
  PMOEI_REQUIRE(ep >= 0, "ep is %d; 0 or more was expected", ep);
  ep_groups *groups = find_groups(topology, ep > 0 ? ep : topology->own_ep);
  PMOEI_REQUIRE(groups || !topology->from_host, "ep is %d; this topology has the host's groups for %d, and 1", ep,
                topology->own_ep);
  if (!groups) PMOEI_TRY(add_groups(topology, ep, &groups));
  if (ep_comm) *ep_comm = groups->ep_comm;
  if (expert_dp) *expert_dp = groups->expert_dp;
  if (dense_dp) *dense_dp = topology->stage;
  return PMOE_OK;
}

static int32_t place_in_order(const pmoei_rank_grid *grid, pmoei_axis axis) {
  int32_t i = 0;
  while (grid->order[i] != axis) i++;
  return i;
}

static pmoe_status prepare(pmoe_ctx *ctx, const pmoe_comm *world, const pmoe_topology_config *cfg, pmoe_topology **out,
                           pmoei_rank_grid *grid, pmoe_topology **topology) {
  PMOEI_REQUIRE_POINTER(out);
  PMOEI_TRY(pmoei_rank_grid_make(world->nranks, cfg, grid));
  int32_t tp = grid->dense[PMOEI_AXIS_TP], etp = grid->expert[PMOEI_AXIS_TP];
  if (tp > 1) return pmoei_error(PMOE_ERR_UNSUPPORTED, "cfg->tp is %d; only 1 is supported", tp);
  if (etp > 1) return pmoei_error(PMOE_ERR_UNSUPPORTED, "cfg->etp is %d; only 1 is supported", etp);
  PMOEI_TRY(topology_new(ctx, topology));
  (*topology)->own_ep = grid->expert[PMOEI_AXIS_EP];
  (*topology)->dp_first = place_in_order(grid, PMOEI_AXIS_DP) < place_in_order(grid, PMOEI_AXIS_EP);
  return PMOE_OK;
}

/* Ranks with other sizes or orders show as ranks in another call, with both texts. */
static pmoe_status agree_on_grid(pmoe_comm *world, const pmoei_rank_grid *grid) {
  static const char *const names[PMOEI_AXES] = {"tp", "cp", "ep", "dp", "pp"};
  char what[PMOEI_WHAT_BYTES];
  int length = snprintf(what, sizeof what, "pmoe_topology_create(cp %d, ep %d, pp %d, ", grid->dense[PMOEI_AXIS_CP],
                        grid->expert[PMOEI_AXIS_EP], grid->dense[PMOEI_AXIS_PP]);
  for (int i = 0; i < PMOEI_AXES; i++)
    length += snprintf(what + length, sizeof what - (size_t)length, "%s%s", names[grid->order[i]],
                       i + 1 < PMOEI_AXES ? "-" : ")");
  return pmoei_comm_agree(world, what, PMOE_OK);
}

static pmoe_status connect(pmoe_topology *topology, pmoe_comm *world, const pmoei_rank_grid *grid) {
  PMOEI_TRY(agree_on_grid(world, grid));
  if (grid->dense[PMOEI_AXIS_PP] == 1) topology->stage = share(world);
  else {
    int32_t stage = pmoei_rank_grid_coordinate(grid, grid->dense, PMOEI_AXIS_PP, world->rank);
    PMOEI_TRY(pmoe_comm_split(world, stage, world->rank, &topology->stage));
  }
  ep_groups *groups;
  pmoe_status status = add_groups(topology, topology->own_ep, &groups);
  return pmoei_comm_agree(world, "pmoe_topology_create", status);
}

pmoe_status pmoe_topology_create(pmoe_ctx *ctx, pmoe_comm *world, const pmoe_topology_config *cfg,
                                 pmoe_topology **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(world);
  pmoei_rank_grid grid;
  pmoe_topology *topology = NULL;
  pmoe_status status = pmoei_comm_agree(world, __func__, prepare(ctx, world, cfg, out, &grid, &topology));
  if (status == PMOE_OK) status = connect(topology, world, &grid);
  if (status == PMOE_OK) *out = topology;
  else pmoe_topology_destroy(topology);
  return status;
}

static pmoe_status adopt(pmoe_topology *topology, int32_t ep, pmoe_comm *ep_comm, pmoe_comm *expert_dp) {
  ep_groups *groups = NULL;
  PMOEI_TRY(pmoei_alloc(topology->ctx, sizeof *groups, "expert-parallel groups", &groups));
  *groups = (ep_groups){ep, ep_comm ? share(ep_comm) : NULL, share(expert_dp), topology->groups};
  topology->groups = groups;
  return ep_comm ? PMOE_OK : pmoe_comm_self(topology->ctx, &groups->ep_comm);
}

static pmoe_status adopt_all(pmoe_ctx *ctx, const pmoe_groups *groups, pmoe_topology **out) {
  PMOEI_TRY(topology_new(ctx, out));
  pmoe_topology *topology = *out;
  topology->stage = share(groups->dense_dp);
  topology->from_host = true;
  topology->own_ep = groups->ep->nranks;
  PMOEI_TRY(adopt(topology, topology->own_ep, groups->ep, groups->expert_dp));
  return topology->own_ep == 1 ? PMOE_OK : adopt(topology, 1, NULL, groups->dense_dp);
}

pmoe_status pmoe_topology_from_groups(pmoe_ctx *ctx, const pmoe_groups *groups, pmoe_topology **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(out);
  pmoe_groups given;
  PMOEI_TRY(pmoei_config_read(&given, sizeof given, groups, "groups"));
  PMOEI_TRY(pmoei_host_groups_check(ctx, &given));
  pmoe_topology *topology = NULL;
  pmoe_status status = pmoei_comm_agree(given.dense_dp, __func__, adopt_all(ctx, &given, &topology));
  if (status == PMOE_OK) *out = topology;
  else pmoe_topology_destroy(topology);
  return status;
}
