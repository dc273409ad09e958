/* Stashes: what one forward keeps for its backward. */
#include <inttypes.h>

#include "core/check.h"
#include "core/config.h"
#include "core/data.h"
#include "core/dtype.h"
#include "moe/layer.h"

/* Rows a growing stash takes beyond what came, so that a slowly drifting load does not allocate at every step. */
static int64_t with_slack(int64_t rows) { return rows + rows / 16 + 16; }

static pmoe_mat take_mat(pmoei_arena *arena, pmoe_dtype dtype, int64_t rows, int64_t cols) {
  return (pmoe_mat){pmoei_take(arena, rows * cols, pmoe_dtype_size(dtype)), dtype, rows, cols, cols};
}

static void lay_out_moved(pmoei_arena *arena, const pmoe_layer *layer, int64_t choices, pmoe_routing *moved) {
  int64_t etp = layer->groups.etp;
  *moved = (pmoe_routing)PMOE_CONFIG_INIT(pmoe_routing);
  if (etp == 1) return;
  int64_t experts = layer->gate_cfg.num_experts * etp;
  moved->expert = pmoei_take(arena, choices * etp, sizeof(int32_t));
  moved->slot = pmoei_take(arena, choices * etp, sizeof(int64_t));
  moved->weight = pmoei_take(arena, choices * etp, sizeof(float));
  moved->expert_count = pmoei_take(arena, experts, sizeof(int64_t));
  moved->expert_rows = pmoei_take(arena, experts, sizeof(int64_t));
}

static void lay_out_tokens(pmoei_arena *arena, const pmoe_layer *layer, bool split, pmoei_tokens tokens,
                           pmoe_stash *s) {
  int64_t choices = tokens.own * layer->gate_cfg.top_k, experts = layer->gate_cfg.num_experts;
  s->routing = (pmoe_routing)PMOE_CONFIG_INIT(pmoe_routing);
  s->routing.expert = pmoei_take(arena, choices, sizeof(int32_t));
  s->routing.slot = pmoei_take(arena, choices, sizeof(int64_t));
  s->routing.weight = pmoei_take(arena, choices, sizeof(float));
  s->routing.expert_count = pmoei_take(arena, experts, sizeof(int64_t));
  s->routing.expert_rows = pmoei_take(arena, experts, sizeof(int64_t));
  int64_t loss_rows = pmoei_gate_loss_rows(layer->gate, layer->cfg.max_sequences);
  if (loss_rows > 0) s->routing.loss_sums = pmoei_take(arena, loss_rows * (experts + 1), sizeof(int64_t));
  lay_out_moved(arena, layer, choices, &s->moved);
  s->dlogits = split ? pmoei_take(arena, tokens.own * experts, sizeof(float)) : NULL;
  if (!layer->residual) return;
  pmoe_dtype dtype = layer->experts_cfg.dtype;
  s->scale = pmoei_take(arena, tokens.own, sizeof(float));
  s->branch_scale = pmoei_take(arena, tokens.own, sizeof(float));
  s->residual_pre = take_mat(arena, dtype, tokens.branch, layer->residual_pre_cols);
  if (!split) return;
  s->residual_dpre = take_mat(arena, dtype, tokens.branch, layer->residual_pre_cols);
  s->dmix = pmoei_take(arena, 2 * tokens.own, sizeof(float));
  pmoei_branch_lay_out_kept(arena, layer, tokens.branch, &s->branch);
}

static void lay_out_rows(pmoei_arena *arena, const pmoe_layer *layer, bool split, int64_t rows, pmoe_stash *s) {
  pmoe_dtype dtype = layer->experts_cfg.dtype;
  bool keeps_pre = split || !layer->experts_cfg.recompute_act;
  s->x_rows = take_mat(arena, dtype, rows, layer->cfg.hidden);
  s->pre = keeps_pre ? take_mat(arena, dtype, rows, layer->pre_cols) : (pmoe_mat){0};
  if (!split) return;
  s->dy_rows = take_mat(arena, dtype, rows, layer->cfg.hidden);
  s->dpre = take_mat(arena, dtype, rows, layer->pre_cols);
  s->row_weight = pmoei_take(arena, rows, sizeof(float));
}

static size_t token_bytes(const pmoe_layer *layer, bool split, pmoei_tokens tokens) {
  pmoe_stash unused = {0};
  pmoei_arena measure = {NULL, 0};
  lay_out_tokens(&measure, layer, split, tokens, &unused);
  return measure.used;
}

static size_t row_bytes(const pmoe_layer *layer, bool split, int64_t rows) {
  pmoe_stash unused = {0};
  pmoei_arena measure = {NULL, 0};
  lay_out_rows(&measure, layer, split, rows, &unused);
  return measure.used;
}

