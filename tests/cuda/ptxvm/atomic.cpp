// atom, red and the fences. A kernel with global atomics runs its blocks on one worker, so plain code is atomic enough.
#include "access.h"
#include "decode.h"
#include "races.h"

namespace ptxvm {

namespace {

enum class AtomicOp : uint8_t { Add, Min, Max, And, Or, Xor, Exchange, CompareSwap, Increment, Decrement };

template <class T, AtomicOp kOp> T apply(T old, T b, T c) {
  if constexpr (std::is_floating_point_v<T>) {
    return kOp == AtomicOp::Add ? old + b : b;
  } else {
    switch (kOp) {
    case AtomicOp::Add: return static_cast<T>(static_cast<uint64_t>(old) + static_cast<uint64_t>(b));
    case AtomicOp::Min: return std::min(old, b);
    case AtomicOp::Max: return std::max(old, b);
    case AtomicOp::And: return old & b;
    case AtomicOp::Or: return old | b;
    case AtomicOp::Xor: return old ^ b;
    case AtomicOp::Exchange: return b;
    case AtomicOp::CompareSwap: return old == b ? c : old;
    case AtomicOp::Increment: return old >= b ? 0 : static_cast<T>(old + 1);
    case AtomicOp::Decrement: return old == 0 || old > b ? b : static_cast<T>(old - 1);
    }
  }
}

template <class T, class F> void each_lane(Context &c, const Instruction &i, uint32_t mask, F f) {
  const Lane *base = c.lanes(i.src[0]);
  Footprint footprint;
  for_lanes(mask, [&](int l) {
    Place place = locate(c, i, l, lane_address(c, i, base, l), static_cast<int>(sizeof(T)), AccessKind::Atomic);
    if (c.watch)
      footprint.address[static_cast<size_t>(l)] = place.address, footprint.space[static_cast<size_t>(l)] = place.space;
    T old;
    memcpy(&old, place.bytes, sizeof old);
    T value = f(l, old);
    memcpy(place.bytes, &value, sizeof value);
    if (i.dst.exists()) c.lanes(i.dst)[l] = widen<T>(old);
  });
  if (!c.watch) return;
  footprint.bytes = static_cast<int>(sizeof(T)), footprint.lanes = mask;
  observe(c, i, footprint, AccessKind::Atomic);
}

template <class T, AtomicOp kOp> void atomic(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *b = c.lanes(i.src[1]), *e = kOp == AtomicOp::CompareSwap ? c.lanes(i.src[2]) : b;
  each_lane<T>(c, i, mask, [&](int l, T old) { return apply<T, kOp>(old, narrow<T>(b[l]), narrow<T>(e[l])); });
}

// f16, bf16 and their pairs: only addition.
template <bool kBrain, int kParts> void atomic_half_add(Context &c, const Instruction &i, uint32_t mask) {
  using T = std::conditional_t<kParts == 2, uint32_t, uint16_t>;
  const Lane *b = c.lanes(i.src[1]);
  auto value = [](uint64_t bits) { return kBrain ? bf16_of(bits) : f16_of(bits); };
  each_lane<T>(c, i, mask, [&](int l, T old) {
    uint64_t result = 0;
    for (int shift = 0; shift < 16 * kParts; shift += 16) {
      double sum = value(old >> shift) + value(b[l] >> shift);
      result |= (kBrain ? bf16_bits(sum) : f16_bits(sum)) << shift;
    }
    return static_cast<T>(result);
  });
}

// 128 bits: only exchange, and compare and swap.
template <bool kCompares> void atomic_128(Context &c, const Instruction &i, uint32_t mask) {
  using Wide = std::array<uint64_t, 2>;
  const Lane *base = c.lanes(i.src[0]);
  auto value = [&](Ref r, int l) { return Wide{c.lanes(r)[l], c.high_lanes(r)[l]}; };
  Footprint footprint;
  for_lanes(mask, [&](int l) {
    Place place = locate(c, i, l, lane_address(c, i, base, l), 16, AccessKind::Atomic);
    footprint.address[static_cast<size_t>(l)] = place.address, footprint.space[static_cast<size_t>(l)] = place.space;
    Wide old, next = value(i.src[kCompares ? 2 : 1], l);
    memcpy(old.data(), place.bytes, 16);
    if (!kCompares || old == value(i.src[1], l)) memcpy(place.bytes, next.data(), 16);
    if (i.dst.exists()) c.lanes(i.dst)[l] = old[0], c.high_lanes(i.dst)[l] = old[1];
  });
  if (!c.watch) return;
  footprint.bytes = 16, footprint.lanes = mask;
  observe(c, i, footprint, AccessKind::Atomic);
}

// Vectors (sm_90): every element is an atomic addition of its own.
uint64_t add_element(Type type, uint64_t a, uint64_t b) {
  switch (type) {
  case Type::F32: return bits_of(f32_of(a) + f32_of(b));
  case Type::F16: return f16_bits(f16_of(a) + f16_of(b));
  case Type::BF16: return bf16_bits(bf16_of(a) + bf16_of(b));
  case Type::F16x2: return add_element(Type::F16, a, b) | add_element(Type::F16, a >> 16, b >> 16) << 16;
  default: return add_element(Type::BF16, a, b) | add_element(Type::BF16, a >> 16, b >> 16) << 16;
  }
}
void atomic_vector(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *base = c.lanes(i.src[0]);
  const auto &results = i.extra->refs, &values = i.extra->refs2;
  const size_t size = i.size;
  Footprint footprint;
  for_lanes(mask, [&](int l) {
    Place place = locate(c, i, l, lane_address(c, i, base, l), i.size * i.count, AccessKind::Atomic);
    footprint.address[static_cast<size_t>(l)] = place.address, footprint.space[static_cast<size_t>(l)] = place.space;
    for (size_t k = 0; k < values.size(); k++) {
      uint64_t old = 0;
      memcpy(&old, place.bytes + k * size, size);
      uint64_t sum = add_element(static_cast<Type>(i.mode), old, c.lanes(values[k])[l]);
      memcpy(place.bytes + k * size, &sum, size);
      if (!results.empty()) c.lanes(results[k])[l] = old;
    }
  });
  if (!c.watch) return;
  footprint.bytes = i.size * i.count, footprint.lanes = mask;
  observe(c, i, footprint, AccessKind::Atomic);
}

template <class T> Handler integer_atomic(AtomicOp op) {
  switch (op) {
  case AtomicOp::Add: return atomic<T, AtomicOp::Add>;
  case AtomicOp::Min: return atomic<T, AtomicOp::Min>;
  case AtomicOp::Max: return atomic<T, AtomicOp::Max>;
  case AtomicOp::And: return atomic<T, AtomicOp::And>;
  case AtomicOp::Or: return atomic<T, AtomicOp::Or>;
  case AtomicOp::Xor: return atomic<T, AtomicOp::Xor>;
  case AtomicOp::Exchange: return atomic<T, AtomicOp::Exchange>;
  case AtomicOp::CompareSwap: return atomic<T, AtomicOp::CompareSwap>;
  case AtomicOp::Increment: return atomic<T, AtomicOp::Increment>;
  default: return atomic<T, AtomicOp::Decrement>;
  }
}

Handler atomic_handler(Decoder &d, Type type, AtomicOp op) {
  if (is_float(type) || type == Type::F16x2 || type == Type::BF16x2) {
    if (op != AtomicOp::Add) d.unsupported("this operation on floats");
    switch (type) {
    case Type::F32: return atomic<float, AtomicOp::Add>;
    case Type::F64: return atomic<double, AtomicOp::Add>;
    case Type::F16: return atomic_half_add<false, 1>;
    case Type::BF16: return atomic_half_add<true, 1>;
    case Type::F16x2: return atomic_half_add<false, 2>;
    default: return atomic_half_add<true, 2>;
    }
  }
  Handler handler = nullptr;
  with_integer_type(type, [&](auto t) {
    if constexpr (sizeof(t) >= 2) handler = integer_atomic<decltype(t)>(op);
  });
  if (!handler) d.unsupported("this type");
  return handler;
}

void decode_vector(Decoder &d, Type type, AtomicOp op, int count, size_t first) {
  bool known =
      type == Type::F32 || type == Type::F16 || type == Type::BF16 || type == Type::F16x2 || type == Type::BF16x2;
  if (op != AtomicOp::Add || !known) d.unsupported("vectors of this operation or type");
  d.out.count = static_cast<uint8_t>(count);
  d.out.mode = static_cast<uint8_t>(type);
  if (first) d.extra().refs = d.refs(d.operand(0));
  d.extra().refs2 = d.refs(d.operand(first + 1));
  d.out.handler = atomic_vector;
}

void decode_atomic(Decoder &d, bool returns) {
  d.out.sync = true;
  d.take_ordering();
  d.ignore({"noftz", "L2::cache_hint"});
  d.out.space = d.take_space(Space::Generic);
  int op = d.take_one_of({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"});
  if (op < 0) d.unsupported("which operation");
  int vector = d.take_one_of({"v2", "v4", "v8"});
  Type type = d.take_type();
  d.out.size = static_cast<uint8_t>(size_of(type));
  size_t first = returns ? 1 : 0;
  d.address(0, first);
  if (vector >= 0) return decode_vector(d, type, static_cast<AtomicOp>(op), 2 << vector, first);
  if (returns) d.destination(0);
  d.source(1, first + 1);
  if (static_cast<AtomicOp>(op) == AtomicOp::CompareSwap) d.source(2, first + 2);
  if (type == Type::B128) {
    bool compares = static_cast<AtomicOp>(op) == AtomicOp::CompareSwap;
    if (!compares && static_cast<AtomicOp>(op) != AtomicOp::Exchange) d.unsupported("this operation on 128 bits");
    d.out.handler = compares ? atomic_128<true> : atomic_128<false>;
    return;
  }
  d.out.handler = atomic_handler(d, type, static_cast<AtomicOp>(op));
}

template <bool kWide> void fence(Context &c, const Instruction &, uint32_t mask) {
  if (c.block->races) log_fence(c, mask, kWide);
}

void decode_fence(Decoder &d) {
  // A fence of the block alone orders nothing between blocks.
  bool wide = d.take("gpu") || d.take("gl") || d.take("sys") || d.take("cluster");
  d.ignore({"cta", "sc", "acq_rel", "acquire", "release"});
  if (d.take("proxy") || d.take("mbarrier_init")) d.unsupported("this kind of fence");
  d.out.handler = wide ? fence<true> : fence<false>;
}

} // namespace

void add_atomic_instructions(DecodeTable &t) {
  t["atom"] = [](Decoder &d) { decode_atomic(d, true); };
  t["red"] = [](Decoder &d) { decode_atomic(d, false); };
  t["fence"] = decode_fence;
  t["membar"] = decode_fence;
}

} // namespace ptxvm
