/* Arenas: one function lays memory out, both to measure (base NULL) and to carve (base set). */
#ifndef PMOEI_ARENA_H
#define PMOEI_ARENA_H
#include <stddef.h>
#include <stdint.h>

#define PMOEI_ALIGN 64         /* of every block: a cache line, and the widest vector */
#define PMOEI_DEVICE_ALIGN 256 /* of what an allocator is asked for on a device */

typedef struct pmoei_arena {
  char *base; /* NULL while measuring */
  size_t used;
} pmoei_arena;

/* The next `count` elements of `element` bytes: their address, or NULL while measuring. A size that does not fit
 * saturates `used`, so that the allocation that follows fails cleanly. */
static inline void *pmoei_take(pmoei_arena *arena, int64_t count, size_t element) {
  char *p = arena->base ? arena->base + arena->used : NULL;
  size_t limit = SIZE_MAX / 2;
  if (count < 0 || (count > 0 && (size_t)count > (limit - arena->used) / element)) {
    arena->used = limit;
    return p;
  }
  size_t bytes = ((size_t)count * element + PMOEI_ALIGN - 1) / PMOEI_ALIGN * PMOEI_ALIGN;
  arena->used += bytes;
  return p;
}

#endif
