// Characters to words. PTX has few kinds of token, so the parser asks for what it expects.
#pragma once
#include <cstdint>
#include <string>

namespace ptxvm {

class Lexer {
public:
  Lexer(const std::string &text, size_t position, int line) : text_(text), position_(position), line_(line) {}

  char peek(); // next significant character, 0 at the end
  bool accept(char c);
  void expect(char c);
  // Identifier, directive, number or opcode with its modifiers; empty when there is none. A directive ends where the
  // next begins: inline assembly writes `.reg.b16` as often as `.reg .b16`.
  std::string word();
  int64_t integer();
  std::string quoted();
  void skip_past(char c);
  void skip_line();
  void skip_braces(); // from after '{' to after the matching '}'

  size_t position() const { return position_; }
  int line() const { return line_; }
  void rewind(size_t position, int line) { position_ = position, line_ = line; }
  [[noreturn]] void fail(const std::string &what) const;

  // A decimal with a fraction or an exponent gives the bits of a double and sets *is_real.
  static bool parse_number(const std::string &word, bool negative, int64_t *value, bool *is_real = nullptr);

private:
  void skip_space();

  const std::string &text_;
  size_t position_;
  int line_;
};

} // namespace ptxvm
