#include "train.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"
#include "floor.h"
#include "layers.h"
#include "optimizer.h"
#include "plot.h"
#include "report.h"
#include "sample.h"

static volatile sig_atomic_t stop_asked;

static void ask_stop(int number) {
  (void)number;
  stop_asked = 1;
}

void train_catch_signals(void) {
  struct sigaction action = {.sa_handler = ask_stop, .sa_flags = (int)SA_RESETHAND | SA_RESTART};
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
}

/* One rank's run. */
struct trainer {
  struct lm_run *run;
  struct lm_ranks *ranks;
  struct lm_model *model;
  struct lm_report *report; /* NULL on all ranks but the first */
  struct lm_state state;
  struct lm_sums sums; /* of the latest step, over all ranks */
  float *wire;         /* the sums on their way, [SUMS + num_experts_listed] */
  int32_t *tokens, *targets;
  int stop;
  double train_seconds, train_cpu_seconds;
};

enum { SUM_LOSS, SUM_AUX, SUM_Z, SUM_TOKENS, SUM_ROUTED, SUM_DROPPED, SUM_STOP, SUMS };

/* The first rank says it, for all. */
static void fail(const struct trainer *t, const char *text) {
  if (t->ranks->rank == 0) lm_fatal("%s", text);
  LM_TRY(pmoe_comm_barrier(t->ranks->world)); /* until the first rank has ended the program */
}

/* ---- batches: a step's sequences in micro-batches, which the ranks share out in order ---- */

static void read_sequence(struct trainer *t, int at, int64_t start) {
  int context = t->run->cfg.context;
  int32_t *tokens = t->tokens + (int64_t)at * context, *targets = t->targets + (int64_t)at * context;
  data_read(&t->run->data, start, context, tokens);
  data_read(&t->run->data, start + 1, context, targets);
  for (int i = 0; i < context; i++)
    if (tokens[i] >= t->run->vocab || targets[i] >= t->run->vocab)
      lm_fatal("data has token %d; vocab is %d", tokens[i] >= t->run->vocab ? tokens[i] : targets[i], t->run->vocab);
}

/* Sequences [first, end) of `count`: a step's (held_out 0), or evenly spread held-out ones. */
static struct lm_batch read_batch(struct trainer *t, int64_t first, int64_t end, int held_out, int64_t count) {
  const struct lm_config *cfg = &t->run->cfg;
  double since = lm_now();
  for (int64_t i = first; i < end; i++) {
    int64_t start = held_out ? data_held_out_start(&t->run->data, cfg->context, i, count)
                             : data_train_start(&t->run->data, cfg->context, cfg->seed, (uint64_t)t->state.step, i);
    read_sequence(t, (int)(i - first), start);
  }
  t->model->seconds[LM_PART_DATA] += lm_now() - since;
  return (struct lm_batch){(int)(end - first), cfg->context, t->tokens, t->targets};
}

/* This rank's micro-batches are [begin, begin + mine); every rank makes `calls` passes, the last one perhaps empty. */
struct share {
  int64_t begin, mine, calls;
};

static struct share share_of(const struct trainer *t, int64_t sequences) {
  int64_t micro = t->run->cfg.micro, all = (sequences + micro - 1) / micro, n = t->ranks->nranks, r = t->ranks->rank;
  int64_t begin = all * r / n;
  return (struct share){begin, all * (r + 1) / n - begin, (all + n - 1) / n};
}

/* The i-th micro-batch of the share; empty past its end. */
static struct lm_batch next_batch(struct trainer *t, struct share share, int64_t i, int held_out, int64_t count) {
  int64_t micro = t->run->cfg.micro, first = (share.begin + i) * micro, end = first + micro;
  if (i >= share.mine) return (struct lm_batch){0, t->run->cfg.context, t->tokens, t->targets};
  return read_batch(t, first, end < count ? end : count, held_out, count);
}

/* ---- evaluation ---- */

