// Races: two accesses to the same byte, at least one a write, not both atomic or volatile, that nothing orders.
//
// What orders: the same thread; barriers of the block; warp operations among their members; and between blocks a fence
// followed by an atomic or volatile write that the other block reads by an atomic or volatile access ("last block
// done", look-back). Only accesses of one launch are compared.
#pragma once
#include "access.h"
#include "engine.h"

namespace ptxvm {

std::shared_ptr<RaceLog> new_race_log(const Launch &launch, const Block &block);
void begin_race_launch(const Launch &launch);
void log_access(Context &c, const Instruction &i, const Footprint &footprint, AccessKind kind);
void log_warp_sync(Context &c, uint32_t members);
void log_barrier(Context &c, const std::array<uint32_t, kLanes> &arrived);
void log_fence(Context &c, uint32_t mask);

} // namespace ptxvm
