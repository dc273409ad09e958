// Every SIMD-in-a-word intrinsic of the toolkit, the dot products, and the video instructions they once were: against
// plain C, element by element.
#include "check.h"
#include <algorithm>
#include <functional>

typedef uint32_t U;
typedef int64_t L;
static const int kCount = 4000;

__host__ __device__ static U word(int i, int k) {
  uint64_t r = ((uint64_t)i * 3 + k + 1) * 0x9e3779b97f4a7c15ull;
  r = (r ^ r >> 29) * 0xbf58476d1ce4e5b9ull;
  const U special[] = {0, 0x80808080, 0x7f7f7f7f, 0x80008000, 0x7fff7fff, 0xffffffff, 0x00ff0001, 0x80000000};
  return r % 4 == 0 ? special[r >> 8 & 7] : (U)(r >> 16);
}
template <class F> __global__ void apply(U *out, F f) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kCount) out[i] = f(word(i, 0), word(i, 1), word(i, 2));
}
template <class F, class E> static void compare(const char *name, F device, E expected) {
  Device<U> out(kCount);
  apply<<<(kCount + 127) / 128, 128>>>(out.data, device);
  auto got = out.host();
  int wrong = 0;
  for (int i = 0; i < kCount; i++) {
    U a = word(i, 0), b = word(i, 1), c = word(i, 2), want = expected(a, b, c);
    if (got[i] != want && wrong++ < 3)
      printf("%s(%08x, %08x, %08x) = %08x, expected %08x\n", name, a, b, c, got[i], want);
  }
  CHECK(wrong == 0);
}

static L part(U v, int k, int width, bool is_signed) {
  uint64_t x = ((uint64_t)v >> k * width) & ((1ull << width) - 1);
  return is_signed && x >> (width - 1) ? (L)x - (1ll << width) : (L)x;
}
typedef std::function<L(L, L, L)> Element;
static U each(int width, bool is_signed, U a, U b, U c, const Element &f) {
  U r = 0;
  for (int k = 0; k < 32 / width; k++)
    r |= (U)((uint64_t)f(part(a, k, width, is_signed), part(b, k, width, is_signed), part(c, k, width, is_signed)) &
             ((1ull << width) - 1))
         << k * width;
  return r;
}
static U total(int width, bool is_signed, U a, U b, U start, const Element &f) {
  for (int k = 0; k < 32 / width; k++) start += (U)f(part(a, k, width, is_signed), part(b, k, width, is_signed), 0);
  return start;
}
static L clamp(L v, int width, bool is_signed) {
  L low = is_signed ? -(1ll << (width - 1)) : 0, high = (1ll << (is_signed ? width - 1 : width)) - 1;
  return std::min(std::max(v, low), high);
}

// One argument, two, three; the formula speaks of elements x, y, z and of their width w.
#define CASE(call, w_, is_signed, formula)                                                                             \
  compare(                                                                                                             \
      #call, [] __device__(U a, U b, U c) -> U { return call; },                                                       \
      [](U a, U b, U c) {                                                                                              \
        const int w = w_;                                                                                              \
        return each(w, is_signed, a, b, c, [=](L x, L y, L z) -> L { return formula; });                               \
      })
