/* Files of tensors: their layout, what is refused, and that a file is whole whenever its writer dies. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "examples/train_lm/crc32.h"
#include "examples/train_lm/safetensors.h"
#include "train_lm/folder.h"

static struct folder f;
static struct lm_error err;

static int setup(void **state) {
  (void)state;
  f = folder_make();
  return 0;
}

static int teardown(void **state) {
  (void)state;
  folder_remove(&f);
  return 0;
}

/* ---- checksum ---- */

static uint32_t crc_bit_by_bit(const unsigned char *bytes, size_t n) {
  uint32_t value = 0xffffffffu;
  for (size_t i = 0; i < n; i++) {
    value ^= bytes[i];
    for (int bit = 0; bit < 8; bit++) value = value & 1 ? (value >> 1) ^ 0xedb88320u : value >> 1;
  }
  return ~value;
}

static void checksums_match(void **state) {
  (void)state;
  static struct crc32 crc;
  crc32_begin(&crc);
  crc32_add(&crc, "123456789", 9);
  assert_int_equal(crc.value, 0xcbf43926u); /* the check value of CRC-32 */
  unsigned char bytes[97];
  for (int i = 0; i < 97; i++) bytes[i] = (unsigned char)(i * i + 3);
  for (size_t cut = 0; cut <= 97; cut++) {
    crc32_begin(&crc);
    crc32_add(&crc, bytes, cut);
    crc32_add(&crc, bytes + cut, 97 - cut);
    assert_int_equal(crc.value, crc_bit_by_bit(bytes, 97));
  }
}

/* ---- a small file ---- */

enum { NUMBERS = 6 + 0 + 1 + 5 };
static const uint32_t bits[NUMBERS] = {0x3f800000, 0x80000000, 0x7fc12345, 0xff800000, 1, 0x807fffff,
                                       0x40490fdb, 7,          8,          0,          9, 0xc0000000};

static void describe(struct safetensors *held) {
  safetensors_add_string(held, "config", "layers = 2\n\"crc32\":\"ffffffff\" \xc3\xa9\t\\");
  safetensors_add_string(held, "step", "17");
  safetensors_add(held, "a", 2, (const int64_t[]){2, 3});
  safetensors_add(held, "none", 3, (const int64_t[]){0, 4, 5});
  safetensors_add(held, "scalar", 0, NULL);
  safetensors_add(held, "b", 1, (const int64_t[]){5});
}

static const char *write_file(const char *name) {
  const char *path = folder_path(&f, name);
  struct safetensors held = {0};
  float numbers[NUMBERS];
  memcpy(numbers, bits, sizeof bits);
  describe(&held);
  struct safetensors_writer *writer = safetensors_begin(path, &held, &err);
  assert_non_null(writer);
  assert_int_equal(safetensors_write(writer, numbers, 4, &err), 0); /* pieces need not be tensors */
  assert_int_equal(safetensors_write(writer, numbers + 4, NUMBERS - 4, &err), 0);
  assert_int_equal(safetensors_end(writer, &err), 0);
  safetensors_free(&held);
  return path;
}

static unsigned char *read_bytes(const char *path, size_t *n) {
  FILE *file = fopen(path, "r");
  assert_non_null(file);
  unsigned char *bytes = malloc(1 << 16);
  assert_non_null(bytes);
  *n = fread(bytes, 1, 1 << 16, file);
  fclose(file);
  return bytes;
}

static void what_is_written_is_read(void **state) {
  (void)state;
  const char *path = write_file("file");
  struct safetensors_reader reader;
  assert_int_equal(safetensors_open(&reader, path, &err), 0);
  assert_int_equal(safetensors_verify(&reader, &err), 0);
  assert_int_equal(reader.held.num_tensors, 4);
  assert_string_equal(safetensors_find_string(&reader.held, "config"),
                      "layers = 2\n\"crc32\":\"ffffffff\" \xc3\xa9\t\\");
  assert_string_equal(safetensors_find_string(&reader.held, "step"), "17");
  assert_null(safetensors_find_string(&reader.held, "steps"));
  assert_null(safetensors_find(&reader.held, "c"));
  float got[NUMBERS];
  const struct safetensors_tensor *a = safetensors_find(&reader.held, "a"), *b = safetensors_find(&reader.held, "b");
  assert_true(a->ndim == 2 && a->shape[0] == 2 && a->shape[1] == 3 && a->numel == 6);
  assert_int_equal(safetensors_find(&reader.held, "none")->numel, 0);
  assert_int_equal(safetensors_read(&reader, a, 0, 6, got, &err), 0);
  assert_memory_equal(got, bits, 24);
  assert_int_equal(safetensors_read(&reader, b, 1, 3, got, &err), 0);
  assert_memory_equal(got, bits + 8, 12);
  assert_int_equal(safetensors_read(&reader, b, 5, 0, got, &err), 0);
  assert_int_equal(safetensors_read(&reader, b, 3, 3, got, &err), -1);
  assert_int_equal(safetensors_read(&reader, b, -1, 1, got, &err), -1);
  safetensors_close(&reader);
}

