#include "config.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* One table serves the command line, files and checkpoints. */
enum kind { INT, U64, REAL, TEXT, LIST, MIX, DTYPE, FLAG };

struct setting {
  const char *name;
  enum kind kind;
  size_t offset;
  double least, most;
  int of_run; /* of this run alone: not kept in checkpoints */
  const char *argument, *help;
};

#define AT(field) offsetof(struct lm_config, field)
static const double many = 1 << 30;
static const struct setting settings[] = {
    {"layers", INT, AT(layers), 1, LM_MAX_LAYERS, 0, "N", "blocks of the decoder"},
    {"hidden", INT, AT(hidden), 1, 65536, 0, "N", "hidden size"},
    {"heads", INT, AT(heads), 1, 1024, 0, "N", "attention heads"},
    {"context", INT, AT(context), 1, 1 << 20, 0, "N", "tokens of a sequence"},
    {"inner", INT, AT(inner), 0, 1 << 20, 0, "N", "inner size of MLPs and experts (0: 4 x hidden)"},
    {"vocab", INT, AT(vocab), 0, 65536, 0, "N", "number of tokens (0: 256 for text, 50257 for token files)"},
    {"experts", LIST, AT(experts), 0, 65536, 0, "LIST",
     "experts of each layer, such as 0,4,0,8 (0: dense MLP), or one number"},
    {"topk", INT, AT(topk), 1, 1024, 0, "N", "experts a token goes to"},
    {"capacity", REAL, AT(capacity), 0, 1000, 0, "X", "capacity factor (0: no token is dropped)"},
    {"residual", MIX, AT(residual), 0, 0, 0, "MIX", "dense branch beside the experts: none, learned, sum or gated"},
    {"dtype", DTYPE, AT(dtype), 0, 0, 0, "TYPE", "fp32, or bf16 for MLPs and experts (with float32 master weights)"},
    {"aux", REAL, AT(aux), 0, 1000, 0, "X", "coefficient of the load-balancing loss"},
    {"z", REAL, AT(z), 0, 1000, 0, "X", "coefficient of the router's z-loss"},
    {"seed", U64, AT(seed), 0, 0, 0, "N", "of initial values and batches"},
    {"steps", INT, AT(steps), 0, 1 << 30, 0, "N", "optimizer steps"},
    {"batch", INT, AT(batch), 1, 1 << 20, 0, "N", "sequences of a step, over all ranks"},
    {"micro", INT, AT(micro), 1, 1 << 20, 0, "N", "sequences of a micro-batch"},
    {"lr", REAL, AT(lr), 0, 1000, 0, "X", "highest learning rate; it falls to a tenth along a cosine"},
    {"warmup", INT, AT(warmup), 0, 1 << 30, 0, "N", "steps until the learning rate is at its highest"},
    {"weight-decay", REAL, AT(weight_decay), 0, 1000, 0, "X", "of AdamW, for matrices"},
    {"clip", REAL, AT(clip), 0, 1e9, 0, "X", "largest norm of the model's gradient (0: as it is)"},
    {"eval-every", INT, AT(eval_every), 0, 1 << 30, 0, "N", "steps between evaluations (0: at the end only)"},
    {"eval-sequences", INT, AT(eval_sequences), 1, 1 << 20, 0, "N", "held-out sequences of an evaluation on the way"},
    {"ep", LIST, AT(ep), 0, 65536, 1, "LIST", "expert-parallel size: a number, one per layer, or auto"},
    {"data", TEXT, AT(data), 0, 0, 1, "PATH", "text file, folder of text, or token file (llm.c's .bin)"},
    {"out", TEXT, AT(out), 0, 0, 1, "DIR", "folder for metrics.csv, experts.csv and plots"},
    {"save", TEXT, AT(save), 0, 0, 1, "DIR", "folder for the checkpoint (default: that of --out)"},
    {"save-every", INT, AT(save_every), 0, 1 << 30, 1, "N", "steps between checkpoints (0: at the end only)"},
    {"resume", TEXT, AT(resume), 0, 0, 1, "PATH", "continue from this checkpoint, with its settings"},
    {"ranks", INT, AT(ranks), 1, 1024, 1, "N", "ranks as threads; under mpirun its processes are the ranks"},
    {"threads", INT, AT(threads), 0, 1024, 1, "N", "threads of each rank (0: an equal share of the cores)"},
    {"sample", INT, AT(sample), 0, 1 << 20, 1, "N", "tokens to generate at the end"},
    {"gemm-floor", FLAG, AT(gemm_floor), 0, 1, 1, NULL, "time the step's matrix products alone, for comparison"},
};
enum { NUM_SETTINGS = sizeof settings / sizeof *settings };

