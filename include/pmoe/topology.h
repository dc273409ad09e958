/* Topology: which ranks share experts (EP) and which hold copies of the same experts (EDP), derived from sizes or taken
 * from the host's own groups. Layers ask it for their groups; layers with the same EP size share communicators. */
#ifndef PMOE_TOPOLOGY_H
#define PMOE_TOPOLOGY_H
#include <pmoe/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sizes of the host's groups; 0 means 1. What the sizes leave over is data parallel. */
typedef struct pmoe_topology_config {
  size_t size;
  int32_t tp, cp, pp; /* tensor, context, pipeline parallel */
  int32_t ep, etp;    /* expert parallel, expert tensor parallel; etp need not be tp */
  const char *order;  /* mixed radix, first token varies fastest; NULL: "tp-cp-ep-dp-pp" */
  /* Sequence parallel, for tp > 1. 0: the ranks of a TP group hand every layer the same tokens. 1: each brings its own.
   */
  int32_t sp;
} pmoe_topology_config;

/* `num_groups` groups of `group_size` global ranks, group after group; the array is the caller's. */
typedef struct pmoe_rank_lists {
  int32_t num_groups, group_size;
  int32_t *ranks; /* [num_groups * group_size], world entries */
} pmoe_rank_lists;

/* Pure arithmetic, no communicator. group is a dense one ("tp" "cp" "dp" "pp" "dp_cp" "tp_cp" "tp_dp" "tp_dp_cp" "mp")
 * or an expert one ("ep" "expt_tp" "expt_dp" "tp_ep" "tp_ep_pp"). The dense grid is (tp, cp, dp, pp); the expert grid
 * uses the same order with tp -> etp, cp -> 1 and dp -> edp. Rule: Megatron-LM megatron/core/parallel_state.py.
 * out->ranks must have room for `world` entries. ERR_ARG for sizes or orders that form no grid, with the reason. */
PMOE_API pmoe_status pmoe_topology_ranks(int32_t world, const pmoe_topology_config *cfg, const char *group,
                                         pmoe_rank_lists *out);

/* Collective over world. cfg NULL: all ranks data parallel, ep = 1. World must outlive nothing: what is needed is kept.
 */
PMOE_API pmoe_status pmoe_topology_create(pmoe_ctx *ctx, pmoe_comm *world, const pmoe_topology_config *cfg,
                                          pmoe_topology **out);

/* The host's own groups, borrowed until the topology ends. What is NULL has one rank; stage NULL: dense_dp.
 *
 *   stage        the ranks of one pipeline stage
 *   tp           inside it a partition into equal sizes
 *   dense_dp     one rank of each tp group, at the same place in every one
 *   ep, etp      partitions into equal sizes that cross: an etp group is at one place of its ep groups, and vice versa;
 *                an etp group and the ep groups through it hold all experts
 *   expert_dp    one rank of each such block, at the same place in every one
 *   micro_batch  the ranks that share the tokens of one micro-batch (TP x CP), whole tp groups; the router's losses are
 *                taken over them. NULL: tp
 *
 * Communicators come from the host's by pmoe_comm_from_mpi, _from_callbacks or, from lists of ranks,
 * pmoe_comm_split_ranks. Collective over the stage: checked, and refused with the two ranks that disagree
 * (ERR_MISMATCH). With ep > 1 and etp > 1 a communicator for each block is split from the stage's. */
typedef struct pmoe_groups {
  size_t size;
  pmoe_comm *ep, *expert_dp, *dense_dp;
  pmoe_comm *tp, *etp, *stage;
  int32_t sp; /* as in pmoe_topology_config */
  pmoe_comm *micro_batch;
} pmoe_groups;
PMOE_API pmoe_status pmoe_topology_from_groups(pmoe_ctx *ctx, const pmoe_groups *groups, pmoe_topology **out);

/* Collective over the stage the first time a size is asked for. The groups of a layer whose expert-parallel size is
 * `ep` (0: the topology's own), borrowed; later calls with the same size give the same communicators. ep_comm: the
 * ranks that together hold all experts (EP x ETP), an expert's shards side by side. expert_dp: those that hold the same
 * shards of the same experts. dense_dp: those that hold the same shard of dense parameters (all ranks of the stage
 * without TP). A topology made from the host's groups knows its own size only, and without ETP 1. ep * etp must divide
 * the size of the stage. Any of the outputs may be NULL. */
PMOE_API pmoe_status pmoe_topology_groups(pmoe_topology *topology, int32_t ep, pmoe_comm **ep_comm,
                                          pmoe_comm **expert_dp, pmoe_comm **dense_dp);
/* The tensor-parallel group (of one rank without TP) and the stage, borrowed. Either output may be NULL. */
PMOE_API pmoe_status pmoe_topology_stage(const pmoe_topology *topology, pmoe_comm **tp, pmoe_comm **stage);

/* Experts are owned in contiguous blocks of global ids whose sizes differ by at most one, larger blocks first; a block
 * may be empty. Block `rank` of num_experts over ep ranks. */
PMOE_API pmoe_status pmoe_expert_block(int32_t num_experts, int32_t ep, int32_t rank, int32_t *first, int32_t *count);

/* NULL is allowed. Layers made from it keep what they need. */
PMOE_API void pmoe_topology_destroy(pmoe_topology *topology);

#ifdef __cplusplus
}
#endif
#endif
