/* Text and token files: what is read, how it is split, and what is said about files that cannot be used. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "examples/train_lm/data.h"
#include "train_lm/folder.h"

static void assert_refused(const char *path, int context, const char *says) {
  struct lm_data data;
  struct lm_error err;
  assert_int_equal(data_open(&data, path, context, &err), -1);
  if (!strstr(err.text, says)) fail_msg("\"%s\" does not say \"%s\"", err.text, says);
}

static struct lm_data open_data(const char *path, int context) {
  struct lm_data data;
  struct lm_error err;
  if (data_open(&data, path, context, &err)) fail_msg("%s", err.text);
  return data;
}

static void a_file_is_its_bytes(void **state) {
  (void)state;
  struct folder f = folder_make();
  uint8_t bytes[1000];
  for (int i = 0; i < 1000; i++) bytes[i] = (uint8_t)(i * 7);
  struct lm_data data = open_data(folder_write(&f, "x", bytes, 1000), 9);
  assert_int_equal(data.vocab, 256);
  assert_int_equal(data.train, 900);
  assert_int_equal(data.held_out, 100);
  int32_t out[1000];
  data_read(&data, 0, 1000, out);
  for (int i = 0; i < 1000; i++) assert_int_equal(out[i], bytes[i]);
  data_close(&data);
  folder_remove(&f);
}

static void a_folder_is_its_files_in_order(void **state) {
  (void)state;
  struct folder f = folder_make();
  char text[300];
  memset(text, 'b', sizeof text);
  folder_write(&f, "b", text, 300);
  folder_write(&f, "empty", text, 0);
  folder_write(&f, ".hidden", text, 300);
  memset(text, 'a', sizeof text);
  folder_write(&f, "a/deep/file", text, 200);
  memset(text, 'c', sizeof text);
  folder_write(&f, "c", text, 100);
  struct lm_data data = open_data(f.path, 5);
  assert_int_equal(data.tokens, 600);
  int32_t out[600];
  data_read(&data, 0, 600, out);
  for (int i = 0; i < 600; i++) assert_int_equal(out[i], i < 200 ? 'a' : i < 500 ? 'b' : 'c');
  data_read(&data, 498, 4, out);
  assert_int_equal(out[1], 'b');
  assert_int_equal(out[2], 'c');
  data_close(&data);
  folder_remove(&f);
}

/* llm.c's layout. */
static const char *write_tokens(const struct folder *f, const char *name, int32_t version, int32_t count, int held) {
  uint8_t *file = calloc(1, 1024 + 2 * (size_t)held);
  const int32_t header[] = {20240520, version, count};
  memcpy(file, header, sizeof header);
  for (int i = 0; i < held; i++) {
    uint16_t token = (uint16_t)(50000 + i % 256);
    memcpy(file + 1024 + 2 * i, &token, sizeof token);
  }
  const char *path = folder_write(f, name, file, 1024 + 2 * (size_t)held);
  free(file);
  return path;
}

static void token_files_are_read(void **state) {
  (void)state;
  struct folder f = folder_make();
  write_tokens(&f, "good/a.bin", 1, 300, 300);
  write_tokens(&f, "good/b.bin", 1, 200, 200);
  struct lm_data data = open_data(folder_path(&f, "good"), 5);
  assert_int_equal(data.tokens, 500);
  assert_int_equal(data.bytes, 0);
  assert_int_equal(data.vocab, 50257);
  int32_t out[4];
  data_read(&data, 299, 4, out);
  assert_int_equal(out[0], 50000 + 299 % 256);
  assert_int_equal(out[1], 50000);
  double unigram, bigram;
  data_entropy(&data, &unigram, &bigram);
  assert_true(unigram > 5 && isnan(bigram));
  data_close(&data);
  assert_refused(write_tokens(&f, "v2", 2, 300, 300), 5, "version 2; version 1 was expected");
  assert_refused(write_tokens(&f, "cut", 1, 300, 299), 5,
                 "the header promises 300 tokens of 2 bytes, 598 bytes follow it");
  assert_refused(write_tokens(&f, "long", 1, 299, 300), 5, "promises 299 tokens of 2 bytes, 600 bytes follow it");
  assert_refused(write_tokens(&f, "minus", 1, -1, 0), 5, "the header promises -1 tokens");
  uint8_t odd[1024 + 401] = {0};
  const int32_t header[] = {20240520, 1, 200};
  memcpy(odd, header, sizeof header);
  assert_refused(folder_write(&f, "odd", odd, sizeof odd), 5, "promises 200 tokens of 2 bytes, 401 bytes follow it");
  odd[0]++;
  assert_refused(folder_write(&f, "wrong.bin", odd, sizeof odd), 5, "begins with 20240521; a token file begins with");
  assert_refused(folder_write(&f, "short.bin", odd, 100), 5, "a token file of 100 bytes; its header alone has 1024");
  folder_write(&f, "good/text", "text", 4);
  assert_refused(folder_path(&f, "good"), 5, "files of one kind were expected");
  folder_remove(&f);
}

static void useless_data_is_named(void **state) {
  (void)state;
  struct folder f = folder_make();
  char text[1000] = {0};
  assert_refused(folder_path(&f, "nowhere"), 5, "nowhere: No such file or directory");
  assert_refused(f.path, 5, "the folder holds no files");
  assert_refused(folder_write(&f, "empty", text, 0), 5, "empty is empty");
  assert_refused(folder_write(&f, "short", text, 99), 9, "short has 99 bytes; at least 100 were expected");
  assert_refused("/dev/null", 5, "/dev/null is neither a file nor a folder");
  struct lm_data data = open_data(folder_write(&f, "enough", text, 100), 9);
  data_close(&data);
  folder_remove(&f);
}

