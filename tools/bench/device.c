#include "device.h"

void bench_device_sees(bench_device *device, double bytes) {
  device->flush = bytes < 4.0 * (double)device->cache_bytes;
}

pmoe_status bench_move_run(void *arg) {
  const bench_move *m = arg;
  return m->device->move(m->device, m->to, m->from, m->bytes);
}
