/* The layer's dense branch: on this rank's tokens, or with its inner size spread over the TP group, on all the group's.
 * Each rank then computes a part of every token's output; the parts are summed where the token is. */
#include "core/dtype.h"
#include "moe/layer.h"

static pmoe_mat take(pmoei_arena *arena, pmoe_dtype dtype, int64_t rows, int64_t cols) {
  return (pmoe_mat){pmoei_take(arena, rows * cols, pmoe_dtype_size(dtype)), dtype, rows, cols, cols};
}

void pmoei_branch_lay_out_kept(pmoei_arena *arena, const pmoe_layer *layer, int64_t branch_tokens,
                               pmoei_branch_room *room) {
  if (!layer->sharded_branch) return;
  pmoe_dtype dtype = layer->experts_cfg.dtype;
  if (!layer->replicated) {
    room->x = take(arena, dtype, branch_tokens, layer->cfg.hidden);
    room->dy = take(arena, dtype, branch_tokens, layer->cfg.hidden);
  }
  room->row_scale = pmoei_take(arena, branch_tokens, sizeof(float));
}

void pmoei_branch_lay_out(pmoei_arena *arena, const pmoe_layer *layer, pmoei_tokens tokens, bool backward, bool split,
                          pmoei_branch_room *room) {
  *room = (pmoei_branch_room){0};
  if (!layer->sharded_branch) return;
  pmoe_dtype dtype = layer->experts_cfg.dtype;
  if (!split && backward) pmoei_branch_lay_out_kept(arena, layer, tokens.branch, room);
  else if (!split && !layer->replicated) room->x = take(arena, dtype, tokens.branch, layer->cfg.hidden);
  room->out = take(arena, dtype, tokens.branch, layer->cfg.hidden);
  if (backward) room->dscale = pmoei_take(arena, tokens.branch, sizeof(float));
}

/* A stash for split passes has kept the room's first part since forward. */
static void use_kept(const pmoe_stash *stash, pmoei_branch_room *room) {
  if (!stash->cfg.split_backward) return;
  room->x = stash->branch.x;
  room->dy = stash->branch.dy;
  room->row_scale = stash->branch.row_scale;
}

/* A masked token gives zero, and zero coefficients keep it out of the branch's gradients too. */
static pmoe_status mask(const pmoe_layer *layer, pmoe_stash *stash) {
  const uint8_t *mask = stash->step.token_mask;
  if (!mask) return PMOE_OK;
  return layer->ops->mask(layer->ctx, stash->x.rows, mask, stash->scale, stash->branch_scale);
}

static pmoe_status gather_x(pmoe_stash *stash, pmoei_branch_room *room) {
  return pmoei_tp_gather(stash, &(pmoei_tp_rows){"pmoe: gather of x for the branch", &stash->x, &room->x, NULL, NULL});
}

static pmoe_status forward_sharded(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound,
                                   pmoei_branch_room *room, pmoe_mat *mlp) {
  use_kept(stash, room);
  if (!layer->replicated) PMOEI_TRY(gather_x(stash, room));
  const pmoe_mat *x = layer->replicated ? &stash->given : &room->x;
  PMOEI_TRY(pmoei_residual_mlp_forward(layer->residual, &bound->residual, x, &stash->residual_pre, &room->out,
                                       layer->ctx->stream));
  return pmoei_tp_sum(stash, &(pmoei_tp_rows){"pmoe: sum of the branch's parts", mlp, &room->out, NULL, NULL});
}

pmoe_status pmoei_branch_forward(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound,
                                 pmoei_branch_room *room, pmoe_mat *mlp) {
  if (!layer->residual) return PMOE_OK;
  PMOEI_TRY(pmoei_residual_mix_forward(layer->residual, &bound->residual, &stash->x, stash->scale, stash->branch_scale,
                                       layer->ctx->stream));
  PMOEI_TRY(mask(layer, stash));
  if (layer->sharded_branch) return forward_sharded(layer, stash, bound, room, mlp);
  return pmoei_residual_mlp_forward(layer->residual, &bound->residual, &stash->x, &stash->residual_pre, mlp,
                                    layer->ctx->stream);
}

static pmoe_status gather_for_backward(pmoe_layer *layer, pmoe_stash *stash, const pmoe_mat *dy,
                                       pmoei_branch_room *room) {
  if (!layer->replicated && !stash->cfg.split_backward) PMOEI_TRY(gather_x(stash, room));
  pmoe_mat own = *dy;
  pmoei_tp_rows rows = {"pmoe: gather of dy for the branch", &own, &room->dy, stash->branch_scale, room->row_scale};
  if (layer->replicated) rows.own = rows.all = NULL;
  return pmoei_tp_gather(stash, &rows);
}

static pmoe_status backward_sharded(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound,
                                    pmoei_branch_room *room, const pmoei_branch_grad *grad, pmoe_bwd which) {
  use_kept(stash, room);
  if (which != PMOE_BWD_WEIGHT) PMOEI_TRY(gather_for_backward(layer, stash, grad->dy, room));
  const pmoe_mat *x = layer->replicated ? &stash->given : &room->x, *dy = layer->replicated ? grad->dy : &room->dy;
  PMOEI_TRY(pmoe_residual_backward(layer->residual, &bound->residual, x, &stash->residual_pre, room->row_scale, dy,
                                   grad->dpre, &room->out, room->dscale, which, layer->ctx->stream));
  if (which == PMOE_BWD_WEIGHT) return PMOE_OK;
  return pmoei_tp_sum(
      stash, &(pmoei_tp_rows){"pmoe: sum of the branch's dx", grad->dx, &room->out, grad->dscale, room->dscale});
}

pmoe_status pmoei_branch_backward(pmoe_layer *layer, pmoe_stash *stash, const pmoei_bound *bound,
                                  pmoei_branch_room *room, const pmoei_branch_grad *grad, pmoe_bwd which) {
  if (!layer->residual) return PMOE_OK;
  if (layer->sharded_branch) return backward_sharded(layer, stash, bound, room, grad, which);
  return pmoe_residual_backward(layer->residual, &bound->residual, &stash->x, &stash->residual_pre, stash->branch_scale,
                                grad->dy, grad->dpre, grad->dx, grad->dscale, which, layer->ctx->stream);
}
