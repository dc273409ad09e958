#include "svg.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>

/* Every colour is given for light and for dark viewers. "halo" keeps a text readable on top of lines. */
static const char style[] = "<style>\n"
                            ".page{fill:#ffffff;stroke:#d1d9e0}\n"
                            ".title{fill:#1f2328;font-size:17px;font-weight:600}\n"
                            ".strong{fill:#1f2328;font-size:13px;font-weight:600}\n"
                            ".label{fill:#59636e;font-size:12px}\n"
                            ".halo{paint-order:stroke;stroke:#ffffff;stroke-width:4px;stroke-linejoin:round}\n"
                            ".grid{stroke:#e6eaef}\n"
                            ".axis{stroke:#818b98}\n"
                            ".frame{fill:none;stroke:#818b98}\n"
                            ".step{fill:none;stroke:#9ec5fe;stroke-width:1}\n"
                            ".mean{fill:none;stroke:#0a58ca;stroke-width:2.2}\n"
                            ".held{fill:none;stroke:#d9480f;stroke-width:2.2}\n"
                            ".dot{fill:#d9480f;stroke:#ffffff;stroke-width:1}\n"
                            ".held-text{fill:#c2410c;font-size:13px;font-weight:600}\n"
                            ".level{stroke:#59636e;stroke-width:1.2;stroke-dasharray:5 4}\n"
                            "@media (prefers-color-scheme:dark){\n"
                            ".page{fill:#151b23;stroke:#3d444d}\n"
                            ".title,.strong{fill:#f0f6fc}\n"
                            ".label{fill:#9198a1}\n"
                            ".halo{stroke:#151b23}\n"
                            ".grid{stroke:#262c36}\n"
                            ".axis,.frame{stroke:#656c76}\n"
                            ".step{stroke:#2f5a93}\n"
                            ".mean{stroke:#79b8ff}\n"
                            ".held{stroke:#ff9b5e}\n"
                            ".dot{fill:#ff9b5e;stroke:#151b23}\n"
                            ".held-text{fill:#ff9b5e}\n"
                            ".level{stroke:#9198a1}\n"
                            "}\n"
                            "</style>\n";

int svg_begin(struct svg *svg, const char *path, int width, int height, const char *title, struct lm_error *err) {
  *svg = (struct svg){fopen(path, "w"), path, width, height};
  if (!svg->file) return lm_error_set(err, "%s: %s", path, strerror(errno));
  fprintf(svg->file,
          "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\" "
          "font-family=\"system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif\">\n<title>%s</title>\n%s",
          width, height, width, height, title, style);
  fprintf(svg->file, "<rect class=\"page\" x=\"0.5\" y=\"0.5\" width=\"%d\" height=\"%d\" rx=\"8\"/>\n", width - 1,
          height - 1);
  svg_text(svg, 24, 34, "start", "title", "%s", title);
  return 0;
}

int svg_end(struct svg *svg, struct lm_error *err) {
  fputs("</svg>\n", svg->file);
  int failed = ferror(svg->file);
  if (fclose(svg->file) || failed) return lm_error_set(err, "%s: %s", svg->path, strerror(errno));
  return 0;
}

void svg_text(struct svg *svg, double x, double y, const char *anchor, const char *class, const char *format, ...) {
  fprintf(svg->file, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" class=\"%s\">", x, y, anchor, class);
  va_list args;
  va_start(args, format);
  vfprintf(svg->file, format, args);
  va_end(args);
  fputs("</text>\n", svg->file);
}

void svg_line(struct svg *svg, double x1, double y1, double x2, double y2, const char *class) {
  fprintf(svg->file, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"%s\"/>\n", x1, y1, x2, y2, class);
}

/* 1, 2 or 5 times a power of ten. */
static double round_step(double step) {
  double power = pow(10, floor(log10(step))), lead = step / power;
  return power * (lead < 1.5 ? 1 : lead < 3.5 ? 2 : lead < 7.5 ? 5 : 10);
}

struct axis axis_make(double from, double to, double from_pixel, double to_pixel, int labels) {
  if (!(to > from)) to = from + 1;
  return (struct axis){from, to, from_pixel, to_pixel, round_step((to - from) / labels)};
}

double axis_at(const struct axis *axis, double number) {
  return axis->from_pixel + (number - axis->from) / (axis->to - axis->from) * (axis->to_pixel - axis->from_pixel);
}

double axis_first(const struct axis *axis) { return ceil(axis->from / axis->step - 1e-9) * axis->step; }

void svg_x_axis(struct svg *svg, const struct axis *axis, double y, const char *name) {
  double step = axis->step < 1 ? 1 : axis->step; /* steps are whole */
  for (double number = ceil(axis->from / step) * step; number <= axis->to + 1e-9; number += step) {
    double x = axis_at(axis, number);
    svg_line(svg, x, y, x, y + 5, "axis");
    svg_text(svg, x, y + 19, "middle", "label", "%.0f", number);
  }
  svg_text(svg, (axis->from_pixel + axis->to_pixel) / 2, y + 38, "middle", "label", "%s", name);
}
