// Integer arithmetic, bits and logic.
#include "decode.h"

namespace ptxvm {

namespace {

template <class T> using Unsigned = std::make_unsigned_t<T>;
template <class T> constexpr int bits() { return 8 * static_cast<int>(sizeof(T)); }
template <class T> T wrap(Unsigned<T> value) { return static_cast<T>(value); }
template <class T> using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;

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
struct And {
  template <class T> T operator()(T a, T b) const { return a & b; }
};
struct Or {
  template <class T> T operator()(T a, T b) const { return a | b; }
};
struct Xor {
  template <class T> T operator()(T a, T b) const { return a ^ b; }
};
struct Not {
  template <class T> T operator()(T a) const { return static_cast<T>(~a); }
};
struct CNot {
  template <class T> T operator()(T a) const { return a == 0; }
};

struct Popc {
  template <class T> uint32_t operator()(T a) const { return static_cast<uint32_t>(__builtin_popcountll(a)); }
};
struct Clz {
  template <class T> uint32_t operator()(T a) const {
    return a ? static_cast<uint32_t>(__builtin_clzll(a)) - (64 - bits<T>()) : bits<T>();
  }
};
struct Brev {
  template <class T> T operator()(T a) const {
    T r = 0;
    for (int k = 0; k < bits<T>(); k++) r = static_cast<T>(r << 1 | (a >> k & 1));
    return r;
  }
};
template <bool kShift> struct Bfind {
  template <class T> uint32_t operator()(T a) const {
    Unsigned<T> v = a < 0 ? static_cast<Unsigned<T>>(~a) : static_cast<Unsigned<T>>(a);
    if (!v) return ~0u;
    uint32_t top = 63 - static_cast<uint32_t>(__builtin_clzll(v));
    return kShift ? bits<T>() - 1 - top : top;
  }
};

template <class T> void bfe(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *position = c.lanes(i.src[1]), *length = c.lanes(i.src[2]);
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) {
    int pos = position[l] & 0xff, len = length[l] & 0xff;
    T value = narrow<T>(a[l]);
    Unsigned<T> sign = value < 0 ? ~Unsigned<T>(0) : 0; // also fills what lies beyond the top
    Unsigned<T> result = pos >= bits<T>() ? sign : static_cast<Unsigned<T>>(value >> pos);
    if (len == 0) {
      result = 0;
    } else if (len < bits<T>()) {
      Unsigned<T> field = (Unsigned<T>(1) << len) - 1;
      int top = std::min(pos + len - 1, bits<T>() - 1);
      bool negative = std::is_signed_v<T> && (Unsigned<T>(value) >> top & 1);
      result = negative ? result | ~field : result & field;
    }
    d[l] = widen<T>(static_cast<T>(result));
  });
}

template <class T> void bfi(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]), *p = c.lanes(i.src[2]), *n = c.lanes(i.src[3]);
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) {
    int pos = p[l] & 0xff, len = n[l] & 0xff;
    T base = narrow<T>(b[l]);
    T field = len >= bits<T>() ? ~T(0) : static_cast<T>((T(1) << len) - 1);
    d[l] = pos >= bits<T>() ? base : static_cast<T>((base & ~(field << pos)) | ((narrow<T>(a[l]) & field) << pos));
  });
}

template <bool kWrap> struct Bmsk {
  uint32_t operator()(uint32_t a, uint32_t b) const {
    if (kWrap)
      a &= 31, b &= 31;
    else if (a > 31)
      return 0;
    uint32_t ones = b > 31 ? ~0u : (1u << b) - 1;
    return ones << a;
  }
};

struct Shl { // the shift is always 32 bits wide
  template <class T> T operator()(T a, T b) const {
    uint32_t n = static_cast<uint32_t>(b);
    return n >= bits<T>() ? 0 : static_cast<T>(a << n);
  }
};
struct Shr {
  template <class T> T operator()(T a, T b) const {
    uint32_t n = static_cast<uint32_t>(b);
    if (n >= bits<T>()) return a < 0 ? static_cast<T>(-1) : 0;
    return static_cast<T>(a >> n);
  }
};

