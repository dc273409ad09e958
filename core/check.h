/* Argument checks that many calls share. */
#ifndef PMOEI_CHECK_H
#define PMOEI_CHECK_H
#include "core/dtype.h"
#include "core/status.h"

/* Tokens or rows that one rank can have: beyond any memory, and low enough that no product with other sizes leaves 63
 * bits. */
#define PMOEI_MAX_ROWS (INT64_C(1) << 30)

/* A matrix of `rows` (any number if < 0) by `cols` of `dtype`, or an ERR_ARG that names what is wrong with it. */
pmoe_status pmoei_check_mat(const pmoe_mat *mat, const char *name, pmoe_dtype dtype, int64_t rows, int64_t cols);
/* The same, where float32 is welcome beside `dtype`. */
pmoe_status pmoei_check_mat_or_f32(const pmoe_mat *mat, const char *name, pmoe_dtype dtype, int64_t rows, int64_t cols);

/* ERR_ARG if the two share memory. */
pmoe_status pmoei_check_apart(const pmoe_mat *a, const char *a_name, const pmoe_mat *b, const char *b_name);

#endif
