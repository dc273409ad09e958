#include "declaration.h"
#include <algorithm>

namespace ptxvm {

Declaration parse_declaration(Lexer &lex) {
  Declaration d;
  uint64_t align = 1, vector = 1, count = 1;
  for (;;) {
    d.name = lex.word();
    if (d.name.empty()) lex.fail("expected a name");
    if (d.name[0] != '.') break;
    std::string mod = d.name.substr(1);
    if (mod == "align") align = static_cast<uint64_t>(lex.integer());
    else if (mod == "v2") vector = 2;
    else if (mod == "v4") vector = 4;
    else if (type_named(mod) != Type::None) d.type = type_named(mod);
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

} // namespace ptxvm
