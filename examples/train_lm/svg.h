/* What the plots have in common: a page that brings its own background, so that it can be read in light and dark
 * viewers, axes with round numbers, and texts. Lengths are in pixels, y points down. */
#ifndef LM_SVG_H
#define LM_SVG_H
#include <stdio.h>

#include "error.h"

struct svg {
  FILE *file;
  const char *path;
  int width, height;
};

/* Colours are classes of the page's style: see svg.c. */
int svg_begin(struct svg *svg, const char *path, int width, int height, const char *title, struct lm_error *err);
int svg_end(struct svg *svg, struct lm_error *err);

/* anchor: "start", "middle" or "end". The text is a printf format; it must not need escapes. */
void svg_text(struct svg *svg, double x, double y, const char *anchor, const char *class, const char *format, ...)
    __attribute__((format(printf, 6, 7)));
void svg_line(struct svg *svg, double x1, double y1, double x2, double y2, const char *class);

/* A scale from numbers to pixels. */
struct axis {
  double from, to;             /* numbers */
  double from_pixel, to_pixel; /* where these are */
  double step;                 /* between labelled numbers */
};
/* With about `labels` labels at round numbers. */
struct axis axis_make(double from, double to, double from_pixel, double to_pixel, int labels);
double axis_at(const struct axis *axis, double number);
/* The first labelled number. */
double axis_first(const struct axis *axis);

/* Labels below a plot whose bottom is at y, with the axis' name. */
void svg_x_axis(struct svg *svg, const struct axis *axis, double y, const char *name);

#endif
