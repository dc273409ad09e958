/* One rank. */
#include "a2a/transport.h"

static pmoe_status self_exchange_start(pmoe_comm *comm, pmoei_exchange *exchange) {
  (void)comm;
  return pmoei_exchange_check(exchange, 0, exchange, 0);
}

static pmoe_status self_exchange_finish(pmoe_comm *comm, pmoei_exchange *exchange) {
  (void)comm;
  pmoei_exchange_copy(exchange, 0, exchange, 0);
  return PMOE_OK;
}

/* Its own values are the sum, wherever they lie. */
static pmoe_status self_allreduce(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type) {
  (void)comm, (void)what, (void)inout, (void)n, (void)type;
  return PMOE_OK;
}

static pmoe_status self_split(pmoe_comm *comm, const pmoei_subgroup *group, pmoe_comm **out) {
  return group->size > 0 ? pmoe_comm_self(comm->ctx, out) : PMOE_OK;
}

static void self_fail(pmoe_comm *comm, const char *why) { (void)comm, (void)why; }
static void self_destroy(pmoe_comm *comm) { (void)comm; }

static const pmoei_transport self_transport = {.name = "self",
                                               .allgather = pmoei_allgather_by_exchange,
                                               .exchange_start = self_exchange_start,
                                               .exchange_finish = self_exchange_finish,
                                               .allreduce = self_allreduce,
                                               .barrier = pmoei_barrier_by_exchange,
                                               .split = self_split,
                                               .fail = self_fail,
                                               .destroy = self_destroy};

pmoe_status pmoe_comm_self(pmoe_ctx *ctx, pmoe_comm **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(out);
  return pmoei_comm_new(ctx, &self_transport, 0, 1, 0, out);
}
