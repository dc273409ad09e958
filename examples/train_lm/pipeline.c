/* Running a rank's part of a model: its chunks, in the order of a schedule, with activations and their gradients sent
 * from stage to stage. */
#include <stdlib.h>

#include "mail.h"
#include "pass.h"
#include "schedule.h"

/* A feed on its way through the stages. */
struct run {
  struct lm_model *model;
  const struct lm_feed *feed;
  struct lm_sums *sums; /* NULL: no training */
  uint64_t step;
};

/* ---- micro-batches ---- */

static void load(struct run *run, struct lm_slot *slot, int64_t micro) {
  const struct lm_layout *at = &run->model->ranks->at;
  double since = lm_now();
  struct lm_batch batch = {0, run->model->cfg.context, NULL, NULL};
  if (micro < run->feed->count) batch = run->feed->read(run->feed->arg, micro);
  slot->rows = layout_rows(at, batch.sequences, batch.length);
  for (int64_t r = 0; r < slot->rows.held; r++) {
    int64_t token = layout_token(at, &slot->rows, r);
    slot->tokens[r] = batch.tokens[token];
    if (batch.targets) slot->targets[r] = batch.targets[token];
  }
  slot->first_token =
      micro * run->model->cfg.micro * run->model->cfg.context + slot->rows.first + slot->rows.first_position;
  run->model->seconds[LM_PART_DATA] += lm_now() - since;
}

/* ---- between stages ---- */

enum { TAG_FORWARD = 0, TAG_BACKWARD = LM_MAX_LAYERS }; /* plus the virtual stage that receives */

static int rank_of(const struct lm_pass *pass, int stage) {
  const struct lm_layout *at = &pass->model->ranks->at;
  return layout_rank_in_stage(at, stage % at->pp);
}

static size_t bytes_of(const struct lm_pass *pass) {
  return (size_t)(pass->slot->rows.held * pass->model->cfg.hidden) * sizeof(float);
}

static void send(struct lm_pass *pass, const float *rows, int to_stage, int tag) {
  const struct lm_ranks *ranks = pass->model->ranks;
  mail_send(ranks->mail, ranks->rank, rank_of(pass, to_stage), tag + to_stage, rows, bytes_of(pass));
  lap(pass, LM_PART_PIPELINE);
}

static void receive(struct lm_pass *pass, float *rows, int from_stage, int tag) {
  const struct lm_ranks *ranks = pass->model->ranks;
  mail_receive(ranks->mail, rank_of(pass, from_stage), ranks->rank, tag + pass->chunk->stage, rows, bytes_of(pass));
  lap(pass, LM_PART_PIPELINE);
}

/* ---- one micro-batch through one chunk ---- */

static int is_last(const struct lm_chunk *chunk) { return chunk->stage == chunk->num_stages - 1; }

static void forward(struct lm_pass *pass) {
  const struct lm_chunk *chunk = pass->chunk;
  struct lm_slot *slot = pass->slot;
  if (chunk->stage == 0) embed_forward(pass);
  else receive(pass, slot->layer[0].x, chunk->stage - 1, TAG_FORWARD);
  for (int i = 0; i < chunk->num_layers; i++) {
    attention_half_forward(pass, i);
    mlp_half_forward(pass, i, i + 1 < chunk->num_layers ? slot->layer[i + 1].x : slot->x);
  }
  if (!is_last(chunk)) send(pass, slot->x, chunk->stage + 1, TAG_FORWARD);
}

/* Returns the loss where the head is. */
static double backward(struct lm_pass *pass) {
  const struct lm_chunk *chunk = pass->chunk;
  double loss = 0;
  if (is_last(chunk)) loss = head_loss(pass, 1);
  else receive(pass, pass->model->acts->dx, chunk->stage + 1, TAG_BACKWARD);
  for (int i = chunk->num_layers - 1; i >= 0; i--) {
    mlp_half_backward(pass, i);
    attention_half_backward(pass, i);
  }
  if (chunk->stage == 0) embed_backward(pass);
  else send(pass, pass->model->acts->dx, chunk->stage - 1, TAG_BACKWARD);
  return loss;
}

/* ---- training ---- */

