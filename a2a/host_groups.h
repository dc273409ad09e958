#ifndef PMOEI_HOST_GROUPS_H
#define PMOEI_HOST_GROUPS_H
#include <pmoe/ctx.h>
#include <pmoe/topology.h>

/* Collective over groups->dense_dp, ep and expert_dp. ERR_MISMATCH with two ranks that disagree, unless inside dense_dp
 * the ep groups are a partition into equal sizes and every expert_dp group holds exactly one rank of each, at the same
 * place. */
pmoe_status pmoei_host_groups_check(pmoe_ctx *ctx, const pmoe_groups *groups);

#endif
