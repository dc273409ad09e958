// Which lanes run next: groups that split, join and wait, barriers, and blocks in turns.
#include "engine.h"
#include "races.h"
#include "report.h"
#include "statistics.h"
#include "warp_ops.h"
#include <algorithm>
#include <cstring>

namespace ptxvm {

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
    // A warp that is there with all it has left counts as a whole one: exited threads are not waited for.
    bool whole = here && (warp->live & ~here) == 0;
    arrived += whole ? kLanes : __builtin_popcount(here);
    expected += warp->live ? kLanes : 0;
  }
  return arrived && arrived == (b.expected ? b.expected : expected);
}

static void check_barrier_convergence(Context &c, int id) {
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
  if (is_serial()) scatter_groups(c, warp);
  else merge_groups(warp);
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

bool run_block(Context &c, Block &block) {
  c.block = &block;
  block.wants_yield = false;
  // Blocks of a cooperative launch wait for each other, so their turns are short.
  const uint64_t until = c.instructions + (1ull << (block.launch->grid_workspace ? 14 : 22));
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

} // namespace ptxvm
