#include "support/ranks.h"
#include "core/ctx.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

typedef struct running {
  jmp_buf out;
  char *failure;
  int32_t rank;
} running;

static _Thread_local running *current;

static void give_up(const char *file, int line, const char *text, const char *why) {
  snprintf(current->failure, RANKS_TEXT, "%s:%d: rank %d: %s%s%s", file, line, current->rank, text, why[0] ? ": " : "",
           why);
  longjmp(current->out, 1);
}

void rank_check(bool condition, const char *text, const char *file, int line) {
  if (!condition) give_up(file, line, text, "");
}

void rank_check_status(pmoe_status got, pmoe_status expected, const char *word, const char *call, const char *file,
                       int line) {
  char why[RANKS_TEXT / 2];
  const char *sentence = got < 0 ? pmoe_last_error() : "";
  if (got != expected) {
    snprintf(why, sizeof why, "%s (%.300s), expected %s", pmoe_status_name(got), sentence, pmoe_status_name(expected));
    give_up(file, line, call, why);
  }
  if (word && !strstr(sentence, word)) {
    snprintf(why, sizeof why, "\"%.300s\" does not name \"%s\"", sentence, word);
    give_up(file, line, call, why);
  }
}

static void run_body(const ranks_job *job, rank_env *env, running *self) {
  if (setjmp(self->out) == 0) job->body(env, job->arg);
  else pmoe_comm_abort(env->world, "a check failed");
}

void ranks_run_one(const ranks_job *job, int32_t rank, char failure[RANKS_TEXT]) {
  failing_alloc memory = {0};
  pmoe_allocator allocator = failing_alloc_table(&memory);
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.allocator = &allocator;
  cfg.cpu_threads = job->config->cpu_threads > 0 ? job->config->cpu_threads : 1;
  cfg.timeout_ns = UINT64_C(60000000000);
  rank_env env = {.rank = rank, .nranks = job->config->nranks, .memory = &memory};
  running self = {.failure = failure, .rank = rank}, *before = current;
  failure[0] = 0;
  pmoe_status status = pmoe_ctx_create(&cfg, &env.ctx);
  if (status == PMOE_OK) status = job->connect(env.ctx, rank, job->launcher, &env.world);
  current = &self;
  /* A short time-out is for the body: meeting at the beginning may take long on a busy machine. */
  if (status == PMOE_OK && job->config->timeout_ns > 0) env.ctx->timeout_ns = job->config->timeout_ns;
  if (status == PMOE_OK) run_body(job, &env, &self);
  else snprintf(failure, RANKS_TEXT, "rank %d cannot begin: %.500s", rank, pmoe_last_error());
  current = before;
  pmoe_comm_destroy(env.world);
  pmoe_ctx_destroy(env.ctx);
  if (failure[0] == 0 && (memory.held_blocks != 0 || memory.held_bytes != 0))
    snprintf(failure, RANKS_TEXT, "rank %d leaks %lld blocks, %lld bytes", rank, (long long)memory.held_blocks,
             (long long)memory.held_bytes);
}

void run_ranks_with(const ranks_config *config, rank_body body, void *arg) {
  ranks_job job = {.config = config, .body = body, .arg = arg};
  char failure[RANKS_TEXT] = "";
  ranks_launch(&job, failure);
  if (failure[0])
    fail_msg("on %d ranks%s: %s", config->nranks, config->transport == RANKS_CALLBACKS ? " by callbacks" : "", failure);
}

void run_ranks(int32_t nranks, rank_body body, void *arg) {
  run_ranks_with(&(ranks_config){.nranks = nranks}, body, arg);
}

void run_ranks_all(rank_body body, void *arg) {
  static const int32_t counts[] = {1, 2, 3, 4, 8};
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
    run_ranks(counts[i], body, arg);
    run_ranks_with(&(ranks_config){.nranks = counts[i], .transport = RANKS_CALLBACKS}, body, arg);
  }
}
