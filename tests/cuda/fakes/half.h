// f16 and bf16 as numbers, rounded to nearest even.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ptxvm {

inline float half_value(uint16_t h) {
  int exponent = h >> 10 & 31, fraction = h & 1023;
  float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                : exponent     ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25)
                               : std::ldexp(static_cast<float>(fraction), -24);
  return h & 0x8000 ? -value : value;
}
inline uint16_t half_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  float magnitude = std::fabs(value);
  if (value != value) return 0x7fff;
  if (magnitude == 0) return sign;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  int exponent;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent - 1, -14);
  int scaled =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent))); // a carry reaches the exponent by itself
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + scaled));
}
inline float brain_value(uint16_t b) {
  uint32_t bits = static_cast<uint32_t>(b) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint16_t brain_bits(float value) {
  if (value != value) return 0x7fff;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

} // namespace ptxvm
