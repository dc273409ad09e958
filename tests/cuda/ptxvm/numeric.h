// Number formats: bits to values and back, with every rounding PTX knows.
#pragma once
#include "ptx.h"
#include <cmath>
#include <cstring>
#include <limits>

namespace ptxvm {

enum class Rounding : uint8_t { NearestEven, Zero, Down, Up, NearestAway };

template <class To, class From> inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits_as needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float f32_of(uint64_t bits) { return bits_as<float>(static_cast<uint32_t>(bits)); }
inline double f64_of(uint64_t bits) { return bits_as<double>(bits); }
inline uint64_t bits_of(float value) { return value != value ? 0x7fffffffu : bits_as<uint32_t>(value); }
inline uint64_t bits_of(double value) { return value != value ? 0x7fffffffffffffffull : bits_as<uint64_t>(value); }

struct FloatFormat {
  int mantissa_bits, min_exponent, max_exponent;
  bool has_infinity;
};
constexpr FloatFormat kF16{10, -14, 15, true}, kBF16{7, -126, 127, true}, kTF32{10, -126, 127, true};
constexpr FloatFormat kE4M3{3, -6, 8, false}, kE5M2{2, -14, 15, true};

// Encodes `value`, which must be exact or rounded to odd in double, by rounding once.
uint32_t encode_float(double value, const FloatFormat &format, Rounding rounding, bool saturate_finite);
double decode_float(uint32_t bits, const FloatFormat &format);

inline double f16_of(uint64_t bits) {
#ifdef __FLT16_MAX__
  return static_cast<double>(bits_as<_Float16>(static_cast<uint16_t>(bits)));
#else
  return decode_float(static_cast<uint32_t>(bits & 0xffff), kF16);
#endif
}
inline double bf16_of(uint64_t bits) { return static_cast<double>(f32_of((bits & 0xffff) << 16)); }
inline uint64_t f16_bits(double value, Rounding rounding = Rounding::NearestEven) {
  return encode_float(value, kF16, rounding, false);
}
inline uint64_t bf16_bits(double value, Rounding rounding = Rounding::NearestEven) {
  return encode_float(value, kBF16, rounding, false);
}

// From f32 to nearest even, the case that matters for speed.
inline uint64_t f16_bits_nearest(float value) {
  if (value != value) return 0x7fff;
#ifdef __FLT16_MAX__
  return bits_as<uint16_t>(static_cast<_Float16>(value));
#else
  return f16_bits(static_cast<double>(value));
#endif
}
inline uint64_t bf16_bits_nearest(float value) {
  if (value != value) return 0x7fff;
  uint32_t bits = bits_as<uint32_t>(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float flush(float value) {
  return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
}

// a + b and a * b + c in double, rounded to odd: rounding such a result again, to fewer than 52 bits, is correct.
double add_to_odd(double a, double b);
inline double fma_to_odd_small(double a, double b, double c) { return add_to_odd(a * b, c); } // a * b must be exact

// Single operations under a given rounding.
enum class FloatOp : uint8_t { Add, Sub, Mul, Div, Fma, Sqrt, Rcp };
float rounded_op(FloatOp op, float a, float b, float c, Rounding rounding);
double rounded_op(FloatOp op, double a, double b, double c, Rounding rounding);
float to_f32(double value, Rounding rounding);
float to_f32(int64_t value, Rounding rounding);
float to_f32(uint64_t value, Rounding rounding);
double to_f64(int64_t value, Rounding rounding);
double to_f64(uint64_t value, Rounding rounding);
double round_to_integer(double value, Rounding rounding);

} // namespace ptxvm
