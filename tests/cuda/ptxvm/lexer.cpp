#include "lexer.h"
#include "ptx.h"
#include <cctype>
#include <cstdlib>
#include <cstring>

namespace ptxvm {

static bool in_word(char c) {
  return isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

void Lexer::fail(const std::string &what) const {
  throw ParseError("PTX line " + std::to_string(line_) + ": " + what + " at '" + text_.substr(position_, 30) + "'");
}

void Lexer::skip_space() {
  for (; position_ < text_.size(); position_++) {
    char c = text_[position_];
    if (c == '\n') {
      line_++;
    } else if (c == '/' && text_[position_ + 1] == '/') {
      position_ = std::min(text_.find('\n', position_), text_.size()) - 1;
    } else if (c == '/' && text_[position_ + 1] == '*') {
      size_t end = std::min(text_.find("*/", position_), text_.size());
      for (; position_ < end; position_++) line_ += text_[position_] == '\n';
      position_++;
    } else if (!isspace(static_cast<unsigned char>(c))) {
      return;
    }
  }
}

char Lexer::peek() {
  skip_space();
  return position_ < text_.size() ? text_[position_] : '\0';
}

bool Lexer::accept(char c) {
  if (peek() != c) return false;
  position_++;
  return true;
}

void Lexer::expect(char c) {
  if (!accept(c)) fail(std::string("expected '") + c + "'");
}

static bool is_digit(char c) { return isdigit(static_cast<unsigned char>(c)); }

// The sign in 1.5e-3.
static bool continues_exponent(const std::string &text, size_t begin, size_t position) {
  if ((text[position] != '-' && text[position] != '+') || !is_digit(text[begin])) return false;
  bool prefixed = text[begin] == '0' && position > begin + 1 && isalpha(static_cast<unsigned char>(text[begin + 1]));
  return !prefixed && (text[position - 1] == 'e' || text[position - 1] == 'E');
}

std::string Lexer::word() {
  skip_space();
  const size_t begin = position_;
  const bool directive = begin < text_.size() && text_[begin] == '.';
  for (; position_ < text_.size(); position_++) {
    char c = text_[position_];
    if (directive && c == '.' && position_ > begin) break;
    if (in_word(c) || continues_exponent(text_, begin, position_)) continue;
    bool scope = text_.compare(position_, 2, "::") == 0; // as in .shared::cta
    if (!scope) break;
    position_++;
  }
  return text_.substr(begin, position_ - begin);
}

bool Lexer::parse_number(const std::string &word, bool negative, int64_t *value, bool *is_real) {
  if (word.empty() || !is_digit(word[0])) return false;
  char second = word.size() > 1 && word[0] == '0' ? static_cast<char>(tolower(word[1])) : '\0';
  bool decimal = second != 'x' && second != 'f' && second != 'd' && word.find_first_of(".eE") != std::string::npos;
  if (decimal) {
    double real = negative ? -strtod(word.c_str(), nullptr) : strtod(word.c_str(), nullptr);
    memcpy(value, &real, sizeof real);
    if (is_real) *is_real = true;
    return is_real != nullptr;
  }
  bool is_float = second == 'f' || second == 'd';
  uint64_t bits = is_float        ? strtoull(word.c_str() + 2, nullptr, 16)
                  : second == 'b' ? strtoull(word.c_str() + 2, nullptr, 2)
                                  : strtoull(word.c_str(), nullptr, 0);
  if (is_float && negative) bits ^= word.size() == 10 ? 1ull << 31 : 1ull << 63;
  *value = static_cast<int64_t>(is_float || !negative ? bits : 0 - bits);
  return true;
}

int64_t Lexer::integer() {
  bool negative = accept('-');
  int64_t value;
  if (!parse_number(word(), negative, &value)) fail("expected a number");
  return value;
}

std::string Lexer::quoted() {
  expect('"');
  size_t end = std::min(text_.find('"', position_), text_.size());
  std::string result = text_.substr(position_, end - position_);
  position_ = end + 1;
  return result;
}

void Lexer::skip_past(char c) {
  for (; position_ < text_.size() && text_[position_] != c; position_++) line_ += text_[position_] == '\n';
  position_++;
}

void Lexer::skip_line() { position_ = std::min(text_.find('\n', position_), text_.size()); }

void Lexer::skip_braces() {
  for (int depth = 1; depth && position_ < text_.size(); position_++) {
    char c = text_[position_];
    depth += c == '{' ? 1 : c == '}' ? -1 : 0;
    line_ += c == '\n';
  }
}

} // namespace ptxvm
