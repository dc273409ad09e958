// setp, set, selp and slct: comparisons, and choices that follow from them.
#include "decode.h"

namespace ptxvm {

namespace {

constexpr int64_t kFtz = 1; // flag in imm

enum Comparison : uint8_t { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };

template <int kCompare> struct Compare {
  template <class T> bool operator()(T a, T b) const {
    bool unordered = a != a || b != b;
    switch (kCompare) {
    case kEq: return a == b;
    case kNe: return !unordered && a != b;
    case kLt: return a < b;
    case kLe: return a <= b;
    case kGt: return a > b;
    case kGe: return a >= b;
    case kEqu: return unordered || a == b;
    case kNeu: return a != b;
    case kLtu: return unordered || a < b;
    case kLeu: return unordered || a <= b;
    case kGtu: return unordered || a > b;
    case kGeu: return unordered || a >= b;
    case kNum: return !unordered;
    default: return unordered;
    }
  }
};

struct HalfValue {}; // tags for reading operands as f16 and bf16
struct BrainValue {};
template <class T> auto compare_operand(Lane v, bool ftz) {
  if constexpr (std::is_same_v<T, HalfValue>) return f16_of(v);
  else if constexpr (std::is_same_v<T, BrainValue>) return bf16_of(v);
  else if constexpr (std::is_same_v<T, float>) return ftz ? flush(f32_of(v)) : f32_of(v);
  else return narrow<T>(v);
}

template <class T, int kCompare> uint32_t compare(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]);
  bool ftz = i.imm & kFtz;
  uint32_t result = 0;
  for_lanes(mask, [&](int l) {
    bool yes = Compare<kCompare>()(compare_operand<T>(a[l], ftz), compare_operand<T>(b[l], ftz));
    result |= static_cast<uint32_t>(yes) << l;
  });
  return result;
}

uint32_t combine(const Instruction &i, uint32_t value, uint32_t with) {
  return i.mode == 1 ? value & with : i.mode == 2 ? value | with : i.mode == 3 ? value ^ with : value;
}

void set_pred(Context &c, Ref r, uint32_t mask, uint32_t value) {
  uint32_t &d = c.pred(r);
  d = (d & ~mask) | (value & mask);
}

template <class T, int kCompare> void setp(Context &c, const Instruction &i, uint32_t mask) {
  uint32_t value = compare<T, kCompare>(c, i, mask), with = i.mode ? c.pred_source(i, 2) : 0;
  set_pred(c, i.dst, mask, combine(i, value, with));
  if (i.pair.exists()) set_pred(c, i.pair, mask, combine(i, ~value, with));
}

template <class T, int kCompare> void set(Context &c, const Instruction &i, uint32_t mask) {
  uint32_t value = combine(i, compare<T, kCompare>(c, i, mask), i.mode ? c.pred_source(i, 2) : 0);
  Lane *d = c.lanes(i.dst);
  Lane yes = static_cast<Lane>(i.target == 0 ? 0xffffffffu : static_cast<uint32_t>(i.target));
  for_lanes(mask, [&](int l) { d[l] = value >> l & 1 ? yes : 0; });
}

// Packed comparisons: two predicates, or a mask of two halves.
template <class T, int kCompare> void compare_pair(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]);
  uint32_t low = 0, high = 0;
  for_lanes(mask, [&](int l) {
    auto test = [&](int s) {
      return Compare<kCompare>()(compare_operand<T>(a[l] >> s, false), compare_operand<T>(b[l] >> s, false));
    };
    low |= static_cast<uint32_t>(test(0)) << l;
    high |= static_cast<uint32_t>(test(16)) << l;
  });
  uint32_t with = i.mode ? c.pred_source(i, 2) : 0;
  low = combine(i, low, with), high = combine(i, high, with);
  if (i.sync) { // set: target holds what "true" is in one half
    Lane *d = c.lanes(i.dst);
    uint32_t yes = static_cast<uint32_t>(i.target) & 0xffff;
    for_lanes(mask, [&](int l) { d[l] = (low >> l & 1 ? yes : 0) | (high >> l & 1 ? yes << 16 : 0); });
  } else {
    set_pred(c, i.dst, mask, low);
    if (i.pair.exists()) set_pred(c, i.pair, mask, high);
  }
}

template <class T, template <class, int> class Make> Handler comparison_handler(int which) {
  static const Handler handlers[] = {
      Make<T, 0>::handler,  Make<T, 1>::handler,  Make<T, 2>::handler,  Make<T, 3>::handler, Make<T, 4>::handler,
      Make<T, 5>::handler,  Make<T, 6>::handler,  Make<T, 7>::handler,  Make<T, 8>::handler, Make<T, 9>::handler,
      Make<T, 10>::handler, Make<T, 11>::handler, Make<T, 12>::handler, Make<T, 13>::handler};
  return handlers[which];
}
template <class T, int k> struct MakeSetp { static constexpr Handler handler = setp<T, k>; };
template <class T, int k> struct MakeSet { static constexpr Handler handler = set<T, k>; };
template <class T, int k> struct MakePair { static constexpr Handler handler = compare_pair<T, k>; };

