#include "races.h"
#include <algorithm>
#include <set>

namespace ptxvm {

namespace {

using Clocks = std::array<uint32_t, kLanes>;

void join(Clocks &into, const Clocks &from) {
  for (size_t k = 0; k < kLanes; k++) into[k] = std::max(into[k], from[k]);
}

bool covers(const Clocks &known, const Clocks &other) {
  for (size_t k = 0; k < kLanes; k++)
    if (known[k] < other[k]) return false;
  return true;
}

// What has been made visible of a block: accesses up to a clock of each warp, and of single lanes beyond it.
struct Released {
  Clocks warps{};
  std::map<int, Clocks> lanes;

  void merge(const Released &other) {
    join(warps, other.warps);
    for (auto &entry : other.lanes) join(lanes[entry.first], entry.second);
  }
  bool includes(const Released &other) const {
    if (!covers(warps, other.warps)) return false;
    for (auto &entry : other.lanes) {
      auto it = lanes.find(entry.first);
      if (it == lanes.end() || !covers(it->second, entry.second)) return false;
    }
    return true;
  }
  bool contains(size_t warp, size_t lane, uint32_t warp_clock, uint32_t lane_clock) const {
    if (warps[warp] >= warp_clock) return true;
    auto it = lanes.find(static_cast<int>(warp));
    return it != lanes.end() && it->second[lane] >= lane_clock;
  }
};
using Knowledge = std::map<uint32_t, Released>; // by block
using KnowledgePtr = std::shared_ptr<const Knowledge>;

void merge(Knowledge &into, const Knowledge &from) {
  for (auto &entry : from) into[entry.first].merge(entry.second);
}

// Shared among threads, for after a barrier all know the same; a thread that spins learns nothing new, so copies are
// rare.
void learn(KnowledgePtr &known, const Knowledge &news) {
  bool old = known != nullptr;
  for (auto it = news.begin(); old && it != news.end(); ++it) {
    auto of_block = known->find(it->first);
    old = of_block != known->end() && of_block->second.includes(it->second);
  }
  if (old) return;
  auto grown = known ? std::make_shared<Knowledge>(*known) : std::make_shared<Knowledge>();
  merge(*grown, news);
  known = grown;
}

struct Access {
  uint32_t launch = 0, task = 0, block = 0, warp_clock = 0, lane_clock = 0, instruction = 0;
  uint16_t thread = 0;
  bool sync = false, unchanged = false;
};

struct Cell {
  Access write, reads[2];
};

// Two bytes of memory; halves appear when single bytes are accessed.
struct Pair {
  Cell whole;
  std::unique_ptr<std::array<Cell, 2>> bytes;

