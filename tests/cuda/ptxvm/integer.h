// What integer arithmetic and bit operations share.
#pragma once
#include "decode.h"
#include <algorithm>

namespace ptxvm {

template <class T> using Unsigned = std::make_unsigned_t<T>;
template <class T> constexpr int bits() { return 8 * static_cast<int>(sizeof(T)); }
template <class T> T wrap(Unsigned<T> value) { return static_cast<T>(value); }
template <class T> using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;

inline void operands(Decoder &d, int sources) {
  d.destination(0);
  for (int k = 0; k < sources; k++) d.source(k, static_cast<size_t>(k) + 1);
}

template <class F> void decode_binary(Decoder &d, Type type) {
  operands(d, 2);
  with_integer_type(type, [&](auto t) { d.out.handler = binary<decltype(t), decltype(t), F>; });
}

} // namespace ptxvm
