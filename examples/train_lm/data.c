#include "data.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crc32.h"
#include "mix.h"

/* llm.c's token files: a header of 256 int32, then uint16 tokens of GPT-2's vocabulary. */
enum { HEADER_INTS = 256, TOKEN_MAGIC = 20240520, TOKEN_VERSION = 1, GPT2_VOCAB = 50257 };
/* The held-out part is the last tenth, or this many tokens if that is less. */
enum { MOST_HELD_OUT = 1 << 17, HEADER_BYTES = HEADER_INTS * 4, BLOCK = 4096 };

struct names {
  int count, room;
  char **name;
};

static void add_name(struct names *names, const char *name) {
  if (names->count == names->room) {
    names->room = names->room ? 2 * names->room : 16;
    names->name = realloc(names->name, (size_t)names->room * sizeof *names->name);
    if (!names->name) lm_fatal("out of memory for %d file names", names->room);
  }
  size_t bytes = strlen(name) + 1;
  names->name[names->count++] = memcpy(lm_alloc(bytes, 1), name, bytes);
}

static void free_names(struct names *names) {
  for (int i = 0; i < names->count; i++) free(names->name[i]);
  free(names->name);
}

/* The folders on the way to where the list is. */
struct folder {
  const struct folder *above;
  dev_t device;
  ino_t inode;
};

static int is_loop(const struct folder *at, const struct stat *info) {
  for (; at; at = at->above)
    if (at->device == info->st_dev && at->inode == info->st_ino) return 1;
  return 0;
}

static int list_files(const char *path, const struct folder *above, struct names *out, struct lm_error *err) {
  struct stat info, link;
  if (stat(path, &info)) {
    int dangling = errno == ENOENT && lstat(path, &link) == 0;
    return lm_error_set(err, "data %s: %s", path, dangling ? "a link to nothing" : strerror(errno));
  }
  if (S_ISREG(info.st_mode)) {
    add_name(out, path);
    return 0;
  }
  if (!S_ISDIR(info.st_mode)) return lm_error_set(err, "data %s is neither a file nor a folder", path);
  if (is_loop(above, &info)) return lm_error_set(err, "data %s: a link back to a folder that it is in", path);
  struct folder here = {above, info.st_dev, info.st_ino};
  struct dirent **entries;
  int count = scandir(path, &entries, NULL, alphasort), status = 0;
  if (count < 0) return lm_error_set(err, "data %s: %s", path, strerror(errno));
  for (int i = 0; i < count; i++) {
    char name[4096];
    int length = snprintf(name, sizeof name, "%s/%s", path, entries[i]->d_name);
    if (length >= (int)sizeof name) status = lm_error_set(err, "data: a path in %s is too long", path);
    if (status == 0 && entries[i]->d_name[0] != '.') status = list_files(name, &here, out, err);
    free(entries[i]);
  }
  free(entries);
  return status;
}

static int map_file(struct lm_data_file *file, const char *path, struct lm_error *err) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  struct stat info;
  if (fd < 0 || fstat(fd, &info)) {
    lm_error_set(err, "data %s: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    return -1;
  }
  *file = (struct lm_data_file){.map_bytes = info.st_size};
  if (info.st_size > 0) {
    void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) lm_error_set(err, "data %s: %s", path, strerror(errno));
    file->map = map == MAP_FAILED ? NULL : map;
  }
  close(fd);
  return info.st_size > 0 && !file->map ? -1 : 0;
}

static int32_t header_int(const struct lm_data_file *file, int index) {
  int32_t value;
  memcpy(&value, file->map + (size_t)index * sizeof value, sizeof value);
  return value;
}

static int is_token_file(const struct lm_data_file *file) {
  return file->map_bytes >= HEADER_BYTES && header_int(file, 0) == TOKEN_MAGIC;
}

