#include "device_printf.h"
#include <cctype>
#include <cstdio>
#include <cstring>

namespace ptxvm {

namespace {

class Arguments {
public:
  Arguments(const uint8_t *bytes, size_t size) : bytes_(bytes), size_(size) {}
  template <class T> T next() {
    T value{};
    position_ = (position_ + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    if (bytes_ && position_ + sizeof(T) <= size_) memcpy(&value, bytes_ + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }

private:
  const uint8_t *bytes_;
  size_t size_, position_ = 0;
};

} // namespace

int print_device(const std::string &format, const uint8_t *bytes, size_t size, std::string (*string_at)(uint64_t)) {
  Arguments arguments(bytes, size);
  int count = 0;
  for (size_t k = 0; k < format.size(); k++) {
    if (format[k] != '%') {
      putchar(format[k]);
      continue;
    }
    if (format.compare(k, 2, "%%") == 0) {
      putchar('%');
      k++;
      continue;
    }
    std::string spec = "%";
    bool wide = false;
    for (k++; k < format.size() && !isalpha(static_cast<unsigned char>(format[k])); k++) {
      if (format[k] != '*') {
        spec += format[k];
        continue;
      }
      int number = arguments.next<int>();
      count++;
      if (number < 0 && spec.back() == '.') spec.pop_back(); // as if there were no precision
      else spec += std::to_string(number);
    }
    for (; k < format.size() && strchr("lhzjt", format[k]); k++) {
      wide |= format[k] != 'h';
      if (format[k] == 'h') spec += 'h';
    }
    if (k >= format.size()) break;
    char conversion = format[k];
    count++;
    if (strchr("fFeEgGaA", conversion)) {
      printf((spec + conversion).c_str(), arguments.next<double>());
    } else if (conversion == 's') {
      printf((spec + 's').c_str(), string_at(arguments.next<uint64_t>()).c_str());
    } else if (conversion == 'p') {
      printf((spec + 'p').c_str(), reinterpret_cast<void *>(arguments.next<uint64_t>()));
    } else if (wide) {
      printf((spec + "ll" + conversion).c_str(), arguments.next<long long>());
    } else {
      printf((spec + conversion).c_str(), arguments.next<int>());
    }
  }
  return count;
}

} // namespace ptxvm
