#pragma once
#include "lexer.h"
#include "ptx.h"

namespace ptxvm {

// What a declaration says before its name: [.align N] .type [.v2|.v4] name[N]...
struct Declaration {
  std::string name;
  Type type = Type::B8;
  uint64_t align = 1, size = 0;
  bool is_unsized = false;
};

Declaration parse_declaration(Lexer &lex);
int parse_parameters(Lexer &lex, std::vector<Parameter> &list); // after '(', returns their size

} // namespace ptxvm