// Shift counts are .u32 whatever the type, so they are read apart from it.
template <class T, class F> void shift(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *n = c.lanes(i.src[1]);
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) {
    uint32_t count = static_cast<uint32_t>(n[l]);
    T clamped = static_cast<T>(count > 100 ? 100 : count);
    d[l] = widen<T>(F()(narrow<T>(a[l]), clamped));
  });
}

template <bool kLeft, bool kWrap> struct FunnelShift {
  uint32_t operator()(uint32_t low, uint32_t high, uint32_t n) const {
    n = kWrap ? n & 31 : std::min(n, 32u);
    uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    return static_cast<uint32_t>(kLeft ? both << n >> 32 : both >> n);
  }
};

void lop3(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]), *e = c.lanes(i.src[2]);
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) {
    uint32_t x = static_cast<uint32_t>(a[l]), y = static_cast<uint32_t>(b[l]), z = static_cast<uint32_t>(e[l]), r = 0;
    for (int k = 0; k < 8; k++)
      if (i.imm >> k & 1) r |= (k & 4 ? x : ~x) & (k & 2 ? y : ~y) & (k & 1 ? z : ~z);
    d[l] = r;
  });
}

enum PermuteMode { kGeneric, kF4e, kB4e, kRc8, kEcl, kEcr, kRc16 };
template <int kMode> struct Permute {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t selector) const {
    uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    uint32_t result = 0, s = selector & 3;
    for (uint32_t k = 0; k < 4; k++) {
      uint32_t pick = 0;
      switch (kMode) {
      case kGeneric: pick = selector >> 4 * k & 15; break;
      case kF4e: pick = s + k; break;
      case kB4e: pick = (s - k) & 7; break;
      case kRc8: pick = s; break;
      case kEcl: pick = std::max(k, s); break;
      case kEcr: pick = std::min(k, s); break;
      case kRc16: pick = (s & 1) * 2 + (k & 1); break;
      }
      uint32_t byte = both >> 8 * (pick & 7) & 0xff;
      if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
      result |= byte << 8 * k;
    }
    return result;
  }
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
    if (kOp == CarryOp::Sub)
      sum = x - y - carry;
    else if (kOp == CarryOp::Add)
      sum = x + y + carry;
    else if (kOp == CarryOp::MadLow)
      sum = (unsigned __int128)static_cast<U>(x * y) + narrow<U>(e[l]) + carry;
    else
      sum = (unsigned __int128)static_cast<U>(MulHigh()(narrow<T>(a[l]), narrow<T>(b[l]))) + narrow<U>(e[l]) + carry;
    if (writes) c.warp->carry[static_cast<size_t>(l)] = static_cast<uint32_t>(sum >> bits<T>() & 1);
    d[l] = widen<T>(static_cast<T>(sum));
  });
}

template <CarryOp kOp> void decode_carry(Decoder &d, Type type, bool reads) {
  bool writes = d.take("cc");
  d.out.mode = static_cast<uint8_t>((reads ? 1 : 0) | (writes ? 2 : 0));
  with_integer_type(type, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) >= 4)
      d.out.handler = with_carry<T, kOp>;
    else
      d.unsupported("carry in this type");
  });
}

