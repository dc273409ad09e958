/* The list of what a file holds, and writing. */
#include "safetensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "crc32.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors holds little-endian numbers, which this machine would have to turn around"
#endif

enum { LENGTH_BYTES = 8, CRC_DIGITS = 8, BUFFER_BYTES = 1 << 20 };

/* ---- what a file holds ---- */

static char *copy_text(const char *text) {
  size_t bytes = strlen(text) + 1;
  return memcpy(lm_alloc(bytes, 1), text, bytes);
}

/* Room for one more entry: the list doubles where its length is a power of two. */
static void *grow(void *list, int count, size_t bytes) {
  if (count & (count - 1)) return list;
  list = realloc(list, (size_t)(count ? 2 * count : 1) * bytes);
  if (!list) lm_fatal("out of memory for a list of %d tensors", count);
  return list;
}

void safetensors_add(struct safetensors *held, const char *name, int ndim, const int64_t *shape) {
  held->tensors = grow(held->tensors, held->num_tensors, sizeof *held->tensors);
  struct safetensors_tensor *tensor = &held->tensors[held->num_tensors++];
  *tensor = (struct safetensors_tensor){.ndim = ndim, .numel = 1};
  snprintf(tensor->name, sizeof tensor->name, "%s", name);
  for (int d = 0; d < ndim; d++) tensor->shape[d] = shape[d], tensor->numel *= shape[d];
  if (held->num_tensors == 1) return;
  tensor->offset = tensor[-1].offset + tensor[-1].numel * (int64_t)sizeof(float);
}

void safetensors_add_string(struct safetensors *held, const char *key, const char *value) {
  held->strings = grow(held->strings, held->num_strings, sizeof *held->strings);
  held->strings[held->num_strings++] = (struct safetensors_string){copy_text(key), copy_text(value)};
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *held, const char *name) {
  for (int i = 0; i < held->num_tensors; i++)
    if (strcmp(held->tensors[i].name, name) == 0) return &held->tensors[i];
  return NULL;
}

const char *safetensors_find_string(const struct safetensors *held, const char *key) {
  for (int i = 0; i < held->num_strings; i++)
    if (strcmp(held->strings[i].key, key) == 0) return held->strings[i].value;
  return NULL;
}

void safetensors_free(struct safetensors *held) {
  for (int i = 0; i < held->num_strings; i++) free(held->strings[i].key), free(held->strings[i].value);
  free(held->strings);
  free(held->tensors);
  *held = (struct safetensors){0};
}

/* ---- header ---- */

static void add_tensor(cJSON *header, const struct safetensors_tensor *tensor) {
  cJSON *entry = cJSON_AddObjectToObject(header, tensor->name);
  cJSON_AddStringToObject(entry, "dtype", "F32");
  cJSON *shape = cJSON_AddArrayToObject(entry, "shape"), *offsets = cJSON_AddArrayToObject(entry, "data_offsets");
  for (int d = 0; d < tensor->ndim; d++) cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)tensor->shape[d]));
  cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)tensor->offset));
  cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(tensor->offset + 4 * tensor->numel)));
}

/* Length and header, with spaces so that the numbers lie at a multiple of eight, and zeros for the checksum, whose
 * place is *crc_at. */
static char *make_header(const struct safetensors *held, size_t *bytes, size_t *crc_at) {
  cJSON *header = cJSON_CreateObject(), *strings = cJSON_AddObjectToObject(header, "__metadata__");
  cJSON_AddStringToObject(strings, "crc32", "00000000");
  for (int i = 0; i < held->num_strings; i++)
    cJSON_AddStringToObject(strings, held->strings[i].key, held->strings[i].value);
  for (int i = 0; i < held->num_tensors; i++) add_tensor(header, &held->tensors[i]);
  char *json = cJSON_PrintUnformatted(header);
  cJSON_Delete(header);
  if (!json) lm_fatal("out of memory for the header of %d tensors", held->num_tensors);
  size_t length = strlen(json), padded = (length + 7) / 8 * 8;
  char *text = lm_alloc(LENGTH_BYTES + padded, 1);
  uint64_t stored = padded;
  memcpy(text, &stored, LENGTH_BYTES);
  memcpy(text + LENGTH_BYTES, json, length);
  memset(text + LENGTH_BYTES + length, ' ', padded - length);
  *bytes = LENGTH_BYTES + padded;
  *crc_at = LENGTH_BYTES + (size_t)(strstr(json, "\"crc32\":\"") - json) + strlen("\"crc32\":\"");
  cJSON_free(json);
  return text;
}

