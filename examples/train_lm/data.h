/* Text and tokens: memory-mapped files, split into a part to train on and a held-out part at the end. */
#ifndef LM_DATA_H
#define LM_DATA_H
#include <stdint.h>

#include "error.h"

enum { LM_DATA_TEXT = 64 };

struct lm_data {
  int num_files;
  struct lm_data_file {
    const uint8_t *map; /* the whole file */
    int64_t map_bytes;
    int64_t first; /* index of its first token among all */
  } * files;
  int bytes;               /* 1: a token is a byte; 0: uint16 after a header */
  int vocab;               /* what its tokens ask for: 256 or 50257 */
  int64_t tokens;          /* in all files, one after another */
  int64_t train, held_out; /* the first `train` tokens, and the `held_out` tokens at the end */
};

/* path: a file, or a folder whose files (those in subfolders too, hidden ones not) are read in the order of their
 * names. A name that ends in .bin promises a token file. A sequence takes context + 1 tokens; both parts must hold one.
 * Returns 0, or -1 with a sentence. */
int data_open(struct lm_data *data, const char *path, int context, struct lm_error *err);
void data_close(struct lm_data *data);
/* Reads all of it: -1 with a sentence if a token is not below vocab. */
int data_check(const struct lm_data *data, int vocab, struct lm_error *err);
/* Writes what tells this text from others: its length and a checksum of parts of it. */
void data_describe(const struct lm_data *data, char text[LM_DATA_TEXT]);

/* Copies tokens [first, first + n). */
void data_read(const struct lm_data *data, int64_t first, int64_t n, int32_t *out);

/* Where sequence `index` of a step begins: depends on nothing else, so that a batch is the same for any number of
 * ranks. */
int64_t data_train_start(const struct lm_data *data, int context, uint64_t seed, uint64_t step, int64_t index);
/* Where held-out sequence `index` of `count` evenly spread ones begins. */
int64_t data_held_out_start(const struct lm_data *data, int context, int64_t index, int64_t count);
/* How many sequences fill the held-out part without overlap. */
int64_t data_held_out_sequences(const struct lm_data *data, int context);

/* Entropy in bits of the held-out part's tokens, and of a token given the one before (NaN for vocabularies above 256).
 * What a model that knows only these frequencies would need per token. */
void data_entropy(const struct lm_data *data, double *unigram, double *bigram);

#endif