static const char *const mix_names[] = {
    [PMOE_MIX_NONE] = "none", [PMOE_MIX_LEARNED] = "learned", [PMOE_MIX_SUM] = "sum", [PMOE_MIX_GATED_SUM] = "gated"};
static const char *const dtype_names[] = {[PMOE_F32] = "fp32", [PMOE_BF16] = "bf16"};

static const struct {
  const char *name, *text;
} presets[] = {
    {"tiny",
     "layers = 2\n hidden = 32\n heads = 2\n context = 32\n experts = 0,4\n steps = 50\n batch = 8\n micro = 2\n"
     "lr = 0.01\n warmup = 5\n eval-every = 10\n eval-sequences = 8\n sample = 32\n"},
    {"demo",
     "layers = 4\n hidden = 128\n heads = 4\n context = 128\n experts = 0,4,0,8\n topk = 1\n residual = learned\n"
     "ep = auto\n steps = 900\n batch = 16\n micro = 4\n lr = 0.003\n warmup = 40\n eval-every = 50\n"
     "eval-sequences = 64\n sample = 300\n"},
    {"small",
     "layers = 6\n hidden = 512\n heads = 8\n context = 256\n experts = 0,8,0,8,0,8\n topk = 1\n residual = none\n"
     "steps = 1000\n batch = 8\n micro = 8\n lr = 0.001\n warmup = 100\n eval-every = 100\n eval-sequences = 32\n"
     "sample = 300\n"},
};

void config_init(struct lm_config *cfg) {
  memset(cfg, 0, sizeof *cfg);
  cfg->topk = 1;
  cfg->residual = PMOE_MIX_LEARNED;
  cfg->aux = 0.01f;
  cfg->z = 0.001f;
  cfg->seed = 1;
  cfg->weight_decay = 0.1f;
  cfg->clip = 1.0f;
  cfg->ranks = 1;
  strcpy(cfg->out, "train_lm.run");
  struct lm_error err;
  config_set_preset(cfg, "demo", &err);
}

/* ---- one setting ---- */

static int parse_number(const char *text, int whole, double least, double most, double *out) {
  char *end;
  errno = 0;
  double value = strtod(text, &end);
  if (end == text || *end || errno || !isfinite(value) || value < least || value > most) return -1;
  if (whole && value != floor(value)) return -1;
  *out = value;
  return 0;
}

static int parse_name(const char *text, const char *const *names, int count) {
  for (int i = 0; i < count; i++)
    if (names[i] && strcmp(names[i], text) == 0) return i;
  return -1;
}

static int parse_list(const struct setting *s, const char *text, struct lm_list *out) {
  struct lm_list list = {0};
  for (const char *at = text; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
    char item[32];
    size_t length = strcspn(at, ",");
    double value = 0;
    if (list.count == LM_MAX_LAYERS || length == 0 || length >= sizeof item) return -1;
    memcpy(item, at, length);
    item[length] = 0;
    int is_auto = s->offset == AT(ep) && strcmp(item, "auto") == 0;
    if (!is_auto && parse_number(item, 1, s->offset == AT(ep) ? 1 : s->least, s->most, &value)) return -1;
    list.value[list.count++] = (int)value;
  }
  *out = list;
  return 0;
}

