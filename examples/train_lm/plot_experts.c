#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plot.h"
#include "svg.h"
#include "table.h"

enum { STEP, LAYER, EXPERT, SHARE, COLUMNS };
enum { WIDTH = 760, LEFT = 68, RIGHT = 672, TOP = 96, PANEL_GAP = 46, AXIS_ROOM = 56, MOST_PANEL = 168, MOST_ROW = 20 };
/* Cells are drawn colour by colour; more of them than this would make a large file that shows no more. */
enum { COLOURS = 33, MOST_COLUMNS = 240, MOST_CELLS = 60000 };

/* One layer: rows [first_row, first_row + steps * experts) of the table's rows of this layer, sorted by step. */
struct panel {
  int layer, experts;
  int64_t steps, columns; /* a column is the mean of a stretch of steps */
  double *step;           /* [columns] last of each */
  double *share;          /* [columns, experts] */
  double top, row;        /* pixels */
};

struct experts_plot {
  struct svg svg;
  struct table table;
  struct axis x;
  int num_panels, num_experts; /* experts: of all layers */
  struct panel *panels;
};

/* ---- from the table to panels ---- */

static struct panel *panel_of(struct experts_plot *plot, int layer) {
  for (int i = 0; i < plot->num_panels; i++)
    if (plot->panels[i].layer == layer) return &plot->panels[i];
  plot->panels = realloc(plot->panels, (size_t)(plot->num_panels + 1) * sizeof *plot->panels);
  if (!plot->panels) lm_fatal("out of memory for %d panels", plot->num_panels + 1);
  plot->panels[plot->num_panels] = (struct panel){.layer = layer};
  return &plot->panels[plot->num_panels++];
}

static int count_experts(struct experts_plot *plot, const char *path, struct lm_error *err) {
  const struct table *table = &plot->table;
  for (int64_t row = 0; row < table->rows; row++) {
    double layer = table_at(table, row, LAYER), expert = table_at(table, row, EXPERT);
    if (!(layer >= 0 && layer < 65536 && expert >= 0 && expert < 65536))
      return lm_error_set(err, "%s:%lld: layer %g, expert %g makes no sense", path, (long long)row + 2, layer, expert);
    struct panel *panel = panel_of(plot, (int)layer);
    if ((int)expert >= panel->experts) panel->experts = (int)expert + 1;
    if ((int)expert == 0) panel->steps++;
  }
  for (int i = 0; i < plot->num_panels; i++) plot->num_experts += plot->panels[i].experts;
  return plot->num_panels > 0 ? 0 : lm_error_set(err, "%s has no rows to plot", path);
}

static int fill_panel(const struct table *table, struct panel *panel, int64_t most, const char *path,
                      struct lm_error *err) {
  int64_t length = (panel->steps + most - 1) / most, at = -1;
  panel->columns = length ? (panel->steps + length - 1) / length : 0;
  panel->step = lm_alloc((size_t)panel->columns, sizeof *panel->step);
  panel->share = lm_alloc((size_t)(panel->columns * panel->experts), sizeof *panel->share);
  int next = 0; /* experts come in order, step after step */
  for (int64_t row = 0; row < table->rows; row++) {
    if ((int)table_at(table, row, LAYER) != panel->layer) continue;
    at += next == 0;
    if ((int)table_at(table, row, EXPERT) != next || at >= panel->steps)
      return lm_error_set(err, "%s:%lld: expert %d of layer %d was expected", path, (long long)row + 2, next,
                          panel->layer);
    int64_t column = at / length, first = column * length;
    int64_t held = panel->steps - first < length ? panel->steps - first : length;
    panel->step[column] = table_at(table, row, STEP);
    panel->share[column * panel->experts + next] += table_at(table, row, SHARE) / (double)held;
    next = (next + 1) % panel->experts;
  }
  return 0;
}

static int make_panels(struct experts_plot *plot, const char *path, struct lm_error *err) {
  if (count_experts(plot, path, err)) return -1;
  int64_t most = MOST_CELLS / plot->num_experts;
  most = most > MOST_COLUMNS ? MOST_COLUMNS : most < 30 ? 30 : most;
  double top = TOP, last = 1;
  for (int i = 0; i < plot->num_panels; i++) {
    struct panel *panel = &plot->panels[i];
    if (fill_panel(&plot->table, panel, most, path, err)) return -1;
    panel->row = (double)MOST_PANEL / panel->experts;
    if (panel->row > MOST_ROW) panel->row = MOST_ROW;
    panel->top = top;
    top += panel->row * panel->experts + PANEL_GAP;
    last = fmax(last, panel->step[panel->columns - 1]);
  }
  plot->x = axis_make(0, last, LEFT, RIGHT, 8);
  plot->svg.height = (int)(top - PANEL_GAP + AXIS_ROOM);
  return 0;
}

/* ---- drawing ---- */

/* Colours of log2(share / even share) from -2 to 2: fewer choices blue, more orange, to be told apart by everyone. */
static void colour_of(int index, char text[8]) {
  static const double stops[5][3] = {{37, 52, 148}, {123, 159, 214}, {243, 241, 236}, {246, 166, 92}, {168, 56, 12}};
  double place = 4.0 * index / (COLOURS - 1);
  int stop = place >= 4 ? 3 : (int)place;
  int rgb[3];
  for (int i = 0; i < 3; i++)
    rgb[i] = (int)lround(stops[stop][i] + (place - stop) * (stops[stop + 1][i] - stops[stop][i]));
  snprintf(text, 8, "#%02x%02x%02x", (unsigned)rgb[0] & 255, (unsigned)rgb[1] & 255, (unsigned)rgb[2] & 255);
}

