/* Layers over the host's own groups and the host's own collectives. */
#include "ranks/world.h"

#include <stdlib.h>

#include "support/rig.h"

static void plan_tokens(rig_plan *plan, const world *w) {
  *plan = (rig_plan){
      .label = "groups", .num_ranks = w->nranks, .rank = w->rank, .training = 1, .loss_scale = 1.0, .seed = 91};
  for (int32_t r = 0; r < w->nranks; r++) plan->rank_tokens[r] = (r * 5 + 3) % 8;
}

/* Forward, backward and the gradients' reduction against the reference; with `bits`, a copy of everything for
 * comparison. */
static int step_and_check(world *w, pmoe_topology *topology, const rig_spec *spec, void **bits, size_t *bytes) {
  int failures = 0;
  rig r;
  rig_step s;
  rig_plan plan;
  pmoe_stash *stash = NULL;
  plan_tokens(&plan, w);
  CHECK(failures, rig_create(&r, w->ctx, topology, spec) == PMOE_OK, "%s", pmoe_last_error());
  if (failures) return failures;
  rig_step_begin(&r, &s, &plan);
  pmoe_stash_config cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  cfg.max_tokens = 8;
  pmoe_status status = pmoe_stash_create(r.layer, &cfg, NULL, 0, &stash);
  if (status == PMOE_OK) status = rig_forward(&r, stash, &s);
  if (status == PMOE_OK) status = rig_backward(&r, stash, &s, PMOE_BWD_ALL);
  if (status == PMOE_OK) status = pmoe_layer_reduce_grads(r.layer, 1.0f, NULL);
  CHECK(failures, status == PMOE_OK, "%s", pmoe_last_error());
  if (!failures) failures += rig_check(&r, stash, &s, 1) + rig_check_grads(&r, 1.0, "groups");
  if (bits) *bits = rig_snapshot(&r, &s, bytes);
  pmoe_stash_destroy(stash);
  rig_step_end(&s);
  rig_destroy(&r);
  return failures;
}

/* Expert-parallel groups that are blocks of neighbours (stride 1) or lie strided across the world. */
static int own_groups(world *w) {
  int failures = 0;
  for (int32_t ep = 1; ep <= w->nranks && !failures; ep++)
    for (int strided = 0; strided < 2 && !failures && w->nranks % ep == 0; strided++) {
      int32_t edp = w->nranks / ep;
      int32_t group = strided ? w->rank % edp : w->rank / ep, place = strided ? w->rank / edp : w->rank % ep;
      pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
      groups.dense_dp = w->comm;
      CHECK(failures, pmoe_comm_split(w->comm, group, place, &groups.ep) == PMOE_OK, "%s", pmoe_last_error());
      CHECK(failures, pmoe_comm_split(w->comm, place, group, &groups.expert_dp) == PMOE_OK, "%s", pmoe_last_error());
      pmoe_topology *topology = NULL;
      CHECK(failures, pmoe_topology_from_groups(w->ctx, &groups, &topology) == PMOE_OK, "ep %d: %s", ep,
            pmoe_last_error());
      rig_spec spec = rig_spec_default();
      spec.gate.num_experts = 5;
      spec.residual.mix = PMOE_MIX_LEARNED;
      if (!failures) failures += step_and_check(w, topology, &spec, NULL, NULL);
      pmoe_topology_destroy(topology);
      pmoe_comm_destroy(groups.ep);
      pmoe_comm_destroy(groups.expert_dp);
    }
  return failures;
}

static void test_the_hosts_own_groups(void **state) {
  (void)state;
  world_run_all(own_groups, NULL);
}

/* Expert-data groups whose members sit at different places of their expert-parallel groups would add up gradients of
 * different experts. */
static int crossed_groups(world *w) {
  int failures = 0;
  if (w->nranks != 4) return 0;
  pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
  groups.dense_dp = w->comm;
  /* ep {0,1} and {3,2}: 0 meets 3 at place 0, yet the expert-data groups say {0,2} and {1,3} */
  static const int32_t key[] = {0, 1, 1, 0};
  CHECK(failures, pmoe_comm_split(w->comm, w->rank / 2, key[w->rank], &groups.ep) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_comm_split(w->comm, w->rank % 2, w->rank, &groups.expert_dp) == PMOE_OK, "%s",
        pmoe_last_error());
  pmoe_topology *topology = NULL;
  CHECK(failures, pmoe_topology_from_groups(w->ctx, &groups, &topology) == PMOE_ERR_MISMATCH, "%s", pmoe_last_error());
  CHECK(failures, topology == NULL, "output was touched");
  pmoe_comm_destroy(groups.ep);
  pmoe_comm_destroy(groups.expert_dp);
  return failures;
}

static void test_groups_that_do_not_fit_are_refused(void **state) {
  (void)state;
  world_run_all(crossed_groups, NULL);
}

/* ---- the host's own collectives: memory that all threads see, and a barrier ---- */

#ifndef PMOE_TEST_MPI
#include <pthread.h>

