#include "folder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <cmocka.h>

struct folder folder_make(void) {
  struct folder folder = {"/tmp/train_lm_test_XXXXXX"};
  assert_non_null(mkdtemp(folder.path));
  return folder;
}

void folder_remove(const struct folder *folder) {
  char command[128];
  snprintf(command, sizeof command, "rm -rf '%s'", folder->path);
  assert_int_equal(system(command), 0);
}

const char *folder_path(const struct folder *folder, const char *name) {
  static char paths[8][256];
  static int next;
  char *path = paths[next++ % 8];
  snprintf(path, sizeof paths[0], "%s/%s", folder->path, name);
  return path;
}

const char *folder_write(const struct folder *folder, const char *name, const void *data, size_t bytes) {
  const char *path = folder_path(folder, name);
  char above[256];
  for (const char *slash = strchr(path + strlen(folder->path) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    snprintf(above, sizeof above, "%.*s", (int)(slash - path), path);
    mkdir(above, 0777);
  }
  FILE *file = fopen(path, "w");
  assert_non_null(file);
  assert_int_equal(fwrite(data, 1, bytes, file), bytes);
  assert_int_equal(fclose(file), 0);
  return path;
}

const char *folder_write_text(const struct folder *folder, const char *name, size_t bytes) {
  static const char *const words[] = {"the ",  "cat ",  "sat ",   "on ",    "a ",      "mat.\n", "dogs ", "never ",
                                      "read ", "long ", "book, ", "after ", "dinner ", "we ",    "sing ", "loudly.\n"};
  char *text = malloc(bytes + 16);
  assert_non_null(text);
  uint32_t word = 1;
  for (size_t at = 0; at < bytes;) {
    word = word * 1664525u + 1013904223u;
    size_t length = strlen(words[word >> 28]);
    memcpy(text + at, words[word >> 28], length);
    at += length;
  }
  const char *path = folder_write(folder, name, text, bytes);
  free(text);
  return path;
}

char *folder_read(const char *path) {
  FILE *file = fopen(path, "r");
  if (!file) fail_msg("%s is not there", path);
  size_t room = 1 << 20, length;
  char *text = malloc(room);
  assert_non_null(text);
  length = fread(text, 1, room - 1, file);
  fclose(file);
  text[length] = 0;
  return text;
}
