/* What the CUDA files of pmoe-bench share. */
#ifndef BENCH_DEVICE_CUDA_H
#define BENCH_DEVICE_CUDA_H
#include <cuda_runtime_api.h>

#include "device.h"

/* PMOE_OK, or prints the call and CUDA's own words. */
pmoe_status bench_cuda_status(cudaError_t error, const char *call);
#define BENCH_CUDA_TRY(call)                                                                                           \
  do {                                                                                                                 \
    pmoe_status bench_cuda_ = bench_cuda_status((call), #call);                                                        \
    if (bench_cuda_ < 0) return bench_cuda_;                                                                           \
  } while (0)

static inline cudaStream_t bench_cuda_stream(const bench_device *device) { return (cudaStream_t)device->stream; }

pmoe_status bench_cuda_products(bench_device *device, const bench_floor_shape *shape, bench_products **out);

#endif
