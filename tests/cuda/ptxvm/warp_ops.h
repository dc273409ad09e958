// Operations in which the lanes of a mask meet.
#pragma once
#include "engine.h"

namespace ptxvm {

enum class WarpOp : uint8_t {
  Sync,
  Ballot,
  Any,
  All,
  Uniform,
  MatchAny,
  MatchAll,
  Redux,
  Elect,
  Shuffle,
  Mma,
  LoadMatrix
};

// The running lanes arrive with what they put into Warp::exchange; whoever completes the set computes for everybody.
void meet(Context &c, const Instruction &i, uint32_t mask, const Lane *members);
void meet_all(Context &c, const Instruction &i, uint32_t mask); // .aligned: the members are the whole warp
void finish_matrix(Context &c, const Instruction &i, uint32_t lanes, uint32_t members);
// The block's barrier is complete: writes what its reducing forms return.
void finish_barrier_reduction(Context &c, const Group &g, int votes, int voters);
void check_members_alive(Context &c, uint32_t exited); // lanes have exited: does a waiting mask name them?

} // namespace ptxvm
