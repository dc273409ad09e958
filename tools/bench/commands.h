/* One function per command: measures, checks, and reports from rank 0. */
#ifndef BENCH_COMMANDS_H
#define BENCH_COMMANDS_H
#include "ranks.h"

pmoe_status bench_layer(bench_rank *rank);
pmoe_status bench_gate(bench_rank *rank);
pmoe_status bench_rows(bench_rank *rank);
pmoe_status bench_experts(bench_rank *rank);
pmoe_status bench_exchange(bench_rank *rank);

#endif