static int colour_index(double share_over_even) {
  double place = share_over_even > 0 ? (log2(share_over_even) + 2) / 4 : 0;
  return (int)lround(fmin(fmax(place, 0), 1) * (COLOURS - 1));
}

static int cell_colour(const struct panel *panel, int64_t column, int expert) {
  return colour_index(panel->share[column * panel->experts + expert] * panel->experts);
}

static double column_left(const struct experts_plot *plot, const struct panel *panel, int64_t column) {
  return axis_at(&plot->x, column > 0 ? panel->step[column - 1] : 0);
}

/* All cells of one colour, neighbours in a row as one. */
static void draw_colour(struct experts_plot *plot, const struct panel *panel, int colour) {
  int open = 0;
  for (int e = 0; e < panel->experts; e++)
    for (int64_t c = 0; c < panel->columns; c++) {
      if (cell_colour(panel, c, e) != colour) continue;
      double left = column_left(plot, panel, c);
      while (c + 1 < panel->columns && cell_colour(panel, c + 1, e) == colour) c++;
      if (!open++) {
        char text[8];
        colour_of(colour, text);
        fprintf(plot->svg.file, "<path fill=\"%s\" d=\"", text);
      }
      fprintf(plot->svg.file, "M%.1f %.1fH%.1fv%.1fH%.1fz", left, panel->top + e * panel->row,
              axis_at(&plot->x, panel->step[c]), panel->row, left);
    }
  if (open) fputs("\"/>\n", plot->svg.file);
}

/* The mean share over the last tenth of the columns. */
static double late_share(const struct panel *panel, int expert) {
  int64_t first = panel->columns - (panel->columns + 9) / 10;
  double sum = 0;
  for (int64_t c = first; c < panel->columns; c++) sum += panel->share[c * panel->experts + expert];
  return sum / (double)(panel->columns - first);
}

static void label_rows(struct experts_plot *plot, const struct panel *panel) {
  int every = 1;
  while (every * panel->row < 14) every *= 2;
  for (int e = 0; e < panel->experts; e += every) {
    double y = panel->top + (e + 0.5) * panel->row + 4;
    svg_text(&plot->svg, LEFT - 9, y, "end", "label", "%d", e);
    if (every == 1) svg_text(&plot->svg, WIDTH - 24, y, "end", "label", "%.1f %%", 100 * late_share(panel, e));
  }
  if (every == 1) svg_text(&plot->svg, WIDTH - 24, panel->top - 9, "end", "label", "last tenth");
}

static void draw_panel(struct experts_plot *plot, const struct panel *panel) {
  struct svg *svg = &plot->svg;
  double height = panel->row * panel->experts;
  svg_text(svg, LEFT, panel->top - 9, "start", "strong", "Layer %d: %d experts, even share %.3g %%", panel->layer,
           panel->experts, 100.0 / panel->experts);
  svg_text(svg, LEFT - 9, panel->top - 9, "end", "label", "expert");
  fputs("<g shape-rendering=\"crispEdges\">\n", svg->file);
  for (int colour = 0; colour < COLOURS; colour++) draw_colour(plot, panel, colour);
  fputs("</g>\n", svg->file);
  fprintf(svg->file, "<rect class=\"frame\" x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%.1f\"/>\n", LEFT, panel->top,
          RIGHT - LEFT, height);
  label_rows(plot, panel);
}

static void draw_legend(struct experts_plot *plot) {
  static const char *const labels[] = {"\xc2\xbc or less", "\xc2\xbd", "even", "2\xc3\x97", "4\xc3\x97 or more"};
  enum { FROM = 440, CELL = 8, Y = 22 };
  struct svg *svg = &plot->svg;
  svg_text(svg, FROM - 12, Y + 10, "end", "label", "share of the layer's choices");
  fputs("<g shape-rendering=\"crispEdges\">\n", svg->file);
  for (int i = 0; i < COLOURS; i++) {
    char text[8];
    colour_of(i, text);
    fprintf(svg->file, "<rect fill=\"%s\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"12\"/>\n", text, FROM + CELL * i, Y,
            CELL);
  }
  fputs("</g>\n", svg->file);
  for (int i = 0; i < 5; i++)
    svg_text(svg, FROM + CELL * (0.5 + (COLOURS - 1) / 4.0 * i), Y + 28, "middle", "label", "%s", labels[i]);
}

static int draw(struct experts_plot *plot, const char *path, struct lm_error *err) {
  int height = plot->svg.height;
  if (svg_begin(&plot->svg, path, WIDTH, height, "Load of the experts", err)) return -1;
  draw_legend(plot);
  for (int i = 0; i < plot->num_panels; i++) draw_panel(plot, &plot->panels[i]);
  svg_x_axis(&plot->svg, &plot->x, height - AXIS_ROOM, "step");
  return svg_end(&plot->svg, err);
}

int plot_experts(const char *csv_path, const char *svg_path, struct lm_error *err) {
  static const char *const names[COLUMNS] = {"step", "layer", "expert", "share"};
  struct experts_plot plot = {0};
  if (table_read(&plot.table, csv_path, names, COLUMNS, err)) return -1;
  int status = make_panels(&plot, csv_path, err);
  if (status == 0) status = draw(&plot, svg_path, err);
  for (int i = 0; i < plot.num_panels; i++) free(plot.panels[i].step), free(plot.panels[i].share);
  free(plot.panels);
  table_free(&plot.table);
  return status;
}