#define HALVES_AND_BYTES(name, arguments, is_signed, formula)                                                          \
  CASE(name##2 arguments, 16, is_signed, formula), CASE(name##4 arguments, 8, is_signed, formula)
#define ONE(name, is_signed, formula) HALVES_AND_BYTES(name, (a), is_signed, formula)
#define TWO(name, is_signed, formula) HALVES_AND_BYTES(name, (a, b), is_signed, formula)
#define COMPARE(name, is_signed, condition)                                                                            \
  TWO(__vcmp##name, is_signed, (condition) ? -1 : 0), TWO(__vset##name, is_signed, (condition) ? 1 : 0)
#define SUM(name, w, is_signed, formula)                                                                               \
  compare(                                                                                                             \
      #name, [] __device__(U a, U b, U c) -> U { return name(a, b); },                                                 \
      [](U a, U b, U c) { return total(w, is_signed, a, b, 0, [](L x, L y, L) -> L { return formula; }); })

static void test_intrinsics() {
  ONE(__vabs, true, x < 0 ? -x : x), ONE(__vabsss, true, clamp(x < 0 ? -x : x, w, true));
  ONE(__vneg, true, -x), ONE(__vnegss, true, clamp(-x, w, true));
  TWO(__vabsdiffs, true, std::abs(x - y)), TWO(__vabsdiffu, false, std::abs(x - y));
  TWO(__vadd, true, x + y), TWO(__vaddss, true, clamp(x + y, w, true)), TWO(__vaddus, false, clamp(x + y, w, false));
  TWO(__vsub, true, x - y), TWO(__vsubss, true, clamp(x - y, w, true)), TWO(__vsubus, false, clamp(x - y, w, false));
  TWO(__vavgs, true, (x + y + (x + y >= 0)) >> 1), TWO(__vavgu, false, (x + y + 1) >> 1);
  TWO(__vhaddu, false, (x + y) >> 1);
  TWO(__vmaxs, true, std::max(x, y)), TWO(__vmaxu, false, std::max(x, y));
  TWO(__vmins, true, std::min(x, y)), TWO(__vminu, false, std::min(x, y));
  COMPARE(eq, true, x == y), COMPARE(ne, true, x != y);
  COMPARE(ges, true, x >= y), COMPARE(geu, false, x >= y), COMPARE(gts, true, x > y), COMPARE(gtu, false, x > y);
  COMPARE(les, true, x <= y), COMPARE(leu, false, x <= y), COMPARE(lts, true, x < y), COMPARE(ltu, false, x < y);
  SUM(__vsads2, 16, true, std::abs(x - y)), SUM(__vsads4, 8, true, std::abs(x - y));
  SUM(__vsadu2, 16, false, std::abs(x - y)), SUM(__vsadu4, 8, false, std::abs(x - y));
}

// The names of CUDA 12: minima and maxima of sums and of three, with or without a floor of zero.
#define FAMILY(m, pick)                                                                                                \
  CASE(__viadd##m##_s32(a, b, c), 32, true, std::pick((L)(int32_t)(x + y), z)),                                        \
      CASE(__viadd##m##_u32(a, b, c), 32, false, std::pick((L)(uint32_t)(x + y), z)),                                  \
      CASE(__viadd##m##_s16x2(a, b, c), 16, true, std::pick((L)(int16_t)(x + y), z)),                                  \
      CASE(__viadd##m##_u16x2(a, b, c), 16, false, std::pick((L)(uint16_t)(x + y), z)),                                \
      CASE(__viadd##m##_s32_relu(a, b, c), 32, true, std::max(std::pick((L)(int32_t)(x + y), z), (L)0)),               \
      CASE(__viadd##m##_s16x2_relu(a, b, c), 16, true, std::max(std::pick((L)(int16_t)(x + y), z), (L)0)),             \
      CASE(__vi##m##3_s32(a, b, c), 32, true, std::pick(std::pick(x, y), z)),                                          \
      CASE(__vi##m##3_u32(a, b, c), 32, false, std::pick(std::pick(x, y), z)),                                         \
      CASE(__vi##m##3_s16x2(a, b, c), 16, true, std::pick(std::pick(x, y), z)),                                        \
      CASE(__vi##m##3_u16x2(a, b, c), 16, false, std::pick(std::pick(x, y), z)),                                       \
      CASE(__vi##m##3_s32_relu(a, b, c), 32, true, std::max(std::pick(std::pick(x, y), z), (L)0)),                     \
      CASE(__vi##m##3_s16x2_relu(a, b, c), 16, true, std::max(std::pick(std::pick(x, y), z), (L)0)),                   \
      CASE(__vi##m##_s32_relu(a, b), 32, true, std::max(std::pick(x, y), (L)0)),                                       \
      CASE(__vi##m##_s16x2_relu(a, b), 16, true, std::max(std::pick(x, y), (L)0))

__device__ static U with_predicates(U a, U b, int which) { // the predicates say that the first was chosen
  bool high = false, low;
  U r;
  switch (which) {
  case 0: r = __vibmax_s16x2(a, b, &high, &low); break;
  case 1: r = __vibmax_u16x2(a, b, &high, &low); break;
  case 2: r = __vibmin_s16x2(a, b, &high, &low); break;
  case 3: r = __vibmin_u16x2(a, b, &high, &low); break;
  case 4: r = __vibmax_s32(a, b, &low); break;
  case 5: r = __vibmax_u32(a, b, &low); break;
  case 6: r = __vibmin_s32(a, b, &low); break;
  default: r = __vibmin_u32(a, b, &low);
  }
  return r ^ (U)high << 4 ^ (U)low;
}
static U with_predicates_host(U a, U b, int which) {
  int width = which < 4 ? 16 : 32;
  bool largest = (which & 2) == 0, is_signed = (which & 1) == 0;
  U r = each(width, is_signed, a, b, 0, [=](L x, L y, L) { return largest ? std::max(x, y) : std::min(x, y); });
  for (int k = 0; k < 32 / width; k++) {
    L x = part(a, k, width, is_signed), y = part(b, k, width, is_signed);
    r ^= (U)(largest ? x >= y : x <= y) << 4 * k;
  }
  return r;
}
#define PREDICATES(k)                                                                                                  \
  compare(                                                                                                             \
      "with predicates " #k, [] __device__(U a, U b, U c) { return with_predicates(a, b, k); },                        \
      [](U a, U b, U c) { return with_predicates_host(a, b, k); })

static U dot(U a, U b, U c, int count, int first, bool is_signed) {
  for (int k = 0; k < count; k++) c += (U)(part(a, k, 32 / count, is_signed) * part(b, first + k, 8, is_signed));
  return c;
}
#define DOT(call, ...)                                                                                                 \
  compare(                                                                                                             \
      #call, [] __device__(U a, U b, U c) -> U { return call; },                                                       \
      [](U a, U b, U c) { return dot(a, b, c, __VA_ARGS__); })
static void test_dots() {
  DOT(__dp4a(a, b, c), 4, 0, false), DOT(__dp4a((int)a, (int)b, (int)c), 4, 0, true);
  DOT(__dp2a_lo(a, b, c), 2, 0, false), DOT(__dp2a_lo((int)a, (int)b, (int)c), 2, 0, true);
  DOT(__dp2a_hi(a, b, c), 2, 2, false), DOT(__dp2a_hi((int)a, (int)b, (int)c), 2, 2, true);
}

#define VIDEO(text, w_, is_signed, formula)                                                                            \
  compare(                                                                                                             \
      text,                                                                                                            \
      [] __device__(U a, U b, U c) -> U {                                                                              \
        U r;                                                                                                           \
        asm(text " %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));                                               \
        return r;                                                                                                      \
      },                                                                                                               \
      [](U a, U b, U c) {                                                                                              \
        const int w = w_;                                                                                              \
        Element f = [=](L x, L y, L) -> L { return formula; };                                                         \
        return strstr(text, ".add") ? total(w, is_signed, a, b, c, f) : each(w, is_signed, a, b, c, f);                \
      })
static void test_video() {
  VIDEO("vadd4.s32.s32.s32.sat", 8, true, clamp(x + y, w, true));
  VIDEO("vadd2.u32.u32.u32", 16, false, x + y);
  VIDEO("vsub4.u32.u32.u32.sat", 8, false, clamp(x - y, w, false));
  VIDEO("vsub2.s32.s32.s32.add", 16, true, x - y);
  VIDEO("vavrg4.u32.u32.u32", 8, false, (x + y + 1) >> 1);
  VIDEO("vabsdiff4.u32.u32.u32.add", 8, false, std::abs(x - y));
  VIDEO("vabsdiff2.s32.s32.s32.sat", 16, true, clamp(std::abs(x - y), w, true));
  VIDEO("vmin4.s32.s32.s32", 8, true, std::min(x, y));
  VIDEO("vmax2.u32.u32.u32", 16, false, std::max(x, y));
  VIDEO("vset4.s32.s32.lt", 8, true, x < y);
  VIDEO("vset2.u32.u32.ne.add", 16, false, x != y);
}

// Saturating conversions that pack.
#define PACK(type, w, is_signed, ...)                                                                                  \
  compare(                                                                                                             \
      type,                                                                                                            \
      [] __device__(U a, U b, U c) -> U {                                                                              \
        U r;                                                                                                           \
        asm("cvt.pack.sat." type " %0, %1, %2" __VA_ARGS__ ";" : "=r"(r) : "r"(a), "r"(b), "r"(c));                    \
        return r;                                                                                                      \
      },                                                                                                               \
      [](U a, U b, U c) -> U {                                                                                         \
        const uint64_t ones = (1ull << w) - 1, above = strstr(type, "b32") ? (uint64_t)c << 2 * w : 0;                 \
        return (U)(above | ((uint64_t)clamp((int32_t)a, w, is_signed) & ones) << w |                                   \
                   ((uint64_t)clamp((int32_t)b, w, is_signed) & ones));                                                \
      })
static void test_packing() {
  PACK("s16.s32", 16, true), PACK("u16.s32", 16, false);
  PACK("u8.s32.b32", 8, false, ", %3"), PACK("s8.s32.b32", 8, true, ", %3");
}

int main() {
  test_intrinsics(), test_dots(), test_video(), test_packing();
  FAMILY(max, max), FAMILY(min, min);
  PREDICATES(0), PREDICATES(1), PREDICATES(2), PREDICATES(3), PREDICATES(4), PREDICATES(5), PREDICATES(6),
      PREDICATES(7);
  return finish("simd");
}
