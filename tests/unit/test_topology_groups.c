/* Topologies of real communicators. Also run under mpirun. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pmoe/pmoe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/ranks.h"

/* The communicator's members are the ranks of this rank's group, in that order. */
static void check_members(rank_env *env, pmoe_comm *comm, const pmoe_topology_config *cfg, const char *group) {
  int32_t ranks[16], members[16];
  pmoe_rank_lists lists = {0, 0, ranks};
  check_ok(pmoe_topology_ranks(env->nranks, cfg, group, &lists));
  check(pmoe_comm_size(comm) == lists.group_size);
  check_ok(pmoe_comm_allgather(comm, &env->rank, members, sizeof env->rank));
  for (int32_t i = 0; i < env->nranks; i++)
    if (ranks[i] == env->rank) {
      int32_t first = i / lists.group_size * lists.group_size;
      check(memcmp(members, ranks + first, (size_t)lists.group_size * sizeof *ranks) == 0);
      check(pmoe_comm_rank(comm) == i - first);
    }
}

static void create(rank_env *env, void *arg) {
  const pmoe_topology_config *cfg = arg;
  pmoe_topology *topology = NULL;
  pmoe_comm *ep = NULL, *expert_dp = NULL, *dense_dp = NULL, *again = NULL;
  check_ok(pmoe_topology_create(env->ctx, env->world, cfg, &topology));
  pmoe_comm_destroy(env->world); /* what is needed is kept */
  env->world = NULL;
  check_ok(pmoe_topology_groups(topology, 0, &ep, &expert_dp, &dense_dp));
  check_members(env, ep, cfg, "ep");
  check_members(env, expert_dp, cfg, "expt_dp");
  check_members(env, dense_dp, cfg, "dp_cp");
  check_ok(pmoe_topology_groups(topology, cfg->ep, &again, NULL, NULL));
  check(again == ep);
  check_ok(pmoe_topology_groups(topology, 0, NULL, NULL, NULL));
  pmoe_topology_destroy(topology);
}

