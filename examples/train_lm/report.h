/* What the user sees: a live progress line, a summary, and two files in the run's folder.
 *
 * metrics.csv, one row a step, a header line first:
 *   step               1 for the first
 *   tokens             seen since the beginning
 *   loss               mean cross-entropy of the step's tokens, in nats
 *   aux_loss, z_loss   of the routers, with their coefficients, summed over layers; 0 without MoE layers
 *   held_out_loss      nats per token; empty where the step was not followed by an evaluation
 *   learning_rate
 *   grad_norm          of the whole model, before clipping
 *   tokens_per_second
 *   dropped            share of choices without a slot
 *   load_max_over_mean choices of the fullest expert over the mean, in the worst layer; 0 without MoE layers
 *
 * experts.csv, one row for each expert of each MoE layer at about 200 evenly spaced steps, a header line first:
 *   step, layer (from 0, dense ones counted), expert, share (of the layer's choices in that step; sums to 1) */
#ifndef LM_REPORT_H
#define LM_REPORT_H
#include "model.h"

struct lm_step_report {
  int64_t step, tokens;
  double loss, aux, z, held_out; /* held_out: NaN if there was no evaluation */
  double learning_rate, grad_norm, seconds;
  int64_t step_tokens;
  double dropped, load;
  const double *expert_count; /* as in struct lm_sums */
};

struct lm_summary {
  double held_out;        /* nats per token, over the whole held-out part */
  double unigram, bigram; /* entropies of the held-out part in bits per token; bigram NaN if not counted */
  int bytes;              /* whether a token is a byte */
  int64_t steps;          /* done in this run */
};

struct lm_report;

/* Opens the files in cfg->out, which is made if absent; another run's are kept from a new one unless cfg->overwrite.
 * Rows of steps after first_step, left by a run that went on after its last checkpoint, are taken away. Not collective:
 * for the rank that speaks. */
struct lm_report *report_open(const struct lm_config *cfg, int64_t first_step, struct lm_error *err);
void report_start(struct lm_report *report, const struct lm_model *model, int64_t train_tokens,
                  int64_t held_out_tokens);
/* What is new in a run that goes on. */
void report_changes(struct lm_report *report, const char *changes, int text_is_new);
/* Ends the program if the files, or standard output, cannot be written. */
void report_step(struct lm_report *report, const struct lm_step_report *step);
/* A line between progress lines. */
void report_line(struct lm_report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Writes what is buffered and ends the progress line. */
void report_flush(struct lm_report *report);
void report_summary(struct lm_report *report, const struct lm_model *model, const struct lm_summary *summary);
void report_close(struct lm_report *report);

#endif
