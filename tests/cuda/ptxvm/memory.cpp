// Moving data: mov, ld, st, address conversion and asynchronous copies.
#include "access.h"
#include "decode.h"

namespace ptxvm {

namespace {

template <class T> void mov(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) { d[l] = static_cast<std::make_unsigned_t<T>>(a[l]); });
}

void mov_frame_address(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  Lane *d = c.lanes(i.dst);
  uint64_t base = c.group->frame->local_base + static_cast<uint64_t>(i.imm);
  for_lanes(mask, [&](int l) { d[l] = a[l] + base; });
}

void mov_pred(Context &c, const Instruction &i, uint32_t mask) {
  uint32_t value = c.pred_source(i, 0), &d = c.pred(i.dst);
  d = (d & ~mask) | (value & mask);
}

void mov_unpack(Context &c, const Instruction &i, uint32_t mask) {
  const auto &parts = i.extra->refs;
  const Lane *a = c.lanes(i.src[0]);
  int width = i.size * 8 / static_cast<int>(parts.size());
  uint64_t ones = width == 64 ? ~0ull : (1ull << width) - 1;
  for_lanes(mask, [&](int l) {
    uint64_t value = a[l];
    for (size_t k = 0; k < parts.size(); k++) c.lanes(parts[k])[l] = value >> width * static_cast<int>(k) & ones;
  });
}

void mov_pack(Context &c, const Instruction &i, uint32_t mask) {
  const auto &parts = i.extra->refs;
  int width = i.size * 8 / static_cast<int>(parts.size());
  uint64_t ones = width == 64 ? ~0ull : (1ull << width) - 1;
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) {
    uint64_t value = 0;
    for (size_t k = 0; k < parts.size(); k++) value |= (c.lanes(parts[k])[l] & ones) << width * static_cast<int>(k);
    d[l] = value;
  });
}

void mov_pack_128(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *low = c.lanes(i.extra->refs[0]), *high = c.lanes(i.extra->refs[1]);
  Lane *d = c.lanes(i.dst), *e = c.high_lanes(i.dst);
  for_lanes(mask, [&](int l) { d[l] = low[l], e[l] = high[l]; });
}
void mov_unpack_128(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *low = c.lanes(i.src[0]), *high = c.high_lanes(i.src[0]);
  Lane *d = c.lanes(i.extra->refs[0]), *e = c.lanes(i.extra->refs[1]);
  for_lanes(mask, [&](int l) { d[l] = low[l], e[l] = high[l]; });
}
void decode_mov_128(Decoder &d) {
  bool unpacks = d.operand(0).kind == Operand::Vector;
  const Operand &parts = d.operand(unpacks ? 0 : 1);
  if (parts.elements.size() != 2) d.unsupported("128-bit registers, but in two halves");
  d.extra().refs = d.refs(parts);
  if (unpacks) d.source(0, 1);
  else d.destination(0);
  d.out.handler = unpacks ? mov_unpack_128 : mov_pack_128;
}

// Clocks are read when asked for; all else special is kept in registers.
void mov_clock(Context &c, const Instruction &i, uint32_t mask) {
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) { d[l] = i.mode ? c.instructions >> 32 : c.instructions; });
}

void decode_mov(Decoder &d) {
  Type type = d.take_type();
  const Operand &to = d.operand(0), &from = d.operand(1);
  d.out.size = static_cast<uint8_t>(size_of(type));
  if (type == Type::B128) return decode_mov_128(d);
  if (type == Type::Pred) {
    d.destination(0);
    d.pred_source(0, 1);
    d.out.handler = mov_pred;
  } else if (to.kind == Operand::Vector) {
    d.extra().refs = d.refs(to);
    d.source(0, 1);
    d.out.handler = mov_unpack;
  } else if (from.kind == Operand::Vector) {
    d.extra().refs = d.refs(from);
    d.destination(0);
    d.out.handler = mov_pack;
  } else if (from.kind == Operand::Special && from.name.find("clock") != std::string::npos) {
    d.destination(0);
    d.out.mode = from.name == "%clock_hi";
    d.out.handler = mov_clock;
  } else {
    d.destination(0);
    d.source(0, 1);
    if (d.out.frame_relative) d.out.handler = mov_frame_address;
    else if (d.out.size == 8) d.out.handler = mov<uint64_t>;
    else if (d.out.size == 4) d.out.handler = mov<uint32_t>;
    else d.out.handler = mov<uint16_t>;
  }
}