void pmoei_stash_place_tokens(pmoe_stash *stash, pmoei_tokens tokens) {
  lay_out_tokens(&(pmoei_arena){stash->token_block, 0}, stash->layer, stash->cfg.split_backward, tokens, stash);
}

pmoe_status pmoei_stash_place_rows(pmoe_stash *stash, int64_t rows) {
  pmoe_layer *layer = stash->layer;
  if (rows > stash->row_capacity) {
    pmoei_data_free(layer->ctx, stash->row_block, stash->row_bytes);
    stash->row_block = NULL;
    stash->row_bytes = 0;
    stash->row_capacity = 0;
    int64_t capacity = with_slack(rows);
    size_t bytes = row_bytes(layer, stash->cfg.split_backward, capacity);
    PMOEI_TRY(pmoei_data_alloc(layer->ctx, bytes, "stash rows", &stash->row_block));
    stash->row_bytes = bytes;
    stash->row_capacity = capacity;
  }
  lay_out_rows(&(pmoei_arena){stash->row_block, 0}, layer, stash->cfg.split_backward, rows, stash);
  return PMOE_OK;
}

size_t pmoei_stash_saved_bytes(const pmoe_stash *stash, int64_t rows) {
  return token_bytes(stash->layer, false, stash->tokens) + row_bytes(stash->layer, false, rows);
}

/* ---- public ---- */

/* The configuration with its defaults: max_recv_rows 0 is left only where nothing bounds the rows. */
static pmoe_status read_config(const pmoe_layer *layer, const pmoe_stash_config *config, pmoe_stash_config *cfg) {
  PMOEI_TRY(PMOEI_CONFIG_READ(cfg, config));
  int64_t choices = (int64_t)layer->gate_cfg.top_k * layer->groups.etp;
  int64_t most_tokens = PMOEI_MAX_ROWS / choices / layer->groups.tp->nranks;
  PMOEI_REQUIRE(cfg->max_tokens >= 0 && cfg->max_tokens <= most_tokens,
                "config->max_tokens is %" PRId64 "; 0 to %" PRId64 " was expected", cfg->max_tokens, most_tokens);
  PMOEI_REQUIRE(cfg->max_recv_rows >= 0 && cfg->max_recv_rows <= PMOEI_MAX_ROWS,
                "config->max_recv_rows is %" PRId64 "; 0 to %" PRId64 " was expected", cfg->max_recv_rows,
                PMOEI_MAX_ROWS);
  PMOEI_REQUIRE(cfg->split_backward == 0 || cfg->split_backward == 1,
                "config->split_backward is %d; 0 or 1 was expected", cfg->split_backward);
  const pmoe_a2a_config *a2a = &layer->a2a_cfg;
  const pmoe_comm *exchange = layer->groups.exchange;
  bool fixed = a2a->sizing == PMOE_SIZING_FIXED;
  PMOEI_REQUIRE(!fixed || cfg->max_tokens <= a2a->max_tokens,
                "config->max_tokens is %" PRId64 "; at most the layer's a2a max_tokens (%" PRId64 ") was expected",
                cfg->max_tokens, a2a->max_tokens);
  if (cfg->max_recv_rows > 0) return PMOE_OK;
  if (a2a->max_recv_rows > 0) cfg->max_recv_rows = a2a->max_recv_rows;
  else if (fixed) cfg->max_recv_rows = pmoei_a2a_bucket(layer->a2a, exchange->rank) * exchange->nranks;
  /* A rank without experts receives nothing: bounded, by 0; 1 keeps it apart from "no bound". */
  else if (layer->num_local == 0) cfg->max_recv_rows = 1;
  /* Alone, a rank receives its own choices. */
  else if (exchange->nranks == 1)
    cfg->max_recv_rows = pmoei_tp_most_tokens(layer, cfg->max_tokens).own * layer->gate_cfg.top_k;
  if (cfg->max_recv_rows == 0 && (fixed || exchange->nranks == 1)) cfg->max_recv_rows = 1;
  return PMOE_OK;
}

pmoe_status pmoe_stash_bytes(const pmoe_layer *layer, const pmoe_stash_config *config, size_t *bytes) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_REQUIRE_POINTER(bytes);
  pmoe_stash_config cfg;
  PMOEI_TRY(read_config(layer, config, &cfg));
  PMOEI_REQUIRE(cfg.max_recv_rows > 0,
                "config->max_recv_rows is 0; eager sizing needs a bound here, in the stash or in the a2a "
                "configuration, for its size to be known");
  *bytes = token_bytes(layer, cfg.split_backward, pmoei_tp_most_tokens(layer, cfg.max_tokens)) +
           row_bytes(layer, cfg.split_backward, cfg.max_recv_rows);
  return PMOE_OK;
}

