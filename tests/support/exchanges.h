/* Exchanges whose every byte is known: rows(from, to) rows of two arrays, blocks out of order and with gaps between
 * them. */
#ifndef TEST_EXCHANGES_H
#define TEST_EXCHANGES_H
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "a2a/transport.h"
#include "support/ranks.h"

enum { EXCHANGE_GAP = 2, EXCHANGE_POISON = 0xa5 };

typedef struct known_exchange {
  pmoei_exchange x;
  int32_t rank, nranks, seed;
  int64_t *lists, send_total, recv_total;
} known_exchange;

/* 0 to 5 rows; some pairs have none, and so has rank 1 as a sender when seed is odd. */
static inline int64_t known_rows(int32_t seed, int32_t from, int32_t to) {
  return seed % 2 && from == 1 ? 0 : (from * 7 + to * 3 + seed * 5) % 6;
}

static inline unsigned char known_byte(const known_exchange *k, int part, int32_t from, int32_t to, size_t i) {
  return (unsigned char)((size_t)(k->seed * 31 + part * 17 + from * 13 + to * 7) + i * 5 + i / 251);
}

static inline int64_t known_lay_out(int64_t *first, const int64_t *rows, int32_t n) {
  int64_t next = EXCHANGE_GAP;
  for (int32_t p = n - 1; p >= 0; p--) { /* last rank first */
    first[p] = next;
    next += rows[p] + EXCHANGE_GAP;
  }
  return next;
}

static inline void known_exchange_make(known_exchange *k, const pmoe_comm *comm, int32_t seed, const char *what) {
  int32_t n = comm->nranks;
  *k = (known_exchange){.rank = comm->rank, .nranks = n, .seed = seed, .lists = calloc(4 * (size_t)n, sizeof(int64_t))};
  int64_t *send_first = k->lists, *send_rows = send_first + n, *recv_first = send_rows + n, *recv_rows = recv_first + n;
  for (int32_t p = 0; p < n; p++) {
    send_rows[p] = known_rows(seed, comm->rank, p);
    recv_rows[p] = known_rows(seed, p, comm->rank);
  }
  k->send_total = known_lay_out(send_first, send_rows, n);
  k->recv_total = known_lay_out(recv_first, recv_rows, n);
  k->x = (pmoei_exchange){.what = what,
                          .num_parts = 2,
                          .send_first = send_first,
                          .send_rows = send_rows,
                          .recv_first = recv_first,
                          .recv_rows = recv_rows};
  for (int part = 0; part < 2; part++) {
    size_t row = part ? 4 : 40 + (size_t)(seed % 3) * 1000;
    char *send = malloc((size_t)k->send_total * row), *recv = malloc((size_t)k->recv_total * row);
    memset(send, EXCHANGE_POISON, (size_t)k->send_total * row);
    memset(recv, EXCHANGE_POISON, (size_t)k->recv_total * row);
    for (int32_t p = 0; p < n; p++)
      for (size_t i = 0; i < (size_t)send_rows[p] * row; i++)
        send[(size_t)send_first[p] * row + i] = (char)known_byte(k, part, comm->rank, p, i);
    k->x.part[part] = (pmoei_part){send, recv, row};
  }
}

/* Every received byte, and the gaps, which nobody may touch. */
static inline bool known_exchange_is_right(const known_exchange *k) {
  for (int part = 0; part < 2; part++) {
    size_t row = k->x.part[part].row_bytes, bytes = (size_t)k->recv_total * row;
    unsigned char *expected = malloc(bytes);
    memset(expected, EXCHANGE_POISON, bytes);
    for (int32_t p = 0; p < k->nranks; p++)
      for (size_t i = 0; i < (size_t)k->x.recv_rows[p] * row; i++)
        expected[(size_t)k->x.recv_first[p] * row + i] = known_byte(k, part, p, k->rank, i);
    bool same = memcmp(expected, k->x.part[part].recv, bytes) == 0;
    free(expected);
    if (!same) return false;
  }
  return true;
}

static inline void known_exchange_free(known_exchange *k) {
  for (int part = 0; part < 2; part++) {
    free((void *)(uintptr_t)k->x.part[part].send);
    free(k->x.part[part].recv);
  }
  free(k->lists);
}

#endif