template <template <class, int> class Make> Handler scalar_comparison(Type type, int which) {
  Handler handler = nullptr;
  if (type == Type::F32) return comparison_handler<float, Make>(which);
  if (type == Type::F64) return comparison_handler<double, Make>(which);
  if (type == Type::F16) return comparison_handler<HalfValue, Make>(which);
  if (type == Type::BF16) return comparison_handler<BrainValue, Make>(which);
  with_integer_type(type, [&](auto t) {
    if constexpr (sizeof(t) > 1) handler = comparison_handler<decltype(t), Make>(which);
  });
  if (!handler) throw Unsupported("comparison of this type");
  return handler;
}

int take_comparison(Decoder &d) {
  int k = d.take_one_of({"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"});
  if (k >= 0) return k;
  k = d.take_one_of({"lo", "ls", "hi", "hs"});
  if (k < 0) d.unsupported("which comparison");
  return kLt + k;
}

void take_combination(Decoder &d, size_t operand) {
  d.out.mode = static_cast<uint8_t>(d.take_one_of({"and", "or", "xor"}) + 1);
  if (d.out.mode) d.pred_source(2, operand);
}

void decode_setp(Decoder &d) {
  if (d.take("ftz")) d.out.imm |= kFtz;
  Type type = d.take_type();
  int which = take_comparison(d);
  take_combination(d, 3);
  d.destination(0);
  if (d.operand(0).kind == Operand::Sink) d.out.dst = d.pred_sink();
  d.source(0, 1);
  d.source(1, 2);
  if (type == Type::F16x2) d.out.handler = comparison_handler<HalfValue, MakePair>(which);
  else if (type == Type::BF16x2) d.out.handler = comparison_handler<BrainValue, MakePair>(which);
  else d.out.handler = scalar_comparison<MakeSetp>(type, which);
}

int32_t true_value(Type to) {
  switch (to) {
  case Type::F32: return 0x3f800000;
  case Type::F16:
  case Type::F16x2: return 0x3c00;
  case Type::BF16:
  case Type::BF16x2: return 0x3f80;
  case Type::U16:
  case Type::S16: return 0xffff;
  default: return 0; // all ones
  }
}

void decode_set(Decoder &d) {
  if (d.take("ftz")) d.out.imm |= kFtz;
  Type to = d.take_type(), type = d.take_type();
  int which = take_comparison(d);
  take_combination(d, 3);
  d.destination(0);
  d.source(0, 1);
  d.source(1, 2);
  d.out.target = true_value(to);
  if (type == Type::F16x2 || type == Type::BF16x2) {
    d.out.sync = true;
    if (d.out.target == 0) d.out.target = 0xffff;
    d.out.handler = type == Type::F16x2 ? comparison_handler<HalfValue, MakePair>(which)
                                        : comparison_handler<BrainValue, MakePair>(which);
  } else {
    d.out.handler = scalar_comparison<MakeSet>(type, which);
  }
}

template <class T> void selp(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]);
  Lane *d = c.lanes(i.dst);
  uint32_t p = c.pred_source(i, 2);
  for_lanes(mask, [&](int l) { d[l] = widen<T>(narrow<T>(p >> l & 1 ? a[l] : b[l])); });
}

void slct(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]), *e = c.lanes(i.src[2]);
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) {
    bool first = i.mode ? f32_of(e[l]) >= 0 : static_cast<int32_t>(e[l]) >= 0;
    d[l] = first ? a[l] : b[l];
  });
}

Type as_bits(Type type) {
  int size = size_of(type);
  return size == 8 ? Type::B64 : size == 4 ? Type::B32 : size == 2 ? Type::B16 : Type::B8;
}

} // namespace

void add_comparison_instructions(DecodeTable &t) {
  t["setp"] = decode_setp;
  t["set"] = decode_set;
  t["selp"] = [](Decoder &d) {
    d.destination(0);
    d.source(0, 1);
    d.source(1, 2);
    d.pred_source(2, 3);
    with_integer_type(as_bits(d.take_type()), [&](auto v) { d.out.handler = selp<decltype(v)>; });
  };
  t["slct"] = [](Decoder &d) {
    d.take_type();
    d.take("ftz");
    d.out.mode = d.take_type() == Type::F32;
    d.destination(0);
    for (int k = 0; k < 3; k++) d.source(k, static_cast<size_t>(k) + 1);
    d.out.handler = slct;
  };
}

} // namespace ptxvm
