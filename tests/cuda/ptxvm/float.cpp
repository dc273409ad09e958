// Floating-point arithmetic in f64, f32, f16, bf16 and the packed pairs of the last two.
#include "decode.h"
#include <algorithm>

namespace ptxvm {

namespace {

enum Flag : uint8_t { kFtz = 1, kSaturate = 2, kRelu = 4, kNanPropagates = 8, kXorSign = 16 };

float saturate(float v) { return v > 0 ? std::min(v, 1.0f) : 0.0f; } // NaN and -0 give +0
double saturate(double v) { return v > 0 ? std::min(v, 1.0) : 0.0; }
double flush(double v) { return v; } // f64 has no flushing
using ptxvm::flush;
template <bool kFlush, class T> T flushed(T v) { return kFlush ? flush(v) : v; }

// ---- f32 and f64, rounded to nearest: one functor an operation.

struct Add {
  template <class T> T operator()(T a, T b) const { return a + b; }
};
struct Sub {
  template <class T> T operator()(T a, T b) const { return a - b; }
};
struct Mul {
  template <class T> T operator()(T a, T b) const { return a * b; }
};
struct Div {
  template <class T> T operator()(T a, T b) const { return a / b; }
};
struct Fma {
  template <class T> T operator()(T a, T b, T c) const { return std::fma(a, b, c); }
};
template <bool kLargest> struct Extreme {
  template <class T> T operator()(T a, T b) const {
    if (a != a) return b;
    if (b != b) return a;
    if (a == b) return std::signbit(a) == kLargest ? b : a; // -0 < +0
    return (a < b) == kLargest ? b : a;
  }
};
struct Rcp {
  template <class T> T operator()(T a) const { return T(1) / a; }
};
struct Sqrt {
  template <class T> T operator()(T a) const { return std::sqrt(a); }
};
struct Rsqrt {
  template <class T> T operator()(T a) const { return static_cast<T>(1.0 / std::sqrt(static_cast<double>(a))); }
};
struct Sin {
  template <class T> T operator()(T a) const { return static_cast<T>(std::sin(static_cast<double>(a))); }
};
struct Cos {
  template <class T> T operator()(T a) const { return static_cast<T>(std::cos(static_cast<double>(a))); }
};
struct Exp2 {
  template <class T> T operator()(T a) const { return static_cast<T>(std::exp2(static_cast<double>(a))); }
};
struct Log2 {
  template <class T> T operator()(T a) const { return static_cast<T>(std::log2(static_cast<double>(a))); }
};
struct Tanh {
  template <class T> T operator()(T a) const { return static_cast<T>(std::tanh(static_cast<double>(a))); }
};

template <class F, bool kFlush> struct Flushing {
  template <class T> T operator()(T a) const { return flushed<kFlush>(F()(flushed<kFlush>(a))); }
  template <class T> T operator()(T a, T b) const {
    return flushed<kFlush>(F()(flushed<kFlush>(a), flushed<kFlush>(b)));
  }
  template <class T> T operator()(T a, T b, T c) const {
    return flushed<kFlush>(F()(flushed<kFlush>(a), flushed<kFlush>(b), flushed<kFlush>(c)));
  }
};

// Anything but plain round-to-nearest goes the slow way: rounding in i.mode, flags in i.imm.
template <class T, FloatOp kOp> void rounded(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  const Lane *b = i.src[1].exists() ? c.lanes(i.src[1]) : a, *e = i.src[2].exists() ? c.lanes(i.src[2]) : a;
  Lane *d = c.lanes(i.dst);
  auto in = [&](Lane v) { return i.imm & kFtz ? flush(narrow<T>(v)) : narrow<T>(v); };
  for_lanes(mask, [&](int l) {
    T value = rounded_op(kOp, in(a[l]), in(b[l]), in(e[l]), static_cast<Rounding>(i.mode));
    if (i.imm & kSaturate) value = saturate(value);
    d[l] = widen<T>(i.imm & kFtz ? flush(value) : value);
  });
}

template <class T> void extreme_nan(Context &c, const Instruction &i, uint32_t mask) { // .NaN and .xorsign.abs
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]);
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) {
    T x = narrow<T>(a[l]), y = narrow<T>(b[l]);
    if (i.imm & kFtz) x = flush(x), y = flush(y);
    bool sign = std::signbit(x) != std::signbit(y), nan = x != x || y != y;
    if (i.imm & kXorSign) x = std::fabs(x), y = std::fabs(y);
    T value = i.mode ? Extreme<true>()(x, y) : Extreme<false>()(x, y);
    if (i.imm & kXorSign) value = sign ? -value : value;
    if ((i.imm & kNanPropagates) && nan) value = std::numeric_limits<T>::quiet_NaN();
    d[l] = widen<T>(value);
  });
}

