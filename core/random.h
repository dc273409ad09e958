/* Counter-based random numbers: the value depends on the key and the counter alone, so results do not depend on
 * threads, ranks or call order. Generator: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy
 * as 1, 2, 3; SC'11). */
#ifndef PMOEI_RANDOM_H
#define PMOEI_RANDOM_H
#include <math.h>
#include <stdint.h>

#include "core/device.h"

/* What the numbers are for; keeps the streams apart. */
typedef enum pmoei_random_use {
  PMOEI_RANDOM_JITTER = 1,
  PMOEI_RANDOM_GUMBEL,
  PMOEI_RANDOM_DROP,
  PMOEI_RANDOM_INIT,
  PMOEI_RANDOM_HASH
} pmoei_random_use;

PMOEI_SHARED uint64_t pmoei_mix64(uint64_t x) { /* finaliser of splitmix64 */
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* A key from the seed, the use, and two more coordinates (say, layer and step). */
PMOEI_SHARED uint64_t pmoei_random_key(uint64_t seed, pmoei_random_use use, uint64_t a, uint64_t b) {
  return pmoei_mix64(pmoei_mix64(pmoei_mix64(seed + (uint64_t)use) + a) + b);
}

/* Four random words for a 128-bit counter (high, low). */
PMOEI_SHARED void pmoei_random4(uint64_t key, uint64_t high, uint64_t low, uint32_t out[4]) {
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  uint32_t c0 = (uint32_t)low, c1 = (uint32_t)(low >> 32), c2 = (uint32_t)high, c3 = (uint32_t)(high >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)0xd2511f53u * c0, p1 = (uint64_t)0xcd9e8d57u * c2;
    uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    c0 = n0;
    c2 = n2;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

/* Uniform in (0, 1), never 0 or 1: the middle of one of 2^24 cells would round to 1 at the top, so 23 bits. */
PMOEI_SHARED float pmoei_uniform(uint32_t word) { return ((float)(word >> 9) + 0.5f) * 0x1p-23f; }

/* Standard normal pair (Box-Muller) from two words. */
PMOEI_SHARED void pmoei_normal2(uint32_t u, uint32_t v, float out[2]) {
  double radius = sqrt(-2.0 * log((double)pmoei_uniform(u)));
  double angle = 6.283185307179586 * (double)pmoei_uniform(v);
  out[0] = (float)(radius * cos(angle));
  out[1] = (float)(radius * sin(angle));
}

#endif
