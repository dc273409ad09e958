#include "a2a/host_groups.h"

#include <stdbool.h>
#include <stdio.h>

#include "a2a/transport.h"
#include "core/arena.h"
#include "core/random.h"

enum { EP, ETP, EXPERT_DP, TP, DENSE_DP, MICRO_BATCH, NUM_GROUPS };
static const char *const names[NUM_GROUPS] = {"ep", "etp", "expert_dp", "tp", "dense_dp", "micro_batch"};

/* Who a rank is: its rank in the stage, and a number that no other stage has. */
typedef struct identity {
  uint64_t stage_id;
  int64_t rank;
} identity;

/* A rank's groups, told by the stage rank of their first members. */
typedef struct membership {
  int32_t size[NUM_GROUPS], place[NUM_GROUPS], leader[NUM_GROUPS];
  int32_t sp;
} membership;

typedef struct check {
  pmoe_comm *stage, *comm[NUM_GROUPS]; /* NULL: a group of one */
  const char *root;                    /* the stage's name in errors */
  int32_t sp;
  identity *peers; /* of the largest group */
  uint64_t *ids;   /* [stage] */
  membership *members;
  int32_t *first_at_place; /* [stage] */
} check;

static void lay_out(pmoei_arena *arena, check *c) {
  int32_t largest = 1;
  for (int g = 0; g < NUM_GROUPS; g++)
    if (c->comm[g] && c->comm[g]->nranks > largest) largest = c->comm[g]->nranks;
  c->peers = pmoei_take(arena, largest, sizeof *c->peers);
  c->ids = pmoei_take(arena, c->stage->nranks, sizeof *c->ids);
  c->members = pmoei_take(arena, c->stage->nranks, sizeof *c->members);
  c->first_at_place = pmoei_take(arena, c->stage->nranks, sizeof *c->first_at_place);
}

static const char *article(const char *name) { return name[0] == 'e' ? "an" : "a"; }

static pmoe_status equal_sizes(const check *c, int group) {
  const membership *m = c->members;
  for (int32_t r = 1; r < c->stage->nranks; r++)
    if (m[r].size[group] != m[0].size[group])
      return pmoei_error(PMOE_ERR_MISMATCH, "rank 0 of %s is in %s %s group of %d ranks, but rank %d in one of %d",
                         c->root, article(names[group]), names[group], m[0].size[group], r, m[r].size[group]);
  return PMOE_OK;
}

/* Ranks that share a `group` are at one place of their groups `other`. */
static pmoe_status same_place(const check *c, int group, int other) {
  const membership *m = c->members;
  for (int32_t r = 0; r < c->stage->nranks; r++) {
    int32_t leader = m[r].leader[group];
    if (m[r].place[other] != m[leader].place[other])
      return pmoei_error(PMOE_ERR_MISMATCH,
                         "ranks %d and %d of %s share %s %s group, but have places %d and %d in their %s groups",
                         leader, r, c->root, article(names[group]), names[group], m[leader].place[other],
                         m[r].place[other], names[other]);
  }
  return PMOE_OK;
}

/* Ranks at one place of their groups `inner` and `second` (NUM_GROUPS: none) share a group of copies, and its ranks are
 * at one place. */
static pmoe_status are_copies(const check *c, int copies, int inner, int second) {
  bool two = second != NUM_GROUPS;
  PMOEI_TRY(same_place(c, copies, inner));
  if (two) PMOEI_TRY(same_place(c, copies, second));
  const membership *m = c->members;
  for (int32_t r = 0; r < c->stage->nranks; r++) c->first_at_place[r] = -1;
  for (int32_t r = 0; r < c->stage->nranks; r++) {
    int32_t place = m[r].place[inner], beside = two ? m[r].place[second] : 0;
    int32_t *first = &c->first_at_place[two ? place * m[0].size[second] + beside : place];
    if (*first < 0) *first = r;
    if (m[r].leader[copies] == m[*first].leader[copies]) continue;
    char also[64] = "";
    if (two && m[0].size[second] > 1) snprintf(also, sizeof also, " and %d in their %s groups", beside, names[second]);
    return pmoei_error(PMOE_ERR_MISMATCH,
                       "ranks %d and %d of %s have place %d in their %s groups%s, but share no %s group", *first, r,
                       c->root, place, names[inner], also, names[copies]);
  }
  return PMOE_OK;
}

/* Going to the first of one's etp group and then of its ep group leads where the other way round leads. */
static int32_t block_of(const membership *m, int32_t rank) { return m[m[rank].leader[ETP]].leader[EP]; }

static pmoe_status groups_cross(const check *c) {
  const membership *m = c->members;
  for (int32_t r = 0; r < c->stage->nranks; r++) {
    int32_t other = m[r].leader[EP];
    if (block_of(m, r) != m[other].leader[ETP])
      return pmoei_error(
          PMOE_ERR_MISMATCH,
          "ranks %d and %d of %s share an ep group, but the ranks beside them in their etp groups do not "
          "share one",
          other, r, c->root);
  }
  return PMOE_OK;
}

/* The tokens of a micro-batch are those of whole tp groups. */
static pmoe_status micro_batches(const check *c) {
  const membership *m = c->members;
  PMOEI_TRY(equal_sizes(c, MICRO_BATCH));
  for (int32_t r = 0; r < c->stage->nranks; r++) {
    int32_t first = m[r].leader[TP];
    if (m[r].leader[MICRO_BATCH] != m[first].leader[MICRO_BATCH])
      return pmoei_error(PMOE_ERR_MISMATCH, "ranks %d and %d of %s share a tp group, but no micro_batch group", first,
                         r, c->root);
  }
  return PMOE_OK;
}

