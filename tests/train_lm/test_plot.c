/* Plots: what they say of known tables, and of tables that cannot be plotted. Whether they look well a person judges.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "examples/train_lm/plot.h"
#include "examples/train_lm/table.h"
#include "train_lm/folder.h"

static struct folder f;
static struct lm_error err;

static int setup(void **state) {
  (void)state;
  f = folder_make();
  return 0;
}

static int teardown(void **state) {
  (void)state;
  folder_remove(&f);
  return 0;
}

static const char *write_text(const char *name, const char *text) { return folder_write(&f, name, text, strlen(text)); }

static int count_of(const char *text, const char *what) {
  int count = 0;
  for (; (text = strstr(text, what)); text += strlen(what)) count++;
  return count;
}

/* Every element is closed, in order, and attributes are in quotes: enough for the SVG written here. */
static void assert_well_formed(const char *svg) {
  char open[8][16];
  int depth = 0;
  for (const char *at = svg; (at = strchr(at, '<')); at++) {
    const char *end = strchr(at, '>');
    size_t name = strcspn(at + 1 + (at[1] == '/'), " >/");
    assert_true(end && name > 0 && name < sizeof *open);
    int quotes = 0;
    for (const char *c = at; c < end; c++) quotes += *c == '"';
    assert_int_equal(quotes % 2, 0);
    if (at[1] == '/') {
      assert_true(depth > 0);
      depth--;
      assert_true(strncmp(open[depth], at + 2, name) == 0 && strlen(open[depth]) == name);
    } else if (end[-1] != '/') {
      assert_true(depth < 8);
      snprintf(open[depth++], sizeof *open, "%.*s", (int)name, at + 1);
    }
  }
  assert_int_equal(depth, 0);
  assert_null(strstr(svg, "nan"));
  assert_null(strstr(svg, "inf"));
}

static char *plot(int (*draw)(const char *csv, const char *svg), const char *csv) {
  const char *svg = folder_path(&f, "plot.svg");
  if (draw(csv, svg)) fail_msg("%s", err.text);
  char *text = folder_read(svg);
  assert_well_formed(text);
  return text;
}

static const struct plot_level levels[] = {{"unigram entropy", 2.0}, {"bigram entropy", NAN}};

static int draw_loss(const char *csv, const char *svg) { return plot_loss(csv, svg, levels, 2, &err); }
static int draw_experts(const char *csv, const char *svg) { return plot_experts(csv, svg, &err); }

/* ---- tables ---- */

static void tables_are_read_by_name(void **state) {
  (void)state;
  static const char *const names[] = {"c", "a"};
  struct table table;
  const char *path = write_text("table", "a,bb,c\n1,2,3\n4,,\n-5e-1,x,7.25\n8,9");
  assert_int_equal(table_read(&table, path, names, 2, &err), 0); /* b is not asked for; the last row is not whole */
  assert_int_equal(table.rows, 3);
  assert_true(table_at(&table, 0, 0) == 3 && table_at(&table, 0, 1) == 1);
  assert_true(isnan(table_at(&table, 1, 0)) && table_at(&table, 1, 1) == 4);
  assert_true(table_at(&table, 2, 0) == 7.25 && table_at(&table, 2, 1) == -0.5);
  table_free(&table);
}

