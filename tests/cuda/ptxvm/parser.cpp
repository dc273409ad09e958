#include "device_memory.h"
#include "lexer.h"
#include "ptx.h"
#include <cctype>
#include <cstring>

namespace ptxvm {

namespace {

struct TypeInfo {
  const char *name;
  Type type;
  int size;
};
const TypeInfo kTypes[] = {
    {"pred", Type::Pred, 1}, {"b8", Type::B8, 1},         {"b16", Type::B16, 2},       {"b32", Type::B32, 4},
    {"b64", Type::B64, 8},   {"b128", Type::B128, 16},    {"u8", Type::U8, 1},         {"u16", Type::U16, 2},
    {"u32", Type::U32, 4},   {"u64", Type::U64, 8},       {"s8", Type::S8, 1},         {"s16", Type::S16, 2},
    {"s32", Type::S32, 4},   {"s64", Type::S64, 8},       {"f16", Type::F16, 2},       {"f16x2", Type::F16x2, 4},
    {"bf16", Type::BF16, 2}, {"bf16x2", Type::BF16x2, 4}, {"tf32", Type::TF32, 4},     {"f32", Type::F32, 4},
    {"f64", Type::F64, 8},   {"e4m3x2", Type::E4M3x2, 2}, {"e5m2x2", Type::E5M2x2, 2},
};

bool starts_with(const std::string &text, const char *prefix) { return text.compare(0, strlen(prefix), prefix) == 0; }

// What a declaration says before its name: [.align N] .type [.v2|.v4] name[N]...
struct Declaration {
  std::string name;
  Type type = Type::B8;
  uint64_t align = 1, size = 0;
  bool is_unsized = false;
};

Declaration parse_declaration(Lexer &lex) {
  Declaration d;
  uint64_t align = 1, vector = 1, count = 1;
  for (;;) {
    d.name = lex.word();
    if (d.name.empty()) lex.fail("expected a name");
    if (d.name[0] != '.') break;
    std::string mod = d.name.substr(1);
    if (mod == "align")
      align = static_cast<uint64_t>(lex.integer());
    else if (mod == "v2")
      vector = 2;
    else if (mod == "v4")
      vector = 4;
    else if (type_named(mod) != Type::None)
      d.type = type_named(mod);
    else if (mod != "ptr" && mod != "global" && mod != "shared" && mod != "const" && mod != "local" && mod != "param" &&
             mod != "reg" && mod != "attribute")
      lex.fail("unknown declaration modifier ." + mod);
  }
  while (lex.accept('[')) {
    if (lex.accept(']')) {
      d.is_unsized = true;
      count = 0;
    } else {
      count *= static_cast<uint64_t>(lex.integer());
      lex.expect(']');
    }
  }
  d.size = count * vector * static_cast<uint64_t>(size_of(d.type));
  d.align = std::max(align, vector * static_cast<uint64_t>(size_of(d.type)));
  return d;
}

int parse_parameters(Lexer &lex, std::vector<Parameter> &list) { // after '('
  uint64_t offset = 0;
  if (lex.accept(')')) return 0;
  do {
    Declaration d = parse_declaration(lex);
    offset = align_up(offset, d.align);
    list.push_back({d.name, static_cast<int>(offset), static_cast<int>(d.size)});
    offset += d.size;
  } while (lex.accept(','));
  lex.expect(')');
  return static_cast<int>(offset);
}

class ModuleParser {
public:
  explicit ModuleParser(Module &module) : module_(module), lex_(module.text, 0, 1) {}

  void parse() {
    while (lex_.peek()) {
      std::string word = lex_.word();
      while (word == ".visible" || word == ".extern" || word == ".weak" || word == ".common") word = lex_.word();
      if (word == ".version")
        parse_version();
      else if (word == ".target" || word == ".address_size")
        lex_.skip_line();
      else if (word == ".file")
        parse_file();
      else if (word == ".section")
        lex_.skip_past('{'), lex_.skip_braces();
      else if (word == ".pragma")
        lex_.skip_past(';');
      else if (word == ".entry" || word == ".func")
        parse_function(word == ".entry");
      else if (word == ".global")
        parse_variable(Space::Global);
      else if (word == ".const")
        parse_variable(Space::Const);
      else if (word == ".shared")
        parse_variable(Space::Shared);
      else if (word == ".alias")
        lex_.skip_past(';');
      else
        lex_.fail("unknown directive '" + word + "'");
    }
    for (auto &fixup : fixups_) resolve(fixup);
  }

private:
  struct Fixup { // a symbol's address inside an initialiser
    uint64_t address;
    std::string name;
    int64_t addend;
  };

