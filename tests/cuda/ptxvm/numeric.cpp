// Compiled with -frounding-math: the operations below run under the rounding that was asked for.
#include "numeric.h"
#include <cfenv>

namespace ptxvm {

static double round_magnitude(double magnitude, bool negative, Rounding rounding) {
  double down = std::floor(magnitude), rest = magnitude - down;
  bool up = false;
  switch (rounding) {
  case Rounding::NearestEven: up = rest > 0.5 || (rest == 0.5 && std::fmod(down, 2.0) != 0); break;
  case Rounding::NearestAway: up = rest >= 0.5; break;
  case Rounding::Zero: break;
  case Rounding::Down: up = rest > 0 && negative; break;
  case Rounding::Up: up = rest > 0 && !negative; break;
  }
  return up ? down + 1 : down;
}

double round_to_integer(double value, Rounding rounding) {
  if (!(std::fabs(value) < 4503599627370496.0)) return value;
  return std::copysign(round_magnitude(std::fabs(value), std::signbit(value), rounding), value);
}

uint32_t encode_float(double value, const FloatFormat &format, Rounding rounding, bool saturate_finite) {
  const int man = format.mantissa_bits, bias = 1 - format.min_exponent;
  const int exponent_bits = format.max_exponent + bias >= 128 ? 8 : format.max_exponent + bias >= 16 ? 5 : 4;
  const uint32_t sign = std::signbit(value) ? 1u << (man + exponent_bits) : 0;
  const uint32_t all_ones = (1u << (man + exponent_bits)) - 1, infinity = all_ones >> man << man;
  const uint32_t largest = format.has_infinity ? infinity - 1 : all_ones - 1;
  if (value != value) return all_ones;
  double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  if (std::isinf(magnitude)) return sign | (saturate_finite ? largest : format.has_infinity ? infinity : all_ones);
  int exponent;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent - 1, format.min_exponent);
  double scaled = round_magnitude(std::ldexp(magnitude, man - exponent), sign != 0, rounding);
  if (exponent > format.max_exponent + 1) scaled = std::ldexp(1.0, man + 1); // certain overflow; keep it in range
  exponent = std::min(exponent, format.max_exponent + 1);
  // A carry out of the mantissa moves into the exponent by itself; a subnormal has no implicit one to take away.
  uint32_t bits = static_cast<uint32_t>(exponent + bias - 1) << man;
  bits += static_cast<uint32_t>(scaled);
  if (bits > largest) {
    bool to_infinity = rounding == Rounding::NearestEven || rounding == Rounding::NearestAway ||
                       (rounding == Rounding::Up && !sign) || (rounding == Rounding::Down && sign);
    bits = saturate_finite || !to_infinity ? largest : format.has_infinity ? infinity : all_ones;
  }
  return sign | bits;
}

double decode_float(uint32_t bits, const FloatFormat &format) {
  const int man = format.mantissa_bits, bias = 1 - format.min_exponent;
  const int exponent_bits = format.max_exponent + bias >= 128 ? 8 : format.max_exponent + bias >= 16 ? 5 : 4;
  const uint32_t all_ones = (1u << (man + exponent_bits)) - 1, magnitude = bits & all_ones;
  bool negative = bits >> (man + exponent_bits) & 1;
  double value;
  if (format.has_infinity && magnitude >= all_ones >> man << man)
    value = magnitude == all_ones >> man << man ? INFINITY : NAN;
  else if (!format.has_infinity && magnitude == all_ones) value = NAN;
  else {
    int exponent = static_cast<int>(magnitude >> man);
    double fraction = magnitude & ((1u << man) - 1);
    value = exponent ? std::ldexp(fraction + (1 << man), exponent - bias - man)
                     : std::ldexp(fraction, format.min_exponent - man);
  }
  return negative ? -value : value;
}

double add_to_odd(double a, double b) {
  double sum = a + b;
  if (!std::isfinite(sum)) return sum;
  double b_part = sum - a;
  double error = (a - (sum - b_part)) + (b - b_part);
  if (error == 0 || (bits_as<uint64_t>(sum) & 1)) return sum;
  return std::nextafter(sum, error > 0 ? INFINITY : -INFINITY);
}

namespace {

class RoundingScope {
public:
  explicit RoundingScope(Rounding rounding) : saved_(fegetround()) {
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD, FE_TONEAREST};
    fesetround(modes[static_cast<int>(rounding)]);
  }
  ~RoundingScope() { fesetround(saved_); }
  RoundingScope(const RoundingScope &) = delete;
  RoundingScope &operator=(const RoundingScope &) = delete;

private:
  int saved_;
};

// volatile: the compiler must not move the arithmetic out of the scope of the rounding mode.
template <class T> T operate(FloatOp op, T a, T b, T c, Rounding rounding) {
  volatile T x = a, y = b, z = c, result = 0;
  {
    RoundingScope scope(rounding);
    switch (op) {
    case FloatOp::Add: result = x + y; break;
    case FloatOp::Sub: result = x - y; break;
    case FloatOp::Mul: result = x * y; break;
    case FloatOp::Div: result = x / y; break;
    case FloatOp::Fma: result = std::fma(static_cast<T>(x), static_cast<T>(y), static_cast<T>(z)); break;
    case FloatOp::Sqrt: result = std::sqrt(static_cast<T>(x)); break;
    case FloatOp::Rcp: result = T(1) / x; break;
    }
  }
  return result;
}

template <class To, class From> To convert(From value, Rounding rounding) {
  volatile From from = value;
  volatile To to = 0;
  {
    RoundingScope scope(rounding);
    to = static_cast<To>(from);
  }
  return to;
}

} // namespace

float rounded_op(FloatOp op, float a, float b, float c, Rounding r) { return operate(op, a, b, c, r); }
double rounded_op(FloatOp op, double a, double b, double c, Rounding r) { return operate(op, a, b, c, r); }
float to_f32(double value, Rounding rounding) { return convert<float>(value, rounding); }
float to_f32(int64_t value, Rounding rounding) { return convert<float>(value, rounding); }
double to_f64(int64_t value, Rounding rounding) { return convert<double>(value, rounding); }
// Unsigned conversions are sequences of instructions; long double holds every 64-bit integer exactly.
float to_f32(uint64_t value, Rounding rounding) { return convert<float>(static_cast<long double>(value), rounding); }
double to_f64(uint64_t value, Rounding rounding) { return convert<double>(static_cast<long double>(value), rounding); }

} // namespace ptxvm
