// Every function of cuda_fp16.h, or with -DBRAIN of cuda_bf16.h. Functions of one argument see all 65536 values. What
// the toolkit's headers also compute on the host has to agree to the bit; the rest is compared with C's math functions.
#include "check.h"
#include <cmath>
#include <functional>
#include <string>
#ifdef BRAIN
#include <cuda_bf16.h>
typedef __nv_bfloat16 H;
typedef __nv_bfloat162 H2;
#define TO(from, rounding) __##from##2bfloat16_##rounding
#define FROM(to) __bfloat162##to
#define MAKE2 __halves2bfloat162
#define AS_HALF(x) __ushort_as_bfloat16((unsigned short)(x))
#define LOW __low2bfloat16
#define HIGH __high2bfloat16
#define AS_BITS __bfloat16_as_ushort
static const int kMantissa = 7, kMinExponent = -126, kMaxExponent = 127;
#else
#include <cuda_fp16.h>
#include <cuda_fp8.h>
typedef __half H;
typedef __half2 H2;
#define TO(from, rounding) __##from##2half_##rounding
#define FROM(to) __half2##to
#define MAKE2 __halves2half2
#define AS_HALF(x) __ushort_as_half((unsigned short)(x))
#define LOW __low2half
#define HIGH __high2half
#define AS_BITS __half_as_ushort
static const int kMantissa = 10, kMinExponent = -14, kMaxExponent = 15;
#endif

#define BOTH __host__ __device__
static const int kValues = 65536;

BOTH uint64_t bits(H v) { return __hisnan(v) ? 0x7fff : AS_BITS(v); }
BOTH uint64_t bits(H2 v) { return bits(LOW(v)) | bits(HIGH(v)) << 16; }
BOTH uint64_t bits(float v) {
  uint32_t u;
  memcpy(&u, &v, sizeof u);
  return v != v ? 0x7fffffff : u;
}
BOTH uint64_t bits(float2 v) { return bits(v.x) | bits(v.y) << 32; }
template <class T> BOTH uint64_t bits(T v) { return (uint64_t)v; }

// What the device computes for n inputs, and what the host expects.
template <class F> __global__ void apply(uint64_t *out, int n, F f) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = f(i);
}
template <class F> static std::vector<uint64_t> results(int n, F f) {
  Device<uint64_t> out(n);
  apply<<<(n + 255) / 256, 256>>>(out.data, n, f);
  return out.host();
}
static void report(const char *name, int i, uint64_t got, uint64_t want) {
  printf("%s(%04x): %llx, expected %llx\n", name, i & 0xffff, (unsigned long long)got, (unsigned long long)want);
}
template <class D, class E> static void exact(const char *name, int n, D device, E expected) {
  auto got = results(n, device);
  int wrong = 0;
  for (int i = 0; i < n; i++) {
    uint64_t want = expected(i);
    if (got[i] != want && wrong++ < 3) report(name, i, got[i], want);
  }
  CHECK(wrong == 0);
}

// Inputs of functions with several arguments: all kinds of values meet each other.
BOTH static uint64_t scramble(uint64_t i) {
  i = (i + 1) * 0x9e3779b97f4a7c15ull;
  i = (i ^ i >> 31) * 0xbf58476d1ce4e5b9ull;
  return i ^ i >> 29;
}
BOTH static H argument(int i, int k) { // near each other, special, or anything
  uint64_t r = scramble((uint64_t)i * 8 + k);
  const unsigned short special[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x7f80, 0xff80, 0x7c00, 0xfc00,
                                    0x3c00, 0x3f80, 0x7fff, 0x7bff, 0xfbff, 0x7f7f, 0xff7f, 0x0400};
  if (r % 5 == 0) return AS_HALF(special[r >> 8 & 15]);
  if (r % 5 < 3) return AS_HALF((r >> 8 & 0x8fff) | 0x3000);
  return AS_HALF(r >> 8);
}
BOTH static H2 argument2(int i, int k) { return MAKE2(argument(i, k), argument(i, k + 4)); }

