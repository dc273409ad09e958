/* What a layer takes from a topology. */
#ifndef PMOEI_TOPOLOGY_H
#define PMOEI_TOPOLOGY_H
#include <pmoe/topology.h>
#include <stdbool.h>

#include "a2a/transport.h"

/* Borrowed communicators; a group of one where there is none. */
typedef struct pmoei_layer_groups {
  pmoe_comm *exchange;                 /* EP x ETP: rank ep_rank * etp + etp_rank */
  pmoe_comm *expert_dp, *dense_dp;     /* copies of the same experts' shards; of the same shard of dense parameters */
  pmoe_comm *tp, *stage, *micro_batch; /* micro_batch: ranks that share a micro-batch's tokens */
  int32_t etp;
  bool sp;                 /* the ranks of tp bring different tokens */
  bool tp_inside_exchange; /* whoever is in this rank's TP group is in its exchange group too */
} pmoei_layer_groups;

/* As pmoe_topology_groups. The layer retains what it gets. */
pmoe_status pmoei_topology_layer_groups(pmoe_topology *topology, int32_t ep, pmoei_layer_groups *out);
void pmoei_layer_groups_retain(const pmoei_layer_groups *groups);
void pmoei_layer_groups_release(const pmoei_layer_groups *groups);

#endif
