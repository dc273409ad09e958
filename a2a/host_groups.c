#include "a2a/host_groups.h"

#include <string.h>

#include "a2a/transport.h"
#include "core/arena.h"
#include "core/random.h"

/* Who a rank is: its rank in dense_dp, and a number that no other dense_dp group has. */
typedef struct identity {
  uint64_t dense_id;
  int64_t rank;
} identity;

/* A rank's two groups, told by the dense rank of their first members. */
typedef struct membership {
  int32_t ep_size, ep_place, ep_leader, edp_leader;
} membership;

typedef struct rooms {
  identity *ep, *edp;
  uint64_t *ids;
  membership *members;
  int32_t *first_at_place;
} rooms;

static rooms lay_out(pmoei_arena *arena, const pmoe_groups *groups) {
  rooms r;
  r.ep = pmoei_take(arena, groups->ep->nranks, sizeof *r.ep);
  r.edp = pmoei_take(arena, groups->expert_dp->nranks, sizeof *r.edp);
  r.ids = pmoei_take(arena, groups->dense_dp->nranks, sizeof *r.ids);
  r.members = pmoei_take(arena, groups->dense_dp->nranks, sizeof *r.members);
  r.first_at_place = pmoei_take(arena, groups->ep->nranks, sizeof *r.first_at_place);
  return r;
}

static pmoe_status check_inside(const identity *members, int32_t n, identity mine, const char *name) {
  for (int32_t i = 0; i < n; i++)
    if (members[i].dense_id != mine.dense_id)
      return pmoei_error(
          PMOE_ERR_MISMATCH,
          "rank %d of dense_dp shares groups->%s with a rank that is in another dense_dp (there rank %d)",
          (int)mine.rank, name, (int)members[i].rank);
  return PMOE_OK;
}

/* All ranks read the same table and reach the same sentence. */
static pmoe_status check_table(const membership *m, int32_t n, int32_t *first_at_place) {
  for (int32_t r = 1; r < n; r++)
    if (m[r].ep_size != m[0].ep_size)
      return pmoei_error(PMOE_ERR_MISMATCH,
                         "rank 0 of dense_dp is in an ep group of %d ranks, but rank %d in one of %d", m[0].ep_size, r,
                         m[r].ep_size);
  for (int32_t place = 0; place < m[0].ep_size; place++) first_at_place[place] = -1;
  for (int32_t r = 0; r < n; r++) {
    int32_t leader = m[r].edp_leader, *first = &first_at_place[m[r].ep_place];
    if (m[r].ep_place != m[leader].ep_place)
      return pmoei_error(
          PMOE_ERR_MISMATCH,
          "ranks %d and %d of dense_dp share an expert_dp group, but have places %d and %d in their ep groups", leader,
          r, m[leader].ep_place, m[r].ep_place);
    if (*first < 0) *first = r;
    if (leader != m[*first].edp_leader)
      return pmoei_error(PMOE_ERR_MISMATCH,
                         "ranks %d and %d of dense_dp have place %d in their ep groups, but share no expert_dp group",
                         *first, r, m[r].ep_place);
  }
  return PMOE_OK;
}

static pmoe_status gather_and_check(const pmoe_groups *groups, const rooms *r, const char *what) {
  pmoe_comm *dense = groups->dense_dp, *ep = groups->ep, *edp = groups->expert_dp;
  uint64_t id = pmoei_mix64(pmoei_mix64(pmoei_now_ns()) + (uint64_t)(uintptr_t)dense);
  PMOEI_TRY(pmoei_allgather(dense, what, &id, r->ids, sizeof id));
  identity mine = {r->ids[0], dense->rank};
  /* The other groups' collectives are made whatever happened in the first, or a rank would be missed there. */
  pmoe_status in_ep = pmoei_allgather(ep, what, &mine, r->ep, sizeof mine);
  if (in_ep == PMOE_OK) in_ep = check_inside(r->ep, ep->nranks, mine, "ep");
  pmoe_status in_edp = pmoei_allgather(edp, what, &mine, r->edp, sizeof mine);
  if (in_ep == PMOE_OK && in_edp == PMOE_OK) in_edp = check_inside(r->edp, edp->nranks, mine, "expert_dp");
  PMOEI_TRY(pmoei_comm_agree(dense, what, in_ep != PMOE_OK ? in_ep : in_edp));
  membership member = {ep->nranks, ep->rank, (int32_t)r->ep[0].rank, (int32_t)r->edp[0].rank};
  PMOEI_TRY(pmoei_allgather(dense, what, &member, r->members, sizeof member));
  return check_table(r->members, dense->nranks, r->first_at_place);
}

pmoe_status pmoei_host_groups_check(pmoe_ctx *ctx, const pmoe_groups *groups) {
  static const char what[] = "pmoe_topology_from_groups";
  PMOEI_REQUIRE_POINTER(groups->dense_dp);
  void *base = NULL;
  int32_t frame = -1;
  pmoe_status status = PMOE_OK;
  if (!groups->ep) status = pmoei_error(PMOE_ERR_ARG, "groups->ep is NULL; a communicator was expected");
  else if (!groups->expert_dp)
    status = pmoei_error(PMOE_ERR_ARG, "groups->expert_dp is NULL; a communicator was expected");
  else {
    pmoei_arena measure = {NULL, 0};
    (void)lay_out(&measure, groups);
    status = pmoei_scratch_open(ctx, measure.used, &base, &frame);
  }
  status = pmoei_comm_agree(groups->dense_dp, what, status);
  if (status == PMOE_OK) {
    pmoei_arena carve = {base, 0};
    rooms r = lay_out(&carve, groups);
    status = gather_and_check(groups, &r, what);
  }
  if (frame >= 0) pmoei_scratch_close(ctx, frame);
  return status;
}
