// How faults reach the user. A fault that makes going on meaningless ends the process at once; a race is counted and
// ends it when the program ends. Both exit with kFaultStatus.
#pragma once
#include <string>

namespace ptxvm {

constexpr int kFaultStatus = 86;

struct Context;
struct Instruction;
struct RawInstruction;
struct Function;

[[noreturn]] void end_process(int status); // at once, without exit handlers
[[noreturn]] void stop(const char *format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fault(Context &context, const Instruction &instruction, int lane, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void note_fault(const std::string &text); // reports and goes on
int faults_noted();

std::string demangle(const std::string &name);
std::string describe_location(const Function &function, const RawInstruction &raw);

} // namespace ptxvm
