#include "report.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "layers.h"

enum { PLAIN_LINES = 20, EXPERT_ROWS = 200, MOST_LINE = 512 };

static const char metrics_header[] = "step,tokens,loss,aux_loss,z_loss,held_out_loss,learning_rate,grad_norm,"
                                     "tokens_per_second,dropped,load_max_over_mean\n";
static const char experts_header[] = "step,layer,expert,share\n";

static const char *const part_names[LM_NUM_PARTS] = {
    [LM_PART_DATA] = "reading data",          [LM_PART_EMBEDDING] = "embedding",
    [LM_PART_NORM] = "layer norms",           [LM_PART_LINEAR] = "attention's linear layers",
    [LM_PART_ATTENTION] = "attention",        [LM_PART_MLP] = "dense MLPs (pmoe experts)",
    [LM_PART_MOE] = "MoE layers (pmoe)",      [LM_PART_HEAD] = "head and loss",
    [LM_PART_SHARDS] = "sums over tp and cp", [LM_PART_PIPELINE] = "waiting for other stages",
    [LM_PART_EXCHANGE] = "gradient sums",     [LM_PART_OPTIMIZER] = "optimizer",
    [LM_PART_EVALUATION] = "evaluation",      [LM_PART_REPORT] = "reports and checkpoints",
};

struct lm_report {
  struct lm_config cfg;
  FILE *metrics, *experts;
  int terminal, line_open;
  int64_t first_step;
  double started, held_out, rate; /* rate: tokens per second, smoothed */
};

/* ---- files ---- */

/* Copies the header and the rows of steps up to last_step. */
static void copy_rows(FILE *from, FILE *to, int64_t last_step) {
  char row[MOST_LINE];
  for (int64_t i = 0; fgets(row, sizeof row, from); i++)
    if (i == 0 || (strchr(row, '\n') && strtoll(row, NULL, 10) <= last_step)) fputs(row, to);
}

static FILE *open_rows(const char *folder, const char *name, const char *header, int64_t first_step,
                       struct lm_error *err) {
  char path[LM_MAX_PATH + 32], kept[LM_MAX_PATH + 40];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  snprintf(kept, sizeof kept, "%s.kept", path);
  FILE *old = first_step > 0 ? fopen(path, "r") : NULL, *file = fopen(old ? kept : path, "w");
  if (file) setvbuf(file, NULL, _IOLBF, BUFSIZ); /* rows are there to be read while the run goes on */
  if (file && old) copy_rows(old, file, first_step);
  if (old) fclose(old);
  if (file && !old) fputs(header, file);
  if (file && (ferror(file) || (old && rename(kept, path)))) {
    fclose(file);
    file = NULL;
  }
  if (!file) lm_error_set(err, "%s: %s", path, strerror(errno));
  return file;
}

static int holds_run(const struct lm_config *cfg, struct lm_error *err) {
  char path[LM_MAX_PATH + 32];
  snprintf(path, sizeof path, "%s/metrics.csv", cfg->out);
  if (*cfg->resume || cfg->overwrite || access(path, F_OK)) return 0;
  lm_error_set(err, "%s is another run's; --resume, --overwrite or another --out was expected", path);
  return 1;
}

struct lm_report *report_open(const struct lm_config *cfg, int64_t first_step, struct lm_error *err) {
  if (mkdir(cfg->out, 0777) && errno != EEXIST) {
    lm_error_set(err, "out %s: %s", cfg->out, strerror(errno));
    return NULL;
  }
  if (holds_run(cfg, err)) return NULL;
  struct lm_report *report = lm_alloc(1, sizeof *report);
  report->cfg = *cfg;
  report->first_step = first_step;
  report->terminal = isatty(STDOUT_FILENO);
  report->held_out = NAN;
  report->metrics = open_rows(cfg->out, "metrics.csv", metrics_header, first_step, err);
  report->experts = report->metrics ? open_rows(cfg->out, "experts.csv", experts_header, first_step, err) : NULL;
  if (report->experts) return report;
  if (report->metrics) fclose(report->metrics);
  free(report);
  return NULL;
}

static void write_metrics(struct lm_report *report, const struct lm_step_report *s) {
  fprintf(report->metrics, "%lld,%lld,%.7g,%.6g,%.6g,", (long long)s->step, (long long)s->tokens, s->loss, s->aux,
          s->z);
  if (!isnan(s->held_out)) fprintf(report->metrics, "%.7g", s->held_out);
  fprintf(report->metrics, ",%.6g,%.6g,%.1f,%.6g,%.4f\n", s->learning_rate, s->grad_norm,
          (double)s->step_tokens / s->seconds, s->dropped, s->load);
}

