#include "options.h"

#include <argp.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

static const char *const pattern_names[] = {"balanced", "multinomial", "zipf", "one", NULL};
static const char *const act_names[] = {"gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu", NULL};
static const char *const dtype_names[] = {"f32", "bf16", "f16", NULL};
static const char *const backend_names[] = {"cpu", "cuda", NULL};
static const char *const sizing_names[] = {"eager", "fixed", NULL};

const char *bench_pattern_name(bench_pattern pattern) { return pattern_names[pattern]; }
const char *bench_act_name(pmoe_act act) { return act_names[act]; }
const char *bench_dtype_name(pmoe_dtype dtype) { return dtype_names[dtype]; }
int bench_on_device(const bench_options *options) { return options->backend == PMOE_BACKEND_CUDA; }

enum { KEY_ACT = 256, KEY_BIAS, KEY_SEED, KEY_GEMM, KEY_BACKEND, KEY_SIZING, KEY_CAPACITY, KEY_GRAPH, KEY_RESIDUAL };

static const struct argp_option shape_options[] = {
    {NULL, 0, NULL, 0, "Sizes:", 1},
    {"tokens", 'T', "N", 0, "Tokens of all ranks together (4096)", 1},
    {"hidden", 'H', "N", 0, "Hidden size (512)", 1},
    {"experts", 'E', "N", 0, "Experts over all ranks (8)", 1},
    {"top-k", 'K', "N", 0, "Experts per token (2)", 1},
    {"dtype", 'd', "TYPE", 0, "f32 or bf16, on CUDA also f16 (f32)", 1},
    {"routing", 'p', "PATTERN", 0,
     "Where tokens go: balanced, multinomial (uniform), zipf (expert e in proportion to 1/(e+1)), or one (every "
     "token's first choice is "
     "expert 0, its second expert 1, ...) (balanced)",
     1},
    {"seed", KEY_SEED, "N", 0, "Of the data and the random patterns (1)", 1},
    {0}};
static const struct argp_option expert_options[] = {
    {"inner", 'F', "N", 0, "Inner size of an expert (2048)", 1},
    {"act", KEY_ACT, "NAME", 0, "gelu, gelu_tanh, relu, silu, swiglu or geglu (gelu)", 1},
    {"bias", KEY_BIAS, NULL, 0, "Experts with biases", 1},
    {0}};
static const struct argp_option rank_options[] = {
    {NULL, 0, NULL, 0, "Ranks:", 2},
    {"ranks", 'r', "N", 0, "Ranks as threads of this process (1). Under mpirun its processes are the ranks", 2},
    {0}};
static const struct argp_option layer_options[] = {
    {"residual", KEY_RESIDUAL, NULL, 0, "A dense branch of the experts' inner size, mixed by learned coefficients", 1},
    {"capacity-factor", KEY_CAPACITY, "X", 0,
     "Slots of an expert over the mean number of choices, 1 or more, with balanced routing, so that nothing is dropped "
     "(dropless)",
     1},
    {"sizing", KEY_SIZING, "MODE", 0, "eager, or fixed: with a capacity factor, sizes are known beforehand (eager)", 1},
    {"graph", KEY_GRAPH, NULL, 0, "On CUDA with fixed sizing: steps are captured into graphs, which are measured", 1},
    {0}};
static const struct argp_option run_options[] = {
    {NULL, 0, NULL, 0, "Run:", 3},
    {"backend", KEY_BACKEND, "NAME", 0, "cpu or cuda: where the library computes (cpu)", 3},
    {"threads", 't', "N", 0, "Threads of all ranks together, at least 1 each (all cores)", 3},
    {"gemm", KEY_GEMM, "NAME", 0,
     "Matrix-multiply provider: onednn, cblas or plain (the first that is built in); on CUDA cublas or cublas-grouped "
     "(cublas)",
     3},
    {"iters", 'n', "N", 0, "Measured iterations (10)", 3},
    {"warmup", 'w', "N", 0, "Iterations before them (2)", 3},
    {"check", 'c', "0|1", 0, "Compare with an independent reference after the measurement (1)", 3},
    {"json", 'j', NULL, 0, "One JSON object a line instead of a table", 3},
    {0}};

static int64_t number(const struct argp_state *state, const char *name, const char *text, int64_t least, int64_t most) {
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  if (errno || end == text || *end || value < least || value > most)
    argp_error(state, "%s is \"%s\"; a number from %lld to %lld was expected", name, text, (long long)least,
               (long long)most);
  return value;
}

static int choice(const struct argp_state *state, const char *name, const char *text, const char *const *names) {
  for (int i = 0; names[i]; i++)
    if (strcmp(text, names[i]) == 0) return i;
  argp_error(state, "%s is \"%s\"; see --help for what was expected", name, text);
  return 0;
}

static int32_t size32(const struct argp_state *state, const char *name, const char *text) {
  return (int32_t)number(state, name, text, 1, 1 << 30);
}