  Cell &byte(uint64_t address) {
    if (!bytes) bytes = std::make_unique<std::array<Cell, 2>>(std::array<Cell, 2>{whole, whole});
    return (*bytes)[address & 1];
  }
};

constexpr uint64_t kPageBytes = 4096;
using Page = std::array<Pair, kPageBytes / 2>;

struct LaunchRecord {
  const Program *program = nullptr;
  Dim grid, block;
};

struct Task {
  std::string name;
  uint64_t stream = 0, sequence = 0;
  StreamClock before;
};

constexpr uint32_t kNoKernel = ~0u; // as launch: a copy or a library call

struct Globals {
  uint32_t launch = 0, task = 0;
  std::vector<LaunchRecord> launches;
  std::vector<Task> tasks{1};
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages;
  std::unordered_map<uint64_t, Knowledge> released; // to other blocks, by the address of the flag
  std::set<std::pair<std::string, std::string>> reported;
  uint64_t cached_page = ~0ull;
  Page *cached = nullptr;
};

Globals &globals() {
  static auto *g = new Globals;
  return *g;
}

} // namespace

struct RaceLog {
  std::vector<Pair> shared;
  std::array<Clocks, kLanes> warps{};            // [observer][observed]
  std::vector<std::array<Clocks, kLanes>> lanes; // [warp][observer][observed]
  // What fences cover, by warp: those that reach other blocks, and all of them.
  std::vector<Released> fenced_for_all, fenced_for_block;
  std::unordered_map<uint64_t, Knowledge> released; // within the block, by the address of the flag
  std::vector<KnowledgePtr> learned;                // by thread: what flags have told it
};

std::shared_ptr<RaceLog> new_race_log(const Launch &launch, const Block &block) {
  auto log = std::make_shared<RaceLog>();
  log->shared.resize(launch.shared_size / 2 + 1);
  log->lanes.resize(block.warps.size());
  log->fenced_for_all.resize(block.warps.size());
  log->fenced_for_block.resize(block.warps.size());
  log->learned.resize(block.warps.size() * kLanes);
  for (size_t w = 0; w < block.warps.size(); w++) {
    log->warps[w][w] = 1;
    for (size_t l = 0; l < kLanes; l++) log->lanes[w][l][l] = 1;
  }
  return log;
}

void begin_race_launch(const Launch &launch) {
  Globals &g = globals();
  g.launch = static_cast<uint32_t>(launch.serial);
  g.released.clear();
  g.launches.resize(g.launch + 1);
  g.launches[g.launch] = {launch.program, launch.grid, launch.block};
}

uint32_t new_race_task(const std::string &name, uint64_t stream, uint64_t sequence, StreamClock before) {
  globals().tasks.push_back({name, stream, sequence, std::move(before)});
  return static_cast<uint32_t>(globals().tasks.size() - 1);
}
void enter_race_task(uint32_t task) { globals().task = task; }
uint32_t current_race_task() { return globals().task; }

static bool task_ordered(uint32_t old, uint32_t now) {
  const Globals &g = globals();
  if (old == now) return true;
  const Task &first = g.tasks[old];
  auto it = g.tasks[now].before.find(first.stream);
  return it != g.tasks[now].before.end() && it->second >= first.sequence;
}

static bool ordered_before(const RaceLog *of_block, const Access &old, const Access &now) {
  if (old.launch != now.launch || !of_block) return !old.launch || task_ordered(old.task, now.task);
  const RaceLog &log = *of_block;
  size_t old_warp = old.thread / kLanes, old_lane = old.thread % kLanes;
  size_t warp = now.thread / kLanes, lane = now.thread % kLanes;
  if (old.block == now.block) {
    bool met = old_warp == warp ? log.lanes[warp][lane][old_lane] >= old.lane_clock
                                : log.warps[warp][old_warp] >= old.warp_clock;
    if (met) return true;
  }
  const KnowledgePtr &learned = log.learned[now.thread];
  if (!learned) return false;
  auto it = learned->find(old.block);
  return it != learned->end() && it->second.contains(old_warp, old_lane, old.warp_clock, old.lane_clock);
}

static const Instruction *instruction_of(const Access &access, const Function **function) {
  if (access.launch == kNoKernel) return nullptr;
  for (auto &entry : globals().launches[access.launch].program->codes)
    for (const Instruction &i : entry.second->instructions)
      if (i.index == access.instruction) return *function = entry.first, &i;
  return nullptr;
}

static std::string describe(const Access &access) {
  const Globals &g = globals();
  const Function *function = nullptr;
  const Instruction *i = instruction_of(access, &function);
  if (!i) return g.tasks[access.task].name;
  const LaunchRecord &launch = g.launches[access.launch];
  const Dim &grid = launch.grid, &b = launch.block;
  uint32_t block = access.block, thread = access.thread;
  char where[160];
  snprintf(where, sizeof where, ", block (%u,%u,%u), thread (%u,%u,%u)", block % grid.x, block / grid.x % grid.y,
           block / (grid.x * grid.y), thread % b.x, thread / b.x % b.y, thread / (b.x * b.y));
  return "kernel " + demangle(launch.program->kernel->name) + "\n           at " +
         describe_location(*function, *i->raw) + where;
}

// The toolkit's atomics on halves start their compare-and-swap loops from a plain read.
static bool starts_toolkit_loop(const Access &access) {
  const Function *function = nullptr;
  const Instruction *i = instruction_of(access, &function);
  if (!i) return false;
  auto file = function->module->files.find(i->raw->location.file);
  return file != function->module->files.end() && (file->second.find("cuda_fp16.h") != std::string::npos ||
                                                   file->second.find("cuda_bf16.h") != std::string::npos);
}

static void report_race(const char *what, const Access &old, const Access &now, Space space, uint64_t address) {
  Globals &g = globals();
  if ((old.sync && starts_toolkit_loop(now)) || (now.sync && starts_toolkit_loop(old))) return;
  std::string first = describe(old), second = describe(now);
  if (!g.reported.insert({first.substr(0, first.find(", block")), second.substr(0, second.find(", block"))}).second)
    return;
  std::string place = space == Space::Shared ? "shared memory, offset " + std::to_string(address)
                                             : "global memory, " + device_memory().describe(address, 1);
  const char *between = old.task == now.task ? "" : " between streams";
  const char *same = now.unchanged ? " (of the value that was there)" : "";
  note_fault(std::string("race") + between + ", " + what + same + ": " + place + "\n    first  " + first +
             "\n    second " + second);
}

static void check_cell(const RaceLog *log, Cell &cell, const Access &now, AccessKind kind, Space space,
                       uint64_t address) {
  auto conflicts = [&](const Access &old) {
    if (!old.launch || (old.sync && now.sync)) return false;
    if (old.launch == now.launch && log && old.block == now.block && old.thread == now.thread) return false;
    return !ordered_before(log, old, now);
  };
  bool writes = kind != AccessKind::Read;
  // Lanes of one warp storing to one place by one instruction: one of them wins, which programs rely on.
  bool same_store = log && cell.write.launch == now.launch && cell.write.block == now.block &&
                    cell.write.instruction == now.instruction && cell.write.thread / kLanes == now.thread / kLanes &&
                    kind == AccessKind::Write;
  bool clashes = conflicts(cell.write) && !same_store;
  if (now.unchanged && options().ignore_unchanged && (clashes || conflicts(cell.reads[0]) || conflicts(cell.reads[1])))
    return;
  if (clashes) report_race(writes ? "write after write" : "read after write", cell.write, now, space, address);
  if (writes) {
    for (const Access &read : cell.reads)
      if (conflicts(read)) report_race("write after read", read, now, space, address);
    cell.write = now;
    return;
  }
  // Keep two readers that nothing orders; a later write has to come after both.
  for (Access &read : cell.reads)
    if (!read.launch || ordered_before(log, read, now)) {
      read = now;
      return;
    }
  cell.reads[1] = now;
}

static Pair &global_pair(uint64_t address) {
  Globals &g = globals();
  uint64_t page = address / kPageBytes;
  if (page != g.cached_page) {
    auto &slot = g.pages[page];
    if (!slot) slot = std::make_unique<Page>();
    g.cached_page = page;
    g.cached = slot.get();
  }
  return (*g.cached)[address % kPageBytes / 2];
}

static void check_bytes(RaceLog *log, const Access &now, AccessKind kind, Space space, uint64_t address,
                        uint64_t bytes) {
  for (uint64_t a = address; a < address + bytes;) {
    Pair &pair = space == Space::Shared ? log->shared[a / 2] : global_pair(a);
    bool single = bytes == 1 || (a & 1) || a + 1 == address + bytes;
    if (single || pair.bytes) {
      check_cell(log, pair.byte(a), now, kind, space, a);
      if (!single) check_cell(log, pair.byte(a + 1), now, kind, space, a + 1);
    } else {
      check_cell(log, pair.whole, now, kind, space, a);
    }
    a += single ? 1 : 2;
  }
}

// Fence, then write the flag; read the flag, then go on: the second thread sees what the first had done, and what the
// first had been told by others.
static void pass_visibility(RaceLog &log, const Access &now, Space space, uint64_t address, bool reads, bool writes) {
  Globals &g = globals();
  KnowledgePtr &learned = log.learned[now.thread];
  const size_t warp = now.thread / kLanes;
  auto pass = [&](std::unordered_map<uint64_t, Knowledge> &flags, const Released &fenced) {
    if (reads) {
      auto it = flags.find(address);
      if (it != flags.end()) learn(learned, it->second);
    }
    if (!writes || fenced.lanes.empty()) return;
    Knowledge &flag = flags[address];
    flag[now.block].merge(fenced);
    if (learned) merge(flag, *learned);
  };
  pass(log.released, log.fenced_for_block[warp]);
  if (space == Space::Global) pass(g.released, log.fenced_for_all[warp]);
}

void log_access(Context &c, const Instruction &i, const Footprint &footprint, AccessKind kind) {
  RaceLog &log = *c.block->races;
  size_t warp = static_cast<size_t>(c.warp->index);
  const std::string &text = i.raw->text;
  bool releases = kind != AccessKind::Read &&
                  (text.find(".release") != std::string::npos || text.find(".acq_rel") != std::string::npos);
  if (releases) log_fence(c, footprint.lanes, text.find(".cta") == std::string::npos);
  for_lanes(footprint.lanes, [&](int lane) {
    size_t l = static_cast<size_t>(lane);
    Space space = footprint.space[l];
    if (space != Space::Shared && space != Space::Global) return;
    Access now;
    now.launch = globals().launch;
    now.task = globals().task;
    now.block = static_cast<uint32_t>(c.block->id);
    now.thread = static_cast<uint16_t>(warp * kLanes + l);
    now.warp_clock = log.warps[warp][warp];
    now.lane_clock = log.lanes[warp][l][l];
    now.instruction = i.index;
    now.unchanged = footprint.unchanged >> lane & 1;
    now.sync = i.sync && i.raw->text.compare(0, 3, "cp.") != 0;
    if (now.sync)
      pass_visibility(log, now, space, footprint.address[l], kind != AccessKind::Write, kind != AccessKind::Read);
    check_bytes(&log, now, kind, space, footprint.address[l], static_cast<uint64_t>(footprint.bytes));
  });
}

void log_range(uint64_t address, uint64_t size, bool writes) {
  Access now;
  now.launch = kNoKernel;
  now.task = globals().task;
  check_bytes(nullptr, now, writes ? AccessKind::Write : AccessKind::Read, Space::Global, address, size);
}

static void sync_lanes(std::array<Clocks, kLanes> &lanes, uint32_t members) {
  Clocks all{};
  for_lanes(members, [&](int l) { join(all, lanes[static_cast<size_t>(l)]); });
  for_lanes(members, [&](int l) {
    lanes[static_cast<size_t>(l)] = all;
    lanes[static_cast<size_t>(l)][static_cast<size_t>(l)]++;
  });
}

// What one of the threads has learned from flags all of them know after they have met.
static void share_learned(RaceLog &log, const std::array<uint32_t, kLanes> &members) {
  KnowledgePtr all;
  for (size_t w = 0; w < log.lanes.size(); w++)
    for_lanes(members[w], [&](int l) {
      const KnowledgePtr &one = log.learned[w * kLanes + static_cast<size_t>(l)];
      if (!one || one == all) return;
      if (all) learn(all, *one);
      else all = one;
    });
  for (size_t w = 0; all && w < log.lanes.size(); w++)
    for_lanes(members[w], [&](int l) { log.learned[w * kLanes + static_cast<size_t>(l)] = all; });
}

void log_warp_sync(Context &c, uint32_t members) {
  RaceLog &log = *c.block->races;
  size_t warp = static_cast<size_t>(c.warp->index);
  sync_lanes(log.lanes[warp], members);
  std::array<uint32_t, kLanes> by_warp{};
  by_warp[warp] = members;
  share_learned(log, by_warp);
}

void log_barrier(Context &c, const std::array<uint32_t, kLanes> &arrived) {
  RaceLog &log = *c.block->races;
  Clocks all{};
  Released for_all, for_block;
  for (size_t w = 0; w < log.lanes.size(); w++) {
    if (!arrived[w]) continue;
    sync_lanes(log.lanes[w], arrived[w]);
    join(all, log.warps[w]);
    for_all.merge(log.fenced_for_all[w]);
    for_block.merge(log.fenced_for_block[w]);
  }
  for (size_t w = 0; w < log.lanes.size(); w++) {
    if (!arrived[w]) continue;
    log.warps[w] = all;
    log.warps[w][w]++;
    log.fenced_for_all[w] = for_all;
    log.fenced_for_block[w] = for_block;
  }
  share_learned(log, arrived);
}

void log_fence(Context &c, uint32_t mask, bool reaches_other_blocks) {
  RaceLog &log = *c.block->races;
  size_t warp = static_cast<size_t>(c.warp->index);
  Clocks warps = log.warps[warp];
  warps[warp]--; // of its own warp, only lanes it has met
  for (std::vector<Released> *fenced : {&log.fenced_for_block, &log.fenced_for_all}) {
    if (fenced == &log.fenced_for_all && !reaches_other_blocks) continue;
    join((*fenced)[warp].warps, warps);
    for_lanes(mask, [&](int l) {
      join((*fenced)[warp].lanes[static_cast<int>(warp)], log.lanes[warp][static_cast<size_t>(l)]);
    });
  }
  // What comes later is not covered.
  for_lanes(mask, [&](int l) { log.lanes[warp][static_cast<size_t>(l)][static_cast<size_t>(l)]++; });
}

} // namespace ptxvm
