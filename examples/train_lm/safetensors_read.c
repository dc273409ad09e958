#include "safetensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crc32.h"

enum { LENGTH_BYTES = 8, CRC_DIGITS = 8, BUFFER_BYTES = 1 << 20, MOST_HEADER = 100 << 20 };

static int read_at(const struct safetensors_reader *reader, void *to, size_t bytes, int64_t at, struct lm_error *err) {
  for (size_t done = 0; done < bytes;) {
    ssize_t n = pread(reader->fd, (char *)to + done, bytes - done, (off_t)at + (off_t)done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return lm_error_set(err, "%s: %s", reader->path, strerror(errno));
    if (n == 0) return lm_error_set(err, "%s became shorter while it was read", reader->path);
    done += (size_t)n;
  }
  return 0;
}

/* ---- header ---- */

static int whole_number(const cJSON *item, int64_t *out) {
  if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble <= 9007199254740992.0)) return -1;
  *out = (int64_t)item->valuedouble;
  return (double)*out == item->valuedouble ? 0 : -1;
}

/* Fills name, ndim, shape, and the first and last byte that the header tells. */
static int take_entry(const cJSON *entry, int64_t most, struct safetensors_tensor *tensor, int64_t place[2]) {
  const cJSON *dims = cJSON_GetObjectItemCaseSensitive(entry, "shape"), *dim;
  const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
  size_t length = strlen(entry->string);
  if (length >= sizeof tensor->name || !cJSON_IsArray(dims) || !cJSON_IsArray(offsets)) return -1;
  if (cJSON_GetArraySize(dims) > SAFETENSORS_MOST_DIMS || cJSON_GetArraySize(offsets) != 2) return -1;
  memcpy(tensor->name, entry->string, length + 1);
  tensor->ndim = 0, tensor->numel = 1;
  cJSON_ArrayForEach(dim, dims) {
    int64_t size;
    if (whole_number(dim, &size) || (size > 0 && tensor->numel > most / size)) return -1;
    tensor->shape[tensor->ndim++] = size;
    tensor->numel *= size;
  }
  return whole_number(cJSON_GetArrayItem(offsets, 0), &place[0]) ||
         whole_number(cJSON_GetArrayItem(offsets, 1), &place[1]);
}

/* A tensor begins where the one before ends, and its bytes are those of its shape. */
static int take_tensor(struct safetensors_reader *reader, const cJSON *entry, struct lm_error *err) {
  const char *name = entry->string, *dtype = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "dtype"));
  if (!dtype || strcmp(dtype, "F32") != 0)
    return lm_error_set(err, "%s: tensor %.80s has dtype %.16s; F32 was expected", reader->path, name,
                        dtype ? dtype : "of no name");
  struct safetensors_tensor tensor;
  int64_t place[2];
  if (take_entry(entry, reader->data_bytes / 4, &tensor, place))
    return lm_error_set(err, "%s: the header's entry of tensor %.80s makes no sense", reader->path, name);
  safetensors_add(&reader->held, tensor.name, tensor.ndim, tensor.shape);
  int64_t begin = reader->held.tensors[reader->held.num_tensors - 1].offset, end = begin + 4 * tensor.numel;
  if (place[0] == begin && place[1] == end && end <= reader->data_bytes) return 0;
  return lm_error_set(err, "%s: tensor %.80s is at bytes %lld to %lld of %lld; %lld to %lld was expected", reader->path,
                      name, (long long)place[0], (long long)place[1], (long long)reader->data_bytes, (long long)begin,
                      (long long)end);
}

static int take_header(struct safetensors_reader *reader, const char *text, size_t bytes, struct lm_error *err) {
  cJSON *header = cJSON_ParseWithLength(text, bytes);
  const cJSON *entry, *string;
  int status = cJSON_IsObject(header) ? 0 : lm_error_set(err, "%s: its header is not JSON", reader->path);
  cJSON_ArrayForEach(entry, header) {
    if (status) break;
    if (strcmp(entry->string, "__metadata__") != 0) {
      status = take_tensor(reader, entry, err);
      continue;
    }
    cJSON_ArrayForEach(string, entry) if (cJSON_IsString(string))
        safetensors_add_string(&reader->held, string->string, string->valuestring);
  }
  cJSON_Delete(header);
  if (status) return status;
  int64_t used = 0;
  for (int i = 0; i < reader->held.num_tensors; i++) used += 4 * reader->held.tensors[i].numel;
  if (used == reader->data_bytes) return 0;
  return lm_error_set(err, "%s holds %lld bytes of numbers; %lld were expected", reader->path,
                      (long long)reader->data_bytes, (long long)used);
}

