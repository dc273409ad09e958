/* train_lm: trains a pyramid-residual MoE language model on a text, with pmoe.
 *
 *   train_lm --data book.txt                       the preset "demo"
 *   train_lm --data book.txt --ranks 4 --ep 2      four ranks as threads
 *   mpirun -np 4 train_lm --data book.txt          four ranks as processes */
#include <argp.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint.h"
#include "train.h"

enum { FIRST_KEY = 1000, KEY_CONFIG = 900, KEY_HELP, KEY_USAGE, MOST_GIVEN = 128, MOST_OPTIONS = 64 };

/* What the command line said, in order; it comes after presets, checkpoint and file whatever its order. */
struct given {
  int helped; /* 1: only help was asked for */
  const char *config;
  int count;
  struct {
    const char *name, *value;
  } list[MOST_GIVEN];
};

static error_t parse(int key, char *value, struct argp_state *state) {
  struct given *given = state->input;
  struct lm_setting_help setting;
  if (key == KEY_CONFIG) given->config = value;
  else if (key == KEY_HELP || key == KEY_USAGE) {
    if (!given->helped) argp_state_help(state, stdout, key == KEY_HELP ? ARGP_HELP_STD_HELP : ARGP_HELP_USAGE);
    given->helped = 1;
  } else if (key == ARGP_KEY_ARG) {
    argp_error(state, "\"%s\" is no option", value);
    return EINVAL;
  } else if (key >= FIRST_KEY && config_setting(key - FIRST_KEY, &setting)) {
    if (given->count == MOST_GIVEN) {
      argp_error(state, "more than %d options", MOST_GIVEN);
      return EINVAL;
    }
    given->list[given->count].name = setting.name;
    given->list[given->count++].value = value ? value : "1";
  } else return ARGP_ERR_UNKNOWN;
  return 0;
}

static const char documentation[] =
    "Trains a decoder whose MLPs may be mixtures of experts, on one rank or in any layout of data, tensor, context, "
    "pipeline and expert parallelism.\v"
    "Ctrl-C saves a checkpoint and leaves; --resume goes on from it, in any layout.\n\n"
    "Exit status: 0 when done, 1 when the run failed, 64 for a command line or settings that are wrong, 130 after "
    "Ctrl-C "
    "and 143 after SIGTERM.";

/* Left to itself argp ends the process, and one that only leaves MPI would wait there for the others. */
static int read_options(int argc, char **argv, struct given *given) {
  struct argp_option options[MOST_OPTIONS] = {
      {"config", KEY_CONFIG, "FILE", 0, "settings, one \"name = value\" a line; options come after them", 0}};
  struct lm_setting_help setting;
  int count = 1;
  for (int i = 0; count + 3 < MOST_OPTIONS && config_setting(i, &setting); i++)
    options[count++] = (struct argp_option){setting.name, FIRST_KEY + i, setting.argument, 0, setting.help, 0};
  options[count++] = (struct argp_option){"help", KEY_HELP, NULL, 0, "give this help list", -1};
  options[count++] = (struct argp_option){"usage", KEY_USAGE, NULL, 0, "give a short usage message", -1};
  struct argp argp = {options, parse, NULL, documentation, NULL, NULL, NULL};
  return argp_parse(&argp, argc, argv, ARGP_NO_EXIT | ARGP_NO_HELP, NULL, given);
}

/* Of several processes one speaks; argp prints help and complaints by itself. */
static void read_command_line(int argc, char **argv, struct given *given) {
  int quiet = ranks_is_first_process() ? -1 : open("/dev/null", O_WRONLY), kept[2];
  for (int fd = 1; quiet >= 0 && fd <= 2; fd++) kept[fd - 1] = dup(fd), dup2(quiet, fd);
  int status = read_options(argc, argv, given);
  for (int fd = 1; quiet >= 0 && fd <= 2; fd++) dup2(kept[fd - 1], fd), close(kept[fd - 1]);
  if (quiet >= 0) close(quiet);
  if (status && quiet >= 0) lm_fatal_usage("the options of a process beside the first are wrong");
  if (status) ranks_abort(LM_EXIT_USAGE);
}

/* ---- settings: preset, then checkpoint, then file, then options: the later wins ---- */

static int take_file_and_options(struct lm_config *cfg, const struct given *given, struct lm_error *err) {
  if (given->config && config_set_file(cfg, given->config, err)) return -1;
  for (int i = 0; i < given->count; i++)
    if (config_set(cfg, given->list[i].name, given->list[i].value, err)) return -1;
  return 0;
}

/* A preset's warm-up is for its own number of steps. */
static void shorten_warmup(struct lm_config *cfg, int preset_warmup, int preset_steps) {
  if (cfg->warmup == preset_warmup && cfg->steps < preset_steps && cfg->warmup > cfg->steps / 10)
    cfg->warmup = cfg->steps / 10;
}

static void settle(struct lm_config *cfg, struct lm_config *saved, const struct given *given) {
  struct lm_error err;
  char text[LM_CONFIG_TEXT];
  config_init(cfg);
  if (take_file_and_options(cfg, given, &err)) lm_fatal_usage("%s", err.text);
  struct lm_config asked = *cfg;
  config_init(cfg);
  if (*asked.resume && *asked.preset)
    lm_fatal_usage("preset and resume are both set; a run that goes on has its checkpoint's settings");
  if (config_set_preset(cfg, asked.preset, &err)) lm_fatal_usage("%s", err.text);
  int warmup = cfg->warmup, steps = cfg->steps;
  if (*asked.resume) {
    if (checkpoint_config(asked.resume, text, &err)) lm_fatal("%s", err.text);
    if (config_set_text(cfg, text, asked.resume, &err)) lm_fatal("%s", err.text);
    *saved = *cfg;
  }
  if (take_file_and_options(cfg, given, &err)) lm_fatal_usage("%s", err.text);
  if (!*cfg->resume) shorten_warmup(cfg, warmup, steps);
}

static int settle_ranks(const struct lm_config *cfg, int processes) {
  if (processes > 0 && cfg->ranks > 0 && cfg->ranks != processes)
    lm_fatal_usage("ranks is %d; mpirun started %d processes, which are the ranks", cfg->ranks, processes);
  return processes > 0 ? processes : cfg->ranks > 0 ? cfg->ranks : 1;
}

int main(int argc, char **argv) {
  static struct given given;
  static struct lm_config saved;
  static struct lm_run run;
  struct lm_error err;
  int processes = 0;
  ranks_begin(&argc, &argv, &processes);
  read_command_line(argc, argv, &given);
  if (given.helped) {
    ranks_end();
    return 0;
  }
  settle(&run.cfg, &saved, &given);
  int nranks = settle_ranks(&run.cfg, processes);
  if (config_check(&run.cfg, nranks, &err)) lm_fatal_usage("%s", err.text);
  if (*run.cfg.resume && config_compare(&run.cfg, &saved, run.changes, &err)) lm_fatal_usage("%s", err.text);
  if (data_open(&run.data, run.cfg.data, run.cfg.context, &err)) lm_fatal("%s", err.text);
  run.vocab = run.cfg.vocab > 0 ? run.cfg.vocab : run.data.vocab;
  if (data_check(&run.data, run.vocab, &err)) lm_fatal("%s", err.text);
  train_catch_signals();
  ranks_run(&run.cfg, nranks, train_rank, &run);
  data_close(&run.data);
  ranks_end();
  return run.stopped_by ? 128 + run.stopped_by : 0;
}
