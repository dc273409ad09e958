// One lane's access to memory: which bytes it means, whether it may, and who else should know.
#pragma once
#include "engine.h"
#include "report.h"
#include <algorithm>
#include <cstring>

namespace ptxvm {

enum class AccessKind : uint8_t { Read, Write, Atomic };

struct Place {
  uint8_t *bytes;
  Space space;      // Shared, Global or Local
  uint64_t address; // generic for global, offset in the window otherwise
};

// What a whole instruction touched, for races and statistics; filled only when somebody watches.
struct Footprint {
  int bytes = 0;
  uint32_t lanes = 0;
  uint32_t unchanged = 0; // lanes that stored what was there already
  std::array<uint64_t, kLanes> address;
  std::array<Space, kLanes> space;
};

Place locate_slow(Context &c, const Instruction &i, int lane, uint64_t address, int bytes, AccessKind kind);
void observe(Context &c, const Instruction &i, const Footprint &footprint, AccessKind kind);
[[noreturn]] void misaligned(Context &c, const Instruction &i, int lane, uint64_t address, int bytes);
[[noreturn]] void uninitialised(Context &c, const Instruction &i, int lane, uint64_t offset, int bytes);

// Copies of whole structs read padding that nobody wrote, so an element, and at least a word, counts as written when
// any of its bytes is. Elements that nothing uses do not matter: the compiler widens loads beyond what is needed.
inline bool every_element_written(const Instruction &i, const uint8_t *written, int bytes) {
  const int element = i.size, part = std::min(bytes, std::max(element, 4));
  for (int at = 0; at < bytes; at += part) {
    if (i.unused && i.unused >> at / element & 1) continue;
    uint64_t any = 0;
    memcpy(&any, written + at, static_cast<size_t>(std::min(part, 8)));
    if (!any) return false;
  }
  return true;
}

inline Place locate(Context &c, const Instruction &i, int lane, uint64_t address, int bytes, AccessKind kind) {
  Space space = i.space;
  if (address & static_cast<uint64_t>(bytes - 1)) misaligned(c, i, lane, address, bytes);
  if (space == Space::Shared || (space == Space::Generic && address >> kWindowShift == 1)) {
    uint64_t offset = address & 0xffffffff;
    if (offset + static_cast<uint64_t>(bytes) <= c.launch->shared_size) {
      uint8_t *written = c.block->shared_written.data() + offset;
      if (kind != AccessKind::Write && !every_element_written(i, written, bytes))
        uninitialised(c, i, lane, offset, bytes);
      if (kind != AccessKind::Read) memset(written, 1, static_cast<size_t>(bytes));
      return {c.block->shared.data() + offset, Space::Shared, offset};
    }
  } else if (space <= Space::Global || space == Space::Const) {
    const RangeCache &range = c.ranges[i.index & 255];
    if (address >= range.low && address + static_cast<uint64_t>(bytes) <= range.high)
      return {reinterpret_cast<uint8_t *>(address + static_cast<uint64_t>(range.delta)), Space::Global, address};
  }
  return locate_slow(c, i, lane, address, bytes, kind);
}

inline uint64_t lane_address(const Context &c, const Instruction &i, const Lane *base, int lane) {
  uint64_t address = base[lane] + static_cast<uint64_t>(i.imm);
  return i.frame_relative ? address + c.group->frame->local_base : address;
}

} // namespace ptxvm
