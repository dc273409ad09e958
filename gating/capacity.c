#include <math.h>

#include "gating/gate_ops.h"

__extension__ typedef unsigned __int128 wide;

/* The largest factor that keeps T K cf within 128 bits with room to spare; far beyond any use. */
static const float max_factor = 1e9f;

pmoe_status pmoe_gate_capacity(int64_t tokens, int32_t num_experts, int32_t top_k, float capacity_factor,
                               int32_t min_capacity, int64_t *capacity) {
  PMOEI_REQUIRE_POINTER(capacity);
  PMOEI_REQUIRE(tokens >= 0, "tokens is %lld; 0 or more was expected", (long long)tokens);
  PMOEI_REQUIRE(num_experts >= 1, "num_experts is %d; at least 1 was expected", num_experts);
  PMOEI_REQUIRE(top_k >= 1 && top_k <= num_experts, "top_k is %d; 1 to num_experts = %d was expected", top_k,
                num_experts);
  PMOEI_REQUIRE(capacity_factor == 0 || (capacity_factor >= 1e-6f && capacity_factor <= max_factor),
                "capacity_factor is %g; 0 (dropless) or 1e-6 to 1e9 was expected", (double)capacity_factor);
  PMOEI_REQUIRE(min_capacity >= 0, "min_capacity is %d; 0 or more was expected", min_capacity);
  PMOEI_REQUIRE(tokens <= INT64_MAX / top_k, "tokens is %lld; tokens times top_k = %d must fit 63 bits",
                (long long)tokens, top_k);
  if (capacity_factor == 0) {
    *capacity = 0;
    return PMOE_OK;
  }
  /* The factor as a whole number of millionths: 1.1f means 11/10, not the nearest float. */
  uint64_t millionths = (uint64_t)llround((double)capacity_factor * 1e6);
  wide share = (wide)(uint64_t)num_experts * 1000000u;
  wide slots = ((wide)(uint64_t)tokens * (uint64_t)top_k * millionths + share - 1) / share;
  wide least = min_capacity > 0 ? (wide)(uint64_t)min_capacity : 1;
  if (slots < least) slots = least;
  PMOEI_REQUIRE(slots <= INT64_MAX, "capacity_factor is %g for %lld tokens; a capacity that fits 63 bits was expected",
                (double)capacity_factor, (long long)tokens);
  *capacity = (int64_t)slots;
  return PMOE_OK;
}

pmoe_status pmoei_gate_slots(const pmoe_gate_config *cfg, int64_t tokens, bool training, int64_t *capacity) {
  int32_t per_token = cfg->choice == PMOE_CHOICE_EXPERT_CHOICE ? 1 : cfg->top_k;
  float factor = training ? cfg->capacity_factor : cfg->eval_capacity_factor;
  return pmoe_gate_capacity(tokens, cfg->num_experts, per_token, factor, cfg->min_capacity, capacity);
}
