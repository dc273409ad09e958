#include <cuda_runtime.h>

#include "core/cuda.h"

__global__ static void store_kernel(pmoei_pointers pointers, const void **to) {
  to[threadIdx.x] = pointers.at[threadIdx.x];
}

pmoe_status pmoei_cuda_store_pointers(pmoe_ctx *ctx, const pmoei_pointers *pointers, void *to) {
  store_kernel<<<1, PMOEI_MAX_POINTERS, 0, pmoei_cuda_stream(ctx)>>>(*pointers, static_cast<const void **>(to));
  return pmoei_cuda_launched("store of pointers");
}
