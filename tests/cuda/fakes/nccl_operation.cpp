#include "nccl_operation.h"
#include "../ptxvm/report.h"
#include "half.h"

namespace ptxvm {

size_t size_of(ncclDataType_t type) {
  switch (type) {
  case ncclInt8:
  case ncclUint8:
  case ncclFloat8e4m3:
  case ncclFloat8e5m2: return 1;
  case ncclFloat16:
  case ncclBfloat16: return 2;
  case ncclInt32:
  case ncclUint32:
  case ncclFloat32: return 4;
  default: return 8;
  }
}

std::string describe(const Call &call) {
  static const char *names[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter",
                                "ncclAlltoAll",  "ncclGather", "ncclScatter",   "ncclSend",      "ncclRecv"};
  std::string text = names[static_cast<int>(call.kind)] + std::string(" of ") + std::to_string(call.count) +
                     " elements of type " + std::to_string(call.type);
  if (call.kind == Kind::AllReduce || call.kind == Kind::Reduce || call.kind == Kind::ReduceScatter)
    text += ", operation " + std::to_string(call.op);
  if (call.kind == Kind::Reduce || call.kind == Kind::Broadcast || call.kind == Kind::Gather ||
      call.kind == Kind::Scatter)
    text += ", root " + std::to_string(call.root);
  return text;
}

void report_mismatch(const Call &a, int rank_a, const Call &b, int rank_b) {
  stop("NCCL ranks disagree: rank %d calls %s, rank %d calls %s", rank_a, describe(a).c_str(), rank_b,
       describe(b).c_str());
}

Part part_of(const Call &call, int from, int to) {
  size_t bytes = call.count * size_of(call.type);
  switch (call.kind) {
  case Kind::AllReduce:
  case Kind::AllGather: return {0, bytes};
  case Kind::Reduce:
  case Kind::Gather: return {0, to == call.root ? bytes : 0};
  case Kind::Broadcast: return {0, from == call.root ? bytes : 0};
  case Kind::Scatter: return {static_cast<size_t>(to) * bytes, from == call.root ? bytes : 0};
  default: return {static_cast<size_t>(to) * bytes, bytes}; // ReduceScatter, AlltoAll
  }
}

size_t send_bytes(const Call &call, int rank, int size) {
  size_t end = 0;
  for (int to = 0; to < size; to++) {
    Part part = part_of(call, rank, to);
    if (part.bytes) end = std::max(end, part.offset + part.bytes);
  }
  return end;
}

size_t recv_bytes(const Call &call, int rank, int size) {
  size_t bytes = call.count * size_of(call.type);
  switch (call.kind) {
  case Kind::AllGather:
  case Kind::AlltoAll: return bytes * static_cast<size_t>(size);
  case Kind::Gather: return rank == call.root ? bytes * static_cast<size_t>(size) : 0;
  case Kind::Reduce: return rank == call.root ? bytes : 0;
  default: return bytes;
  }
}

namespace {

template <class T> T load(const void *p, size_t k) { return static_cast<const T *>(p)[k]; }

// Reductions go through the ranks in order, in T; halves in float with one rounding at the end.
template <class Element, class T, class Load, class Store>
void reduce(void *out, const std::vector<const void *> &parts, size_t count, ncclRedOp_t op, Load read, Store write) {
  for (size_t k = 0; k < count; k++) {
    T value = read(parts[0], k);
    for (size_t r = 1; r < parts.size(); r++) {
      T next = read(parts[r], k);
      switch (op) {
      case ncclProd: value = static_cast<T>(value * next); break;
      case ncclMax: value = value > next ? value : next; break;
      case ncclMin: value = value < next ? value : next; break;
      default: value = static_cast<T>(value + next);
      }
    }
    if (op == ncclAvg) value = static_cast<T>(value / static_cast<T>(parts.size()));
    static_cast<Element *>(out)[k] = write(value);
  }
}
template <class T> void reduce_plain(void *out, const std::vector<const void *> &parts, size_t count, ncclRedOp_t op) {
  reduce<T, T>(out, parts, count, op, load<T>, [](T v) { return v; });
}

void reduce_parts(void *out, const std::vector<const void *> &parts, const Call &call) {
  auto half = [](const void *p, size_t k) { return half_value(load<uint16_t>(p, k)); };
  auto brain = [](const void *p, size_t k) { return brain_value(load<uint16_t>(p, k)); };
  switch (call.type) {
  case ncclInt8: return reduce_plain<int8_t>(out, parts, call.count, call.op);
  case ncclUint8: return reduce_plain<uint8_t>(out, parts, call.count, call.op);
  case ncclInt32: return reduce_plain<int32_t>(out, parts, call.count, call.op);
  case ncclUint32: return reduce_plain<uint32_t>(out, parts, call.count, call.op);
  case ncclInt64: return reduce_plain<int64_t>(out, parts, call.count, call.op);
  case ncclUint64: return reduce_plain<uint64_t>(out, parts, call.count, call.op);
  case ncclFloat32: return reduce_plain<float>(out, parts, call.count, call.op);
  case ncclFloat64: return reduce_plain<double>(out, parts, call.count, call.op);
  case ncclFloat16: return reduce<uint16_t, float>(out, parts, call.count, call.op, half, half_bits);
  case ncclBfloat16: return reduce<uint16_t, float>(out, parts, call.count, call.op, brain, brain_bits);
  default: stop("the fake NCCL does not reduce 8-bit floats");
  }
}

} // namespace

void combine(const Operation &operation, int rank, int size, const std::function<const void *(int from)> &part) {
  const Call &call = operation.call;
  size_t bytes = recv_bytes(call, rank, size);
  if (!bytes) return;
  // In place, parts of the receive buffer are still sources: build the result beside it.
  std::vector<char> result(bytes);
  if (call.kind == Kind::AllReduce || call.kind == Kind::Reduce || call.kind == Kind::ReduceScatter) {
    std::vector<const void *> parts;
    for (int from = 0; from < size; from++) parts.push_back(part(from));
    reduce_parts(result.data(), parts, call);
  } else if (call.kind == Kind::Broadcast || call.kind == Kind::Scatter) {
    memcpy(result.data(), part(call.root), bytes);
  } else {
    size_t each = bytes / static_cast<size_t>(size);
    for (int from = 0; from < size; from++) memcpy(result.data() + static_cast<size_t>(from) * each, part(from), each);
  }
  AsTask as(operation);
  memcpy(device_write(operation.recv, bytes, describe(call).c_str()), result.data(), bytes);
}

} // namespace ptxvm