/* All ranks read the same table and reach the same sentence. */
static pmoe_status check_table(const check *c) {
  const membership *m = c->members;
  for (int32_t r = 1; r < c->stage->nranks; r++)
    if (m[r].sp != m[0].sp)
      return pmoei_error(PMOE_ERR_MISMATCH, "groups->sp is %d on rank 0 and %d on rank %d of %s", m[0].sp, m[r].sp, r,
                         c->root);
  PMOEI_TRY(equal_sizes(c, EP));
  PMOEI_TRY(equal_sizes(c, ETP));
  PMOEI_TRY(equal_sizes(c, TP));
  PMOEI_TRY(same_place(c, EP, ETP));
  PMOEI_TRY(same_place(c, ETP, EP));
  PMOEI_TRY(groups_cross(c));
  PMOEI_TRY(micro_batches(c));
  PMOEI_TRY(are_copies(c, EXPERT_DP, EP, ETP));
  return are_copies(c, DENSE_DP, TP, NUM_GROUPS);
}

/* Where this rank is in one group; a member of another stage is an error. */
static pmoe_status look_into(const check *c, int group, identity mine, const char *what, membership *member) {
  pmoe_comm *comm = c->comm[group];
  member->size[group] = comm ? comm->nranks : 1;
  member->place[group] = comm ? comm->rank : 0;
  member->leader[group] = (int32_t)mine.rank;
  if (!comm) return PMOE_OK;
  PMOEI_TRY(pmoei_allgather(comm, what, &mine, c->peers, sizeof mine));
  member->leader[group] = (int32_t)c->peers[0].rank;
  for (int32_t i = 0; i < comm->nranks; i++)
    if (c->peers[i].stage_id != mine.stage_id)
      return pmoei_error(PMOE_ERR_MISMATCH,
                         "rank %d of %s shares groups->%s with a rank that is in another %s (there rank %d)",
                         (int)mine.rank, c->root, names[group], c->root, (int)c->peers[i].rank);
  return PMOE_OK;
}

static pmoe_status gather_and_check(const check *c, const char *what, pmoei_host_place *place) {
  pmoe_comm *stage = c->stage;
  uint64_t id = pmoei_mix64(pmoei_mix64(pmoei_now_ns()) + (uint64_t)(uintptr_t)stage);
  PMOEI_TRY(pmoei_allgather(stage, what, &id, c->ids, sizeof id));
  identity mine = {c->ids[0], stage->rank};
  membership member = {.sp = c->sp};
  /* Every group's collective is made whatever happened in the one before, or a rank would be missed there. */
  pmoe_status status = PMOE_OK;
  for (int g = 0; g < NUM_GROUPS; g++) {
    pmoe_status here = look_into(c, g, mine, what, &member);
    if (here != PMOE_OK) status = here;
  }
  PMOEI_TRY(pmoei_comm_agree(stage, what, status));
  PMOEI_TRY(pmoei_allgather(stage, what, &member, c->members, sizeof member));
  PMOEI_TRY(check_table(c));
  *place = (pmoei_host_place){block_of(c->members, stage->rank), member.place[EP], member.place[ETP]};
  return PMOE_OK;
}

static pmoe_status missing(const pmoe_groups *groups) {
  PMOEI_REQUIRE(groups->ep, "groups->ep is NULL; a communicator was expected");
  PMOEI_REQUIRE(groups->expert_dp, "groups->expert_dp is NULL; a communicator was expected");
  PMOEI_REQUIRE(groups->sp == 0 || groups->sp == 1, "groups->sp is %d; 0 or 1 was expected", groups->sp);
  PMOEI_REQUIRE(groups->stage != groups->dense_dp || !groups->tp || groups->tp->nranks == 1,
                "groups->stage is dense_dp although groups->tp has %d ranks; the communicator of all ranks of the "
                "pipeline stage was expected",
                groups->tp->nranks);
  return PMOE_OK;
}

pmoe_status pmoei_host_groups_check(pmoe_ctx *ctx, pmoe_groups *groups, pmoei_host_place *place) {
  static const char what[] = "pmoe_topology_from_groups";
  PMOEI_REQUIRE_POINTER(groups->dense_dp);
  check c = {.root = groups->stage ? "the stage" : "dense_dp", .sp = groups->sp};
  if (!groups->stage) groups->stage = groups->dense_dp;
  if (!groups->micro_batch) groups->micro_batch = groups->tp;
  pmoe_comm *const comms[NUM_GROUPS] = {groups->ep, groups->etp,      groups->expert_dp,
                                        groups->tp, groups->dense_dp, groups->micro_batch};
  for (int g = 0; g < NUM_GROUPS; g++) c.comm[g] = comms[g];
  c.stage = groups->stage;
  void *base = NULL;
  int32_t frame = -1;
  pmoe_status status = missing(groups);
  if (status == PMOE_OK) {
    pmoei_arena measure = {NULL, 0};
    lay_out(&measure, &c);
    status = pmoei_scratch_open(ctx, measure.used, &base, &frame);
  }
  status = pmoei_comm_agree(groups->stage, what, status);
  if (status == PMOE_OK) {
    lay_out(&(pmoei_arena){base, 0}, &c);
    status = gather_and_check(&c, what, place);
  }
  if (frame >= 0) pmoei_scratch_close(ctx, frame);
  return status;
}