static int set(struct lm_config *cfg, const struct setting *s, const char *value, struct lm_error *err) {
  void *to = (char *)cfg + s->offset;
  double number;
  char *end;
  int name;
  switch (s->kind) {
  case FLAG:
  case INT:
    if (parse_number(value, 1, s->least, s->most, &number))
      return lm_error_set(err, "%s is \"%s\"; a whole number from %.0f to %.0f was expected", s->name, value, s->least,
                          fmin(s->most, many));
    *(int *)to = (int)number;
    return 0;
  case U64:
    errno = 0;
    unsigned long long seed = strtoull(value, &end, 10);
    if (end == value || *end || errno || *value == '-')
      return lm_error_set(err, "%s is \"%s\"; a whole number of 0 or more was expected", s->name, value);
    *(uint64_t *)to = seed;
    return 0;
  case REAL:
    if (parse_number(value, 0, s->least, s->most, &number))
      return lm_error_set(err, "%s is \"%s\"; a number from %g to %g was expected", s->name, value, s->least, s->most);
    *(float *)to = (float)number;
    return 0;
  case TEXT:
    if (strlen(value) >= LM_MAX_PATH)
      return lm_error_set(err, "%s has %zu bytes; at most %d were expected", s->name, strlen(value), LM_MAX_PATH - 1);
    strcpy(to, value);
    return 0;
  case LIST:
    if (parse_list(s, value, to))
      return lm_error_set(err, "%s is \"%s\"; up to %d whole numbers with commas between, such as %s, were expected",
                          s->name, value, LM_MAX_LAYERS, s->offset == AT(ep) ? "1,2,1,4 or auto" : "0,4,0,8");
    return 0;
  case MIX:
    if ((name = parse_name(value, mix_names, 4)) < 0)
      return lm_error_set(err, "%s is \"%s\"; none, learned, sum or gated was expected", s->name, value);
    *(pmoe_mix *)to = (pmoe_mix)name;
    return 0;
  case DTYPE:
    if ((name = parse_name(value, dtype_names, 2)) < 0)
      return lm_error_set(err, "%s is \"%s\"; fp32 or bf16 was expected", s->name, value);
    *(pmoe_dtype *)to = (pmoe_dtype)name;
    return 0;
  }
  return -1;
}

int config_set(struct lm_config *cfg, const char *key, const char *value, struct lm_error *err) {
  for (int i = 0; i < NUM_SETTINGS; i++)
    if (strcmp(settings[i].name, key) == 0) return set(cfg, &settings[i], value, err);
  return lm_error_set(err, "there is no setting \"%s\"", key);
}

int config_setting(int index, struct lm_setting_help *out) {
  if (index >= NUM_SETTINGS) return 0;
  *out = (struct lm_setting_help){settings[index].name, settings[index].argument, settings[index].help};
  return 1;
}

/* ---- many settings ---- */

int config_set_preset(struct lm_config *cfg, const char *name, struct lm_error *err) {
  for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
    if (strcmp(presets[i].name, name) == 0) return config_set_text(cfg, presets[i].text, name, err);
  return lm_error_set(err, "preset is \"%s\"; tiny, demo or small was expected", name);
}

/* Cuts off white space at both ends, in place. */
static char *trim(char *text) {
  text += strspn(text, " \t\r");
  size_t length = strlen(text);
  while (length > 0 && strchr(" \t\r", text[length - 1])) text[--length] = 0;
  return text;
}

int config_set_text(struct lm_config *cfg, const char *text, const char *origin, struct lm_error *err) {
  int number = 1;
  for (const char *at = text; *at; number++) {
    char line[LM_MAX_PATH + 64];
    size_t length = strcspn(at, "\n");
    if (length >= sizeof line) return lm_error_set(err, "%s:%d: the line is too long", origin, number);
    memcpy(line, at, length);
    line[length] = 0;
    at += length + (at[length] == '\n');
    line[strcspn(line, "#")] = 0;
    char *key = trim(line), *equals = strchr(key, '=');
    if (!*key) continue;
    if (!equals) return lm_error_set(err, "%s:%d: \"%s\" is not of the form key = value", origin, number, key);
    *equals = 0;
    struct lm_error why;
    if (config_set(cfg, trim(key), trim(equals + 1), &why))
      return lm_error_set(err, "%s:%d: %.500s", origin, number, why.text);
  }
  return 0;
}

int config_set_file(struct lm_config *cfg, const char *path, struct lm_error *err) {
  FILE *file = fopen(path, "r");
  if (!file) return lm_error_set(err, "config file %s: %s", path, strerror(errno));
  char text[LM_CONFIG_TEXT];
  size_t length = fread(text, 1, sizeof text - 1, file);
  int failed = ferror(file), too_long = !failed && fgetc(file) != EOF;
  fclose(file);
  if (failed) return lm_error_set(err, "config file %s: %s", path, strerror(errno));
  if (too_long) return lm_error_set(err, "config file %s is longer than %zu bytes", path, sizeof text - 1);
  text[length] = 0;
  return config_set_text(cfg, text, path, err);
}

