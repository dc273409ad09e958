/* Topologies with tensor-parallel and expert-tensor-parallel groups, of real communicators. Also run under mpirun. */
#include "support/asserts.h"

#include <pmoe/pmoe.h>
#include <stdlib.h>

#include "support/ranks.h"

static int compare_ints(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

/* The communicator's members are the ranks of this rank's group, in that order or (with `sorted`) in another. */
static void check_members(rank_env *env, pmoe_comm *comm, const pmoe_topology_config *cfg, const char *group,
                          bool sorted) {
  int32_t ranks[8], members[8];
  pmoe_rank_lists lists = {0, 0, ranks};
  check_ok(pmoe_topology_ranks(env->nranks, cfg, group, &lists));
  check(pmoe_comm_size(comm) == lists.group_size);
  check_ok(pmoe_comm_allgather(comm, &env->rank, members, sizeof env->rank));
  check(members[pmoe_comm_rank(comm)] == env->rank);
  size_t n = (size_t)lists.group_size;
  for (int32_t i = 0; i < env->nranks; i++) {
    if (ranks[i] != env->rank) continue;
    int32_t *first = ranks + i / lists.group_size * lists.group_size;
    if (sorted) qsort(members, n, sizeof *members, compare_ints), qsort(first, n, sizeof *first, compare_ints);
    check(memcmp(members, first, n * sizeof *first) == 0);
    return;
  }
}

/* In the exchange group the shards of one expert are neighbours: rank ep_rank * etp + etp_rank. */
static void check_order(rank_env *env, pmoe_comm *exchange, const pmoe_topology_config *cfg) {
  int32_t ep[8], etp[8];
  pmoe_rank_lists ep_lists = {0, 0, ep}, etp_lists = {0, 0, etp};
  check_ok(pmoe_topology_ranks(env->nranks, cfg, "ep", &ep_lists));
  check_ok(pmoe_topology_ranks(env->nranks, cfg, "expt_tp", &etp_lists));
  int32_t ep_rank = -1, etp_rank = -1;
  for (int32_t i = 0; i < env->nranks; i++) {
    if (ep[i] == env->rank) ep_rank = i % ep_lists.group_size;
    if (etp[i] == env->rank) etp_rank = i % etp_lists.group_size;
  }
  check(pmoe_comm_rank(exchange) == ep_rank * etp_lists.group_size + etp_rank);
}

static void create(rank_env *env, void *arg) {
  const pmoe_topology_config *cfg = arg;
  pmoe_topology *topology = NULL;
  pmoe_comm *exchange, *expert_dp, *dense_dp, *tp, *stage;
  check_ok(pmoe_topology_create(env->ctx, env->world, cfg, &topology));
  check_ok(pmoe_topology_groups(topology, 0, &exchange, &expert_dp, &dense_dp));
  check_ok(pmoe_topology_stage(topology, &tp, &stage));
  check_members(env, exchange, cfg, "tp_ep", true);
  check_members(env, expert_dp, cfg, "expt_dp", false);
  check_members(env, dense_dp, cfg, "dp_cp", false);
  check_members(env, tp, cfg, "tp", false);
  check_members(env, stage, cfg, "tp_dp_cp", false);
  check_order(env, exchange, cfg);
  /* Another size in the same topology: as large as the stage allows. */
  pmoe_topology_config widest = *cfg;
  widest.ep = pmoe_comm_size(stage) / (cfg->etp ? cfg->etp : 1);
  check_ok(pmoe_topology_groups(topology, widest.ep, &exchange, &expert_dp, NULL));
  check_members(env, exchange, &widest, "tp_ep", true);
  check_order(env, exchange, &widest);
  check(pmoe_comm_size(expert_dp) == 1);
  pmoe_comm *untouched = NULL;
  check_refused(pmoe_topology_groups(topology, 64, &untouched, NULL, NULL), PMOE_ERR_ARG, "ep is 64");
  check_refused(pmoe_topology_stage(NULL, &untouched, NULL), PMOE_ERR_ARG, "topology is NULL");
  check(untouched == NULL);
  check_ok(pmoe_topology_stage(topology, NULL, NULL));
  pmoe_topology_destroy(topology);
}

static void test_create(void **state) {
  (void)state;
  static const struct {
    int32_t world, tp, cp, pp, ep, etp;
    const char *order;
  } cases[] = {{2, 2, 1, 1, 1, 1, NULL},
               {2, 2, 1, 1, 2, 1, NULL},
               {2, 2, 1, 1, 1, 2, NULL},
               {2, 1, 1, 1, 1, 2, NULL},
               {4, 2, 1, 1, 2, 2, NULL},
               {4, 2, 1, 2, 2, 1, NULL},
               {4, 2, 2, 1, 2, 2, "ep-tp-cp-dp-pp"},
               {4, 4, 1, 1, 2, 2, "ep-cp-dp-tp-pp"},
               {8, 2, 2, 1, 2, 2, NULL},
               {8, 2, 2, 2, 2, 2, NULL},
               {8, 4, 1, 1, 2, 2, "dp-ep-tp-cp-pp"},
               {8, 2, 1, 1, 2, 2, "cp-dp-tp-ep-pp"},
               {8, 2, 1, 2, 2, 1, "pp-ep-dp-tp-cp"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
    cfg.tp = cases[i].tp;
    cfg.cp = cases[i].cp;
    cfg.pp = cases[i].pp;
    cfg.ep = cases[i].ep;
    cfg.etp = cases[i].etp;
    cfg.order = cases[i].order;
    run_ranks(cases[i].world, create, &cfg);
    run_ranks_with(&(ranks_config){.nranks = cases[i].world, .transport = RANKS_CALLBACKS}, create, &cfg);
  }
}

static void disagree(rank_env *env, void *arg) {
  (void)arg;
  bool odd = env->rank == 1;
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  pmoe_topology *topology = NULL;
  cfg.tp = 2;
  cfg.sp = odd;
  check_refused(pmoe_topology_create(env->ctx, env->world, &cfg, &topology), PMOE_ERR_MISMATCH, "sp 1");
  cfg.sp = 0;
  cfg.etp = odd ? 2 : 1;
  check_refused(pmoe_topology_create(env->ctx, env->world, &cfg, &topology), PMOE_ERR_MISMATCH, "etp 2");
  check(topology == NULL);
}

static void test_disagreement(void **state) {
  (void)state;
  run_ranks(2, disagree, NULL);
}

/* ---- the host's groups ---- */

enum { EP, EXPERT_DP, DENSE_DP, TP, ETP, STAGE, MICRO_BATCH, KINDS };

/* Colour and key of each rank in each group; a colour of -1: NULL is given. */
typedef struct host_case {
  int32_t world;
  int32_t color[KINDS][8], key[KINDS][8];
  int32_t splits_batch; /* a micro_batch group is given */
  int32_t odd_sp;       /* rank 1 says sp */
  const char *word;     /* NULL: good */
  pmoe_status status;
} host_case;

static void from_groups(rank_env *env, void *arg) {
  const host_case *c = arg;
  pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
  pmoe_comm **comms[KINDS] = {&groups.ep,  &groups.expert_dp, &groups.dense_dp,   &groups.tp,
                              &groups.etp, &groups.stage,     &groups.micro_batch};
  for (int k = 0; k < (c->splits_batch ? KINDS : MICRO_BATCH); k++)
    check_ok(pmoe_comm_split(env->world, c->color[k][env->rank], c->key[k][env->rank], comms[k]));
  groups.sp = c->odd_sp && env->rank == 1;
  pmoe_topology *topology = NULL;
  pmoe_status status = pmoe_topology_from_groups(env->ctx, &groups, &topology);
  if (c->word) check_refused(status, c->status, c->word);
  else check_ok(status);
  check((topology != NULL) == (status == PMOE_OK));
  if (topology) {
    pmoe_comm *exchange, *tp, *stage, *none = NULL;
    check_ok(pmoe_topology_groups(topology, 0, &exchange, NULL, NULL));
    check(pmoe_comm_size(exchange) == pmoe_comm_size(groups.ep) * (groups.etp ? pmoe_comm_size(groups.etp) : 1));
    check_ok(pmoe_topology_stage(topology, &tp, &stage));
    check(pmoe_comm_size(tp) == (groups.tp ? pmoe_comm_size(groups.tp) : 1));
    check(stage == (groups.stage ? groups.stage : groups.dense_dp));
    if (groups.etp && pmoe_comm_size(groups.etp) > 1 && pmoe_comm_size(groups.ep) > 1)
      check_refused(pmoe_topology_groups(topology, 1, &none, NULL, NULL), PMOE_ERR_ARG, "ep is 1");
  }
  for (int k = 0; k < KINDS; k++) pmoe_comm_destroy(*comms[k]);
  pmoe_topology_destroy(topology);
}

#define NONE                                                                                                           \
  { -1, -1, -1, -1, -1, -1, -1, -1 }
#define MISMATCH(text) .status = PMOE_ERR_MISMATCH, .word = (text)

static const host_case host_cases[] = {
    /* ep 2 and etp 2 cross; tp is etp; two copies of dense shards */
    {4, {{0, 1, 0, 1}, {0, 1, 2, 3}, {0, 1, 0, 1}, {0, 0, 1, 1}, {0, 0, 1, 1}, {0}}, .word = NULL},
    /* tp alone, the experts whole and copied everywhere */
    {4, {{0, 1, 2, 3}, {0}, {0, 1, 0, 1}, {0, 0, 1, 1}, NONE, {0}}, .word = NULL},
    /* etp alone */
    {4, {{0, 1, 2, 3}, {0, 1, 0, 1}, {0}, NONE, {0, 0, 1, 1}, NONE}, .word = NULL},
    {4,
     {{0, 1, 0, 1}, {0, 1, 2, 3}, {0, 1, 0, 1}, {0, 0, 1, 1}, {0, 0, 1, 1}, {0}},
     .odd_sp = 1,
     MISMATCH("groups->sp is 0 on rank 0 and 1 on rank 1 of the stage")},
    {4,
     {{0, 1, 0, 1}, {0, 1, 2, 3}, {0, 1, 0, 1}, {0, 0, 1, 1}, {0, 0, 1, 1}, NONE},
     .status = PMOE_ERR_ARG,
     .word = "groups->stage is dense_dp"},
    {3,
     {{0, 1, 2}, {0}, {0, 1, 0}, {0, 0, 1}, NONE, {0}},
     MISMATCH("rank 0 of the stage is in a tp group of 2 ranks, but rank 2 in one of 1")},
    {3,
     {{0, 1, 2}, {0, 1, 0}, {0}, NONE, {0, 0, 1}, NONE},
     MISMATCH("rank 0 of dense_dp is in an etp group of 2 ranks, but rank 2 in one of 1")},
    /* dense_dp joins different places of tp groups */
    {4,
     {{0, 1, 2, 3}, {0}, {0, 1, 1, 0}, {0, 0, 1, 1}, NONE, {0}},
     MISMATCH("ranks 1 and 2 of the stage share a dense_dp group, but have places 1 and 0 in their tp groups")},
    {4,
     {{0, 1, 2, 3}, {0}, {0, 1, 2, 3}, {0, 0, 1, 1}, NONE, {0}},
     MISMATCH("ranks 0 and 2 of the stage have place 0 in their tp groups, but share no dense_dp group")},
    /* ep groups that join different shards */
    {4,
     {{0, 1, 1, 0}, {0, 1, 2, 3}, {0}, NONE, {0, 0, 1, 1}, NONE},
     MISMATCH("ranks 1 and 2 of dense_dp share an ep group, but have places 1 and 0 in their etp groups")},
    /* experts whose shards are in different places */
    {4,
     {{0, 1, 0, 1}, {0, 1, 2, 3}, {0}, NONE, {0, 0, 1, 1}, NONE},
     {{0, 1, 1, 0}},
     MISMATCH("ranks 0 and 1 of dense_dp share an etp group, but have places 0 and 1 in their ep groups")},
    /* two blocks of four; the ep groups of the second shards go from one block to the other */
    {8,
     {{0, 1, 0, 2, 3, 2, 3, 1}, {0, 1, 2, 3, 0, 1, 2, 3}, {0}, NONE, {0, 0, 1, 1, 2, 2, 3, 3}, NONE},
     {{0, 0, 1, 1, 0, 0, 1, 1}},
     MISMATCH("in their etp groups do not share one")},
    {8,
     {{0, 1, 0, 1, 2, 3, 2, 3}, {0, 1, 2, 3, 4, 1, 2, 3}, {0}, NONE, {0, 0, 1, 1, 2, 2, 3, 3}, NONE},
     MISMATCH("ranks 0 and 4 of dense_dp have place 0 in their ep groups and 0 in their etp groups, but share no "
              "expert_dp group")},
    {8,
     {{0, 1, 0, 1, 2, 3, 2, 3}, {0, 1, 2, 3, 1, 0, 2, 3}, {0}, NONE, {0, 0, 1, 1, 2, 2, 3, 3}, NONE},
     MISMATCH("ranks 1 and 4 of dense_dp share an expert_dp group, but have places 1 and 0 in their etp groups")},
};

/* A micro-batch is of whole tp groups; only its colours differ from the first good case. */
static void test_micro_batches(void **state) {
  (void)state;
  host_case c = host_cases[1];
  c.splits_batch = 1;
  static const int32_t whole[] = {0, 0, 0, 0}, apart[] = {0, 0, 1, 1}, across[] = {0, 1, 0, 1}, uneven[] = {0, 0, 0, 1};
  memcpy(c.color[MICRO_BATCH], whole, sizeof whole);
  run_ranks(4, from_groups, &c);
  memcpy(c.color[MICRO_BATCH], apart, sizeof apart);
  run_ranks(4, from_groups, &c);
  c.status = PMOE_ERR_MISMATCH;
  c.word = "ranks 0 and 1 of the stage share a tp group, but no micro_batch group";
  memcpy(c.color[MICRO_BATCH], across, sizeof across);
  run_ranks(4, from_groups, &c);
  c.word = "rank 0 of the stage is in a micro_batch group of 3 ranks, but rank 3 in one of 1";
  memcpy(c.color[MICRO_BATCH], uneven, sizeof uneven);
  run_ranks(4, from_groups, &c);
}

/* ---- lists of ranks ---- */

static void lists(rank_env *env, void *arg) {
  (void)arg;
  static const int32_t good[4][2] = {{0, 3}, {2, 1}, {2, 1}, {0, 3}}, whole[] = {3, 1, 0, 2};
  pmoe_comm *comm = NULL, *none = NULL;
  check_ok(pmoe_comm_split_ranks(env->world, good[env->rank], 2, &comm));
  check(pmoe_comm_size(comm) == 2 && pmoe_comm_rank(comm) == (env->rank == 1 || env->rank == 3));
  pmoe_comm_destroy(comm);
  check_ok(pmoe_comm_split_ranks(env->world, whole, 4, &comm));
  check(whole[pmoe_comm_rank(comm)] == env->rank);
  pmoe_comm_destroy(comm);
  bool odd = env->rank == 3;
  /* Rank 3 thinks that it is with 1, who is with 2; or with 0 in the other order. */
  static const int32_t wrong[] = {1, 3}, turned[] = {3, 0};
  pmoe_status status = pmoe_comm_split_ranks(env->world, odd ? wrong : good[env->rank], 2, &none);
  if (odd) check_refused(status, PMOE_ERR_MISMATCH, "rank 3 names rank 1");
  else check(status == (env->rank == 0 ? PMOE_ERR_MISMATCH : PMOE_ERR_COMM));
  status = pmoe_comm_split_ranks(env->world, odd ? turned : good[env->rank], 2, &none);
  if (env->rank == 0) check_refused(status, PMOE_ERR_MISMATCH, "rank 0 names rank 3");
  else check(status != PMOE_OK);
  static const int32_t twice[] = {3, 3}, far[] = {3, 4}, other[] = {0, 1};
  const struct {
    const int32_t *ranks;
    int32_t n;
    const char *word;
  } bad[] = {{twice, 2, "are both 3"}, {far, 2, "ranks[1] is 4"}, {other, 2, "does not name this rank"},
             {wrong, 0, "n is 0"},     {wrong, 5, "n is 5"},      {NULL, 2, "ranks is NULL"}};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    status = pmoe_comm_split_ranks(env->world, odd ? bad[i].ranks : good[env->rank], odd ? bad[i].n : 2, &none);
    check_refused(status, odd ? PMOE_ERR_ARG : PMOE_ERR_COMM, bad[i].word);
  }
  status = pmoe_comm_split_ranks(env->world, good[env->rank], 2, odd ? NULL : &none);
  check_refused(status, odd ? PMOE_ERR_ARG : PMOE_ERR_COMM, "out is NULL");
  check_refused(pmoe_comm_split_ranks(NULL, good[0], 2, &none), PMOE_ERR_ARG, "comm is NULL");
  check(none == NULL);
}

static void test_lists_of_ranks(void **state) {
  (void)state;
  run_ranks(4, lists, NULL);
  run_ranks_with(&(ranks_config){.nranks = 4, .transport = RANKS_CALLBACKS}, lists, NULL);
}

static void test_from_groups(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof host_cases / sizeof host_cases[0]; i++) {
    host_case c = host_cases[i];
    run_ranks(c.world, from_groups, &c);
  }
}