  void parse_version() {
    std::string version = lex_.word();
    module_.version_major = atoi(version.c_str());
    module_.version_minor = atoi(version.c_str() + version.find('.') + 1);
  }

  void parse_file() {
    int index = static_cast<int>(lex_.integer());
    module_.files[index] = lex_.quoted();
    lex_.skip_line();
  }

  void parse_function(bool is_entry) {
    static uint64_t next_id = kFunctionWindow;
    auto function = std::make_unique<Function>();
    function->id = next_id += 16;
    function->module = &module_;
    function->is_entry = is_entry;
    if (lex_.accept('(')) function->result_size = parse_parameters(lex_, function->results);
    function->name = lex_.word();
    if (lex_.accept('(')) function->param_size = parse_parameters(lex_, function->params);
    while (lex_.peek() == '.') parse_function_directive(*function);
    if (lex_.accept(';')) {
      if (!module_.find(function->name)) module_.functions[function->name] = std::move(function);
      return;
    }
    lex_.expect('{');
    function->has_body = true;
    function->body_begin = lex_.position();
    function->body_line = lex_.line();
    lex_.skip_braces();
    module_.functions[function->name] = std::move(function);
  }

  void parse_function_directive(Function &function) {
    std::string word = lex_.word();
    if (word == ".maxntid" || word == ".reqntid") {
      int threads = static_cast<int>(lex_.integer());
      while (lex_.accept(',')) threads *= static_cast<int>(lex_.integer());
      function.max_threads = threads;
    } else if (word == ".minnctapersm" || word == ".maxnreg") {
      lex_.integer();
    } else if (word == ".pragma") {
      lex_.skip_past(';');
    } else if (word != ".noreturn") {
      lex_.fail("unknown function directive '" + word + "'");
    }
  }

  void parse_variable(Space space) {
    do {
      Declaration d = parse_declaration(lex_);
      module_.symbols.emplace_back();
      Symbol &symbol = module_.symbols.back();
      symbol.name = d.name;
      symbol.space = space;
      symbol.in_module = true;
      symbol.size = d.size;
      symbol.align = d.align;
      symbol.dynamic = space == Space::Shared && d.is_unsized;
      module_.symbol_named[d.name] = &symbol;
      if (space == Space::Shared) continue;
      symbol.address = device_memory().allocate(d.size ? d.size : 1, "variable " + d.name);
      memset(device_memory().alias(symbol.address), 0, d.size);
      if (lex_.accept('=')) parse_initialiser(symbol.address, static_cast<uint64_t>(size_of(d.type)));
    } while (lex_.accept(','));
    lex_.expect(';');
  }

  void parse_initialiser(uint64_t address, uint64_t element) {
    if (lex_.accept('{')) {
      while (!lex_.accept('}')) {
        if (lex_.peek() == '{')
          parse_initialiser(address, element);
        else
          parse_initial_value(address, element);
        address += element;
        lex_.accept(',');
      }
    } else {
      parse_initial_value(address, element);
    }
  }

  void parse_initial_value(uint64_t address, uint64_t element) {
    bool negative = lex_.accept('-');
    std::string word = lex_.word();
    int64_t value;
    if (Lexer::parse_number(word, negative, &value)) {
      memcpy(device_memory().alias(address), &value, element);
      return;
    }
    bool generic = word == "generic";
    if (generic) lex_.expect('('), word = lex_.word();
    Fixup fixup{address, word, 0};
    if (lex_.accept('+')) fixup.addend = lex_.integer();
    if (generic) lex_.expect(')');
    if (lex_.accept('+')) fixup.addend += lex_.integer();
    fixups_.push_back(fixup);
  }

  void resolve(const Fixup &fixup) {
    uint64_t value;
    auto symbol = module_.symbol_named.find(fixup.name);
    if (symbol != module_.symbol_named.end())
      value = symbol->second->address;
    else if (Function *function = module_.find(fixup.name))
      value = function->id;
    else
      throw ParseError("initialiser names the unknown symbol " + fixup.name);
    value += static_cast<uint64_t>(fixup.addend);
    memcpy(device_memory().alias(fixup.address), &value, sizeof value);
  }

  Module &module_;
  Lexer lex_;
  std::vector<Fixup> fixups_;
};

class BodyParser {
public:
  explicit BodyParser(Function &function)
      : function_(function), module_(*function.module), lex_(module_.text, function.body_begin, function.body_line) {}

