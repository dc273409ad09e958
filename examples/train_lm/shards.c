/* What the ranks of a TP or a CP group tell each other inside a layer. */
#include <string.h>

#include "pass.h"

void *gather_rows(struct lm_pass *pass, void *held, void *room, int64_t cols, size_t bytes_each) {
  const struct lm_ranks *ranks = pass->model->ranks;
  if (!ranks->at.sp) return held;
  LM_TRY(pmoe_comm_allgather(ranks->tp, held, room, (size_t)(pass->slot->rows.held * cols) * bytes_each));
  lap(pass, LM_PART_SHARDS);
  return room;
}

float *sum_shards(struct lm_pass *pass, float *part) {
  const struct lm_ranks *ranks = pass->model->ranks;
  const struct lm_rows *rows = &pass->slot->rows;
  int64_t hidden = pass->model->cfg.hidden;
  if (ranks->at.tp == 1) return part;
  LM_TRY(pmoe_comm_allreduce(ranks->tp, part, rows->all * hidden, PMOE_F32));
  lap(pass, LM_PART_SHARDS);
  return part + rows->first * hidden;
}

void share_own_rows(struct lm_pass *pass, float *dx) {
  const struct lm_ranks *ranks = pass->model->ranks;
  const struct lm_rows *rows = &pass->slot->rows;
  int64_t numbers = rows->own * pass->model->cfg.hidden;
  if (ranks->at.tp == 1 || ranks->at.sp) return;
  float *own =
      memcpy(pass->model->acts->dx_all, dx + rows->own_first * pass->model->cfg.hidden, (size_t)numbers * sizeof *own);
  LM_TRY(pmoe_comm_allgather(ranks->tp, own, dx, (size_t)numbers * sizeof *own));
  lap(pass, LM_PART_SHARDS);
}

/* ---- keys and values over the context's ranks: [CP, sequences, length] between ranks, [sequences, keys] in attention,
 * 2h numbers a row ---- */

static int64_t width_of(const struct lm_pass *pass) { return pass->model->cfg.hidden / pass->model->ranks->at.tp; }

/* Copies part `part` of every sequence between the two orders. */
static void move_part(const struct lm_pass *pass, int part, float *between, float *in_attention, int outwards) {
  const struct lm_rows *rows = &pass->slot->rows;
  int64_t cols = 2 * width_of(pass), keys = rows->first_position + rows->length, numbers = rows->length * cols;
  for (int s = 0; s < rows->sequences; s++) {
    float *outside = between + ((int64_t)part * rows->sequences + s) * numbers;
    float *inside = in_attention + (s * keys + (int64_t)part * rows->length) * cols;
    memcpy(outwards ? outside : inside, outwards ? inside : outside, (size_t)numbers * sizeof *inside);
  }
}

struct lm_qkv gather_keys(struct lm_pass *pass, struct lm_layer_acts *a) {
  const struct lm_ranks *ranks = pass->model->ranks;
  const struct lm_acts *acts = pass->model->acts;
  int64_t width = width_of(pass), cols = 2 * width, all = pass->slot->rows.all;
  if (ranks->at.cp == 1) return (struct lm_qkv){a->qkv, a->qkv + width, 3 * width, 3 * width};
  for (int64_t r = 0; r < all; r++)
    memcpy(acts->kv_mine + r * cols, a->qkv + r * 3 * width + width, (size_t)cols * sizeof(float));
  LM_TRY(pmoe_comm_allgather(ranks->cp, acts->kv_mine, acts->kv_all, (size_t)(all * cols) * sizeof(float)));
  for (int part = 0; part <= ranks->at.cp_rank; part++) move_part(pass, part, acts->kv_all, a->kv, 0);
  lap(pass, LM_PART_SHARDS);
  return (struct lm_qkv){a->qkv, a->kv, 3 * width, cols};
}

void sum_keys(struct lm_pass *pass) {
  const struct lm_ranks *ranks = pass->model->ranks;
  const struct lm_acts *acts = pass->model->acts;
  int64_t width = width_of(pass), cols = 2 * width, all = pass->slot->rows.all;
  if (ranks->at.cp == 1) return;
  memset(acts->kv_all, 0, (size_t)(ranks->at.cp * all * cols) * sizeof(float));
  for (int part = 0; part <= ranks->at.cp_rank; part++) move_part(pass, part, acts->kv_all, acts->dkv, 1);
  LM_TRY(pmoe_comm_allreduce(ranks->cp, acts->kv_all, ranks->at.cp * all * cols, PMOE_F32));
  const float *mine = acts->kv_all + ranks->at.cp_rank * all * cols;
  for (int64_t r = 0; r < all; r++)
    memcpy(acts->dqkv + r * 3 * width + width, mine + r * cols, (size_t)cols * sizeof(float));
  lap(pass, LM_PART_SHARDS);
}