static void what_is_no_table_is_refused(void **state) {
  (void)state;
  static const struct {
    const char *text, *says;
  } cases[] = {
      {"", "is empty"},
      {"step,losses\n1,2\n", "has no column \"loss\""},
      {"step,loss,held_out_loss\n1,2,\n2,low,\n", ":3: a number was expected as loss"},
      {"step,loss,held_out_loss\n1,2\n", ":2: a number was expected as held_out_loss"},
      {"step,loss,held_out_loss\n1,2x,\n", ":2: a number was expected as loss"},
      {"step,loss,held_out_loss\n", "has no rows to plot"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(draw_loss(write_text("table", cases[i].text), folder_path(&f, "never.svg")), -1);
    if (!strstr(err.text, cases[i].says)) fail_msg("\"%s\" says \"%s\"", cases[i].text, err.text);
  }
  assert_int_equal(draw_loss(folder_path(&f, "nowhere"), folder_path(&f, "never.svg")), -1);
  assert_non_null(strstr(err.text, "nowhere: No such file"));
  const char *good = write_text("table", "step,loss,held_out_loss\n1,2,\n");
  assert_int_equal(draw_loss(good, folder_path(&f, "no/where.svg")), -1);
  assert_non_null(strstr(err.text, "where.svg: No such file"));
}

/* ---- loss ---- */

/* The number of corners of the path of a class. */
static int corners_of(const char *svg, const char *class) {
  char begin[64];
  snprintf(begin, sizeof begin, "<path class=\"%s\" d=\"M", class);
  const char *path = strstr(svg, begin);
  assert_non_null(path);
  int count = 1;
  for (path += strlen(begin); *path != '"'; path++) count += *path == 'L';
  return count;
}

static void the_loss_plot_has_its_curves(void **state) {
  (void)state;
  char *svg = plot(draw_loss, write_text("loss", "step,tokens,loss,held_out_loss\n1,8,5.5,\n2,16,4,4.25\n3,24,3.5,\n"
                                                 "4,32,3,3.25\n"));
  assert_int_equal(corners_of(svg, "step"), 4);
  assert_int_equal(corners_of(svg, "mean"), 4);
  assert_int_equal(corners_of(svg, "held"), 2);
  assert_int_equal(count_of(svg, "<circle class=\"dot\""), 2 + 1); /* and one in the legend */
  assert_non_null(strstr(svg, ">3.25 nats, 4.69 bits<"));
  assert_non_null(strstr(svg, ">unigram entropy, 2.89 bits<"));
  assert_null(strstr(svg, "bigram"));
  static const char *const texts[] = {">Loss over training<", ">step<",          ">nats per token<",
                                      ">bits per token<",     ">held-out text<", "prefers-color-scheme:dark"};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) assert_non_null(strstr(svg, texts[i]));
  free(svg);
}

static void loss_plots_of_any_length_are_small(void **state) {
  (void)state;
  char *csv = malloc(1 << 21);
  assert_non_null(csv);
  static const int rows[] = {1, 2, 3, 399, 400, 401, 50000};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    int length = sprintf(csv, "step,loss,held_out_loss\n");
    for (int row = 1; row <= rows[i]; row++)
      length += sprintf(csv + length, "%d,%.4f,%s\n", row, 1 + 4.0 / row, row % 10 ? "" : "2.5");
    char *svg = plot(draw_loss, folder_write(&f, "long", csv, (size_t)length));
    assert_true(strlen(svg) < 60000);
    assert_true(corners_of(svg, "mean") == (rows[i] < 401 ? rows[i] : 401));
    free(svg);
  }
  free(csv);
}

static void a_level_loss_has_an_axis_too(void **state) {
  (void)state;
  const char *csv = write_text("level", "step,loss,held_out_loss\n5,0,\n6,0,0\n");
  assert_int_equal(plot_loss(csv, folder_path(&f, "plot.svg"), NULL, 0, &err), 0);
  char *svg = folder_read(folder_path(&f, "plot.svg"));
  assert_well_formed(svg);
  free(svg);
}

/* ---- experts ---- */