  void parse() {
    scopes_.resize(1);
    declare_parameters(function_.params);
    declare_parameters(function_.results);
    while (!scopes_.empty()) parse_statement();
    for (auto &fix : label_uses_) function_.code[fix.first].operands[fix.second.operand].name = unique(fix.second);
    RawInstruction end;
    end.text = "ret";
    end.location = location_;
    end.ptx_line = lex_.line();
    function_.code.push_back(end);
    function_.parsed = true;
  }

private:
  struct RegisterRange {
    int first, count;
  };
  struct Scope {
    std::unordered_map<std::string, RegisterRange> ranges; // %r<10>
    std::unordered_map<std::string, int> registers;
    std::unordered_map<std::string, Symbol *> symbols;
    std::unordered_map<std::string, std::string> labels; // name in the source to name in the function
    int id = 0, parent = -1;
  };
  struct LabelUse {
    size_t operand;
    std::string name;
    std::vector<int> scopes;
  };

  void declare_parameters(const std::vector<Parameter> &list) {
    // Kernel parameters live in a buffer of their own, those of functions in the thread's frame.
    int base =
        function_.is_entry ? 0 : static_cast<int>(align_up(static_cast<uint64_t>(function_.local_size), kParamAlign));
    int end = base;
    for (const Parameter &p : list) {
      Symbol &symbol = add_symbol(p.name, Space::Param, static_cast<uint64_t>(p.size), kParamAlign);
      symbol.address = static_cast<uint64_t>(base + p.offset);
      end = std::max(end, base + p.offset + p.size);
    }
    if (!function_.is_entry) function_.local_size = end;
  }

  Symbol &add_symbol(const std::string &name, Space space, uint64_t size, uint64_t align) {
    function_.symbols.emplace_back();
    Symbol &symbol = function_.symbols.back();
    symbol.name = name;
    symbol.space = space;
    symbol.size = size;
    symbol.align = align;
    scopes_.back().symbols[name] = &symbol;
    return symbol;
  }

  void parse_statement() {
    char c = lex_.peek();
    if (!c) lex_.fail("unexpected end of function " + function_.name);
    if (lex_.accept(';')) return;
    if (lex_.accept('{')) {
      scopes_.emplace_back();
      scopes_.back().id = ++scope_count_;
      return;
    }
    if (lex_.accept('}')) {
      for (auto &label : scopes_.back().labels) closed_labels_[{scopes_.back().id, label.first}] = label.second;
      scopes_.pop_back();
      return;
    }
    if (lex_.accept('@')) {
      bool negated = lex_.accept('!');
      int guard = find_register(lex_.word());
      if (guard < 0) lex_.fail("unknown guard predicate");
      parse_instruction(lex_.word(), guard, negated);
      return;
    }
    std::string word = lex_.word();
    if (word.empty()) lex_.fail("cannot read this");
    if (word[0] == '.')
      parse_directive(word);
    else if (lex_.peek() == ':')
      parse_label(word);
    else
      parse_instruction(word, -1, false);
  }

  void parse_label(const std::string &name) {
    lex_.expect(':');
    size_t position = lex_.position();
    int line = lex_.line();
    std::string next = lex_.peek() == '.' ? lex_.word() : "";
    if (next == ".branchtargets") {
      auto &targets = function_.branch_targets[name];
      do targets.push_back(lex_.word());
      while (lex_.accept(','));
      lex_.expect(';');
      scopes_.back().labels[name] = name;
    } else if (next == ".callprototype") {
      lex_.skip_past(';');
    } else {
      lex_.rewind(position, line);
      std::string unique_name = scopes_.size() == 1 ? name : name + "@" + std::to_string(scopes_.back().id);
      scopes_.back().labels[name] = unique_name;
      function_.labels[unique_name] = static_cast<int>(function_.code.size());
    }
  }

  void parse_directive(const std::string &word) {
    if (word == ".reg")
      parse_registers();
    else if (word == ".shared")
      parse_variable(Space::Shared);
    else if (word == ".local")
      parse_variable(Space::Local);
    else if (word == ".param")
      parse_variable(Space::Local); // an argument on its way to a call
    else if (word == ".loc")
      parse_location();
    else if (word == ".pragma")
      lex_.skip_past(';');
    else if (word == ".file")
      lex_.skip_line();
    else
      lex_.fail("unknown directive '" + word + "'");
  }

