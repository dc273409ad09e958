/* Settings from presets and files. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "config.h"

enum { MOST_KEYS = 64, MOST_KEY = 32 };

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
  cfg->tp = cfg->cp = cfg->pp = cfg->etp = 1;
  strcpy(cfg->out, "train_lm.run");
  struct lm_error err;
  config_set_preset(cfg, "demo", &err);
}

int config_set_preset(struct lm_config *cfg, const char *name, struct lm_error *err) {
  if (!*name) return 0;
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

/* The keys of a text so far. */
struct keys {
  int count;
  struct {
    char name[MOST_KEY];
    int line;
  } key[MOST_KEYS];
};

/* The line that has set this key already, or 0. */
static int add_key(struct keys *keys, const char *name, int line) {
  for (int i = 0; i < keys->count; i++)
    if (strcmp(keys->key[i].name, name) == 0) return keys->key[i].line;
  if (keys->count == MOST_KEYS) return 0;
  keys->key[keys->count].line = line;
  snprintf(keys->key[keys->count++].name, MOST_KEY, "%s", name);
  return 0;
}

static int set_line(struct lm_config *cfg, char *line, int number, struct keys *keys, const char *origin,
                    struct lm_error *err) {
  line[strcspn(line, "#")] = 0;
  char *key = trim(line), *equals = strchr(key, '=');
  if (!*key) return 0;
  if (!equals) return lm_error_set(err, "%s:%d: \"%s\" is not of the form key = value", origin, number, key);
  *equals = 0;
  struct lm_error why;
  key = trim(key);
  if (config_set(cfg, key, trim(equals + 1), &why)) return lm_error_set(err, "%s:%d: %.500s", origin, number, why.text);
  int before = add_key(keys, key, number);
  if (before) return lm_error_set(err, "%s:%d: %s is set in line %d already", origin, number, key, before);
  return 0;
}

int config_set_text(struct lm_config *cfg, const char *text, const char *origin, struct lm_error *err) {
  static const char mark[] = "\xef\xbb\xbf"; /* some editors begin UTF-8 with it */
  if (strncmp(text, mark, 3) == 0) text += 3;
  int number = 1;
  struct keys keys = {0};
  for (const char *at = text; *at; number++) {
    char line[LM_MAX_PATH + 64];
    size_t length = strcspn(at, "\n");
    if (length >= sizeof line) return lm_error_set(err, "%s:%d: the line is too long", origin, number);
    memcpy(line, at, length);
    line[length] = 0;
    at += length + (at[length] == '\n');
    if (set_line(cfg, line, number, &keys, origin, err)) return -1;
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
  if (strlen(text) != length)
    return lm_error_set(err, "config file %s: a zero byte after %zu bytes", path, strlen(text));
  return config_set_text(cfg, text, path, err);
}
