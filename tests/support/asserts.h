/* cmocka, with what it wants before it, and assertions about statuses. For tests on the main thread. */
#ifndef TEST_ASSERTS_H
#define TEST_ASSERTS_H
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pmoe/types.h>
#include <stdio.h>
#include <string.h>

static inline void test_assert_status(pmoe_status got, pmoe_status expected, const char *call, const char *file,
                                      int line) {
  if (got == expected) return;
  fprintf(stderr, "%s gave %s (%s), expected %s\n", call, pmoe_status_name(got), got < 0 ? pmoe_last_error() : "",
          pmoe_status_name(expected));
  _fail(file, line);
}
#define assert_status(call, expected) test_assert_status((call), (expected), #call, __FILE__, __LINE__)
#define assert_ok(call) assert_status(call, PMOE_OK)

/* The call fails with `status` and a sentence that has `word` in it. */
static inline void test_assert_refused(pmoe_status got, pmoe_status expected, const char *word, const char *call,
                                       const char *file, int line) {
  test_assert_status(got, expected, call, file, line);
  if (strstr(pmoe_last_error(), word)) return;
  fprintf(stderr, "%s: \"%s\" does not name %s\n", call, pmoe_last_error(), word);
  _fail(file, line);
}
#define assert_refused(call, status, word) test_assert_refused((call), (status), (word), #call, __FILE__, __LINE__)

#endif
