/* The layer once more, in double precision and plain loops, for a few tokens, rows and features. Shares no code with
 * the library. */
#ifndef BENCH_REFERENCE_H
#define BENCH_REFERENCE_H
#include <stdbool.h>

#include "data.h"

/* Largest |got - want| seen, and largest |want|. */
typedef struct bench_error {
  double deviation, size;
} bench_error;
void bench_compare(bench_error *error, double got, double want);
/* deviation / size; NaN as soon as anything was NaN. 0 if nothing was compared. */
double bench_relative(const bench_error *error);
double bench_worse(double a, double b);
double bench_worst(const bench_error *errors, int n);

/* An expert's output for row x [H]; pre [F1] and act [F] are filled too. */
void bench_expert_forward(const bench_options *o, int32_t expert, const double *x, double *pre, double *act,
                          double *out);
/* dx [H] += the gradient of dout . output */
void bench_expert_backward(const bench_options *o, int32_t expert, const double *pre, const double *dout, double *dx);

/* Inner feature f of one expert over many rows: the gradients of W1's row f (gated: also row F + f), b1's, and W2's
 * column f. */
typedef struct bench_feature {
  const bench_options *options;
  int32_t expert, feature;
  double *w1[2], *w2; /* parameters, [H] each */
  double b1[2];
  double *dw1[2], *dw2; /* gradients, [H] each */
  double db1[2];
  void *memory;
} bench_feature;
pmoe_status bench_feature_create(const bench_options *o, int32_t expert, int32_t feature, bench_feature *out);
void bench_feature_destroy(bench_feature *feature);
/* A row that counts `weight` in the output, whose loss gradient is dy. */
void bench_feature_add(bench_feature *feature, const double *x, const double *dy, double weight);
/* Against the gradients of one expert: dw1 [F1,H], db1 [F1] or NULL, dw2 [H,F]. */
void bench_feature_compare(const bench_feature *feature, const float *dw1, const float *db1, const float *dw2,
                           bench_error *error);

/* Wg and the softmax router. */
typedef struct bench_router_reference {
  const bench_options *options;
  float *weight; /* [E,H] */
  double *prob;  /* [E], of the latest token */
  int32_t expert[BENCH_MAX_TOP_K];
} bench_router_reference;
pmoe_status bench_router_create(const bench_options *o, bench_router_reference *out);
void bench_router_destroy(bench_router_reference *router);
/* Fills prob and expert. */
void bench_router_forward(bench_router_reference *router, const double *x);
/* dweight [K] -> dlogits [E] */
void bench_router_backward(const bench_router_reference *router, const double *dweight, double *dlogits);

#endif
