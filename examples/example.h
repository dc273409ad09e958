/* What the examples share: how they end when a call fails, how they check, and a host's memory for a layer's
 * parameters. */
#ifndef EXAMPLE_H
#define EXAMPLE_H
#include <pmoe/pmoe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the program with the library's sentence unless `call` succeeded, whichever thread it is on. */
#define TRY(call) example_try((call), #call)

static inline void example_try(pmoe_status status, const char *call) {
  if (status == PMOE_OK) return;
  fprintf(stderr, "%s\n  %s: %s\n", call, pmoe_status_name(status), pmoe_last_error());
  exit(1);
}

static inline void *example_alloc(size_t count, size_t bytes) {
  void *p = calloc(count ? count : 1, bytes);
  if (p) return p;
  fprintf(stderr, "out of memory\n");
  exit(1);
}

/* Says whether something came out as expected. Returns 1 if not, so that failures can be counted. */
static inline int example_check(int ok, const char *what) {
  printf("%s  %s\n", ok ? "    ok" : "FAILED", what);
  return !ok;
}

/* The number after `name` on the command line, or `otherwise`. --help shows the usage, and so does anything else. */
static inline long example_option(int argc, char **argv, const char *name, long otherwise, long least, long most,
                                  const char *usage) {
  if (argc == 1) return otherwise;
  if (argc == 2 && strcmp(argv[1], "--help") == 0) {
    printf("usage: %s [%s N]\n%s\nN is %ld to %ld; %ld if not given.\n", argv[0], name, usage, least, most, otherwise);
    exit(0);
  }
  char *end = NULL;
  long value = argc == 3 && strcmp(argv[1], name) == 0 ? strtol(argv[2], &end, 10) : 0;
  if (end && *argv[2] && !*end && value >= least && value <= most) return value;
  fprintf(stderr, "usage: %s [%s N], N from %ld to %ld; --help says more\n", argv[0], name, least, most);
  exit(1);
}

/* Number `index` of a stream of numbers in (-1, 1): any rank can make any part of the data. */
static inline float example_noise(uint64_t stream, uint64_t index) {
  uint64_t z = (stream + 1) * 0x9e3779b97f4a7c15u + index * 0xd1342543de82ef95u;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
  return (float)((double)(z >> 40) / (double)(1 << 23) - 1.0);
}

static inline pmoe_mat example_mat(float *data, int64_t rows, int64_t cols) {
  return (pmoe_mat){data, PMOE_F32, rows, cols, cols};
}

/* A layer's float32 parameters and gradients, owned by the host as pmoe asks. */
typedef struct example_params {
  int32_t count;
  struct {
    float *data, *grad;
    int64_t numel;
  } list[16];
} example_params;

static inline void example_params_bind(example_params *params, pmoe_layer *layer) {
  params->count = pmoe_layer_num_params(layer);
  for (int32_t i = 0; i < params->count; i++) {
    pmoe_param info = PMOE_CONFIG_INIT(pmoe_param);
    TRY(pmoe_layer_param(layer, i, &info));
    params->list[i].numel = info.numel;
    params->list[i].data = example_alloc((size_t)info.numel, sizeof(float));
    params->list[i].grad = example_alloc((size_t)info.numel, sizeof(float));
    TRY(pmoe_layer_bind_param(layer, i, params->list[i].data, params->list[i].grad));
  }
}

static inline void example_params_free(example_params *params) {
  for (int32_t i = 0; i < params->count; i++) {
    free(params->list[i].data);
    free(params->list[i].grad);
  }
}

/* Plain SGD; the gradients start again from zero. */
static inline void example_params_step(example_params *params, float rate) {
  for (int32_t i = 0; i < params->count; i++) {
    for (int64_t j = 0; j < params->list[i].numel; j++) params->list[i].data[j] -= rate * params->list[i].grad[j];
    memset(params->list[i].grad, 0, (size_t)params->list[i].numel * sizeof(float));
  }
}

#endif
