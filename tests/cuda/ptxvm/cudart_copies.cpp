// cudart: copies and fills, in one, two and three dimensions, and between symbols and memory.
#include "device_memory.h"
#include "launch.h"
#include "report.h"
#include <cstring>
#include <unordered_map>

using namespace ptxvm;

namespace {

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

// Rows of bytes: where they begin, and how far apart rows and slices lie.
struct Region {
  char *base;
  size_t pitch, slice;
  char *row(size_t y, size_t z) const { return base + z * slice + y * pitch; }
};
struct Extent {
  size_t width, height, depth;
  bool empty() const { return !width || !height || !depth; }
};
template <class F> void each_row(const Extent &e, F f) {
  for (size_t z = 0; z < e.depth; z++)
    for (size_t y = 0; y < e.height; y++) f(y, z);
}

// CUDA promises nothing where source and destination overlap.
void refuse_overlap(const char *who, const Region &to, const Region &from, const Extent &e) {
  const char *to_end = to.row(e.height - 1, e.depth - 1) + e.width,
             *from_end = from.row(e.height - 1, e.depth - 1) + e.width;
  if (to_end <= from.base || from_end <= to.base) return;
  each_row(e, [&](size_t y, size_t z) {
    each_row({1, e.height, e.depth}, [&](size_t v, size_t w) {
      const char *a = to.row(y, z), *b = from.row(v, w);
      if (a < b + e.width && b < a + e.width)
        stop("%s: source and destination overlap: %p and %p, %zu bytes", who, static_cast<const void *>(b),
             static_cast<const void *>(a), e.width);
    });
  });
}

// Pageable memory is the host's own; everything else is known to the race detector.
void copy_row(void *to, const void *from, size_t size, const char *who) {
  const void *source = is_pinned_or_device(from) ? device_read(from, size, who) : from;
  memmove(is_pinned_or_device(to) ? device_write(to, size, who) : to, source, size);
}
void copy_rows(const Region &to, const Region &from, const Extent &e, const char *who) {
  each_row(e, [&](size_t y, size_t z) { copy_row(to.row(y, z), from.row(y, z), e.width, who); });
}

cudaError_t check_copy(const char *who, const Region &to, const Region &from, const Extent &e, cudaMemcpyKind kind) {
  if (!direction_fits(to.base, from.base, kind)) return cudaErrorInvalidMemcpyDirection;
  // Faults are reported where they are made.
  each_row(e, [&](size_t y, size_t z) { view(to.row(y, z), e.width, who), view(from.row(y, z), e.width, who); });
  refuse_overlap(who, to, from, e);
  return cudaSuccess;
}

cudaError_t copy_async(const char *who, Region to, Region from, Extent e, cudaMemcpyKind kind, cudaStream_t stream) {
  if (e.empty()) return cudaSuccess;
  if (cudaError_t error = check_copy(who, to, from, e, kind)) return error;
  bool pageable_from = !is_pinned_or_device(from.base), pageable_to = !is_pinned_or_device(to.base);
  // Captured, a copy reads and writes whatever memory it was given when the graph runs.
  if (is_capturing(stream)) pageable_from = pageable_to = false;
  if (pageable_from) { // staged at once: the caller may change the buffer when the call returns
    auto staged = std::make_shared<std::vector<char>>(e.width * e.height * e.depth);
    Region rows{staged->data(), e.width, e.width * e.height};
    each_row(e, [&](size_t y, size_t z) { memcpy(rows.row(y, z), from.row(y, z), e.width); });
    from = rows;
    cudaError_t error = enqueue(stream, who, [=, keep = staged] { copy_rows(to, from, e, who); });
    return error || !pageable_to ? error : wait_for_stream(stream);
  }
  cudaError_t error = enqueue(stream, who, [=] { copy_rows(to, from, e, who); });
  // A copy to pageable memory returns when it is complete; one to pinned memory comes late.
  return error || !pageable_to ? error : wait_for_stream(stream);
}
cudaError_t copy_async(const char *who, void *to, const void *from, size_t size, cudaMemcpyKind kind,
                       cudaStream_t stream) {
  char *source = const_cast<char *>(static_cast<const char *>(from));
  return copy_async(who, {static_cast<char *>(to), size, size}, {source, size, size}, {size, 1, 1}, kind, stream);
}
cudaError_t wait_unless(cudaError_t error) { return error ? error : wait_for_stream(nullptr); }

cudaError_t fill_async(const char *who, Region to, int value, Extent e, cudaStream_t stream) {
  if (e.empty()) return cudaSuccess;
  if (!is_pinned_or_device(to.base)) return cudaErrorInvalidValue;
  each_row(e, [&](size_t y, size_t z) { view(to.row(y, z), e.width, who); });
  return enqueue(stream, who, [=] {
    each_row(e, [&](size_t y, size_t z) { memset(device_write(to.row(y, z), e.width, who), value, e.width); });
  });
}
Region region_of(const cudaPitchedPtr &p, const cudaPos &at) {
  char *base = static_cast<char *>(p.ptr) + (at.z * p.ysize + at.y) * p.pitch + at.x;
  return {base, p.pitch, p.pitch * p.ysize};
}
cudaError_t copy_3d(const char *who, const cudaMemcpy3DParms &p, cudaStream_t stream) {
  if (p.srcArray || p.dstArray) stop("%s: arrays are not supported", who);
  Extent e{p.extent.width, p.extent.height, p.extent.depth};
  if (p.srcPtr.pitch < p.srcPos.x + e.width || p.dstPtr.pitch < p.dstPos.x + e.width) return cudaErrorInvalidPitchValue;
  return copy_async(who, region_of(p.dstPtr, p.dstPos), region_of(p.srcPtr, p.srcPos), e, p.kind, stream);
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

cudaError_t prepare_copy(void *to, const void *from, size_t size, cudaMemcpyKind kind, Work *work) {
  static const char *who = "a memcpy node";
  char *source = const_cast<char *>(static_cast<const char *>(from));
  Region a{static_cast<char *>(to), size, size}, b{source, size, size};
  if (cudaError_t error = check_copy(who, a, b, {size, 1, 1}, kind)) return error;
  *work = [=] { copy_rows(a, b, {size, 1, 1}, who); };
  return cudaSuccess;
}
cudaError_t prepare_copy(const cudaMemcpy3DParms &p, Work *work) {
  static const char *who = "a memcpy node";
  if (p.srcArray || p.dstArray) stop("%s: arrays are not supported", who);
  Region to = region_of(p.dstPtr, p.dstPos), from = region_of(p.srcPtr, p.srcPos);
  Extent e{p.extent.width, p.extent.height, p.extent.depth};
  if (e.empty()) return cudaErrorInvalidValue;
  if (cudaError_t error = check_copy(who, to, from, e, p.kind)) return error;
  *work = [=] { copy_rows(to, from, e, who); };
  return cudaSuccess;
}
cudaError_t prepare_fill(const cudaMemsetParams &p, Work *work) {
  static const char *who = "a memset node";
  if (p.elementSize != 1 && p.elementSize != 2 && p.elementSize != 4) return cudaErrorInvalidValue;
  if (!is_pinned_or_device(p.dst)) return cudaErrorInvalidValue;
  const size_t bytes = p.width * p.elementSize;
  each_row({1, p.height, 1}, [&](size_t y, size_t) { view(static_cast<char *>(p.dst) + y * p.pitch, bytes, who); });
  *work = [=] {
    for (size_t y = 0; y < p.height; y++) {
      char *row = static_cast<char *>(device_write(static_cast<char *>(p.dst) + y * p.pitch, bytes, who));
      for (size_t x = 0; x < bytes; x += p.elementSize) memcpy(row + x, &p.value, p.elementSize);
    }
  };
  return cudaSuccess;
}
} // namespace ptxvm

extern "C" {

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemcpyAsync, remember(cudaErrorUnknown));
  return remember(copy_async("cudaMemcpyAsync", to, from, size, kind, stream));
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
  PTXVM_ENTER(cudaMemcpy, remember(cudaErrorUnknown));
  return remember(wait_unless(copy_async("cudaMemcpy", to, from, size, kind, nullptr)));
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemcpyPeerAsync, remember(cudaErrorUnknown));
  return remember(copy_async("cudaMemcpyPeerAsync", to, from, size, cudaMemcpyDeviceToDevice, stream));
}
cudaError_t cudaMemcpyPeer(void *to, int, const void *from, int, size_t size) {
  PTXVM_ENTER(cudaMemcpyPeer, remember(cudaErrorUnknown));
  return remember(wait_unless(copy_async("cudaMemcpyPeer", to, from, size, cudaMemcpyDeviceToDevice, nullptr)));
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemcpy2DAsync, remember(cudaErrorUnknown));
  if (width > to_pitch || width > from_pitch) return remember(cudaErrorInvalidPitchValue);
  char *source = const_cast<char *>(static_cast<const char *>(from));
  return remember(copy_async("cudaMemcpy2DAsync", {static_cast<char *>(to), to_pitch, to_pitch * height},
                             {source, from_pitch, from_pitch * height}, {width, height, 1}, kind, stream));
}
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
  return error ? error : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms *p, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemcpy3DAsync, remember(cudaErrorUnknown));
  return remember(p ? copy_3d("cudaMemcpy3DAsync", *p, stream) : cudaErrorInvalidValue);
}
cudaError_t cudaMemcpy3D(const cudaMemcpy3DParms *p) {
  PTXVM_ENTER(cudaMemcpy3D, remember(cudaErrorUnknown));
  return remember(p ? wait_unless(copy_3d("cudaMemcpy3D", *p, nullptr)) : cudaErrorInvalidValue);
}