void operands(Decoder &d, int sources) {
  d.destination(0);
  for (int k = 0; k < sources; k++) d.source(k, static_cast<size_t>(k) + 1);
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

// Packed 16-bit integers (sm_90).
template <class T, class F> struct Packed {
  uint32_t operator()(uint32_t a, uint32_t b) const {
    uint32_t low = static_cast<uint16_t>(F()(static_cast<T>(a), static_cast<T>(b)));
    uint32_t high = static_cast<uint16_t>(F()(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
    return high << 16 | low;
  }
};

template <class F> void decode_binary(Decoder &d, Type type) {
  operands(d, 2);
  with_integer_type(type, [&](auto t) { d.out.handler = binary<decltype(t), decltype(t), F>; });
}
template <class F> bool decode_packed(Decoder &d) {
  if (!d.take("u16x2")) {
    if (!d.take("s16x2")) return false;
    operands(d, 2);
    d.out.handler = binary<uint32_t, uint32_t, Packed<int16_t, F>>;
    return true;
  }
  operands(d, 2);
  d.out.handler = binary<uint32_t, uint32_t, Packed<uint16_t, F>>;
  return true;
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

void decode_logic(Decoder &d, Handler on_pred, void (*on_integer)(Decoder &, Type)) {
  Type type = d.take_type();
  if (type != Type::Pred) return on_integer(d, type);
  d.destination(0);
  d.pred_source(0, 1);
  if (d.has(2)) d.pred_source(1, 2);
  d.out.handler = on_pred;
}

template <class F> void pred_logic(Context &c, const Instruction &i, uint32_t mask) {
  uint32_t value = F()(c.pred_source(i, 0), c.pred_source(i, 1));
  uint32_t &d = c.pred(i.dst);
  d = (d & ~mask) | (value & mask);
}
void pred_not(Context &c, const Instruction &i, uint32_t mask) {
  uint32_t &d = c.pred(i.dst);
  d = (d & ~mask) | (~c.pred_source(i, 0) & mask);
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
    if (d.take("sat"))
      d.out.handler = binary<int32_t, int32_t, AddSat>;
    else
      decode_binary<Add>(d, type);
  };
  t["sub"] = [](Decoder &d) {
    Type type = d.take_type();
    if (took_float(d, type)) return;
    operands(d, 2);
    if (d.raw.text.find(".cc") != std::string::npos) return decode_carry<CarryOp::Sub>(d, type, false);
    if (d.take("sat"))
      d.out.handler = binary<int32_t, int32_t, SubSat>;
    else
      decode_binary<Sub>(d, type);
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
    if (d.take_type() == Type::S32)
      d.out.handler = binary<int32_t, int32_t, Mul24>;
    else
      d.out.handler = binary<uint32_t, uint32_t, Mul24>;
  };
  t["div"] = [](Decoder &d) {
    Type type = d.take_type();
    if (!took_float(d, type)) decode_binary<Div>(d, type);
  };
  t["rem"] = [](Decoder &d) { decode_binary<Rem>(d, d.take_type()); };
  t["min"] = [](Decoder &d) {
    if (decode_packed<Min>(d)) return;
    Type type = d.take_type();
    if (!took_float(d, type)) decode_binary<Min>(d, type);
  };
  t["max"] = [](Decoder &d) {
    if (decode_packed<Max>(d)) return;
    Type type = d.take_type();
    if (!took_float(d, type)) decode_binary<Max>(d, type);
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
  t["popc"] = [](Decoder &d) {
    operands(d, 1);
    if (d.take_type() == Type::B64)
      d.out.handler = unary<uint32_t, uint64_t, Popc>;
    else
      d.out.handler = unary<uint32_t, uint32_t, Popc>;
  };
  t["clz"] = [](Decoder &d) {
    operands(d, 1);
    if (d.take_type() == Type::B64)
      d.out.handler = unary<uint32_t, uint64_t, Clz>;
    else
      d.out.handler = unary<uint32_t, uint32_t, Clz>;
  };
  t["brev"] = [](Decoder &d) {
    operands(d, 1);
    if (d.take_type() == Type::B64)
      d.out.handler = unary<uint64_t, uint64_t, Brev>;
    else
      d.out.handler = unary<uint32_t, uint32_t, Brev>;
  };
  t["bfind"] = [](Decoder &d) {
    operands(d, 1);
    bool shift_amount = d.take("shiftamt");
    with_integer_type(d.take_type(), [&](auto v) {
      using T = decltype(v);
      d.out.handler =
          shift_amount ? Handler(unary<uint32_t, T, Bfind<true>>) : Handler(unary<uint32_t, T, Bfind<false>>);
    });
  };
  t["bfe"] = [](Decoder &d) {
    operands(d, 3);
    with_integer_type(d.take_type(), [&](auto v) {
      if constexpr (sizeof(v) >= 4) d.out.handler = bfe<decltype(v)>;
    });
  };
  t["bfi"] = [](Decoder &d) {
    operands(d, 4);
    if (d.take_type() == Type::B64)
      d.out.handler = bfi<uint64_t>;
    else
      d.out.handler = bfi<uint32_t>;
  };
  t["bmsk"] = [](Decoder &d) {
    operands(d, 2);
    d.take_type();
    bool wrap_around = d.take("wrap");
    d.take("clamp");
    d.out.handler = wrap_around ? Handler(binary<uint32_t, uint32_t, Bmsk<true>>)
                                : Handler(binary<uint32_t, uint32_t, Bmsk<false>>);
  };
  t["and"] = [](Decoder &d) { decode_logic(d, pred_logic<And>, decode_binary<And>); };
  t["or"] = [](Decoder &d) { decode_logic(d, pred_logic<Or>, decode_binary<Or>); };
  t["xor"] = [](Decoder &d) { decode_logic(d, pred_logic<Xor>, decode_binary<Xor>); };
  t["not"] = [](Decoder &d) {
    decode_logic(d, pred_not, [](Decoder &e, Type type) {
      operands(e, 1);
      with_integer_type(type, [&](auto v) { e.out.handler = unary<decltype(v), decltype(v), Not>; });
    });
  };
  t["cnot"] = [](Decoder &d) {
    operands(d, 1);
    with_integer_type(d.take_type(), [&](auto v) { d.out.handler = unary<decltype(v), decltype(v), CNot>; });
  };
  t["lop3"] = [](Decoder &d) {
    d.take_type();
    operands(d, 3);
    d.out.imm = d.operand(4).value;
    d.out.handler = lop3;
  };
  t["shl"] = [](Decoder &d) {
    operands(d, 2);
    with_integer_type(d.take_type(), [&](auto v) { d.out.handler = shift<decltype(v), Shl>; });
  };
  t["shr"] = [](Decoder &d) {
    operands(d, 2);
    with_integer_type(d.take_type(), [&](auto v) { d.out.handler = shift<decltype(v), Shr>; });
  };
  t["shf"] = [](Decoder &d) {
    operands(d, 3);
    d.take_type();
    bool left = d.take("l"), wraps = d.take("wrap");
    d.take("r"), d.take("clamp");
    d.out.handler = left ? (wraps ? Handler(ternary<uint32_t, uint32_t, FunnelShift<true, true>>)
                                  : Handler(ternary<uint32_t, uint32_t, FunnelShift<true, false>>))
                         : (wraps ? Handler(ternary<uint32_t, uint32_t, FunnelShift<false, true>>)
                                  : Handler(ternary<uint32_t, uint32_t, FunnelShift<false, false>>));
  };
  t["prmt"] = [](Decoder &d) {
    operands(d, 3);
    d.take_type();
    static const Handler handlers[] = {
        ternary<uint32_t, uint32_t, Permute<kF4e>>, ternary<uint32_t, uint32_t, Permute<kB4e>>,
        ternary<uint32_t, uint32_t, Permute<kRc8>>, ternary<uint32_t, uint32_t, Permute<kEcl>>,
        ternary<uint32_t, uint32_t, Permute<kEcr>>, ternary<uint32_t, uint32_t, Permute<kRc16>>};
    int mode = d.take_one_of({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"});
    d.out.handler = mode < 0 ? Handler(ternary<uint32_t, uint32_t, Permute<kGeneric>>) : handlers[mode];
  };
}

} // namespace ptxvm