// Rounds to the format by searching among its values: slow, and independent of the engine.
static double value_of(int pattern) { // of 0 .. infinity
  int exponent = pattern >> kMantissa, fraction = pattern & ((1 << kMantissa) - 1);
  if (exponent == kMaxExponent - kMinExponent + 2) return INFINITY;
  return exponent ? std::ldexp((double)(fraction + (1 << kMantissa)), exponent - 1 + kMinExponent - kMantissa)
                  : std::ldexp((double)fraction, kMinExponent - kMantissa);
}
enum Mode { kNearest, kZero, kDown, kUp };
static uint64_t rounded(double v, Mode mode) {
  const int infinity = (kMaxExponent - kMinExponent + 2) << kMantissa;
  if (v != v) return 0x7fff;
  double m = std::fabs(v);
  int low = 0, high = infinity; // value_of(low) <= m < value_of(high), or m is infinite
  if (std::isinf(m)) return infinity | (v < 0 ? 0x8000 : 0);
  while (high - low > 1) {
    int middle = (low + high) / 2;
    (value_of(middle) <= m ? low : high) = middle;
  }
  double below = value_of(low), above = high == infinity ? std::ldexp(1.0, kMaxExponent + 1) : value_of(high);
  bool up = false;
  if (mode == kNearest) up = m - below > above - m || (m - below == above - m && (low & 1));
  else if (mode != kZero) up = m != below && (mode == kDown) == (bool)std::signbit(v);
  return (uint64_t)(up ? high : low) | (std::signbit(v) ? 0x8000 : 0);
}
static double real(H v) { return (double)(float)v; }

// ---- Math functions: within `ulps` of C's, special values exactly.
static int64_t ordered(uint64_t pattern) { return pattern & 0x8000 ? -(int64_t)(pattern & 0x7fff) : (int64_t)pattern; }
template <class D, class D2>
static void math(const char *name, int ulps, D device, D2 device2, const std::function<double(double)> &reference) {
  auto got = results(kValues, [=] __device__(int i) { return bits(device(AS_HALF(i))); });
  auto got2 = results(kValues, [=] __device__(int i) { return bits(device2(MAKE2(AS_HALF(i), AS_HALF(0x3c00)))); });
  int wrong = 0;
  for (int i = 0; i < kValues; i++) {
    uint64_t want = rounded(reference(real(AS_HALF(i))), kNearest), pair = got2[i] & 0xffff;
    bool nan = want == 0x7fff;
    auto near = [&](uint64_t v) {
      return nan || v == 0x7fff ? v == want : std::llabs(ordered(v) - ordered(want)) <= ulps;
    };
    if ((!near(got[i]) || !near(pair)) && wrong++ < 3) report(name, i, got[i] << 16 | pair, want);
  }
  CHECK(wrong == 0);
}
#define MATH(name, ulps, reference)                                                                                    \
  math(                                                                                                                \
      "h" #name, ulps, [] __device__(H x) { return h##name(x); }, [] __device__(H2 x) { return h2##name(x); },         \
      [](double x) -> double { return reference; })

static void test_math() {
  MATH(trunc, 0, std::trunc(x)), MATH(ceil, 0, std::ceil(x)), MATH(floor, 0, std::floor(x));
  MATH(rint, 0, std::nearbyint(x));
  MATH(sqrt, 1, std::sqrt(x)), MATH(rsqrt, 1, 1 / std::sqrt(x)), MATH(rcp, 1, 1 / x);
  MATH(log, 1, std::log(x)), MATH(log2, 1, std::log2(x)), MATH(log10, 1, std::log10(x));
  MATH(exp, 1, std::exp(x)), MATH(exp2, 1, std::exp2(x)), MATH(exp10, 1, std::pow(10.0, x));
  MATH(tanh, 1, std::tanh(x)), MATH(tanh_approx, 1, std::tanh(x));
  MATH(sin, 2, std::sin(x)), MATH(cos, 2, std::cos(x));
}