static pmoe_status check_memory(const pmoe_layer *layer, const pmoe_stash_config *cfg, const void *mem, size_t bytes) {
  if (!mem) {
    PMOEI_REQUIRE(bytes == 0, "bytes is %zu with mem NULL; 0 was expected", bytes);
    return PMOE_OK;
  }
  PMOEI_REQUIRE((uintptr_t)mem % PMOEI_ALIGN == 0, "mem is %p; %d-byte alignment was expected", mem, PMOEI_ALIGN);
  size_t needed;
  PMOEI_TRY(pmoe_stash_bytes(layer, cfg, &needed));
  PMOEI_REQUIRE(bytes >= needed, "bytes is %zu; pmoe_stash_bytes (%zu) was expected", bytes, needed);
  return PMOE_OK;
}

static pmoe_status take_blocks(pmoe_stash *stash, void *mem) {
  pmoe_layer *layer = stash->layer;
  bool split = stash->cfg.split_backward;
  pmoei_tokens most = pmoei_tp_most_tokens(layer, stash->cfg.max_tokens);
  stash->token_bytes = token_bytes(layer, split, most);
  /* Room for a row where nothing bounds them: a rank that receives none still has arrays to name. */
  stash->row_capacity = stash->cfg.max_recv_rows > 0 ? stash->cfg.max_recv_rows : 1;
  stash->row_bytes = row_bytes(layer, split, stash->row_capacity);
  stash->owns_blocks = mem == NULL;
  if (mem) {
    stash->token_block = mem;
    stash->row_block = (char *)mem + stash->token_bytes;
    pmoei_stash_place_tokens(stash, most);
    return PMOE_OK;
  }
  PMOEI_TRY(pmoei_data_alloc(layer->ctx, stash->token_bytes, "stash", &stash->token_block));
  pmoei_stash_place_tokens(stash, most);
  return pmoei_data_alloc(layer->ctx, stash->row_bytes, "stash rows", &stash->row_block);
}

static size_t tp_tokens_bytes(const pmoe_layer *layer) { return (size_t)layer->groups.tp->nranks * sizeof(int64_t); }

static pmoe_status take_host_parts(pmoe_stash *stash) {
  pmoe_layer *layer = stash->layer;
  PMOEI_TRY(pmoei_ctx_enter(layer->ctx, layer->ctx->stream));
  PMOEI_TRY(pmoei_alloc(layer->ctx, tp_tokens_bytes(layer), "stash", &stash->tp_tokens));
  PMOEI_TRY(pmoei_pinned_alloc(layer->ctx, pmoei_gate_report_bytes(layer->gate), "stash", &stash->report));
  return pmoei_clock_create(layer->ctx, &stash->clock);
}

pmoe_status pmoe_stash_create(pmoe_layer *layer, const pmoe_stash_config *config, void *mem, size_t bytes,
                              pmoe_stash **out) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_REQUIRE_POINTER(out);
  pmoe_stash_config cfg;
  PMOEI_TRY(read_config(layer, config, &cfg));
  PMOEI_TRY(check_memory(layer, &cfg, mem, bytes));
  pmoe_stash *stash;
  PMOEI_TRY(pmoei_alloc(layer->ctx, sizeof *stash, "stash", &stash));
  stash->layer = layer;
  stash->cfg = cfg;
  pmoei_layer_retain(layer);
  pmoe_status status = take_host_parts(stash);
  if (status == PMOE_OK) status = pmoe_plan_create(layer->a2a, &stash->plan);
  if (status == PMOE_OK) stash->plan->room = cfg.max_recv_rows;
  if (status == PMOE_OK) status = take_blocks(stash, mem);
  if (status != PMOE_OK) {
    pmoe_stash_destroy(stash);
    return status;
  }
  *out = stash;
  return PMOE_OK;
}

void pmoe_stash_destroy(pmoe_stash *stash) {
  if (!stash) return;
  pmoe_layer *layer = stash->layer;
  pmoe_plan_destroy(stash->plan);
  if (stash->owns_blocks) {
    pmoei_data_free(layer->ctx, stash->token_block, stash->token_bytes);
    pmoei_data_free(layer->ctx, stash->row_block, stash->row_bytes);
  }
  pmoei_clock_destroy(layer->ctx, &stash->clock);
  pmoei_pinned_free(layer->ctx, stash->report, pmoei_gate_report_bytes(layer->gate));
  pmoei_free(layer->ctx, stash->tp_tokens, tp_tokens_bytes(layer));
  pmoei_free(layer->ctx, stash, sizeof *stash);
  pmoei_layer_release(layer);
}

