#include <math.h>

#include "plot.h"
#include "svg.h"
#include "table.h"

enum { STEP, LOSS, HELD_OUT, COLUMNS };
enum { WIDTH = 760, HEIGHT = 440, LEFT = 68, RIGHT = 692, TOP = 84, BOTTOM = 380 };
enum { MOST_PIECES = 400, MOST_DOTS = 60, WINDOWS = 50 };

struct loss_plot {
  struct svg svg;
  struct table table;
  struct axis x, y;
  int64_t window; /* steps of the running mean */
  const struct plot_level *levels;
  int num_levels;
};

/* ---- axes ---- */

static void widen(double number, double *least, double *most) {
  if (number < *least) *least = number; /* NaN is neither */
  if (number > *most) *most = number;
}

static void make_axes(struct loss_plot *plot) {
  const struct table *table = &plot->table;
  double least = INFINITY, most = -INFINITY;
  for (int64_t row = 0; row < table->rows; row++) {
    widen(table_at(table, row, LOSS), &least, &most);
    widen(table_at(table, row, HELD_OUT), &least, &most);
  }
  for (int i = 0; i < plot->num_levels; i++) widen(plot->levels[i].nats, &least, &most);
  double room = most > least ? 0.06 * (most - least) : 0.5;
  plot->x = axis_make(table_at(table, 0, STEP) - 1, table_at(table, table->rows - 1, STEP), LEFT, RIGHT, 8);
  plot->y = axis_make(fmax(0, least - room), most + room, BOTTOM, TOP, 6);
}

static void draw_axes(struct loss_plot *plot) {
  struct svg *svg = &plot->svg;
  const struct axis *y = &plot->y;
  int digits = y->step >= 1 ? 0 : (int)ceil(-log10(y->step) - 1e-9);
  for (double number = axis_first(y); number <= y->to; number += y->step) {
    svg_line(svg, LEFT, axis_at(y, number), RIGHT, axis_at(y, number), "grid");
    svg_text(svg, LEFT - 9, axis_at(y, number) + 4, "end", "label", "%.*f", digits, number);
  }
  struct axis bits = axis_make(y->from / log(2), y->to / log(2), BOTTOM, TOP, 6);
  digits = bits.step >= 1 ? 0 : (int)ceil(-log10(bits.step) - 1e-9);
  for (double number = axis_first(&bits); number <= bits.to; number += bits.step) {
    svg_line(svg, RIGHT, axis_at(&bits, number), RIGHT + 5, axis_at(&bits, number), "axis");
    svg_text(svg, RIGHT + 9, axis_at(&bits, number) + 4, "start", "label", "%.*f", digits, number);
  }
  svg_line(svg, LEFT, BOTTOM, RIGHT, BOTTOM, "axis");
  svg_line(svg, LEFT, TOP, LEFT, BOTTOM, "axis");
  svg_line(svg, RIGHT, TOP, RIGHT, BOTTOM, "axis");
  svg_x_axis(svg, &plot->x, BOTTOM, "step");
  svg_text(svg, LEFT - 9, TOP - 12, "middle", "label", "nats per token");
  svg_text(svg, RIGHT + 9, TOP - 12, "middle", "label", "bits per token");
}

/* ---- curves ---- */

static void point(struct loss_plot *plot, char command, double step, double loss) {
  fprintf(plot->svg.file, "%c%.1f %.1f", command, axis_at(&plot->x, step), axis_at(&plot->y, loss));
}

/* Every step; many steps as the least and the most of short stretches, which look the same. */
static void draw_steps(struct loss_plot *plot) {
  const struct table *table = &plot->table;
  int64_t length = (table->rows + MOST_PIECES - 1) / MOST_PIECES;
  fputs("<path class=\"step\" d=\"", plot->svg.file);
  for (int64_t row = 0; row < table->rows; row += length) {
    double least = INFINITY, most = -INFINITY, step = table_at(table, row, STEP);
    for (int64_t i = row; i < row + length && i < table->rows; i++) widen(table_at(table, i, LOSS), &least, &most);
    if (!(least <= most)) continue;
    point(plot, row ? 'L' : 'M', step, most);
    if (length > 1) point(plot, 'L', step, least);
  }
  fputs("\"/>\n", plot->svg.file);
}

/* The mean of `window` steps around a row; of fewer near the ends. */
static double running_mean(const struct loss_plot *plot, int64_t row) {
  double sum = 0;
  int64_t reach = plot->window / 2, after = plot->table.rows - 1 - row;
  if (reach > row) reach = row;
  if (reach > after) reach = after;
  for (int64_t i = row - reach; i <= row + reach; i++) sum += table_at(&plot->table, i, LOSS);
  return sum / (double)(2 * reach + 1);
}

