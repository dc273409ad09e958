// Bits and logic.
#include "integer.h"

namespace ptxvm {

namespace {

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
    if (kWrap) a &= 31, b &= 31;
    else if (a > 31) return 0;
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

void add_bit_instructions(DecodeTable &t) {
  t["popc"] = [](Decoder &d) {
    operands(d, 1);
    if (d.take_type() == Type::B64) d.out.handler = unary<uint32_t, uint64_t, Popc>;
    else d.out.handler = unary<uint32_t, uint32_t, Popc>;
  };
  t["clz"] = [](Decoder &d) {
    operands(d, 1);
    if (d.take_type() == Type::B64) d.out.handler = unary<uint32_t, uint64_t, Clz>;
    else d.out.handler = unary<uint32_t, uint32_t, Clz>;
  };
  t["brev"] = [](Decoder &d) {
    operands(d, 1);
    if (d.take_type() == Type::B64) d.out.handler = unary<uint64_t, uint64_t, Brev>;
    else d.out.handler = unary<uint32_t, uint32_t, Brev>;
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
    if (d.take_type() == Type::B64) d.out.handler = bfi<uint64_t>;
    else d.out.handler = bfi<uint32_t>;
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
