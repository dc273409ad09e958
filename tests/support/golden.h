/* tests/data/router-golden.json: values of the router that were computed elsewhere. */
#ifndef TEST_GOLDEN_H
#define TEST_GOLDEN_H
#include <cjson/cJSON.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

static cJSON *golden;

static inline int load_golden(void **state) {
  (void)state;
  static char text[1 << 17];
  FILE *file = fopen(TEST_DATA_DIR "/router-golden.json", "rb");
  if (!file) return -1;
  size_t size = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[size] = 0;
  golden = cJSON_Parse(text);
  return golden ? 0 : -1;
}

static inline int free_golden(void **state) {
  (void)state;
  cJSON_Delete(golden);
  return 0;
}

static inline const cJSON *get(const cJSON *object, const char *name) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
  if (!item) fail_msg("golden data lack %s", name);
  return item;
}

static inline double number_at(const cJSON *matrix, int64_t row, int64_t col) {
  return cJSON_GetArrayItem(cJSON_GetArrayItem(matrix, (int)row), (int)col)->valuedouble;
}

/* Within float32's rounding, as the file suggests. */
static inline void assert_close(double got, double want) {
  if (!(fabs(got - want) <= 2e-6 * fabs(want) + 1e-7)) fail_msg("got %.9g, want %.9g", got, want);
}

#endif