void cvta(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  Lane *d = c.lanes(i.dst);
  uint64_t offset = static_cast<uint64_t>(i.imm) + (i.frame_relative ? c.group->frame->local_base : 0);
  for_lanes(mask, [&](int l) { d[l] = a[l] + offset; });
}

uint64_t window_of(Space space) {
  return space == Space::Shared  ? kSharedWindow
         : space == Space::Local ? kLocalWindow
         : space == Space::Param ? kParamWindow
                                 : 0;
}

void decode_cvta(Decoder &d) {
  bool to = d.take("to");
  Space space = d.take_space(Space::Generic);
  d.take_type();
  if (space == Space::Param && !d.function.is_entry) space = Space::Local;
  uint64_t window = window_of(space);
  d.out.imm = static_cast<int64_t>(to ? 0 - window : window);
  d.destination(0);
  d.source(0, 1);
  d.out.handler = cvta;
}

void isspacep(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  uint32_t result = 0, &d = c.pred(i.dst);
  uint64_t window = window_of(i.space) >> kWindowShift;
  for_lanes(mask, [&](int l) { result |= static_cast<uint32_t>(a[l] >> kWindowShift == window) << l; });
  d = (d & ~mask) | result;
}

// ---- ld and st

template <class T, bool kVector> void load(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *base = c.lanes(i.src[0]);
  const int count = kVector ? i.count : 1, bytes = static_cast<int>(sizeof(T)) * count;
  Footprint footprint;
  for_lanes(mask, [&](int l) {
    Place place = locate(c, i, l, lane_address(c, i, base, l), bytes, AccessKind::Read);
    if (c.watch)
      footprint.address[static_cast<size_t>(l)] = place.address, footprint.space[static_cast<size_t>(l)] = place.space;
    for (int k = 0; k < count; k++) {
      T value;
      memcpy(&value, place.bytes + static_cast<size_t>(k) * sizeof(T), sizeof(T));
      Lane *d = kVector ? c.lanes(i.extra->refs[static_cast<size_t>(k)]) : c.lanes(i.dst);
      d[l] = widen<T>(value);
    }
  });
  if (!c.watch) return;
  footprint.bytes = bytes, footprint.lanes = mask;
  observe(c, i, footprint, AccessKind::Read);
}

// The same address in every lane is the rule for parameters.
template <class T, bool kVector> void load_param(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *base = c.lanes(i.src[0]);
  const int count = kVector ? i.count : 1, bytes = static_cast<int>(sizeof(T)) * count;
  for_lanes(mask, [&](int l) {
    uint64_t offset = base[l] + static_cast<uint64_t>(i.imm);
    const uint8_t *from = c.launch->params.data() + offset;
    if (offset + static_cast<uint64_t>(bytes) > c.launch->params.size())
      from = locate(c, i, l, offset, bytes, AccessKind::Read).bytes;
    for (int k = 0; k < count; k++) {
      T value;
      memcpy(&value, from + static_cast<size_t>(k) * sizeof(T), sizeof(T));
      Lane *d = kVector ? c.lanes(i.extra->refs[static_cast<size_t>(k)]) : c.lanes(i.dst);
      d[l] = widen<T>(value);
    }
  });
}

template <class T, bool kVector> void store(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *base = c.lanes(i.src[0]);
  const int count = kVector ? i.count : 1, bytes = static_cast<int>(sizeof(T)) * count;
  Footprint footprint;
  for_lanes(mask, [&](int l) {
    Place place = locate(c, i, l, lane_address(c, i, base, l), bytes, AccessKind::Write);
    if (c.watch)
      footprint.address[static_cast<size_t>(l)] = place.address, footprint.space[static_cast<size_t>(l)] = place.space;
    bool unchanged = true;
    for (int k = 0; k < count; k++) {
      const Lane *a = kVector ? c.lanes(i.extra->refs[static_cast<size_t>(k)]) : c.lanes(i.src[1]);
      T value = static_cast<T>(a[l]);
      uint8_t *to = place.bytes + static_cast<size_t>(k) * sizeof(T);
      if (c.watch) unchanged &= memcmp(to, &value, sizeof(T)) == 0;
      memcpy(to, &value, sizeof(T));
    }
    footprint.unchanged |= static_cast<uint32_t>(unchanged) << l;
  });
  if (!c.watch) return;
  footprint.bytes = bytes, footprint.lanes = mask;
  observe(c, i, footprint, AccessKind::Write);
}

