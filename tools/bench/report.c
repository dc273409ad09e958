#include "report.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "timing.h"

void bench_set_times(bench_result *result, const double *ms, int n) {
  result->median_ms = bench_median(ms, n);
  result->min_ms = bench_min(ms, n);
}

void bench_add_extra(bench_result *result, const char *name, double value) {
  if (result->num_extras < BENCH_MAX_EXTRAS) result->extra[result->num_extras++] = (bench_extra){name, value};
}

static const char *verdict(const bench_rank *rank, const bench_result *r) {
  if (!rank->options->check) return "off";
  return r->error <= r->tolerance ? "ok" : "failed";
}

/* NULL where it was not measured: null in JSON. */
static void add_number(cJSON *object, const char *name, double value, bool known) {
  if (known && isfinite(value)) cJSON_AddNumberToObject(object, name, value);
  else cJSON_AddNullToObject(object, name);
}

static void add_string(cJSON *object, const char *name, const char *text) {
  if (text) cJSON_AddStringToObject(object, name, text);
  else cJSON_AddNullToObject(object, name);
}

static void add_shape(cJSON *o, const bench_rank *rank, const bench_result *r) {
  const bench_options *opt = rank->options;
  add_string(o, "name", r->name);
  add_string(o, "dtype", bench_dtype_name(opt->dtype));
  cJSON_AddNumberToObject(o, "T", (double)opt->tokens);
  cJSON_AddNumberToObject(o, "H", opt->hidden);
  add_number(o, "F", opt->inner, r->has_inner);
  cJSON_AddNumberToObject(o, "E", opt->experts);
  cJSON_AddNumberToObject(o, "K", opt->top_k);
  cJSON_AddNumberToObject(o, "threads", rank->threads);
  cJSON_AddNumberToObject(o, "ranks", rank->nranks);
  add_string(o, "transport", pmoe_comm_transport(rank->comm));
  add_string(o, "routing", bench_pattern_name(opt->pattern));
  add_string(o, "act", r->has_inner ? bench_act_name(opt->act) : NULL);
  cJSON_AddBoolToObject(o, "bias", opt->bias);
  cJSON_AddNumberToObject(o, "iters", opt->iters);
}

static void add_device(cJSON *o, const bench_rank *rank) {
  const bench_options *opt = rank->options;
  if (!rank->device) return;
  add_string(o, "backend", "cuda");
  add_string(o, "device", rank->device->name);
  add_string(o, "sizing", opt->sizing == PMOE_SIZING_FIXED ? "fixed" : "eager");
  add_number(o, "capacity_factor", (double)opt->capacity_factor, opt->capacity_factor > 0);
  cJSON_AddBoolToObject(o, "graph", opt->graph);
  cJSON_AddBoolToObject(o, "residual", opt->residual);
  cJSON_AddNumberToObject(o, "cache_bytes", (double)rank->device->cache_bytes);
  cJSON_AddBoolToObject(o, "cache_emptied", rank->device->flush);
}

static void add_times(cJSON *o, const bench_result *r) {
  cJSON_AddNumberToObject(o, "median_ms", r->median_ms);
  cJSON_AddNumberToObject(o, "min_ms", r->min_ms);
  add_number(o, "floor_ms", r->floor_ms, r->floor_ms > 0);
  add_number(o, "twin_ms", r->twin_ms, r->twin_ms > 0);
  add_number(o, "copy_ms", r->copy_ms, r->copy_ms > 0);
  add_number(o, "share_floor", r->floor_ms / r->median_ms, r->floor_ms > 0);
  add_number(o, "share_twin", r->twin_ms / r->median_ms, r->twin_ms > 0);
  add_number(o, "share_copy", r->copy_ms / r->median_ms, r->copy_ms > 0);
  add_number(o, "gflop_per_s", r->flops / r->median_ms * 1e-6, r->flops > 0);
  add_number(o, "gb_per_s", r->bytes / r->median_ms * 1e-6, r->bytes > 0);
  add_number(o, "copy_gb_per_s", r->bytes / r->copy_ms * 1e-6, r->copy_ms > 0);
  add_number(o, "peak_bytes", (double)r->peak_bytes, r->peak_bytes >= 0);
  add_number(o, "saved_bytes", (double)r->saved_bytes, r->saved_bytes >= 0);
}

