/* Ranks as coordinates: two mixed-radix grids over the same world, one for the dense and one for the expert layers. */
#ifndef PMOEI_RANK_GRID_H
#define PMOEI_RANK_GRID_H
#include <pmoe/topology.h>
#include <stdbool.h>

#include "core/status.h"

typedef enum pmoei_axis {
  PMOEI_AXIS_TP,
  PMOEI_AXIS_CP,
  PMOEI_AXIS_EP,
  PMOEI_AXIS_DP,
  PMOEI_AXIS_PP,
  PMOEI_AXES
} pmoei_axis;

typedef struct pmoei_rank_grid {
  int32_t world;
  pmoei_axis order[PMOEI_AXES]; /* fastest first */
  /* By axis. In the expert grid TP is the expert tensor parallel and DP the expert data parallel axis. */
  int32_t dense[PMOEI_AXES], expert[PMOEI_AXES];
  int32_t sp;
} pmoei_rank_grid;

/* cfg may be NULL. ERR_ARG for sizes or orders that form no grid, and for grids that disagree about the pipeline
 * stages. */
pmoe_status pmoei_rank_grid_make(int32_t world, const pmoe_topology_config *cfg, pmoei_rank_grid *out);

/* The coordinate of `rank` on one axis of a grid with these sizes. */
int32_t pmoei_rank_grid_coordinate(const pmoei_rank_grid *grid, const int32_t *sizes, pmoei_axis axis, int32_t rank);

/* Whether axis `a` comes before axis `b` in the order. */
bool pmoei_rank_grid_faster(const pmoei_rank_grid *grid, pmoei_axis a, pmoei_axis b);

#endif