static void test_create(void **state) {
  (void)state;
  static const struct {
    int32_t world, cp, pp, ep;
    const char *order;
  } cases[] = {{1, 1, 1, 1, NULL},
               {2, 1, 1, 2, NULL},
               {2, 1, 2, 1, NULL},
               {4, 1, 1, 2, NULL},
               {4, 2, 1, 4, NULL},
               {4, 1, 2, 2, NULL},
               {4, 1, 1, 1, NULL},
               {4, 1, 1, 2, "tp-cp-dp-ep-pp"},
               {4, 1, 2, 2, "pp-dp-ep-cp-tp"},
               {8, 2, 2, 2, NULL},
               {8, 1, 1, 4, NULL},
               {8, 2, 2, 2, "tp-cp-ep-pp-dp"},
               {8, 1, 2, 2, "dp-ep-pp"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
    cfg.cp = cases[i].cp;
    cfg.pp = cases[i].pp;
    cfg.ep = cases[i].ep;
    cfg.order = cases[i].order;
    run_ranks(cases[i].world, create, &cfg);
    run_ranks_with(&(ranks_config){.nranks = cases[i].world, .transport = RANKS_CALLBACKS}, create, &cfg);
  }
}

/* Layers of several expert-parallel sizes share communicators by size. */
static void pyramid(rank_env *env, void *arg) {
  pmoe_topology_config cfg = *(pmoe_topology_config *)arg;
  pmoe_topology *topology = NULL;
  pmoe_comm *ep[9] = {NULL}, *expert_dp[9] = {NULL}, *dense[9] = {NULL}, *again = NULL;
  int32_t stage = env->nranks / (cfg.pp ? cfg.pp : 1);
  check_ok(pmoe_topology_create(env->ctx, env->world, &cfg, &topology));
  for (int round = 0; round < 2; round++)
    for (int32_t size = stage; size >= 1; size--) {
      if (stage % size != 0) {
        check_refused(pmoe_topology_groups(topology, size, &again, NULL, NULL), PMOE_ERR_ARG, "a divisor of the");
        check(again == NULL);
        continue;
      }
      int64_t calls = env->memory->calls;
      pmoe_comm *e, *x, *d;
      check_ok(pmoe_topology_groups(topology, size, &e, &x, &d));
      check(round == 0 || (e == ep[size] && x == expert_dp[size] && d == dense[size] && env->memory->calls == calls));
      ep[size] = e;
      expert_dp[size] = x;
      dense[size] = d;
      cfg.ep = size;
      check_members(env, e, &cfg, "ep");
      check_members(env, x, &cfg, "expt_dp");
      check_members(env, d, &cfg, "dp_cp");
    }
  check_refused(pmoe_topology_groups(topology, -1, &again, NULL, NULL), PMOE_ERR_ARG, "ep is -1");
  check(again == NULL);
  pmoe_topology_destroy(topology);
}

static void test_pyramid(void **state) {
  (void)state;
  static const struct {
    int32_t world, pp;
    const char *order;
  } cases[] = {{2, 1, NULL}, {4, 1, NULL},    {4, 2, NULL},      {6, 1, NULL},
               {8, 2, NULL}, {8, 1, "dp-ep"}, {4, 2, "pp-dp-ep"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
    cfg.pp = cases[i].pp;
    cfg.order = cases[i].order;
    run_ranks(cases[i].world, pyramid, &cfg);
  }
}

/* One rank brings another size, or another order, or nothing good. */
static void disagree(rank_env *env, void *arg) {
  (void)arg;
  bool odd = env->rank == 1;
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  pmoe_topology *topology = NULL;
  cfg.ep = odd ? 1 : 2;
  check_refused(pmoe_topology_create(env->ctx, env->world, &cfg, &topology), PMOE_ERR_MISMATCH,
                "ep 2, etp 1, sp 0, tp-cp-ep-dp-pp");
  check(strstr(pmoe_last_error(),
               "rank 1 is in pmoe_topology_create(tp 1, cp 1, pp 1, ep 1, etp 1, sp 0, tp-cp-ep-dp-pp"));
  cfg.ep = 2;
  cfg.order = odd ? "dp-ep" : NULL;
  check_refused(pmoe_topology_create(env->ctx, env->world, &cfg, &topology), PMOE_ERR_MISMATCH, "dp-ep");
  cfg.order = odd ? "dp-xp" : NULL;
  check_refused(pmoe_topology_create(env->ctx, env->world, &cfg, &topology), odd ? PMOE_ERR_ARG : PMOE_ERR_COMM,
                "\"xp\" is none of");
  cfg.order = NULL;
  pmoe_status status = pmoe_topology_create(env->ctx, env->world, &cfg, odd ? NULL : &topology);
  check_refused(status, odd ? PMOE_ERR_ARG : PMOE_ERR_COMM, "out is NULL");
  check(topology == NULL);
  check_ok(pmoe_topology_create(env->ctx, env->world, &cfg, &topology));
  pmoe_comm *ep = NULL;
  check_refused(pmoe_topology_groups(topology,
                                     odd                ? 1
                                     : env->nranks == 2 ? 1
                                                        : 4,
                                     &ep, NULL, NULL),
                env->nranks == 2 ? PMOE_OK : PMOE_ERR_MISMATCH, NULL);
  check_refused(pmoe_topology_groups(NULL, 1, &ep, NULL, NULL), PMOE_ERR_ARG, "topology is NULL");
  pmoe_topology_destroy(topology);
  pmoe_topology_destroy(NULL);
}

static void test_disagreement(void **state) {
  (void)state;
  run_ranks(2, disagree, NULL);
  run_ranks(4, disagree, NULL);
}

static void bad_arguments(rank_env *env, void *arg) {
  (void)arg;
  pmoe_topology *topology = NULL;
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.sp = 2;
  check_refused(pmoe_topology_create(env->ctx, env->world, &cfg, &topology), PMOE_ERR_ARG, "cfg->sp is 2");
  cfg.sp = 0;
  cfg.ep = 3;
  check_refused(pmoe_topology_create(env->ctx, env->world, &cfg, &topology), PMOE_ERR_ARG, "world is 2");
  check_refused(pmoe_topology_create(NULL, env->world, NULL, &topology), PMOE_ERR_ARG, "ctx is NULL");
  check_refused(pmoe_topology_create(env->ctx, NULL, NULL, &topology), PMOE_ERR_ARG, "world is NULL");
  check(topology == NULL);
  check_ok(pmoe_topology_create(env->ctx, env->world, NULL, &topology));
  pmoe_comm *ep = NULL, *dense = NULL;
  check_ok(pmoe_topology_groups(topology, 0, &ep, NULL, &dense));
  check(pmoe_comm_size(ep) == 1 && pmoe_comm_size(dense) == 2);
  pmoe_topology_destroy(topology);
}

static void test_bad_arguments(void **state) {
  (void)state;
  run_ranks(2, bad_arguments, NULL);
}

/* Rank 0's n-th allocation fails, for every n. */
static void create_without_memory(rank_env *env, void *arg) {
  (void)arg;
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.ep = env->nranks > 1 ? env->nranks / 2 : 1;
  cfg.pp = env->nranks > 2 ? 2 : 1;
  if (cfg.pp == 2) cfg.ep = 1;
  pmoe_status status = PMOE_ERR_NOMEM;
  int32_t refused = 0;
  for (int32_t n = 1; status != PMOE_OK && n < 40; n++) {
    pmoe_topology *topology = NULL;
    pmoe_comm *ep = NULL;
    if (env->rank == 0) env->memory->fail_at = env->memory->calls + n;
    status = pmoe_topology_create(env->ctx, env->world, &cfg, &topology);
    if (status == PMOE_OK) status = pmoe_topology_groups(topology, env->nranks / cfg.pp, &ep, NULL, NULL);
    env->memory->fail_at = 0;
    refused += status != PMOE_OK;
    if (status == PMOE_OK) check_ok(pmoe_comm_barrier(ep));
    /* Ranks of another stage than rank 0's may have their pyramid size. */
    else check(status == (env->rank == 0 ? PMOE_ERR_NOMEM : PMOE_ERR_COMM));
    pmoe_topology_destroy(topology);
    float all_done = status == PMOE_OK;
    check_ok(pmoe_comm_allreduce(env->world, &all_done, 1, PMOE_F32));
    status = all_done == (float)env->nranks ? PMOE_OK : PMOE_ERR_NOMEM;
  }
  check(status == PMOE_OK);
  check(refused >= 3 || env->rank > 0);
}

static void test_allocation_failures(void **state) {
  (void)state;
  run_ranks(1, create_without_memory, NULL);
  run_ranks(2, create_without_memory, NULL);
  run_ranks(4, create_without_memory, NULL);
}

/* The host's groups by colours: ranks of one colour share a group. */
typedef struct coloured {
  int32_t world;
  int32_t ep[8], expert_dp[8], dense[8];
  int32_t ep_key[8];
  const char *word; /* NULL: good */
  pmoe_status status;
} coloured;

static void from_groups(rank_env *env, void *arg) {
  const coloured *c = arg;
  pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
  pmoe_topology *topology = NULL;
  check_ok(pmoe_comm_split(env->world, c->ep[env->rank], c->ep_key[env->rank], &groups.ep));
  check_ok(pmoe_comm_split(env->world, c->expert_dp[env->rank], 0, &groups.expert_dp));
  check_ok(pmoe_comm_split(env->world, c->dense[env->rank], 0, &groups.dense_dp));
  pmoe_status status = pmoe_topology_from_groups(env->ctx, &groups, &topology);
  if (c->word) check_refused(status, c->status, c->word);
  else check_ok(status);
  check((topology != NULL) == (status == PMOE_OK));
  if (topology) {
    pmoe_comm *ep, *expert_dp, *dense_dp, *none = NULL;
    check_ok(pmoe_topology_groups(topology, 0, &ep, &expert_dp, &dense_dp));
    check(ep == groups.ep && expert_dp == groups.expert_dp && dense_dp == groups.dense_dp);
    check_ok(pmoe_topology_groups(topology, 1, &ep, &expert_dp, NULL));
    check(pmoe_comm_size(ep) == 1);
    check(pmoe_comm_size(expert_dp) == pmoe_comm_size(dense_dp));
    check_refused(pmoe_topology_groups(topology, 64, &none, NULL, NULL), PMOE_ERR_ARG, "ep is 64");
    check(none == NULL);
  }
  /* In any order: the topology needs what it borrowed until it ends. */
  pmoe_comm_destroy(groups.ep);
  pmoe_comm_destroy(groups.expert_dp);
  if (topology) check_ok(pmoe_comm_barrier(groups.dense_dp));
  pmoe_comm_destroy(groups.dense_dp);
  pmoe_topology_destroy(topology);
}

static void test_from_groups(void **state) {
  (void)state;
  static const coloured cases[] = {
      {.world = 1},
      {.world = 2, .expert_dp = {0, 1}},
      {.world = 2, .ep = {0, 1}},
      {.world = 4, .ep = {0, 0, 1, 1}, .expert_dp = {0, 1, 0, 1}},
      {.world = 4, .ep = {0, 1, 0, 1}, .expert_dp = {0, 0, 1, 1}},
      {.world = 4, .ep = {0, 0, 1, 1}, .expert_dp = {0, 1, 2, 3}, .dense = {0, 0, 1, 1}},
      {.world = 8, .ep = {0, 0, 0, 0, 1, 1, 1, 1}, .expert_dp = {0, 1, 2, 3, 0, 1, 2, 3}},
      /* the second group in reverse, and its copies to match */
      {.world = 4, .ep = {0, 0, 1, 1}, .ep_key = {0, 1, 1, 0}, .expert_dp = {0, 1, 1, 0}},
      {.world = 4,
       .ep = {0, 0, 1, 1},
       .ep_key = {0, 1, 1, 0},
       .expert_dp = {0, 1, 0, 1},
       .status = PMOE_ERR_MISMATCH,
       .word = "ranks 0 and 2 of dense_dp share an expert_dp group, but have places 0 and 1"},
      {.world = 4,
       .ep = {0, 0, 1, 1},
       .expert_dp = {0, 1, 2, 3},
       .status = PMOE_ERR_MISMATCH,
       .word = "ranks 0 and 2 of dense_dp have place 0 in their ep groups, but share no expert_dp group"},
      {.world = 4,
       .ep = {0, 0, 1, 1},
       .expert_dp = {0, 0, 0, 0},
       .status = PMOE_ERR_MISMATCH,
       .word = "ranks 0 and 1 of dense_dp share"},
      {.world = 3,
       .ep = {0, 0, 1},
       .expert_dp = {0, 1, 0},
       .status = PMOE_ERR_MISMATCH,
       .word = "rank 0 of dense_dp is in an ep group of 2 ranks, but rank 2 in one of 1"},
      {.world = 8,
       .ep = {0, 0, 0, 0, 0, 0, 1, 1},
       .expert_dp = {0, 1, 2, 3, 4, 5, 0, 1},
       .status = PMOE_ERR_MISMATCH,
       .word = "rank 0 of dense_dp is in an ep group of 6 ranks, but rank 6 in one of 2"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    coloured c = cases[i];
    run_ranks(c.world, from_groups, &c);
    run_ranks_with(&(ranks_config){.nranks = c.world, .transport = RANKS_CALLBACKS}, from_groups, &c);
  }
}

/* Groups that cross pipeline stages, also where the stages' ranks would fit by number. */
static void cross_stages(rank_env *env, void *arg) {
  const coloured *c = arg;
  pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
  pmoe_topology *topology = NULL;
  check_ok(pmoe_comm_split(env->world, c->ep[env->rank], 0, &groups.ep));
  check_ok(pmoe_comm_split(env->world, c->expert_dp[env->rank], 0, &groups.expert_dp));
  check_ok(pmoe_comm_split(env->world, c->dense[env->rank], 0, &groups.dense_dp));
  pmoe_status status = pmoe_topology_from_groups(env->ctx, &groups, &topology);
  check_refused(status, PMOE_ERR_MISMATCH, c->word);
  check(strstr(pmoe_last_error(), "in another dense_dp"));
  pmoe_comm_destroy(groups.ep);
  pmoe_comm_destroy(groups.expert_dp);
  pmoe_comm_destroy(groups.dense_dp);
}

static void test_groups_that_cross_stages(void **state) {
  (void)state;
  static const coloured cases[] = {
      {.world = 4, .dense = {0, 0, 1, 1}, .ep = {0, 1, 1, 0}, .expert_dp = {0, 1, 2, 3}, .word = "shares groups->ep"},
      {.world = 4,
       .dense = {0, 0, 1, 1},
       .ep = {0, 0, 1, 1},
       .expert_dp = {0, 1, 0, 1},
       .word = "shares groups->expert_dp"},
      {.world = 2, .dense = {0, 1}, .ep = {0, 0}, .expert_dp = {0, 1}, .word = "shares groups->ep"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    coloured c = cases[i];
    run_ranks(c.world, cross_stages, &c);
  }
}

static pmoe_groups three_groups(pmoe_comm *ep, pmoe_comm *expert_dp, pmoe_comm *dense_dp) {
  pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
  groups.ep = ep;
  groups.expert_dp = expert_dp;
  groups.dense_dp = dense_dp;
  return groups;
}

static void bad_groups(rank_env *env, void *arg) {
  (void)arg;
  pmoe_topology *topology = NULL;
  pmoe_comm *self = NULL;
  check_ok(pmoe_comm_self(env->ctx, &self));
  bool bad = env->rank == 1;
  pmoe_status expected = bad ? PMOE_ERR_ARG : PMOE_ERR_COMM;
  pmoe_groups groups = three_groups(bad ? NULL : env->world, self, env->world);
  check_refused(pmoe_topology_from_groups(env->ctx, &groups, &topology), expected, "groups->ep is NULL");
  groups = three_groups(env->world, bad ? NULL : self, env->world);
  check_refused(pmoe_topology_from_groups(env->ctx, &groups, &topology), expected, "groups->expert_dp is NULL");
  groups.dense_dp = NULL;
  check_refused(pmoe_topology_from_groups(env->ctx, &groups, &topology), PMOE_ERR_ARG, "groups->dense_dp is NULL");
  groups = three_groups(env->world, self, env->world);
  check_refused(pmoe_topology_from_groups(NULL, &groups, &topology), PMOE_ERR_ARG, "ctx is NULL");
  check_refused(pmoe_topology_from_groups(env->ctx, NULL, &topology), PMOE_ERR_ARG, "groups is NULL");
  check_refused(pmoe_topology_from_groups(env->ctx, &groups, NULL), PMOE_ERR_ARG, "out is NULL");
  check(topology == NULL);
  /* Rank 0 has no memory, at every place. */
  pmoe_status status = PMOE_ERR_NOMEM;
  for (int32_t n = 1; status != PMOE_OK && n < 20; n++) {
    if (env->rank == 0) env->memory->fail_at = env->memory->calls + n;
    status = pmoe_topology_from_groups(env->ctx, &groups, &topology);
    env->memory->fail_at = 0;
    if (status != PMOE_OK) check_status(status, env->rank == 0 ? PMOE_ERR_NOMEM : PMOE_ERR_COMM);
    check((topology != NULL) == (status == PMOE_OK));
  }
  check(topology != NULL);
  pmoe_topology_destroy(topology);
  pmoe_comm_destroy(self);
}

static void test_bad_groups(void **state) {
  (void)state;
  run_ranks(2, bad_groups, NULL);
  run_ranks(3, bad_groups, NULL);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_create),
      cmocka_unit_test(test_pyramid),
      cmocka_unit_test(test_disagreement),
      cmocka_unit_test(test_bad_arguments),
      cmocka_unit_test(test_allocation_failures),
      cmocka_unit_test(test_from_groups),
      cmocka_unit_test(test_groups_that_cross_stages),
      cmocka_unit_test(test_bad_groups),
  };
  ranks_begin(&argc, &argv);
  return ranks_end(cmocka_run_group_tests(tests, NULL, NULL));
}
