#include "table.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_LINE = 4096 };

/* Field `index` of a line ends at a comma or at the line's end. NULL: the line has fewer. */
static const char *field_at(const char *line, int index) {
  for (; index > 0; index--) {
    line += strcspn(line, ",\n");
    if (*line++ != ',') return NULL;
  }
  return line;
}

static int find_column(const char *header, const char *name) {
  const char *field;
  for (int i = 0; (field = field_at(header, i)); i++)
    if (strcspn(field, ",\n") == strlen(name) && strncmp(field, name, strlen(name)) == 0) return i;
  return -1;
}

static int read_number(const char *field, double *out) {
  *out = NAN;
  if (!field) return -1;
  if (strchr(",\n", *field)) return 0;
  char *end;
  *out = strtod(field, &end);
  return end != field && strchr(",\n", *end) ? 0 : -1;
}

static void add_row(struct table *table, const double *row) {
  int64_t n = table->rows;
  size_t bytes = (size_t)table->columns * sizeof *row;
  if ((n & (n - 1)) == 0) table->value = realloc(table->value, (size_t)(n ? 2 * n : 1) * bytes);
  if (!table->value) lm_fatal("out of memory for a table of %lld rows", (long long)n);
  memcpy(table->value + n * table->columns, row, bytes);
  table->rows++;
}

static int read_rows(struct table *table, FILE *file, const char *path, const char *const *names,
                     struct lm_error *err) {
  char line[MOST_LINE];
  int place[TABLE_MOST_COLUMNS];
  if (!fgets(line, sizeof line, file)) return lm_error_set(err, "%s is empty", path);
  for (int c = 0; c < table->columns; c++)
    if ((place[c] = find_column(line, names[c])) < 0)
      return lm_error_set(err, "%s has no column \"%s\"", path, names[c]);
  for (long long number = 2; fgets(line, sizeof line, file) && strchr(line, '\n'); number++) {
    double row[TABLE_MOST_COLUMNS];
    for (int c = 0; c < table->columns; c++)
      if (read_number(field_at(line, place[c]), &row[c]))
        return lm_error_set(err, "%s:%lld: a number was expected as %s", path, number, names[c]);
    add_row(table, row);
  }
  return ferror(file) ? lm_error_set(err, "%s: %s", path, strerror(errno)) : 0;
}

int table_read(struct table *table, const char *path, const char *const *names, int columns, struct lm_error *err) {
  *table = (struct table){.columns = columns};
  FILE *file = fopen(path, "r");
  if (!file) return lm_error_set(err, "%s: %s", path, strerror(errno));
  int status = read_rows(table, file, path, names, err);
  fclose(file);
  if (status) table_free(table);
  return status;
}

void table_free(struct table *table) {
  free(table->value);
  *table = (struct table){0};
}
