#include "sample.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROMPT = 48 };
static const float temperature = 0.8f;

static int choose(const float *logits, int vocab, double uniform) {
  double sum = 0, most = (double)logits[0];
  for (int i = 1; i < vocab; i++) most = fmax(most, (double)logits[i]);
  for (int i = 0; i < vocab; i++) sum += exp(((double)logits[i] - most) / (double)temperature);
  double left = uniform * sum;
  for (int i = 0; i < vocab; i++) {
    left -= exp(((double)logits[i] - most) / (double)temperature);
    if (left <= 0) return i;
  }
  return vocab - 1;
}

/* Bytes of the UTF-8 character at text, or 0 if it is none. */
static int utf8_length(const unsigned char *text, int room) {
  int length = text[0] < 0x80 ? 1 : text[0] >= 0xf0 ? 4 : text[0] >= 0xe0 ? 3 : text[0] >= 0xc2 ? 2 : 0;
  if (length > room || text[0] > 0xf4) return 0;
  for (int i = 1; i < length; i++)
    if ((text[i] & 0xc0) != 0x80) return 0;
  return length;
}

static void print_bytes(const int32_t *token, int count) {
  unsigned char *text = lm_alloc((size_t)count, 1);
  for (int i = 0; i < count; i++) text[i] = (unsigned char)token[i];
  for (int i = 0; i < count;) {
    int length = utf8_length(text + i, count - i);
    int control = length == 1 && (text[i] < 32 || text[i] == 127) && text[i] != '\n' && text[i] != '\t';
    if (length == 0 || control) putchar('?');
    else fwrite(text + i, 1, (size_t)length, stdout);
    i += length ? length : 1;
  }
  free(text);
}

static void print_tokens(const int32_t *token, int from, int to, int bytes) {
  if (bytes) print_bytes(token + from, to - from);
  else
    for (int i = from; i < to; i++) printf("%d ", token[i]);
}

/* The one rank that has the logits chooses; all hear of it. */
static int32_t next_token(struct lm_model *model, const int32_t *token, int count, float *logits, double uniform) {
  const struct lm_layout *at = &model->ranks->at;
  int context = model->cfg.context, shares = at->cp * at->tp, length = count < context ? count : context;
  int padded = (length + shares - 1) / shares * shares; /* what comes later does not change what came before */
  int32_t *sequence = lm_alloc((size_t)padded, sizeof *sequence);
  memcpy(sequence, token + count - length, (size_t)length * sizeof *sequence);
  /* The other data-parallel ranks bring no tokens, but their experts. */
  double chosen = 0;
  if (model_logits(model, &(struct lm_batch){at->dp_rank == 0, padded, sequence, NULL}, length - 1, logits))
    chosen = choose(logits, model->vocab, uniform);
  ranks_sum(model->ranks->world, &chosen, 1);
  free(sequence);
  return (int32_t)chosen;
}

void sample_print(struct lm_model *model, const struct lm_data *data, int count) {
  int prompt = PROMPT < model->cfg.context ? PROMPT : model->cfg.context;
  int32_t *token = lm_alloc((size_t)(prompt + count), sizeof *token);
  float *logits = lm_alloc((size_t)model->vocab, sizeof *logits);
  data_read(data, data->train, prompt, token);
  uint64_t state = model->cfg.seed;
  for (int n = prompt; n < prompt + count; n++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    token[n] = next_token(model, token, n, logits, (double)(state >> 11) / 9007199254740992.0);
  }
  if (model->ranks->rank == 0) {
    printf("\nsample, after the held-out text's beginning: \"");
    print_tokens(token, 0, prompt, data->bytes);
    printf("\"\n");
    print_tokens(token, prompt, prompt + count, data->bytes);
    printf("\n");
  }
  free(token);
  free(logits);
}
