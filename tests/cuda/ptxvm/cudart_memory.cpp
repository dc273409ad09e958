// cudart: allocation and copies.
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

bool is_device(const void *pointer) {
  const Allocation *a = device_memory().find(reinterpret_cast<uint64_t>(pointer));
  return a ? a->kind != MemoryKind::PinnedHost : device_memory().in_arena(reinterpret_cast<uint64_t>(pointer));
}

bool direction_fits(const void *to, const void *from, cudaMemcpyKind kind) {
  auto plain_host = [](const void *p) {
    return !is_pinned_or_device(p) && !device_memory().in_arena(reinterpret_cast<uint64_t>(p));
  };
  switch (kind) {
  case cudaMemcpyHostToHost: return !is_device(to) && !is_device(from);
  case cudaMemcpyHostToDevice: return !plain_host(to) && !is_device(from);
  case cudaMemcpyDeviceToHost: return !is_device(to) && !plain_host(from);
  case cudaMemcpyDeviceToDevice: return !plain_host(to) && !plain_host(from);
  default: return true;
  }
}

// Pageable memory is the host's own; everything else is known to the race detector.
void copy(void *to, const void *from, size_t size, const char *who) {
  const void *source = is_pinned_or_device(from) ? device_read(from, size, who) : from;
  memmove(is_pinned_or_device(to) ? device_write(to, size, who) : to, source, size);
}

cudaError_t copy_async(const char *who, void *to, const void *from, size_t size, cudaMemcpyKind kind,
                       cudaStream_t stream) {
  if (!size) return cudaSuccess;
  if (!direction_fits(to, from, kind)) return cudaErrorInvalidMemcpyDirection;
  view(to, size, who), view(from, size, who); // faults are reported where they are made
  bool pageable_from = !is_pinned_or_device(from), pageable_to = !is_pinned_or_device(to);
  if (is_capturing(stream) && (pageable_from || pageable_to)) return refuse_in_capture(stream);
  if (pageable_from) { // staged at once: the caller may change the buffer when the call returns
    auto staged =
        std::make_shared<std::vector<char>>(static_cast<const char *>(from), static_cast<const char *>(from) + size);
    cudaError_t error = enqueue(stream, who, [=] { copy(to, staged->data(), size, who); });
    return error || !pageable_to ? error : wait_for_stream(stream);
  }
  cudaError_t error = enqueue(stream, who, [=] { copy(to, from, size, who); });
  // A copy to pageable memory returns when it is complete; one to pinned memory comes late.
  return error || !pageable_to ? error : wait_for_stream(stream);
}

cudaError_t copy_now(const char *who, void *to, const void *from, size_t size, cudaMemcpyKind kind) {
  cudaError_t error = copy_async(who, to, from, size, kind, nullptr);
  return error ? error : wait_for_stream(nullptr);
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

std::unordered_map<const void *, std::pair<uint64_t, size_t>> &symbols() {
  static auto *map = new std::unordered_map<const void *, std::pair<uint64_t, size_t>>;
  return *map;
}

void *symbol_address(const void *symbol, size_t offset, size_t count, cudaError_t *error) {
  auto it = symbols().find(symbol);
  *error = it == symbols().end()                ? cudaErrorInvalidSymbol
           : offset + count > it->second.second ? cudaErrorInvalidValue
                                                : cudaSuccess;
  return *error ? nullptr : reinterpret_cast<void *>(it->second.first + offset);
}

} // namespace

