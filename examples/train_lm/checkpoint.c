#include "checkpoint.h"

#include <errno.h>
#include <libgen.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "mail.h"
#include "safetensors.h"

enum { FULL_PATH = LM_MAX_PATH + 128, KINDS = 3 };

/* A parameter's three tensors: its values under its own name, and AdamW's two means. */
static const char *const prefixes[KINDS] = {"", "adam_m.", "adam_v."};

static float *numbers_of(const struct lm_param *p, int kind) {
  return kind == 0 ? p->master : kind == 1 ? p->adam_m : p->adam_v;
}

/* ---- what all ranks must know ---- */

/* -1 on every rank if any has failed, with the sentence of the first of these. */
static int agree(struct lm_ranks *ranks, int status, struct lm_error *err) {
  struct outcome {
    int failed;
    struct lm_error error;
  } *all = lm_alloc((size_t)ranks->nranks, sizeof *all), mine = {.failed = status != 0};
  if (status) mine.error = *err;
  LM_TRY(pmoe_comm_allgather(ranks->world, &mine, all, sizeof mine));
  int failed = 0;
  for (int r = 0; r < ranks->nranks && !failed; r++) {
    failed = all[r].failed;
    if (failed) *err = all[r].error;
  }
  free(all);
  return failed ? -1 : 0;
}

/* ---- saving: the first rank writes, the others bring their parts of one expert or parameter at a time ---- */

enum { TAG_ASK = 2 * LM_MAX_LAYERS, TAG_PART }; /* beside those of the pipeline */

struct saving {
  const struct lm_model *model;
  struct lm_ranks *ranks;
  struct safetensors_writer *writer; /* NULL on all ranks but the first, and there after a failure */
  struct lm_error *err;
  int failed;
  float *whole, *part; /* of one expert or parameter */
};

static void write_numbers(struct saving *s, const float *numbers, int64_t n) {
  if (!s->writer || safetensors_write(s->writer, numbers, n, s->err) == 0) return;
  safetensors_cancel(s->writer);
  s->writer = NULL;
  s->failed = 1;
}

static const float *part_of(const struct saving *s, const struct lm_holding *holding, int kind, int64_t unit) {
  const struct lm_param *p = &s->model->params[holding->local];
  return numbers_of(p, kind) + (unit - holding->first) * holding->runs.count * holding->runs.length;
}

static int holds(const struct lm_holding *holding, int64_t unit) {
  return unit >= holding->first && unit < holding->first + holding->units;
}

/* Asked for its part, a rank sends it: nobody else's memory fills up with what the first rank has no time for yet. */
static void bring(const struct saving *s, const struct lm_holding *holding, int kind, int64_t unit) {
  char asked;
  mail_receive(s->ranks->mail, 0, s->ranks->rank, TAG_ASK, &asked, 1);
  mail_send(s->ranks->mail, s->ranks->rank, 0, TAG_PART, part_of(s, holding, kind, unit),
            (size_t)(holding->runs.count * holding->runs.length) * sizeof(float));
}

static void take(const struct saving *s, const struct lm_holding *holding, int rank, int kind, int64_t unit) {
  const struct lm_runs *runs = &holding->runs;
  const float *part = rank == 0 ? part_of(s, holding, kind, unit) : s->part;
  if (rank > 0) {
    mail_send(s->ranks->mail, 0, rank, TAG_ASK, "", 1);
    mail_receive(s->ranks->mail, rank, 0, TAG_PART, s->part, (size_t)(runs->count * runs->length) * sizeof(float));
  }
  for (int64_t i = 0; i < runs->count; i++)
    memcpy(s->whole + runs->first + i * runs->stride, part + i * runs->length, (size_t)runs->length * sizeof(float));
}

static void write_entry(struct saving *s, const struct lm_entry *entry, int kind) {
  int64_t units = entry->experts > 0 ? entry->experts : 1;
  for (int64_t unit = 0; unit < units; unit++) {
    for (int r = 0; r < s->ranks->nranks; r++) {
      if (!holds(&entry->by[r], unit)) continue;
      if (s->ranks->rank == 0) take(s, &entry->by[r], r, kind, unit);
      else if (s->ranks->rank == r) bring(s, &entry->by[r], kind, unit);
    }
    write_numbers(s, s->whole, entry->unit_numel);
  }
}

static void write_all(struct saving *s) {
  const struct lm_catalog *catalog = &s->model->catalog;
  int64_t most = 1;
  for (int i = 0; i < catalog->count; i++)
    if (catalog->entry[i].unit_numel > most) most = catalog->entry[i].unit_numel;
  if (s->ranks->rank == 0) {
    s->whole = lm_alloc((size_t)most, sizeof *s->whole);
    s->part = lm_alloc((size_t)most, sizeof *s->part);
  }
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < catalog->count; i++) write_entry(s, &catalog->entry[i], kind);
  free(s->whole);
  free(s->part);
}