// ---- Functions that exist on the host too.
#define SAME(n, name, call)                                                                                            \
  exact(                                                                                                               \
      name, n, [=] __device__(int i) { return bits(call); }, [=](int i) { return bits(call); })
#define SAME_ONE(name) SAME(kValues, #name, name(AS_HALF(i)))
#define SAME_TWO(name) SAME(20000, #name, name(argument(i, 0), argument(i, 1)))
#define SAME_PAIR(name) SAME(20000, #name, name(argument2(i, 0)))
#define SAME_PAIRS(name) SAME(20000, #name, name(argument2(i, 0), argument2(i, 1)))

// On the host some of these take the wrong zero, so they are compared with the ones that ignore NaN.
#define WITH_NAN(name, k)                                                                                              \
  (__hisnan(argument(i, k)) || __hisnan(argument(i, k + 1)) ? 0x7fff : bits(name(argument(i, k), argument(i, k + 1))))
#define PROPAGATES(name)                                                                                               \
  exact(                                                                                                               \
      #name " nan", 20000, [] __device__(int i) { return bits(__h##name##_nan(argument(i, 0), argument(i, 1))); },     \
      [](int i) { return WITH_NAN(__h##name, 0); }),                                                                   \
      exact(                                                                                                           \
          #name "2 nan", 20000,                                                                                        \
          [] __device__(int i) { return bits(__h##name##2_nan(argument2(i, 0), argument2(i, 1))); },                   \
          [](int i) { return WITH_NAN(__h##name, 0) | WITH_NAN(__h##name, 4) << 16; })

static void test_arithmetic() {
  SAME_ONE(__habs), SAME_ONE(__hneg), SAME_ONE(__hisnan), SAME_ONE(__hisinf);
  SAME_TWO(__hadd), SAME_TWO(__hsub), SAME_TWO(__hmul), SAME_TWO(__hdiv);
  SAME_TWO(__hadd_rn), SAME_TWO(__hsub_rn), SAME_TWO(__hmul_rn);
  SAME_TWO(__hadd_sat), SAME_TWO(__hsub_sat), SAME_TWO(__hmul_sat);
  SAME_TWO(__hmax), SAME_TWO(__hmin), PROPAGATES(max), PROPAGATES(min);
  SAME_PAIR(__habs2), SAME_PAIR(__hneg2), SAME_PAIR(__hisnan2), SAME_PAIR(__lowhigh2highlow);
  SAME_PAIRS(__hadd2), SAME_PAIRS(__hsub2), SAME_PAIRS(__hmul2), SAME_PAIRS(__h2div);
  SAME_PAIRS(__hadd2_rn), SAME_PAIRS(__hsub2_rn), SAME_PAIRS(__hmul2_rn);
  SAME_PAIRS(__hadd2_sat), SAME_PAIRS(__hsub2_sat), SAME_PAIRS(__hmul2_sat);
  SAME_PAIRS(__hmax2), SAME_PAIRS(__hmin2);
}

#define COMPARISON(name)                                                                                               \
  SAME_TWO(__h##name), SAME_PAIRS(__h##name##2), SAME_PAIRS(__hb##name##2), SAME_PAIRS(__h##name##2_mask)
static void test_comparisons() {
  COMPARISON(eq), COMPARISON(ne), COMPARISON(lt), COMPARISON(le), COMPARISON(gt), COMPARISON(ge);
  COMPARISON(equ), COMPARISON(neu), COMPARISON(ltu), COMPARISON(leu), COMPARISON(gtu), COMPARISON(geu);
}

// Products of halves are exact in double, and so rounding x * y + z to odd there loses nothing.
static double fused(H x, H y, H z) {
  double product = real(x) * real(y), addend = real(z), sum = product + addend;
  if (!std::isfinite(sum)) return sum;
  double part = sum - product, error = (product - (sum - part)) + (addend - part);
  uint64_t pattern;
  memcpy(&pattern, &sum, sizeof sum);
  return error == 0 || (pattern & 1) ? sum : std::nextafter(sum, error > 0 ? INFINITY : -INFINITY);
}
static double clamp01(double v) { return v > 0 ? std::min(v, 1.0) : 0.0; }
static double relu(double v) { return v != v ? v : v > 0 ? v : 0.0; }
#define FUSED(name, reference)                                                                                         \
  exact(                                                                                                               \
      #name, 20000, [] __device__(int i) { return bits(name(argument(i, 0), argument(i, 1), argument(i, 2))); },       \
      [](int i) {                                                                                                      \
        double v = fused(argument(i, 0), argument(i, 1), argument(i, 2));                                              \
        return rounded(reference, kNearest);                                                                           \
      })
#define FUSED_PAIR(name, reference)                                                                                    \
  exact(                                                                                                               \
      #name, 20000, [] __device__(int i) { return bits(name(argument2(i, 0), argument2(i, 1), argument2(i, 2))); },    \
      [](int i) {                                                                                                      \
        double v = fused(argument(i, 0), argument(i, 1), argument(i, 2));                                              \
        uint64_t low = rounded(reference, kNearest);                                                                   \
        v = fused(argument(i, 4), argument(i, 5), argument(i, 6));                                                     \
        return low | rounded(reference, kNearest) << 16;                                                               \
      })
static void test_fused() {
  FUSED(__hfma, v), FUSED(__hfma_sat, clamp01(v)), FUSED(__hfma_relu, relu(v));
  FUSED_PAIR(__hfma2, v), FUSED_PAIR(__hfma2_sat, clamp01(v)), FUSED_PAIR(__hfma2_relu, relu(v));
  exact(
      "__hcmadd", 2000,
      [] __device__(int i) {
        H2 a = MAKE2(H(i % 9 - 4), H(i % 7)), b = MAKE2(H(i % 5), H(i % 11 - 5)), c = MAKE2(H(i % 3), H(2));
        return bits(__hcmadd(a, b, c));
      },
      [](int i) {
        int a = i % 9 - 4, b = i % 7, c = i % 5, d = i % 11 - 5;
        uint64_t low = rounded(a * c - b * d + i % 3 + 0.0, kNearest),
                 high = rounded(a * d + b * c + 2 + 0.0, kNearest);
        return low | high << 16;
      });
}

// ---- Conversions
BOTH static uint64_t integer(int i) { // of any magnitude
  uint64_t r = scramble(i);
  return r % 9 == 0 ? (uint64_t)(int64_t)(i % 17 - 8) : scramble(r) >> (r >> 8) % 64;
}
static double odd(__int128 v) { // as a double that rounds as v does: to odd, where it does not fit
  bool negative = v < 0;
  unsigned __int128 m = negative ? -v : v;
  int shift = 0;
  bool lost = false;
  for (; m >> 53; shift++) lost |= m & 1, m >>= 1;
  double d = std::ldexp((double)(uint64_t)(m | lost), shift);
  return negative ? -d : d;
}
template <class T, class D> static void from_integer(const char *name, Mode mode, D device) {
  exact(
      name, 20000, [=] __device__(int i) { return bits(device((T)integer(i))); },
      [=](int i) { return rounded(odd((T)integer(i)), mode); });
}
#define FROM_INTEGER(type, name)                                                                                       \
  from_integer<type>(#name " rn", kNearest, [] __device__(type v) { return TO(name, rn)(v); }),                        \
      from_integer<type>(#name " rz", kZero, [] __device__(type v) { return TO(name, rz)(v); }),                       \
      from_integer<type>(#name " rd", kDown, [] __device__(type v) { return TO(name, rd)(v); }),                       \
      from_integer<type>(#name " ru", kUp, [] __device__(type v) { return TO(name, ru)(v); })

// Out of range saturates; NaN gives 0, in 64 bits the top bit alone.
template <class T> static uint64_t to_integer_value(double v) {
  if (v != v) return sizeof(T) == 8 ? 1ull << 63 : 0;
  const double low = (double)std::numeric_limits<T>::min(), high = (double)std::numeric_limits<T>::max();
  if (v >= high) return (uint64_t)std::numeric_limits<T>::max();
  return v <= low ? (uint64_t)std::numeric_limits<T>::min() : (uint64_t)(T)v;
}
template <class T, class D> static void to_integer(const char *name, double (*round)(double), D device) {
  exact(
      name, kValues, [=] __device__(int i) { return (uint64_t)device(AS_HALF(i)); },
      [=](int i) { return to_integer_value<T>(round(real(AS_HALF(i)))); });
}
#define TO_INTEGER(type, name)                                                                                         \
  to_integer<type>(#name "_rn", std::nearbyint, [] __device__(H v) { return FROM(name##_rn)(v); }),                    \
      to_integer<type>(#name "_rz", std::trunc, [] __device__(H v) { return FROM(name##_rz)(v); }),                    \
      to_integer<type>(#name "_rd", std::floor, [] __device__(H v) { return FROM(name##_rd)(v); }),                    \
      to_integer<type>(#name "_ru", std::ceil, [] __device__(H v) { return FROM(name##_ru)(v); })

BOTH static float any_float(int i) {
  uint32_t u = (uint32_t)scramble(i);
  if (i % 3) u = (u & 0x87ffffff) | 0x38000000; // near one
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}
#define FROM_FLOAT(rounding, mode)                                                                                     \
  exact(                                                                                                               \
      "from float " #rounding, kValues, [] __device__(int i) { return bits(TO(float, rounding)(any_float(i))); },      \
      [](int i) { return rounded((double)any_float(i), mode); })

static void test_conversions() {
  FROM_INTEGER(int, int), FROM_INTEGER(unsigned, uint), FROM_INTEGER(short, short);
  FROM_INTEGER(unsigned short, ushort), FROM_INTEGER(long long, ll), FROM_INTEGER(unsigned long long, ull);
  TO_INTEGER(int, int), TO_INTEGER(unsigned, uint), TO_INTEGER(short, short), TO_INTEGER(unsigned short, ushort);
  TO_INTEGER(long long, ll), TO_INTEGER(unsigned long long, ull);
  SAME_ONE(FROM(char_rz)), SAME_ONE(FROM(uchar_rz)), SAME_ONE(FROM(float));
  FROM_FLOAT(rn, kNearest), FROM_FLOAT(rz, kZero), FROM_FLOAT(rd, kDown), FROM_FLOAT(ru, kUp);
#ifdef BRAIN
  SAME(20000, "double", __double2bfloat16((double)any_float(i) * 1.0000000001));
  SAME(20000, "floats", __floats2bfloat162_rn(any_float(i), any_float(i + 1)));
  SAME(20000, "float2", __float22bfloat162_rn(make_float2(any_float(i), any_float(i + 1))));
  SAME(20000, "float both", __float2bfloat162_rn(any_float(i)));
  SAME_PAIR(__bfloat1622float2), SAME_ONE(__bfloat162bfloat162), SAME_TWO(make_bfloat162);
  SAME_PAIR(__low2bfloat162), SAME_PAIR(__high2bfloat162), SAME_PAIRS(__lows2bfloat162), SAME_PAIRS(__highs2bfloat162);
  SAME_ONE(__bfloat16_as_short), SAME(kValues, "as", __short_as_bfloat16((short)i));
#else
  SAME(20000, "double", __double2half((double)any_float(i) * 1.0000000001));
  SAME(20000, "floats", __floats2half2_rn(any_float(i), any_float(i + 1)));
  SAME(20000, "float2", __float22half2_rn(make_float2(any_float(i), any_float(i + 1))));
  SAME(20000, "float both", __float2half2_rn(any_float(i)));
  SAME_PAIR(__half22float2), SAME_ONE(__half2half2), SAME_TWO(make_half2);
  SAME_PAIR(__low2half2), SAME_PAIR(__high2half2), SAME_PAIRS(__lows2half2), SAME_PAIRS(__highs2half2);
  SAME_ONE(__half_as_short), SAME(kValues, "as", __short_as_half((short)i));
#endif
  SAME_PAIR(__low2float), SAME_PAIR(__high2float);
}

#ifndef BRAIN
#define FP8(format)                                                                                                    \
  SAME(kValues, #format, __nv_cvt_float_to_fp8(any_float(i), __NV_SATFINITE, format));                                 \
  SAME(kValues, #format " half", __nv_cvt_halfraw_to_fp8(AS_HALF(i), __NV_SATFINITE, format));                         \
  SAME(256, #format " back", H(__half_raw(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)i, format))));                   \
  SAME(kValues, #format " pair", __nv_cvt_halfraw2_to_fp8x2(argument2(i, 0), __NV_SATFINITE, format));                 \
  SAME(kValues, #format " pair back", H2(__half2_raw(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)i, format))))
static void test_fp8() {
  FP8(__NV_E4M3);
  FP8(__NV_E5M2);
}
#else
static void test_fp8() {}
#endif

// ---- Memory, shuffles and atomics
template <class T> __global__ void memory(T *p, T *out) {
  int t = threadIdx.x;
  out[t] = __ldg(p + t) + __ldcg(p + t) + __ldca(p + t) + __ldcs(p + t);
  out[t] += __ldlu(p + t) + __ldcv(p + t);
  __stwb(out + 32 + t, out[t]), __stcg(out + 64 + t, out[t]), __stcs(out + 96 + t, out[t]),
      __stwt(out + 128 + t, out[t]);
  T v = p[t];
  out[160 + t] = __shfl_sync(~0u, v, 3);
  out[192 + t] = __shfl_up_sync(~0u, v, 2);
  out[224 + t] = __shfl_down_sync(~0u, v, 1, 8);
  out[256 + t] = __shfl_xor_sync(~0u, v, 5);
}
template <class T> __global__ void accumulate(T *sum, T v) { atomicAdd(sum, v); }

static float first(H v) { return (float)v; }
static float first(H2 v) { return (float)LOW(v); }
static float last(H v) { return (float)v; }
static float last(H2 v) { return (float)HIGH(v); }
static H single(float v, H) { return H(v); }
static H2 single(float v, H2) { return MAKE2(H(v), H(v + 100)); }

template <class T> static void test_memory() {
  std::vector<T> v;
  for (int t = 0; t < 32; t++) v.push_back(single((float)t, T()));
  Device<T> in(v), out(288), sum(std::vector<T>(1, single(-100.0f, T())));
  memory<<<1, 32>>>(in.data, out.data);
  auto r = out.host();
  for (int t = 0; t < 32; t++) {
    for (int k = 0; k < 160; k += 32) CHECK_AT(first(r[k + t]) == 6.0f * t, t);
    CHECK_AT(first(r[160 + t]) == 3 && last(r[160 + t]) == last(v[3]), t);
    CHECK_AT(first(r[192 + t]) == (t < 2 ? t : t - 2), t);
    CHECK_AT(first(r[224 + t]) == (t % 8 == 7 ? t : t + 1), t);
    CHECK_AT(last(r[256 + t]) == last(v[t ^ 5]), t);
  }
  accumulate<<<3, 32>>>(sum.data, single(1.0f, T()));
  CHECK(first(sum.host()[0]) == -4);
}

int main() {
  test_math(), test_arithmetic(), test_comparisons(), test_fused(), test_conversions(), test_fp8();
  test_memory<H>(), test_memory<H2>();
  return finish("halves");
}
