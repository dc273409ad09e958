#include "report.h"
#include "engine.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cxxabi.h>
#include <mutex>
#include <sys/syscall.h>
#include <unistd.h>

namespace ptxvm {

static std::mutex report_lock;
static int noted = 0;

static std::string formatted(const char *format, va_list arguments) {
  char text[4096];
  vsnprintf(text, sizeof text, format, arguments);
  return text;
}

void end_process(int status) {
  syscall(SYS_exit_group, status);
  __builtin_unreachable();
}

[[noreturn]] static void end_with(const std::string &text) {
  report_lock.lock(); // never released: one thread reports
  fflush(stdout);
  fprintf(stderr, "ptxvm: %s\n", text.c_str());
  fflush(stderr);
  end_process(kFaultStatus);
}

void stop(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = formatted(format, arguments);
  va_end(arguments);
  end_with(text);
}

extern "C" [[noreturn]] void ptxvm_missing(const char *function) { stop("%s is not provided by ptxvm", function); }

std::string demangle(const std::string &name) {
  int status = 0;
  char *plain = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 && plain ? plain : name;
  free(plain);
  return result;
}

static std::string file_line(const Module &module, int file, int line) {
  auto it = module.files.find(file);
  std::string name = it == module.files.end() ? "?" : it->second;
  return name + ":" + std::to_string(line);
}

std::string describe_location(const Function &function, const RawInstruction &raw) {
  const Location &l = raw.location;
  if (!l.line) return "PTX line " + std::to_string(raw.ptx_line) + " of " + demangle(function.name) + " (no -lineinfo)";
  std::string text = file_line(*function.module, l.file, l.line);
  if (l.inlined_line) text += ", inlined at " + file_line(*function.module, l.inlined_file, l.inlined_line);
  return text;
}

void fault(Context &c, const Instruction &i, int lane, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = formatted(format, arguments);
  va_end(arguments);
  const uint32_t *b = c.block->coordinates;
  const Dim &size = c.launch->block;
  uint32_t thread = static_cast<uint32_t>(c.warp->index) * kLanes + static_cast<uint32_t>(lane);
  char where[128];
  snprintf(where, sizeof where, "block (%u,%u,%u), thread (%u,%u,%u)", b[0], b[1], b[2], thread % size.x,
           thread / size.x % size.y, thread / (size.x * size.y));
  const Function *function = nullptr;
  for (auto &entry : c.launch->program->codes)
    for (const RawInstruction &raw : entry.first->code)
      if (&raw == i.raw) function = entry.first;
  std::string at = function ? describe_location(*function, *i.raw) : "?";
  end_with(text + "\n    kernel " + demangle(c.launch->program->kernel->name) + "\n    at " + at + "\n    " + where);
}

void note_fault(const std::string &text) {
  std::lock_guard<std::mutex> lock(report_lock);
  noted++;
  fprintf(stderr, "ptxvm: %s\n", text.c_str());
}

int faults_noted() { return noted; }

} // namespace ptxvm
