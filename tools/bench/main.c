/* pmoe-bench: speed and memory of the layer and its stages, each beside ceilings measured in the same run. */
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"

typedef struct command {
  const char *name;
  pmoe_status (*run)(bench_rank *rank);
  int needs;
  const char *doc;
} command;

static const command commands[] = {
    {"layer", bench_layer, BENCH_NEEDS_EXPERTS | BENCH_NEEDS_RANKS | BENCH_NEEDS_LAYER,
     "Forward and backward of the whole layer, on one rank or on many.\v"
     "Ceilings: the GEMM floor (the experts' six products and nothing else, in the best of several schedules) and the "
     "dense twin (the same "
     "products with all rows in one expert). With --ranks, the same tokens and threads on one rank are measured too."},
    {"gate", bench_gate, BENCH_NEEDS_SHAPE,
     "Forward and backward of the router.\vCeiling: its products and nothing else. What forward takes beyond its "
     "product "
     "(scores, choices, slots) is set beside one exponentiation of as many numbers as there are logits."},
    {"rows", bench_rows, BENCH_NEEDS_SHAPE,
     "Row gather and weighted combine on one rank, forward and backward.\vCeiling: a copy that reads and writes as "
     "many bytes."},
    {"experts", bench_experts, BENCH_NEEDS_EXPERTS,
     "Forward and backward of the experts, their rows being sorted already.\vCeilings: the GEMM floor and the dense "
     "twin, as for layer."},
    {"exchange", bench_exchange, BENCH_NEEDS_RANKS,
     "Plan, dispatch and combine between ranks.\vCeilings: under mpirun a bare MPI_Alltoallv of the same bytes, else a "
     "copy of them."},
};
enum { NUM_COMMANDS = sizeof commands / sizeof *commands };

static const char doc[] =
    "Measures a Mixture-of-Experts layer and its stages.\v"
    "Commands:\n"
    "  layer      the whole layer\n"
    "  gate       the router\n"
    "  rows       row gather and weighted combine\n"
    "  experts    the experts' feed-forward networks\n"
    "  exchange   plan, dispatch and combine between ranks\n\n"
    "pmoe-bench COMMAND --help lists a command's options. Every command compares its results with an independent "
    "reference "
    "and times its ceilings in turn with itself; times are medians. With --backend cuda (layer, gate, rows, experts) "
    "they are "
    "those of CUDA events around enqueued work, and the ceilings run on the device, too.\n\n"
    "Exit status: 0 success, 1 a result was wrong, 2 the command line was, 3 the library or the system failed.";

static error_t parse_none(int key, char *text, struct argp_state *state) {
  if (key == ARGP_KEY_ARG) argp_error(state, "\"%s\" is no command", text);
  if (key == ARGP_KEY_NO_ARGS) argp_error(state, "a command was expected");
  return ARGP_ERR_UNKNOWN;
}

static int run(const command *c, int argc, char **argv) {
  char name[64];
  snprintf(name, sizeof name, "pmoe-bench %s", c->name);
  argv[1] = name;
  bench_options options;
  bench_parse(argc - 1, argv + 1, c->doc, c->needs, &options);
  return bench_run_ranks(&options, (c->needs & BENCH_NEEDS_RANKS) != 0, c->run);
}

int main(int argc, char **argv) {
  char version[64];
  uint32_t v = pmoe_version();
  snprintf(version, sizeof version, "pmoe-bench %u.%u.%u", v / 10000, v / 100 % 100, v % 100);
  argp_program_version = version;
  argp_err_exit_status = BENCH_EXIT_USAGE;
  for (int i = 0; argc > 1 && i < NUM_COMMANDS; i++)
    if (strcmp(argv[1], commands[i].name) == 0) return run(&commands[i], argc, argv);
  struct argp top = {NULL, parse_none, "COMMAND [OPTION...]", doc, NULL, NULL, NULL};
  argp_parse(&top, argc, argv, ARGP_IN_ORDER, NULL, NULL);
  return BENCH_EXIT_USAGE;
}
