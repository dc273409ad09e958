#include "layout.h"

struct lm_layout layout_of(const struct lm_config *cfg, int nranks, int rank) {
  struct lm_layout at = {.tp = cfg->tp, .cp = cfg->cp, .pp = cfg->pp, .sp = cfg->sp};
  at.dp = nranks / (at.tp * at.cp * at.pp);
  at.tp_rank = rank % at.tp, rank /= at.tp;
  at.cp_rank = rank % at.cp, rank /= at.cp;
  at.dp_rank = rank % at.dp, rank /= at.dp;
  at.pp_rank = rank;
  return at;
}

int layout_rank_in_stage(const struct lm_layout *at, int stage) {
  return at->tp_rank + at->tp * (at->cp_rank + at->cp * (at->dp_rank + at->dp * stage));
}

struct lm_rows layout_rows(const struct lm_layout *at, int sequences, int length) {
  struct lm_rows rows = {.sequences = sequences, .length = length / at->cp};
  rows.first_position = at->cp_rank * rows.length;
  rows.all = (int64_t)sequences * rows.length;
  rows.own = rows.all / at->tp;
  rows.held = at->sp ? rows.own : rows.all;
  *(at->sp ? &rows.first : &rows.own_first) = rows.own * at->tp_rank;
  return rows;
}