// Sign operations keep NaN payloads.
template <class U, bool kNegate> void sign_change(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  Lane *d = c.lanes(i.dst);
  const U signs = static_cast<U>(i.target); // sign-extended mask of sign bits
  for_lanes(mask, [&](int l) { d[l] = static_cast<U>(kNegate ? narrow<U>(a[l]) ^ signs : narrow<U>(a[l]) & ~signs); });
}
template <class T, bool kNegate> void sign_change_real(Context &c, const Instruction &i, uint32_t mask) {
  using U = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  const U sign = U(1) << (8 * sizeof(T) - 1);
  const Lane *a = c.lanes(i.src[0]);
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) {
    U bits = narrow<U>(a[l]);
    if (i.imm & kFtz) {
      T value = flush(bits_as<T>(bits));
      bits = bits_as<U>(value);
    }
    d[l] = kNegate ? bits ^ sign : bits & ~sign;
  });
}

// ---- f16 and bf16. Arithmetic in f32 and one more rounding is exact enough for everything but fma, which is rounded
// to odd first.

struct HalfFormat {
  static float decode(uint64_t bits) { return static_cast<float>(f16_of(bits)); }
  static uint64_t encode(float value) { return f16_bits_nearest(value); }
};
struct BrainFormat {
  static float decode(uint64_t bits) { return f32_of((bits & 0xffff) << 16); }
  static uint64_t encode(float value) { return bf16_bits_nearest(value); }
};

float narrow_to_odd(double value) {
  float result = static_cast<float>(value);
  if (static_cast<double>(result) == value || value != value) return result;
  uint32_t bits = bits_as<uint32_t>(result);
  if (std::fabs(static_cast<double>(result)) > std::fabs(value)) bits--; // back to truncation
  return bits_as<float>(bits | 1);
}

struct HalfFma {
  float operator()(float a, float b, float c) const {
    double product = static_cast<double>(a) * static_cast<double>(b);
    return narrow_to_odd(add_to_odd(product, static_cast<double>(c)));
  }
};

template <class Format> uint64_t finish_half(const Instruction &i, float value) {
  if (i.imm & kSaturate) value = saturate(value);
  if ((i.imm & kRelu) && value <= 0) value = 0; // -0 too: +0 is the larger
  return Format::encode(value);
}

template <class Format, class F, int kParts, int kSources> void half(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = kSources > 1 ? c.lanes(i.src[1]) : a,
             *e = kSources > 2 ? c.lanes(i.src[2]) : a;
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) {
    uint64_t result = 0;
    for (int part = 0; part < kParts; part++) {
      int shift = 16 * part;
      float x = Format::decode(a[l] >> shift), value;
      if constexpr (kSources == 1) value = F()(x);
      else if constexpr (kSources == 2) value = F()(x, Format::decode(b[l] >> shift));
      else value = F()(x, Format::decode(b[l] >> shift), Format::decode(e[l] >> shift));
      result |= finish_half<Format>(i, value) << shift;
    }
    d[l] = result;
  });
}

template <bool kLargest> struct HalfExtremeNan {
  float operator()(float a, float b) const {
    return a != a || b != b ? std::numeric_limits<float>::quiet_NaN() : Extreme<kLargest>()(a, b);
  }
};

