/* When the parts of a step began and ended: by the host's clock, or on a device by events in its stream. */
#ifndef PMOEI_CLOCK_H
#define PMOEI_CLOCK_H
#include "core/ctx.h"

typedef enum pmoei_mark {
  PMOEI_MARK_FORWARD, /* begins */
  PMOEI_MARK_ROUTED,
  PMOEI_MARK_PLANNED,
  PMOEI_MARK_DISPATCHING, /* rows are on their way */
  PMOEI_MARK_BRANCH,      /* the dense branch is done, where it runs under them */
  PMOEI_MARK_DISPATCHED,
  PMOEI_MARK_EXPERTS,
  PMOEI_MARK_COMBINED,
  PMOEI_MARK_BACKWARD, /* begins: ALL or INPUT */
  PMOEI_MARK_BACKWARD_DONE,
  PMOEI_MARK_WEIGHT, /* begins */
  PMOEI_MARK_WEIGHT_DONE,
  PMOEI_NUM_MARKS
} pmoei_mark;

typedef struct pmoei_clock {
  uint64_t ns[PMOEI_NUM_MARKS];
  void *event[PMOEI_NUM_MARKS]; /* a device's */
  bool set[PMOEI_NUM_MARKS];
  bool captured; /* into a graph, whose events tell no time */
} pmoei_clock;

pmoe_status pmoei_clock_create(pmoe_ctx *ctx, pmoei_clock *clock);
void pmoei_clock_destroy(pmoe_ctx *ctx, pmoei_clock *clock);
/* Forgets all marks: a step begins. */
pmoe_status pmoei_clock_start(pmoe_ctx *ctx, pmoei_clock *clock);
pmoe_status pmoei_clock_mark(pmoe_ctx *ctx, pmoei_clock *clock, pmoei_mark mark);
/* PMOE_PENDING while the device has not come to every mark that was set. */
pmoe_status pmoei_clock_reached(const pmoe_ctx *ctx, const pmoei_clock *clock);
/* Whether the mark was set and has been come to. */
bool pmoei_clock_passed(const pmoe_ctx *ctx, const pmoei_clock *clock, pmoei_mark mark);
/* Milliseconds; 0 if one of the two was not set. */
float pmoei_clock_between(const pmoe_ctx *ctx, const pmoei_clock *clock, pmoei_mark from, pmoei_mark to);

#endif
