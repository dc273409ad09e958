// cvt in all its forms.
#include "decode.h"
#include <algorithm>

namespace ptxvm {

namespace {

enum Flag : uint8_t { kFtz = 1, kSaturate = 2, kRelu = 4 };

double read_float(Type type, Lane v) {
  switch (type) {
  case Type::F32: return static_cast<double>(f32_of(v));
  case Type::F64: return f64_of(v);
  case Type::F16: return f16_of(v);
  default: return bf16_of(v);
  }
}

uint64_t write_float(const Instruction &i, Type type, double v, Rounding rounding) {
  if (i.imm & kSaturate) v = v > 0 ? std::min(v, 1.0) : 0.0;
  if ((i.imm & kRelu) && v <= 0) v = 0;
  switch (type) {
  case Type::F64: return bits_of(v);
  case Type::F16: return f16_bits(v, rounding);
  case Type::BF16: return bf16_bits(v, rounding);
  case Type::TF32: return v != v ? 0x7fffffff : static_cast<uint64_t>(encode_float(v, kTF32, rounding, false)) << 13;
  default: {
    float f = rounding == Rounding::NearestEven ? static_cast<float>(v) : to_f32(v, rounding);
    return bits_of(i.imm & kFtz ? flush(f) : f);
  }
  }
}

// The two types and the rounding ride in the instruction.
struct CvtTypes {
  Type to, from;
  Rounding rounding;
  bool rounds_to_integer;
};
CvtTypes types_of(const Instruction &i) {
  return {static_cast<Type>(i.size), static_cast<Type>(i.count), static_cast<Rounding>(i.mode), i.sync};
}

void float_to_float(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  Lane *d = c.lanes(i.dst);
  CvtTypes t = types_of(i);
  for_lanes(mask, [&](int l) {
    double v = read_float(t.from, a[l]);
    if ((i.imm & kFtz) && t.from == Type::F32) v = static_cast<double>(flush(static_cast<float>(v)));
    if (t.rounds_to_integer) v = round_to_integer(v, t.rounding);
    d[l] = write_float(i, t.to, v, t.rounding);
  });
}

template <class T> T float_to_int_value(double v) {
  // NaN gives 0 in 32 bits and fewer, the most negative number in 64.
  if (v != v) return sizeof(T) == 8 ? static_cast<T>(1ull << 63) : 0;
  constexpr int bits = 8 * sizeof(T) - (std::is_signed_v<T> ? 1 : 0);
  double limit = std::ldexp(1.0, bits);
  if (v >= limit) return std::numeric_limits<T>::max();
  if (v < (std::is_signed_v<T> ? -limit : 0)) return std::numeric_limits<T>::min();
  return static_cast<T>(v);
}

template <class T> void float_to_int(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  Lane *d = c.lanes(i.dst);
  CvtTypes t = types_of(i);
  for_lanes(mask, [&](int l) {
    double v = read_float(t.from, a[l]);
    if ((i.imm & kFtz) && t.from == Type::F32) v = static_cast<double>(flush(static_cast<float>(v)));
    d[l] = widen<T>(float_to_int_value<T>(round_to_integer(v, t.rounding)));
  });
}

template <class T> void int_to_float(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  Lane *d = c.lanes(i.dst);
  CvtTypes t = types_of(i);
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  for_lanes(mask, [&](int l) {
    Wide v = narrow<T>(a[l]);
    if (t.to == Type::F32) d[l] = bits_of(to_f32(v, t.rounding));
    else if (t.to == Type::F64)
      d[l] = bits_of(t.rounding == Rounding::NearestEven ? static_cast<double>(v) : to_f64(v, t.rounding));
    else { // 64 bits do not fit a double: round to odd, then to the format
      double near = to_f64(v, Rounding::Zero);
      if (static_cast<Wide>(near) != v) near = bits_as<double>(bits_as<uint64_t>(near) | 1);
      d[l] = write_float(i, t.to, near, t.rounding);
    }
    if ((i.imm & kSaturate) && t.to == Type::F32)
      d[l] = bits_of(f32_of(d[l]) > 0 ? std::min(f32_of(d[l]), 1.0f) : 0.0f);
  });
}
template <class T> struct ToFloatNearest {
  float operator()(T v) const { return static_cast<float>(v); }
};

template <class To> struct Convert {
  template <class From> To operator()(From v) const { return static_cast<To>(v); }
};
template <class To> struct Clamp {
  template <class From> To operator()(From v) const {
    __int128 wide = v, low = std::numeric_limits<To>::min(), high = std::numeric_limits<To>::max();
    return static_cast<To>(std::min(std::max(wide, low), high));
  }
};

// d = {cvt(a) : high half, cvt(b) : low half}
void pack_two(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]);
  Lane *d = c.lanes(i.dst);
  CvtTypes t = types_of(i);
  auto encode = [&](float f) -> uint64_t {
    double v = static_cast<double>(f);
    if ((i.imm & kRelu) && v <= 0) v = 0;
    switch (t.to) {
    case Type::F16x2: return f16_bits(v, t.rounding);
    case Type::BF16x2: return bf16_bits(v, t.rounding);
    case Type::E4M3x2: return encode_float(v, kE4M3, t.rounding, true);
    default: return encode_float(v, kE5M2, t.rounding, true);
    }
  };
  int shift = 4 * size_of(t.to);
  for_lanes(mask, [&](int l) { d[l] = encode(f32_of(a[l])) << shift | encode(f32_of(b[l])); });
}