template <class F, int kSources> Handler half_handler(Type type) {
  switch (type) {
  case Type::F16: return half<HalfFormat, F, 1, kSources>;
  case Type::F16x2: return half<HalfFormat, F, 2, kSources>;
  case Type::BF16: return half<BrainFormat, F, 1, kSources>;
  case Type::BF16x2: return half<BrainFormat, F, 2, kSources>;
  default: throw Unsupported("this type");
  }
}

bool is_half(Type t) { return t == Type::F16 || t == Type::F16x2 || t == Type::BF16 || t == Type::BF16x2; }

void take_flags(Decoder &d) {
  if (d.take("ftz")) d.out.imm |= kFtz;
  if (d.take("sat")) d.out.imm |= kSaturate;
  if (d.take("relu")) d.out.imm |= kRelu;
  if (d.take("NaN")) d.out.imm |= kNanPropagates;
  if (d.take("xorsign")) d.out.imm |= kXorSign, d.take("abs");
}

template <class F, FloatOp kOp, int kSources> void decode_arithmetic(Decoder &d, Type type) {
  Rounding rounding = d.take_rounding(Rounding::NearestEven);
  d.out.mode = static_cast<uint8_t>(rounding);
  bool slow = rounding != Rounding::NearestEven || (d.out.imm & kSaturate);
  auto pick = [&](auto t, auto flushing) -> Handler {
    using T = decltype(t);
    using G = Flushing<F, decltype(flushing)::value>;
    if constexpr (kSources == 1) return unary<T, T, G>;
    else if constexpr (kSources == 2) return binary<T, T, G>;
    else return ternary<T, T, G>;
  };
  if (type == Type::F32) {
    bool ftz = d.out.imm & kFtz;
    d.out.handler = slow  ? rounded<float, kOp>
                    : ftz ? pick(float(), std::true_type())
                          : pick(float(), std::false_type());
  } else if (type == Type::F64) {
    d.out.handler = slow ? rounded<double, kOp> : pick(double(), std::false_type());
  } else if constexpr (std::is_same_v<F, Fma>) {
    d.out.handler = half_handler<HalfFma, kSources>(type);
  } else {
    d.out.handler = half_handler<F, kSources>(type);
  }
}

template <bool kLargest> void decode_extreme(Decoder &d, Type type) {
  d.out.mode = kLargest;
  bool special = d.out.imm & (kNanPropagates | kXorSign);
  if (is_half(type)) {
    if (d.out.imm & kXorSign) d.unsupported("xorsign of half precision");
    d.out.handler =
        special ? half_handler<HalfExtremeNan<kLargest>, 2>(type) : half_handler<Extreme<kLargest>, 2>(type);
  } else if (type == Type::F32) {
    d.out.handler = special              ? extreme_nan<float>
                    : (d.out.imm & kFtz) ? binary<float, float, Flushing<Extreme<kLargest>, true>>
                                         : binary<float, float, Extreme<kLargest>>;
  } else {
    d.out.handler = binary<double, double, Extreme<kLargest>>;
  }
}

template <bool kNegate> void decode_sign(Decoder &d, Type type) {
  if (type == Type::F32) d.out.handler = sign_change_real<float, kNegate>;
  else if (type == Type::F64) d.out.handler = sign_change_real<double, kNegate>;
  else {
    bool packed = type == Type::F16x2 || type == Type::BF16x2;
    d.out.target = static_cast<int32_t>(packed ? 0x80008000u : 0x8000u);
    d.out.handler = packed ? sign_change<uint32_t, kNegate> : sign_change<uint16_t, kNegate>;
  }
}

template <class F> void decode_approximation(Decoder &d) {
  Type type = d.take_type();
  d.destination(0);
  d.source(0, 1);
  d.ignore({"approx"});
  take_flags(d);
  d.out.mode = static_cast<uint8_t>(d.take_rounding(Rounding::NearestEven));
  if (type == Type::F32)
    d.out.handler = d.out.imm & kFtz ? unary<float, float, Flushing<F, true>> : unary<float, float, F>;
  else if (type == Type::F64) d.out.handler = unary<double, double, F>;
  else d.out.handler = half_handler<F, 1>(type);
}