static error_t parse_shape(int key, char *text, struct argp_state *state) {
  bench_options *o = state->input;
  switch (key) {
  case 'T': o->tokens = number(state, "--tokens", text, 0, INT64_C(1) << 40); return 0;
  case 'H': o->hidden = size32(state, "--hidden", text); return 0;
  case 'E': o->experts = size32(state, "--experts", text); return 0;
  case 'K': o->top_k = size32(state, "--top-k", text); return 0;
  case 'd': o->dtype = (pmoe_dtype)choice(state, "--dtype", text, dtype_names); return 0;
  case 'p': o->pattern = (bench_pattern)choice(state, "--routing", text, pattern_names); return 0;
  case KEY_SEED: o->seed = (uint64_t)number(state, "--seed", text, 0, INT64_MAX); return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static error_t parse_experts(int key, char *text, struct argp_state *state) {
  bench_options *o = state->input;
  switch (key) {
  case 'F': o->inner = size32(state, "--inner", text); return 0;
  case KEY_ACT: o->act = (pmoe_act)choice(state, "--act", text, act_names); return 0;
  case KEY_BIAS: o->bias = 1; return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static error_t parse_ranks(int key, char *text, struct argp_state *state) {
  bench_options *o = state->input;
  if (key != 'r') return ARGP_ERR_UNKNOWN;
  o->ranks = (int32_t)number(state, "--ranks", text, 1, 1024);
  return 0;
}

static float factor(const struct argp_state *state, const char *name, const char *text) {
  char *end;
  float value = strtof(text, &end);
  if (end == text || *end || !(value >= 1 && value <= 1024))
    argp_error(state, "%s is \"%s\"; a number from 1 to 1024 was expected", name, text);
  return value;
}

static error_t parse_layer(int key, char *text, struct argp_state *state) {
  bench_options *o = state->input;
  switch (key) {
  case KEY_RESIDUAL: o->residual = 1; return 0;
  case KEY_CAPACITY: o->capacity_factor = factor(state, "--capacity-factor", text); return 0;
  case KEY_SIZING: o->sizing = (pmoe_sizing)choice(state, "--sizing", text, sizing_names); return 0;
  case KEY_GRAPH: o->graph = 1; return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static error_t parse_run(int key, char *text, struct argp_state *state) {
  bench_options *o = state->input;
  switch (key) {
  case 't': o->threads = (int32_t)number(state, "--threads", text, 1, 4096); return 0;
  case KEY_GEMM: o->gemm = text; return 0;
  case KEY_BACKEND:
    o->backend = choice(state, "--backend", text, backend_names) ? PMOE_BACKEND_CUDA : PMOE_BACKEND_CPU;
    return 0;
  case 'n': o->iters = (int32_t)number(state, "--iters", text, 1, 1000000); return 0;
  case 'w': o->warmup = (int32_t)number(state, "--warmup", text, 0, 1000000); return 0;
  case 'c': o->check = (int32_t)number(state, "--check", text, 0, 1); return 0;
  case 'j': o->json = 1; return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

typedef struct command_input {
  bench_options *options;
  int num_children;
} command_input;

static void check_device_options(const struct argp_state *state, const bench_options *o) {
  if (o->dtype == PMOE_F16 && !bench_on_device(o)) argp_error(state, "--dtype f16 needs --backend cuda");
  if (o->ranks > 1 && bench_on_device(o))
    argp_error(state, "--ranks is %d; 1 was expected with --backend cuda", o->ranks);
  if (o->capacity_factor > 0 && o->pattern != BENCH_BALANCED)
    argp_error(state, "--capacity-factor needs --routing balanced, where nothing is dropped");
  if (o->sizing == PMOE_SIZING_FIXED && !(o->capacity_factor > 0))
    argp_error(state, "--sizing fixed needs --capacity-factor");
  if (o->graph && (!bench_on_device(o) || o->sizing != PMOE_SIZING_FIXED))
    argp_error(state, "--graph needs --backend cuda and --sizing fixed");
}

static error_t parse_command(int key, char *text, struct argp_state *state) {
  const command_input *input = state->input;
  bench_options *o = input->options;
  switch (key) {
  case ARGP_KEY_INIT:
    for (int i = 0; i < input->num_children; i++) state->child_inputs[i] = o;
    return 0;
  case ARGP_KEY_ARG: argp_error(state, "\"%s\" was not expected", text); return 0;
  case ARGP_KEY_END:
    if (o->top_k > BENCH_MAX_TOP_K)
      argp_error(state, "--top-k is %d; at most %d was expected", o->top_k, BENCH_MAX_TOP_K);
    if (o->top_k > o->experts)
      argp_error(state, "--top-k is %d; at most --experts (%d) was expected", o->top_k, o->experts);
    if (o->experts > o->hidden)
      argp_error(state, "--experts is %d; at most --hidden (%d) was expected, where the tokens' choices are encoded",
                 o->experts, o->hidden);
    check_device_options(state, o);
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

void bench_parse(int argc, char **argv, const char *doc, int needs, bench_options *out) {
  *out = (bench_options){.tokens = 4096, .hidden = 512, .inner = 2048, .experts = 8, .top_k = 2, .ranks = 1};
  out->backend = PMOE_BACKEND_CPU;
  out->warmup = 2, out->iters = 10, out->check = 1, out->seed = 1;
  static const struct argp shape = {shape_options, parse_shape, NULL, NULL, NULL, NULL, NULL};
  static const struct argp experts = {expert_options, parse_experts, NULL, NULL, NULL, NULL, NULL};
  static const struct argp layer = {layer_options, parse_layer, NULL, NULL, NULL, NULL, NULL};
  static const struct argp ranks = {rank_options, parse_ranks, NULL, NULL, NULL, NULL, NULL};
  static const struct argp run = {run_options, parse_run, NULL, NULL, NULL, NULL, NULL};
  struct argp_child children[6] = {{&shape, 0, NULL, 0}, {&run, 0, NULL, 0}};
  int n = 2;
  if (needs & BENCH_NEEDS_EXPERTS) children[n++].argp = &experts;
  if (needs & BENCH_NEEDS_LAYER) children[n++].argp = &layer;
  if (needs & BENCH_NEEDS_RANKS) children[n++].argp = &ranks;
  struct argp command = {NULL, parse_command, NULL, doc, children, NULL, NULL};
  command_input input = {out, n};
  argp_parse(&command, argc, argv, 0, NULL, &input);
}