static void add_layer_sums(const struct lm_pass *pass, int index, struct lm_sums *sums) {
  const struct lm_layer *layer = &pass->model->layers[pass->chunk->first_layer + index];
  pmoe_stash *stash = pass->slot->layer[index].stash;
  if (!stash) return;
  pmoe_metrics metrics = PMOE_CONFIG_INIT(pmoe_metrics);
  pmoe_routing routing = PMOE_CONFIG_INIT(pmoe_routing);
  LM_TRY(pmoe_stash_metrics(stash, &metrics));
  LM_TRY(pmoe_stash_routing(stash, &routing));
  /* This rank's share of what the micro-batch's ranks have together. */
  double tokens = (double)(pass->slot->rows.all * pass->model->ranks->at.cp);
  sums->aux += (double)metrics.aux_loss * tokens;
  sums->z += (double)metrics.z_loss * tokens;
  sums->routed += (double)metrics.routed;
  sums->dropped += (double)metrics.dropped;
  for (int e = 0; e < layer->experts; e++)
    sums->expert_count[layer->first_listed + e] += (double)routing.expert_count[e];
}

static struct lm_pass begin_pass(struct run *run, const struct lm_op *op, const pmoe_step *step) {
  const struct lm_chunk *chunk = &run->model->chunks[op->chunk];
  return (struct lm_pass){run->model, chunk, chunk->slot[op->micro % chunk->num_slots], step, lm_now()};
}

static void train_op(struct run *run, const struct lm_op *op, int64_t first_token) {
  pmoe_step step = PMOE_CONFIG_INIT(pmoe_step);
  step.training = 1;
  step.step = run->step;
  struct lm_pass pass = begin_pass(run, op, &step);
  if (!op->backward) load(run, pass.slot, op->micro);
  pass.since = lm_now();
  step.first_token = first_token + pass.slot->first_token;
  if (op->backward) {
    run->sums->loss += backward(&pass);
    return;
  }
  forward(&pass);
  for (int i = 0; i < pass.chunk->num_layers; i++) add_layer_sums(&pass, i, run->sums);
  if (is_last(pass.chunk)) run->sums->tokens += (double)pass.slot->rows.own;
}

static struct lm_ops ops_of(const struct run *run) {
  const struct lm_config *cfg = &run->model->cfg;
  const struct lm_layout *at = &run->model->ranks->at;
  int64_t micros = schedule_micros(cfg->schedule, at->pp, run->feed->count);
  return schedule_ops(cfg->schedule, at->pp, at->pp_rank, run->model->num_chunks, micros, run->sums != NULL);
}

void model_train(struct lm_model *model, const struct lm_feed *feed, uint64_t step, int64_t first_token,
                 struct lm_sums *sums) {
  struct run run = {.model = model, .feed = feed, .sums = sums, .step = step};
  struct lm_ops ops = ops_of(&run);
  for (int c = 0; c < model->num_chunks; c++) acts_grow(model, &model->chunks[c], schedule_in_flight(&ops, c));
  for (int64_t i = 0; i < ops.count; i++) train_op(&run, &ops.op[i], first_token);
  free(ops.op);
}

/* ---- without training ---- */

double model_loss(struct lm_model *model, const struct lm_feed *feed) {
  struct run run = {.model = model, .feed = feed};
  struct lm_ops ops = ops_of(&run);
  double loss = 0;
  for (int64_t i = 0; i < ops.count; i++) {
    struct lm_pass pass = begin_pass(&run, &ops.op[i], NULL);
    load(&run, pass.slot, ops.op[i].micro);
    pass.since = lm_now();
    forward(&pass);
    if (is_last(pass.chunk)) loss += head_loss(&pass, 0);
  }
  free(ops.op);
  return loss;
}

static struct lm_batch read_the_one(void *arg, int64_t index) {
  (void)index;
  return *(const struct lm_batch *)arg;
}

/* The own row that is position `last` of the one sequence, or -1. */
static int64_t find_row(const struct lm_layout *at, const struct lm_rows *rows, int last) {
  for (int64_t r = 0; r < rows->own; r++)
    if (layout_token(at, rows, rows->own_first + r) == last) return r;
  return -1;
}

int model_logits(struct lm_model *model, const struct lm_batch *batch, int last, float *logits) {
  struct lm_feed feed = {1, read_the_one, (void *)batch};
  struct run run = {.model = model, .feed = &feed};
  int found = 0;
  for (int c = 0; c < model->num_chunks; c++) {
    struct lm_op op = {0, c, 0};
    struct lm_pass pass = begin_pass(&run, &op, NULL);
    load(&run, pass.slot, 0);
    forward(&pass);
    int64_t row = find_row(&model->ranks->at, &pass.slot->rows, last);
    if (!is_last(pass.chunk) || row < 0) continue;
    head_logits(&pass, row, logits);
    found = 1;
  }
  return found;
}
