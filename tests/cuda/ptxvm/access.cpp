#include "access.h"
#include "races.h"
#include "statistics.h"
#include <cinttypes>

namespace ptxvm {

static const char *verb(AccessKind kind) {
  return kind == AccessKind::Read ? "read" : kind == AccessKind::Write ? "write" : "atomic";
}

void misaligned(Context &c, const Instruction &i, int lane, uint64_t address, int bytes) {
  fault(c, i, lane, "misaligned access of %d bytes at 0x%" PRIx64, bytes, address);
}

void uninitialised(Context &c, const Instruction &i, int lane, uint64_t offset, int bytes) {
  fault(c, i, lane, "read of uninitialised shared memory, %d bytes at offset %" PRIu64, bytes, offset);
}

static Place locate_local(Context &c, const Instruction &i, int lane, uint64_t offset, int bytes, AccessKind kind) {
  const Frame &frame = *c.group->frame;
  if (offset + static_cast<uint64_t>(bytes) > frame.local_base + frame.code->local_size)
    fault(c, i, lane, "out-of-bounds local %s of %d bytes at offset %" PRIu64 ", the frame ends at %u", verb(kind),
          bytes, offset, frame.local_base + frame.code->local_size);
  return {c.warp->local_bytes(lane, offset), Space::Local, offset};
}

static Place locate_param(Context &c, const Instruction &i, int lane, uint64_t offset, int bytes, AccessKind kind) {
  if (offset + static_cast<uint64_t>(bytes) > c.launch->params.size() || kind != AccessKind::Read)
    fault(c, i, lane, "out-of-bounds parameter %s of %d bytes at offset %" PRIu64, verb(kind), bytes, offset);
  return {c.launch->params.data() + offset, Space::Param, offset};
}

Place locate_slow(Context &c, const Instruction &i, int lane, uint64_t address, int bytes, AccessKind kind) {
  uint64_t window = address >> kWindowShift, offset = address & ((1ull << kWindowShift) - 1);
  if (i.space == Space::Local || (i.space == Space::Generic && window == kLocalWindow >> kWindowShift))
    return locate_local(c, i, lane, offset & 0xffffffff, bytes, kind);
  if (i.space == Space::Param || (i.space == Space::Generic && window == kParamWindow >> kWindowShift))
    return locate_param(c, i, lane, offset & 0xffffffff, bytes, kind);
  if (i.space == Space::Shared || (i.space == Space::Generic && window == kSharedWindow >> kWindowShift))
    fault(c, i, lane, "out-of-bounds shared %s of %d bytes at offset %" PRIu64 ", the block has %" PRIu64 " bytes",
          verb(kind), bytes, address & 0xffffffff, c.launch->shared_size);
  const Allocation *a = device_memory().find(address);
  if (a && !a->freed && !a->pending && address + static_cast<uint64_t>(bytes) <= a->base + a->size) {
    c.ranges[i.index & 255] = {a->base, a->base + a->size, a->alias_delta};
    return {reinterpret_cast<uint8_t *>(address + static_cast<uint64_t>(a->alias_delta)), Space::Global, address};
  }
  if (!a && device_memory().is_pageable(address)) return {reinterpret_cast<uint8_t *>(address), Space::Global, address};
  const char *what = a && a->freed     ? "use after free: global"
                     : a && a->pending ? "use before its cudaMallocAsync, which another stream has not come to: global"
                                       : "out-of-bounds global";
  fault(c, i, lane, "%s %s of %d bytes at %s", what, verb(kind), bytes,
        device_memory().describe(address, static_cast<uint64_t>(bytes)).c_str());
}

void observe(Context &c, const Instruction &i, const Footprint &footprint, AccessKind kind) {
  if (c.counters) count_access(*c.counters, footprint);
  if (c.block->races) log_access(c, i, footprint, kind);
}

} // namespace ptxvm
