// cudart: allocation.
#include "device_memory.h"
#include "report.h"
#include "runtime.h"
#include <cstdlib>
#include <cstring>
#include <unordered_map>

using namespace ptxvm;

namespace {

cudaError_t synchronize_before(const char *name) { // cudaFree and the like wait for all work
  if (cudaError_t error = refuse_under_capture(name)) return error;
  return cudaDeviceSynchronize();
}

// The address is known at once, the memory is there when the stream has come to it.
cudaError_t allocate_in_stream(void **pointer, size_t size, cudaStream_t stream) {
  *pointer = nullptr;
  if (!is_known_stream(stream)) return cudaErrorInvalidResourceHandle;
  if (is_capturing(stream)) return refuse_in_capture(stream);
  if (!size) return cudaSuccess;
  uint64_t base = device_memory().allocate(size, "", current_device());
  if (!base) return cudaErrorMemoryAllocation;
  device_memory().set_pending(base, true);
  *pointer = reinterpret_cast<void *>(base);
  return enqueue(stream, "cudaMallocAsync", [=] {
    device_memory().set_pending(base, false);
    device_write(reinterpret_cast<void *>(base), size, "cudaMallocAsync"); // must come before every use
  });
}

} // namespace

extern "C" {

cudaError_t cudaMalloc(void **pointer, size_t size) {
  PTXVM_ENTER(cudaMalloc, remember(cudaErrorMemoryAllocation));
  if (cudaError_t error = refuse_under_capture("cudaMalloc")) return remember(error);
  *pointer = nullptr;
  if (!size) return cudaSuccess;
  *pointer = reinterpret_cast<void *>(device_memory().allocate(size, "", current_device()));
  return *pointer ? cudaSuccess : remember(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *pointer) {
  PTXVM_ENTER(cudaFree, remember(cudaErrorUnknown));
  if (!pointer) return cudaSuccess;
  if (cudaError_t error = synchronize_before("cudaFree")) return remember(error);
  const Allocation *a = device_memory().find(reinterpret_cast<uint64_t>(pointer));
  if (a && a->kind == MemoryKind::Managed && device_memory().release_host(pointer)) return cudaSuccess;
  return device_memory().release(reinterpret_cast<uint64_t>(pointer)) ? cudaSuccess : remember(cudaErrorInvalidValue);
}
cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) {
  PTXVM_ENTER(cudaMallocAsync, remember(cudaErrorMemoryAllocation));
  return remember(allocate_in_stream(pointer, size, stream));
}
cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t size, cudaMemPool_t pool, cudaStream_t stream) {
  PTXVM_ENTER(cudaMallocAsync, remember(cudaErrorMemoryAllocation));
  if (!pool) return remember(cudaErrorInvalidValue);
  return remember(allocate_in_stream(pointer, size, stream));
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
  PTXVM_ENTER(cudaFreeAsync, remember(cudaErrorUnknown));
  if (!pointer) return cudaSuccess;
  if (is_capturing(stream)) return remember(refuse_in_capture(stream));
  const Allocation *a = device_memory().find(reinterpret_cast<uint64_t>(pointer));
  if (!a || a->freed || a->base != reinterpret_cast<uint64_t>(pointer)) return remember(cudaErrorInvalidValue);
  return remember(enqueue(stream, "cudaFreeAsync", [pointer, base = a->base, size = a->size] {
    device_write(pointer, size, "cudaFreeAsync"); // must come after every use
    device_memory().release(base);
  }));
}

static cudaError_t allocate_host(void **pointer, size_t size, MemoryKind kind, const char *name) {
  if (cudaError_t error = refuse_under_capture(name)) return error;
  *pointer =
      device_memory().allocate_host(size, kind, kind == MemoryKind::Managed ? "managed memory" : "pinned host memory");
  if (!*pointer) return cudaErrorMemoryAllocation;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void **pointer, size_t size) {
  PTXVM_ENTER(cudaMallocHost, remember(cudaErrorMemoryAllocation));
  return remember(allocate_host(pointer, size, MemoryKind::PinnedHost, "cudaMallocHost"));
}
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned) {
  PTXVM_ENTER(cudaHostAlloc, remember(cudaErrorMemoryAllocation));
  return remember(allocate_host(pointer, size, MemoryKind::PinnedHost, "cudaHostAlloc"));
}
cudaError_t cudaMallocManaged(void **pointer, size_t size, unsigned) {
  PTXVM_ENTER(cudaMallocManaged, remember(cudaErrorMemoryAllocation));
  return remember(allocate_host(pointer, size, MemoryKind::Managed, "cudaMallocManaged"));
}
cudaError_t cudaFreeHost(void *pointer) {
  PTXVM_ENTER(cudaFreeHost, remember(cudaErrorUnknown));
  if (!pointer) return cudaSuccess;
  if (cudaError_t error = synchronize_before("cudaFreeHost")) return remember(error);
  const Allocation *a = device_memory().find(reinterpret_cast<uint64_t>(pointer));
  bool pinned = a && a->kind == MemoryKind::PinnedHost;
  return pinned && device_memory().release_host(pointer) ? cudaSuccess : remember(cudaErrorInvalidValue);
}
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned) {
  PTXVM_ENTER(cudaHostRegister, remember(cudaErrorMemoryAllocation));
  if (device_memory().find(reinterpret_cast<uint64_t>(pointer))) return remember(cudaErrorHostMemoryAlreadyRegistered);
  device_memory().add_host(pointer, size, MemoryKind::PinnedHost, "registered host memory");
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *pointer) {
  PTXVM_ENTER(cudaHostUnregister, remember(cudaErrorUnknown));
  if (cudaError_t error = synchronize_before("cudaHostUnregister")) return remember(error);
  return device_memory().remove_host(pointer) ? cudaSuccess : remember(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetFlags(unsigned *flags, void *host) {
  PTXVM_ENTER(cudaHostGetFlags, remember(cudaErrorUnknown));
  if (!is_pinned_or_device(host)) return remember(cudaErrorInvalidValue);
  *flags = cudaHostAllocMapped;
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
  PTXVM_ENTER(cudaHostGetDevicePointer, remember(cudaErrorUnknown));
  if (!is_pinned_or_device(host)) return remember(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  PTXVM_ENTER(cudaMemGetInfo, remember(cudaErrorUnknown));
  *total = DeviceMemory::total_bytes();
  *free_bytes = *total - device_memory().bytes_in_use();
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
  PTXVM_ENTER(cudaPointerGetAttributes, remember(cudaErrorUnknown));
  *attributes = cudaPointerAttributes();
  const Allocation *a = device_memory().find(reinterpret_cast<uint64_t>(pointer));
  attributes->device = a ? a->device : -2;
  if (!a || a->freed) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->hostPointer = const_cast<void *>(pointer);
    return cudaSuccess;
  }
  attributes->type = a->kind == MemoryKind::Device    ? cudaMemoryTypeDevice
                     : a->kind == MemoryKind::Managed ? cudaMemoryTypeManaged
                                                      : cudaMemoryTypeHost;
  attributes->devicePointer = const_cast<void *>(pointer);
  attributes->hostPointer = a->kind == MemoryKind::Device ? nullptr : const_cast<void *>(pointer);
  return cudaSuccess;
}

} // extern "C"