/* The format, taken apart by other means. */
static void the_layout_is_the_format_s(void **state) {
  (void)state;
  size_t n;
  unsigned char *bytes = read_bytes(write_file("file"), &n);
  uint64_t length = 0;
  for (int i = 7; i >= 0; i--) length = length << 8 | bytes[i];
  assert_true(length % 8 == 0 && 8 + length + 4 * NUMBERS == n && bytes[8] == '{');
  cJSON *header = cJSON_ParseWithLength((char *)bytes + 8, length), *entry, *string;
  assert_non_null(header);
  int64_t at = 0;
  cJSON_ArrayForEach(entry, header) {
    if (strcmp(entry->string, "__metadata__") == 0) {
      cJSON_ArrayForEach(string, entry) assert_true(cJSON_IsString(string));
      continue;
    }
    const cJSON *offsets = cJSON_GetObjectItem(entry, "data_offsets");
    assert_string_equal(cJSON_GetObjectItem(entry, "dtype")->valuestring, "F32");
    assert_true(cJSON_GetArrayItem(offsets, 0)->valuedouble == (double)at);
    at = (int64_t)cJSON_GetArrayItem(offsets, 1)->valuedouble;
  }
  assert_int_equal(at, 4 * NUMBERS);
  assert_memory_equal(bytes + 8 + length, bits, sizeof bits);
  char *digits = strstr((char *)bytes + 8, "\"crc32\":\"") + 9, stored[9] = "", computed[9];
  memcpy(stored, digits, 8);
  memset(digits, '0', 8);
  snprintf(computed, sizeof computed, "%08x", crc_bit_by_bit(bytes, n));
  assert_string_equal(stored, computed);
  cJSON_Delete(header);
  free(bytes);
}

/* 1: it opens and its checksum is right. */
static int is_whole(const char *path) {
  struct safetensors_reader reader;
  memset(err.text, 0, sizeof err.text);
  if (safetensors_open(&reader, path, &err)) return 0;
  int whole = safetensors_verify(&reader, &err) == 0;
  safetensors_close(&reader);
  return whole;
}

static void any_change_is_found(void **state) {
  (void)state;
  size_t n;
  unsigned char *bytes = read_bytes(write_file("file"), &n);
  for (size_t at = 0; at < n; at++)
    for (int bit = 0; bit < 8; bit++) {
      bytes[at] ^= (unsigned char)(1 << bit);
      if (is_whole(folder_write(&f, "changed", bytes, n))) fail_msg("bit %d of byte %zu may change unseen", bit, at);
      assert_true(strlen(err.text) > 0);
      bytes[at] ^= (unsigned char)(1 << bit);
    }
  for (size_t length = 0; length < n; length++) assert_false(is_whole(folder_write(&f, "cut", bytes, length)));
  bytes[n] = 0;
  assert_false(is_whole(folder_write(&f, "longer", bytes, n + 1)));
  assert_true(is_whole(folder_write(&f, "same", bytes, n)));
  free(bytes);
}

static void other_files_are_refused(void **state) {
  (void)state;
  static const struct {
    const char *header, *says;
  } cases[] = {
      {"[]", "not JSON"},
      {"{\"a\":", "not JSON"},
      {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,8]}}", "dtype BF16; F32 was expected"},
      {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", "dtype of no name"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,-1],\"data_offsets\":[0,8]}}", "makes no sense"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,8]}}", "makes no sense"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[\"2\"],\"data_offsets\":[0,8]}}", "makes no sense"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", "makes no sense"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,2],\"data_offsets\":[0,8]}}", "makes no sense"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4000000000,4000000000,4],\"data_offsets\":[0,8]}}", "makes no sense"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", "makes no sense"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", "makes no sense"},
      {"{\"a\":7}", "dtype of no name"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", "4 to 8 of 8; 0 to 4 was expected"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", "0 to 8 of 8; 0 to 4 was expected"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", "8 bytes of numbers; 4 were expected"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", "has no checksum"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char bytes[256] = "";
    uint64_t length = strlen(cases[i].header);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, cases[i].header, length);
    assert_false(is_whole(folder_write(&f, "other", bytes, 8 + length + 8)));
    if (!strstr(err.text, cases[i].says)) fail_msg("%s: \"%s\"", cases[i].header, err.text);
  }
  assert_false(is_whole(folder_path(&f, "nowhere")));
  assert_non_null(strstr(err.text, "No such file"));
  assert_false(is_whole(f.path));
  assert_non_null(strstr(err.text, "is not a file"));
}

/* ---- failures of writing ---- */

