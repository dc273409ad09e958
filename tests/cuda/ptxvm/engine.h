// The machine: a launch runs blocks, a block runs warps, a warp runs groups of lanes that share a program counter.
//
// All 32 lanes of a group execute one instruction together. Registers are arrays of 32 64-bit values, a predicate is
// one 32-bit mask. Divergence splits a group; groups at the same place join again. In the serial orders every lane is a
// group of its own, which is as legal on the hardware as lockstep and shows what lockstep hides.
#pragma once
#include "device_memory.h"
#include "ptx.h"
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptxvm {

constexpr int kLanes = 32;
constexpr int kMultiprocessors = 4;                    // few, so that grid-stride loops are short of blocks
constexpr int kSlotBytes = kLanes * 8, kPredBytes = 4; // of a register, and of one that is a predicate
constexpr uint32_t kAllLanes = ~0u;
using Lane = uint64_t;

struct Context;
struct Instruction;
using Handler = void (*)(Context &, const Instruction &, uint32_t mask);

enum class Base : uint8_t { Window, Special, Absolute, Pred };
struct Ref {
  int64_t offset = -1; // -1 with base Window: no operand
  Base base = Base::Window;
  bool exists() const { return offset != -1 || base != Base::Window; }
};

struct Code;

// Operands that only few instructions have.
struct Extra {
  std::vector<Ref> refs, refs2, refs3;
  std::vector<int> targets;
  std::vector<std::pair<int, int>> copies; // frame offsets of call arguments
  const Function *callee = nullptr;
  int result_offset = -1; // frame offset of the caller's variable for the result
  std::string name;
};

struct Instruction {
  Handler handler = nullptr;
  int32_t guard = -1; // offset of the guard among the predicates
  uint32_t guard_flip = 0;
  Ref dst, pair, src[4];
  uint32_t flip[4] = {}; // all ones for a negated predicate operand
  int64_t imm = 0;       // address displacement, or the operation's own constant
  int32_t target = -1;
  Space space = Space::Generic;
  uint8_t size = 0, count = 1; // bytes an element, elements an access
  uint8_t mode = 0;            // the operation's own choice
  uint8_t unused = 0;          // elements of a vector load whose registers nobody reads
  bool sync = false;           // volatile, relaxed, acquire, release or atomic
  bool frame_relative = false; // local address of a variable: the frame's place is added
  const Extra *extra = nullptr;
  const RawInstruction *raw = nullptr;
  uint32_t index = 0; // in the program
};

struct Code {
  const Function *function = nullptr;
  std::vector<Instruction> instructions;
  uint32_t window_bytes = 0;
  uint32_t local_size = 0;
};

struct Program {
  const Function *kernel = nullptr;
  std::unordered_map<const Function *, std::unique_ptr<Code>> codes;
  std::unordered_map<const Symbol *, uint64_t> shared_offset;
  std::deque<std::array<Lane, kLanes>> constants;
  std::unordered_map<uint64_t, const Lane *> constant_of;
  std::deque<Extra> extras;
  uint64_t static_shared = 0;
  uint32_t instruction_count = 0;
  uint64_t instructions_a_block = 0; // of threads, in the last launch
  bool blocks_independent = true;    // nothing in it can make one block see another
  const Code *entry = nullptr;

  Code *code_of(const Function *function); // decoded when first asked for
};

// The call chain of a group. Frames are shared: equal chains are the same object.
struct Frame {
  const Frame *parent;
  const Code *code;
  const Instruction *call;
  uint32_t window, local_base;
  int return_pc, depth;
};

enum class GroupState : uint8_t { Ready, WaitsForWarp, WaitsForBarrier };

struct Group {
  uint32_t mask;
  int pc;
  const Frame *frame;
  GroupState state = GroupState::Ready;
  const Instruction *waits_at = nullptr;
  uint32_t wait_mask = 0; // members of the warp operation, or the predicate brought to a reducing barrier
  int barrier = 0;
};

struct PendingCopy { // cp.async, carried out when it is waited for: the latest moment PTX allows
  int lane;
  uint32_t sequence;
  uint64_t shared_address;
  const uint8_t *source;
  uint64_t source_address;
  int copied, zeroed;
  const Instruction *instruction;
};

struct RangeCache {
  uint64_t low = 1, high = 0;
  int64_t delta = 0;
};

struct Block;
struct Launch;
struct RaceLog;
struct KernelCounters;

struct Warp {
  Block *block = nullptr;
  int index = 0;
  uint32_t existing = 0, live = 0;
  std::vector<Lane> registers;
  std::vector<uint32_t> preds; // apart from the others: lanes in different functions share the numbers
  std::vector<Lane> special;
  uint64_t special_launch = 0; // the launch they were set for
  std::vector<uint8_t> local;
  uint32_t local_stride = 0;
  std::vector<Group> groups;
  std::deque<Frame> frames;
  std::vector<PendingCopy> copies;
  std::array<uint32_t, kLanes> copy_sequence{};
  std::array<Lane, kLanes> exchange{};  // what lanes bring to a warp operation
  std::array<uint32_t, kLanes> carry{}; // condition code
  int turn = 0;

  const Frame *push_frame(const Frame *parent, const Code *code, const Instruction *call, int return_pc);
  uint8_t *local_bytes(int lane, uint64_t offset) {
    return local.data() + static_cast<size_t>(lane) * local_stride + offset;
  }
  void ensure_local(uint32_t bytes);
};

struct Barrier {
  std::array<uint32_t, kLanes> arrived{}; // lanes, by warp
  int expected = 0;                       // threads, 0: the whole block
};

struct Block {
  Launch *launch = nullptr;
  uint64_t id = 0;
  uint32_t coordinates[3] = {};
  std::vector<uint8_t> shared, shared_written; // the second says which bytes hold a value
  std::vector<std::unique_ptr<Warp>> warps;
  std::array<Barrier, 16> barriers{};
  int live_threads = 0;
  bool wants_yield = false;
  std::shared_ptr<RaceLog> races; // set when races are looked for
};

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return static_cast<uint64_t>(x) * y * z; }
};

