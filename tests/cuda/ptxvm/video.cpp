// Integers packed in a word: dot products, and the video instructions on pairs and quads (vadd2 ... vset4).
#include "integer.h"

namespace ptxvm {

namespace {

// ---- dp4a and dp2a

int64_t element(uint64_t word, int k, int width, bool is_signed) {
  uint32_t v = static_cast<uint32_t>(word) >> k * width & ((1u << width) - 1);
  return is_signed && v >> (width - 1) ? static_cast<int64_t>(v) - (1 << width) : v;
}

enum Flag : uint8_t { kSignedA = 1, kSignedB = 2, kSignedD = 4, kSaturate = 8, kAdds = 16, kHigh = 32 };

template <int kCount> void dot(Context &c, const Instruction &i, uint32_t mask) { // kCount elements of a, bytes of b
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]), *e = c.lanes(i.src[2]);
  Lane *d = c.lanes(i.dst);
  const int first = i.mode & kHigh ? 2 : 0;
  for_lanes(mask, [&](int l) {
    int64_t sum = static_cast<int64_t>(e[l]);
    for (int k = 0; k < kCount; k++)
      sum += element(a[l], k, 32 / kCount, i.mode & kSignedA) * element(b[l], first + k, 8, i.mode & kSignedB);
    d[l] = static_cast<uint32_t>(sum);
  });
}

uint8_t take_signs(Decoder &d) { // of a and b
  bool a = is_signed(d.take_type()), b = is_signed(d.take_type());
  return static_cast<uint8_t>((a ? kSignedA : 0) | (b ? kSignedB : 0));
}

template <int kCount> void decode_dot(Decoder &d) {
  operands(d, 3);
  bool high = kCount == 2 && d.take("hi");
  if (kCount == 2) d.take("lo");
  d.out.mode = static_cast<uint8_t>(take_signs(d) | (high ? kHigh : 0));
  d.out.handler = dot<kCount>;
}

// ---- Pairs of 16 bits and quads of 8: d is the elements, or with .add their sum and the third operand. Masks and
// selectors on the operands are not read.

enum class VideoOp : uint8_t { Add, Sub, Average, Difference, Min, Max, Set };

int64_t apply(VideoOp op, int64_t a, int64_t b, int comparison) {
  switch (op) {
  case VideoOp::Add: return a + b;
  case VideoOp::Sub: return a - b;
  case VideoOp::Average: return (a + b + (a + b >= 0)) >> 1;
  case VideoOp::Difference: return a > b ? a - b : b - a;
  case VideoOp::Min: return std::min(a, b);
  case VideoOp::Max: return std::max(a, b);
  case VideoOp::Set: break;
  }
  const bool results[] = {a == b, a != b, a<b, a <= b, a> b, a >= b};
  return results[comparison];
}

template <int kCount> void video(Context &c, const Instruction &i, uint32_t mask) {
  constexpr int width = 32 / kCount;
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]), *e = c.lanes(i.src[2]);
  Lane *d = c.lanes(i.dst);
  const bool is_signed = i.mode & kSignedD;
  const int64_t low = is_signed ? -(1ll << (width - 1)) : 0, high = (1ll << (is_signed ? width - 1 : width)) - 1;
  for_lanes(mask, [&](int l) {
    uint32_t word = 0, sum = static_cast<uint32_t>(e[l]);
    for (int k = 0; k < kCount; k++) {
      int64_t value = apply(static_cast<VideoOp>(i.count), element(a[l], k, width, i.mode & kSignedA),
                            element(b[l], k, width, i.mode & kSignedB), i.target);
      if (i.mode & kSaturate) value = std::min(std::max(value, low), high);
      sum += static_cast<uint32_t>(value);
      word |= (static_cast<uint32_t>(value) & ((1u << width) - 1)) << k * width;
    }
    d[l] = i.mode & kAdds ? sum : word;
  });
}

template <int kCount, VideoOp kOp> void decode_video(Decoder &d) {
  operands(d, 3);
  d.out.count = static_cast<uint8_t>(kOp);
  uint8_t mode = 0;
  if (kOp != VideoOp::Set) mode |= is_signed(d.take_type()) ? kSignedD : 0;
  mode |= take_signs(d);
  // "add" is a modifier here, as "sat" is, and excludes it.
  if (d.take("sat")) mode |= kSaturate;
  if (d.take("add")) mode |= kAdds;
  d.out.mode = mode;
  d.out.target = kOp == VideoOp::Set ? d.take_one_of({"eq", "ne", "lt", "le", "gt", "ge"}) : 0;
  if (d.out.target < 0) d.unsupported("which comparison");
  d.out.handler = video<kCount>;
}

} // namespace

void add_video_instructions(DecodeTable &t) {
  t["dp4a"] = decode_dot<4>;
  t["dp2a"] = decode_dot<2>;
  t["vadd2"] = decode_video<2, VideoOp::Add>;
  t["vadd4"] = decode_video<4, VideoOp::Add>;
  t["vsub2"] = decode_video<2, VideoOp::Sub>;
  t["vsub4"] = decode_video<4, VideoOp::Sub>;
  t["vavrg2"] = decode_video<2, VideoOp::Average>;
  t["vavrg4"] = decode_video<4, VideoOp::Average>;
  t["vabsdiff2"] = decode_video<2, VideoOp::Difference>;
  t["vabsdiff4"] = decode_video<4, VideoOp::Difference>;
  t["vmin2"] = decode_video<2, VideoOp::Min>;
  t["vmin4"] = decode_video<4, VideoOp::Min>;
  t["vmax2"] = decode_video<2, VideoOp::Max>;
  t["vmax4"] = decode_video<4, VideoOp::Max>;
  t["vset2"] = decode_video<2, VideoOp::Set>;
  t["vset4"] = decode_video<4, VideoOp::Set>;
}

} // namespace ptxvm