static void write_experts(struct lm_report *report, const struct lm_step_report *s) {
  int64_t every = (report->cfg.steps + EXPERT_ROWS - 1) / EXPERT_ROWS;
  if (s->step != 1 && s->step % (every > 0 ? every : 1) != 0) return;
  const double *count = s->expert_count;
  for (int l = 0; l < report->cfg.layers; l++) {
    int experts = report->cfg.experts.value[l];
    double total = 0;
    for (int e = 0; e < experts; e++) total += count[e];
    for (int e = 0; e < experts; e++)
      fprintf(report->experts, "%lld,%d,%d,%.5f\n", (long long)s->step, l, e, total > 0 ? count[e] / total : 0);
    count += experts;
  }
}

/* A run whose record is lost had better end. */
static void check_file(const struct lm_report *report, FILE *file, const char *name) {
  int failed = fflush(file);
  const char *why = failed ? strerror(errno) : "could not be written";
  if (failed || ferror(file)) lm_fatal("%s/%s: %s", report->cfg.out, name, why);
}

static void check_files(const struct lm_report *report) {
  check_file(report, report->metrics, "metrics.csv");
  check_file(report, report->experts, "experts.csv");
}

static void flush_output(void) {
  int failed = fflush(stdout);
  const char *why = failed ? strerror(errno) : "could not be written";
  if (failed || ferror(stdout)) lm_fatal("standard output: %s", why);
}

/* ---- lines ---- */

static void end_line(struct lm_report *report) {
  if (report->line_open) putchar('\n');
  report->line_open = 0;
}

void report_line(struct lm_report *report, const char *format, ...) {
  end_line(report);
  va_list args;
  va_start(args, format);
  vprintf(format, args);
  va_end(args);
  putchar('\n');
  flush_output();
}

void report_flush(struct lm_report *report) {
  end_line(report);
  flush_output();
  check_files(report);
}

static void format_rate(char text[16], double rate) {
  if (rate < 10000) snprintf(text, 16, "%.0f", rate);
  else snprintf(text, 16, "%.1fk", rate / 1000);
}

/* Makes double spaces single if the line is too long, and cuts it: one that wraps could not be written over. */
static void fit_terminal(char *line) {
  struct winsize size;
  size_t columns = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
  if (strlen(line) <= columns) return;
  char *to = line;
  for (const char *from = line; *from; from++)
    if (from[0] != ' ' || from[1] != ' ') *to++ = *from;
  *to = 0;
  if (strlen(line) > columns) line[columns] = 0;
}

/* Whether a line would not wait for its reader. An mpirun that ends reads no more from the terminals that it gives, and
 * training would stop short of its checkpoint. */
static int takes_output(void) {
  struct pollfd output = {.fd = STDOUT_FILENO, .events = POLLOUT};
  return poll(&output, 1, 0) != 0;
}

static void print_progress(struct lm_report *report, const struct lm_step_report *s) {
  int64_t every = (report->cfg.steps + PLAIN_LINES - 1) / PLAIN_LINES;
  int last = s->step == report->cfg.steps;
  if (!report->terminal && s->step != 1 && !last && s->step % every != 0) return;
  if (report->terminal && !last && !takes_output()) return;
  char rate[16], held_out[16] = "-", line[MOST_LINE];
  format_rate(rate, report->rate);
  if (!isnan(report->held_out)) snprintf(held_out, sizeof held_out, "%.3f", report->held_out);
  double left =
      (lm_now() - report->started) / (double)(s->step - report->first_step) * (double)(report->cfg.steps - s->step);
  int length = snprintf(line, sizeof line, "step %lld/%d  loss %.3f  held-out %s  %s tok/s  ETA %d:%02d",
                        (long long)s->step, report->cfg.steps, s->loss, held_out, rate, (int)left / 60, (int)left % 60);
  if (s->load > 0)
    snprintf(line + length, sizeof line - (size_t)length, "  dropped %.1f%%  load %.1f", 100 * s->dropped, s->load);
  if (report->terminal) fit_terminal(line);
  if (report->terminal) printf("\r\033[K%s", line);
  else printf("%s\n", line);
  report->line_open = report->terminal;
  flush_output();
}

void report_step(struct lm_report *report, const struct lm_step_report *s) {
  double rate = (double)s->step_tokens / s->seconds;
  report->rate = report->rate > 0 ? 0.9 * report->rate + 0.1 * rate : rate;
  if (!isnan(s->held_out)) report->held_out = s->held_out;
  write_metrics(report, s);
  write_experts(report, s);
  check_files(report);
  print_progress(report, s);
}

/* ---- beginning and end ---- */

static int stage_of(const struct lm_config *cfg, int layer) {
  int v = 0;
  for (int end = cfg->stages.value[0]; layer >= end; end += cfg->stages.value[v]) v++;
  return v % cfg->pp;
}

