/* Everything that needs no vendor header. See also pmoe/mpi.h. */
#ifndef PMOE_PMOE_H
#define PMOE_PMOE_H
#include <pmoe/a2a.h>
#include <pmoe/comm.h>
#include <pmoe/ctx.h>
#include <pmoe/experts.h>
#include <pmoe/gate.h>
#include <pmoe/layer.h>
#include <pmoe/metrics.h>
#include <pmoe/params.h>
#include <pmoe/pipeline.h>
#include <pmoe/residual.h>
#include <pmoe/topology.h>
#include <pmoe/types.h>
#include <pmoe/upcycle.h>
#endif