static void describe(const struct lm_model *model, const struct lm_state *state, struct safetensors *held) {
  char number[64];
  safetensors_add_string(held, "format", "pmoe train_lm 1");
  snprintf(number, sizeof number, "%lld", (long long)state->step);
  safetensors_add_string(held, "step", number);
  snprintf(number, sizeof number, "%lld", (long long)state->tokens_seen);
  safetensors_add_string(held, "tokens_seen", number);
  snprintf(number, sizeof number, "%llu", (unsigned long long)state->seed);
  safetensors_add_string(held, "seed", number);
  snprintf(number, sizeof number, "%.17g", isnan(state->held_out_loss) ? (double)NAN : state->held_out_loss);
  safetensors_add_string(held, "held_out_loss", number);
  safetensors_add_string(held, "config", state->config_text);
  safetensors_add_string(held, "data", state->data_text);
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < model->catalog.count; i++) {
      const struct lm_entry *entry = &model->catalog.entry[i];
      char name[96];
      snprintf(name, sizeof name, "%s%s", prefixes[kind], entry->name);
      safetensors_add(held, name, entry->ndim, entry->shape);
    }
}

static int make_folder(const char *path, struct lm_error *err) {
  char folder[FULL_PATH];
  snprintf(folder, sizeof folder, "%s", path);
  const char *name = dirname(folder);
  return mkdir(name, 0777) && errno != EEXIST ? lm_error_set(err, "%s: %s", name, strerror(errno)) : 0;
}

static struct safetensors_writer *begin(const char *path, const struct lm_model *model, const struct lm_state *state,
                                        struct lm_error *err) {
  if (make_folder(path, err)) return NULL;
  struct safetensors held = {0};
  describe(model, state, &held);
  struct safetensors_writer *writer = safetensors_begin(path, &held, err);
  safetensors_free(&held);
  return writer;
}

int checkpoint_try(const char *path, struct lm_error *err) {
  if (make_folder(path, err)) return -1;
  struct safetensors nothing = {0};
  struct safetensors_writer *writer = safetensors_begin(path, &nothing, err);
  if (!writer) return -1;
  safetensors_cancel(writer);
  return 0;
}

int checkpoint_save(const char *path, const struct lm_model *model, const struct lm_state *state,
                    struct lm_ranks *ranks, struct lm_error *err) {
  struct saving s = {.model = model, .ranks = ranks, .err = err};
  if (ranks->rank == 0) {
    s.writer = begin(path, model, state, err);
    s.failed = !s.writer;
  }
  if (agree(ranks, s.failed, err)) return -1;
  write_all(&s);
  if (s.writer) s.failed = safetensors_end(s.writer, err);
  return agree(ranks, s.failed, err);
}

/* ---- loading: every rank reads what it holds ---- */

static void find_file(const char *path, char file[FULL_PATH]) {
  struct stat info;
  if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) snprintf(file, FULL_PATH, "%s/%s", path, CHECKPOINT_NAME);
  else snprintf(file, FULL_PATH, "%s", path);
}

static int read_integer(const struct safetensors_reader *reader, const char *key, uint64_t *out, struct lm_error *err) {
  const char *text = safetensors_find_string(&reader->held, key);
  char *end = NULL;
  errno = 0;
  if (text) *out = strtoull(text, &end, 10);
  if (text && *text >= '0' && *text <= '9' && *end == 0 && errno == 0) return 0;
  return lm_error_set(err, "%s: its %s is \"%.32s\"; a whole number was expected", reader->path, key,
                      text ? text : "missing");
}

static int read_state(const struct safetensors_reader *reader, struct lm_state *state, struct lm_error *err) {
  struct lm_state found = {.held_out_loss = NAN};
  uint64_t step, tokens;
  const char *config = safetensors_find_string(&reader->held, "config");
  const char *held_out = safetensors_find_string(&reader->held, "held_out_loss");
  if (read_integer(reader, "step", &step, err) || read_integer(reader, "tokens_seen", &tokens, err)) return -1;
  if (read_integer(reader, "seed", &found.seed, err)) return -1;
  if (!config || strlen(config) >= sizeof found.config_text)
    return lm_error_set(err, "%s holds no settings: it is not train_lm's", reader->path);
  found.step = (int64_t)step, found.tokens_seen = (int64_t)tokens;
  if (held_out) found.held_out_loss = strtod(held_out, NULL);
  strcpy(found.config_text, config);
  const char *data = safetensors_find_string(&reader->held, "data");
  if (data) snprintf(found.data_text, sizeof found.data_text, "%s", data);
  *state = found;
  return 0;
}

