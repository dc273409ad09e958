// A host in C++17: the headers come without warnings, and link.
#include <pmoe/pmoe.h>

#include <cstdio>
#include <memory>

namespace {
struct HostOptions {
  pmoe_ctx_config ctx = PMOE_CONFIG_INIT(pmoe_ctx_config);
  pmoe_gate_config gate = PMOE_CONFIG_INIT(pmoe_gate_config);
};
} // namespace

int main() {
  HostOptions options;
  if (options.gate.size != sizeof(pmoe_gate_config) || options.gate.top_k != 0) return 1;
  options.ctx.cpu_threads = 1;
  pmoe_ctx *raw = nullptr;
  if (pmoe_ctx_create(&options.ctx, &raw) != PMOE_OK) {
    std::fprintf(stderr, "%s\n", pmoe_last_error());
    return 1;
  }
  std::unique_ptr<pmoe_ctx, void (*)(pmoe_ctx *)> ctx(raw, pmoe_ctx_destroy);
  pmoe_memory memory = PMOE_CONFIG_INIT(pmoe_memory);
  return pmoe_ctx_memory(ctx.get(), &memory) == PMOE_OK && memory.allocations > 0 ? 0 : 1;
}
