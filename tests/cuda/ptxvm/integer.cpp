// Integer arithmetic.
#include "integer.h"

namespace ptxvm {

namespace {

struct Add {
  template <class T> T operator()(T a, T b) const { return wrap<T>(Unsigned<T>(Unsigned<T>(a) + Unsigned<T>(b))); }
};
struct Sub {
  template <class T> T operator()(T a, T b) const { return wrap<T>(Unsigned<T>(Unsigned<T>(a) - Unsigned<T>(b))); }
};
struct MulLow {
  template <class T> T operator()(T a, T b) const { return static_cast<T>(uint64_t(a) * uint64_t(b)); }
};
struct MulHigh {
  template <class T> T operator()(T a, T b) const { return static_cast<T>((Wide<T>(a) * Wide<T>(b)) >> bits<T>()); }
};
struct MulWide {
  template <class T> auto operator()(T a, T b) const {
    using Result = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return static_cast<Result>(Result(a) * Result(b));
  }
};
struct Mul24 {
  template <class T> T operator()(T a, T b) const {
    auto low = [](T v) { return std::is_signed_v<T> ? T(Unsigned<T>(v) << 8) >> 8 : T(v & 0xffffff); };
    return static_cast<T>(int64_t(low(a)) * int64_t(low(b)));
  }
};
template <class M> struct MulAdd {
  template <class T> T operator()(T a, T b, T c) const { return Add()(M()(a, b), c); }
};
struct Div {
  template <class T> T operator()(T a, T b) const {
    if (b == 0) return static_cast<T>(-1); // what the hardware's sequence gives
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return wrap<T>(Unsigned<T>(0 - Unsigned<T>(a)));
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <class T> T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
struct Min {
  template <class T> T operator()(T a, T b) const { return a < b ? a : b; }
};
struct Max {
  template <class T> T operator()(T a, T b) const { return a > b ? a : b; }
};
struct Abs {
  template <class T> T operator()(T a) const { return a < 0 ? wrap<T>(Unsigned<T>(0 - Unsigned<T>(a))) : a; }
};
struct Neg {
  template <class T> T operator()(T a) const { return wrap<T>(Unsigned<T>(0 - Unsigned<T>(a))); }
};
struct Sad {
  template <class T> T operator()(T a, T b, T c) const { return Add()(c, a > b ? Sub()(a, b) : Sub()(b, a)); }
};
// add.cc, addc, sub.cc, subc, mad.cc, madc: the condition code is the lane's own carry.
enum class CarryOp : uint8_t { Add, Sub, MadLow, MadHigh };
template <class T, CarryOp kOp> void with_carry(Context &c, const Instruction &i, uint32_t mask) {
  const bool reads = i.mode & 1, writes = i.mode & 2;
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]);
  const Lane *e = kOp == CarryOp::MadLow || kOp == CarryOp::MadHigh ? c.lanes(i.src[2]) : a;
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) {
    using U = Unsigned<T>;
    unsigned __int128 x = narrow<U>(a[l]), y = narrow<U>(b[l]),
                      carry = reads ? c.warp->carry[static_cast<size_t>(l)] : 0;
    unsigned __int128 sum;
    if (kOp == CarryOp::Sub) sum = x - y - carry;
    else if (kOp == CarryOp::Add) sum = x + y + carry;
    else if (kOp == CarryOp::MadLow) sum = (unsigned __int128)static_cast<U>(x * y) + narrow<U>(e[l]) + carry;
    else sum = (unsigned __int128)static_cast<U>(MulHigh()(narrow<T>(a[l]), narrow<T>(b[l]))) + narrow<U>(e[l]) + carry;
    if (writes) c.warp->carry[static_cast<size_t>(l)] = static_cast<uint32_t>(sum >> bits<T>() & 1);
    d[l] = widen<T>(static_cast<T>(sum));
  });
}