template <class F, FloatOp kOp> void decode_root(Decoder &d) { // rcp and sqrt also come correctly rounded
  Type type = d.take_type();
  d.destination(0);
  d.source(0, 1);
  d.ignore({"approx"});
  take_flags(d);
  decode_arithmetic<F, kOp, 1>(d, type);
}

template <class T> void copysign_lanes(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]); // the sign comes from the first
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) {
    T value = std::copysign(narrow<T>(b[l]), narrow<T>(a[l]));
    d[l] =
        sizeof(T) == 4 ? bits_as<uint32_t>(static_cast<float>(value)) : bits_as<uint64_t>(static_cast<double>(value));
  });
}

enum { kFinite, kInfinite, kNumber, kNotANumber, kNormal, kSubnormal };
template <class T> void testp(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  uint32_t result = 0;
  for_lanes(mask, [&](int l) {
    T v = narrow<T>(a[l]);
    bool yes = i.mode == kFinite       ? std::isfinite(v)
               : i.mode == kInfinite   ? std::isinf(v)
               : i.mode == kNumber     ? v == v
               : i.mode == kNotANumber ? v != v
               : i.mode == kNormal     ? std::isnormal(v)
                                       : std::fpclassify(v) == FP_SUBNORMAL;
    result |= static_cast<uint32_t>(yes) << l;
  });
  uint32_t &d = c.pred(i.dst);
  d = (d & ~mask) | result;
}

} // namespace

void decode_float_arithmetic(Decoder &d, Type type) {
  const std::string &op = d.opcode;
  bool one = op == "abs" || op == "neg", three = op == "fma" || op == "mad";
  d.destination(0);
  for (int k = 0; k < (one ? 1 : three ? 3 : 2); k++) d.source(k, static_cast<size_t>(k) + 1);
  take_flags(d);
  if (op == "add") decode_arithmetic<Add, FloatOp::Add, 2>(d, type);
  else if (op == "sub") decode_arithmetic<Sub, FloatOp::Sub, 2>(d, type);
  else if (op == "mul") decode_arithmetic<Mul, FloatOp::Mul, 2>(d, type);
  else if (op == "div") d.ignore({"full", "approx"}), decode_arithmetic<Div, FloatOp::Div, 2>(d, type);
  else if (three) decode_arithmetic<Fma, FloatOp::Fma, 3>(d, type);
  else if (op == "min") decode_extreme<false>(d, type);
  else if (op == "max") decode_extreme<true>(d, type);
  else if (op == "abs") decode_sign<false>(d, type);
  else decode_sign<true>(d, type);
}

void add_float_instructions(DecodeTable &t) {
  t["fma"] = [](Decoder &d) { decode_float_arithmetic(d, d.take_type()); };
  t["rcp"] = decode_root<Rcp, FloatOp::Rcp>;
  t["sqrt"] = decode_root<Sqrt, FloatOp::Sqrt>;
  t["rsqrt"] = decode_approximation<Rsqrt>;
  t["sin"] = decode_approximation<Sin>;
  t["cos"] = decode_approximation<Cos>;
  t["ex2"] = decode_approximation<Exp2>;
  t["lg2"] = decode_approximation<Log2>;
  t["tanh"] = decode_approximation<Tanh>;
  t["copysign"] = [](Decoder &d) {
    d.destination(0);
    d.source(0, 1);
    d.source(1, 2);
    d.out.handler = d.take_type() == Type::F32 ? copysign_lanes<float> : copysign_lanes<double>;
  };
  t["testp"] = [](Decoder &d) {
    d.destination(0);
    d.source(0, 1);
    int mode = d.take_one_of({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
    if (mode < 0) d.unsupported("which test");
    d.out.mode = static_cast<uint8_t>(mode);
    d.out.handler = d.take_type() == Type::F32 ? testp<float> : testp<double>;
  };
}

} // namespace ptxvm
