// From text to handlers. Each family of instructions has a file that fills the table; a decoder takes the modifiers it
// understands, and whatever is left over makes the instruction unsupported rather than silently wrong.
#pragma once
#include "engine.h"
#include "numeric.h"
#include <initializer_list>

namespace ptxvm {

struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Decoder {
public:
  Decoder(Program &program, const Function &function, const RawInstruction &raw, Instruction &out);

  std::string opcode;
  Program &program;
  const Function &function;
  const RawInstruction &raw;
  Instruction &out;

  // Modifiers: each can be taken once.
  bool take(const char *name);
  int take_one_of(std::initializer_list<const char *> names); // index, or -1
  Type take_type();                                           // next type modifier; throws when there is none
  Type take_type_or(Type otherwise);
  Rounding take_rounding(Rounding otherwise, bool *found = nullptr);
  void ignore(std::initializer_list<const char *> names) {
    for (auto n : names) take(n);
  }
  Space take_space(Space otherwise);
  bool take_ordering(); // .volatile, .relaxed.gpu and the like; true if there was one
  std::string unknown_modifiers() const;

  // Operands.
  size_t count() const { return raw.operands.size(); }
  const Operand &operand(size_t k) const;
  bool has(size_t k) const { return k < raw.operands.size(); }
  void destination(size_t k); // register, and its q in p|q
  void source(int slot, size_t k);
  void pred_source(int slot, size_t k);
  void address(int slot, size_t k); // fills imm as well
  Ref ref(const Operand &operand);
  Ref constant(uint64_t value);
  static Ref pred_ref(int reg) { return {static_cast<int64_t>(reg) * kPredBytes, Base::Pred}; }
  Ref pred_sink() const { return pred_ref(static_cast<int>(function.register_is_pred.size())); }
  std::vector<Ref> refs(const Operand &operand); // of a vector, or the single one
  Extra &extra();
  bool is_pred(const Operand &operand) const;
  [[noreturn]] void unsupported(const std::string &why = "") const;

private:
  uint64_t symbol_value(const Symbol &symbol) const;
  uint64_t real_value(const Operand &operand) const;
  std::vector<std::string> mods_;
};

using DecodeFunction = void (*)(Decoder &);
using DecodeTable = std::unordered_map<std::string, DecodeFunction>;
void add_integer_instructions(DecodeTable &table);
void add_float_instructions(DecodeTable &table);
void add_conversion_instructions(DecodeTable &table);
void add_comparison_instructions(DecodeTable &table);
void add_bit_instructions(DecodeTable &table);
void add_video_instructions(DecodeTable &table);
void add_data_instructions(DecodeTable &table);
void add_memory_instructions(DecodeTable &table);
void add_atomic_instructions(DecodeTable &table);
void add_warp_instructions(DecodeTable &table);
void add_control_instructions(DecodeTable &table);
void add_matrix_instructions(DecodeTable &table);

// A type as a C++ type, for instructions that treat all integers alike.
template <class F> void with_integer_type(Type type, F f) {
  switch (type) {
  case Type::U8:
  case Type::B8: f(uint8_t()); break;
  case Type::S8: f(int8_t()); break;
  case Type::U16:
  case Type::B16: f(uint16_t()); break;
  case Type::S16: f(int16_t()); break;
  case Type::U32:
  case Type::B32: f(uint32_t()); break;
  case Type::S32: f(int32_t()); break;
  case Type::U64:
  case Type::B64: f(uint64_t()); break;
  case Type::S64: f(int64_t()); break;
  default: throw Unsupported("this type");
  }
}

// Handlers of instructions that compute lane by lane: the functor says what, T how operands are read and written.
template <class T> inline Lane widen(T value) {
  if constexpr (std::is_same_v<T, float>) return bits_of(value);
  else if constexpr (std::is_same_v<T, double>) return bits_of(value);
  else return static_cast<Lane>(static_cast<int64_t>(value));
}
template <> inline Lane widen<uint64_t>(uint64_t value) { return value; }
template <class T> inline T narrow(Lane value) {
  if constexpr (std::is_same_v<T, float>) return f32_of(value);
  else if constexpr (std::is_same_v<T, double>) return f64_of(value);
  else return static_cast<T>(value);
}

template <class To, class From, class F> void unary(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) { d[l] = widen<To>(F()(narrow<From>(a[l]))); });
}
template <class To, class From, class F> void binary(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]);
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) { d[l] = widen<To>(F()(narrow<From>(a[l]), narrow<From>(b[l]))); });
}
template <class To, class From, class F> void ternary(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]), *b = c.lanes(i.src[1]), *e = c.lanes(i.src[2]);
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) { d[l] = widen<To>(F()(narrow<From>(a[l]), narrow<From>(b[l]), narrow<From>(e[l]))); });
}

} // namespace ptxvm
