#include "warp_ops.h"
#include "access.h"
#include "decode.h"
#include "races.h"
#include <algorithm>

namespace ptxvm {

namespace {

WarpOp op_of(const Instruction &i) { return static_cast<WarpOp>(i.mode); }

void set_pred(Context &c, Ref r, uint32_t mask, uint32_t value) {
  uint32_t &d = c.pred(r);
  d = (d & ~mask) | (value & mask);
}

void finish_vote(Context &c, const Instruction &i, uint32_t lanes, uint32_t members) {
  uint32_t ballot = 0;
  for_lanes(members,
            [&](int l) { ballot |= static_cast<uint32_t>(c.warp->exchange[static_cast<size_t>(l)] & 1) << l; });
  if (op_of(i) == WarpOp::Ballot) {
    Lane *d = c.lanes(i.dst);
    for_lanes(lanes, [&](int l) { d[l] = ballot; });
    return;
  }
  bool any = ballot != 0, all = ballot == members;
  bool value = op_of(i) == WarpOp::Any ? any : op_of(i) == WarpOp::All ? all : all || !any;
  set_pred(c, i.dst, lanes, value ? kAllLanes : 0);
}

void finish_match(Context &c, const Instruction &i, uint32_t lanes, uint32_t members) {
  const auto &value = c.warp->exchange;
  Lane *d = c.lanes(i.dst);
  for_lanes(lanes, [&](int l) {
    uint32_t same = 0;
    for_lanes(members, [&](int k) {
      same |= static_cast<uint32_t>(value[static_cast<size_t>(k)] == value[static_cast<size_t>(l)]) << k;
    });
    bool all = same == members;
    d[l] = op_of(i) == WarpOp::MatchAny ? same : all ? members : 0;
    if (i.pair.exists()) set_pred(c, i.pair, 1u << l, all ? kAllLanes : 0);
  });
}

enum class Reduction : uint8_t { Add, Min, Max, And, Or, Xor };
void finish_redux(Context &c, const Instruction &i, uint32_t lanes, uint32_t members) {
  bool first = true;
  uint32_t result = 0;
  auto combine = [&](uint32_t a, uint32_t b) {
    switch (static_cast<Reduction>(i.count)) {
    case Reduction::Add: return a + b;
    case Reduction::And: return a & b;
    case Reduction::Or: return a | b;
    case Reduction::Xor: return a ^ b;
    case Reduction::Min:
      return i.size ? static_cast<uint32_t>(std::min(static_cast<int32_t>(a), static_cast<int32_t>(b)))
                    : std::min(a, b);
    default:
      return i.size ? static_cast<uint32_t>(std::max(static_cast<int32_t>(a), static_cast<int32_t>(b)))
                    : std::max(a, b);
    }
  };
  for_lanes(members, [&](int l) {
    uint32_t value = static_cast<uint32_t>(c.warp->exchange[static_cast<size_t>(l)]);
    result = first ? value : combine(result, value);
    first = false;
  });
  Lane *d = c.lanes(i.dst);
  for_lanes(lanes, [&](int l) { d[l] = result; });
}

enum ShuffleMode { kUp, kDown, kButterfly, kIndex };
void finish_shuffle(Context &c, const Instruction &i, uint32_t lanes, uint32_t members) {
  const Lane *b = c.lanes(i.src[1]), *control = c.lanes(i.src[2]);
  Lane *d = c.lanes(i.dst);
  for_lanes(lanes, [&](int l) {
    int offset = static_cast<int>(b[l] & 31), clamp = static_cast<int>(control[l] & 31),
        segment = static_cast<int>(control[l] >> 8 & 31);
    int max_lane = (l & segment) | (clamp & ~segment), min_lane = l & segment, from = l;
    bool in_range = false;
    switch (i.count) {
    case kUp: from = l - offset, in_range = from >= max_lane; break;
    case kDown: from = l + offset, in_range = from <= max_lane; break;
    case kButterfly: from = l ^ offset, in_range = from <= max_lane; break;
    default: from = min_lane | (offset & ~segment), in_range = from <= max_lane;
    }
    if (!in_range) from = l;
    if (!(members >> from & 1)) fault(c, i, l, "shfl reads lane %d, which its mask 0x%x does not name", from, members);
    d[l] = static_cast<uint32_t>(c.warp->exchange[static_cast<size_t>(from)]);
    if (i.pair.exists()) set_pred(c, i.pair, 1u << l, in_range ? kAllLanes : 0);
  });
}

void finish(Context &c, const Instruction &i, uint32_t lanes, uint32_t members) {
  switch (op_of(i)) {
  case WarpOp::Sync: return;
  case WarpOp::Ballot:
  case WarpOp::Any:
  case WarpOp::All:
  case WarpOp::Uniform: return finish_vote(c, i, lanes, members);
  case WarpOp::MatchAny:
  case WarpOp::MatchAll: return finish_match(c, i, lanes, members);
  case WarpOp::Redux: return finish_redux(c, i, lanes, members);
  case WarpOp::Shuffle: return finish_shuffle(c, i, lanes, members);
  case WarpOp::Mma:
  case WarpOp::LoadMatrix: return finish_matrix(c, i, lanes, members);
  case WarpOp::Elect: {
    uint32_t leader = static_cast<uint32_t>(__builtin_ctz(members));
    if (i.dst.exists()) for_lanes(lanes, [&](int l) { c.lanes(i.dst)[l] = leader; });
    if (i.pair.exists()) set_pred(c, i.pair, lanes, 1u << leader);
  }
  }
}

void check_members(Context &c, const Instruction &i, uint32_t lanes, uint32_t members) {
  if (lanes & ~members) fault(c, i, __builtin_ctz(lanes & ~members), "lane is not in its own mask 0x%x", members);
  if (uint32_t missing = members & ~c.warp->existing)
    fault(c, i, __builtin_ctz(lanes), "mask 0x%x names lane %d, which does not exist", members, __builtin_ctz(missing));
  if (uint32_t exited = members & ~c.warp->live)
    fault(c, i, __builtin_ctz(lanes), "mask 0x%x names lane %d, which has exited", members, __builtin_ctz(exited));
}

// If all members wait, computes for each of the waiting groups and lets them go.
bool try_complete(Context &c, uint32_t members) {
  uint32_t waiting = 0;
  const Instruction *first = nullptr;
  for (const Group &g : c.warp->groups) {
    if (g.state != GroupState::WaitsForWarp || g.wait_mask != members) continue;
    if (first && (g.waits_at->mode != first->mode || g.waits_at->count != first->count))
      fault(c, *g.waits_at, __builtin_ctz(g.mask), "lanes of mask 0x%x meet in different warp operations: %s and %s",
            members, first->raw->text.c_str(), g.waits_at->raw->text.c_str());
    first = g.waits_at;
    waiting |= g.mask;
  }
  if (waiting != members) return false;
  Group *running = c.group;
  uint32_t done = 0;
  for (Group &g : c.warp->groups) {
    if (g.state != GroupState::WaitsForWarp || g.wait_mask != members || (done & g.mask)) continue;
    uint32_t together = 0; // lanes that wait at the same place are computed at once
    for (Group &other : c.warp->groups)
      if (other.state == GroupState::WaitsForWarp && other.wait_mask == members && other.waits_at == g.waits_at &&
          other.frame == g.frame)
        together |= other.mask;
    c.group = &g;
    c.enter(g.frame);
    finish(c, *g.waits_at, together, members);
    done |= together;
  }
  for (Group &g : c.warp->groups)
    if (g.state == GroupState::WaitsForWarp && g.wait_mask == members) g.state = GroupState::Ready;
  c.group = running;
  if (running) c.enter(running->frame);
  return true;
}

} // namespace

void meet(Context &c, const Instruction &i, uint32_t mask, const Lane *members) {
  uint32_t common = static_cast<uint32_t>(members[__builtin_ctz(mask)]);
  bool same = true;
  for_lanes(mask, [&](int l) { same &= static_cast<uint32_t>(members[l]) == common; });
  if (same && common == mask && (mask & ~c.warp->live) == 0) { // the usual case: everybody is here
    finish(c, i, mask, mask);
    if (c.block->races) log_warp_sync(c, mask);
    return;
  }
  split_from_group(c, mask);
  Group self = *c.group;
  c.group->mask = 0; // its lanes go on in groups by mask
  c.stop = true;
  std::vector<uint32_t> incomplete;
  for (uint32_t left = mask; left;) {
    uint32_t set = static_cast<uint32_t>(members[__builtin_ctz(left)]), lanes = 0;
    for_lanes(left, [&](int l) { lanes |= static_cast<uint32_t>(static_cast<uint32_t>(members[l]) == set) << l; });
    left &= ~lanes;
    check_members(c, i, lanes, set);
    Group part = self;
    part.mask = lanes;
    part.state = GroupState::WaitsForWarp;
    part.waits_at = &i;
    part.wait_mask = set;
    c.warp->groups.push_back(part);
    incomplete.push_back(set);
  }
  for (uint32_t set : incomplete)
    if (try_complete(c, set) && c.block->races) log_warp_sync(c, set);
}

void meet_all(Context &c, const Instruction &i, uint32_t mask) {
  std::array<Lane, kLanes> members;
  members.fill(c.warp->live);
  meet(c, i, mask, members.data());
}

void check_members_alive(Context &c, uint32_t exited) {
  for (const Group &g : c.warp->groups)
    if (g.mask && g.state == GroupState::WaitsForWarp && (g.wait_mask & exited))
      check_members(c, *g.waits_at, g.mask, g.wait_mask);
}

namespace {

void publish_pred(Context &c, const Instruction &i, uint32_t mask) {
  uint32_t p = c.pred_source(i, 0);
  for_lanes(mask, [&](int l) { c.warp->exchange[static_cast<size_t>(l)] = p >> l & 1; });
  meet(c, i, mask, c.lanes(i.src[3]));
}
template <class T> void publish_value(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *a = c.lanes(i.src[0]);
  for_lanes(mask, [&](int l) { c.warp->exchange[static_cast<size_t>(l)] = static_cast<T>(a[l]); });
  meet(c, i, mask, c.lanes(i.src[3]));
}
void publish_nothing(Context &c, const Instruction &i, uint32_t mask) { meet(c, i, mask, c.lanes(i.src[3])); }

void activemask(Context &c, const Instruction &i, uint32_t mask) {
  Lane *d = c.lanes(i.dst);
  for_lanes(mask, [&](int l) { d[l] = mask; });
}

void set_op(Decoder &d, WarpOp op) { d.out.mode = static_cast<uint8_t>(op); }

void decode_vote(Decoder &d) {
  if (!d.take("sync")) d.unsupported("vote without .sync");
  int k = d.take_one_of({"ballot", "any", "all", "uni"});
  if (k < 0) d.unsupported("which vote");
  set_op(d, static_cast<WarpOp>(static_cast<int>(WarpOp::Ballot) + k));
  d.take_type();
  d.destination(0);
  d.pred_source(0, 1);
  d.source(3, 2);
  d.out.handler = publish_pred;
}

void decode_match(Decoder &d) {
  d.take("sync");
  set_op(d, d.take("all") ? WarpOp::MatchAll : WarpOp::MatchAny);
  d.take("any");
  bool wide = d.take_type() == Type::B64;
  d.destination(0);
  d.source(0, 1);
  d.source(3, 2);
  d.out.handler = wide ? publish_value<uint64_t> : publish_value<uint32_t>;
}

void decode_redux(Decoder &d) {
  d.take("sync");
  int k = d.take_one_of({"add", "min", "max", "and", "or", "xor"});
  if (k < 0) d.unsupported("which reduction");
  set_op(d, WarpOp::Redux);
  d.out.count = static_cast<uint8_t>(k);
  Type type = d.take_type();
  if (is_float(type)) d.unsupported("redux of floats");
  d.out.size = type == Type::S32;
  d.destination(0);
  d.source(0, 1);
  d.source(3, 2);
  d.out.handler = publish_value<uint32_t>;
}

void decode_shuffle(Decoder &d) {
  if (!d.take("sync")) d.unsupported("shfl without .sync");
  int k = d.take_one_of({"up", "down", "bfly", "idx"});
  set_op(d, WarpOp::Shuffle);
  d.out.count = static_cast<uint8_t>(k);
  d.take_type();
  d.destination(0);
  for (int s = 0; s < 4; s++) d.source(s, static_cast<size_t>(s) + 1);
  d.out.handler = publish_value<uint32_t>;
}

void decode_elect(Decoder &d) {
  d.take("sync");
  set_op(d, WarpOp::Elect);
  d.destination(0);
  d.source(3, 1);
  d.out.handler = publish_nothing;
}

// ---- Barriers of the block

enum BarrierMode : uint8_t { kSync, kArrive, kPopc, kAnd, kOr };
void barrier(Context &c, const Instruction &i, uint32_t mask) {
  int first = __builtin_ctz(mask);
  uint64_t id = c.lanes(i.src[0])[first];
  int expected = i.src[1].exists() ? static_cast<int>(c.lanes(i.src[1])[first]) : 0;
  if (id >= 16) fault(c, i, first, "barrier %d does not exist", static_cast<int>(id));
  if (expected % kLanes) fault(c, i, first, "barrier count %d is not a multiple of the warp size", expected);
  uint32_t pred = i.mode >= kPopc ? c.pred_source(i, 2) & mask : 0;
  arrive_at_barrier(c, i, mask, static_cast<int>(id), expected, i.mode != kArrive, pred);
}

void decode_barrier(Decoder &d) {
  if (d.take("warp")) {
    d.take("sync");
    set_op(d, WarpOp::Sync);
    d.source(3, 0);
    d.out.handler = publish_nothing;
    return;
  }
  d.take("cta");
  if (d.take("cluster")) d.unsupported("clusters");
  d.out.sync = d.take("aligned") || d.opcode == "bar";
  size_t id = 0;
  if (d.take("red")) {
    int k = d.take_one_of({"popc", "and", "or"});
    if (k < 0) d.unsupported("which reduction");
    d.out.mode = static_cast<uint8_t>(kPopc + k);
    d.take_type();
    d.destination(0);
    d.pred_source(2, d.count() - 1);
    id = 1;
    if (d.count() == 4) d.source(1, 2);
  } else {
    d.out.mode = d.take("arrive") ? kArrive : kSync;
    d.take("sync");
    if (d.count() == 2) d.source(1, 1);
  }
  d.source(0, id);
  d.out.handler = barrier;
}

} // namespace

void finish_barrier_reduction(Context &c, const Group &g, int votes, int voters) {
  const Instruction &i = *g.waits_at;
  if (i.mode == kPopc) {
    Lane *d = c.lanes(i.dst);
    for_lanes(g.mask, [&](int l) { d[l] = static_cast<Lane>(votes); });
  } else if (i.mode >= kAnd) {
    bool yes = i.mode == kAnd ? votes == voters : votes != 0;
    set_pred(c, i.dst, g.mask, yes ? kAllLanes : 0);
  }
}

void add_warp_instructions(DecodeTable &t) {
  t["vote"] = decode_vote;
  t["match"] = decode_match;
  t["redux"] = decode_redux;
  t["shfl"] = decode_shuffle;
  t["elect"] = decode_elect;
  t["bar"] = decode_barrier;
  t["barrier"] = decode_barrier;
  t["activemask"] = [](Decoder &d) {
    d.take_type();
    d.destination(0);
    d.out.handler = activemask;
  };
}

} // namespace ptxvm
