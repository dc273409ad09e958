// Tensor-core instructions: mma.sync with f16, bf16 and tf32 inputs, and ldmatrix.
//
// Lane l holds, with g = l / 4 and t = l % 4 and e elements a register (2 of 16 bits, or 1 of tf32):
//   A register r: row g + 8 (r mod 2), columns 4 e (r / 2) + e t ...
//   B register r: rows 4 e r + e t ..., column g
//   C and D: rows g and g + 8, columns 2 t and 2 t + 1.
// Sums are formed exactly enough in double and rounded once; the hardware's own rounding is different and not
// documented.
#include "access.h"
#include "decode.h"
#include "warp_ops.h"

namespace ptxvm {

namespace {

double element(Type type, uint64_t bits, int k) {
  switch (type) {
  case Type::F16: return f16_of(bits >> 16 * k);
  case Type::BF16: return bf16_of(bits >> 16 * k);
  default: return static_cast<double>(f32_of(bits & ~0x1fffull)); // tf32 ignores the low bits
  }
}

struct Matrices {
  double a[16][16], b[16][8], c[16][8];
};

void gather(Context &c, const Instruction &i, int depth, Matrices &m) {
  Type type = static_cast<Type>(i.size);
  const int e = type == Type::TF32 ? 1 : 2;
  const auto &a = i.extra->refs, &b = i.extra->refs2, &acc = i.extra->refs3;
  for (int l = 0; l < kLanes; l++) {
    int g = l / 4, t = l % 4;
    for (int r = 0; r < static_cast<int>(a.size()); r++)
      for (int k = 0; k < e; k++)
        m.a[g + 8 * (r % 2)][4 * e * (r / 2) + e * t + k] = element(type, c.lanes(a[static_cast<size_t>(r)])[l], k);
    for (int r = 0; r < static_cast<int>(b.size()); r++)
      for (int k = 0; k < e; k++)
        m.b[4 * e * r + e * t + k][g] = element(type, c.lanes(b[static_cast<size_t>(r)])[l], k);
    bool wide = acc.size() == 4;
    for (int k = 0; k < 4; k++) {
      uint64_t bits = c.lanes(acc[static_cast<size_t>(wide ? k : k / 2)])[l];
      m.c[g + 8 * (k / 2)][2 * t + k % 2] = wide ? static_cast<double>(f32_of(bits)) : f16_of(bits >> 16 * (k % 2));
    }
  }
  for (auto &row : m.c)
    for (int column = 0; column < 8; column++) {
      int r = static_cast<int>(&row - m.c);
      for (int k = 0; k < depth; k++) row[column] += m.a[r][k] * m.b[k][column];
    }
}

void finish_mma(Context &c, const Instruction &i) {
  Matrices m;
  gather(c, i, i.target, m);
  const auto &d = i.extra->targets; // window offsets of the destination registers
  for (int l = 0; l < kLanes; l++) {
    int g = l / 4, t = l % 4;
    for (int k = 0; k < static_cast<int>(d.size()); k++) {
      Lane &out = reinterpret_cast<Lane *>(c.bases[0] + d[static_cast<size_t>(k)])[l];
      if (d.size() == 4) out = bits_of(static_cast<float>(m.c[g + 8 * (k / 2)][2 * t + k % 2]));
      else out = f16_bits(m.c[g + 8 * k][2 * t]) | f16_bits(m.c[g + 8 * k][2 * t + 1]) << 16;
    }
  }
}

void finish_ldmatrix(Context &c, const Instruction &i) {
  const Lane *base = c.lanes(i.src[0]);
  const int matrices = static_cast<int>(i.extra->refs.size());
  const uint8_t *rows[kLanes];
  Footprint footprint;
  for (int l = 0; l < 8 * matrices; l++) {
    Place place = locate(c, i, l, lane_address(c, i, base, l), 16, AccessKind::Read);
    rows[l] = place.bytes;
    footprint.address[static_cast<size_t>(l)] = place.address, footprint.space[static_cast<size_t>(l)] = place.space;
  }
  uint32_t reading = matrices == 4 ? kAllLanes : (1u << 8 * matrices) - 1;
  for (int k = 0; k < matrices; k++) {
    Lane *d = c.lanes(i.extra->refs[static_cast<size_t>(k)]);
    for (int l = 0; l < kLanes; l++) {
      uint32_t value = 0;
      for (int e = 0; e < 2; e++) {
        int row = i.sync ? 2 * (l % 4) + e : l / 4, column = i.sync ? l / 4 : 2 * (l % 4) + e; // sync: transposed
        uint16_t half;
        memcpy(&half, rows[8 * k + row] + 2 * column, 2);
        value |= static_cast<uint32_t>(half) << 16 * e;
      }
      d[l] = value;
    }
  }
  if (!c.watch) return;
  footprint.bytes = 16, footprint.lanes = reading;
  observe(c, i, footprint, AccessKind::Read);
}

void decode_mma(Decoder &d) {
  if (!d.take("sync") || !d.take("aligned")) d.unsupported("only mma.sync.aligned");
  int shape = d.take_one_of({"m16n8k4", "m16n8k8", "m16n8k16"});
  if (shape < 0 || !d.take("row") || !d.take("col")) d.unsupported("this shape or layout");
  Type to = d.take_type(), a = d.take_type(), b = d.take_type(), from = d.take_type();
  bool halves = a == Type::F16 || a == Type::BF16;
  if (a != b || !(halves || a == Type::TF32) || (to != Type::F32 && !(to == Type::F16 && a == Type::F16)) || to != from)
    d.unsupported("these types");
  d.out.mode = static_cast<uint8_t>(WarpOp::Mma);
  d.out.size = static_cast<uint8_t>(a);
  d.out.target = 4 << shape; // the depth
  for (const Ref &r : d.refs(d.operand(0))) d.extra().targets.push_back(static_cast<int>(r.offset));
  d.extra().refs = d.refs(d.operand(1));
  d.extra().refs2 = d.refs(d.operand(2));
  d.extra().refs3 = d.refs(d.operand(3));
  size_t elements = halves ? 2 : 1;
  if (d.extra().refs.size() * elements * 2 != static_cast<size_t>(d.out.target))
    d.unsupported("this number of registers");
  d.out.handler = meet_all;
}

void decode_ldmatrix(Decoder &d) {
  d.ignore({"sync", "aligned"});
  int matrices = d.take_one_of({"x1", "x2", "x4"});
  if (!d.take("m8n8") || matrices < 0) d.unsupported("this shape");
  d.out.sync = d.take("trans");
  d.out.space = d.take_space(Space::Generic);
  if (d.take_type() != Type::B16) d.unsupported("this type");
  d.out.mode = static_cast<uint8_t>(WarpOp::LoadMatrix);
  d.out.size = 2;
  d.extra().refs = d.refs(d.operand(0));
  d.address(0, 1);
  d.out.handler = meet_all;
}

} // namespace

void finish_matrix(Context &c, const Instruction &i, uint32_t lanes, uint32_t members) {
  if (lanes != kAllLanes || members != kAllLanes)
    fault(c, i, __builtin_ctz(lanes), "%s needs all 32 lanes of the warp at the same instruction", i.raw->text.c_str());
  if (static_cast<WarpOp>(i.mode) == WarpOp::Mma) finish_mma(c, i);
  else finish_ldmatrix(c, i);
}

void add_matrix_instructions(DecodeTable &t) {
  t["mma"] = decode_mma;
  t["ldmatrix"] = decode_ldmatrix;
}

} // namespace ptxvm
