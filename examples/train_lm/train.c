#include "train.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "batches.h"
#include "checkpoint.h"
#include "floor.h"
#include "layers.h"
#include "optimizer.h"
#include "plot.h"
#include "report.h"
#include "sample.h"

static volatile sig_atomic_t stop_asked;

static void ask_stop(int number) { stop_asked = number; }

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
  double *wire;        /* the sums on their way, [SUMS + num_experts_listed] */
  struct lm_batches batches;
  int stopped_by;  /* a signal that some rank has got, or 0 */
  int text_is_new; /* since the checkpoint */
  double train_seconds, train_cpu_seconds;
};

enum { SUM_LOSS, SUM_AUX, SUM_Z, SUM_TOKENS, SUM_ROUTED, SUM_DROPPED, SUM_SIGINT, SUM_SIGTERM, SUMS };

/* The first rank says it, for all. */
static void fail(const struct trainer *t, const char *text) {
  if (t->ranks->rank == 0) lm_fatal("%s", text);
  LM_TRY(pmoe_comm_barrier(t->ranks->world)); /* until the first rank has ended the program */
}

/* ---- evaluation ---- */

static double held_out_loss(struct trainer *t, int64_t count) {
  int64_t all = data_held_out_sequences(&t->run->data, t->run->cfg.context);
  if (count > all) count = all;
  struct lm_feed feed = batches_held_out(&t->batches, &t->ranks->at, count);
  double parts[LM_NUM_PARTS], since = lm_now();
  memcpy(parts, t->model->seconds, sizeof parts);
  double sum = model_loss(t->model, &feed);
  ranks_sum(t->ranks->world, &sum, 1);
  memcpy(t->model->seconds, parts, sizeof parts); /* the parts of a step are those of training */
  t->model->seconds[LM_PART_EVALUATION] += lm_now() - since;
  return sum / (double)(count * t->run->cfg.context);
}

/* ---- a step ---- */

static void add_up_sums(struct trainer *t) {
  struct lm_sums *s = &t->sums;
  int experts = t->model->num_experts_listed;
  double *wire = t->wire;
  wire[SUM_LOSS] = s->loss, wire[SUM_AUX] = s->aux, wire[SUM_Z] = s->z;
  wire[SUM_TOKENS] = s->tokens, wire[SUM_ROUTED] = s->routed, wire[SUM_DROPPED] = s->dropped;
  wire[SUM_SIGINT] = stop_asked == SIGINT, wire[SUM_SIGTERM] = stop_asked == SIGTERM;
  memcpy(wire + SUMS, s->expert_count, (size_t)experts * sizeof *wire);
  ranks_sum(t->ranks->world, wire, SUMS + experts);
  s->loss = wire[SUM_LOSS], s->aux = wire[SUM_AUX], s->z = wire[SUM_Z];
  s->tokens = wire[SUM_TOKENS], s->routed = wire[SUM_ROUTED], s->dropped = wire[SUM_DROPPED];
  t->stopped_by = wire[SUM_SIGTERM] > 0 ? SIGTERM : wire[SUM_SIGINT] > 0 ? SIGINT : 0;
  memcpy(s->expert_count, wire + SUMS, (size_t)experts * sizeof *wire);
}

static void forward_backward(struct trainer *t) {
  const struct lm_config *cfg = &t->run->cfg;
  double *count = t->sums.expert_count;
  memset(count, 0, (size_t)t->model->num_experts_listed * sizeof *count);
  t->sums = (struct lm_sums){.expert_count = count};
  struct lm_feed feed = batches_of_step(&t->batches, &t->ranks->at, (uint64_t)t->state.step);
  int64_t first_token = t->batches.begin * cfg->micro * cfg->context;
  model_train(t->model, &feed, (uint64_t)t->state.step, first_token, &t->sums);
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

static void checkpoint_path(const struct lm_config *cfg, char path[LM_MAX_PATH + 64]) {
  snprintf(path, LM_MAX_PATH + 64, "%s/%s", *cfg->save ? cfg->save : cfg->out, CHECKPOINT_NAME);
}

static void save(struct trainer *t) {
  char path[LM_MAX_PATH + 64];
  checkpoint_path(&t->run->cfg, path);
  double since = lm_now();
  struct lm_error err;
  if (checkpoint_save(path, t->model, &t->state, t->ranks, &err)) fail(t, err.text);
  t->model->seconds[LM_PART_REPORT] += lm_now() - since;
  if (t->report) report_line(t->report, "saved %s after step %lld", path, (long long)t->state.step);
}

static void resume(struct trainer *t) {
  const struct lm_config *cfg = &t->run->cfg;
  struct lm_error err;
  char text[sizeof t->state.data_text];
  strcpy(text, t->state.data_text);
  if (checkpoint_load(cfg->resume, t->model, &t->state, t->ranks, &err)) fail(t, err.text);
  if (t->state.step > cfg->steps) {
    lm_error_set(&err, "steps is %d, but %s has done %lld already; more were expected", cfg->steps, cfg->resume,
                 (long long)t->state.step);
    fail(t, err.text);
  }
  t->text_is_new = *t->state.data_text && strcmp(text, t->state.data_text) != 0;
  strcpy(t->state.data_text, text);
  config_write(cfg, t->state.config_text); /* some settings may be new */
}

/* ---- the run ---- */

/* What would fail in the end had better fail now. */
static void begin_report(struct trainer *t) {
  const struct lm_config *cfg = &t->run->cfg;
  char path[LM_MAX_PATH + 64];
  struct lm_error err;
  checkpoint_path(cfg, path);
  if (!*cfg->resume && !cfg->overwrite && access(path, F_OK) == 0)
    lm_fatal("%s is another run's; --resume, --overwrite or another folder was expected", path);
  if (checkpoint_try(path, &err)) lm_fatal("%s", err.text);
  t->report = report_open(cfg, t->state.step, &err);
  if (!t->report) lm_fatal("%s", err.text);
  report_start(t->report, t->model, t->run->data.train, t->run->data.held_out);
  report_changes(t->report, t->run->changes, t->text_is_new);
}

static void begin(struct trainer *t) {
  const struct lm_config *cfg = &t->run->cfg;
  t->model = model_create(cfg, t->run->vocab, t->ranks);
  t->sums.expert_count = lm_alloc((size_t)t->model->num_experts_listed, sizeof *t->sums.expert_count);
  t->wire = lm_alloc((size_t)(SUMS + t->model->num_experts_listed), sizeof *t->wire);
  batches_create(&t->batches, cfg, &t->run->data);
  t->state.seed = cfg->seed;
  t->state.held_out_loss = NAN;
  data_describe(&t->run->data, t->state.data_text);
  config_write(cfg, t->state.config_text);
  if (*cfg->resume) resume(t);
  if (t->ranks->rank == 0) begin_report(t);
}

static void train(struct trainer *t) {
  const struct lm_config *cfg = &t->run->cfg;
  while (t->state.step < cfg->steps && !t->stopped_by) {
    struct lm_step_report report = train_step(t);
    int done = t->state.step == cfg->steps, last = done || t->stopped_by;
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
  (void)batches_of_step(&t->batches, &t->ranks->at, 0);
  struct lm_floor floor = gemm_floor(t->model, (int)t->batches.count);
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
  if (ranks->rank == 0) t.run->stopped_by = done ? 0 : t.stopped_by;
  model_destroy(t.model);
  free(t.sums.expert_count);
  free(t.wire);
  batches_destroy(&t.batches);
}
