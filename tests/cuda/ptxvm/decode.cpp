#include "decode.h"
#include "report.h"
#include <algorithm>

namespace ptxvm {

static const DecodeTable &decode_table() {
  // Never destroyed, like all that late work may need while the program ends.
  static const DecodeTable &table = *[] {
    auto *table_of_all = new DecodeTable;
    DecodeTable &t = *table_of_all;
    add_integer_instructions(t);
    add_float_instructions(t);
    add_bit_instructions(t);
    add_video_instructions(t);
    add_conversion_instructions(t);
    add_comparison_instructions(t);
    add_data_instructions(t);
    add_memory_instructions(t);
    add_atomic_instructions(t);
    add_warp_instructions(t);
    add_control_instructions(t);
    add_matrix_instructions(t);
    return table_of_all;
  }();
  return table;
}

Decoder::Decoder(Program &p, const Function &f, const RawInstruction &r, Instruction &o)
    : program(p), function(f), raw(r), out(o), mods_(split_dots(r.text)) {
  opcode = mods_[0];
  mods_.erase(mods_.begin());
}

bool Decoder::take(const char *name) {
  auto it = std::find(mods_.begin(), mods_.end(), name);
  if (it == mods_.end()) return false;
  mods_.erase(it);
  return true;
}

int Decoder::take_one_of(std::initializer_list<const char *> names) {
  int index = 0;
  for (const char *name : names) {
    if (take(name)) return index;
    index++;
  }
  return -1;
}

Type Decoder::take_type_or(Type otherwise) {
  for (size_t k = 0; k < mods_.size(); k++) {
    Type type = type_named(mods_[k]);
    if (type == Type::None) continue;
    mods_.erase(mods_.begin() + static_cast<long>(k));
    return type;
  }
  return otherwise;
}

Type Decoder::take_type() {
  Type type = take_type_or(Type::None);
  if (type == Type::None) unsupported("it names no type");
  return type;
}

Rounding Decoder::take_rounding(Rounding otherwise, bool *found) {
  int k = take_one_of({"rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi"});
  if (found) *found = k >= 0;
  static const Rounding values[] = {Rounding::NearestEven, Rounding::Zero,        Rounding::Down,
                                    Rounding::Up,          Rounding::NearestAway, Rounding::NearestEven,
                                    Rounding::Zero,        Rounding::Down,        Rounding::Up};
  return k < 0 ? otherwise : values[k];
}

Space Decoder::take_space(Space otherwise) {
  if (take("global")) return Space::Global;
  if (take("shared") || take("shared::cta")) return Space::Shared;
  if (take("local")) return Space::Local;
  if (take("param") || take("param::entry") || take("param::func")) return Space::Param;
  if (take("const")) return Space::Const;
  return otherwise;
}

bool Decoder::take_ordering() {
  bool ordered = take_one_of({"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}) >= 0;
  ignore({"weak", "cta", "cluster", "gpu", "sys"});
  return ordered;
}

std::string Decoder::unknown_modifiers() const {
  std::string text;
  for (const std::string &mod : mods_) text += "." + mod;
  return text;
}

void Decoder::unsupported(const std::string &why) const { throw Unsupported(why); }

const Operand &Decoder::operand(size_t k) const {
  if (k >= raw.operands.size()) unsupported("it has too few operands");
  return raw.operands[k];
}

bool Decoder::is_pred(const Operand &operand) const {
  return operand.kind == Operand::Register && function.register_is_pred[static_cast<size_t>(operand.reg)];
}

Ref Decoder::constant(uint64_t value) {
  auto &known = program.constant_of[value];
  if (!known) {
    program.constants.emplace_back();
    program.constants.back().fill(value);
    known = program.constants.back().data();
  }
  return {static_cast<int64_t>(reinterpret_cast<uint64_t>(known)), Base::Absolute};
}

uint64_t Decoder::symbol_value(const Symbol &symbol) const {
  if (symbol.space != Space::Shared) return symbol.address;
  auto it = program.shared_offset.find(&symbol);
  if (it == program.shared_offset.end()) unsupported("its shared variable " + symbol.name + " has no place");
  return it->second;
}

// What a decimal number means depends on the type it is read as: the last one of the instruction.
uint64_t Decoder::real_value(const Operand &operand) const {
  Type type = Type::None;
  for (const std::string &part : split_dots(raw.text))
    if (type_named(part) != Type::None) type = type_named(part);
  double value = f64_of(static_cast<uint64_t>(operand.value));
  if (type == Type::F64) return bits_of(value);
  if (type != Type::F32) unsupported("a decimal number of this type");
  return bits_of(static_cast<float>(value));
}

Ref Decoder::ref(const Operand &operand) {
  switch (operand.kind) {
  case Operand::Register:
    if (is_pred(operand)) return pred_ref(operand.reg);
    return {static_cast<int64_t>(operand.reg) * kSlotBytes, Base::Window};
  case Operand::Special: return {static_cast<int64_t>(operand.reg) * kSlotBytes, Base::Special};
  case Operand::Immediate:
    return constant(operand.is_real ? real_value(operand) : static_cast<uint64_t>(operand.value));
  case Operand::Sink: return {static_cast<int64_t>(function.register_is_pred.size()) * kSlotBytes, Base::Window};
  case Operand::SymbolAddress:
    if (operand.symbol->space == Space::Local || (operand.symbol->space == Space::Param && !function.is_entry))
      out.frame_relative = true;
    return constant(symbol_value(*operand.symbol));
  case Operand::Name:
    if (const Function *callee = function.module->find(operand.name)) return constant(callee->id);
    unsupported("unknown name " + operand.name);
  default: unsupported("an operand of this kind");
  }
}

void Decoder::destination(size_t k) {
  out.dst = ref(operand(k));
  if (operand(k).pair >= 0) out.pair = pred_ref(operand(k).pair);
}

void Decoder::source(int slot, size_t k) { out.src[slot] = ref(operand(k)); }

void Decoder::pred_source(int slot, size_t k) {
  const Operand &o = operand(k);
  out.src[slot] = o.kind == Operand::Immediate ? constant(o.value ? kAllLanes : 0) : ref(o);
  out.flip[slot] = o.negated ? kAllLanes : 0;
}

void Decoder::address(int slot, size_t k) {
  const Operand &memory = operand(k);
  if (memory.kind != Operand::Memory) unsupported("an address is missing");
  out.imm = memory.value;
  if (memory.symbol) {
    Space space = memory.symbol->space;
    out.imm += static_cast<int64_t>(symbol_value(*memory.symbol));
    out.frame_relative = space == Space::Local || (space == Space::Param && !function.is_entry);
    if (out.frame_relative) out.space = Space::Local;
    else if (out.space == Space::Generic) out.space = space;
  } else if (out.space == Space::Param && !function.is_entry) {
    out.space = Space::Local;
  }
  out.src[slot] = memory.reg >= 0 ? Ref{static_cast<int64_t>(memory.reg) * kSlotBytes, Base::Window} : constant(0);
}

std::vector<Ref> Decoder::refs(const Operand &operand) {
  std::vector<Ref> list;
  if (operand.kind == Operand::Vector)
    for (const Operand &element : operand.elements) list.push_back(ref(element));
  else list.push_back(ref(operand));
  return list;
}

Extra &Decoder::extra() {
  if (!out.extra) {
    program.extras.emplace_back();
    out.extra = &program.extras.back();
  }
  return const_cast<Extra &>(*out.extra);
}

static void run_unsupported(Context &c, const Instruction &i, uint32_t mask) {
  fault(c, i, __builtin_ctz(mask), "instruction not supported: %s (%s)", i.raw->text.c_str(), i.extra->name.c_str());
}

static void decode(Program &program, const Function &function, const RawInstruction &raw, Instruction &out) {
  out.raw = &raw;
  out.index = program.instruction_count++;
  if (raw.guard >= 0) out.guard = raw.guard * kPredBytes;
  out.guard_flip = raw.guard_negated ? kAllLanes : 0;
  Decoder decoder(program, function, raw, out);
  std::string why;
  try {
    auto entry = decode_table().find(decoder.opcode);
    if (entry == decode_table().end()) throw Unsupported("unknown opcode");
    entry->second(decoder);
    if (decoder.unknown_modifiers().empty()) return;
    why = "unknown modifiers " + decoder.unknown_modifiers();
  } catch (const Unsupported &reason) {
    why = reason.what();
  }
  decoder.extra().name = why;
  out.handler = run_unsupported;
}

Code *Program::code_of(const Function *function) {
  auto &code = codes[function];
  if (code) return code.get();
  code = std::make_unique<Code>();
  code->function = function;
  code->window_bytes = static_cast<uint32_t>((function->register_is_pred.size() + 1) * kSlotBytes);
  code->local_size = static_cast<uint32_t>(align_up(static_cast<uint64_t>(function->local_size), 16));
  code->instructions.resize(function->code.size());
  for (size_t k = 0; k < function->code.size(); k++) decode(*this, *function, function->code[k], code->instructions[k]);
  return code.get();
}

// ---- Programs: a kernel with everything it can call, and its shared memory laid out.

static bool reaches_other_blocks(const RawInstruction &raw) {
  const std::string &text = raw.text;
  auto begins = [&](const char *prefix) { return text.compare(0, strlen(prefix), prefix) == 0; };
  if (text.find(".shared") != std::string::npos) return false;
  if (begins("atom") || begins("red.") || begins("nanosleep")) return true;
  bool ordered = text.find(".volatile") != std::string::npos || text.find(".relaxed") != std::string::npos ||
                 text.find(".acquire") != std::string::npos || text.find(".release") != std::string::npos;
  if ((begins("ld") || begins("st")) && ordered) return true;
  return begins("call");
}

static void collect(Program &program, Function *function, std::vector<Function *> &found, uint64_t &dynamic_align) {
  if (!function->has_body || std::find(found.begin(), found.end(), function) != found.end()) return;
  found.push_back(function);
  parse_body(*function);
  auto place = [&](const Symbol *symbol) {
    if (!symbol || symbol->space != Space::Shared) return;
    if (symbol->dynamic) dynamic_align = std::max(dynamic_align, symbol->align);
    if (symbol->dynamic || program.shared_offset.count(symbol)) return;
    program.static_shared = align_up(program.static_shared, symbol->align);
    program.shared_offset[symbol] = program.static_shared;
    program.static_shared += symbol->size;
  };
  for (const RawInstruction &raw : function->code) {
    for (const Operand &operand : raw.operands) {
      place(operand.symbol);
      if (operand.kind != Operand::Name) continue;
      Function *callee = function->module->find(operand.name);
      if (callee && callee->has_body) collect(program, callee, found, dynamic_align);
    }
    bool plain_call = raw.text.compare(0, 4, "call") == 0 &&
                      std::any_of(raw.operands.begin(), raw.operands.end(), [&](const Operand &o) {
                        Function *callee = o.kind == Operand::Name ? function->module->find(o.name) : nullptr;
                        return callee && callee->has_body;
                      });
    if (!plain_call && reaches_other_blocks(raw)) program.blocks_independent = false;
  }
}

Program *program_of(const Function *kernel) {
  static auto *programs = new std::unordered_map<const Function *, std::unique_ptr<Program>>;
  auto &program = (*programs)[kernel];
  if (program) return program.get();
  program = std::make_unique<Program>();
  program->kernel = kernel;
  std::vector<Function *> reachable;
  uint64_t dynamic_align = 16;
  collect(*program, const_cast<Function *>(kernel), reachable, dynamic_align);
  uint64_t dynamic_offset = align_up(program->static_shared, dynamic_align);
  for (const Symbol &symbol : kernel->module->symbols)
    if (symbol.dynamic) program->shared_offset[&symbol] = dynamic_offset;
  for (Function *function : reachable) {
    for (const Symbol &symbol : function->symbols)
      if (symbol.dynamic) program->shared_offset[&symbol] = dynamic_offset;
  }
  bool uses_dynamic = dynamic_offset != program->static_shared;
  if (uses_dynamic && program->static_shared) program->static_shared = dynamic_offset;
  for (Function *function : reachable) program->code_of(function);
  program->entry = program->code_of(kernel);
  return program.get();
}

} // namespace ptxvm
