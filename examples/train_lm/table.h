/* Tables of numbers from CSV files with a header line. */
#ifndef LM_TABLE_H
#define LM_TABLE_H
#include <stdint.h>

#include "error.h"

enum { TABLE_MOST_COLUMNS = 8 };

struct table {
  int columns;
  int64_t rows;
  double *value; /* [rows, columns]; empty fields are NaN */
};

/* Reads the named columns. A last line without its end is still being written, and left out. Returns 0, or -1 with a
 * sentence. */
int table_read(struct table *table, const char *path, const char *const *names, int columns, struct lm_error *err);
void table_free(struct table *table);

static inline double table_at(const struct table *table, int64_t row, int column) {
  return table->value[row * table->columns + column];
}

#endif