enum class Order : uint8_t { Lockstep, Forward, Reverse, Seeded };

struct Options {
  Order order = Order::Lockstep;
  uint64_t seed = 1;
  bool race = false, stats = false;
  bool ignore_unchanged = false;           // a store of the value that is there already is no race
  int workers = 0;                         // 0: as many as the machine has cores
  uint64_t instruction_limit = 1ull << 36; // of one launch, in thread instructions
  int capability = 90;
  bool pageable = false; // kernels may use any host memory
};
const Options &options(); // from the environment, read once
inline bool is_serial() { return options().order != Order::Lockstep; }

struct Launch {
  Program *program = nullptr;
  Dim grid, block;
  uint64_t dynamic_shared = 0, shared_size = 0;
  std::vector<uint8_t> params;
  std::atomic<uint64_t> next_block{0};
  std::atomic<uint64_t> instructions{0};
  uint64_t serial = 0;
  uint64_t grid_workspace = 0;
  KernelCounters *counters = nullptr; // totals, set when statistics are wanted
  std::mutex counters_lock;
};

// What an instruction sees. One per worker thread.
struct Context {
  char *bases[4] = {}; // by Base
  Warp *warp = nullptr;
  Block *block = nullptr;
  Launch *launch = nullptr;
  Group *group = nullptr;
  bool stop = false;  // leave the group after this instruction
  bool watch = false; // races or statistics are on
  KernelCounters *counters = nullptr;
  uint64_t instructions = 0; // of threads
  uint64_t random = 1;
  std::array<RangeCache, 256> ranges;

  Lane *lanes(Ref r) const { return reinterpret_cast<Lane *>(bases[static_cast<int>(r.base)] + r.offset); }
  Lane *high_lanes(Ref r) const { return lanes(r) + kLanes; } // the upper half of a 128-bit register
  uint32_t &pred(Ref r) const { return *reinterpret_cast<uint32_t *>(bases[static_cast<int>(r.base)] + r.offset); }
  uint32_t pred_source(const Instruction &i, int k) const { return pred(i.src[k]) ^ i.flip[k]; }
  void enter(const Frame *frame) {
    bases[0] = reinterpret_cast<char *>(warp->registers.data()) + frame->window;
    bases[1] = reinterpret_cast<char *>(warp->special.data());
    bases[3] = reinterpret_cast<char *>(warp->preds.data()) + frame->window / kSlotBytes * kPredBytes;
  }
};

template <class F> inline void for_lanes(uint32_t mask, F f) {
  if (mask == kAllLanes) {
    for (int lane = 0; lane < kLanes; lane++) f(lane);
  } else {
    for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
  }
}

uint64_t next_random(uint64_t &state);
bool run_block(Context &context, Block &block); // one turn; true when the block has ended
Program *program_of(const Function *kernel);    // cached
// A cooperative launch has a workspace, in which its blocks wait for each other.
void run_launch(Program &program, Dim grid, Dim block, uint64_t dynamic_shared, std::vector<uint8_t> params,
                uint64_t grid_workspace = 0);

// Warp and block waits, used by the instructions that wait.
void split_from_group(Context &context, uint32_t mask); // the rest of the running group goes its own way
void lanes_exit(Context &context, uint32_t mask);
void arrive_at_barrier(Context &context, const Instruction &i, uint32_t mask, int barrier, int expected, bool waits,
                       uint32_t pred);

} // namespace ptxvm
