#include "declaration.h"
#include <algorithm>
#include <cctype>
#include <cstring>

namespace ptxvm {

namespace {

bool starts_with(const std::string &text, const char *prefix) { return text.compare(0, strlen(prefix), prefix) == 0; }

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
    if (word[0] == '.') parse_directive(word);
    else if (lex_.peek() == ':') parse_label(word);
    else parse_instruction(word, -1, false);
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
    if (word == ".reg") parse_registers();
    else if (word == ".shared") parse_variable(Space::Shared);
    else if (word == ".local") parse_variable(Space::Local);
    else if (word == ".param") parse_variable(Space::Local); // an argument on its way to a call
    else if (word == ".loc") parse_location();
    else if (word == ".pragma") lex_.skip_past(';');
    else if (word == ".file") lex_.skip_line();
    else lex_.fail("unknown directive '" + word + "'");
  }

  void parse_registers() {
    std::string type = lex_.word();
    const int slots = type == ".b128" ? 2 : 1; // low and high half
    do {
      std::string name = lex_.word();
      int first = static_cast<int>(function_.register_is_pred.size()), count = 1;
      if (lex_.accept('<')) {
        count = static_cast<int>(lex_.integer());
        lex_.expect('>');
        if (slots == 1) scopes_.back().ranges[name] = {first, count};
        for (int k = 0; k < count && slots > 1; k++)
          scopes_.back().registers[name + std::to_string(k)] = first + slots * k;
      } else {
        scopes_.back().registers[name] = first;
      }
      function_.register_is_pred.insert(function_.register_is_pred.end(), static_cast<size_t>(count * slots),
                                        type == ".pred");
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
    if (Lexer::parse_number(word, negative, &operand.value, &operand.is_real)) {
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
    while (lex_.peek() == '.') instruction.text += lex_.word();
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

void parse_body(Function &function) {
  if (!function.parsed) BodyParser(function).parse();
}

} // namespace ptxvm
