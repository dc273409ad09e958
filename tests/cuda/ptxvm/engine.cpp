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

static Options read_options() {
  Options o;
  auto text = [](const char *name) -> std::string {
    const char *value = getenv(name);
    return value ? value : "";
  };
  std::string order = text("PTXVM_ORDER");
  if (order == "forward") o.order = Order::Forward;
  else if (order == "reverse") o.order = Order::Reverse;
  else if (order == "lockstep" || order.empty()) o.order = Order::Lockstep;
  else if (order.find_first_not_of("0123456789") == std::string::npos)
    o.order = Order::Seeded, o.seed = strtoull(order.c_str(), nullptr, 10);
  else stop("PTXVM_ORDER is '%s', expected lockstep, forward, reverse or a seed", order.c_str());
  std::string race = text("PTXVM_RACE");
  o.race = !race.empty() && race != "0";
  o.ignore_unchanged = race == "changes";
  if (o.race && race != "1" && !o.ignore_unchanged) stop("PTXVM_RACE is '%s', expected 0, 1 or changes", race.c_str());
  o.stats = !text("PTXVM_STATS").empty();
  if (!text("PTXVM_WORKERS").empty()) o.workers = atoi(text("PTXVM_WORKERS").c_str());
  if (!text("PTXVM_LIMIT").empty()) o.instruction_limit = strtoull(text("PTXVM_LIMIT").c_str(), nullptr, 10);
  if (!text("PTXVM_CAPABILITY").empty()) o.capability = atoi(text("PTXVM_CAPABILITY").c_str());
  o.pageable = text("PTXVM_PAGEABLE") == "1";
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

static void fill(Lane *lanes, uint64_t value) { std::fill(lanes, lanes + kLanes, value); }

static size_t special_slot(const char *name) {
  const std::vector<std::string> &names = special_register_names();
  return static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin()) * kLanes;
}

// What differs between the blocks of a launch.
static void set_block_registers(const Block &block, Warp &warp) {
  static const size_t x = special_slot("%ctaid.x"), y = special_slot("%ctaid.y"), z = special_slot("%ctaid.z");
  static const size_t cluster = special_slot("%clusterid.x"), multiprocessor = special_slot("%smid");
  Lane *special = warp.special.data();
  fill(special + x, block.coordinates[0]);
  fill(special + y, block.coordinates[1]);
  fill(special + z, block.coordinates[2]);
  fill(special + cluster, block.coordinates[0]);
  fill(special + multiprocessor, block.id % kMultiprocessors);
}

static void set_special_registers(const Launch &launch, const Block &block, Warp &warp) {
  if (warp.special_launch == launch.serial) return set_block_registers(block, warp);
  warp.special_launch = launch.serial;
  warp.special.resize(special_register_names().size() * kLanes);
  auto slot = [&](const char *name) { return warp.special.data() + special_slot(name); };
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
                                                      {"%warpid", static_cast<uint64_t>(warp.index)},
                                                      {"%nwarpid", block.warps.size()},
                                                      {"%nsmid", kMultiprocessors},
                                                      {"%gridid", launch.serial},
                                                      {"%dynamic_smem_size", launch.dynamic_shared},
                                                      {"%total_smem_size", launch.shared_size},
                                                      {"WARP_SZ", kLanes},
                                                      {"%nclusterid.x", g.x},
                                                      {"%envreg1", launch.grid_workspace >> 32},
                                                      {"%envreg2", launch.grid_workspace},
                                                      {"%cluster_nctarank", 1}};
  for (auto &v : values) fill(slot(v.first), v.second & 0xffffffff);
  set_block_registers(block, warp);
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
// Smaller launches are over before a second worker has started: by threads, and by instructions once they are known.
constexpr uint64_t kWorthThreads = 2048, kWorthInstructions = 1 << 20;

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
    if (run_block(c, *block)) spare = std::move(block);
    else resident.push_back(std::move(block));
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

void run_launch(Program &program, Dim grid, Dim block, uint64_t dynamic_shared, std::vector<uint8_t> params,
                uint64_t grid_workspace) {
  static uint64_t serial = 0;
  Launch launch;
  launch.program = &program;
  launch.grid = grid;
  launch.block = block;
  launch.dynamic_shared = dynamic_shared;
  launch.shared_size = program.static_shared + dynamic_shared;
  launch.params = std::move(params);
  launch.grid_workspace = grid_workspace;
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
  if (!program.blocks_independent || grid_workspace || options().race || is_serial()) workers = 1;
  if (grid.count() * block.count() < kWorthThreads) workers = 1;
  if (program.instructions_a_block && program.instructions_a_block * grid.count() < kWorthInstructions) workers = 1;
  workers = std::max<uint64_t>(1, std::min(workers, grid.count()));
  std::vector<std::thread> threads;
  for (uint64_t k = 1; k < workers; k++) threads.emplace_back([&] { work(launch, shuffled); });
  work(launch, shuffled);
  for (std::thread &t : threads) t.join();
  program.instructions_a_block = launch.instructions / grid.count() + 1;
  count_executed(launch.instructions);
}

} // namespace ptxvm
