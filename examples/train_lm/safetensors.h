/* Files of float32 tensors in the safetensors format: the length of a JSON header (uint64, little-endian), the header
 * with each tensor's dtype, shape and place and with a map of strings, then the numbers back to back.
 *
 * The map's "crc32" is that of the whole file with these eight digits as zeros. A file is written beside its place and
 * moved there when it is whole and on the disk. */
#ifndef LM_SAFETENSORS_H
#define LM_SAFETENSORS_H
#include <stdint.h>

#include "error.h"

enum { SAFETENSORS_MOST_DIMS = 4 };

struct safetensors_tensor {
  char name[96];
  int ndim;
  int64_t shape[SAFETENSORS_MOST_DIMS];
  int64_t numel;
  int64_t offset; /* of its first byte, after the header */
};

/* What a file holds. Zeroed: nothing yet. */
struct safetensors {
  int num_tensors, num_strings;
  struct safetensors_tensor *tensors; /* in the order of their numbers */
  struct safetensors_string {
    char *key, *value;
  } * strings;
};

void safetensors_add(struct safetensors *held, const char *name, int ndim, const int64_t *shape);
void safetensors_add_string(struct safetensors *held, const char *key, const char *value);
/* NULL if there is none. */
const struct safetensors_tensor *safetensors_find(const struct safetensors *held, const char *name);
const char *safetensors_find_string(const struct safetensors *held, const char *key);
void safetensors_free(struct safetensors *held);

/* Writing: begin, then the numbers of all tensors in their order in pieces of any size, then end. What was at path
 * stays until end has succeeded. After a failure of write, and in the place of end, cancel. begin returns NULL, the
 * others -1 with a sentence in err. */
struct safetensors_writer;
struct safetensors_writer *safetensors_begin(const char *path, const struct safetensors *held, struct lm_error *err);
int safetensors_write(struct safetensors_writer *writer, const float *numbers, int64_t n, struct lm_error *err);
int safetensors_end(struct safetensors_writer *writer, struct lm_error *err);
void safetensors_cancel(struct safetensors_writer *writer);

/* Reading. open takes the header apart and refuses what is not of this format, or not whole; verify reads all and
 * compares the checksum. */
struct safetensors_reader {
  struct safetensors held;
  char *path;
  int fd;
  int64_t data_at, data_bytes; /* the numbers' place in the file */
};
int safetensors_open(struct safetensors_reader *reader, const char *path, struct lm_error *err);
int safetensors_verify(const struct safetensors_reader *reader, struct lm_error *err);
/* Numbers [first, first + n) of a tensor. */
int safetensors_read(const struct safetensors_reader *reader, const struct safetensors_tensor *tensor, int64_t first,
                     int64_t n, float *out, struct lm_error *err);
void safetensors_close(struct safetensors_reader *reader);

#endif
