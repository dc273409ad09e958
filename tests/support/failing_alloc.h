/* An allocator that fails at the n-th request and knows what is still held. */
#ifndef TEST_FAILING_ALLOC_H
#define TEST_FAILING_ALLOC_H
#include <pmoe/ctx.h>
#include <stdlib.h>

typedef struct failing_alloc {
  int64_t calls, fail_at; /* fail_at 0: never */
  int64_t held_bytes, held_blocks;
} failing_alloc;

static inline void *failing_alloc_take(void *user, size_t bytes, size_t align, pmoe_mem kind, pmoe_stream stream) {
  (void)kind, (void)stream;
  failing_alloc *f = user;
  void *p = NULL;
  if (++f->calls == f->fail_at || posix_memalign(&p, align, bytes) != 0) return NULL;
  f->held_bytes += (int64_t)bytes;
  f->held_blocks++;
  return p;
}

static inline void failing_alloc_release(void *user, void *p, size_t bytes, pmoe_mem kind, pmoe_stream stream) {
  (void)kind, (void)stream;
  failing_alloc *f = user;
  f->held_bytes -= (int64_t)bytes;
  f->held_blocks--;
  free(p);
}

static inline pmoe_allocator failing_alloc_table(failing_alloc *f) {
  return (pmoe_allocator){sizeof(pmoe_allocator), f, failing_alloc_take, failing_alloc_release};
}

#endif