void take_cache_hints(Decoder &d) {
  d.ignore({"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::evict_normal", "L1::evict_unchanged",
            "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::evict_last", "L2::evict_normal",
            "L2::evict_first", "L2::64B", "L2::128B", "L2::256B"});
  if (d.take("L2::cache_hint")) d.unsupported("a cache policy operand");
}

int take_vector(Decoder &d) {
  int k = d.take_one_of({"v2", "v4", "v8"});
  return k < 0 ? 1 : 2 << k;
}

Type memory_type(Type type) { // floats move as bits
  switch (type) {
  case Type::F32: return Type::B32;
  case Type::F64: return Type::B64;
  case Type::F16:
  case Type::BF16: return Type::B16;
  case Type::F16x2:
  case Type::BF16x2: return Type::B32;
  default: return type;
  }
}

void decode_load(Decoder &d) {
  d.out.sync = d.take_ordering();
  d.out.space = d.take_space(Space::Generic);
  take_cache_hints(d);
  d.out.count = static_cast<uint8_t>(take_vector(d));
  Type type = memory_type(d.take_type());
  if (type == Type::B128) d.unsupported("128-bit registers");
  d.out.size = static_cast<uint8_t>(size_of(type));
  d.address(0, 1);
  bool vector = d.operand(0).kind == Operand::Vector;
  if (vector) {
    const auto &elements = d.operand(0).elements;
    d.extra().refs = d.refs(d.operand(0));
    for (size_t k = 0; k < elements.size(); k++)
      if (elements[k].reg < 0 || d.function.register_mentions[static_cast<size_t>(elements[k].reg)] == 1)
        d.out.unused |= static_cast<uint8_t>(1u << k);
  } else {
    d.destination(0);
  }
  bool param = d.out.space == Space::Param;
  with_integer_type(type, [&](auto t) {
    using T = decltype(t);
    if (param) d.out.handler = vector ? load_param<T, true> : load_param<T, false>;
    else d.out.handler = vector ? load<T, true> : load<T, false>;
  });
}

void decode_store(Decoder &d) {
  d.out.sync = d.take_ordering();
  d.out.space = d.take_space(Space::Generic);
  take_cache_hints(d);
  d.out.count = static_cast<uint8_t>(take_vector(d));
  Type type = memory_type(d.take_type());
  if (type == Type::B128) d.unsupported("128-bit registers");
  d.out.size = static_cast<uint8_t>(size_of(type));
  d.address(0, 0);
  bool vector = d.operand(1).kind == Operand::Vector;
  if (vector) d.extra().refs = d.refs(d.operand(1));
  else d.source(1, 1);
  with_integer_type(type, [&](auto t) {
    using T = std::make_unsigned_t<decltype(t)>;
    d.out.handler = vector ? store<T, true> : store<T, false>;
  });
}

// ---- cp.async

void copy_async(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *to = c.lanes(i.src[0]), *from = c.lanes(i.src[1]);
  const Lane *length = i.src[2].exists() ? c.lanes(i.src[2]) : nullptr;
  Instruction global = i; // the source is checked as a global access of its own
  global.space = Space::Global;
  global.imm = i.target;
  Footprint footprint;
  uint32_t reading = 0;
  for_lanes(mask, [&](int l) {
    uint64_t shared = (to[l] + static_cast<uint64_t>(i.imm)) & 0xffffffff;
    int copied = length ? static_cast<int>(std::min<uint64_t>(length[l] & 0xffffffff, i.size)) : i.size;
    if (shared % i.size) misaligned(c, i, l, shared, i.size);
    if (shared + i.size > c.launch->shared_size) locate_slow(c, i, l, shared, i.size, AccessKind::Write);
    PendingCopy copy{l, c.warp->copy_sequence[static_cast<size_t>(l)], shared, nullptr, 0, copied, i.size - copied, &i};
    if (copied) {
      uint64_t address = from[l] + static_cast<uint64_t>(global.imm);
      if (address % i.size) misaligned(c, global, l, address, i.size);
      Place place = locate(c, global, l, address, (copied & (copied - 1)) ? 1 : copied, AccessKind::Read);
      if (copied & (copied - 1)) locate(c, global, l, address + static_cast<uint64_t>(copied) - 1, 1, AccessKind::Read);
      copy.source = place.bytes;
      copy.source_address = address;
      reading |= 1u << l;
      footprint.address[static_cast<size_t>(l)] = place.address, footprint.space[static_cast<size_t>(l)] = place.space;
    }
    c.warp->copies.push_back(copy);
  });
  if (!c.watch || !reading) return;
  footprint.bytes = i.size, footprint.lanes = reading;
  observe(c, global, footprint, AccessKind::Read);
}