  void parse_registers() {
    std::string type = lex_.word();
    do {
      std::string name = lex_.word();
      int first = static_cast<int>(function_.register_is_pred.size()), count = 1;
      if (lex_.accept('<')) {
        count = static_cast<int>(lex_.integer());
        lex_.expect('>');
        scopes_.back().ranges[name] = {first, count};
      } else {
        scopes_.back().registers[name] = first;
      }
      function_.register_is_pred.insert(function_.register_is_pred.end(), static_cast<size_t>(count), type == ".pred");
      function_.register_mentions.resize(function_.register_is_pred.size());
    } while (lex_.accept(','));
    lex_.expect(';');
  }

  void parse_variable(Space space) {
    do {
      Declaration d = parse_declaration(lex_);
      Symbol &symbol = add_symbol(d.name, space, d.size, d.align);
      if (space == Space::Local) {
        symbol.address = align_up(static_cast<uint64_t>(function_.local_size), d.align);
        function_.local_size = static_cast<int>(symbol.address + d.size);
      }
    } while (lex_.accept(','));
    lex_.expect(';');
  }

  // .loc file line column [, function_name label, inlined_at file line column]
  void parse_location() {
    location_ = Location();
    location_.file = static_cast<int>(lex_.integer());
    location_.line = static_cast<int>(lex_.integer());
    lex_.integer();
    while (lex_.accept(',')) {
      std::string what = lex_.word();
      if (what == "function_name") {
        lex_.word();
        if (lex_.accept('+')) lex_.integer();
      } else if (what == "inlined_at") {
        location_.inlined_file = static_cast<int>(lex_.integer());
        location_.inlined_line = static_cast<int>(lex_.integer());
        lex_.integer();
      } else {
        lex_.fail("unknown .loc attribute");
      }
    }
    if (location_.inlined_line) outermost_inlining();
  }

  // nvcc emits the chain of inlined calls from the outside in; what the reader wants is the outermost line.
  void outermost_inlining() {
    auto known = inlined_into_.find({location_.inlined_file, location_.inlined_line});
    if (known != inlined_into_.end()) {
      location_.inlined_file = known->second.first;
      location_.inlined_line = known->second.second;
    }
    inlined_into_[{location_.file, location_.line}] = {location_.inlined_file, location_.inlined_line};
  }

  int find_register(const std::string &name) const {
    for (size_t s = scopes_.size(); s-- > 0;) {
      auto single = scopes_[s].registers.find(name);
      if (single != scopes_[s].registers.end()) return single->second;
      size_t digits = name.size();
      while (digits > 1 && isdigit(static_cast<unsigned char>(name[digits - 1]))) digits--;
      if (digits == name.size()) continue;
      auto range = scopes_[s].ranges.find(name.substr(0, digits));
      if (range == scopes_[s].ranges.end()) continue;
      int number = atoi(name.c_str() + digits);
      if (number < range->second.count) return range->second.first + number;
    }
    return -1;
  }

  Symbol *find_symbol(const std::string &name) const {
    for (size_t s = scopes_.size(); s-- > 0;) {
      auto it = scopes_[s].symbols.find(name);
      if (it != scopes_[s].symbols.end()) return it->second;
    }
    auto it = module_.symbol_named.find(name);
    return it == module_.symbol_named.end() ? nullptr : it->second;
  }

  Operand parse_list(char close) {
    Operand list;
    list.kind = Operand::Vector;
    while (!lex_.accept(close)) {
      list.elements.push_back(parse_operand());
      lex_.accept(',');
    }
    return list;
  }

  Operand parse_memory() {
    Operand inner = parse_operand();
    Operand memory = inner;
    memory.kind = Operand::Memory;
    if (inner.kind != Operand::Register) memory.reg = -1;
    if (inner.kind == Operand::Name) lex_.fail("unknown symbol '" + inner.name + "'");
    if (lex_.accept('+') || lex_.peek() == '-') memory.value += lex_.integer();
    if (lex_.accept(',')) lex_.fail("tensor operands are not supported");
    lex_.expect(']');
    return memory;
  }