template <CarryOp kOp> void decode_carry(Decoder &d, Type type, bool reads) {
  bool writes = d.take("cc");
  d.out.mode = static_cast<uint8_t>((reads ? 1 : 0) | (writes ? 2 : 0));
  with_integer_type(type, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) >= 4) d.out.handler = with_carry<T, kOp>;
    else d.unsupported("carry in this type");
  });
}

struct AddSat {
  int32_t operator()(int32_t a, int32_t b) const {
    return static_cast<int32_t>(std::min(std::max(int64_t(a) + b, int64_t(INT32_MIN)), int64_t(INT32_MAX)));
  }
};
struct SubSat {
  int32_t operator()(int32_t a, int32_t b) const {
    return static_cast<int32_t>(std::min(std::max(int64_t(a) - b, int64_t(INT32_MIN)), int64_t(INT32_MAX)));
  }
};

template <class F> struct AtLeastZero {
  template <class T> T operator()(T a, T b) const { return std::max(F()(a, b), T(0)); }
};

// Packed 16-bit integers (sm_90).
template <class T, class F> struct Packed {
  uint32_t operator()(uint32_t a, uint32_t b) const {
    uint32_t low = static_cast<uint16_t>(F()(static_cast<T>(a), static_cast<T>(b)));
    uint32_t high = static_cast<uint16_t>(F()(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
    return high << 16 | low;
  }
};

template <class F> bool decode_packed(Decoder &d) {
  if (!d.take("u16x2")) {
    if (!d.take("s16x2")) return false;
    operands(d, 2);
    d.out.handler = d.take("relu") ? Handler(binary<uint32_t, uint32_t, Packed<int16_t, AtLeastZero<F>>>)
                                   : Handler(binary<uint32_t, uint32_t, Packed<int16_t, F>>);
    return true;
  }
  operands(d, 2);
  d.out.handler = binary<uint32_t, uint32_t, Packed<uint16_t, F>>;
  return true;
}

template <class F> void decode_extreme(Decoder &d, Type type) {
  if (!d.take("relu")) return decode_binary<F>(d, type);
  if (type != Type::S32) d.unsupported("relu of this type");
  operands(d, 2);
  d.out.handler = binary<int32_t, int32_t, AtLeastZero<F>>;
}

void decode_multiply(Decoder &d, Type type, bool adds) {
  int part = d.take_one_of({"lo", "hi", "wide"});
  operands(d, adds ? 3 : 2);
  with_integer_type(type, [&](auto t) {
    using T = decltype(t);
    if (part == 2) {
      if constexpr (sizeof(T) <= 4) {
        using R = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
        d.out.handler = adds ? [](Context &c, const Instruction &i, uint32_t mask) {
          const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]), *e = c.lanes(i.src[2]);
          Lane *o = c.lanes(i.dst);
          for_lanes(mask, [&](int l) {
            R product = MulWide()(narrow<T>(a[l]), narrow<T>(b[l]));
            o[l] = sizeof(T) == 4 ? static_cast<Lane>(product) + e[l]
                                  : widen<uint32_t>(static_cast<uint32_t>(static_cast<Lane>(product) + e[l]));
          });
        } : Handler(binary<R, T, MulWide>);
      } else {
        d.unsupported("wide of 64 bits");
      }
    } else if (part == 1) {
      d.out.handler = adds ? Handler(ternary<T, T, MulAdd<MulHigh>>) : Handler(binary<T, T, MulHigh>);
    } else {
      d.out.handler = adds ? Handler(ternary<T, T, MulAdd<MulLow>>) : Handler(binary<T, T, MulLow>);
    }
  });
}

} // namespace

// Instructions that exist for integers and floats alike are decided here by type; floats go to float.cpp.
void decode_float_arithmetic(Decoder &d, Type type);

static bool took_float(Decoder &d, Type type) {
  bool yes = is_float(type) || type == Type::F16x2 || type == Type::BF16x2;
  if (yes) decode_float_arithmetic(d, type);
  return yes;
}