/* The first data_at bytes; free() them. */
static char *read_header(const struct safetensors_reader *reader, struct lm_error *err) {
  char *text = lm_alloc((size_t)reader->data_at + 1, 1);
  if (read_at(reader, text, (size_t)reader->data_at, 0, err) == 0) return text;
  free(text);
  return NULL;
}

static int open_file(struct safetensors_reader *reader, struct lm_error *err) {
  struct stat info;
  uint64_t length;
  reader->fd = open(reader->path, O_RDONLY | O_CLOEXEC);
  if (reader->fd < 0 || fstat(reader->fd, &info)) return lm_error_set(err, "%s: %s", reader->path, strerror(errno));
  if (!S_ISREG(info.st_mode)) return lm_error_set(err, "%s is not a file", reader->path);
  if (info.st_size < LENGTH_BYTES) return lm_error_set(err, "%s is no safetensors file: it is too short", reader->path);
  if (read_at(reader, &length, LENGTH_BYTES, 0, err)) return -1;
  if (length > MOST_HEADER || (int64_t)length > info.st_size - LENGTH_BYTES)
    return lm_error_set(err, "%s is no safetensors file, or not whole: it has %lld bytes and a header of %llu",
                        reader->path, (long long)info.st_size, (unsigned long long)length);
  reader->data_at = LENGTH_BYTES + (int64_t)length;
  reader->data_bytes = info.st_size - reader->data_at;
  char *text = read_header(reader, err);
  if (!text) return -1;
  int status = take_header(reader, text + LENGTH_BYTES, (size_t)length, err);
  free(text);
  return status;
}

int safetensors_open(struct safetensors_reader *reader, const char *path, struct lm_error *err) {
  size_t bytes = strlen(path) + 1;
  *reader = (struct safetensors_reader){.fd = -1, .path = memcpy(lm_alloc(bytes, 1), path, bytes)};
  if (open_file(reader, err) == 0) return 0;
  safetensors_close(reader);
  return -1;
}

void safetensors_close(struct safetensors_reader *reader) {
  if (reader->fd >= 0) close(reader->fd);
  safetensors_free(&reader->held);
  free(reader->path);
  *reader = (struct safetensors_reader){.fd = -1};
}

/* ---- numbers ---- */

static int add_file(const struct safetensors_reader *reader, struct crc32 *crc, struct lm_error *err) {
  unsigned char *buffer = lm_alloc(BUFFER_BYTES, 1);
  int status = 0;
  for (int64_t at = 0; at < reader->data_bytes && status == 0; at += BUFFER_BYTES) {
    int64_t left = reader->data_bytes - at;
    size_t piece = left < BUFFER_BYTES ? (size_t)left : BUFFER_BYTES;
    status = read_at(reader, buffer, piece, reader->data_at + at, err);
    if (status == 0) crc32_add(crc, buffer, piece);
  }
  free(buffer);
  return status;
}

int safetensors_verify(const struct safetensors_reader *reader, struct lm_error *err) {
  static const char before[] = "\"crc32\":\""; /* inside a string its quotes would come after backslashes */
  char stored[CRC_DIGITS + 1] = "", computed[CRC_DIGITS + 1], *text = read_header(reader, err);
  if (!text) return -1;
  char *digits = strstr(text + LENGTH_BYTES, before);
  if (digits && strlen(digits += strlen(before)) > CRC_DIGITS) {
    memcpy(stored, digits, CRC_DIGITS);
    memset(digits, '0', CRC_DIGITS);
  }
  struct crc32 crc;
  crc32_begin(&crc);
  crc32_add(&crc, text, (size_t)reader->data_at);
  free(text);
  if (strlen(stored) != CRC_DIGITS) return lm_error_set(err, "%s has no checksum", reader->path);
  if (add_file(reader, &crc, err)) return -1;
  snprintf(computed, sizeof computed, "%08x", crc.value);
  if (strcmp(computed, stored) == 0) return 0;
  return lm_error_set(err, "%s is damaged: its checksum is %s; %s was expected", reader->path, computed, stored);
}

int safetensors_read(const struct safetensors_reader *reader, const struct safetensors_tensor *tensor, int64_t first,
                     int64_t n, float *out, struct lm_error *err) {
  if (first < 0 || n < 0 || first > tensor->numel - n)
    return lm_error_set(err, "%s: numbers %lld to %lld of tensor %s were asked for; it has %lld", reader->path,
                        (long long)first, (long long)(first + n), tensor->name, (long long)tensor->numel);
  return read_at(reader, out, (size_t)n * sizeof *out, reader->data_at + tensor->offset + 4 * first, err);
}