/* A file that says it holds tokens, and does not. */
static int check_name(const struct lm_data_file *file, const char *path, struct lm_error *err) {
  const char *dot = strrchr(path, '.');
  if (is_token_file(file) || !dot || strcmp(dot, ".bin") != 0) return 0;
  if (file->map_bytes < HEADER_BYTES)
    return lm_error_set(err, "data %s: a token file of %lld bytes; its header alone has %d", path,
                        (long long)file->map_bytes, HEADER_BYTES);
  return lm_error_set(err, "data %s: begins with %d; a token file begins with %d (llm.c's GPT-2 format)", path,
                      header_int(file, 0), TOKEN_MAGIC);
}

/* The number of tokens, or -1. */
static int64_t file_tokens(const struct lm_data_file *file, int bytes, const char *path, struct lm_error *err) {
  if (bytes) return file->map_bytes;
  int64_t held = file->map_bytes - HEADER_BYTES, promised = header_int(file, 2);
  if (header_int(file, 1) != TOKEN_VERSION)
    return lm_error_set(err, "data %s: token file of version %d; version %d was expected", path, header_int(file, 1),
                        TOKEN_VERSION);
  if (held != promised * (int64_t)sizeof(uint16_t))
    return lm_error_set(err, "data %s: the header promises %lld tokens of 2 bytes, %lld bytes follow it", path,
                        (long long)promised, (long long)held);
  return promised;
}

static int map_files(struct lm_data *data, const struct names *names, struct lm_error *err) {
  data->files = lm_alloc((size_t)names->count, sizeof *data->files);
  for (int i = 0; i < names->count; i++) {
    struct lm_data_file *file = &data->files[data->num_files++];
    if (map_file(file, names->name[i], err) || check_name(file, names->name[i], err)) return -1;
    int bytes = !is_token_file(file);
    if (i == 0) data->bytes = bytes;
    if (bytes != data->bytes)
      return lm_error_set(err, "data %s is %s, but %s is not; files of one kind were expected", names->name[i],
                          bytes ? "text" : "a token file", names->name[0]);
    file->first = data->tokens;
    int64_t tokens = file_tokens(file, bytes, names->name[i], err);
    if (tokens < 0) return -1;
    data->tokens += tokens;
  }
  return 0;
}

static int split(struct lm_data *data, const char *path, int context, struct lm_error *err) {
  const char *what = data->bytes ? "bytes" : "tokens";
  if (data->tokens == 0) return lm_error_set(err, "data %s is empty", path);
  data->held_out = data->tokens / 10 < MOST_HELD_OUT ? data->tokens / 10 : MOST_HELD_OUT;
  data->train = data->tokens - data->held_out;
  if (data->held_out < context + 1)
    return lm_error_set(err,
                        "data %s has %lld %s; at least %lld were expected, so that the tenth held out holds one "
                        "sequence of context %d",
                        path, (long long)data->tokens, what, 10 * ((long long)context + 1), context);
  data->vocab = data->bytes ? 256 : GPT2_VOCAB;
  return 0;
}

int data_open(struct lm_data *data, const char *path, int context, struct lm_error *err) {
  *data = (struct lm_data){.bytes = 1};
  struct names names = {0};
  int status = list_files(path, NULL, &names, err);
  if (status == 0 && names.count == 0) status = lm_error_set(err, "data %s: the folder holds no files", path);
  if (status == 0) status = map_files(data, &names, err);
  if (status == 0) status = split(data, path, context, err);
  free_names(&names);
  if (status) data_close(data);
  return status;
}

void data_close(struct lm_data *data) {
  for (int i = 0; i < data->num_files; i++)
    if (data->files[i].map) munmap((void *)data->files[i].map, (size_t)data->files[i].map_bytes);
  free(data->files);
  *data = (struct lm_data){0};
}

/* The file that holds token `index`. */
static int find_file(const struct lm_data *data, int64_t index) {
  int low = 0, high = data->num_files - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (data->files[middle].first <= index) low = middle;
    else high = middle - 1;
  }
  return low;
}