static void print_layout(const struct lm_layout *at, const struct lm_config *cfg) {
  static const char *const orders[] = {"1F1B", "interleaved", "GPipe"};
  if (at->tp * at->cp * at->pp == 1) return;
  printf("layout   data %d, tensor %d%s, context %d, pipeline %d", at->dp, at->tp, at->sp ? " with sequences" : "",
         at->cp, at->pp);
  if (at->pp > 1) printf(" (%s)", orders[cfg->schedule]);
  putchar('\n');
}

static void print_layers(const struct lm_model *model) {
  const struct lm_config *cfg = &model->cfg;
  static const char *const mixes[] = {"", ", learned residual", ", shared MLP", ", gated shared MLP"};
  for (int l = 0; l < cfg->layers; l++) {
    int experts = cfg->experts.value[l];
    if (experts == 0) printf("  layer %d  dense MLP", l);
    else
      printf("  layer %d  %d experts, top %d%s, expert parallel %d", l, experts, cfg->topk, mixes[cfg->residual],
             config_layer_ep(cfg, l, model->ranks->nranks));
    if (experts > 0 && cfg->etp > 1) printf(" x %d", cfg->etp);
    if (cfg->pp > 1) printf(", stage %d", stage_of(cfg, l));
    putchar('\n');
  }
}

void report_start(struct lm_report *report, const struct lm_model *model, int64_t train_tokens,
                  int64_t held_out_tokens) {
  const struct lm_config *cfg = &model->cfg;
  double params = 0;
  for (int i = 0; i < model->catalog.count; i++) {
    const struct lm_entry *entry = &model->catalog.entry[i];
    params += (double)entry->unit_numel * (entry->experts > 0 ? entry->experts : 1);
  }
  pmoe_gemm_info gemm = PMOE_CONFIG_INIT(pmoe_gemm_info);
  LM_TRY(pmoe_ctx_gemm_info(model->ranks->ctx, &gemm));
  printf("model    %.2fM parameters, %d layers, hidden %d, %d heads, context %d\n", params / 1e6, cfg->layers,
         cfg->hidden, cfg->heads, cfg->context);
  print_layers(model);
  printf("data     %s: %lld to train on, %lld held out\n", cfg->data, (long long)train_tokens,
         (long long)held_out_tokens);
  printf("ranks    %d (%s), %d thread%s each; %s\n", model->ranks->nranks, pmoe_comm_transport(model->ranks->world),
         model->ranks->threads, model->ranks->threads == 1 ? "" : "s", gemm.library);
  print_layout(&model->ranks->at, cfg);
  if (gemm.warning) printf("warning  %s\n", gemm.warning);
  printf("run      %s, steps %lld to %d of %d sequences\n", cfg->out, (long long)report->first_step + 1, cfg->steps,
         cfg->batch);
  if (model->num_experts_listed > 0) printf("         load: tokens of the fullest expert over the mean\n");
  putchar('\n');
  flush_output();
  report->started = lm_now();
}

void report_changes(struct lm_report *report, const char *changes, int text_is_new) {
  for (const char *line = changes; *line; line += strcspn(line, "\n") + 1)
    report_line(report, "resume   %.*s", (int)strcspn(line, "\n"), line);
  if (text_is_new) report_line(report, "resume   the text is another than until now");
}

static void print_times(const struct lm_report *report, const struct lm_model *model) {
  double whole = lm_now() - report->started, rest = whole;
  printf("\ntime per part (rank 0 of %d)\n", model->ranks->nranks);
  for (int part = 0; part < LM_NUM_PARTS; part++) {
    double seconds = model->seconds[part];
    rest -= seconds;
    if (seconds >= 0.0005 * whole)
      printf("  %-26s %8.2f s %5.1f %%\n", part_names[part], seconds, 100 * seconds / whole);
  }
  printf("  %-26s %8.2f s %5.1f %%\n", "rest", rest, 100 * rest / whole);
  printf("  %-26s %8.2f s\n", "whole", whole);
}

void report_summary(struct lm_report *report, const struct lm_model *model, const struct lm_summary *summary) {
  report_flush(report);
  const char *unit = summary->bytes ? "bits per byte" : "bits per token";
  printf("\nheld-out text, %s\n", unit);
  printf("  %-26s %8.3f\n", "this model", summary->held_out / log(2));
  printf("  %-26s %8.3f\n", "unigram entropy", summary->unigram);
  if (!isnan(summary->bigram)) printf("  %-26s %8.3f\n", "bigram entropy", summary->bigram);
  print_times(report, model);
}

void report_close(struct lm_report *report) {
  report_flush(report);
  if (fclose(report->metrics)) lm_fatal("%s/metrics.csv: %s", report->cfg.out, strerror(errno));
  if (fclose(report->experts)) lm_fatal("%s/experts.csv: %s", report->cfg.out, strerror(errno));
  free(report);
}