typedef struct shared_host {
  pthread_barrier_t barrier;
  const void *src[RIG_MAX_RANKS];
  const size_t *send_bytes[RIG_MAX_RANKS];
  int32_t nranks;
} shared_host;

typedef struct host_rank {
  shared_host *host;
  int32_t rank;
} host_rank;

static void meet(const host_rank *me) { pthread_barrier_wait(&me->host->barrier); }

static int host_allgather(void *user, const void *src, void *dst, size_t bytes_each) {
  host_rank *me = user;
  me->host->src[me->rank] = src;
  meet(me);
  for (int32_t r = 0; r < me->host->nranks; r++)
    memcpy((char *)dst + (size_t)r * bytes_each, me->host->src[r], bytes_each);
  meet(me);
  return 0;
}

static int host_alltoallv(void *user, const void *src, const size_t *send_bytes, void *dst, const size_t *recv_bytes) {
  host_rank *me = user;
  me->host->src[me->rank] = src;
  me->host->send_bytes[me->rank] = send_bytes;
  meet(me);
  int wrong = 0;
  char *to = dst;
  for (int32_t r = 0; r < me->host->nranks; r++) {
    const char *from = me->host->src[r];
    for (int32_t before = 0; before < me->rank; before++) from += me->host->send_bytes[r][before];
    wrong |= me->host->send_bytes[r][me->rank] != recv_bytes[r];
    if (!wrong && recv_bytes[r] > 0) memcpy(to, from, recv_bytes[r]);
    to += recv_bytes[r];
  }
  meet(me);
  return wrong;
}

static int host_allreduce(void *user, float *inout, size_t n) {
  host_rank *me = user;
  float *mine = malloc(n * sizeof *mine + 1);
  if (n > 0) memcpy(mine, inout, n * sizeof *mine);
  me->host->src[me->rank] = mine;
  meet(me);
  for (size_t i = 0; i < n; i++) {
    float sum = ((const float *)me->host->src[0])[i];
    for (int32_t r = 1; r < me->host->nranks; r++) sum += ((const float *)me->host->src[r])[i];
    inout[i] = sum;
  }
  meet(me);
  free(mine);
  return 0;
}

static int host_barrier(void *user) {
  meet(user);
  return 0;
}

static int host_collectives(world *w) {
  int failures = 0;
  shared_host *host = (shared_host *)w->arg;
  host_rank me = {host, w->rank};
  pmoe_comm_callbacks calls = PMOE_CONFIG_INIT(pmoe_comm_callbacks);
  calls.user = &me;
  calls.rank = w->rank;
  calls.nranks = w->nranks;
  calls.allgather = host_allgather;
  calls.alltoallv = host_alltoallv;
  calls.allreduce_f32 = host_allreduce;
  calls.barrier = host_barrier;
  pmoe_comm *world_comm = NULL, *self = NULL;
  CHECK(failures, pmoe_comm_from_callbacks(w->ctx, &calls, &world_comm) == PMOE_OK, "%s", pmoe_last_error());
  CHECK(failures, pmoe_comm_self(w->ctx, &self) == PMOE_OK, "%s", pmoe_last_error());
  void *bits[2] = {NULL};
  size_t bytes[2] = {0};
  for (int i = 0; i < 2 && !failures; i++) { /* the host's collectives, then the threads' */
    pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
    groups.ep = groups.dense_dp = i ? w->comm : world_comm;
    groups.expert_dp = self;
    pmoe_topology *topology = NULL;
    CHECK(failures, pmoe_topology_from_groups(w->ctx, &groups, &topology) == PMOE_OK, "%s", pmoe_last_error());
    rig_spec spec = rig_spec_default();
    spec.experts.dtype = PMOE_BF16;
    spec.residual.mix = PMOE_MIX_LEARNED;
    if (!failures) failures += step_and_check(w, topology, &spec, &bits[i], &bytes[i]);
    pmoe_topology_destroy(topology);
  }
  if (!failures)
    CHECK(failures, bytes[0] == bytes[1] && memcmp(bits[0], bits[1], bytes[0]) == 0, "callbacks and threads differ");
  free(bits[0]);
  free(bits[1]);
  pmoe_comm_destroy(world_comm);
  pmoe_comm_destroy(self);
  return failures;
}

static void test_the_hosts_collectives_give_the_same_bits(void **state) {
  (void)state;
  const int32_t *sizes;
  int count = world_sizes(&sizes);
  for (int i = 0; i < count; i++) {
    shared_host host = {.nranks = sizes[i]};
    pthread_barrier_init(&host.barrier, NULL, (unsigned)sizes[i]);
    assert_int_equal(world_run(sizes[i], host_collectives, &host), 0);
    pthread_barrier_destroy(&host.barrier);
  }
}
#endif

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_the_hosts_own_groups),
      cmocka_unit_test(test_groups_that_do_not_fit_are_refused),
#ifndef PMOE_TEST_MPI
      cmocka_unit_test(test_the_hosts_collectives_give_the_same_bits),
#endif
  };
  return world_main("layer over the host's groups", tests, sizeof tests / sizeof tests[0]);
}