pmoe_status pmoe_layer_scratch_bytes(const pmoe_layer *layer, const pmoe_stash_config *config, size_t *bytes) {
  PMOEI_REQUIRE_POINTER(layer);
  PMOEI_REQUIRE_POINTER(bytes);
  pmoe_stash_config cfg;
  PMOEI_TRY(read_config(layer, config, &cfg));
  PMOEI_REQUIRE(cfg.max_recv_rows > 0,
                "config->max_recv_rows is 0; eager sizing needs a bound for its scratch to be known");
  bool split = cfg.split_backward != 0;
  pmoei_tokens most = pmoei_tp_most_tokens(layer, cfg.max_tokens);
  size_t forward = pmoei_layer_forward_scratch(layer, most, cfg.max_recv_rows, split);
  size_t backward = pmoei_layer_backward_scratch(layer, most, cfg.max_recv_rows, split);
  *bytes = forward > backward ? forward : backward;
  return PMOE_OK;
}

pmoe_status pmoe_stash_routing(const pmoe_stash *stash, pmoe_routing *out) {
  PMOEI_REQUIRE_POINTER(stash);
  if (!stash->has_run) return pmoei_error(PMOE_ERR_STATE, "pmoe_stash_routing: no forward has run on this stash");
  return PMOEI_STRUCT_WRITE(out, &stash->routing);
}

static void note(pmoe_stash *stash, const pmoe_gate_stats *stats) {
  pmoe_metrics *m = &stash->metrics;
  m->tokens = stats->tokens;
  m->masked = stats->masked;
  m->routed = stats->routed;
  m->dropped = stats->dropped;
  m->nonfinite = stats->nonfinite;
  m->aux_loss = stats->aux_loss;
  m->z_loss = stats->z_loss;
  m->seq_aux_loss = stats->seq_aux_loss;
  m->global_aux_loss = stats->global_aux_loss;
  m->load_max_over_mean = stats->load_max_over_mean;
  m->load_cv = stats->load_cv;
  m->entropy = stats->entropy;
}

static void note_times(pmoe_stash *stash) {
  const pmoe_ctx *ctx = stash->layer->ctx;
  const pmoei_clock *clock = &stash->clock;
  pmoe_metrics *m = &stash->metrics;
  m->ms_gate = pmoei_clock_between(ctx, clock, PMOEI_MARK_FORWARD, PMOEI_MARK_ROUTED);
  m->ms_plan = pmoei_clock_between(ctx, clock, PMOEI_MARK_ROUTED, PMOEI_MARK_PLANNED);
  m->ms_dispatch = pmoei_clock_between(ctx, clock, PMOEI_MARK_PLANNED, PMOEI_MARK_DISPATCHING) +
                   pmoei_clock_between(ctx, clock, PMOEI_MARK_BRANCH, PMOEI_MARK_DISPATCHED);
  m->ms_residual = pmoei_clock_between(ctx, clock, PMOEI_MARK_DISPATCHING, PMOEI_MARK_BRANCH);
  m->ms_experts = pmoei_clock_between(ctx, clock, PMOEI_MARK_DISPATCHED, PMOEI_MARK_EXPERTS);
  m->ms_combine = pmoei_clock_between(ctx, clock, PMOEI_MARK_EXPERTS, PMOEI_MARK_COMBINED);
  m->ms_backward = pmoei_clock_between(ctx, clock, PMOEI_MARK_BACKWARD, PMOEI_MARK_BACKWARD_DONE) +
                   pmoei_clock_between(ctx, clock, PMOEI_MARK_WEIGHT, PMOEI_MARK_WEIGHT_DONE);
}

void pmoei_stash_take_report(pmoe_stash *stash) {
  pmoe_layer *layer = stash->layer;
  pmoe_gate_stats stats = pmoei_gate_statistics(layer->gate, stash->report);
  note(stash, &stats);
  if (!stash->reported) pmoei_layer_note_load(layer, &stash->step, &stats, stash->report->count);
  stash->reported = true;
}

pmoe_status pmoe_stash_metrics(const pmoe_stash *stash, pmoe_metrics *out) {
  PMOEI_REQUIRE_POINTER(stash);
  if (!stash->has_run) return pmoei_error(PMOE_ERR_STATE, "pmoe_stash_metrics: no forward has run on this stash");
  pmoe_status reached = pmoei_clock_reached(stash->layer->ctx, &stash->clock);
  if (reached != PMOE_OK) return reached;
  pmoe_stash *to_fill = (pmoe_stash *)stash; /* what it knows does not change, only when it is looked at */
  pmoei_stash_take_report(to_fill);
  note_times(to_fill);
  return PMOEI_STRUCT_WRITE(out, &stash->metrics);
}