/* ---- writing ---- */

struct safetensors_writer {
  char *path, *part; /* where it will be, and where it is until then */
  int fd;
  int64_t expected, written; /* numbers */
  size_t crc_at, buffered;
  struct crc32 crc;
  unsigned char buffer[BUFFER_BYTES];
};

static int flush_buffer(struct safetensors_writer *writer, struct lm_error *err) {
  crc32_add(&writer->crc, writer->buffer, writer->buffered);
  for (size_t at = 0; at < writer->buffered;) {
    ssize_t done = write(writer->fd, writer->buffer + at, writer->buffered - at);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return lm_error_set(err, "%s: %s", writer->part, strerror(errno));
    at += (size_t)done;
  }
  writer->buffered = 0;
  return 0;
}

static int append(struct safetensors_writer *writer, const void *bytes, size_t n, struct lm_error *err) {
  for (size_t at = 0; at < n;) {
    size_t room = BUFFER_BYTES - writer->buffered, piece = n - at < room ? n - at : room;
    memcpy(writer->buffer + writer->buffered, (const char *)bytes + at, piece);
    writer->buffered += piece;
    at += piece;
    if (writer->buffered == BUFFER_BYTES && flush_buffer(writer, err)) return -1;
  }
  return 0;
}

static void free_writer(struct safetensors_writer *writer) {
  if (writer->fd >= 0) close(writer->fd);
  free(writer->path);
  free(writer->part);
  free(writer);
}

void safetensors_cancel(struct safetensors_writer *writer) {
  unlink(writer->part);
  free_writer(writer);
}

struct safetensors_writer *safetensors_begin(const char *path, const struct safetensors *held, struct lm_error *err) {
  struct safetensors_writer *writer = lm_alloc(1, sizeof *writer);
  writer->path = copy_text(path);
  writer->part = lm_alloc(strlen(path) + sizeof ".part", 1);
  strcat(strcpy(writer->part, path), ".part");
  for (int i = 0; i < held->num_tensors; i++) writer->expected += held->tensors[i].numel;
  crc32_begin(&writer->crc);
  writer->fd = open(writer->part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (writer->fd < 0) {
    lm_error_set(err, "%s: %s", writer->part, strerror(errno));
    free_writer(writer);
    return NULL;
  }
  size_t bytes;
  char *header = make_header(held, &bytes, &writer->crc_at);
  int status = append(writer, header, bytes, err);
  free(header);
  if (status == 0) return writer;
  safetensors_cancel(writer);
  return NULL;
}

int safetensors_write(struct safetensors_writer *writer, const float *numbers, int64_t n, struct lm_error *err) {
  writer->written += n;
  return append(writer, numbers, (size_t)n * sizeof *numbers, err);
}

/* A new name lasts once its folder is on the disk. */
static int sync_folder(const char *path, struct lm_error *err) {
  char *copy = copy_text(path);
  const char *folder = dirname(copy);
  int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC), status = 0;
  if (fd < 0 || fsync(fd)) status = lm_error_set(err, "%s: %s", folder, strerror(errno));
  if (fd >= 0) close(fd);
  free(copy);
  return status;
}

static int put_in_place(struct safetensors_writer *writer, struct lm_error *err) {
  if (writer->written != writer->expected)
    return lm_error_set(err, "%s: %lld numbers were written; %lld were expected", writer->path,
                        (long long)writer->written, (long long)writer->expected);
  if (flush_buffer(writer, err)) return -1;
  char digits[CRC_DIGITS + 1];
  snprintf(digits, sizeof digits, "%08x", writer->crc.value);
  int fd = writer->fd;
  if (pwrite(fd, digits, CRC_DIGITS, (off_t)writer->crc_at) != CRC_DIGITS || fsync(fd))
    return lm_error_set(err, "%s: %s", writer->part, strerror(errno));
  writer->fd = -1;
  if (close(fd) || rename(writer->part, writer->path))
    return lm_error_set(err, "%s: %s", writer->path, strerror(errno));
  return sync_folder(writer->path, err);
}

int safetensors_end(struct safetensors_writer *writer, struct lm_error *err) {
  int status = put_in_place(writer, err);
  if (status) safetensors_cancel(writer);
  else free_writer(writer);
  return status;
}
