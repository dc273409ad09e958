// Races: two accesses to the same byte, at least one a write, not both atomic or volatile, that nothing orders.
//
// What orders: the same thread; barriers of the block; warp operations among their members; and a fence followed by an
// atomic or volatile write that another thread reads by an atomic or volatile access (locks, "last block done",
// look-back). Accesses of different launches are ordered by streams and events.
#pragma once
#include "access.h"
#include "engine.h"

namespace ptxvm {

std::shared_ptr<RaceLog> new_race_log(const Launch &launch, const Block &block);
void begin_race_launch(const Launch &launch);
// A task is what one entry of a stream does. Clocks say, by stream, up to which task everything comes before this one.
using StreamClock = std::map<uint64_t, uint64_t>;
uint32_t new_race_task(const std::string &name, uint64_t stream, uint64_t sequence, StreamClock before);
void enter_race_task(uint32_t task); // what is logged from here on belongs to it
uint32_t current_race_task();
void log_range(uint64_t address, uint64_t size, bool writes); // by a copy or a library call
void log_access(Context &c, const Instruction &i, const Footprint &footprint, AccessKind kind);
void log_warp_sync(Context &c, uint32_t members);
void log_barrier(Context &c, const std::array<uint32_t, kLanes> &arrived);
void log_fence(Context &c, uint32_t mask, bool reaches_other_blocks);

} // namespace ptxvm
