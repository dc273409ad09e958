/* Comparing what the library gives, float32 or bf16, with the reference's doubles. Nothing here asserts: ranks that are
 * threads may not leave a test early, so checks print what is wrong and return how much is. */
#ifndef TEST_COMPARE_H
#define TEST_COMPARE_H
#include <pmoe/types.h>
#include <stdio.h>

/* Counts a failed check and says where it stands. */
#define CHECK(failures, condition, ...)                                                                                \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      (failures)++;                                                                                                    \
      fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                                  \
      fprintf(stderr, __VA_ARGS__);                                                                                    \
      fputc('\n', stderr);                                                                                             \
    }                                                                                                                  \
  } while (0)

/* The one table of tolerances: the largest error against the largest expected value, and the root mean square of both.
 * Sums of terms about as large as one can cancel while their rounding errors do not, so that no expected value counts
 * as smaller than `least`. */
typedef struct test_tolerance {
  double max, rms, least;
} test_tolerance;
test_tolerance test_tolerance_of(pmoe_dtype dtype);
/* The same `slack` times as wide; 0: as it is. */
test_tolerance test_tolerance_wide(pmoe_dtype dtype, double slack);

double test_get(const void *data, pmoe_dtype dtype, int64_t i);
void test_put(void *data, pmoe_dtype dtype, int64_t i, double value);
/* What remains of a value that goes through dtype. */
double test_round(double value, pmoe_dtype dtype);

/* Fills every byte so that float32 and bf16 read NaN. */
void test_poison(void *data, size_t bytes);

/* got [rows,cols] against expected, times scale, back to back. `precision` picks the tolerance. 0, or 1 after printing
 * `what`. */
int test_compare_mat(const char *what, const pmoe_mat *got, const double *expected, double scale, pmoe_dtype precision);
int test_compare_within(const char *what, const pmoe_mat *got, const double *expected, double scale,
                        test_tolerance tolerance);
int test_compare(const char *what, const void *got, pmoe_dtype dtype, const double *expected, double scale, int64_t n,
                 pmoe_dtype precision);
/* |got - expected| <= tolerance. */
int test_compare_one(const char *what, double got, double expected, double tolerance);

#endif