static int write_value(const struct lm_config *cfg, const struct setting *s, char *to, size_t room) {
  const void *from = (const char *)cfg + s->offset;
  switch (s->kind) {
  case FLAG:
  case INT: return snprintf(to, room, "%d", *(const int *)from);
  case U64: return snprintf(to, room, "%llu", (unsigned long long)*(const uint64_t *)from);
  case REAL: return snprintf(to, room, "%.9g", (double)*(const float *)from);
  case TEXT: return snprintf(to, room, "%s", (const char *)from);
  case MIX: return snprintf(to, room, "%s", mix_names[*(const pmoe_mix *)from]);
  case DTYPE: return snprintf(to, room, "%s", dtype_names[*(const pmoe_dtype *)from]);
  case LIST: break;
  }
  const struct lm_list *list = from;
  int length = 0;
  for (int i = 0; i < list->count; i++)
    length += snprintf(to + length, room - (size_t)length, "%s%d", i ? "," : "", list->value[i]);
  return length;
}

void config_write(const struct lm_config *cfg, char text[LM_CONFIG_TEXT]) {
  size_t length = 0;
  text[0] = 0;
  for (int i = 0; i < NUM_SETTINGS; i++) {
    if (settings[i].of_run) continue;
    length += (size_t)snprintf(text + length, LM_CONFIG_TEXT - length, "%s = ", settings[i].name);
    length += (size_t)write_value(cfg, &settings[i], text + length, LM_CONFIG_TEXT - length);
    length += (size_t)snprintf(text + length, LM_CONFIG_TEXT - length, "\n");
  }
}

/* ---- what goes together ---- */

int config_inner(const struct lm_config *cfg) { return cfg->inner > 0 ? cfg->inner : 4 * cfg->hidden; }

int config_layer_ep(const struct lm_config *cfg, int layer, int nranks) {
  if (cfg->ep.value[layer] > 0) return cfg->ep.value[layer];
  int ep = nranks;
  while (nranks % ep || cfg->experts.value[layer] % ep) ep--;
  return ep;
}

static int spread(struct lm_list *list, int layers, const char *name, struct lm_error *err) {
  if (list->count == 1)
    while (list->count < layers) list->value[list->count++] = list->value[0];
  if (list->count == layers) return 0;
  return lm_error_set(err, "%s has %d numbers; one for each of the %d layers, or a single one, was expected", name,
                      list->count, layers);
}

static int check_layer(const struct lm_config *cfg, int layer, int nranks, struct lm_error *err) {
  int experts = cfg->experts.value[layer], ep = config_layer_ep(cfg, layer, nranks);
  if (experts == 0) return 0;
  if (cfg->topk > experts)
    return lm_error_set(err, "topk is %d; layer %d has %d experts only", cfg->topk, layer, experts);
  if (nranks % ep)
    return lm_error_set(err, "ep is %d in layer %d; a divisor of the %d ranks was expected", ep, layer, nranks);
  return 0;
}

int config_check(struct lm_config *cfg, int nranks, struct lm_error *err) {
  if (cfg->hidden % cfg->heads)
    return lm_error_set(err, "hidden is %d; a multiple of the %d heads was expected", cfg->hidden, cfg->heads);
  if (spread(&cfg->experts, cfg->layers, "experts", err) || spread(&cfg->ep, cfg->layers, "ep", err)) return -1;
  for (int l = 0; l < cfg->layers; l++)
    if (check_layer(cfg, l, nranks, err)) return -1;
  int micros = (cfg->batch + cfg->micro - 1) / cfg->micro;
  if (micros < nranks)
    return lm_error_set(err,
                        "batch is %d: in micro-batches of %d sequences that is work for %d of the %d ranks; a "
                        "larger batch, a smaller micro or fewer ranks were expected",
                        cfg->batch, cfg->micro, micros, nranks);
  if (!*cfg->data)
    return lm_error_set(err, "data is missing; a text file, a folder of text or a token file was expected");
  return 0;
}
