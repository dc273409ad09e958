/* A temporary folder with files in it. */
#ifndef TRAIN_LM_FOLDER_H
#define TRAIN_LM_FOLDER_H
#include <stddef.h>

struct folder {
  char path[64];
};

struct folder folder_make(void);
/* And everything in it. */
void folder_remove(const struct folder *folder);
/* The path of `name` in it; the text is good until the call after the next seven. */
const char *folder_path(const struct folder *folder, const char *name);
/* Writes a file, making the folders above it. Returns its path. */
const char *folder_write(const struct folder *folder, const char *name, const void *data, size_t bytes);
/* Writes `bytes` bytes of made-up English, the same every time. */
const char *folder_write_text(const struct folder *folder, const char *name, size_t bytes);
/* The file's text; free() it. */
char *folder_read(const char *path);

#endif