static void what_was_there_stays(void **state) {
  (void)state;
  const char *path = write_file("kept");
  char part[256];
  snprintf(part, sizeof part, "%s.part", path);
  struct safetensors held = {0};
  safetensors_add(&held, "a", 1, (const int64_t[]){1 << 20});
  float *numbers = calloc(1 << 20, sizeof *numbers);
  struct safetensors_writer *writer = safetensors_begin(path, &held, &err);
  assert_int_equal(safetensors_write(writer, numbers, 1 << 20, &err), 0);
  safetensors_cancel(writer);
  assert_true(is_whole(path) && access(part, F_OK) != 0);

  writer = safetensors_begin(path, &held, &err);
  assert_int_equal(safetensors_write(writer, numbers, 5, &err), 0);
  assert_int_equal(safetensors_end(writer, &err), -1); /* too few numbers */
  assert_non_null(strstr(err.text, "5 numbers were written; 1048576 were expected"));
  assert_true(is_whole(path) && access(part, F_OK) != 0);

  assert_null(safetensors_begin(folder_path(&f, "nowhere/file"), &held, &err));
  assert_non_null(strstr(err.text, "No such file"));
  safetensors_free(&held);
  free(numbers);
}

/* A full disk, played by a limit on the size of files. */
static void a_full_disk_is_said(void **state) {
  (void)state;
  const char *path = write_file("full");
  struct rlimit old, limit;
  signal(SIGXFSZ, SIG_IGN);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
  limit = old;
  limit.rlim_cur = 2 << 20;
  struct safetensors held = {0};
  safetensors_add(&held, "a", 1, (const int64_t[]){1 << 20});
  float *numbers = calloc(1 << 20, sizeof *numbers);
  struct safetensors_writer *writer = safetensors_begin(path, &held, &err);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
  int status = safetensors_write(writer, numbers, 1 << 20, &err);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
  assert_int_equal(status, -1);
  assert_non_null(strstr(err.text, strerror(EFBIG)));
  safetensors_cancel(writer);
  assert_true(is_whole(path));
  safetensors_free(&held);
  free(numbers);
}

/* ---- death ---- */

enum { ROUNDS = 40, BIG = 300000 };

/* Writes files in which every number is that of the file, from `first` on, until it is killed. */
static void write_for_ever(const char *path, int first) {
  float *numbers = malloc(BIG * sizeof *numbers);
  for (int count = first; numbers; count++) {
    char text[16];
    struct safetensors held = {0};
    snprintf(text, sizeof text, "%d", count);
    safetensors_add_string(&held, "count", text);
    safetensors_add(&held, "a", 1, (const int64_t[]){BIG});
    for (int i = 0; i < BIG; i++) numbers[i] = (float)count;
    struct safetensors_writer *writer = safetensors_begin(path, &held, &err);
    if (!writer || safetensors_write(writer, numbers, BIG, &err) || safetensors_end(writer, &err)) _exit(1);
    safetensors_free(&held);
  }
  _exit(1);
}

static int count_in(const char *path) {
  struct safetensors_reader reader;
  if (!is_whole(path)) fail_msg("%s", err.text);
  assert_int_equal(safetensors_open(&reader, path, &err), 0);
  int count = atoi(safetensors_find_string(&reader.held, "count"));
  float *numbers = malloc(BIG * sizeof *numbers);
  assert_int_equal(safetensors_read(&reader, reader.held.tensors, 0, BIG, numbers, &err), 0);
  for (int i = 0; i < BIG; i++) assert_true(numbers[i] == (float)count);
  free(numbers);
  safetensors_close(&reader);
  return count;
}

static void a_killed_writer_leaves_a_whole_file(void **state) {
  (void)state;
  char path[256], part[300];
  snprintf(path, sizeof path, "%s", folder_path(&f, "killed"));
  snprintf(part, sizeof part, "%s.part", path);
  int last = 0, killed_at_work = 0;
  uint32_t random = 12345;
  for (int round = 0; round < ROUNDS; round++) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) write_for_ever(path, last + 1);
    while (round == 0 && access(path, F_OK) != 0) usleep(1000); /* the first file */
    random = random * 1664525u + 1013904223u;
    struct timespec delay = {0, (long)(random >> 8) % 30000000};
    nanosleep(&delay, NULL);
    int status;
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    killed_at_work += access(part, F_OK) == 0;
    int count = count_in(path);
    assert_true(count >= last);
    last = count;
  }
  assert_true(last > 0 && killed_at_work > 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(checksums_match),
      cmocka_unit_test(what_is_written_is_read),
      cmocka_unit_test(the_layout_is_the_format_s),
      cmocka_unit_test(any_change_is_found),
      cmocka_unit_test(other_files_are_refused),
      cmocka_unit_test(what_was_there_stays),
      cmocka_unit_test(a_full_disk_is_said),
      cmocka_unit_test(a_killed_writer_leaves_a_whole_file),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
