#include "checkpoint.h"

#include <errno.h>
#include <libgen.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "safetensors.h"

enum { FULL_PATH = LM_MAX_PATH + 128, KINDS = 3 };

/* A parameter's three tensors: its values under its own name, and AdamW's two means. */
static const char *const prefixes[KINDS] = {"", "adam_m.", "adam_v."};

static float *numbers_of(const struct lm_param *p, int kind) {
  return kind == 0 ? p->master : kind == 1 ? p->adam_m : p->adam_v;
}

/* The whole parameter, over all ranks. */
static void global_shape(const struct lm_param *p, int64_t shape[SAFETENSORS_MOST_DIMS]) {
  for (int d = 0; d < p->ndim; d++) shape[d] = p->shape[d];
  if (p->num_global_experts > 0) shape[0] = p->num_global_experts;
}

static int64_t numel_of_expert(const struct lm_param *p) {
  int64_t numel = 1;
  for (int d = 1; d < p->ndim; d++) numel *= p->shape[d];
  return numel;
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

/* owner[e]: the rank whose copy of expert e is saved. */
static void find_owners(const struct lm_param *p, struct lm_ranks *ranks, int *owner) {
  int64_t mine[2] = {p->first_expert, p->first_copy ? p->shape[0] : 0}, *all;
  all = lm_alloc((size_t)ranks->nranks, sizeof mine);
  LM_TRY(pmoe_comm_allgather(ranks->world, mine, all, sizeof mine));
  for (int r = 0; r < ranks->nranks; r++)
    for (int64_t e = 0; e < all[2 * r + 1]; e++) owner[all[2 * r] + e] = r;
  free(all);
}

/* ---- saving: the first rank writes, the others bring their experts, one at a time ---- */

struct saving {
  struct lm_ranks *ranks;
  struct safetensors_writer *writer; /* NULL on all ranks but the first, and there after a failure */
  struct lm_error *err;
  int failed;
};

static void write_numbers(struct saving *s, const float *numbers, int64_t n) {
  if (!s->writer || safetensors_write(s->writer, numbers, n, s->err) == 0) return;
  safetensors_cancel(s->writer);
  s->writer = NULL;
  s->failed = 1;
}

/* Expert after expert, in the order of their global ids. An expert is gathered whole, so that the first rank needs room
 * for one of each rank, and not for all. */
static void write_experts(struct saving *s, const struct lm_param *p, int kind) {
  int64_t numel = numel_of_expert(p);
  size_t bytes = (size_t)numel * sizeof(float), experts = (size_t)p->num_global_experts;
  int *owner = lm_alloc(experts, sizeof *owner);
  float *all = lm_alloc((size_t)s->ranks->nranks, bytes), *nothing = lm_alloc((size_t)numel, sizeof *nothing);
  find_owners(p, s->ranks, owner);
  for (int64_t e = 0; e < p->num_global_experts; e++) {
    const float *mine = owner[e] == s->ranks->rank ? numbers_of(p, kind) + (e - p->first_expert) * numel : nothing;
    LM_TRY(pmoe_comm_allgather(s->ranks->world, mine, all, bytes));
    write_numbers(s, all + owner[e] * numel, numel);
  }
  free(owner), free(all), free(nothing);
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
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < model->num_params; i++) {
      char name[96];
      int64_t shape[SAFETENSORS_MOST_DIMS];
      snprintf(name, sizeof name, "%s%s", prefixes[kind], model->params[i].name);
      global_shape(&model->params[i], shape);
      safetensors_add(held, name, model->params[i].ndim, shape);
    }
}

static struct safetensors_writer *begin(const char *path, const struct lm_model *model, const struct lm_state *state,
                                        struct lm_error *err) {
  char folder[FULL_PATH];
  snprintf(folder, sizeof folder, "%s", path);
  const char *name = dirname(folder);
  if (mkdir(name, 0777) && errno != EEXIST) {
    lm_error_set(err, "%s: %s", name, strerror(errno));
    return NULL;
  }
  struct safetensors held = {0};
  describe(model, state, &held);
  struct safetensors_writer *writer = safetensors_begin(path, &held, err);
  safetensors_free(&held);
  return writer;
}

int checkpoint_save(const char *path, const struct lm_model *model, const struct lm_state *state,
                    struct lm_ranks *ranks, struct lm_error *err) {
  struct saving s = {.ranks = ranks, .err = err};
  if (ranks->rank == 0) {
    s.writer = begin(path, model, state, err);
    s.failed = !s.writer;
  }
  if (agree(ranks, s.failed, err)) return -1;
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < model->num_params; i++) {
      const struct lm_param *p = &model->params[i];
      if (p->num_global_experts > 0) write_experts(&s, p, kind);
      else write_numbers(&s, numbers_of(p, kind), p->numel);
    }
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

static int read_param(const struct safetensors_reader *reader, const struct lm_param *p, int kind,
                      struct lm_error *err) {
  char name[96], found[96], expected[96];
  int64_t shape[SAFETENSORS_MOST_DIMS];
  snprintf(name, sizeof name, "%s%s", prefixes[kind], p->name);
  const struct safetensors_tensor *tensor = safetensors_find(&reader->held, name);
  if (!tensor) return lm_error_set(err, "%s has no tensor %s, which this model has", reader->path, name);
  global_shape(p, shape);
  if (!same_shape(tensor, p->ndim, shape)) {
    format_shape(found, tensor->ndim, tensor->shape);
    format_shape(expected, p->ndim, shape);
    return lm_error_set(err, "%s: tensor %s has shape %s; this model's is %s", reader->path, name, found, expected);
  }
  int64_t first = p->num_global_experts > 0 && p->numel > 0 ? p->first_expert * numel_of_expert(p) : 0;
  return safetensors_read(reader, tensor, first, p->numel, numbers_of(p, kind), err);
}

static int read_params(const struct safetensors_reader *reader, struct lm_model *model, struct lm_error *err) {
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < model->num_params; i++)
      if (read_param(reader, &model->params[i], kind, err)) return -1;
  if (reader->held.num_tensors == KINDS * model->num_params) return 0;
  return lm_error_set(err, "%s has %d tensors; this model has %d", reader->path, reader->held.num_tensors,
                      KINDS * model->num_params);
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