static int same_shape(const struct safetensors_tensor *tensor, int ndim, const int64_t *shape) {
  int same = tensor->ndim == ndim;
  for (int d = 0; same && d < ndim; d++) same = tensor->shape[d] == shape[d];
  return same;
}

static void format_shape(char text[96], int ndim, const int64_t *shape) {
  int length = snprintf(text, 96, "[");
  for (int d = 0; d < ndim; d++)
    length += snprintf(text + length, (size_t)(96 - length), d ? ",%lld" : "%lld", (long long)shape[d]);
  snprintf(text + length, (size_t)(96 - length), "]");
}

/* Expert after expert; a shard is picked out of the whole expert. */
static int read_units(const struct safetensors_reader *reader, const struct safetensors_tensor *tensor,
                      const struct lm_param *p, float *to, struct lm_error *err) {
  int64_t units = param_units(p), first = p->num_global_experts > 0 ? p->first_expert : 0;
  struct lm_runs runs = param_runs(p);
  int64_t whole = tensor->numel / (p->num_global_experts > 0 ? p->num_global_experts : 1);
  if (units == 0) return 0;
  if (runs.count * runs.length == whole) return safetensors_read(reader, tensor, first * whole, p->numel, to, err);
  float *room = lm_alloc((size_t)whole, sizeof *room);
  int status = 0;
  for (int64_t u = 0; u < units && status == 0; u++) {
    status = safetensors_read(reader, tensor, (first + u) * whole, whole, room, err);
    for (int64_t i = 0; i < runs.count && status == 0; i++, to += runs.length)
      memcpy(to, room + runs.first + i * runs.stride, (size_t)runs.length * sizeof *to);
  }
  free(room);
  return status;
}

static int check_entry(const struct safetensors_reader *reader, const struct lm_entry *entry, int kind,
                       struct lm_error *err) {
  char name[96], found[96], expected[96];
  snprintf(name, sizeof name, "%s%s", prefixes[kind], entry->name);
  const struct safetensors_tensor *tensor = safetensors_find(&reader->held, name);
  if (!tensor) return lm_error_set(err, "%s has no tensor %s, which this model has", reader->path, name);
  if (same_shape(tensor, entry->ndim, entry->shape)) return 0;
  format_shape(found, tensor->ndim, tensor->shape);
  format_shape(expected, entry->ndim, entry->shape);
  return lm_error_set(err, "%s: tensor %s has shape %s; this model's is %s", reader->path, name, found, expected);
}

static int check_file(const struct safetensors_reader *reader, const struct lm_catalog *catalog, struct lm_error *err) {
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < catalog->count; i++)
      if (check_entry(reader, &catalog->entry[i], kind, err)) return -1;
  if (reader->held.num_tensors == KINDS * catalog->count) return 0;
  return lm_error_set(err, "%s has %d tensors; this model has %d", reader->path, reader->held.num_tensors,
                      KINDS * catalog->count);
}

static int read_params(const struct safetensors_reader *reader, struct lm_model *model, struct lm_error *err) {
  if (check_file(reader, &model->catalog, err)) return -1;
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < model->num_params; i++) {
      const struct lm_param *p = &model->params[i];
      char name[96];
      snprintf(name, sizeof name, "%s%s", prefixes[kind], p->name);
      if (read_units(reader, safetensors_find(&reader->held, name), p, numbers_of(p, kind), err)) return -1;
    }
  return 0;
}

int checkpoint_load(const char *path, struct lm_model *model, struct lm_state *state, struct lm_ranks *ranks,
                    struct lm_error *err) {
  char file[FULL_PATH];
  struct safetensors_reader reader;
  find_file(path, file);
  int status = safetensors_open(&reader, file, err), opened = status == 0;
  if (opened && ranks->rank == 0) status = safetensors_verify(&reader, err);
  if (agree(ranks, status, err) == 0) {
    status = read_state(&reader, state, err);
    if (status == 0) status = read_params(&reader, model, err);
    model_round_params(model);
    status = agree(ranks, status, err);
  } else status = -1;
  if (opened) safetensors_close(&reader);
  return status;
}

int checkpoint_config(const char *path, char text[LM_CONFIG_TEXT], struct lm_error *err) {
  char file[FULL_PATH];
  struct safetensors_reader reader;
  static const size_t room = LM_CONFIG_TEXT;
  find_file(path, file);
  if (safetensors_open(&reader, file, err)) return -1;
  const char *config = safetensors_find_string(&reader.held, "config");
  int status =
      config && strlen(config) < room ? 0 : lm_error_set(err, "%s holds no settings: it is not train_lm's", file);
  if (status == 0) strcpy(text, config);
  safetensors_close(&reader);
  return status;
}
