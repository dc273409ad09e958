// Integer and floating-point instructions against plain C on the host.
#include "check.h"
#include <cfenv>
#include <climits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// F has a device part `run` and a host part `expect`; both take three words of 64 bits.
template <class F>
__global__ void apply(const uint64_t *a, const uint64_t *b, const uint64_t *c, uint64_t *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = F::run(a[i], b[i], c[i]);
}

static std::vector<uint64_t> words(int n) {
  static const uint64_t special[] = {0,
                                     1,
                                     2,
                                     31,
                                     32,
                                     33,
                                     63,
                                     64,
                                     0x7fffffff,
                                     0x80000000,
                                     0xffffffff,
                                     0x7fffffffffffffffull,
                                     0x8000000000000000ull,
                                     ~0ull,
                                     0x3f800000,
                                     0xbf800000,
                                     0x7f800000,
                                     0xff800000,
                                     0x7fc00000,
                                     0x00000001,
                                     0x807fffff,
                                     0x4f000000,
                                     0xcf000000,
                                     0x3f000000,
                                     0x3fc00000,
                                     0x40200000};
  const int count = sizeof special / sizeof *special;
  std::vector<uint64_t> v(n);
  for (auto &x : v) x = random_bits() % 3 ? random_bits() >> (random_bits() % 64) : special[random_bits() % count];
  return v;
}

template <class F> void compare(const char *name) {
  const int n = 2000;
  auto a = words(n), b = words(n), c = words(n);
  Device<uint64_t> da(a), db(b), dc(c), out(n);
  apply<F><<<(n + 127) / 128, 128>>>(da, db, dc, out, n);
  auto got = out.host();
  int wrong = 0;
  for (int i = 0; i < n; i++) {
    uint64_t want = F::expect(a[i], b[i], c[i]);
    if (got[i] == want) continue;
    if (wrong++ < 3)
      printf("%s(%llx, %llx, %llx) = %llx, expected %llx\n", name, (unsigned long long)a[i], (unsigned long long)b[i],
             (unsigned long long)c[i], (unsigned long long)got[i], (unsigned long long)want);
  }
  CHECK(wrong == 0);
}

#define CASE(name, device, host)                                                                                       \
  struct name {                                                                                                        \
    static __device__ uint64_t run(uint64_t a, uint64_t b, uint64_t c) { return device; }                              \
    static uint64_t expect(uint64_t a, uint64_t b, uint64_t c) { return host; }                                        \
  };
#define U(x) ((uint32_t)(x))
#define S(x) ((int32_t)(x))
#define L(x) ((int64_t)(x))