static double held_out_loss(struct trainer *t, int64_t count) {
  int64_t all = data_held_out_sequences(&t->run->data, t->run->cfg.context);
  if (count > all) count = all;
  struct share share = share_of(t, count);
  double parts[LM_NUM_PARTS], since = lm_now();
  memcpy(parts, t->model->seconds, sizeof parts);
  double sum = 0;
  for (int64_t i = 0; i < share.calls; i++) {
    struct lm_batch batch = next_batch(t, share, i, 1, count);
    sum += model_loss(t->model, &batch);
  }
  float wire = (float)(sum / (double)(count * t->run->cfg.context));
  LM_TRY(pmoe_comm_allreduce(t->ranks->world, &wire, 1, PMOE_F32));
  memcpy(t->model->seconds, parts, sizeof parts); /* the parts of a step are those of training */
  t->model->seconds[LM_PART_EVALUATION] += lm_now() - since;
  return (double)wire;
}

/* ---- a step ---- */

static void add_up_sums(struct trainer *t) {
  struct lm_sums *s = &t->sums;
  float *wire = t->wire;
  wire[SUM_LOSS] = (float)s->loss, wire[SUM_AUX] = (float)s->aux, wire[SUM_Z] = (float)s->z;
  wire[SUM_TOKENS] = (float)s->tokens, wire[SUM_ROUTED] = (float)s->routed, wire[SUM_DROPPED] = (float)s->dropped;
  wire[SUM_STOP] = (float)stop_asked;
  for (int e = 0; e < t->model->num_experts_listed; e++) wire[SUMS + e] = (float)s->expert_count[e];
  LM_TRY(pmoe_comm_allreduce(t->ranks->world, wire, SUMS + t->model->num_experts_listed, PMOE_F32));
  s->loss = (double)wire[SUM_LOSS], s->aux = (double)wire[SUM_AUX], s->z = (double)wire[SUM_Z];
  s->tokens = (double)wire[SUM_TOKENS], s->routed = (double)wire[SUM_ROUTED], s->dropped = (double)wire[SUM_DROPPED];
  t->stop = wire[SUM_STOP] > 0;
  for (int e = 0; e < t->model->num_experts_listed; e++) s->expert_count[e] = (double)wire[SUMS + e];
}

static void forward_backward(struct trainer *t) {
  const struct lm_config *cfg = &t->run->cfg;
  double *count = t->sums.expert_count;
  memset(count, 0, (size_t)t->model->num_experts_listed * sizeof *count);
  t->sums = (struct lm_sums){.expert_count = count};
  struct share share = share_of(t, cfg->batch);
  for (int64_t i = 0; i < share.calls; i++) {
    struct lm_batch batch = next_batch(t, share, i, 0, cfg->batch);
    int64_t first_token = (share.begin + i) * cfg->micro * cfg->context;
    model_train(t->model, &batch, (uint64_t)t->state.step, first_token, &t->sums);
  }
}

static double load_max_over_mean(const struct trainer *t) {
  double worst = 0;
  const double *count = t->sums.expert_count;
  for (int l = 0; l < t->run->cfg.layers; l++) {
    int experts = t->run->cfg.experts.value[l];
    double most = 0, sum = 0;
    for (int e = 0; e < experts; e++) {
      sum += count[e];
      if (count[e] > most) most = count[e];
    }
    if (sum > 0) worst = fmax(worst, most * experts / sum);
    count += experts;
  }
  return worst;
}

