#include "config.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One table serves the command line, files and checkpoints. */
enum kind { INT, U64, REAL, TEXT, LIST, NAME, FLAG };

/* Of the model: kept in checkpoints, and the same when a run goes on. Of its training: kept, and may change. Of one run
 * alone: not kept. */
enum scope { MODEL, TRAINING, RUN };

static const char *const mix_names[] = {
    [PMOE_MIX_NONE] = "none", [PMOE_MIX_LEARNED] = "learned", [PMOE_MIX_SUM] = "sum", [PMOE_MIX_GATED_SUM] = "gated"};
static const char *const dtype_names[] = {[PMOE_F32] = "fp32", [PMOE_BF16] = "bf16"};
static const char *const schedule_names[] = {
    [LM_1F1B] = "1f1b", [LM_INTERLEAVED] = "interleaved", [LM_GPIPE] = "gpipe"};

struct setting {
  const char *name;
  enum kind kind;
  size_t offset;
  double least, most; /* TEXT: bytes; NAME: names */
  enum scope scope;
  const char *argument, *help;
  const char *const *names;
};

#define AT(field) offsetof(struct lm_config, field)
#define NAMES(list) sizeof(list) / sizeof *(list)
static const double many = 1 << 30;
static const struct setting settings[] = {
    {"preset", TEXT, AT(preset), 0, 31, RUN, "NAME", "tiny, demo (the default) or small; all else comes after it", 0},
    {"layers", INT, AT(layers), 1, LM_MAX_LAYERS, MODEL, "N", "blocks of the decoder", 0},
    {"hidden", INT, AT(hidden), 1, 65536, MODEL, "N", "hidden size", 0},
    {"heads", INT, AT(heads), 1, 1024, MODEL, "N", "attention heads", 0},
    {"context", INT, AT(context), 1, 1 << 20, MODEL, "N", "tokens of a sequence", 0},
    {"inner", INT, AT(inner), 0, 1 << 20, TRAINING, "N", "inner size of MLPs and experts (0: 4 x hidden)", 0},
    {"vocab", INT, AT(vocab), 0, 65536, TRAINING, "N", "number of tokens (0: 256 for text, 50257 for token files)", 0},
    {"experts", LIST, AT(experts), 0, 65536, MODEL, "LIST",
     "experts of each layer, such as 0,4,0,8 (0: dense MLP), or one number", 0},
    {"topk", INT, AT(topk), 1, 1024, TRAINING, "N", "experts a token goes to", 0},
    {"capacity", REAL, AT(capacity), 0, 1000, TRAINING, "X", "capacity factor (0: no token is dropped)", 0},
    {"residual", NAME, AT(residual), 0, NAMES(mix_names), MODEL, "MIX",
     "dense branch beside the experts: none, learned, sum or gated", mix_names},
    {"dtype", NAME, AT(dtype), 0, NAMES(dtype_names), TRAINING, "TYPE",
     "fp32, or bf16 for MLPs and experts (with float32 master weights)", dtype_names},
    {"aux", REAL, AT(aux), 0, 1000, TRAINING, "X", "coefficient of the load-balancing loss", 0},
    {"z", REAL, AT(z), 0, 1000, TRAINING, "X", "coefficient of the router's z-loss", 0},
    {"seed", U64, AT(seed), 0, 0, MODEL, "N", "of initial values and batches", 0},
    {"steps", INT, AT(steps), 0, 1 << 30, TRAINING, "N", "optimizer steps", 0},
    {"batch", INT, AT(batch), 1, 1 << 20, TRAINING, "N", "sequences of a step, over all ranks", 0},
    {"micro", INT, AT(micro), 1, 1 << 20, TRAINING, "N", "sequences of a micro-batch", 0},
    {"lr", REAL, AT(lr), 0, 1000, TRAINING, "X", "highest learning rate; it falls to a tenth along a cosine", 0},
    {"warmup", INT, AT(warmup), 0, 1 << 30, TRAINING, "N", "steps until the learning rate is at its highest", 0},
    {"weight-decay", REAL, AT(weight_decay), 0, 1000, TRAINING, "X", "of AdamW, for matrices", 0},
    {"clip", REAL, AT(clip), 0, 1e9, TRAINING, "X", "largest norm of the model's gradient (0: as it is)", 0},
    {"eval-every", INT, AT(eval_every), 0, 1 << 30, TRAINING, "N", "steps between evaluations (0: at the end only)", 0},
    {"eval-sequences", INT, AT(eval_sequences), 1, 1 << 20, TRAINING, "N",
     "held-out sequences of an evaluation on the way", 0},
    {"ep", LIST, AT(ep), 0, 65536, RUN, "LIST", "expert-parallel size: a number, one per layer, or auto", 0},
    {"etp", INT, AT(etp), 1, 1024, RUN, "N", "ranks that share out the inner size of each expert", 0},
    {"tp", INT, AT(tp), 1, 1024, RUN, "N", "ranks that share out attention heads and the inner size of MLPs", 0},
    {"sp", FLAG, AT(sp), 0, 1, RUN, NULL, "these ranks share out the tokens between matrix products too", 0},
    {"cp", INT, AT(cp), 1, 1024, RUN, "N", "ranks that share out each sequence", 0},
    {"pp", INT, AT(pp), 1, LM_MAX_LAYERS, RUN, "N", "pipeline stages", 0},
    {"schedule", NAME, AT(schedule), 0, NAMES(schedule_names), RUN, "NAME",
     "of the pipeline: 1f1b, interleaved or gpipe", schedule_names},
    {"stages", LIST, AT(stages), 1, LM_MAX_LAYERS, RUN, "LIST",
     "layers of each stage, such as 6,2; interleaved: of two or more rounds of stages (default: stages of equal cost)",
     0},
    {"data", TEXT, AT(data), 0, LM_MAX_PATH - 1, RUN, "PATH", "text file, folder of text, or token file (llm.c's .bin)",
     0},
    {"out", TEXT, AT(out), 1, LM_MAX_PATH - 1, RUN, "DIR", "folder for metrics.csv, experts.csv and plots", 0},
    {"overwrite", FLAG, AT(overwrite), 0, 1, RUN, NULL, "begin anew in a folder that holds another run", 0},
    {"save", TEXT, AT(save), 0, LM_MAX_PATH - 1, RUN, "DIR", "folder for the checkpoint (default: that of --out)", 0},
    {"save-every", INT, AT(save_every), 0, 1 << 30, RUN, "N", "steps between checkpoints (0: at the end only)", 0},
    {"resume", TEXT, AT(resume), 0, LM_MAX_PATH - 1, RUN, "PATH", "continue from this checkpoint, with its settings",
     0},
    {"ranks", INT, AT(ranks), 1, 1024, RUN, "N", "ranks as threads; under mpirun its processes are the ranks", 0},
    {"threads", INT, AT(threads), 0, 1024, RUN, "N", "threads of each rank (0: an equal share of the cores)", 0},
    {"sample", INT, AT(sample), 0, 1 << 20, RUN, "N", "tokens to generate at the end", 0},
    {"gemm-floor", FLAG, AT(gemm_floor), 0, 1, RUN, NULL, "time the step's matrix products alone, for comparison", 0},
};
enum { NUM_SETTINGS = sizeof settings / sizeof *settings };

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