static pmoe_status print_json(const bench_rank *rank, const bench_result *r, const pmoe_gemm_info *info) {
  cJSON *o = cJSON_CreateObject();
  add_shape(o, rank, r);
  add_device(o, rank);
  add_times(o, r);
  for (int i = 0; i < r->num_extras; i++) add_number(o, r->extra[i].name, r->extra[i].value, true);
  add_number(o, "error", r->error, rank->options->check);
  add_string(o, "check", verdict(rank, r));
  add_string(o, "gemm", info->provider);
  add_string(o, "gemm_library", info->library);
  add_string(o, "gemm_isa", info->isa);
  add_string(o, "gemm_bf16", info->bf16);
  add_string(o, "gemm_warning", info->warning);
  char *text = cJSON_PrintUnformatted(o);
  if (text) puts(text);
  cJSON_free(text);
  cJSON_Delete(o);
  fflush(stdout);
  return text ? PMOE_OK : PMOE_ERR_NOMEM;
}

static void print_head(const bench_rank *rank, const pmoe_gemm_info *info) {
  const bench_options *o = rank->options;
  printf("# gemm %s (%s, %s; bf16 %s), %d thread(s), %d rank(s) over %s\n", info->provider, info->library, info->isa,
         info->bf16, rank->threads, rank->nranks, pmoe_comm_transport(rank->comm));
  if (info->warning) printf("# warning: %s\n", info->warning);
  printf("# %s T %lld H %d F %d E %d K %d, %s routing, medians of %d after %d\n", bench_dtype_name(o->dtype),
         (long long)o->tokens, o->hidden, o->inner, o->experts, o->top_k, bench_pattern_name(o->pattern), o->iters,
         o->warmup);
  if (rank->device)
    printf("# %s; %s sizing%s, %s; L2 %.0f MB, %s\n", rank->device->name,
           o->sizing == PMOE_SIZING_FIXED ? "fixed" : "eager", o->graph ? " in graphs" : "", "times of CUDA events",
           (double)rank->device->cache_bytes * 1e-6,
           rank->device->flush ? "emptied before each call" : "smaller than what a call works on");
  printf("%-18s %10s %9s %8s %7s %7s %7s %9s %9s %9s %s\n", "name", "ms", "GFLOP/s", "GB/s", "floor", "twin", "copy",
         "peak MB", "saved MB", "error", "check");
}

static void print_cell(int width, const char *format, double value, bool known) {
  char text[32] = "-";
  if (known) snprintf(text, sizeof text, format, value);
  printf(" %*s", width, text);
}

static void print_row(const bench_rank *rank, const bench_result *r) {
  printf("%-18s %10.3f", r->name, r->median_ms);
  print_cell(9, "%.1f", r->flops / r->median_ms * 1e-6, r->flops > 0);
  print_cell(8, "%.2f", r->bytes / r->median_ms * 1e-6, r->bytes > 0);
  print_cell(7, "%.3f", r->floor_ms / r->median_ms, r->floor_ms > 0);
  print_cell(7, "%.3f", r->twin_ms / r->median_ms, r->twin_ms > 0);
  print_cell(7, "%.3f", r->copy_ms / r->median_ms, r->copy_ms > 0);
  print_cell(9, "%.1f", (double)r->peak_bytes * 1e-6, r->peak_bytes >= 0);
  print_cell(9, "%.1f", (double)r->saved_bytes * 1e-6, r->saved_bytes >= 0);
  print_cell(9, "%.1e", r->error, rank->options->check != 0);
  printf(" %s\n", verdict(rank, r));
  for (int i = 0; i < r->num_extras; i++) printf("    %-24s %.6g\n", r->extra[i].name, r->extra[i].value);
  fflush(stdout);
}

static pmoe_status print_result(bench_rank *rank, const bench_result *r) {
  pmoe_gemm_info info = PMOE_CONFIG_INIT(pmoe_gemm_info);
  BENCH_TRY(pmoe_ctx_gemm_info(rank->ctx, &info));
  if (rank->options->json) return print_json(rank, r, &info);
  if (rank->lines++ == 0) print_head(rank, &info);
  print_row(rank, r);
  return PMOE_OK;
}

/* The largest error; NaN counts as larger than any. */
static pmoe_status worst(bench_rank *rank, double *error) {
  if (rank->nranks == 1) return PMOE_OK;
  double *all;
  BENCH_TRY(bench_alloc((size_t)rank->nranks * sizeof *all, &all));
  pmoe_status status = pmoe_comm_allgather(rank->comm, error, all, sizeof *error);
  for (int32_t i = 0; i < rank->nranks && status == PMOE_OK; i++)
    if (!(all[i] <= *error)) *error = all[i];
  free(all);
  return status;
}

pmoe_status bench_report(bench_rank *rank, const bench_result *result) {
  bench_result r = *result;
  BENCH_TRY(worst(rank, &r.error));
  if (rank->options->check && !(r.error <= r.tolerance)) rank->wrong++;
  return rank->rank == 0 ? print_result(rank, &r) : PMOE_OK;
}
