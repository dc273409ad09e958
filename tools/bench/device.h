/* A device that a run computes on, as a table: the commands know no vendor's calls. device_cuda.c fills it in;
 * device_none.c is built where there is no CUDA. */
#ifndef BENCH_DEVICE_H
#define BENCH_DEVICE_H
#include <stdbool.h>

#include "ceilings.h"
#include "timing.h"

/* How the products of several experts are handed to the device: one call for each on several streams; one batch, where
 * all have the same number of rows; one call for products of different sizes. */
typedef enum bench_way { BENCH_ONE_BY_ONE, BENCH_BATCHED, BENCH_GROUPED, BENCH_NUM_WAYS } bench_way;

/* The products of the experts and nothing else, in each way that can be. */
typedef struct bench_products bench_products;

typedef struct bench_device bench_device;
struct bench_device {
  char name[96];
  pmoe_stream stream; /* that everything is enqueued on */
  size_t cache_bytes; /* L2 */
  bool flush;         /* whether the cache is emptied before each measured call; bench_device_sees sets it */

  /* Memory of the device. */
  pmoe_status (*take)(bench_device *device, size_t bytes, void **out);
  void (*give_back)(bench_device *device, void *p);
  /* In any direction; waits. */
  pmoe_status (*copy)(bench_device *device, void *to, const void *from, size_t bytes);
  pmoe_status (*zero)(bench_device *device, void *p, size_t bytes);
  pmoe_status (*wait)(bench_device *device);

  /* bench_measure, whose runs enqueue and are timed by events; nobody waits before the last. */
  pmoe_status (*measure)(bench_device *device, const bench_options *options, bench_op *ops, int num_ops);
  /* Milliseconds an iteration of `iters` iterations of the operations in turn, with nothing in between. */
  pmoe_status (*train)(bench_device *device, const bench_op *ops, int num_ops, int iters, double *ms);
  /* A graph of what run(arg) enqueues, the device's until it is closed. */
  pmoe_status (*capture)(bench_device *device, pmoe_status (*run)(void *arg), void *arg, void **graph);
  pmoe_status (*launch)(bench_device *device, void *graph);
  /* Enqueues a copy. */
  pmoe_status (*move)(bench_device *device, void *to, const void *from, size_t bytes);

  pmoe_status (*products)(bench_device *device, const bench_floor_shape *shape, bench_products **out);
  void (*close)(bench_device *device);
};

/* ctx: one of the CUDA back end. */
pmoe_status bench_device_open(pmoe_ctx *ctx, bench_device **out);

/* The bytes that one measured call works on: less than four times the cache, and the cache is emptied before each. */
void bench_device_sees(bench_device *device, double bytes);

/* Bytes without a pattern: copies of zeros could be faster than others. */
pmoe_status bench_device_scatter(bench_device *device, void *p, size_t bytes);

/* A ceiling's op: a bench_ways with the products and the way. */
typedef struct bench_ways {
  bench_products *products;
  bench_way way;
} bench_ways;
bool bench_products_can(const bench_products *products, bench_way way);
/* How many of the six sets of products cuBLAS takes grouped; the others run one by one in that way. */
int bench_products_grouped(const bench_products *products);
/* The fastest of the ways, each timed once. */
bench_way bench_products_best(const bench_products *products);
pmoe_status bench_products_forward(void *arg);
pmoe_status bench_products_backward(void *arg);
void bench_products_destroy(bench_products *products);

/* A copy on the device. arg is a bench_move. */
typedef struct bench_move {
  bench_device *device;
  void *to;
  const void *from;
  size_t bytes;
} bench_move;
pmoe_status bench_move_run(void *arg);

#endif
