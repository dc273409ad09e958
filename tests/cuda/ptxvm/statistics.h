// Counts by kernel. They say what a kernel asks of the memory system, never how long it takes.
#pragma once
#include "access.h"
#include "engine.h"

namespace ptxvm {

struct KernelCounters {
  uint64_t launches = 0, blocks = 0, thread_instructions = 0, warp_instructions = 0;
  uint64_t branches = 0, divergent_branches = 0;
  uint64_t global_requests = 0, global_bytes = 0, global_sectors = 0;
  uint64_t shared_requests = 0, shared_wavefronts = 0, shared_conflicts = 0;

  void add(const KernelCounters &other);
};

KernelCounters &counters_of(const std::string &kernel);
void count_access(KernelCounters &counters, const Footprint &footprint);
inline void count_branch(KernelCounters &counters, bool divergent) {
  counters.branches++;
  counters.divergent_branches += divergent;
}
void count_executed(uint64_t instructions);
uint64_t executed_instructions(); // of threads, since the start
// PTXVM_STATS: "1" or "table" writes a table to standard error, anything else is the name of a JSON file.
void print_statistics();

} // namespace ptxvm
