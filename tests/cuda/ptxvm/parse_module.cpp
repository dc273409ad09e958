#include "declaration.h"
#include "device_memory.h"
#include <cstring>

namespace ptxvm {

namespace {

class ModuleParser {
public:
  explicit ModuleParser(Module &module) : module_(module), lex_(module.text, 0, 1) {}

  void parse() {
    while (lex_.peek()) {
      std::string word = lex_.word();
      while (word == ".visible" || word == ".extern" || word == ".weak" || word == ".common") word = lex_.word();
      if (word == ".version") parse_version();
      else if (word == ".target" || word == ".address_size") lex_.skip_line();
      else if (word == ".file") parse_file();
      else if (word == ".section") lex_.skip_past('{'), lex_.skip_braces();
      else if (word == ".pragma") lex_.skip_past(';');
      else if (word == ".entry" || word == ".func") parse_function(word == ".entry");
      else if (word == ".global") parse_variable(Space::Global);
      else if (word == ".const") parse_variable(Space::Const);
      else if (word == ".shared") parse_variable(Space::Shared);
      else if (word == ".alias") lex_.skip_past(';');
      else lex_.fail("unknown directive '" + word + "'");
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
        if (lex_.peek() == '{') parse_initialiser(address, element);
        else parse_initial_value(address, element);
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
    if (symbol != module_.symbol_named.end()) value = symbol->second->address;
    else if (Function *function = module_.find(fixup.name)) value = function->id;
    else throw ParseError("initialiser names the unknown symbol " + fixup.name);
    value += static_cast<uint64_t>(fixup.addend);
    memcpy(device_memory().alias(fixup.address), &value, sizeof value);
  }

  Module &module_;
  Lexer lex_;
  std::vector<Fixup> fixups_;
};

} // namespace

std::unique_ptr<Module> parse_module(std::string text) {
  auto module = std::make_unique<Module>();
  module->text = std::move(text);
  ModuleParser parser(*module);
  parser.parse();
  return module;
}

} // namespace ptxvm