void data_read(const struct lm_data *data, int64_t first, int64_t n, int32_t *out) {
  int at = find_file(data, first);
  for (int64_t i = 0; i < n; i++) {
    while (at + 1 < data->num_files && first + i >= data->files[at + 1].first) at++;
    const uint8_t *from = data->files[at].map;
    int64_t place = first + i - data->files[at].first;
    if (data->bytes) {
      out[i] = from[place];
    } else {
      uint16_t token;
      memcpy(&token, from + HEADER_BYTES + (size_t)place * sizeof token, sizeof token);
      out[i] = token;
    }
  }
}

int data_check(const struct lm_data *data, int vocab, struct lm_error *err) {
  int32_t block[BLOCK];
  if (vocab >= (data->bytes ? 256 : 65536)) return 0;
  for (int64_t at = 0; at < data->tokens; at += BLOCK) {
    int64_t n = data->tokens - at < BLOCK ? data->tokens - at : BLOCK;
    data_read(data, at, n, block);
    for (int64_t i = 0; i < n; i++)
      if (block[i] >= vocab)
        return lm_error_set(err, "data has token %d in place %lld; vocab is %d", block[i], (long long)(at + i), vocab);
  }
  return 0;
}

void data_describe(const struct lm_data *data, char text[LM_DATA_TEXT]) {
  enum { PARTS = 256 };
  int32_t block[BLOCK];
  struct crc32 crc;
  crc32_begin(&crc);
  for (int64_t part = 0; part < PARTS; part++) {
    int64_t first = data->tokens * part / PARTS, end = data->tokens * (part + 1) / PARTS;
    int64_t n = end - first < BLOCK ? end - first : BLOCK;
    data_read(data, first, n, block);
    crc32_add(&crc, block, (size_t)n * sizeof *block);
  }
  snprintf(text, LM_DATA_TEXT, "%lld %s, crc32 %08x", (long long)data->tokens, data->bytes ? "bytes" : "tokens",
           crc.value);
}

int64_t data_train_start(const struct lm_data *data, int context, uint64_t seed, uint64_t step, int64_t index) {
  uint64_t places = (uint64_t)(data->train - context); /* the sequence and the token after it stay inside */
  uint64_t number =
      lm_mix(lm_mix(lm_mix(seed + 0x9e3779b97f4a7c15u) + step) + 0x9e3779b97f4a7c15u * (uint64_t)(index + 1));
  return (int64_t)(number % places);
}

int64_t data_held_out_sequences(const struct lm_data *data, int context) { return (data->held_out - 1) / context; }

int64_t data_held_out_start(const struct lm_data *data, int context, int64_t index, int64_t count) {
  int64_t all = data_held_out_sequences(data, context);
  return data->train + (count >= all ? index : index * all / count) * context;
}

static double entropy(const int64_t *count, int64_t n) {
  double sum = 0, total = 0;
  for (int64_t i = 0; i < n; i++) total += (double)count[i];
  for (int64_t i = 0; i < n; i++)
    if (count[i] > 0) sum -= (double)count[i] / total * log2((double)count[i] / total);
  return sum;
}

void data_entropy(const struct lm_data *data, double *unigram, double *bigram) {
  int64_t *single = lm_alloc(65536, sizeof *single), *pair = lm_alloc(65536, sizeof *pair);
  int64_t *before = lm_alloc(65536, sizeof *before);
  int32_t block[BLOCK], last = -1;
  for (int64_t at = 0; at < data->held_out; at += BLOCK) {
    int64_t n = data->held_out - at < BLOCK ? data->held_out - at : BLOCK;
    data_read(data, data->train + at, n, block);
    for (int64_t i = 0; i < n; i++) {
      single[block[i]]++;
      if (data->bytes && last >= 0) pair[last * 256 + block[i]]++, before[last]++;
      last = block[i];
    }
  }
  *unigram = entropy(single, 65536);
  *bigram = data->bytes ? entropy(pair, 65536) - entropy(before, 65536) : NAN;
  free(single);
  free(pair);
  free(before);
}