static void links_are_followed_once(void **state) {
  (void)state;
  struct folder f = folder_make();
  folder_write_text(&f, "folder/text", 500);
  assert_int_equal(symlink("../folder/text", folder_path(&f, "folder/again")), 0);
  struct lm_data data = open_data(folder_path(&f, "folder"), 5);
  assert_int_equal(data.tokens, 1000);
  data_close(&data);
  assert_int_equal(symlink("nothing", folder_path(&f, "folder/dangling")), 0);
  assert_refused(folder_path(&f, "folder"), 5, "folder/dangling: a link to nothing");
  assert_int_equal(unlink(folder_path(&f, "folder/dangling")), 0);
  assert_int_equal(symlink("..", folder_path(&f, "folder/up")), 0);
  assert_refused(folder_path(&f, "folder"), 5, "a link back to a folder that it is in");
  folder_remove(&f);
}

static void tokens_are_checked_beforehand(void **state) {
  (void)state;
  struct folder f = folder_make();
  struct lm_error err;
  struct lm_data data = open_data(write_tokens(&f, "tokens", 1, 9000, 9000), 5);
  assert_int_equal(data_check(&data, 50256, &err), 0);
  assert_int_equal(data_check(&data, 50255, &err), -1);
  assert_string_equal(err.text, "data has token 50255 in place 255; vocab is 50255");
  data_close(&data);
  folder_remove(&f);
}

static void texts_are_told_apart(void **state) {
  (void)state;
  struct folder f = folder_make();
  char text[9000], first[LM_DATA_TEXT], other[LM_DATA_TEXT];
  memset(text, 'a', sizeof text);
  struct lm_data data = open_data(folder_write(&f, "x", text, sizeof text), 5);
  data_describe(&data, first);
  data_close(&data);
  assert_non_null(strstr(first, "9000 bytes"));
  text[4321] = 'b';
  data = open_data(folder_write(&f, "x", text, sizeof text), 5);
  data_describe(&data, other);
  assert_string_not_equal(first, other);
  data_close(&data);
  folder_remove(&f);
}

static void batches_stay_in_their_part(void **state) {
  (void)state;
  struct folder f = folder_make();
  struct lm_data data = open_data(folder_write_text(&f, "x", 2000), 50);
  int64_t least = INT64_MAX, most = 0;
  for (int64_t i = 0; i < 5000; i++) {
    int64_t start = data_train_start(&data, 50, 3, (uint64_t)i, i % 7);
    assert_true(start >= 0 && start + 51 <= data.train);
    assert_int_equal(start, data_train_start(&data, 50, 3, (uint64_t)i, i % 7));
    if (start < least) least = start;
    if (start > most) most = start;
  }
  assert_int_equal(least, 0); /* every place is drawn */
  assert_int_equal(most + 51, data.train);
  assert_int_not_equal(data_train_start(&data, 50, 3, 1, 0), data_train_start(&data, 50, 4, 1, 0));
  int64_t count = data_held_out_sequences(&data, 50);
  assert_int_equal(count, 3);
  for (int64_t i = 0; i < count; i++) assert_int_equal(data_held_out_start(&data, 50, i, count), data.train + 50 * i);
  assert_true(data_held_out_start(&data, 50, count - 1, count) + 51 <= data.tokens);
  assert_int_equal(data_held_out_start(&data, 50, 1, 2), data.train + 50);
  data_close(&data);
  folder_remove(&f);
}

static void entropies_are_right(void **state) {
  (void)state;
  struct folder f = folder_make();
  char text[4000];
  /* The held-out part, 400 bytes, is abcdabcd...: 2 bits alone, 0 given the one before. */
  for (int i = 0; i < 4000; i++) text[i] = i < 3600 ? 'x' : "abcd"[i % 4];
  struct lm_data data = open_data(folder_write(&f, "x", text, 4000), 5);
  double unigram, bigram;
  data_entropy(&data, &unigram, &bigram);
  assert_true(fabs(unigram - 2) < 1e-9 && fabs(bigram) < 1e-9);
  data_close(&data);
  /* aabaabaab...: after b always a; after a, a or b: 2/3 of one bit, but for the ends. */
  for (int i = 0; i < 4000; i++) text[i] = i % 3 == 2 ? 'b' : 'a';
  data = open_data(folder_write(&f, "y", text, 4000), 5);
  data_entropy(&data, &unigram, &bigram);
  assert_true(fabs(unigram - (log2(3) - 2.0 / 3)) < 1e-2 && fabs(bigram - 2.0 / 3) < 1e-2);
  data_close(&data);
  folder_remove(&f);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_file_is_its_bytes),        cmocka_unit_test(a_folder_is_its_files_in_order),
      cmocka_unit_test(token_files_are_read),       cmocka_unit_test(useless_data_is_named),
      cmocka_unit_test(batches_stay_in_their_part), cmocka_unit_test(entropies_are_right),
      cmocka_unit_test(links_are_followed_once),    cmocka_unit_test(tokens_are_checked_beforehand),
      cmocka_unit_test(texts_are_told_apart),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
