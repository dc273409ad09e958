#include <argp.h>
#include <pmoe/pmoe.h>
#include <stdio.h>
#include <string.h>

#include "commands.h"

typedef struct command {
  const char *name;
  int (*run)(int argc, char **argv);
} command;

static const command commands[] = {{"groups", command_groups}};
enum { NUM_COMMANDS = sizeof commands / sizeof *commands };

static const char doc[] = "Answers questions about Mixture-of-Experts training with pmoe.\v"
                          "Commands:\n"
                          "  groups     which ranks form which parallel groups\n\n"
                          "pmoe COMMAND --help lists a command's options.\n\n"
                          "Exit status: 0 success, 2 the command line was wrong, 3 the system failed.";

static error_t parse(int key, char *text, struct argp_state *state) {
  if (key == ARGP_KEY_ARG) argp_error(state, "\"%s\" is no command", text);
  if (key == ARGP_KEY_NO_ARGS) argp_error(state, "a command was expected");
  return ARGP_ERR_UNKNOWN;
}

int main(int argc, char **argv) {
  char version[64], name[64];
  uint32_t v = pmoe_version();
  snprintf(version, sizeof version, "pmoe %u.%u.%u", v / 10000, v / 100 % 100, v % 100);
  argp_program_version = version;
  argp_err_exit_status = EXIT_USAGE;
  for (int i = 0; argc > 1 && i < NUM_COMMANDS; i++) {
    if (strcmp(argv[1], commands[i].name) != 0) continue;
    snprintf(name, sizeof name, "pmoe %s", commands[i].name);
    argv[1] = name;
    return commands[i].run(argc - 1, argv + 1);
  }
  struct argp top = {NULL, parse, "COMMAND [OPTION...]", doc, NULL, NULL, NULL};
  argp_parse(&top, argc, argv, ARGP_IN_ORDER, NULL, NULL);
  return EXIT_USAGE;
}