static uint32_t slow_fls(uint64_t v, int width) {
  for (int k = width - 1; k >= 0; k--)
    if (v >> k & 1) return k;
  return ~0u;
}
static uint64_t slow_reverse(uint64_t v, int width) {
  uint64_t r = 0;
  for (int k = 0; k < width; k++) r |= (v >> k & 1) << (width - 1 - k);
  return r;
}
static uint32_t slow_permute(uint32_t a, uint32_t b, uint32_t s) {
  uint8_t bytes[8];
  memcpy(bytes, &a, 4), memcpy(bytes + 4, &b, 4);
  uint8_t r[4];
  for (int k = 0; k < 4; k++) {
    int pick = s >> 4 * k & 15;
    r[k] = pick & 8 ? (bytes[pick & 7] & 0x80 ? 0xff : 0) : bytes[pick];
  }
  uint32_t v;
  memcpy(&v, r, 4);
  return v;
}
static uint32_t bfe_s32(int32_t a, uint32_t pos, uint32_t len) {
  uint32_t r = 0;
  for (uint32_t k = 0; k < 32; k++) {
    uint32_t at = k < len ? pos + k : pos + len - 1;
    if (len == 0) break;
    r |= (uint32_t)(at > 31 ? a < 0 : a >> at & 1) << k;
  }
  return r;
}
__device__ uint32_t asm_bfe(int32_t a, uint32_t pos, uint32_t len) {
  int32_t r;
  asm("bfe.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(pos), "r"(len));
  return r;
}
__device__ uint32_t asm_bfi(uint32_t a, uint32_t b, uint32_t pos, uint32_t len) {
  uint32_t r;
  asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(pos), "r"(len));
  return r;
}
static uint32_t slow_bfi(uint32_t a, uint32_t b, uint32_t pos, uint32_t len) {
  for (uint32_t k = 0; k < len && pos + k < 32; k++) b = (b & ~(1u << (pos + k))) | (a >> k & 1) << (pos + k);
  return b;
}
__device__ uint64_t add_with_carry(uint64_t a, uint64_t b) { // 64 bits from two times 32
  uint32_t low, high;
  asm("{add.cc.u32 %0, %2, %4; addc.u32 %1, %3, %5;}"
      : "=&r"(low), "=r"(high)
      : "r"(U(a)), "r"(U(a >> 32)), "r"(U(b)), "r"(U(b >> 32)));
  return (uint64_t)high << 32 | low;
}
__device__ uint64_t sub_with_borrow(uint64_t a, uint64_t b) {
  uint32_t low, high;
  asm("{sub.cc.u32 %0, %2, %4; subc.u32 %1, %3, %5;}"
      : "=&r"(low), "=r"(high)
      : "r"(U(a)), "r"(U(a >> 32)), "r"(U(b)), "r"(U(b >> 32)));
  return (uint64_t)high << 32 | low;
}
__device__ uint64_t mad_with_carry(uint64_t a, uint64_t b, uint64_t c) { // U(a) * U(b) + c
  uint32_t low, high;
  asm("{mad.lo.cc.u32 %0, %2, %3, %4; madc.hi.u32 %1, %2, %3, %5;}"
      : "=&r"(low), "=r"(high)
      : "r"(U(a)), "r"(U(b)), "r"(U(c)), "r"(U(c >> 32)));
  return (uint64_t)high << 32 | low;
}
__device__ uint32_t lop(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// Directives without spaces, modifiers with them, decimal and binary numbers, scopes within scopes.
__device__ uint64_t written_freely(uint32_t a) {
  float r;
  uint32_t n;
  asm("{.reg.f32 t;.reg.pred p,q;\n"
      "add .f32 t, %1, 1.5;\n"
      "setp.lt.f32 p|q, t, 25.0e-1;\n"
      "@p add.f32 t, t, -1.0E2;\n"
      "@q mul.f32 t, t, 0.5;\n"
      "mov.f32 %0, t;}"
      : "=f"(r)
      : "f"((float)a));
  asm("{.reg.b32 t<2>;\nadd.u32 t1, %1, 0b101;\nadd.u32 %0, t1, 010;}" : "=r"(n) : "r"(a));
  return (uint64_t)n << 32 | __float_as_uint(r);
}
static uint64_t written_freely_host(uint32_t a) {
  float r = (float)a + 1.5f;
  r = r < 2.5f ? r - 100.0f : r * 0.5f;
  uint32_t u;
  memcpy(&u, &r, 4);
  return (uint64_t)(a + 13) << 32 | u;
}

CASE(Syntax, written_freely(U(a) & 0xff), written_freely_host(U(a) & 0xff))
CASE(AddS32, U(S(U(a) + U(b))), U(U(a) + U(b)))
CASE(SubU64, a - b, a - b)
CASE(MulLow, U(a) * U(b), U(U(a) * U(b)))
CASE(MulHighS32, U(__mulhi(S(a), S(b))), U(((int64_t)S(a) * S(b)) >> 32))
CASE(MulHighU64, __umul64hi(a, b), (uint64_t)(((unsigned __int128)a * b) >> 64))
CASE(MulHighS64, (uint64_t)__mul64hi(L(a), L(b)), (uint64_t)(((__int128)L(a) * L(b)) >> 64))
CASE(MulWide, (uint64_t)((int64_t)S(a) * S(b) + L(c)), (uint64_t)((int64_t)S(a) * S(b)) + c)
CASE(Mad, U(a) * U(b) + U(c), U(U(a) * U(b) + U(c)))
CASE(Mul24, U(__umul24(U(a), U(b))), U((uint64_t)(U(a) & 0xffffff) * (U(b) & 0xffffff)))
CASE(DivS32, U(b) == 0 || S(b) == -1 ? 7 : U(S(a) / S(b)), U(b) == 0 || S(b) == -1 ? 7 : U(S(a) / S(b)))
CASE(RemS32, U(b) == 0 || S(b) == -1 ? 7 : U(S(a) % S(b)), U(b) == 0 || S(b) == -1 ? 7 : U(S(a) % S(b)))
CASE(DivU64, b == 0 ? 7 : a / b, b == 0 ? 7 : a / b)
CASE(RemS64, b == 0 || L(b) == -1 ? 7 : (uint64_t)(L(a) % L(b)), b == 0 || L(b) == -1 ? 7 : (uint64_t)(L(a) % L(b)))
CASE(DivS16, (short)b == 0 || (short)b == -1 ? 7 : U((short)a / (short)b),
     (short)b == 0 || (short)b == -1 ? 7 : U((short)a / (short)b))
CASE(MinMax, U(min(S(a), S(b))) ^ (uint64_t)max(U(a), U(b)) << 32,
     U(S(a) < S(b) ? a : b) ^ (uint64_t)(U(a) > U(b) ? U(a) : U(b)) << 32)
CASE(MinMax64, (uint64_t)min(L(a), L(b)) ^ max(a, b), (uint64_t)(L(a) < L(b) ? L(a) : L(b)) ^ (a > b ? a : b))
CASE(Abs32, U(abs(S(a))), S(a) < 0 ? U(0 - U(a)) : U(a))
CASE(Sad, U(__sad(S(a), S(b), U(c))), U(U(c) + U(llabs((long long)S(a) - S(b)))))
CASE(Popc, __popc(U(a)) + 100 * __popcll(b), __builtin_popcount(U(a)) + 100 * __builtin_popcountll(b))
CASE(Clz, __clz(S(a)) + 100 * __clzll(L(b)), 31 - slow_fls(U(a), 32) + 100u * (63 - slow_fls(b, 64)) - (U(a) ? 0 : 0))
CASE(Ffs, __ffs(S(a)) + 100 * __ffsll(L(b)), __builtin_ffs(S(a)) + 100 * __builtin_ffsll(L(b)))
CASE(Brev, __brev(U(a)) ^ __brevll(b), slow_reverse(U(a), 32) ^ slow_reverse(b, 64))
CASE(Permute, __byte_perm(U(a), U(b), U(c)), slow_permute(U(a), U(b), U(c) & 0x7777))
CASE(ShiftLeft, U(a) << (U(b) & 31), U(U(a) << (U(b) & 31)))
CASE(ShiftRight, U(S(a) >> (U(b) & 31)), U(S(a) >> (U(b) & 31)))
CASE(ShiftRight64, (uint64_t)(L(a) >> (U(b) & 63)) ^ a >> (U(c) & 63),
     (uint64_t)(L(a) >> (U(b) & 63)) ^ a >> (U(c) & 63))
CASE(Funnel, __funnelshift_l(U(a), U(b), U(c)) ^ (uint64_t)__funnelshift_rc(U(a), U(b), U(c)) << 32,
     U(((b << 32 | U(a)) << (c & 31)) >> 32) ^ (uint64_t)(U(c) >= 32 ? U(b) : U((b << 32 | U(a)) >> (c & 31))) << 32)
CASE(Bfe, asm_bfe(S(a), U(b), U(c)), bfe_s32(S(a), U(b) & 0xff, U(c) & 0xff))
CASE(Bfi, asm_bfi(U(a), U(b), U(c) & 63, U(c >> 8) & 63), slow_bfi(U(a), U(b), U(c) & 63, U(c >> 8) & 63))
CASE(Carry, add_with_carry(a, b), a + b)
CASE(Borrow, sub_with_borrow(a, b), a - b)
CASE(MadCarry, mad_with_carry(a, b, c), (uint64_t)U(a) * U(b) + c)
CASE(Lop, lop(U(a), U(b), U(c)), (U(a) & U(b)) | (~U(a) & U(c)))
CASE(Select, L(a) < L(b) ? c : a ^ b, L(a) < L(b) ? c : a ^ b)
CASE(Narrow, (uint64_t)(int8_t)a ^ (uint64_t)(uint16_t)b ^ (uint64_t)(int16_t)c << 3,
     (uint64_t)(int8_t)a ^ (uint64_t)(uint16_t)b ^ (uint64_t)(int16_t)c << 3)
CASE(Dp, (uint64_t)__vadd2(U(a), U(b)),
     (uint64_t)(((U(a) + U(b)) & 0xffff) | (((U(a) >> 16) + (U(b) >> 16)) << 16)) & 0xffffffff)

// ---- Floats. A NaN is compared as a NaN: its bits differ between machines.

static float f32(uint64_t v) {
  uint32_t u = U(v);
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static double f64(uint64_t v) {
  double d;
  memcpy(&d, &v, 8);
  return d;
}
static uint64_t bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return f != f ? 0x7fffffff : u;
}
static uint64_t bits(double d) {
  uint64_t u;
  memcpy(&u, &d, 8);
  return d != d ? 0x7fffffff : u;
}
#define F(x) __uint_as_float(U(x))
#define D(x) __longlong_as_double(L(x))
__device__ uint64_t out(float f) { return f != f ? 0x7fffffff : __float_as_uint(f); }
__device__ uint64_t out(double d) { return d != d ? 0x7fffffff : (uint64_t)__double_as_longlong(d); }

template <class T, class G> T under(int mode, G g) {
  fesetround(mode);
  volatile T r = g();
  fesetround(FE_TONEAREST);
  return r;
}
#define UNDER(T, mode, x)                                                                                              \
  under<T>(mode, [&] {                                                                                                 \
    volatile T u = T(0);                                                                                               \
    return u + (x);                                                                                                    \
  })
template <class T> T vadd(T a, T b) {
  volatile T x = a, y = b;
  return x + y;
}
template <class T> T vmul(T a, T b) {
  volatile T x = a, y = b;
  return x * y;
}
template <class T> T vdiv(T a, T b) {
  volatile T x = a, y = b;
  return x / y;
}
template <class T> T vsqrt(T a) {
  volatile T x = a;
  return std::sqrt((T)x);
}
template <class T> T vfma(T a, T b, T c) {
  volatile T x = a, y = b, z = c;
  return std::fma((T)x, (T)y, (T)z);
}
#define RND(T, mode, x) bits(under<T>(mode, [&] { return x; }))

CASE(FAdd, out(F(a) + F(b)), bits(f32(a) + f32(b)))
CASE(FAddZ, out(__fadd_rz(F(a), F(b))), RND(float, FE_TOWARDZERO, vadd(f32(a), f32(b))))
CASE(FAddD, out(__fadd_rd(F(a), F(b))), RND(float, FE_DOWNWARD, vadd(f32(a), f32(b))))
CASE(FAddU, out(__fadd_ru(F(a), F(b))), RND(float, FE_UPWARD, vadd(f32(a), f32(b))))
CASE(FMul, out(F(a) * F(b)), bits(f32(a) * f32(b)))
CASE(FMulU, out(__fmul_ru(F(a), F(b))), RND(float, FE_UPWARD, vmul(f32(a), f32(b))))
CASE(FDiv, out(F(a) / F(b)), bits(f32(a) / f32(b)))
CASE(FDivD, out(__fdiv_rd(F(a), F(b))), RND(float, FE_DOWNWARD, vdiv(f32(a), f32(b))))
CASE(FFma, out(__fmaf_rn(F(a), F(b), F(c))), bits(std::fma(f32(a), f32(b), f32(c))))
CASE(FFmaZ, out(__fmaf_rz(F(a), F(b), F(c))), RND(float, FE_TOWARDZERO, vfma(f32(a), f32(b), f32(c))))
CASE(FSqrt, out(sqrtf(F(a))), bits(std::sqrt(f32(a))))
CASE(FSqrtU, out(__fsqrt_ru(F(a))), RND(float, FE_UPWARD, vsqrt(f32(a))))
CASE(FRcp, out(__frcp_rn(F(a))), bits(1.0f / f32(a)))
CASE(FMin, out(fminf(F(a), F(b))),
     bits(f32(a) != f32(a)   ? f32(b)
          : f32(b) != f32(b) ? f32(a)
          : f32(a) == f32(b) ? f32(U(a) | U(b))
                             : std::fmin(f32(a), f32(b))))
CASE(FAbsNeg, out(-fabsf(F(a))), bits(-std::fabs(f32(a))))
CASE(FSat, out(__saturatef(F(a))), bits(!(f32(a) > 0) ? 0.0f : f32(a) > 1 ? 1.0f : f32(a)))
CASE(DAdd, out(D(a) + D(b)), bits(f64(a) + f64(b)))
CASE(DMulZ, out(__dmul_rz(D(a), D(b))), RND(double, FE_TOWARDZERO, vmul(f64(a), f64(b))))
CASE(DFma, out(fma(D(a), D(b), D(c))), bits(std::fma(f64(a), f64(b), f64(c))))
CASE(DDiv, out(D(a) / D(b)), bits(f64(a) / f64(b)))
CASE(DSqrt, out(sqrt(D(a))), bits(std::sqrt(f64(a))))
CASE(Compare,
     (F(a) < F(b)) | (F(a) <= F(b)) << 1 | (F(a) == F(b)) << 2 | (F(a) != F(b)) << 3 | !(F(a) < F(b)) << 4 |
         (D(a) > D(b)) << 5,
     (uint64_t)((f32(a) < f32(b)) | (f32(a) <= f32(b)) << 1 | (f32(a) == f32(b)) << 2 | (f32(a) != f32(b)) << 3 |
                !(f32(a) < f32(b)) << 4 | (f64(a) > f64(b)) << 5))
CASE(CopySign, out(copysignf(F(a), F(b))), bits(f32(a) != f32(a) ? f32(a) : std::copysign(f32(a), f32(b))))

// ---- Conversions in every rounding

static double to_integer(double v, int mode) {
  fesetround(mode);
  volatile double x = v, r = std::nearbyint((double)x);
  fesetround(FE_TONEAREST);
  return r;
}
static uint64_t clamp_s32(double v) {
  return U(v != v ? 0 : v >= 2147483647.0 ? INT_MAX : v <= -2147483648.0 ? INT_MIN : (int)v);
}
static uint64_t clamp_u32(double v) { return U(v != v ? 0 : v >= 4294967295.0 ? UINT_MAX : v <= 0 ? 0 : (uint32_t)v); }
static uint64_t clamp_s64(double v) {
  return v != v                       ? 1ull << 63
         : v >= 9223372036854775808.0 ? (uint64_t)LLONG_MAX
         : v < -9223372036854775808.0 ? 1ull << 63
                                      : (uint64_t)(int64_t)v;
}
CASE(F2IN, U(__float2int_rn(F(a))), clamp_s32(to_integer(f32(a), FE_TONEAREST)))
CASE(F2IZ, U(__float2int_rz(F(a))), clamp_s32(to_integer(f32(a), FE_TOWARDZERO)))
CASE(F2ID, U(__float2int_rd(F(a))), clamp_s32(to_integer(f32(a), FE_DOWNWARD)))
CASE(F2IU, U(__float2int_ru(F(a))), clamp_s32(to_integer(f32(a), FE_UPWARD)))
CASE(F2UN, __float2uint_rn(F(a)), clamp_u32(to_integer(f32(a), FE_TONEAREST)))
CASE(F2LL, (uint64_t)__float2ll_rd(F(a)), clamp_s64(to_integer(f32(a), FE_DOWNWARD)))
CASE(D2I, U(__double2int_ru(D(a))), clamp_s32(to_integer(f64(a), FE_UPWARD)))
CASE(I2FN, out(__int2float_rn(S(a))), bits((float)S(a)))
CASE(I2FD, out(__int2float_rd(S(a))), RND(float, FE_DOWNWARD, ([&] {
                                            volatile int x = S(a);
                                            return (float)x;
                                          })()))
CASE(U2FZ, out(__uint2float_rz(U(a))), RND(float, FE_TOWARDZERO, ([&] {
                                             volatile uint32_t x = U(a);
                                             return (float)(int64_t)x;
                                           })()))
CASE(L2FU, out(__ll2float_ru(L(a))), RND(float, FE_UPWARD, ([&] {
                                           volatile int64_t x = L(a);
                                           return (float)x;
                                         })()))
CASE(L2D, out(__ll2double_rz(L(a))), RND(double, FE_TOWARDZERO, ([&] {
                                           volatile int64_t x = L(a);
                                           return (double)x;
                                         })()))
CASE(UL2F, out((float)a), bits((float)a))
CASE(D2FN, out(__double2float_rn(D(a))), bits((float)f64(a)))
CASE(D2FD, out(__double2float_rd(D(a))), RND(float, FE_DOWNWARD, ([&] {
                                               volatile double x = f64(a);
                                               return (float)x;
                                             })()))
CASE(Floor, out(floorf(F(a))) ^ out(truncf(F(b))) << 32, bits(std::floor(f32(a))) ^ bits(std::trunc(f32(b))) << 32)
CASE(RoundEven, out(rintf(F(a))), bits(std::nearbyint(f32(a))))

// f16 and bf16 on the host, by searching the neighbours instead of by rounding arithmetic.
static double half_value(uint32_t h) {
  int e = h >> 10 & 31, m = h & 1023;
  double v = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  return h & 0x8000 ? -v : v;
}
static double brain_value(uint32_t h) { return f32((uint64_t)h << 16); }
enum { kNear, kZero, kDown, kUp };
static uint64_t round_to(double v, double (*value)(uint32_t), uint32_t infinity, int mode) {
  if (v != v) return 0x7fff;
  uint32_t sign = std::signbit(v) ? 0x8000 : 0, low = 0, high = infinity;
  double m = std::fabs(v);
  if (std::isinf(m)) return sign | infinity;
  while (high - low > 1) { // value(low) <= m < value(high)
    uint32_t middle = (low + high) / 2;
    (value(middle) <= m ? low : high) = middle;
  }
  double below = value(low), above = high == infinity ? 2 * value(low) - value(low - 1) : value(high);
  if (below == m) return sign | low;
  bool up = mode == kZero   ? false
            : mode == kDown ? sign != 0
            : mode == kUp   ? sign == 0
                            : m - below > above - m || (m - below == above - m && (low & 1));
  return sign | (up ? high : low);
}
static uint64_t half_bits(double v, int mode = kNear) { return round_to(v, half_value, 0x7c00, mode); }
static uint64_t brain_bits(double v, int mode = kNear) { return round_to(v, brain_value, 0x7f80, mode); }
__device__ uint64_t out(__half h) { return __hisnan(h) ? 0x7fff : __half_as_ushort(h); }
__device__ uint64_t out(__nv_bfloat16 h) { return __hisnan(h) ? 0x7fff : __bfloat16_as_ushort(h); }
#define H(x) __ushort_as_half((unsigned short)(x))
#define B(x) __ushort_as_bfloat16((unsigned short)(x))
static double h(uint64_t v) { return half_value(v & 0xffff); }
static double r(uint64_t v) { return brain_value(v & 0xffff); }
CASE(F2HN, out(__float2half_rn(F(a))), half_bits(f32(a)))
CASE(F2HZ, out(__float2half_rz(F(a))), half_bits(f32(a), kZero))
CASE(F2HD, out(__float2half_rd(F(a))), half_bits(f32(a), kDown))
CASE(F2HU, out(__float2half_ru(F(a))), half_bits(f32(a), kUp))
CASE(F2BN, out(__float2bfloat16_rn(F(a))), brain_bits(f32(a)))
CASE(F2BZ, out(__float2bfloat16_rz(F(a))), brain_bits(f32(a), kZero))
CASE(D2H, out(__double2half(D(a))), half_bits(f64(a)))
CASE(H2F, out(__half2float(H(a))), bits((float)h(a)))
CASE(B2F, out(__bfloat162float(B(a))), bits((float)r(a)))
CASE(H2I, U(__half2int_rd(H(a))), clamp_s32(std::floor(h(a))))
CASE(I2H, out(__int2half_rn(S(a))), half_bits(S(a)))
CASE(HAdd, out(__hadd(H(a), H(b))), half_bits(h(a) + h(b)))
CASE(HMul, out(__hmul(H(a), H(b))), half_bits(h(a) * h(b)))
CASE(HFma, out(__hfma(H(a), H(b), H(c))), half_bits((double)((long double)h(a) * h(b) + h(c))))
CASE(HMin, out(__hmin(H(a), H(b))),
     h(a) != h(a)   ? half_bits(h(b))
     : h(b) != h(b) ? half_bits(h(a))
     : h(a) == h(b) ? (a | b) & 0xffff
                    : half_bits(std::fmin(h(a), h(b))))
CASE(BAdd, out(__hadd(B(a), B(b))), brain_bits(r(a) + r(b)))
// The sum itself, or a neighbour of it on the right side when the smaller part would be lost in double.
static double sum_for_rounding(double p, double q) {
  double big = std::fabs(p) > std::fabs(q) ? p : q, tiny = std::fabs(p) > std::fabs(q) ? q : p;
  if (tiny == 0 || !std::isfinite(p + q) || std::fabs(tiny) > std::ldexp(std::fabs(big), -30)) return p + q;
  return std::nextafter(big, tiny > 0 ? INFINITY : -INFINITY);
}
CASE(BFma, out(__hfma(B(a), B(b), B(c))), brain_bits(sum_for_rounding(r(a) * r(b), r(c))))
CASE(HCompare, (uint64_t)(__hlt(H(a), H(b)) | __heq(H(a), H(b)) << 1 | __hgeu(B(a), B(b)) << 2),
     (uint64_t)((h(a) < h(b)) | (h(a) == h(b)) << 1 | !(r(a) < r(b)) << 2))

__device__ uint32_t pair(__half2 v) { return (uint32_t)(out(__high2half(v)) << 16 | out(__low2half(v))); }
__device__ uint32_t pair(__nv_bfloat162 v) {
  return (uint32_t)(out(__high2bfloat16(v)) << 16 | out(__low2bfloat16(v)));
}
#define H2(x) __halves2half2(H(x), H((x) >> 16))
#define B2(x) __halves2bfloat162(B(x), B((x) >> 16))
CASE(H2Mul, pair(__hmul2(H2(a), H2(b))), half_bits(h(a) * h(b)) | half_bits(h(a >> 16) * h(b >> 16)) << 16)
CASE(H2Fma, pair(__hfma2(H2(a), H2(b), H2(c))),
     half_bits((double)((long double)h(a) * h(b) + h(c))) |
         half_bits((double)((long double)h(a >> 16) * h(b >> 16) + h(c >> 16))) << 16)
CASE(B2Add, pair(__hadd2(B2(a), B2(b))), brain_bits(r(a) + r(b)) | brain_bits(r(a >> 16) + r(b >> 16)) << 16)
CASE(B2Mul, pair(__hmul2(B2(a), B2(b))), brain_bits(r(a) * r(b)) | brain_bits(r(a >> 16) * r(b >> 16)) << 16)
CASE(Pack2, pair(__floats2half2_rn(F(a), F(b))) ^ (uint64_t)pair(__floats2bfloat162_rn(F(a), F(b))) << 32,
     (half_bits(f32(a)) | half_bits(f32(b)) << 16) ^ (brain_bits(f32(a)) | brain_bits(f32(b)) << 16) << 32)

// ---- Functions of the math library, which nvcc turns into long sequences: close, not equal.

__global__ void math(const float *x, const double *y, float *f, double *d, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float a = x[i], p = fabsf(a) + 0.01f;
  float fs[] = {expf(a),  logf(p),   sinf(a),   cosf(a),      tanhf(a),  powf(p, 1.7f), erff(a),    rsqrtf(p),
                cbrtf(a), log1pf(p), expm1f(a), atan2f(a, p), __expf(a), exp2f(a),      tgammaf(p), fmodf(a, 0.37f)};
  for (int k = 0; k < 16; k++) f[i * 16 + k] = fs[k];
  double b = y[i], q = fabs(b) + 0.01;
  double ds[] = {exp(b), log(q), sin(b), cos(b), tanh(b), pow(q, 1.7), erf(b), lgamma(q)};
  for (int k = 0; k < 8; k++) d[i * 8 + k] = ds[k];
}

static void test_math() {
  const int n = 300;
  std::vector<float> x(n);
  std::vector<double> y(n);
  for (int i = 0; i < n; i++) x[i] = (float)(y[i] = (double)(int64_t)random_bits() / 9.3e18 * 20 * (i % 3 ? 0.2 : 1));
  Device<float> dx(x), f(n * 16);
  Device<double> dy(y), d(n * 8);
  math<<<(n + 63) / 64, 64>>>(dx, dy, f, d, n);
  auto gf = f.host();
  auto gd = d.host();
  for (int i = 0; i < n; i++) {
    double a = x[i], p = (double)(std::fabs(x[i]) + 0.01f);
    double fs[] = {std::exp(a),    std::log(p),
                   std::sin(a),    std::cos(a),
                   std::tanh(a),   std::pow(p, (double)1.7f),
                   std::erf(a),    1 / std::sqrt(p),
                   std::cbrt(a),   std::log1p(p),
                   std::expm1(a),  std::atan2(a, p),
                   std::exp(a),    std::exp2(a),
                   std::tgamma(p), std::fmod(a, (double)0.37f)};
    for (int k = 0; k < 16; k++)
      CHECK_AT(std::fabs(gf[i * 16 + k] - fs[k]) <= 4e-6 * std::fabs(fs[k]) + 1e-7, i * 16 + k);
    double b = y[i], q = std::fabs(b) + 0.01;
    double ds[] = {std::exp(b),  std::log(q),      std::sin(b), std::cos(b),
                   std::tanh(b), std::pow(q, 1.7), std::erf(b), std::lgamma(q)};
    for (int k = 0; k < 8; k++)
      CHECK_AT(std::fabs(gd[i * 8 + k] - ds[k]) <= 1e-14 * std::fabs(ds[k]) + 1e-15, i * 8 + k);
  }
}

#define RUN(name) compare<name>(#name)
int main() {
  RUN(Syntax), RUN(AddS32), RUN(SubU64), RUN(MulLow), RUN(MulHighS32), RUN(MulHighU64), RUN(MulHighS64), RUN(MulWide),
      RUN(Mad), RUN(Mul24);
  RUN(DivS32), RUN(RemS32), RUN(DivU64), RUN(RemS64), RUN(DivS16), RUN(MinMax), RUN(MinMax64), RUN(Abs32), RUN(Sad),
      RUN(Popc);
  RUN(Clz), RUN(Ffs), RUN(Brev), RUN(Permute), RUN(ShiftLeft), RUN(ShiftRight), RUN(ShiftRight64), RUN(Funnel),
      RUN(Bfe), RUN(Bfi);
  RUN(Carry), RUN(Borrow), RUN(MadCarry), RUN(Lop), RUN(Select), RUN(Narrow), RUN(Dp);
  RUN(FAdd), RUN(FAddZ), RUN(FAddD), RUN(FAddU), RUN(FMul), RUN(FMulU), RUN(FDiv), RUN(FDivD), RUN(FFma), RUN(FFmaZ),
      RUN(FSqrt);
  RUN(FSqrtU), RUN(FRcp), RUN(FMin), RUN(FAbsNeg), RUN(FSat), RUN(DAdd), RUN(DMulZ), RUN(DFma), RUN(DDiv), RUN(DSqrt),
      RUN(Compare), RUN(CopySign);
  RUN(F2IN), RUN(F2IZ), RUN(F2ID), RUN(F2IU), RUN(F2UN), RUN(F2LL), RUN(D2I), RUN(I2FN), RUN(I2FD), RUN(U2FZ),
      RUN(L2FU), RUN(L2D);
  RUN(UL2F), RUN(D2FN), RUN(D2FD), RUN(Floor), RUN(RoundEven);
  RUN(F2HN), RUN(F2HZ), RUN(F2HD), RUN(F2HU), RUN(F2BN), RUN(F2BZ), RUN(D2H), RUN(H2F), RUN(B2F), RUN(H2I), RUN(I2H),
      RUN(HAdd), RUN(HMul);
  RUN(HFma), RUN(HMin), RUN(BAdd), RUN(BFma), RUN(HCompare), RUN(H2Mul), RUN(H2Fma), RUN(B2Add), RUN(B2Mul), RUN(Pack2);
  test_math();
  return finish("arith");
}