void add_integer_instructions(DecodeTable &t) {
  t["add"] = [](Decoder &d) {
    if (decode_packed<Add>(d)) return;
    Type type = d.take_type();
    if (took_float(d, type)) return;
    operands(d, 2);
    if (d.raw.text.find(".cc") != std::string::npos) return decode_carry<CarryOp::Add>(d, type, false);
    if (d.take("sat")) d.out.handler = binary<int32_t, int32_t, AddSat>;
    else decode_binary<Add>(d, type);
  };
  t["sub"] = [](Decoder &d) {
    Type type = d.take_type();
    if (took_float(d, type)) return;
    operands(d, 2);
    if (d.raw.text.find(".cc") != std::string::npos) return decode_carry<CarryOp::Sub>(d, type, false);
    if (d.take("sat")) d.out.handler = binary<int32_t, int32_t, SubSat>;
    else decode_binary<Sub>(d, type);
  };
  t["addc"] = [](Decoder &d) { operands(d, 2), decode_carry<CarryOp::Add>(d, d.take_type(), true); };
  t["subc"] = [](Decoder &d) { operands(d, 2), decode_carry<CarryOp::Sub>(d, d.take_type(), true); };
  t["madc"] = [](Decoder &d) {
    operands(d, 3);
    if (d.take("hi")) return decode_carry<CarryOp::MadHigh>(d, d.take_type(), true);
    d.take("lo");
    decode_carry<CarryOp::MadLow>(d, d.take_type(), true);
  };
  t["mul"] = [](Decoder &d) {
    Type type = d.take_type();
    if (!took_float(d, type)) decode_multiply(d, type, false);
  };
  t["mad"] = [](Decoder &d) {
    Type type = d.take_type();
    if (took_float(d, type)) return;
    if (d.raw.text.find(".cc") == std::string::npos) return decode_multiply(d, type, true);
    operands(d, 3);
    if (d.take("hi")) return decode_carry<CarryOp::MadHigh>(d, type, false);
    d.take("lo");
    decode_carry<CarryOp::MadLow>(d, type, false);
  };
  t["mul24"] = [](Decoder &d) {
    d.take("lo");
    operands(d, 2);
    if (d.take_type() == Type::S32) d.out.handler = binary<int32_t, int32_t, Mul24>;
    else d.out.handler = binary<uint32_t, uint32_t, Mul24>;
  };
  t["div"] = [](Decoder &d) {
    Type type = d.take_type();
    if (!took_float(d, type)) decode_binary<Div>(d, type);
  };
  t["rem"] = [](Decoder &d) { decode_binary<Rem>(d, d.take_type()); };
  t["min"] = [](Decoder &d) {
    if (decode_packed<Min>(d)) return;
    Type type = d.take_type();
    if (!took_float(d, type)) decode_extreme<Min>(d, type);
  };
  t["max"] = [](Decoder &d) {
    if (decode_packed<Max>(d)) return;
    Type type = d.take_type();
    if (!took_float(d, type)) decode_extreme<Max>(d, type);
  };
  t["abs"] = [](Decoder &d) {
    Type type = d.take_type();
    if (took_float(d, type)) return;
    operands(d, 1);
    with_integer_type(type, [&](auto v) { d.out.handler = unary<decltype(v), decltype(v), Abs>; });
  };
  t["neg"] = [](Decoder &d) {
    Type type = d.take_type();
    if (took_float(d, type)) return;
    operands(d, 1);
    with_integer_type(type, [&](auto v) { d.out.handler = unary<decltype(v), decltype(v), Neg>; });
  };
  t["sad"] = [](Decoder &d) {
    operands(d, 3);
    with_integer_type(d.take_type(), [&](auto v) { d.out.handler = ternary<decltype(v), decltype(v), Sad>; });
  };
}

} // namespace ptxvm