static struct lm_step_report train_step(struct trainer *t) {
  struct lm_model *model = t->model;
  const struct lm_config *cfg = &t->run->cfg;
  double since = lm_now(), cpu_since = lm_cpu_now();
  gradients_zero(model);
  model->seconds[LM_PART_OPTIMIZER] += lm_now() - since;
  forward_backward(t);
  double mark = lm_now();
  add_up_sums(t);
  gradients_reduce(model, (float)(1 / t->sums.tokens));
  double norm = gradients_norm(model), lap = lm_now();
  model->seconds[LM_PART_EXCHANGE] += lap - mark;
  if (!isfinite(norm) || !isfinite(t->sums.loss)) {
    char text[160];
    snprintf(text, sizeof text, "step %lld: loss %g, gradient norm %g; a lower lr was expected",
             (long long)t->state.step + 1, t->sums.loss / t->sums.tokens, norm);
    fail(t, text);
  }
  float rate = learning_rate(cfg, t->state.step);
  float clip = cfg->clip > 0 && norm > (double)cfg->clip ? (float)((double)cfg->clip / norm) : 1.0f;
  adamw_step(model, rate, clip, ++t->state.step);
  model->seconds[LM_PART_OPTIMIZER] += lm_now() - lap;
  t->state.tokens_seen += (int64_t)cfg->batch * cfg->context;
  double choices = t->sums.routed + t->sums.dropped, n = t->sums.tokens;
  struct lm_step_report report = {.step = t->state.step, .tokens = t->state.tokens_seen, .held_out = NAN};
  report.loss = t->sums.loss / n, report.aux = t->sums.aux / n, report.z = t->sums.z / n;
  report.learning_rate = (double)rate, report.grad_norm = norm, report.seconds = lm_now() - since;
  report.step_tokens = (int64_t)cfg->batch * cfg->context;
  report.dropped = choices > 0 ? t->sums.dropped / choices : 0;
  report.load = load_max_over_mean(t);
  report.expert_count = t->sums.expert_count;
  t->train_seconds += report.seconds;
  t->train_cpu_seconds += lm_cpu_now() - cpu_since;
  return report;
}

/* ---- checkpoints ---- */

static void save(struct trainer *t) {
  const struct lm_config *cfg = &t->run->cfg;
  char path[LM_MAX_PATH + 64];
  snprintf(path, sizeof path, "%s/%s", *cfg->save ? cfg->save : cfg->out, CHECKPOINT_NAME);
  double since = lm_now();
  struct lm_error err;
  if (checkpoint_save(path, t->model, &t->state, t->ranks, &err)) fail(t, err.text);
  t->model->seconds[LM_PART_REPORT] += lm_now() - since;
  if (t->report) report_line(t->report, "saved %s after step %lld", path, (long long)t->state.step);
}

static void resume(struct trainer *t) {
  struct lm_error err;
  if (checkpoint_load(t->run->cfg.resume, t->model, &t->state, t->ranks, &err)) fail(t, err.text);
  config_write(&t->run->cfg, t->state.config_text); /* some settings may be new */
}

/* ---- the run ---- */

static void begin(struct trainer *t) {
  const struct lm_config *cfg = &t->run->cfg;
  t->model = model_create(cfg, t->run->vocab, t->ranks);
  t->sums.expert_count = lm_alloc((size_t)t->model->num_experts_listed, sizeof *t->sums.expert_count);
  t->wire = lm_alloc((size_t)(SUMS + t->model->num_experts_listed), sizeof *t->wire);
  t->tokens = lm_alloc((size_t)(cfg->micro * cfg->context), sizeof *t->tokens);
  t->targets = lm_alloc((size_t)(cfg->micro * cfg->context), sizeof *t->targets);
  t->state.seed = cfg->seed;
  t->state.held_out_loss = NAN;
  config_write(cfg, t->state.config_text);
  if (*cfg->resume) resume(t);
  if (t->ranks->rank != 0) return;
  struct lm_error err;
  t->report = report_open(cfg, t->state.step, &err);
  if (!t->report) lm_fatal("%s", err.text);
  report_start(t->report, t->model, t->run->data.train, t->run->data.held_out);
}

