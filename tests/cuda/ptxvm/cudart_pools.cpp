// cudart: memory pools, pitched allocations, and hints about managed memory.
#include "device_memory.h"
#include "ptx.h"
#include "runtime.h"
#include <map>

using namespace ptxvm;

namespace {

// A pool only groups allocations here: what is freed is never used again.
struct Pool {
  int device;
  bool is_default;
  std::map<cudaMemPoolAttr, uint64_t> attributes;
};

std::map<int, Pool *> &default_pools() {
  static auto *map = new std::map<int, Pool *>;
  return *map;
}
std::map<int, Pool *> &current_pools() {
  static auto *map = new std::map<int, Pool *>;
  return *map;
}
Pool *pool_of(cudaMemPool_t handle) { return reinterpret_cast<Pool *>(handle); }

cudaMemPool_t default_pool(int device) {
  Pool *&pool = default_pools()[device];
  if (!pool) pool = new Pool{device, true, {}};
  return reinterpret_cast<cudaMemPool_t>(pool);
}

bool is_64_bits(cudaMemPoolAttr attribute) {
  return attribute != cudaMemPoolReuseFollowEventDependencies && attribute != cudaMemPoolReuseAllowOpportunistic &&
         attribute != cudaMemPoolReuseAllowInternalDependencies;
}

cudaError_t check_managed(const void *pointer, size_t size) {
  const Allocation *a = device_memory().find(reinterpret_cast<uint64_t>(pointer));
  bool fits = a && !a->freed && reinterpret_cast<uint64_t>(pointer) + size <= a->base + a->size;
  return size && fits && a->kind == MemoryKind::Managed ? cudaSuccess : cudaErrorInvalidValue;
}

} // namespace

extern "C" {

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  PTXVM_ENTER(cudaDeviceGetDefaultMemPool, remember(cudaErrorUnknown));
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  *pool = default_pool(device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device) {
  PTXVM_ENTER(cudaDeviceGetMemPool, remember(cudaErrorUnknown));
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  auto it = current_pools().find(device);
  *pool = it == current_pools().end() ? default_pool(device) : reinterpret_cast<cudaMemPool_t>(it->second);
  return cudaSuccess;
}
cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool) {
  PTXVM_ENTER(cudaDeviceSetMemPool, remember(cudaErrorUnknown));
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  if (!pool) return remember(cudaErrorInvalidValue);
  current_pools()[device] = pool_of(pool);
  return cudaSuccess;
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const cudaMemPoolProps *properties) {
  PTXVM_ENTER(cudaMemPoolCreate, remember(cudaErrorMemoryAllocation));
  if (!pool || !properties || properties->location.type != cudaMemLocationTypeDevice)
    return remember(cudaErrorInvalidValue);
  if (properties->location.id < 0 || properties->location.id >= device_count()) return remember(cudaErrorInvalidValue);
  *pool = reinterpret_cast<cudaMemPool_t>(new Pool{properties->location.id, false, {}});
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  PTXVM_ENTER(cudaMemPoolDestroy, remember(cudaErrorUnknown));
  if (!pool || pool_of(pool)->is_default) return remember(cudaErrorInvalidValue);
  auto it = current_pools().find(pool_of(pool)->device);
  if (it != current_pools().end() && it->second == pool_of(pool)) current_pools().erase(it);
  delete pool_of(pool);
  return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t) {
  PTXVM_ENTER(cudaMemPoolTrimTo, remember(cudaErrorUnknown));
  return pool ? cudaSuccess : remember(cudaErrorInvalidValue);
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value) {
  PTXVM_ENTER(cudaMemPoolSetAttribute, remember(cudaErrorUnknown));
  if (!pool || !value) return remember(cudaErrorInvalidValue);
  uint64_t wide =
      is_64_bits(attribute) ? *static_cast<uint64_t *>(value) : static_cast<uint64_t>(*static_cast<int *>(value));
  pool_of(pool)->attributes[attribute] = wide;
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value) {
  PTXVM_ENTER(cudaMemPoolGetAttribute, remember(cudaErrorUnknown));
  if (!pool || !value) return remember(cudaErrorInvalidValue);
  auto it = pool_of(pool)->attributes.find(attribute);
  uint64_t wide = it != pool_of(pool)->attributes.end() ? it->second : is_64_bits(attribute) ? 0 : 1;
  if (is_64_bits(attribute)) *static_cast<uint64_t *>(value) = wide;
  else *static_cast<int *>(value) = static_cast<int>(wide);
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc *, size_t) {
  PTXVM_ENTER(cudaMemPoolSetAccess, remember(cudaErrorUnknown)); // every device reaches all memory here
  return pool ? cudaSuccess : remember(cudaErrorInvalidValue);
}

cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height) {
  if (!pointer || !pitch) return remember(cudaErrorInvalidValue);
  *pitch = align_up(width, 512);
  return cudaMalloc(pointer, *pitch * height);
}
cudaError_t cudaMalloc3D(cudaPitchedPtr *to, cudaExtent e) {
  if (!to) return remember(cudaErrorInvalidValue);
  *to = {nullptr, align_up(e.width, 512), e.width, e.height};
  return cudaMalloc(&to->ptr, to->pitch * e.height * e.depth);
}

// Hints. Prefetching takes its place in the stream, and has nothing to do there.
cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t size, cudaMemLocation, unsigned, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemPrefetchAsync, remember(cudaErrorUnknown));
  if (cudaError_t error = check_managed(pointer, size)) return remember(error);
  return remember(enqueue(stream, "cudaMemPrefetchAsync", [] {}));
}
cudaError_t cudaMemAdvise(const void *pointer, size_t size, cudaMemoryAdvise, cudaMemLocation) {
  PTXVM_ENTER(cudaMemAdvise, remember(cudaErrorUnknown));
  return remember(check_managed(pointer, size));
}

} // extern "C"