static void draw_mean(struct loss_plot *plot) {
  int64_t last = plot->table.rows - 1, pieces = last < MOST_PIECES ? last : MOST_PIECES;
  fputs("<path class=\"mean\" d=\"", plot->svg.file);
  for (int64_t i = 0; i <= pieces; i++) {
    int64_t row = pieces > 0 ? i * last / pieces : 0;
    point(plot, i ? 'L' : 'M', table_at(&plot->table, row, STEP), running_mean(plot, row));
  }
  fputs("\"/>\n", plot->svg.file);
}

static int is_evaluated(const struct loss_plot *plot, int64_t row) {
  return !isnan(table_at(&plot->table, row, HELD_OUT));
}

/* Of very many evaluations every other, every third, ... but the last one always. */
static void draw_held_out(struct loss_plot *plot) {
  const struct table *table = &plot->table;
  int64_t count = 0, last = -1, index = 0;
  for (int64_t row = 0; row < table->rows; row++)
    if (is_evaluated(plot, row)) count++, last = row;
  if (count == 0) return;
  int64_t every = (count + MOST_PIECES - 1) / MOST_PIECES;
  fputs("<path class=\"held\" d=\"", plot->svg.file);
  for (int64_t row = 0; row <= last; row++)
    if (is_evaluated(plot, row) && (index++ % every == 0 || row == last))
      point(plot, index == 1 ? 'M' : 'L', table_at(table, row, STEP), table_at(table, row, HELD_OUT));
  fputs("\"/>\n", plot->svg.file);
  for (int64_t row = 0; row <= last; row++)
    if (is_evaluated(plot, row) && (count <= MOST_DOTS || row == last))
      fprintf(plot->svg.file, "<circle class=\"dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"/>\n",
              axis_at(&plot->x, table_at(table, row, STEP)), axis_at(&plot->y, table_at(table, row, HELD_OUT)));
  double loss = table_at(table, last, HELD_OUT), y = axis_at(&plot->y, loss);
  svg_text(&plot->svg, axis_at(&plot->x, table_at(table, last, STEP)) - 8, y > BOTTOM - 24 ? y - 12 : y + 20, "end",
           "held-text halo", "%.2f nats, %.2f bits", loss, loss / log(2));
}

static void draw_levels(struct loss_plot *plot) {
  for (int i = 0; i < plot->num_levels; i++) {
    const struct plot_level *level = &plot->levels[i];
    if (isnan(level->nats)) continue;
    double y = axis_at(&plot->y, level->nats);
    svg_line(&plot->svg, LEFT, y, RIGHT, y, "level");
    svg_text(&plot->svg, RIGHT - 8, y - 6, "end", "label halo", "%s, %.2f bits", level->name, level->nats / log(2));
  }
}

static void draw_legend(struct loss_plot *plot) {
  struct svg *svg = &plot->svg;
  svg_line(svg, 284, 29, 310, 29, "step");
  svg_text(svg, 317, 33, "start", "label", "training, each step");
  svg_line(svg, 452, 29, 478, 29, "mean");
  if (plot->window > 1) svg_text(svg, 485, 33, "start", "label", "mean of %lld steps", (long long)plot->window);
  else svg_text(svg, 485, 33, "start", "label", "training");
  svg_line(svg, 620, 29, 646, 29, "held");
  fputs("<circle class=\"dot\" cx=\"633\" cy=\"29\" r=\"3.5\"/>\n", svg->file);
  svg_text(svg, 653, 33, "start", "label", "held-out text");
}

int plot_loss(const char *csv_path, const char *svg_path, const struct plot_level *levels, int num_levels,
              struct lm_error *err) {
  static const char *const names[COLUMNS] = {"step", "loss", "held_out_loss"};
  struct loss_plot plot = {.levels = levels, .num_levels = num_levels};
  if (table_read(&plot.table, csv_path, names, COLUMNS, err)) return -1;
  int status = plot.table.rows > 0 ? 0 : lm_error_set(err, "%s has no rows to plot", csv_path);
  if (status == 0) status = svg_begin(&plot.svg, svg_path, WIDTH, HEIGHT, "Loss over training", err);
  if (status == 0) {
    plot.window = plot.table.rows / WINDOWS / 2 * 2 + 1;
    make_axes(&plot);
    draw_axes(&plot);
    draw_steps(&plot);
    draw_levels(&plot);
    draw_mean(&plot);
    draw_held_out(&plot);
    draw_legend(&plot);
    status = svg_end(&plot.svg, err);
  }
  table_free(&plot.table);
  return status;
}