static void train(struct trainer *t) {
  const struct lm_config *cfg = &t->run->cfg;
  while (t->state.step < cfg->steps && !t->stop) {
    struct lm_step_report report = train_step(t);
    int done = t->state.step == cfg->steps, last = done || t->stop;
    if (!last && cfg->eval_every > 0 && t->state.step % cfg->eval_every == 0)
      report.held_out = t->state.held_out_loss = held_out_loss(t, cfg->eval_sequences);
    /* The last evaluation reads the whole part, which can take a while: what was learnt is safe before it. */
    if (done) save(t);
    if (done) report.held_out = t->state.held_out_loss = held_out_loss(t, INT64_MAX);
    if (t->report) report_step(t->report, &report);
    if (!done && (last || (cfg->save_every > 0 && t->state.step % cfg->save_every == 0))) save(t);
  }
}

static void print_floor(struct trainer *t, int64_t steps) {
  if (steps == 0) return;
  int64_t passes = share_of(t, t->run->cfg.batch).mine;
  struct lm_floor floor = gemm_floor(t->model, (int)passes);
  double wall = t->train_seconds / (double)steps, cpu = t->train_cpu_seconds / (double)steps;
  if (t->report)
    report_line(t->report,
                "\nstep %.1f ms, its matrix products alone %.1f ms: %.0f %%\n"
                "in processor time %.1f ms and %.1f ms: %.0f %%",
                1000 * wall, 1000 * floor.seconds, 100 * floor.seconds / wall, 1000 * cpu, 1000 * floor.cpu_seconds,
                100 * floor.cpu_seconds / cpu);
}

static void finish(struct trainer *t, int64_t first_step) {
  struct lm_summary summary = {.bytes = t->run->data.bytes, .steps = t->state.step - first_step};
  if (summary.steps == 0) t->state.held_out_loss = held_out_loss(t, INT64_MAX);
  summary.held_out = t->state.held_out_loss;
  if (t->report) {
    data_entropy(&t->run->data, &summary.unigram, &summary.bigram);
    report_summary(t->report, t->model, &summary);
  }
  if (t->run->cfg.gemm_floor) print_floor(t, summary.steps);
  if (t->run->cfg.sample > 0) sample_print(t->model, &t->run->data, t->run->cfg.sample);
}

static void draw_plots(struct trainer *t) {
  char csv[LM_MAX_PATH + 32], svg[LM_MAX_PATH + 32];
  struct lm_error err;
  double unigram, bigram; /* in bits */
  report_flush(t->report);
  data_entropy(&t->run->data, &unigram, &bigram);
  struct plot_level levels[] = {{"unigram entropy", unigram * log(2)}, {"bigram entropy", bigram * log(2)}};
  snprintf(csv, sizeof csv, "%s/metrics.csv", t->run->cfg.out);
  snprintf(svg, sizeof svg, "%s/loss.svg", t->run->cfg.out);
  if (plot_loss(csv, svg, levels, 2, &err)) report_line(t->report, "no plot: %s", err.text);
  else report_line(t->report, "plotted %s", svg);
  if (t->model->num_experts_listed == 0) return;
  snprintf(csv, sizeof csv, "%s/experts.csv", t->run->cfg.out);
  snprintf(svg, sizeof svg, "%s/experts.svg", t->run->cfg.out);
  if (plot_experts(csv, svg, &err)) report_line(t->report, "no plot: %s", err.text);
  else report_line(t->report, "plotted %s", svg);
}

void train_rank(struct lm_ranks *ranks, void *arg) {
  struct trainer t = {.run = arg, .ranks = ranks};
  begin(&t);
  int64_t first_step = t.state.step;
  train(&t);
  int done = t.state.step == t.run->cfg.steps;
  if (done) finish(&t, first_step);
  else if (t.report) report_line(t.report, "stopped after step %lld", (long long)t.state.step);
  if (t.report && t.state.step > 0) draw_plots(&t);
  if (t.report) report_close(t.report);
  if (ranks->rank == 0) t.run->interrupted = !done;
  model_destroy(t.model);
  free(t.sums.expert_count);
  free(t.wire);
  free(t.tokens);
  free(t.targets);
}