// A fill with cudaMemset is asynchronous to the host as well.
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemsetAsync, remember(cudaErrorUnknown));
  return remember(
      fill_async("cudaMemsetAsync", {static_cast<char *>(pointer), size, size}, value, {size, 1, 1}, stream));
}
cudaError_t cudaMemset(void *pointer, int value, size_t size) { return cudaMemsetAsync(pointer, value, size, nullptr); }
cudaError_t cudaMemset2DAsync(void *pointer, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
  PTXVM_ENTER(cudaMemset2DAsync, remember(cudaErrorUnknown));
  if (width > pitch) return remember(cudaErrorInvalidPitchValue);
  return remember(fill_async("cudaMemset2DAsync", {static_cast<char *>(pointer), pitch, pitch * height}, value,
                             {width, height, 1}, stream));
}
cudaError_t cudaMemset2D(void *pointer, size_t pitch, int value, size_t width, size_t height) {
  return cudaMemset2DAsync(pointer, pitch, value, width, height, nullptr);
}
cudaError_t cudaMemset3DAsync(cudaPitchedPtr to, int value, cudaExtent e, cudaStream_t stream) {
  PTXVM_ENTER(cudaMemset3DAsync, remember(cudaErrorUnknown));
  if (e.width > to.pitch) return remember(cudaErrorInvalidPitchValue);
  return remember(
      fill_async("cudaMemset3DAsync", region_of(to, cudaPos()), value, {e.width, e.height, e.depth}, stream));
}
cudaError_t cudaMemset3D(cudaPitchedPtr to, int value, cudaExtent e) {
  return cudaMemset3DAsync(to, value, e, nullptr);
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

} // extern "C"
