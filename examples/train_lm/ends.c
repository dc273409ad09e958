/* The model's two ends: embedding, and last norm, head and loss. Each rank takes its own rows. */
#include <string.h>

#include "embedding.h"
#include "layernorm.h"
#include "linear.h"
#include "loss.h"
#include "pass.h"

static struct lm_embedding embedding_size(const struct lm_pass *pass, int64_t first, int64_t count) {
  const struct lm_rows *rows = &pass->slot->rows;
  return (struct lm_embedding){count,        pass->model->cfg.hidden, rows->first + first,
                               rows->length, rows->first_position,    pass->slot->tokens + first};
}

void embed_forward(struct lm_pass *pass) {
  struct lm_embedding size = embedding_size(pass, 0, pass->slot->rows.held);
  embedding_forward(size, pass->slot->layer[0].x, pass->chunk->token_table->master,
                    pass->chunk->position_table->master);
  lap(pass, LM_PART_EMBEDDING);
}

void embed_backward(struct lm_pass *pass) {
  const struct lm_rows *rows = &pass->slot->rows;
  embedding_backward(embedding_size(pass, rows->own_first, rows->own), pass->chunk->token_table->grad,
                     pass->chunk->position_table->grad,
                     pass->model->acts->dx + rows->own_first * pass->model->cfg.hidden);
  lap(pass, LM_PART_EMBEDDING);
}

static const float *own_x(const struct lm_pass *pass) {
  return pass->slot->x + pass->slot->rows.own_first * pass->model->cfg.hidden;
}

static void last_norm(struct lm_pass *pass) {
  struct lm_acts *acts = pass->model->acts;
  layernorm_forward(acts->norm, acts->mean, acts->rstd, own_x(pass), pass->chunk->final_norm_weight->master,
                    pass->chunk->final_norm_bias->master, pass->slot->rows.own, pass->model->cfg.hidden);
  lap(pass, LM_PART_NORM);
}

/* Sum of the losses. With gradient, also the table's and, in acts->part, the norm's; the logits exist for some rows at
 * a time. */
static double head(struct lm_pass *pass, int gradient) {
  struct lm_model *model = pass->model;
  struct lm_acts *acts = model->acts;
  struct lm_param *table = pass->chunk->token_table;
  const int32_t *targets = pass->slot->targets + pass->slot->rows.own_first;
  int64_t hidden = model->cfg.hidden, own = pass->slot->rows.own;
  double sum = 0;
  for (int64_t first = 0; first < own; first += acts->head_rows) {
    int64_t rows = own - first < acts->head_rows ? own - first : acts->head_rows;
    struct lm_linear size = {rows, hidden, model->vocab};
    const float *x = acts->norm + first * hidden;
    linear_forward(size, acts->logits, x, table->master, NULL);
    loss_forward_backward(acts->logits, acts->loss, targets + first, rows, model->vocab, gradient);
    for (int64_t r = 0; r < rows; r++) sum += (double)acts->loss[r];
    if (!gradient) continue;
    linear_backward_input(size, acts->part + first * hidden, acts->logits, table->master);
    linear_backward_weight(size, table->grad, NULL, acts->logits, x);
  }
  lap(pass, LM_PART_HEAD);
  return sum;
}

double head_loss(struct lm_pass *pass, int gradient) {
  struct lm_acts *acts = pass->model->acts;
  const struct lm_rows *rows = &pass->slot->rows;
  int64_t hidden = pass->model->cfg.hidden;
  last_norm(pass);
  double sum = head(pass, gradient);
  if (!gradient) return sum;
  float *dx = acts->dx + rows->own_first * hidden;
  memset(dx, 0, (size_t)(rows->own * hidden) * sizeof *dx);
  layernorm_backward(dx, pass->chunk->final_norm_weight->grad, pass->chunk->final_norm_bias->grad, acts->part,
                     own_x(pass), pass->chunk->final_norm_weight->master, acts->mean, acts->rstd, rows->own, hidden);
  lap(pass, LM_PART_NORM);
  share_own_rows(pass, acts->dx);
  return sum;
}

void head_logits(struct lm_pass *pass, int64_t row, float *logits) {
  last_norm(pass);
  struct lm_linear size = {1, pass->model->cfg.hidden, pass->model->vocab};
  linear_forward(size, logits, pass->model->acts->norm + row * pass->model->cfg.hidden,
                 pass->chunk->token_table->master, NULL);
  lap(pass, LM_PART_HEAD);
}
