#include "device.h"

/* A context of the CUDA back end is refused before anything here is reached. */
pmoe_status bench_device_open(pmoe_ctx *ctx, bench_device **out) {
  (void)ctx, (void)out;
  return PMOE_ERR_UNSUPPORTED;
}

bool bench_products_can(const bench_products *products, bench_way way) {
  (void)products, (void)way;
  return false;
}

int bench_products_grouped(const bench_products *products) {
  (void)products;
  return 0;
}

bench_way bench_products_best(const bench_products *products) {
  (void)products;
  return BENCH_ONE_BY_ONE;
}

pmoe_status bench_products_forward(void *arg) {
  (void)arg;
  return PMOE_ERR_UNSUPPORTED;
}

pmoe_status bench_products_backward(void *arg) {
  (void)arg;
  return PMOE_ERR_UNSUPPORTED;
}

void bench_products_destroy(bench_products *products) { (void)products; }
