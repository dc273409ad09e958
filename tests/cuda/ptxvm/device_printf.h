#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace ptxvm {

// printf as kernels call it: arguments lie in a buffer, each aligned to its size. Returns the number of arguments.
int print_device(const std::string &format, const uint8_t *arguments, size_t size, std::string (*string_at)(uint64_t));

} // namespace ptxvm
