#include "error.h"

#include <pmoe/pmoe.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ranks.h"

int lm_error_set(struct lm_error *err, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(err->text, sizeof err->text, format, args);
  va_end(args);
  return -1;
}

/* What fails on one rank mostly fails on all: one thread speaks, and the first process before the others. */
static void wait_for_turn(void) {
  static atomic_flag taken = ATOMIC_FLAG_INIT;
  if (atomic_flag_test_and_set(&taken))
    for (;;) pause();
  if (ranks_is_first_process()) return;
  signal(SIGTERM, SIG_DFL); /* with it mpirun ends the others when the first has spoken */
  for (unsigned seconds = 2; seconds > 0;) seconds = sleep(seconds);
}

_Noreturn static void end(int status, const char *format, va_list args) {
  char text[2048];
  vsnprintf(text, sizeof text, format, args);
  wait_for_turn();
  fflush(stdout);
  fprintf(stderr, "train_lm: %s\n", text);
  ranks_abort(status);
}

void lm_fatal(const char *format, ...) {
  va_list args;
  va_start(args, format);
  end(LM_EXIT_FAILED, format, args);
}

void lm_fatal_usage(const char *format, ...) {
  va_list args;
  va_start(args, format);
  end(LM_EXIT_USAGE, format, args);
}

void lm_try(pmoe_status status, const char *call) {
  if (status != PMOE_OK) lm_fatal("%s (%.*s)", pmoe_last_error(), (int)strcspn(call, "("), call);
}

void *lm_alloc(size_t count, size_t bytes) {
  size_t most = (size_t)-1 - 64;
  size_t size = bytes > 0 && count <= most / bytes ? (count * bytes + 63) / 64 * 64 : 0;
  if (size == 0) size = 64;
  void *p = bytes > 0 && count > most / bytes ? NULL : aligned_alloc(64, size);
  if (!p) lm_fatal("out of memory: %zu times %zu bytes", count, bytes);
  return memset(p, 0, size);
}
