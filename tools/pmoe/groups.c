/* pmoe groups: the parallel groups that sizes and an order make, as tables, a drawing or JSON. */
#include <argp.h>
#include <cjson/cJSON.h>
#include <errno.h>
#include <pmoe/pmoe.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"

static const char *const dense_names[] = {"tp", "cp", "pp", "dp", "dp_cp", "tp_cp", "tp_dp", "tp_dp_cp", "mp", NULL};
static const char *const expert_names[] = {"ep", "expt_tp", "tp_ep", "tp_ep_pp", "expt_dp", NULL};

typedef struct request {
  int32_t world;
  pmoe_topology_config cfg;
  bool json;
} request;

/* ---- options ---- */

enum { KEY_TP = 256, KEY_CP, KEY_PP, KEY_EP, KEY_ETP, KEY_ORDER, KEY_JSON };

static const struct argp_option options[] = {
    {"world", 'w', "N", 0, "Number of ranks", 1},
    {"tp", KEY_TP, "N", 0, "Tensor parallel (1)", 1},
    {"cp", KEY_CP, "N", 0, "Context parallel (1)", 1},
    {"pp", KEY_PP, "N", 0, "Pipeline parallel (1)", 1},
    {"ep", KEY_EP, "N", 0, "Expert parallel (1)", 1},
    {"etp", KEY_ETP, "N", 0, "Expert tensor parallel (1; Megatron-LM's default is tp)", 1},
    {"order", KEY_ORDER, "ORDER", 0, "Mixed radix, the fastest first (tp-cp-ep-dp-pp)", 1},
    {"json", KEY_JSON, NULL, 0, "One JSON object instead of tables and a drawing", 2},
    {0}};

static int32_t number(const struct argp_state *state, const char *name, const char *text) {
  char *end;
  errno = 0;
  long value = strtol(text, &end, 10);
  if (errno || end == text || *end || value < 1 || value > 1 << 20)
    argp_error(state, "%s is \"%s\"; a number from 1 to %d was expected", name, text, 1 << 20);
  return (int32_t)value;
}