static void bad_arguments(rank_env *env, void *arg) {
  (void)arg;
  pmoe_topology *topology = NULL;
  pmoe_comm *self = NULL;
  check_ok(pmoe_comm_self(env->ctx, &self));
  pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
  groups.ep = groups.expert_dp = groups.dense_dp = env->world;
  groups.sp = 2;
  check_refused(pmoe_topology_from_groups(env->ctx, &groups, &topology), PMOE_ERR_ARG, "groups->sp is 2");
  groups.sp = 0;
  groups.tp = env->world;
  check_refused(pmoe_topology_from_groups(env->ctx, &groups, &topology), PMOE_ERR_ARG, "groups->tp has 2 ranks");
  check(topology == NULL);
  /* Rank 0 has no memory, at every place. */
  groups = (pmoe_groups)PMOE_CONFIG_INIT(pmoe_groups);
  groups.ep = groups.expert_dp = groups.dense_dp = self;
  groups.tp = groups.etp = groups.stage = env->world;
  pmoe_status status = PMOE_ERR_NOMEM;
  int32_t refused = 0;
  for (int32_t n = 1; status != PMOE_OK && n < 20; n++) {
    if (env->rank == 0) env->memory->fail_at = env->memory->calls + n;
    status = pmoe_topology_from_groups(env->ctx, &groups, &topology);
    env->memory->fail_at = 0;
    refused += status != PMOE_OK;
    if (status != PMOE_OK) check_status(status, env->rank == 0 ? PMOE_ERR_NOMEM : PMOE_ERR_COMM);
    check((topology != NULL) == (status == PMOE_OK));
  }
  check(topology != NULL);
  check(refused >= 2);
  pmoe_topology_destroy(topology);
  pmoe_comm_destroy(self);
}

static void test_bad_arguments(void **state) {
  (void)state;
  run_ranks(2, bad_arguments, NULL);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_create),         cmocka_unit_test(test_disagreement),
                                     cmocka_unit_test(test_from_groups),    cmocka_unit_test(test_micro_batches),
                                     cmocka_unit_test(test_lists_of_ranks), cmocka_unit_test(test_bad_arguments)};
  ranks_begin(&argc, &argv);
  return ranks_end(cmocka_run_group_tests(tests, NULL, NULL));
}
