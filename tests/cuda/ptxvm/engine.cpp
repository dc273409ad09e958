#include "engine.h"
#include "races.h"
#include "report.h"
#include "statistics.h"
#include "warp_ops.h"
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace ptxvm {

void finish_barrier_reduction(Context &c, const Group &g, int votes, int voters);

static Options read_options() {
  Options o;
  auto text = [](const char *name) -> std::string {
    const char *value = getenv(name);
    return value ? value : "";
  };
  std::string order = text("PTXVM_ORDER");
  if (order == "forward")
    o.order = Order::Forward;
  else if (order == "reverse")
    o.order = Order::Reverse;
  else if (order == "lockstep" || order.empty())
    o.order = Order::Lockstep;
  else if (order.find_first_not_of("0123456789") == std::string::npos)
    o.order = Order::Seeded, o.seed = strtoull(order.c_str(), nullptr, 10);
  else
    stop("PTXVM_ORDER is '%s', expected lockstep, forward, reverse or a seed", order.c_str());
  o.race = !text("PTXVM_RACE").empty() && text("PTXVM_RACE") != "0";
  o.stats = !text("PTXVM_STATS").empty();
  if (!text("PTXVM_WORKERS").empty()) o.workers = atoi(text("PTXVM_WORKERS").c_str());
  if (!text("PTXVM_LIMIT").empty()) o.instruction_limit = strtoull(text("PTXVM_LIMIT").c_str(), nullptr, 10);
  if (!text("PTXVM_CAPABILITY").empty()) o.capability = atoi(text("PTXVM_CAPABILITY").c_str());
  return o;
}

const Options &options() {
  static const Options value = read_options();
  return value;
}

uint64_t next_random(uint64_t &state) { // xorshift
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = (a + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull ^ (b + 1) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  return x ? x : 1;
}

// ---- Warps

const Frame *Warp::push_frame(const Frame *parent, const Code *code, const Instruction *call, int return_pc) {
  for (const Frame &f : frames)
    if (f.parent == parent && f.call == call && f.code == code) return &f;
  uint32_t window = parent ? parent->window + parent->code->window_bytes : 0;
  uint32_t local = parent ? parent->local_base + parent->code->local_size : 0;
  frames.push_back({parent, code, call, window, local, return_pc, parent ? parent->depth + 1 : 0});
  size_t lanes_needed = (window + code->window_bytes) / sizeof(Lane);
  if (registers.size() < lanes_needed) registers.resize(lanes_needed), preds.resize(lanes_needed / kLanes);
  ensure_local(local + code->local_size);
  return &frames.back();
}

void Warp::ensure_local(uint32_t bytes) {
  if (bytes <= local_stride) return;
  uint32_t stride = std::max(2 * local_stride, static_cast<uint32_t>(align_up(bytes, 64)));
  std::vector<uint8_t> grown(static_cast<size_t>(stride) * kLanes, 0xff);
  for (size_t lane = 0; lane < kLanes && local_stride; lane++)
    memcpy(grown.data() + lane * stride, local.data() + lane * local_stride, local_stride);
  local.swap(grown);
  local_stride = stride;
}

void split_from_group(Context &c, uint32_t mask) {
  uint32_t rest = c.group->mask & ~mask;
  if (!rest) return;
  Group other = *c.group;
  other.mask = rest;
  c.group->mask = mask;
  c.warp->groups.push_back(other);
}

// ---- Barriers

// True when everybody the barrier waits for has arrived.
static bool barrier_complete(const Block &block, const Barrier &b) {
  int arrived = 0, expected = 0;
  for (const auto &warp : block.warps) {
    uint32_t here = b.arrived[static_cast<size_t>(warp->index)];
    // A warp that is there with all it has left counts as a whole one.
    arrived += here == warp->live ? (here ? kLanes : 0) : __builtin_popcount(here);
    expected += warp->live ? kLanes : 0;
  }
  return arrived && arrived == (b.expected ? b.expected : expected);
}

static void check_barrier_convergence(Context &c, int id) {
  const Barrier &b = c.block->barriers[static_cast<size_t>(id)];
  for (auto &warp : c.block->warps) {
    const Group *first = nullptr;
    for (const Group &g : warp->groups) {
      if (!g.mask || g.state != GroupState::WaitsForBarrier || g.barrier != id || !g.waits_at->sync) continue;
      Warp *running = c.warp;
      c.warp = warp.get();
      if (first && first->waits_at != g.waits_at)
        fault(c, *g.waits_at, __builtin_ctz(g.mask),
              "divergent barrier: lanes of one warp wait at different barriers (the other is at %s)",
              describe_location(*first->frame->code->function, *first->waits_at->raw).c_str());
      if (b.arrived[static_cast<size_t>(warp->index)] != warp->existing && warp->live != warp->existing)
        fault(c, *g.waits_at, __builtin_ctz(g.mask),
              "divergent barrier: lanes 0x%x of this warp have exited without it", warp->existing & ~warp->live);
      c.warp = running;
      first = &g;
    }
  }
}

static void try_release_barrier(Context &c, int id) {
  Barrier &b = c.block->barriers[static_cast<size_t>(id)];
  if (!barrier_complete(*c.block, b)) return;
  check_barrier_convergence(c, id);
  int votes = 0, voters = 0;
  for (auto &warp : c.block->warps)
    for (const Group &g : warp->groups)
      if (g.mask && g.state == GroupState::WaitsForBarrier && g.barrier == id)
        votes += __builtin_popcount(g.wait_mask), voters += __builtin_popcount(g.mask);
  if (c.block->races) log_barrier(c, b.arrived);
  Warp *running_warp = c.warp;
  for (auto &warp : c.block->warps) {
    for (Group &g : warp->groups) {
      if (!g.mask || g.state != GroupState::WaitsForBarrier || g.barrier != id) continue;
      c.warp = warp.get();
      c.enter(g.frame);
      finish_barrier_reduction(c, g, votes, voters);
      g.state = GroupState::Ready;
    }
  }
  c.warp = running_warp;
  c.enter(c.group->frame);
  b = Barrier();
}

void arrive_at_barrier(Context &c, const Instruction &i, uint32_t mask, int id, int expected, bool waits,
                       uint32_t pred) {
  Barrier &b = c.block->barriers[static_cast<size_t>(id)];
  b.expected = expected;
  b.arrived[static_cast<size_t>(c.warp->index)] |= mask;
  if (waits) {
    split_from_group(c, mask);
    c.group->state = GroupState::WaitsForBarrier;
    c.group->waits_at = &i;
    c.group->wait_mask = pred;
    c.group->barrier = id;
    c.stop = true;
  }
  try_release_barrier(c, id);
}

void lanes_exit(Context &c, uint32_t mask) {
  split_from_group(c, mask);
  c.warp->live &= ~mask;
  c.block->live_threads -= __builtin_popcount(mask);
  c.group->mask = 0;
  c.stop = true;
  check_members_alive(c, mask);
  for (int id = 0; id < 16; id++) try_release_barrier(c, id);
}

// ---- Scheduling

static bool is_serial() { return options().order != Order::Lockstep; }

// Joins ready groups that stand at the same place.
static void merge_groups(Warp &warp) {
  auto &groups = warp.groups;
  for (size_t a = 0; a < groups.size(); a++) {
    if (!groups[a].mask || groups[a].state != GroupState::Ready) continue;
    for (size_t b = a + 1; b < groups.size(); b++)
      if (groups[b].mask && groups[b].state == GroupState::Ready && groups[b].pc == groups[a].pc &&
          groups[b].frame == groups[a].frame)
        groups[a].mask |= groups[b].mask, groups[b].mask = 0;
  }
}

// Serial orders keep every lane by itself; the seeded one sometimes lets neighbours go together.
static void scatter_groups(Context &c, Warp &warp) {
  auto &groups = warp.groups;
  bool whole = options().order == Order::Seeded && next_random(c.random) % 4 == 0;
  for (size_t k = 0; k < groups.size() && !whole; k++) {
    while (groups[k].state == GroupState::Ready && (groups[k].mask & (groups[k].mask - 1))) {
      Group alone = groups[k];
      alone.mask = groups[k].mask & -groups[k].mask;
      groups[k].mask &= groups[k].mask - 1;
      groups.push_back(alone);
    }
  }
}

static int first_lane(const Group &g) { return __builtin_ctz(g.mask); }

// The group to run next, nullptr when all wait. `turn` makes another choice after a group has had a long run.
static Group *pick_group(Context &c, Warp &warp, bool turn) {
  auto &groups = warp.groups;
  groups.erase(std::remove_if(groups.begin(), groups.end(), [](const Group &g) { return !g.mask; }), groups.end());
  if (groups.size() == 1 && !is_serial()) return groups[0].state == GroupState::Ready ? &groups[0] : nullptr;
  if (is_serial())
    scatter_groups(c, warp);
  else
    merge_groups(warp);
  Group *best = nullptr;
  int ready = 0;
  for (Group &g : groups) {
    if (!g.mask || g.state != GroupState::Ready) continue;
    ready++;
    bool better = !best;
    if (best) {
      switch (options().order) {
      case Order::Lockstep:
        better = g.frame->depth != best->frame->depth ? g.frame->depth > best->frame->depth : g.pc < best->pc;
        break;
      case Order::Forward: better = first_lane(g) < first_lane(*best); break;
      case Order::Reverse: better = first_lane(g) > first_lane(*best); break;
      case Order::Seeded: better = next_random(c.random) % static_cast<uint64_t>(ready) == 0; break;
      }
    }
    if (better) best = &g;
  }
  if (!turn || ready < 2) return best;
  int skip = ++warp.turn % ready;
  for (Group &g : groups)
    if (g.mask && g.state == GroupState::Ready && skip-- == 0) return &g;
  return best;
}

// The running group stops before the program counter of another one, so that they can join.
static int meeting_point(const Warp &warp, const Group &running) {
  int limit = INT32_MAX;
  if (is_serial()) return limit;
  for (const Group &g : warp.groups)
    if (&g != &running && g.mask && g.state == GroupState::Ready && g.frame == running.frame && g.pc >= running.pc)
      limit = std::min(limit, g.pc);
  return limit;
}

constexpr int kGroupQuantum = 20000;

// Runs until the group waits, splits, ends, meets another or has had its share. Returns true if it had its share.
static bool run_group(Context &c, Group &g) {
  c.group = &g;
  c.enter(g.frame);
  c.stop = false;
  const Instruction *code = g.frame->code->instructions.data();
  const int limit = meeting_point(*c.warp, g);
  int quantum = options().order == Order::Seeded ? 1 + static_cast<int>(next_random(c.random) % 64) : kGroupQuantum;
  int budget = quantum;
  uint64_t executed = 0;
  do {
    const Instruction &i = code[g.pc++];
    uint32_t mask = g.mask;
    if (i.guard >= 0) mask &= *reinterpret_cast<const uint32_t *>(c.bases[3] + i.guard) ^ i.guard_flip;
    executed += static_cast<uint64_t>(__builtin_popcount(g.mask));
    if (mask) i.handler(c, i, mask);
  } while (!c.stop && --budget > 0 && g.pc < limit);
  c.instructions += executed;
  if (c.counters) c.counters->warp_instructions += static_cast<uint64_t>(quantum - budget + (c.stop ? 1 : 0));
  return budget <= 0;
}

static void run_warp(Context &c, Warp &warp) {
  c.warp = &warp;
  bool turn = false;
  for (int runs = 0; runs < 64; runs++) {
    Group *g = pick_group(c, warp, turn);
    if (!g) return;
    turn = run_group(c, *g);
    if (c.block->wants_yield && runs > 8) return;
    if (turn && runs > 2) return;
  }
}

[[noreturn]] static void report_deadlock(Context &c) {
  std::string others;
  Warp *first_warp = nullptr;
  const Group *first = nullptr;
  for (auto &warp : c.block->warps)
    for (const Group &g : warp->groups) {
      if (!g.mask) continue;
      if (!first) {
        first = &g, first_warp = warp.get();
        continue;
      }
      if (others.size() > 1500 || g.waits_at == first->waits_at) continue;
      others += "\n    warp " + std::to_string(warp->index) + " lane " + std::to_string(first_lane(g)) + " waits at " +
                g.waits_at->raw->text + ", " + describe_location(*g.frame->code->function, *g.waits_at->raw);
    }
  c.warp = first_warp;
  bool partial = false; // does a warp wait at an aligned barrier with only some of its lanes?
  for (auto &warp : c.block->warps)
    for (const Group &g : warp->groups)
      if (g.mask && g.state == GroupState::WaitsForBarrier && g.waits_at->sync &&
          c.block->barriers[static_cast<size_t>(g.barrier)].arrived[static_cast<size_t>(warp->index)] != warp->live)
        partial = true;
  fault(c, *first->waits_at, first_lane(*first), "%s: no thread of the block can go on; this one waits at %s%s",
        partial ? "divergent barrier, deadlock" : "deadlock", first->waits_at->raw->text.c_str(), others.c_str());
}

// One turn of a block. True when it has ended.
static bool run_block(Context &c, Block &block) {
  c.block = &block;
  block.wants_yield = false;
  const uint64_t until = c.instructions + (1ull << 22);
  std::vector<size_t> order(block.warps.size());
  for (size_t k = 0; k < order.size(); k++) order[k] = options().order == Order::Reverse ? order.size() - 1 - k : k;
  while (block.live_threads) {
    uint64_t before = c.instructions;
    if (options().order == Order::Seeded)
      for (size_t k = order.size(); k > 1; k--) std::swap(order[k - 1], order[next_random(c.random) % k]);
    for (size_t k : order) run_warp(c, *block.warps[k]);
    if (c.instructions == before && block.live_threads) report_deadlock(c);
    if (block.live_threads && (block.wants_yield || c.instructions > until)) return false;
  }
  return true;
}

// ---- Launches

static void fill(Lane *lanes, uint64_t value) { std::fill(lanes, lanes + kLanes, value); }

static void set_special_registers(const Launch &launch, const Block &block, Warp &warp) {
  static const std::vector<std::string> &names = special_register_names();
  warp.special.resize(names.size() * kLanes);
  auto slot = [&](const char *name) {
    size_t index = static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    return warp.special.data() + index * kLanes;
  };
  const Dim &b = launch.block, &g = launch.grid;
  Lane *x = slot("%tid.x"), *y = slot("%tid.y"), *z = slot("%tid.z"), *lane = slot("%laneid");
  Lane *eq = slot("%lanemask_eq"), *lt = slot("%lanemask_lt"), *le = slot("%lanemask_le"), *gt = slot("%lanemask_gt"),
       *ge = slot("%lanemask_ge");
  for (uint32_t l = 0; l < kLanes; l++) {
    uint32_t thread = static_cast<uint32_t>(warp.index) * kLanes + l, bit = 1u << l;
    x[l] = thread % b.x, y[l] = thread / b.x % b.y, z[l] = thread / (b.x * b.y);
    lane[l] = l, eq[l] = bit, lt[l] = bit - 1, le[l] = bit | (bit - 1), gt[l] = ~(bit | (bit - 1)), ge[l] = ~(bit - 1);
  }
  const std::pair<const char *, uint64_t> values[] = {{"%ntid.x", b.x},
                                                      {"%ntid.y", b.y},
                                                      {"%ntid.z", b.z},
                                                      {"%nctaid.x", g.x},
                                                      {"%nctaid.y", g.y},
                                                      {"%nctaid.z", g.z},
                                                      {"%ctaid.x", block.coordinates[0]},
                                                      {"%ctaid.y", block.coordinates[1]},
                                                      {"%ctaid.z", block.coordinates[2]},
                                                      {"%warpid", static_cast<uint64_t>(warp.index)},
                                                      {"%nwarpid", block.warps.size()},
                                                      {"%smid", block.id % 4},
                                                      {"%nsmid", 4},
                                                      {"%gridid", launch.serial},
                                                      {"%dynamic_smem_size", launch.dynamic_shared},
                                                      {"%total_smem_size", launch.shared_size},
                                                      {"WARP_SZ", kLanes},
                                                      {"%nclusterid.x", g.x},
                                                      {"%clusterid.x", block.coordinates[0]},
                                                      {"%cluster_nctarank", 1}};
  for (auto &v : values) fill(slot(v.first), v.second & 0xffffffff);
}

static void start_warp(const Launch &launch, Block &block, Warp &warp, int index) {
  int threads = static_cast<int>(launch.block.count()) - index * kLanes;
  warp.block = &block;
  warp.index = index;
  warp.existing = warp.live = threads >= kLanes ? kAllLanes : (1u << threads) - 1;
  warp.frames.clear();
  warp.groups.clear();
  warp.groups.reserve(256); // handlers add groups while one of them is referred to
  warp.copies.clear();
  warp.copy_sequence.fill(0);
  std::fill(warp.local.begin(), warp.local.end(), 0xff);
  const Frame *frame = warp.push_frame(nullptr, launch.program->entry, nullptr, 0);
  std::fill(warp.registers.begin(), warp.registers.end(), 0xdeadbeefdeadbeefull);
  warp.groups.push_back({warp.live, 0, frame, GroupState::Ready, nullptr, 0, 0});
}

static void start_block(Launch &launch, Block &block, uint64_t id) {
  block.launch = &launch;
  block.id = id;
  block.coordinates[0] = static_cast<uint32_t>(id % launch.grid.x);
  block.coordinates[1] = static_cast<uint32_t>(id / launch.grid.x % launch.grid.y);
  block.coordinates[2] = static_cast<uint32_t>(id / (static_cast<uint64_t>(launch.grid.x) * launch.grid.y));
  block.shared.assign(launch.shared_size + 16, 0xff);
  block.shared_written.assign(launch.shared_size + 16, 0);
  block.barriers.fill(Barrier());
  block.live_threads = static_cast<int>(launch.block.count());
  size_t warps = (launch.block.count() + kLanes - 1) / kLanes;
  while (block.warps.size() < warps) block.warps.push_back(std::make_unique<Warp>());
  block.warps.resize(warps);
  for (size_t k = 0; k < warps; k++) {
    start_warp(launch, block, *block.warps[k], static_cast<int>(k));
    set_special_registers(launch, block, *block.warps[k]);
  }
  block.races.reset();
  if (options().race) block.races = new_race_log(launch, block);
}

static uint64_t block_at(const Launch &launch, uint64_t position, const std::vector<uint64_t> &shuffled) {
  uint64_t count = launch.grid.count();
  if (options().order == Order::Reverse) return count - 1 - position;
  return shuffled.empty() ? position : shuffled[position];
}

constexpr size_t kMaxResident = 2048;

// Blocks that spin, waiting for others, stay resident while new ones start.
static void work(Launch &launch, const std::vector<uint64_t> &shuffled) {
  auto context = std::make_unique<Context>();
  Context &c = *context;
  c.launch = &launch;
  KernelCounters counters;
  if (launch.counters) c.counters = &counters;
  c.watch = launch.counters || options().race;
  const uint64_t blocks = launch.grid.count();
  std::deque<std::unique_ptr<Block>> resident;
  std::unique_ptr<Block> spare;
  uint64_t counted = 0;
  uint64_t turn = 0;
  bool exhausted = false;
  while (!exhausted || !resident.empty()) {
    bool starts = !exhausted && resident.size() < kMaxResident && (resident.empty() || (turn++ & 1));
    uint64_t position = starts ? launch.next_block++ : blocks;
    std::unique_ptr<Block> block;
    if (position < blocks) {
      block = spare ? std::move(spare) : std::make_unique<Block>();
      uint64_t id = block_at(launch, position, shuffled);
      c.random = mix(options().seed, mix(launch.serial, id));
      start_block(launch, *block, id);
    } else {
      exhausted |= starts;
      if (resident.empty()) continue;
      block = std::move(resident.front());
      resident.pop_front();
    }
    if (run_block(c, *block))
      spare = std::move(block);
    else
      resident.push_back(std::move(block));
    uint64_t total = launch.instructions += c.instructions - counted;
    counted = c.instructions;
    if (total > options().instruction_limit)
      stop("kernel %s has executed %llu instructions without an end (PTXVM_LIMIT): livelock?",
           demangle(launch.program->kernel->name).c_str(), static_cast<unsigned long long>(total));
  }
  if (launch.counters) {
    std::lock_guard<std::mutex> lock(launch.counters_lock);
    counters.thread_instructions = c.instructions;
    launch.counters->add(counters);
  }
}

void run_launch(Program &program, Dim grid, Dim block, uint64_t dynamic_shared, std::vector<uint8_t> params) {
  static uint64_t serial = 0;
  Launch launch;
  launch.program = &program;
  launch.grid = grid;
  launch.block = block;
  launch.dynamic_shared = dynamic_shared;
  launch.shared_size = program.static_shared + dynamic_shared;
  launch.params = std::move(params);
  launch.serial = ++serial;
  if (options().stats) launch.counters = &counters_of(program.kernel->name);
  if (launch.counters) launch.counters->launches++, launch.counters->blocks += grid.count();
  std::vector<uint64_t> shuffled;
  if (options().order == Order::Seeded) {
    uint64_t random = mix(options().seed, launch.serial);
    shuffled.resize(grid.count());
    for (uint64_t k = 0; k < shuffled.size(); k++) shuffled[k] = k;
    for (uint64_t k = shuffled.size(); k > 1; k--) std::swap(shuffled[k - 1], shuffled[next_random(random) % k]);
  }
  if (options().race) begin_race_launch(launch);
  uint64_t workers = options().workers ? static_cast<uint64_t>(options().workers) : std::thread::hardware_concurrency();
  if (!program.blocks_independent || options().race || is_serial()) workers = 1;
  workers = std::max<uint64_t>(1, std::min(workers, grid.count()));
  std::vector<std::thread> threads;
  for (uint64_t k = 1; k < workers; k++) threads.emplace_back([&] { work(launch, shuffled); });
  work(launch, shuffled);
  for (std::thread &t : threads) t.join();
  count_executed(launch.instructions);
}

} // namespace ptxvm