void fp8_pair_to_f16x2(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  Lane *d = c.lanes(i.dst);
  const FloatFormat &format = types_of(i).from == Type::E4M3x2 ? kE4M3 : kE5M2;
  for_lanes(mask, [&](int l) {
    uint64_t low = f16_bits(decode_float(a[l] & 0xff, format)), high = f16_bits(decode_float(a[l] >> 8 & 0xff, format));
    d[l] = high << 16 | low;
  });
}

void f16x2_to_fp8_pair(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  Lane *d = c.lanes(i.dst);
  CvtTypes t = types_of(i);
  const FloatFormat &format = t.to == Type::E4M3x2 ? kE4M3 : kE5M2;
  for_lanes(mask, [&](int l) {
    uint64_t low = encode_float(f16_of(a[l]), format, t.rounding, true);
    d[l] = static_cast<uint64_t>(encode_float(f16_of(a[l] >> 16), format, t.rounding, true)) << 8 | low;
  });
}

// The conversions that kernels do all the time, without flags and to nearest.
struct ToHalf {
  uint32_t operator()(float v) const { return static_cast<uint32_t>(f16_bits_nearest(v)); }
};
struct ToBrain {
  uint32_t operator()(float v) const { return static_cast<uint32_t>(bf16_bits_nearest(v)); }
};
template <class F> struct Twice {
  uint32_t operator()(float high, float low) const { return F()(high) << 16 | F()(low); }
};

Handler fast_conversion(const Decoder &d, Type to, Type from, Rounding rounding) {
  if (from != Type::F32 || rounding != Rounding::NearestEven || d.out.imm) return nullptr;
  switch (to) {
  case Type::F16: return unary<uint32_t, float, ToHalf>;
  case Type::BF16: return unary<uint32_t, float, ToBrain>;
  case Type::F16x2: return binary<uint32_t, float, Twice<ToHalf>>;
  case Type::BF16x2: return binary<uint32_t, float, Twice<ToBrain>>;
  default: return nullptr;
  }
}

