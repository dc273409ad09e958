/* Numbers that look random, from numbers that do not. */
#ifndef LM_MIX_H
#define LM_MIX_H
#include <stdint.h>

/* SplitMix64's last step. */
static inline uint64_t lm_mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

#endif
