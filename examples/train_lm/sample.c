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

void sample_print(struct lm_model *model, const struct lm_data *data, int count) {
  int context = model->cfg.context, prompt = PROMPT < context ? PROMPT : context;
  int first = model->ranks->rank == 0;
  int32_t *token = lm_alloc((size_t)(prompt + count), sizeof *token);
  float *logits = lm_alloc((size_t)model->vocab, sizeof *logits);
  data_read(data, data->train, prompt, token);
  uint64_t state = model->cfg.seed;
  /* The other ranks bring no tokens, but their experts. */
  for (int n = prompt; n < prompt + count; n++) {
    int length = n < context ? n : context;
    model_logits(model, &(struct lm_batch){first, length, token + n - length, NULL}, logits);
    state = state * 6364136223846793005u + 1442695040888963407u;
    if (first) token[n] = choose(logits, model->vocab, (double)(state >> 11) / 9007199254740992.0);
  }
  if (first) {
    printf("\nsample, after the held-out text's beginning: \"");
    print_tokens(token, 0, prompt, data->bytes);
    printf("\"\n");
    print_tokens(token, prompt, prompt + count, data->bytes);
    printf("\n");
    fflush(stdout);
  }
  free(token);
  free(logits);
}