static void the_heat_map_has_its_cells(void **state) {
  (void)state;
  /* Layer 1: even, then all on expert 0. Layer 3: a quarter, the rest. */
  char *svg = plot(draw_experts, write_text("experts", "step,layer,expert,share\n1,1,0,0.5\n1,1,1,0.5\n1,3,0,0.125\n"
                                                       "1,3,1,0.875\n2,1,0,1\n2,1,1,0\n2,3,0,0.125\n2,3,1,0.875\n"));
  static const char *const texts[] = {">Layer 1: 2 experts, even share 50 %<",
                                      ">Layer 3: 2 experts, even share 50 %<",
                                      ">12.5 %<",
                                      ">87.5 %<",
                                      ">100.0 %<",
                                      ">0.0 %<",
                                      ">Load of the experts<",
                                      ">expert<",
                                      ">step<",
                                      ">even<"};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    if (!strstr(svg, texts[i])) fail_msg("no %s", texts[i]);
  /* Steps 0 to 2 lie from pixel 68 to 672: layer 1's first column ends at 370; equal neighbours are one cell. */
  assert_int_equal(
      count_of(svg, "<path fill=\"#f3f1ec\" d=\"M68.0 96.0H370.0v20.0H68.0zM68.0 116.0H370.0v20.0H68.0z\"/>"), 1);
  assert_int_equal(count_of(svg, "<path fill=\"#253494\" d=\"M370.0 116.0H672.0v20.0H370.0z\"/>"), 1);
  assert_int_equal(count_of(svg, "<path fill=\"#253494\" d=\"M68.0 182.0H672.0v20.0H68.0z\"/>"), 1);
  free(svg);
}

static void heat_maps_of_any_size_are_small(void **state) {
  (void)state;
  char *csv = malloc(1 << 23);
  assert_non_null(csv);
  static const struct {
    int steps, layers, experts;
  } sizes[] = {{1, 1, 1}, {1, 2, 3}, {241, 1, 2}, {1000, 2, 5}, {100, 8, 256}, {3, 1, 2000}};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    int length = sprintf(csv, "step,layer,expert,share\n");
    for (int s = 1; s <= sizes[i].steps; s++)
      for (int l = 0; l < sizes[i].layers; l++)
        for (int e = 0; e < sizes[i].experts; e++)
          length += sprintf(csv + length, "%d,%d,%d,%.5f\n", s, l, e, (1 + 0.9 * sin(s * 0.7 + e)) / sizes[i].experts);
    const char *svg_path = folder_path(&f, "plot.svg");
    if (draw_experts(folder_write(&f, "many", csv, (size_t)length), svg_path)) fail_msg("%s", err.text);
    FILE *file = fopen(svg_path, "r");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    assert_true(ftell(file) < 3 << 20);
    fclose(file);
  }
  free(csv);
}

static void tables_of_no_experts_are_refused(void **state) {
  (void)state;
  static const struct {
    const char *rows, *says;
  } cases[] = {
      {"", "has no rows to plot"},
      {"1,0,0,0.5\n1,0,2,0.5\n", ":3: expert 1 of layer 0 was expected"},
      {"1,0,1,0.5\n1,0,0,0.5\n", ":2: expert 0 of layer 0 was expected"},
      {"1,0,0,0.5\n1,0,1,0.5\n2,0,1,1\n", ":4: expert 0 of layer 0 was expected"},
      {"1,-1,0,0.5\n", "layer -1, expert 0 makes no sense"},
      {"1,0,1e9,0.5\n", "makes no sense"},
      {"1,,0,0.5\n", "makes no sense"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char text[256];
    snprintf(text, sizeof text, "step,layer,expert,share\n%s", cases[i].rows);
    assert_int_equal(draw_experts(write_text("table", text), folder_path(&f, "never.svg")), -1);
    if (!strstr(err.text, cases[i].says)) fail_msg("\"%s\" says \"%s\"", text, err.text);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(tables_are_read_by_name),         cmocka_unit_test(what_is_no_table_is_refused),
      cmocka_unit_test(the_loss_plot_has_its_curves),    cmocka_unit_test(loss_plots_of_any_length_are_small),
      cmocka_unit_test(a_level_loss_has_an_axis_too),    cmocka_unit_test(the_heat_map_has_its_cells),
      cmocka_unit_test(heat_maps_of_any_size_are_small), cmocka_unit_test(tables_of_no_experts_are_refused),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