namespace ptxvm {
void register_symbol(const void *host, uint64_t address, size_t size) { symbols()[host] = {address, size}; }
} // namespace ptxvm

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
  if (a && a->kind == MemoryKind::Managed && device_memory().remove_host(pointer)) return free(pointer), cudaSuccess;
  return device_memory().release(reinterpret_cast<uint64_t>(pointer)) ? cudaSuccess : remember(cudaErrorInvalidValue);
}
cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) {
  PTXVM_ENTER(cudaMallocAsync, remember(cudaErrorMemoryAllocation));
  return remember(allocate_in_stream(pointer, size, stream));
}
cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t size, cudaMemPool_t, cudaStream_t stream) {
  PTXVM_ENTER(cudaMallocAsync, remember(cudaErrorMemoryAllocation));
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
  *pointer = aligned_alloc(4096, (size + 8191) / 4096 * 4096);
  if (!*pointer) return cudaErrorMemoryAllocation;
  memset(*pointer, 0xff, size);
  device_memory().add_host(*pointer, size, kind, kind == MemoryKind::Managed ? "managed memory" : "pinned host memory");
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
  if (!device_memory().remove_host(pointer)) return remember(cudaErrorInvalidValue);
  free(pointer);
  return cudaSuccess;
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
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
  PTXVM_ENTER(cudaHostGetDevicePointer, remember(cudaErrorUnknown));
  if (!is_pinned_or_device(host)) return remember(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
  PTXVM_ENTER(cudaMemcpy, remember(cudaErrorUnknown));
  return remember(copy_now("cudaMemcpy", to, from, size, kind));
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemcpyAsync, remember(cudaErrorUnknown));
  return remember(copy_async("cudaMemcpyAsync", to, from, size, kind, stream));
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemcpyPeerAsync, remember(cudaErrorUnknown));
  return remember(copy_async("cudaMemcpyPeerAsync", to, from, size, cudaMemcpyDeviceToDevice, stream));
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemcpy2DAsync, remember(cudaErrorUnknown));
  if (width > to_pitch || width > from_pitch) return remember(cudaErrorInvalidPitchValue);
  for (size_t row = 0; row < height; row++) {
    cudaError_t error = copy_async("cudaMemcpy2DAsync", static_cast<char *>(to) + row * to_pitch,
                                   static_cast<const char *>(from) + row * from_pitch, width, kind, stream);
    if (error) return remember(error);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
  return error ? error : cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemsetAsync, remember(cudaErrorUnknown));
  if (!size) return cudaSuccess;
  if (!is_pinned_or_device(pointer)) return remember(cudaErrorInvalidValue);
  view(pointer, size, "cudaMemset");
  return remember(
      enqueue(stream, "cudaMemsetAsync", [=] { memset(device_write(pointer, size, "cudaMemsetAsync"), value, size); }));
}
cudaError_t cudaMemset(void *pointer, int value, size_t size) { return cudaMemsetAsync(pointer, value, size, nullptr); }
cudaError_t cudaMemset2DAsync(void *pointer, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    if (cudaError_t error = cudaMemsetAsync(static_cast<char *>(pointer) + row * pitch, value, width, stream))
      return error;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
  PTXVM_ENTER(cudaGetSymbolAddress, remember(cudaErrorUnknown));
  cudaError_t error;
  *pointer = symbol_address(symbol, 0, 0, &error);
  return remember(error);
}
cudaError_t cudaGetSymbolSize(size_t *size, const void *symbol) {
  PTXVM_ENTER(cudaGetSymbolSize, remember(cudaErrorUnknown));
  auto it = symbols().find(symbol);
  if (it == symbols().end()) return remember(cudaErrorInvalidSymbol);
  *size = it->second.second;
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t count, size_t offset,
                                    cudaMemcpyKind kind, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemcpyToSymbolAsync, remember(cudaErrorUnknown));
  cudaError_t error;
  void *to = symbol_address(symbol, offset, count, &error);
  return remember(error ? error : copy_async("cudaMemcpyToSymbol", to, from, count, kind, stream));
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t count, size_t offset, cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpyToSymbolAsync(symbol, from, count, offset, kind, nullptr);
  return error ? error : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t count, size_t offset, cudaMemcpyKind kind,
                                      cudaStream_t stream) {
  PTXVM_ENTER(cudaMemcpyFromSymbolAsync, remember(cudaErrorUnknown));
  cudaError_t error;
  void *from = symbol_address(symbol, offset, count, &error);
  return remember(error ? error : copy_async("cudaMemcpyFromSymbol", to, from, count, kind, stream));
}
cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t count, size_t offset, cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpyFromSymbolAsync(to, symbol, count, offset, kind, nullptr);
  return error ? error : cudaStreamSynchronize(nullptr);
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
