#ifndef PMOEI_HOST_GROUPS_H
#define PMOEI_HOST_GROUPS_H
#include <pmoe/ctx.h>
#include <pmoe/topology.h>

/* This rank's place among those that hold all experts together: `block` tells their blocks apart. */
typedef struct pmoei_host_place {
  int32_t block, ep_rank, etp_rank;
} pmoei_host_place;

/* Collective over the stage and every group in it. ERR_MISMATCH with two ranks that disagree, unless the groups are as
 * pmoe_topology_from_groups wants them. Sets groups->stage where it is NULL. */
pmoe_status pmoei_host_groups_check(pmoe_ctx *ctx, pmoe_groups *groups, pmoei_host_place *place);

#endif
