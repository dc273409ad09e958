#include "a2a/a2a.h"

#include <inttypes.h>
#include <string.h>

#include "core/check.h"
#include "core/config.h"
#include "core/data.h"
#include "pmoe/topology.h"

static pmoe_status check_device(const pmoe_ctx *ctx, const pmoe_comm *ep) {
  if (!pmoei_on_device(ctx)) return PMOE_OK;
  if (ep->nranks > 1 && !ep->transport->on_device)
    return pmoei_error(PMOE_ERR_UNSUPPORTED,
                       "ep's transport is \"%s\", which does not move a device's memory; \"nccl\" was expected for a "
                       "context of the CUDA back end",
                       ep->transport->name);
  return PMOE_OK;
}

static pmoe_status check_config(const pmoe_a2a_config *cfg, int64_t capacity, int32_t num_experts, int32_t nranks) {
  PMOEI_REQUIRE((int)cfg->sizing == PMOE_SIZING_EAGER || (int)cfg->sizing == PMOE_SIZING_FIXED,
                "cfg->sizing is %d; a pmoe_sizing was expected", (int)cfg->sizing);
  PMOEI_REQUIRE(cfg->max_recv_rows >= 0 && cfg->max_recv_rows <= PMOEI_MAX_ROWS,
                "cfg->max_recv_rows is %" PRId64 "; 0 to %" PRId64 " was expected", cfg->max_recv_rows, PMOEI_MAX_ROWS);
  PMOEI_REQUIRE(cfg->max_tokens >= 0 && cfg->max_tokens <= PMOEI_MAX_ROWS,
                "cfg->max_tokens is %" PRId64 "; 0 to %" PRId64 " was expected", cfg->max_tokens, PMOEI_MAX_ROWS);
  if (cfg->sizing == PMOE_SIZING_EAGER) return PMOE_OK;
  PMOEI_REQUIRE(cfg->max_tokens > 0, "cfg->max_tokens is 0; fixed sizing needs the largest token count of any rank");
  PMOEI_REQUIRE(capacity > 0 || cfg->max_recv_rows > 0,
                "cfg->max_recv_rows is 0; fixed sizing without a capacity factor needs a bound on the rows received");
  PMOEI_REQUIRE(cfg->max_recv_rows == 0 || cfg->max_recv_rows >= nranks,
                "cfg->max_recv_rows is %" PRId64 "; at least one row for each of the %d source ranks was expected",
                cfg->max_recv_rows, nranks);
  PMOEI_REQUIRE(cfg->max_recv_rows > 0 || capacity <= PMOEI_MAX_ROWS / nranks / num_experts,
                "capacity_per_expert is %" PRId64 "; at most %" PRId64 " was expected for %d ranks and %d experts",
                capacity, PMOEI_MAX_ROWS / nranks / num_experts, nranks, num_experts);
  return PMOE_OK;
}

static const pmoei_rows_ops *choose_rows(const pmoe_ctx *ctx) {
#ifdef PMOE_WITH_CUDA
  if (pmoei_on_device(ctx)) return &pmoei_rows_cuda;
#endif
  (void)ctx;
  return &pmoei_rows_cpu;
}

pmoe_status pmoe_a2a_create(pmoe_ctx *ctx, pmoe_comm *ep, int32_t hidden, pmoe_dtype dtype, int32_t num_experts,
                            int64_t capacity_per_expert, const pmoe_a2a_config *config, pmoe_a2a **out) {
  PMOEI_REQUIRE_POINTER(ctx);
  PMOEI_REQUIRE_POINTER(ep);
  PMOEI_REQUIRE_POINTER(out);
  PMOEI_REQUIRE(hidden > 0, "hidden is %d; 1 or more was expected", hidden);
  PMOEI_TRY(pmoei_check_dtype(ctx, dtype, "dtype"));
  PMOEI_REQUIRE(num_experts > 0, "num_experts is %d; 1 or more was expected", num_experts);
  PMOEI_REQUIRE(capacity_per_expert >= 0, "capacity_per_expert is %" PRId64 "; 0 or more was expected",
                capacity_per_expert);
  pmoe_a2a_config cfg = PMOE_CONFIG_INIT(pmoe_a2a_config);
  if (config) PMOEI_TRY(PMOEI_CONFIG_READ(&cfg, config));
  PMOEI_TRY(check_config(&cfg, capacity_per_expert, num_experts, ep->nranks));

  PMOEI_TRY(check_device(ctx, ep));
  pmoe_a2a *a2a;
  PMOEI_TRY(pmoei_alloc(ctx, sizeof *a2a, "a2a", &a2a));
  a2a->record_bytes = sizeof(pmoei_count_record) + (size_t)num_experts * sizeof(int64_t);
  size_t bytes = a2a->record_bytes * ((size_t)ep->nranks + 1);
  pmoe_status status = pmoei_pinned_alloc(ctx, bytes, "a2a counts", &a2a->records);
  if (status == PMOE_OK) memset(a2a->records, 0, bytes);
  if (status == PMOE_OK && pmoei_on_device(ctx) && ep->nranks > 1)
    status = pmoei_data_alloc(ctx, bytes, "a2a counts", &a2a->device_records);
  if (status != PMOE_OK) {
    pmoei_pinned_free(ctx, a2a->records, bytes);
    pmoei_free(ctx, a2a, sizeof *a2a);
    return status;
  }
  a2a->ctx = ctx;
  a2a->ep = ep;
  a2a->rows_ops = choose_rows(ctx);
  a2a->constant = pmoei_on_device(ctx) && cfg.sizing == PMOE_SIZING_FIXED && cfg.max_recv_rows == 0;
  a2a->refs = 1;
  a2a->hidden = hidden;
  a2a->num_experts = num_experts;
  a2a->dtype = dtype;
  a2a->cfg = cfg;
  a2a->capacity = capacity_per_expert;
  (void)pmoe_expert_block(num_experts, ep->nranks, ep->rank, &a2a->first_expert, &a2a->num_local);
  pmoei_ctx_retain(ctx);
  pmoei_comm_retain(ep);
  *out = a2a;
  return PMOE_OK;
}

void pmoei_a2a_retain(pmoe_a2a *a2a) { a2a->refs++; }

void pmoei_a2a_release(pmoe_a2a *a2a) {
  if (--a2a->refs > 0) return;
  pmoe_ctx *ctx = a2a->ctx;
  size_t bytes = a2a->record_bytes * ((size_t)a2a->ep->nranks + 1);
  pmoei_pinned_free(ctx, a2a->records, bytes);
  pmoei_data_free(ctx, a2a->device_records, bytes);
  pmoei_comm_release(a2a->ep);
  pmoei_free(ctx, a2a, sizeof *a2a);
  pmoei_ctx_release(ctx);
}

void pmoe_a2a_destroy(pmoe_a2a *a2a) {
  if (a2a) pmoei_a2a_release(a2a);
}

int64_t pmoei_a2a_bucket(const pmoe_a2a *a2a, int32_t to) {
  if (a2a->cfg.max_recv_rows > 0) return a2a->cfg.max_recv_rows / a2a->ep->nranks;
  int32_t first, count;
  (void)pmoe_expert_block(a2a->num_experts, a2a->ep->nranks, to, &first, &count);
  return a2a->capacity * count;
}
