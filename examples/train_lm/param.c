#include "param.h"

#include <math.h>

#include "mix.h"

int64_t param_units(const struct lm_param *p) { return p->num_global_experts > 0 ? p->shape[0] : p->numel > 0; }

void param_whole_shape(const struct lm_param *p, int64_t shape[3]) {
  for (int d = 0; d < p->ndim; d++) shape[d] = p->shape[d];
  if (p->num_global_experts > 0) shape[0] = p->num_global_experts;
  if (p->shard_dim >= 0 && p->shard_count > 0)
    shape[p->shard_dim] = shape[p->shard_dim] / p->shard_count * p->shard_total;
}

struct lm_runs param_runs(const struct lm_param *p) {
  int first_dim = p->num_global_experts > 0 ? 1 : 0;
  int64_t numel = 1, inside = 1;
  for (int d = first_dim; d < p->ndim; d++) numel *= p->shape[d];
  if (p->shard_dim < 0 || p->shard_count == 0) return (struct lm_runs){1, numel, 0, numel};
  for (int d = p->shard_dim + 1; d < p->ndim; d++) inside *= p->shape[d];
  int64_t length = p->shard_count * inside;
  return (struct lm_runs){numel / length, length, p->shard_first * inside, p->shard_total * inside};
}

void param_shard(struct lm_param *p, int dim, int blocks, int parts, int part) {
  p->shard_dim = dim;
  p->shard_total = p->shape[dim] / blocks;
  p->shard_count = p->shard_total / parts;
  p->shard_first = p->shard_count * part;
  p->shape[dim] = p->shard_count * blocks;
  p->numel /= parts;
}

/* By Box and Muller. */
static float normal(uint64_t word) {
  double radius = sqrt(-2.0 * log(((double)(word >> 32) + 0.5) / 4294967296.0));
  return (float)(radius * cos(6.283185307179586 * (double)(word & 0xffffffff) / 4294967296.0));
}

void param_fill_normal(struct lm_param *p, uint64_t seed, float std) {
  uint64_t key = lm_mix(seed + 1);
  for (const char *c = p->name; *c; c++) key = lm_mix(key + (unsigned char)*c);
  struct lm_runs runs = param_runs(p);
  for (int64_t i = 0; i < p->numel; i++)
    p->master[i] = std * normal(lm_mix(key + 0x9e3779b97f4a7c15u * (uint64_t)(runs_place(&runs, i) + 1)));
}