  Operand parse_operand() {
    if (lex_.accept('{')) return parse_list('}');
    if (lex_.accept('(')) return parse_list(')');
    if (lex_.accept('[')) return parse_memory();
    Operand operand;
    if (lex_.accept('!')) {
      operand = parse_operand();
      operand.negated = true;
      return operand;
    }
    bool negative = lex_.accept('-');
    std::string word = lex_.word();
    if (Lexer::parse_number(word, negative, &operand.value)) {
      operand.kind = Operand::Immediate;
      return operand;
    }
    operand.name = word;
    operand.reg = find_register(word);
    if (word == "_") {
      operand.kind = Operand::Sink;
    } else if (operand.reg >= 0) {
      operand.kind = Operand::Register;
      function_.register_mentions[static_cast<size_t>(operand.reg)]++;
    } else if (find_special(word, &operand.reg)) {
      operand.kind = Operand::Special;
    } else if (Symbol *symbol = find_symbol(word)) {
      operand.kind = Operand::SymbolAddress;
      operand.symbol = symbol;
    } else {
      operand.kind = Operand::Name; // label or function
    }
    if (lex_.accept('|')) operand.pair = parse_operand().reg;
    return operand;
  }

  static bool find_special(const std::string &name, int *index) {
    const auto &names = special_register_names();
    for (size_t i = 0; i < names.size(); i++)
      if (names[i] == name) return *index = static_cast<int>(i), true;
    return false;
  }

  void parse_instruction(const std::string &text, int guard, bool negated) {
    RawInstruction instruction;
    instruction.text = text;
    instruction.guard = guard;
    instruction.guard_negated = negated;
    instruction.ptx_line = lex_.line();
    instruction.location = location_;
    while (!lex_.accept(';')) {
      instruction.operands.push_back(parse_operand());
      lex_.accept(',');
    }
    bool jumps = starts_with(text, "bra") || starts_with(text, "brx");
    for (size_t i = 0; jumps && i < instruction.operands.size(); i++) {
      if (instruction.operands[i].kind != Operand::Name) continue;
      LabelUse use{i, instruction.operands[i].name, {}};
      for (const Scope &scope : scopes_) use.scopes.push_back(scope.id);
      label_uses_.emplace_back(function_.code.size(), use);
    }
    function_.code.push_back(std::move(instruction));
  }

  std::string unique(const LabelUse &use) const {
    for (size_t s = use.scopes.size(); s-- > 0;) {
      auto it = closed_labels_.find({use.scopes[s], use.name});
      if (it != closed_labels_.end()) return it->second;
    }
    throw ParseError("function " + function_.name + " jumps to the unknown label " + use.name);
  }

  Function &function_;
  Module &module_;
  Lexer lex_;
  std::vector<Scope> scopes_;
  int scope_count_ = 0;
  Location location_;
  std::map<std::pair<int, int>, std::pair<int, int>> inlined_into_;
  std::map<std::pair<int, std::string>, std::string> closed_labels_;
  std::vector<std::pair<size_t, LabelUse>> label_uses_;
};

} // namespace

Type type_named(const std::string &name) {
  for (const TypeInfo &info : kTypes)
    if (name == info.name) return info.type;
  return Type::None;
}

int size_of(Type type) {
  for (const TypeInfo &info : kTypes)
    if (type == info.type) return info.size;
  return 0;
}

bool is_signed(Type type) { return type == Type::S8 || type == Type::S16 || type == Type::S32 || type == Type::S64; }

bool is_float(Type type) { return type == Type::F16 || type == Type::BF16 || type == Type::F32 || type == Type::F64; }

const std::vector<std::string> &special_register_names() {
  static const std::vector<std::string> names = {
      "%tid.x",           "%tid.y",       "%tid.z",       "%ntid.x",       "%ntid.y",          "%ntid.z",
      "%ctaid.x",         "%ctaid.y",     "%ctaid.z",     "%nctaid.x",     "%nctaid.y",        "%nctaid.z",
      "%laneid",          "%warpid",      "%nwarpid",     "%lanemask_eq",  "%lanemask_lt",     "%lanemask_le",
      "%lanemask_gt",     "%lanemask_ge", "%smid",        "%nsmid",        "%gridid",          "%dynamic_smem_size",
      "%total_smem_size", "WARP_SZ",      "%clusterid.x", "%nclusterid.x", "%cluster_ctarank", "%cluster_nctarank",
      "%clock",           "%clock64",     "%globaltimer", "%clock_hi",
  };
  return names;
}

std::vector<std::string> split_dots(const std::string &text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t dot; (dot = text.find('.', begin)) != std::string::npos; begin = dot + 1)
    parts.push_back(text.substr(begin, dot - begin));
  parts.push_back(text.substr(begin));
  return parts;
}

std::unique_ptr<Module> parse_module(std::string text) {
  auto module = std::make_unique<Module>();
  module->text = std::move(text);
  ModuleParser parser(*module);
  parser.parse();
  return module;
}

void parse_body(Function &function) {
  if (!function.parsed) BodyParser(function).parse();
}

} // namespace ptxvm
