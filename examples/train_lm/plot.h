/* Plots of a run as SVG, for light and dark viewers. They read the files that report.h describes. Both return 0, or -1
 * with a sentence in err. */
#ifndef LM_PLOT_H
#define LM_PLOT_H
#include "error.h"

/* A loss to compare with, drawn as a line across. */
struct plot_level {
  const char *name;
  double nats; /* per token; NaN: left out */
};

/* metrics.csv -> training and held-out loss over steps. */
int plot_loss(const char *csv_path, const char *svg_path, const struct plot_level *levels, int num_levels,
              struct lm_error *err);
/* experts.csv -> a heat map per MoE layer: share of the choices of every expert over steps. */
int plot_experts(const char *csv_path, const char *svg_path, struct lm_error *err);

#endif
