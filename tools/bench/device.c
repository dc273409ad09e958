#include "device.h"

#include <stdlib.h>

void bench_device_sees(bench_device *device, double bytes) {
  device->flush = bytes < 4.0 * (double)device->cache_bytes;
}

pmoe_status bench_device_scatter(bench_device *device, void *p, size_t bytes) {
  enum { CHUNK = 1048573 }; /* odd, so that copies of it do not line up */
  unsigned char *chunk;
  BENCH_TRY(bench_alloc(CHUNK, &chunk));
  uint32_t state = 1;
  for (int i = 0; i < CHUNK; i++) {
    state = state * 1664525u + 1013904223u;
    chunk[i] = (unsigned char)(state >> 24);
  }
  size_t filled = bytes < CHUNK ? bytes : CHUNK;
  pmoe_status status = device->copy(device, p, chunk, filled);
  free(chunk);
  while (status == PMOE_OK && filled < bytes) {
    size_t more = bytes - filled < filled ? bytes - filled : filled;
    status = device->move(device, (char *)p + filled, p, more);
    filled += more;
  }
  return status == PMOE_OK ? device->wait(device) : status;
}

pmoe_status bench_move_run(void *arg) {
  const bench_move *m = arg;
  return m->device->move(m->device, m->to, m->from, m->bytes);
}
