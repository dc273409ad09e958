#include "core/check.h"

#include <inttypes.h>
#include <stdbool.h>

static pmoe_status check_shape(const pmoe_mat *mat, const char *name, int64_t rows, int64_t cols) {
  PMOEI_REQUIRE(mat->rows >= 0, "%s->rows is %" PRId64 "; 0 or more was expected", name, mat->rows);
  PMOEI_REQUIRE(rows < 0 || mat->rows == rows, "%s->rows is %" PRId64 "; %" PRId64 " was expected", name, mat->rows,
                rows);
  PMOEI_REQUIRE(mat->cols == cols, "%s->cols is %" PRId64 "; %" PRId64 " was expected", name, mat->cols, cols);
  PMOEI_REQUIRE(mat->ld >= mat->cols, "%s->ld is %" PRId64 "; at least cols (%" PRId64 ") was expected", name, mat->ld,
                mat->cols);
  PMOEI_REQUIRE(mat->data != NULL || mat->rows == 0, "%s->data is NULL; memory for %" PRId64 " rows was expected", name,
                mat->rows);
  return PMOE_OK;
}

pmoe_status pmoei_check_mat(const pmoe_mat *mat, const char *name, pmoe_dtype dtype, int64_t rows, int64_t cols) {
  PMOEI_REQUIRE(mat != NULL, "%s is NULL; a matrix was expected", name);
  PMOEI_REQUIRE(mat->dtype == dtype, "%s->dtype is %s; %s was expected", name, pmoe_dtype_name(mat->dtype),
                pmoe_dtype_name(dtype));
  return check_shape(mat, name, rows, cols);
}

pmoe_status pmoei_check_mat_or_f32(const pmoe_mat *mat, const char *name, pmoe_dtype dtype, int64_t rows,
                                   int64_t cols) {
  PMOEI_REQUIRE(mat != NULL, "%s is NULL; a matrix was expected", name);
  PMOEI_REQUIRE(mat->dtype == dtype || mat->dtype == PMOE_F32, "%s->dtype is %s; %s or float32 was expected", name,
                pmoe_dtype_name(mat->dtype), pmoe_dtype_name(dtype));
  return check_shape(mat, name, rows, cols);
}

static uintptr_t end_of(const pmoe_mat *mat) {
  int64_t elements = mat->rows > 0 ? (mat->rows - 1) * mat->ld + mat->cols : 0;
  return (uintptr_t)mat->data + (uintptr_t)elements * pmoe_dtype_size(mat->dtype);
}

pmoe_status pmoei_check_apart(const pmoe_mat *a, const char *a_name, const pmoe_mat *b, const char *b_name) {
  bool apart = a->rows == 0 || b->rows == 0 || end_of(a) <= (uintptr_t)b->data || end_of(b) <= (uintptr_t)a->data;
  PMOEI_REQUIRE(apart, "%s (at %p) overlaps %s (at %p); separate memory was expected", a_name, a->data, b_name,
                b->data);
  return PMOE_OK;
}