static error_t parse(int key, char *text, struct argp_state *state) {
  request *r = state->input;
  switch (key) {
  case 'w': r->world = number(state, "--world", text); return 0;
  case KEY_TP: r->cfg.tp = number(state, "--tp", text); return 0;
  case KEY_CP: r->cfg.cp = number(state, "--cp", text); return 0;
  case KEY_PP: r->cfg.pp = number(state, "--pp", text); return 0;
  case KEY_EP: r->cfg.ep = number(state, "--ep", text); return 0;
  case KEY_ETP: r->cfg.etp = number(state, "--etp", text); return 0;
  case KEY_ORDER: r->cfg.order = text; return 0;
  case KEY_JSON: r->json = true; return 0;
  case ARGP_KEY_ARG: argp_error(state, "\"%s\" is no option", text); return 0;
  case ARGP_KEY_END:
    if (r->world == 0) argp_error(state, "--world is missing; the number of ranks was expected");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

/* ---- lists ---- */

static int32_t size_of(int32_t given) { return given > 0 ? given : 1; }
static const char *order_of(const request *r) { return r->cfg.order ? r->cfg.order : "tp-cp-ep-dp-pp"; }

static bool get(const request *r, const char *group, int32_t *ranks, pmoe_rank_lists *lists) {
  *lists = (pmoe_rank_lists){0, 0, ranks};
  if (pmoe_topology_ranks(r->world, &r->cfg, group, lists) == PMOE_OK) return true;
  fprintf(stderr, "pmoe groups: %s\n", pmoe_last_error());
  return false;
}

static int32_t group_size(const request *r, const char *group, int32_t *ranks) {
  pmoe_rank_lists lists;
  return get(r, group, ranks, &lists) ? lists.group_size : 0;
}

/* ---- JSON ---- */

static bool add_lists(const request *r, cJSON *parent, const char *name, const char *const *groups, int32_t *ranks) {
  cJSON *object = cJSON_AddObjectToObject(parent, name);
  for (; *groups; groups++) {
    pmoe_rank_lists lists;
    if (!get(r, *groups, ranks, &lists)) return false;
    cJSON *array = cJSON_AddArrayToObject(object, *groups);
    for (int32_t g = 0; g < lists.num_groups; g++)
      cJSON_AddItemToArray(array, cJSON_CreateIntArray(ranks + g * lists.group_size, lists.group_size));
  }
  return true;
}

static bool print_json(const request *r, int32_t *ranks) {
  cJSON *json = cJSON_CreateObject(), *config = cJSON_AddObjectToObject(json, "config");
  cJSON_AddNumberToObject(config, "world", r->world);
  cJSON_AddNumberToObject(config, "tp", size_of(r->cfg.tp));
  cJSON_AddNumberToObject(config, "cp", size_of(r->cfg.cp));
  cJSON_AddNumberToObject(config, "pp", size_of(r->cfg.pp));
  cJSON_AddNumberToObject(config, "ep", size_of(r->cfg.ep));
  cJSON_AddNumberToObject(config, "etp", size_of(r->cfg.etp));
  cJSON_AddStringToObject(config, "order", order_of(r));
  cJSON *sizes = cJSON_AddObjectToObject(json, "sizes");
  cJSON_AddNumberToObject(sizes, "dp", group_size(r, "dp", ranks));
  cJSON_AddNumberToObject(sizes, "edp", group_size(r, "expt_dp", ranks));
  bool ok = add_lists(r, json, "dense", dense_names, ranks) && add_lists(r, json, "expert", expert_names, ranks);
  char *text = ok ? cJSON_PrintUnformatted(json) : NULL;
  if (text) puts(text);
  free(text);
  cJSON_Delete(json);
  return ok && text;
}

/* ---- tables ---- */

enum { WIDTH = 100, INDENT = 24 };

/* "0-3" where at least three ranks follow each other, else "0,4". */
static int write_group(const int32_t *ranks, int32_t n, char *out, size_t size) {
  int length = 0;
  for (int32_t i = 0, end; i < n && length < (int)size; i = end) {
    for (end = i + 1; end < n && ranks[end] == ranks[end - 1] + 1;) end++;
    const char *comma = i > 0 ? "," : "";
    if (end - i >= 3)
      length += snprintf(out + length, size - (size_t)length, "%s%d-%d", comma, ranks[i], ranks[end - 1]);
    else {
      end = i + 1;
      length += snprintf(out + length, size - (size_t)length, "%s%d", comma, ranks[i]);
    }
  }
  return length;
}

static bool print_table(const request *r, const char *title, const char *const *groups, int32_t *ranks, char *text,
                        size_t size) {
  printf("\n%-10s %5s %6s  ranks\n", title, "size", "groups");
  for (; *groups; groups++) {
    pmoe_rank_lists lists;
    if (!get(r, *groups, ranks, &lists)) return false;
    int column = printf("  %-8s %5d %6d", *groups, lists.group_size, lists.num_groups);
    for (int32_t g = 0; g < lists.num_groups; g++) {
      int length = write_group(ranks + g * lists.group_size, lists.group_size, text, size);
      if (column + 2 + length > WIDTH && column > INDENT) column = printf("\n%*s", INDENT, "") - 1;
      column += printf("  %s", text);
    }
    putchar('\n');
  }
  return true;
}

/* ---- drawing ---- */

/* Each rank's place in its groups of one kind: its coordinate there. */
static bool find_places(const request *r, const char *group, int32_t *ranks, int32_t *place, int32_t *size) {
  pmoe_rank_lists lists;
  if (!get(r, group, ranks, &lists)) return false;
  for (int32_t i = 0; i < r->world; i++) place[ranks[i]] = i % lists.group_size;
  *size = lists.group_size;
  return true;
}

/* A grid of one pipeline stage: a row for each copy, a column for each part, and in a cell the shards side by side. */
typedef struct grid {
  const char *row_name, *column_name;
  int32_t rows, columns, shards, stages;
  int32_t *row, *column, *shard, *stage; /* [world] coordinates of every rank */
} grid;

static void print_cell(const request *r, const grid *g, int32_t stage, int32_t row, int32_t column, int width) {
  char text[256];
  int length = 0;
  for (int32_t shard = 0; shard < g->shards; shard++)
    for (int32_t rank = 0; rank < r->world && length < (int)sizeof text; rank++)
      if (g->stage[rank] == stage && g->row[rank] == row && g->column[rank] == column && g->shard[rank] == shard)
        length += snprintf(text + length, sizeof text - (size_t)length, "%s%d", shard > 0 ? "+" : "", rank);
  printf("  %*s", width, text);
}

static void print_grid(const request *r, const grid *g, int32_t stage) {
  int digits = snprintf(NULL, 0, "%d", r->world - 1), width = (digits + 1) * g->shards - 1;
  int name = (int)strlen(g->column_name) + 1 + digits;
  if (width < name) width = name;
  printf("  %-10s", "");
  for (int32_t column = 0; column < g->columns; column++)
    printf("  %*s%s %d", width - snprintf(NULL, 0, "%s %d", g->column_name, column), "", g->column_name, column);
  putchar('\n');
  for (int32_t row = 0; row < g->rows; row++) {
    printf("  %-6s %3d", g->row_name, row);
    for (int32_t column = 0; column < g->columns; column++) print_cell(r, g, stage, row, column, width);
    putchar('\n');
  }
}

enum { DRAWN_RANKS = 256, DRAWN_COLUMNS = 32 };

static bool draw(const request *r, int32_t *ranks, int32_t *room) {
  int32_t *at[6];
  for (int i = 0; i < 6; i++) at[i] = room + (int64_t)i * r->world;
  int32_t tp, copies, stages, ep, etp, edp;
  if (!find_places(r, "tp", ranks, at[0], &tp) || !find_places(r, "dp_cp", ranks, at[1], &copies) ||
      !find_places(r, "pp", ranks, at[2], &stages) || !find_places(r, "ep", ranks, at[3], &ep) ||
      !find_places(r, "expt_tp", ranks, at[4], &etp) || !find_places(r, "expt_dp", ranks, at[5], &edp))
    return false;
  if (r->world > DRAWN_RANKS || tp > DRAWN_COLUMNS || ep * etp > DRAWN_COLUMNS) return true;
  int32_t *zero = ranks;
  memset(zero, 0, (size_t)r->world * sizeof *zero);
  const grid dense = {"dp cp", "tp", copies, tp, 1, stages, at[1], at[0], zero, at[2]};
  const grid expert = {"edp", "ep", edp, ep, etp, stages, at[5], at[3], at[4], at[2]};
  for (int32_t stage = 0; stage < stages; stage++) {
    printf("\nstage %d: dense layers\n", stage);
    print_grid(r, &dense, stage);
    printf("stage %d: experts%s\n", stage, etp > 1 ? ", the ranks of one expert's shards joined by +" : "");
    print_grid(r, &expert, stage);
  }
  return true;
}

static bool print_text(const request *r, int32_t *ranks, int32_t *room, char *text, size_t size) {
  int32_t dp = group_size(r, "dp", ranks), edp = dp ? group_size(r, "expt_dp", ranks) : 0;
  if (dp == 0 || edp == 0) return false;
  printf("world %d: tp %d, cp %d, dp %d, pp %d; etp %d, ep %d, edp %d, pp %d; order %s\n", r->world, size_of(r->cfg.tp),
         size_of(r->cfg.cp), dp, size_of(r->cfg.pp), size_of(r->cfg.etp), size_of(r->cfg.ep), edp, size_of(r->cfg.pp),
         order_of(r));
  return print_table(r, "dense", dense_names, ranks, text, size) &&
         print_table(r, "expert", expert_names, ranks, text, size) && draw(r, ranks, room);
}

static const char doc[] =
    "Shows which ranks form which parallel groups, by the rule of Megatron-LM's parallel_state.\v"
    "Dense groups are those of attention and other dense layers (tp, cp, dp, pp and their unions), expert groups those "
    "of experts: ep holds all experts, expt_tp shards one, expt_dp holds copies. DeepSpeed's own groups are those of "
    "the order tp-cp-ep-dp-pp, and of tp-cp-dp-ep-pp with data before expert parallelism.\n\n"
    "Example: pmoe groups --world 16 --tp 2 --pp 2 --ep 4";

int command_groups(int argc, char **argv) {
  request r = {.cfg = PMOE_CONFIG_INIT(pmoe_topology_config)};
  const struct argp parser = {options, parse, NULL, doc, NULL, NULL, NULL};
  argp_parse(&parser, argc, argv, ARGP_IN_ORDER, NULL, &r);
  size_t world = (size_t)r.world, text_size = 12 * world + 1;
  int32_t *ranks = calloc(world, sizeof *ranks), *room = calloc(6 * world, sizeof *room);
  char *text = calloc(text_size, 1);
  int status = EXIT_FAILED;
  if (!ranks || !room || !text) fprintf(stderr, "pmoe groups: no memory for %d ranks\n", r.world);
  else {
    bool ok = r.json ? print_json(&r, ranks) : print_text(&r, ranks, room, text, text_size);
    status = ok ? EXIT_OK : EXIT_USAGE;
  }
  free(ranks);
  free(room);
  free(text);
  if (status == EXIT_OK && fflush(stdout) != 0) status = EXIT_FAILED;
  return status;
}
