/* train_lm: trains a pyramid-residual MoE language model on a text, with pmoe.
 *
 *   train_lm --data book.txt                       the preset "demo"
 *   train_lm --data book.txt --ranks 4 --ep 2      four ranks as threads
 *   mpirun -np 4 train_lm --data book.txt          four ranks as processes */
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"
#include "train.h"

enum { FIRST_KEY = 1000, KEY_PRESET = 900, KEY_CONFIG, MOST_GIVEN = 128, MOST_OPTIONS = 64 };

/* What the command line said, in order; it comes after presets, checkpoint and file whatever its order. */
struct given {
  const char *preset, *config;
  int count;
  struct {
    const char *name, *value;
  } list[MOST_GIVEN];
};

static error_t parse(int key, char *value, struct argp_state *state) {
  struct given *given = state->input;
  struct lm_setting_help setting;
  if (key == KEY_PRESET) given->preset = value;
  else if (key == KEY_CONFIG) given->config = value;
  else if (key == ARGP_KEY_ARG) argp_error(state, "\"%s\" is no option", value);
  else if (key >= FIRST_KEY && config_setting(key - FIRST_KEY, &setting)) {
    if (given->count == MOST_GIVEN) argp_error(state, "more than %d options", MOST_GIVEN);
    given->list[given->count].name = setting.name;
    given->list[given->count++].value = value ? value : "1";
  } else return ARGP_ERR_UNKNOWN;
  return 0;
}

static void read_command_line(int argc, char **argv, struct given *given) {
  struct argp_option options[MOST_OPTIONS] = {
      {"preset", KEY_PRESET, "NAME", 0, "tiny, demo (the default) or small", 0},
      {"config", KEY_CONFIG, "FILE", 0, "settings, one \"name = value\" a line; options come after them", 0},
  };
  struct lm_setting_help setting;
  for (int i = 0; i + 3 < MOST_OPTIONS && config_setting(i, &setting); i++)
    options[i + 2] = (struct argp_option){setting.name, FIRST_KEY + i, setting.argument, 0, setting.help, 0};
  struct argp argp = {options,
                      parse,
                      NULL,
                      "Trains a decoder whose MLPs may be mixtures of experts.\vCtrl-C saves a checkpoint and leaves; "
                      "--resume goes on from it.",
                      NULL,
                      NULL,
                      NULL};
  argp_parse(&argp, argc, argv, 0, NULL, given);
}

/* Preset, then checkpoint, then file, then options: the later wins. */
static int settle(struct lm_config *cfg, const struct given *given, struct lm_error *err) {
  config_init(cfg);
  if (given->preset && config_set_preset(cfg, given->preset, err)) return -1;
  for (int i = 0; i < given->count; i++) {
    char text[LM_CONFIG_TEXT];
    if (strcmp(given->list[i].name, "resume") != 0) continue;
    if (checkpoint_config(given->list[i].value, text, err)) return -1;
    if (config_set_text(cfg, text, given->list[i].value, err)) return -1;
  }
  if (given->config && config_set_file(cfg, given->config, err)) return -1;
  for (int i = 0; i < given->count; i++)
    if (config_set(cfg, given->list[i].name, given->list[i].value, err)) return -1;
  return 0;
}

int main(int argc, char **argv) {
  struct given given = {0};
  read_command_line(argc, argv, &given);
  static struct lm_run run;
  struct lm_error err;
  int nranks = 0;
  ranks_begin(&argc, &argv, &nranks);
  if (settle(&run.cfg, &given, &err)) lm_fatal("%s", err.text);
  if (nranks == 0) nranks = run.cfg.ranks > 0 ? run.cfg.ranks : 1;
  if (config_check(&run.cfg, nranks, &err)) lm_fatal("%s", err.text);
  if (data_open(&run.data, run.cfg.data, run.cfg.context, &err)) lm_fatal("%s", err.text);
  run.vocab = run.cfg.vocab > 0 ? run.cfg.vocab : run.data.vocab;
  train_catch_signals();
  ranks_run(&run.cfg, nranks, train_rank, &run);
  data_close(&run.data);
  ranks_end();
  return run.interrupted ? 130 : 0;
}