/* "none, learned, sum or gated" */
static void list_names(const struct setting *s, char text[64]) {
  int length = 0, count = (int)s->most;
  for (int i = 0; i < count; i++)
    length += snprintf(text + length, 64 - (size_t)length, "%s%s",
                       i == 0           ? ""
                       : i == count - 1 ? " or "
                                        : ", ",
                       s->names[i]);
}

static int set_name(unsigned *to, const struct setting *s, const char *value, struct lm_error *err) {
  char names[64];
  for (unsigned i = 0; i < (unsigned)s->most; i++) {
    if (strcmp(s->names[i], value) != 0) continue;
    *to = i;
    return 0;
  }
  list_names(s, names);
  return lm_error_set(err, "%s is \"%s\"; %s was expected", s->name, value, names);
}

static int set_text(char *to, const struct setting *s, const char *value, struct lm_error *err) {
  double bytes = (double)strlen(value);
  if (bytes > s->most)
    return lm_error_set(err, "%s has %.0f bytes; at most %.0f were expected", s->name, bytes, s->most);
  if (bytes < s->least) return lm_error_set(err, "%s is empty; a path was expected", s->name);
  strcpy(to, value);
  return 0;
}

static int set(struct lm_config *cfg, const struct setting *s, const char *value, struct lm_error *err) {
  void *to = (char *)cfg + s->offset;
  double number;
  char *end;
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
    if (*value < '0' || *value > '9' || *end || errno)
      return lm_error_set(err, "%s is \"%s\"; a whole number of 0 or more was expected", s->name, value);
    *(uint64_t *)to = seed;
    return 0;
  case REAL:
    if (parse_number(value, 0, s->least, s->most, &number))
      return lm_error_set(err, "%s is \"%s\"; a number from %g to %g was expected", s->name, value, s->least, s->most);
    *(float *)to = (float)number;
    return 0;
  case LIST:
    if (parse_list(s, value, to))
      return lm_error_set(err, "%s is \"%s\"; up to %d whole numbers%s with commas between, such as %s, were expected",
                          s->name, value, LM_MAX_LAYERS, s->least > 0 ? " above 0" : "",
                          s->offset == AT(ep)       ? "1,2,1,4 or auto"
                          : s->offset == AT(stages) ? "6,2"
                                                    : "0,4,0,8");
    return 0;
  case TEXT: return set_text(to, s, value, err);
  case NAME: return set_name(to, s, value, err);
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

/* ---- as text ---- */

int config_write_list(const struct lm_list *list, char *to, size_t room) {
  int length = 0;
  for (int i = 0; i < list->count; i++)
    length += snprintf(to + length, room - (size_t)length, "%s%d", i ? "," : "", list->value[i]);
  return length;
}

static int write_value(const struct lm_config *cfg, const struct setting *s, char *to, size_t room) {
  const void *from = (const char *)cfg + s->offset;
  switch (s->kind) {
  case FLAG:
  case INT: return snprintf(to, room, "%d", *(const int *)from);
  case U64: return snprintf(to, room, "%llu", (unsigned long long)*(const uint64_t *)from);
  case REAL: return snprintf(to, room, "%.9g", (double)*(const float *)from);
  case TEXT: return snprintf(to, room, "%s", (const char *)from);
  case NAME: return snprintf(to, room, "%s", s->names[*(const unsigned *)from]);
  case LIST: return config_write_list(from, to, room);
  }
  return 0;
}

void config_write(const struct lm_config *cfg, char text[LM_CONFIG_TEXT]) {
  size_t length = 0;
  text[0] = 0;
  for (int i = 0; i < NUM_SETTINGS; i++) {
    if (settings[i].scope == RUN) continue;
    length += (size_t)snprintf(text + length, LM_CONFIG_TEXT - length, "%s = ", settings[i].name);
    length += (size_t)write_value(cfg, &settings[i], text + length, LM_CONFIG_TEXT - length);
    length += (size_t)snprintf(text + length, LM_CONFIG_TEXT - length, "\n");
  }
}

int config_compare(const struct lm_config *cfg, const struct lm_config *saved, char changes[LM_CONFIG_TEXT],
                   struct lm_error *err) {
  size_t length = 0;
  changes[0] = 0;
  for (int i = 0; i < NUM_SETTINGS; i++) {
    const struct setting *s = &settings[i];
    char now[512], before[512];
    if (s->scope == RUN) continue;
    write_value(cfg, s, now, sizeof now);
    write_value(saved, s, before, sizeof before);
    if (strcmp(now, before) == 0) continue;
    if (s->scope == MODEL)
      return lm_error_set(err, "%s is %.200s; the checkpoint's model has %.200s, which cannot change", s->name, now,
                          before);
    length += (size_t)snprintf(changes + length, LM_CONFIG_TEXT - length, "%s is %s; until now it was %s\n", s->name,
                               now, before);
  }
  return 0;
}