// cvt.pack: a and b saturated to small integers, side by side, above what c holds.
template <class T> void pack_integers(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]), *e = i.src[2].exists() ? c.lanes(i.src[2]) : nullptr;
  Lane *d = c.lanes(i.dst);
  auto small = [](Lane v) { return static_cast<std::make_unsigned_t<T>>(Clamp<T>()(static_cast<int32_t>(v))); };
  constexpr int width = 8 * sizeof(T);
  for_lanes(mask, [&](int l) {
    uint64_t above = e ? e[l] << 2 * width : 0;
    d[l] = static_cast<uint32_t>(above | static_cast<uint64_t>(small(a[l])) << width | small(b[l]));
  });
}
void decode_pack(Decoder &d) {
  d.take("sat");
  Type to = d.take_type(), from = d.take_type();
  if (from != Type::S32) d.unsupported("packing of this type");
  d.destination(0);
  d.source(0, 1);
  d.source(1, 2);
  if (d.has(3)) d.take_type(), d.source(2, 3);
  switch (to) {
  case Type::S8: d.out.handler = pack_integers<int8_t>; break;
  case Type::U8: d.out.handler = pack_integers<uint8_t>; break;
  case Type::S16: d.out.handler = pack_integers<int16_t>; break;
  case Type::U16: d.out.handler = pack_integers<uint16_t>; break;
  default: d.unsupported("packing to this type");
  }
}

void decode_cvt(Decoder &d) {
  if (d.take("pack")) return decode_pack(d);
  bool found = false;
  size_t integer_rounding = d.raw.text.find("ni.") != std::string::npos ||
                            d.raw.text.find("zi.") != std::string::npos ||
                            d.raw.text.find("mi.") != std::string::npos || d.raw.text.find("pi.") != std::string::npos;
  Rounding rounding = d.take_rounding(Rounding::NearestEven, &found);
  if (d.take("ftz")) d.out.imm |= kFtz;
  if (d.take("sat")) d.out.imm |= kSaturate;
  if (d.take("relu")) d.out.imm |= kRelu;
  d.take("satfinite");
  Type to = d.take_type(), from = d.take_type();
  d.destination(0);
  d.source(0, 1);
  d.out.size = static_cast<uint8_t>(to);
  d.out.count = static_cast<uint8_t>(from);
  d.out.sync = integer_rounding;
  d.out.mode = static_cast<uint8_t>(rounding);
  bool to_pair = to == Type::F16x2 || to == Type::BF16x2 || to == Type::E4M3x2 || to == Type::E5M2x2;
  if (to == Type::F16x2 && (from == Type::E4M3x2 || from == Type::E5M2x2)) {
    d.out.handler = fp8_pair_to_f16x2;
  } else if (to_pair && from == Type::F16x2) {
    d.out.handler = f16x2_to_fp8_pair;
  } else if (to_pair) {
    if (from != Type::F32 || d.count() < 3) d.unsupported("this packing");
    d.source(1, 2);
    d.out.handler = pack_two;
  } else if (is_float(from) && (is_float(to) || to == Type::TF32)) {
    if (!found && size_of(to) >= size_of(from)) d.out.mode = static_cast<uint8_t>(Rounding::NearestEven);
    d.out.handler = float_to_float;
  } else if (is_float(from)) {
    if (!found) d.unsupported("a float to integer conversion needs a rounding");
    with_integer_type(to, [&](auto t) { d.out.handler = float_to_int<decltype(t)>; });
  } else if (is_float(to)) {
    with_integer_type(from, [&](auto t) {
      using T = decltype(t);
      bool plain = to == Type::F32 && rounding == Rounding::NearestEven && !d.out.imm;
      d.out.handler = plain ? unary<float, T, ToFloatNearest<T>> : int_to_float<T>;
    });
  } else {
    with_integer_type(to, [&](auto t) {
      using To = decltype(t);
      with_integer_type(from, [&](auto f) {
        using From = decltype(f);
        d.out.handler = d.out.imm & kSaturate ? unary<To, From, Clamp<To>> : unary<To, From, Convert<To>>;
      });
    });
  }
  if (Handler fast = fast_conversion(d, to, from, rounding)) d.out.handler = fast;
}

} // namespace

void add_conversion_instructions(DecodeTable &t) { t["cvt"] = decode_cvt; }

} // namespace ptxvm