void complete_copies(Context &c, uint32_t mask, uint32_t groups_left) {
  auto &copies = c.warp->copies;
  size_t kept = 0;
  for (const PendingCopy &copy : copies) {
    bool due = (mask >> copy.lane & 1) &&
               static_cast<int64_t>(copy.sequence) <
                   static_cast<int64_t>(c.warp->copy_sequence[static_cast<size_t>(copy.lane)]) - groups_left;
    if (!due) {
      copies[kept++] = copy;
      continue;
    }
    uint8_t *to = c.block->shared.data() + copy.shared_address;
    if (copy.copied) memcpy(to, copy.source, static_cast<size_t>(copy.copied));
    memset(to + copy.copied, 0, static_cast<size_t>(copy.zeroed));
    memset(c.block->shared_written.data() + copy.shared_address, 1, static_cast<size_t>(copy.copied + copy.zeroed));
    if (c.watch) {
      Footprint footprint;
      footprint.bytes = copy.copied + copy.zeroed, footprint.lanes = 1u << copy.lane;
      footprint.address[static_cast<size_t>(copy.lane)] = copy.shared_address;
      footprint.space[static_cast<size_t>(copy.lane)] = Space::Shared;
      observe(c, *copy.instruction, footprint, AccessKind::Write);
    }
  }
  copies.resize(kept);
}

void copy_commit(Context &c, const Instruction &, uint32_t mask) {
  for_lanes(mask, [&](int l) { c.warp->copy_sequence[static_cast<size_t>(l)]++; });
}
void copy_wait_group(Context &c, const Instruction &i, uint32_t mask) {
  complete_copies(c, mask, static_cast<uint32_t>(i.imm));
}
void copy_wait_all(Context &c, const Instruction &i, uint32_t mask) {
  copy_commit(c, i, mask);
  complete_copies(c, mask, 0);
}

void decode_cp(Decoder &d) {
  if (!d.take("async")) d.unsupported("only cp.async");
  if (d.take("commit_group")) return void(d.out.handler = copy_commit);
  if (d.take("wait_all")) return void(d.out.handler = copy_wait_all);
  if (d.take("wait_group")) {
    d.out.imm = d.operand(0).value;
    d.out.handler = copy_wait_group;
    return;
  }
  if (d.take("bulk") || d.take("mbarrier")) d.unsupported("bulk copies and mbarrier");
  take_cache_hints(d);
  d.take_space(Space::Shared), d.take_space(Space::Global);
  d.out.space = Space::Global;
  d.address(1, 1);
  d.out.target = static_cast<int32_t>(d.out.imm);
  if (d.operand(1).symbol) d.unsupported("the address of a variable as source");
  d.out.space = Space::Shared;
  d.address(0, 0);
  d.out.size = static_cast<uint8_t>(d.operand(2).value);
  if (d.has(3)) d.source(2, 3);
  d.out.handler = copy_async;
}

void nothing(Context &, const Instruction &, uint32_t) {}

} // namespace

void add_data_instructions(DecodeTable &t) {
  t["mov"] = decode_mov;
  t["cvta"] = decode_cvta;
  t["isspacep"] = [](Decoder &d) {
    d.out.space = d.take_space(Space::Generic);
    if (d.out.space == Space::Const) d.unsupported("constant space in a generic address");
    d.destination(0);
    d.source(0, 1);
    d.out.handler = isspacep;
  };
}

void add_memory_instructions(DecodeTable &t) {
  t["ld"] = decode_load;
  t["ldu"] = decode_load;
  t["st"] = decode_store;
  t["cp"] = decode_cp;
  auto hint = [](Decoder &d) {
    d.take_space(Space::Generic);
    take_cache_hints(d);
    d.ignore({"L1", "L2", "tensormap", "uniform"});
    d.out.handler = nothing;
  };
  t["prefetch"] = hint;
  t["prefetchu"] = hint;
  t["discard"] = hint;
  t["applypriority"] = hint;
}

} // namespace ptxvm
