// PTX as parsed: modules, functions, symbols and instructions, before anything is known about their meaning.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptxvm {

enum class Type : uint8_t {
  None,
  Pred,
  B8,
  B16,
  B32,
  B64,
  B128,
  U8,
  U16,
  U32,
  U64,
  S8,
  S16,
  S32,
  S64,
  F16,
  F16x2,
  BF16,
  BF16x2,
  TF32,
  F32,
  F64,
  E4M3x2,
  E5M2x2
};
enum class Space : uint8_t { Generic, Global, Shared, Local, Param, Const };

Type type_named(const std::string &name); // Type::None when there is no such type
int size_of(Type type);
bool is_signed(Type type);
bool is_float(Type type); // scalar floating point

struct Symbol {
  std::string name;
  Space space = Space::Global;
  bool dynamic = false; // extern __shared__ without a size
  bool in_module = false;
  uint64_t address = 0; // global and const: device address; local and param: offset in the frame
  uint64_t size = 0, align = 1;
};

struct Parameter {
  std::string name;
  int offset, size;
};

// Where an instruction came from; `inlined` is the line its function was inlined at, 0 when it was not.
struct Location {
  int file = 0, line = 0, inlined_file = 0, inlined_line = 0;
};

struct Operand {
  enum Kind : uint8_t { None, Register, Immediate, Special, SymbolAddress, Vector, Memory, Name, Sink };
  Kind kind = None;
  bool negated = false;
  bool is_real = false; // value holds the bits of a double that was written in decimal
  int reg = -1;         // register number, or index of the special register
  int pair = -1;        // the q of p|q
  int64_t value = 0;
  Symbol *symbol = nullptr;
  std::string name;
  std::vector<Operand> elements;
};

struct RawInstruction {
  std::string text; // opcode with all its modifiers
  std::vector<Operand> operands;
  int guard = -1;
  bool guard_negated = false;
  int ptx_line = 0;
  Location location;
};

struct Module;

struct Function {
  std::string name;
  Module *module = nullptr;
  bool is_entry = false, has_body = false, parsed = false;
  size_t body_begin = 0; // text position after '{'
  int body_line = 0;
  std::vector<Parameter> params, results;
  int param_size = 0, result_size = 0;
  int max_threads = 1024;
  uint64_t id = 0; // the value of its address
  // Filled when the body is parsed.
  std::vector<bool> register_is_pred;
  std::vector<int> register_mentions;
  std::deque<Symbol> symbols;
  int local_size = 0; // parameters, results and local variables, per thread
  std::vector<RawInstruction> code;
  std::unordered_map<std::string, int> labels;
  std::unordered_map<std::string, std::vector<std::string>> branch_targets;
};

struct Module {
  std::string text;
  std::map<std::string, std::unique_ptr<Function>> functions;
  std::deque<Symbol> symbols;
  std::unordered_map<std::string, Symbol *> symbol_named;
  std::unordered_map<int, std::string> files;
  int version_major = 0, version_minor = 0;

  Function *find(const std::string &name) const {
    auto it = functions.find(name);
    return it == functions.end() ? nullptr : it->second.get();
  }
};

struct ParseError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Reads declarations and places global variables; function bodies wait for parse_body.
std::unique_ptr<Module> parse_module(std::string text);
void parse_body(Function &function);

const std::vector<std::string> &special_register_names();
std::vector<std::string> split_dots(const std::string &text);

// Generic addresses: device and registered host memory keep theirs; the other spaces get windows that no host address
// falls into, told apart by the bits above 47.
constexpr int kWindowShift = 48;
constexpr uint64_t kSharedWindow = 1ull << kWindowShift, kLocalWindow = 2ull << kWindowShift;
constexpr uint64_t kFunctionWindow = 3ull << kWindowShift, kParamWindow = 4ull << kWindowShift;

constexpr int kParamAlign = 16;
inline uint64_t align_up(uint64_t value, uint64_t align) { return (value + align - 1) / align * align; }

} // namespace ptxvm
