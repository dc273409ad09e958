#include "statistics.h"
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>

namespace ptxvm {

static uint64_t executed = 0;

static std::map<std::string, KernelCounters> &table() {
  static auto *t = new std::map<std::string, KernelCounters>;
  return *t;
}

void KernelCounters::add(const KernelCounters &o) {
  thread_instructions += o.thread_instructions, warp_instructions += o.warp_instructions;
  branches += o.branches, divergent_branches += o.divergent_branches;
  global_requests += o.global_requests, global_bytes += o.global_bytes, global_sectors += o.global_sectors;
  shared_requests += o.shared_requests, shared_wavefronts += o.shared_wavefronts,
      shared_conflicts += o.shared_conflicts;
}

KernelCounters &counters_of(const std::string &kernel) { return table()[demangle(kernel)]; }
void count_executed(uint64_t instructions) { executed += instructions; }
uint64_t executed_instructions() { return executed; }

static uint64_t distinct(std::vector<uint64_t> &values) {
  std::sort(values.begin(), values.end());
  return static_cast<uint64_t>(std::unique(values.begin(), values.end()) - values.begin());
}

// Wide accesses are served in parts: 8-byte ones by half warps, 16-byte ones by quarters. Within a part, as many passes
// are needed as the busiest of the 32 banks has different words.
static uint64_t shared_wavefronts(const Footprint &f, const std::vector<int> &lanes, uint64_t *parts) {
  const int words = std::max(1, f.bytes / 4), lanes_a_part = kLanes / std::min(words, 4);
  uint64_t total = 0;
  for (int first = 0; first < kLanes; first += lanes_a_part) {
    std::vector<uint64_t> touched;
    for (int l : lanes)
      for (int w = 0; l >= first && l < first + lanes_a_part && w < words; w++)
        touched.push_back(f.address[static_cast<size_t>(l)] / 4 + static_cast<uint64_t>(w));
    if (touched.empty()) continue;
    uint64_t unique = distinct(touched), passes = 0, by_bank[32] = {};
    for (uint64_t k = 0; k < unique; k++) passes = std::max(passes, ++by_bank[touched[k] % 32]);
    total += passes;
    ++*parts;
  }
  return total;
}

void count_access(KernelCounters &counters, const Footprint &f) {
  std::vector<uint64_t> sectors;
  std::vector<int> shared;
  uint64_t bytes = 0;
  for_lanes(f.lanes, [&](int lane) {
    size_t l = static_cast<size_t>(lane);
    if (f.space[l] == Space::Global) {
      uint64_t last = (f.address[l] + static_cast<uint64_t>(f.bytes) - 1) / 32;
      for (uint64_t s = f.address[l] / 32; s <= last; s++) sectors.push_back(s);
      bytes += static_cast<uint64_t>(f.bytes);
    } else if (f.space[l] == Space::Shared) {
      shared.push_back(lane);
    }
  });
  if (!sectors.empty()) {
    counters.global_requests++;
    counters.global_bytes += bytes;
    counters.global_sectors += distinct(sectors);
  }
  if (!shared.empty()) {
    uint64_t parts = 0, wavefronts = shared_wavefronts(f, shared, &parts);
    counters.shared_requests++;
    counters.shared_wavefronts += wavefronts;
    counters.shared_conflicts += wavefronts - parts;
  }
}

static std::string shortened(const std::string &name, size_t width) {
  return name.size() <= width ? name : name.substr(0, width - 3) + "...";
}

static std::string escaped(const std::string &text) {
  std::string result;
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result;
}

static void print_table(FILE *out) {
  fprintf(out, "%-44s %8s %8s %12s %12s %9s %9s %11s %14s %12s %7s %10s %10s\n", "kernel", "launches", "blocks",
          "instr", "warp instr", "branches", "divergent", "gl.requests", "gl.bytes", "gl.sectors", "B/sect", "sh.waves",
          "conflicts");
  for (auto &entry : table()) {
    const KernelCounters &k = entry.second;
    double use = k.global_sectors ? static_cast<double>(k.global_bytes) / static_cast<double>(k.global_sectors) : 0;
    fprintf(out,
            "%-44s %8" PRIu64 " %8" PRIu64 " %12" PRIu64 " %12" PRIu64 " %9" PRIu64 " %9" PRIu64 " %11" PRIu64
            " %14" PRIu64 " %12" PRIu64 " %7.1f %10" PRIu64 " %10" PRIu64 "\n",
            shortened(entry.first, 44).c_str(), k.launches, k.blocks, k.thread_instructions, k.warp_instructions,
            k.branches, k.divergent_branches, k.global_requests, k.global_bytes, k.global_sectors, use,
            k.shared_wavefronts, k.shared_conflicts);
  }
}

static void print_json(FILE *out) {
  fprintf(out, "{\"kernels\": [");
  const char *separator = "\n";
  for (auto &entry : table()) {
    const KernelCounters &k = entry.second;
    fprintf(out,
            "%s  {\"kernel\": \"%s\", \"launches\": %" PRIu64 ", \"blocks\": %" PRIu64
            ", \"thread_instructions\": %" PRIu64 ", \"warp_instructions\": %" PRIu64 ", \"branches\": %" PRIu64
            ", \"divergent_branches\": %" PRIu64 ", \"global_requests\": %" PRIu64 ", \"global_bytes\": %" PRIu64
            ", \"global_sectors\": %" PRIu64 ", \"shared_requests\": %" PRIu64 ", \"shared_wavefronts\": %" PRIu64
            ", \"shared_conflicts\": %" PRIu64 "}",
            separator, escaped(entry.first).c_str(), k.launches, k.blocks, k.thread_instructions, k.warp_instructions,
            k.branches, k.divergent_branches, k.global_requests, k.global_bytes, k.global_sectors, k.shared_requests,
            k.shared_wavefronts, k.shared_conflicts);
    separator = ",\n";
  }
  fprintf(out, "\n]}\n");
}

void print_statistics() {
  const char *where = getenv("PTXVM_STATS");
  if (!where || !*where) return;
  std::string name = where;
  if (name == "1" || name == "table") return print_table(stderr);
  FILE *file = fopen(where, "w");
  if (!file) stop("cannot write %s", where);
  print_json(file);
  fclose(file);
}

} // namespace ptxvm

extern "C" unsigned long long ptxvm_instructions(void) { return ptxvm::executed_instructions(); }
