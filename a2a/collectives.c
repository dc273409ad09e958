/* Collectives made of a transport's exchange: one engine for each transport then has all the waiting, checking and
 * failing. Their messages grow with the number of ranks, which suits groups of experts. */
#include <string.h>

#include "a2a/transport.h"
#include "core/dtype.h"
#include "core/simd.h"

enum {
  SUM_CHUNK_BYTES = 4 << 20,  /* of temporaries, whatever n is */
  SUM_SMALL_BYTES = 64 << 10, /* below, one exchange in which all ranks sum everything beats two of slices */
  SUM_BLOCK = 1024            /* elements that stay in the nearest cache while the ranks' values are added */
};

void pmoei_exchange_copy(const pmoei_exchange *sender, int32_t from, const pmoei_exchange *receiver, int32_t to) {
  for (int32_t i = 0; i < receiver->num_parts; i++) {
    size_t row_bytes = receiver->part[i].row_bytes, bytes = (size_t)receiver->recv_rows[from] * row_bytes;
    if (bytes > 0)
      memcpy((char *)receiver->part[i].recv + (size_t)receiver->recv_first[from] * row_bytes,
             (const char *)sender->part[i].send + (size_t)sender->send_first[to] * row_bytes, bytes);
  }
}

pmoe_status pmoei_exchange_check(const pmoei_exchange *sender, int32_t from, const pmoei_exchange *receiver,
                                 int32_t to) {
  if (sender->num_parts != receiver->num_parts)
    return pmoei_error(PMOE_ERR_MISMATCH, "%s: rank %d sends %d arrays, but rank %d expects %d", receiver->what, from,
                       sender->num_parts, to, receiver->num_parts);
  for (int32_t i = 0; i < receiver->num_parts; i++)
    if (sender->part[i].row_bytes != receiver->part[i].row_bytes || sender->send_rows[to] != receiver->recv_rows[from])
      return pmoei_error(PMOE_ERR_MISMATCH,
                         "%s: rank %d sends %lld rows of %zu bytes to rank %d, which expects %lld of %zu",
                         receiver->what, from, (long long)sender->send_rows[to], sender->part[i].row_bytes, to,
                         (long long)receiver->recv_rows[from], receiver->part[i].row_bytes);
  return PMOE_OK;
}

/* The communicator's own lists, for an exchange of one part that is finished before the call returns. */
typedef struct row_lists {
  int64_t *send_first, *send_rows, *recv_first, *recv_rows;
} row_lists;

static row_lists lists_of(pmoe_comm *comm) {
  int64_t *rows = comm->rows, n = comm->nranks;
  return (row_lists){rows, rows + n, rows + 2 * n, rows + 3 * n};
}

static pmoe_status exchange(pmoe_comm *comm, const char *what, const void *send, void *recv, size_t row_bytes) {
  row_lists lists = lists_of(comm);
  pmoei_exchange request = {.what = what,
                            .num_parts = 1,
                            .part = {{send, recv, row_bytes}},
                            .send_first = lists.send_first,
                            .send_rows = lists.send_rows,
                            .recv_first = lists.recv_first,
                            .recv_rows = lists.recv_rows};
  PMOEI_TRY(comm->transport->exchange_start(comm, &request));
  return comm->transport->exchange_finish(comm, &request);
}

/* The same `rows` rows from this rank to every rank, and theirs in rank order. */
static pmoe_status exchange_all(pmoe_comm *comm, const char *what, const void *send, void *recv, int64_t rows,
                                size_t row_bytes) {
  row_lists lists = lists_of(comm);
  for (int32_t p = 0; p < comm->nranks; p++) {
    lists.send_first[p] = 0;
    lists.recv_first[p] = p * rows;
    lists.send_rows[p] = lists.recv_rows[p] = rows;
  }
  return exchange(comm, what, send, recv, row_bytes);
}

pmoe_status pmoei_allgather_by_exchange(pmoe_comm *comm, const char *what, const void *src, void *dst,
                                        size_t bytes_each) {
  return exchange_all(comm, what, src, dst, 1, bytes_each);
}

pmoe_status pmoei_barrier_by_exchange(pmoe_comm *comm, const char *what) {
  return exchange_all(comm, what, NULL, NULL, 0, 0);
}

static size_t sum_size(pmoei_sum type) {
  static const size_t sizes[] = {sizeof(float), sizeof(pmoei_bf16), sizeof(double), sizeof(int64_t)};
  return sizes[type];
}

/* out[i] = in[0][i] + in[1][i] + ... in that order, for nranks arrays of n elements back to back. */
PMOEI_VECTORISED
static void sum_ranks(void *out, const void *in, int32_t nranks, int64_t n, pmoei_sum type) {
  for (int64_t first = 0; first < n; first += SUM_BLOCK) {
    int64_t m = n - first < SUM_BLOCK ? n - first : SUM_BLOCK;
    float wide[SUM_BLOCK];
    if (type == PMOEI_SUM_BF16)
      for (int64_t i = 0; i < m; i++) wide[i] = pmoei_bf16_to_f32(((const pmoei_bf16 *)in)[first + i]);
    else
      memcpy((char *)out + (size_t)first * sum_size(type), (const char *)in + (size_t)first * sum_size(type),
             (size_t)m * sum_size(type));
    for (int32_t p = 1; p < nranks; p++) {
      int64_t from = p * n + first;
      if (type == PMOEI_SUM_F32)
        for (int64_t i = 0; i < m; i++) ((float *)out)[first + i] += ((const float *)in)[from + i];
      else if (type == PMOEI_SUM_BF16)
        for (int64_t i = 0; i < m; i++) wide[i] += pmoei_bf16_to_f32(((const pmoei_bf16 *)in)[from + i]);
      else if (type == PMOEI_SUM_F64)
        for (int64_t i = 0; i < m; i++) ((double *)out)[first + i] += ((const double *)in)[from + i];
      else /* unsigned: a sum that overflows wraps */
        for (int64_t i = 0; i < m; i++) ((uint64_t *)out)[first + i] += ((const uint64_t *)in)[from + i];
    }
    if (type == PMOEI_SUM_BF16)
      for (int64_t i = 0; i < m; i++) ((pmoei_bf16 *)out)[first + i] = pmoei_f32_to_bf16(wide[i]);
  }
}

static int64_t slice_first(int64_t n, int32_t nranks, int32_t rank) {
  return n / nranks * rank + n % nranks * rank / nranks;
}

/* Each rank sums one slice for all of them and hands it round. */
static pmoe_status sum_slices(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type, void *gathered,
                              void *slice) {
  row_lists lists = lists_of(comm);
  int32_t nranks = comm->nranks;
  int64_t mine = slice_first(n, nranks, comm->rank + 1) - slice_first(n, nranks, comm->rank);
  for (int32_t p = 0; p < nranks; p++) {
    lists.send_first[p] = slice_first(n, nranks, p);
    lists.send_rows[p] = slice_first(n, nranks, p + 1) - lists.send_first[p];
    lists.recv_first[p] = p * mine;
    lists.recv_rows[p] = mine;
  }
  PMOEI_TRY(exchange(comm, what, inout, gathered, sum_size(type)));
  sum_ranks(slice, gathered, nranks, mine, type);
  for (int32_t p = 0; p < nranks; p++) {
    lists.recv_first[p] = lists.send_first[p];
    lists.recv_rows[p] = lists.send_rows[p];
    lists.send_first[p] = 0;
  }
  for (int32_t p = 0; p < nranks; p++) lists.send_rows[p] = mine;
  return exchange(comm, what, slice, inout, sum_size(type));
}

static pmoe_status sum_chunk(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type, void *gathered,
                             void *slice) {
  if ((size_t)n * sum_size(type) * (size_t)comm->nranks > SUM_SMALL_BYTES)
    return sum_slices(comm, what, inout, n, type, gathered, slice);
  PMOEI_TRY(exchange_all(comm, what, inout, gathered, n, sum_size(type)));
  sum_ranks(inout, gathered, comm->nranks, n, type);
  return PMOE_OK;
}

/* Another n in the same chunk shows in the sizes of its exchange; another number of chunks would not. */
static pmoe_status compare_lengths(pmoe_comm *comm, const char *what, int64_t n, int64_t *room) {
  PMOEI_TRY(pmoei_allgather_by_exchange(comm, what, &n, room, sizeof n));
  for (int32_t p = 1; p < comm->nranks; p++)
    if (room[p] != room[0])
      return pmoei_error(PMOE_ERR_MISMATCH, "%s: rank 0 sums %lld values, but rank %d %lld", what, (long long)room[0],
                         p, (long long)room[p]);
  return PMOE_OK;
}

/* Room for the ranks' values of everything (small) or of one slice, and for the slice's sum. */
typedef struct sum_room {
  int64_t chunk, slice, gathered;
} sum_room;

static sum_room room_for(const pmoe_comm *comm, int64_t n, size_t size) {
  sum_room room = {.chunk = SUM_CHUNK_BYTES / (int64_t)size};
  int64_t small = SUM_SMALL_BYTES / (int64_t)size;
  if (n < room.chunk) room.chunk = n > 0 ? n : 1;
  room.slice = room.chunk / comm->nranks + 1;
  room.gathered = room.slice * comm->nranks;
  if (room.gathered < small) room.gathered = small;
  return room;
}

size_t pmoei_allreduce_scratch_bytes(const pmoe_comm *comm, int64_t n, pmoei_sum type) {
  size_t size = sum_size(type);
  sum_room room = room_for(comm, n, size);
  return (size_t)(room.gathered + room.slice) * size;
}

pmoe_status pmoei_allreduce_by_exchange(pmoe_comm *comm, const char *what, void *inout, int64_t n, pmoei_sum type) {
  size_t size = sum_size(type);
  sum_room room = room_for(comm, n, size);
  int64_t chunk = room.chunk, slice = room.slice, gathered = room.gathered;
  void *base = NULL;
  int32_t frame = 0;
  pmoe_status status = pmoei_scratch_open_host(comm->ctx, (size_t)(gathered + slice) * size, &base, &frame);
  if (status != PMOE_OK) return pmoei_comm_fail(comm, status, NULL);
  if (n > chunk) status = compare_lengths(comm, what, n, base);
  /* Once even if n is 0, so that this rank meets its peers and their other n shows. */
  for (int64_t first = 0; status == PMOE_OK && (first == 0 || first < n); first += chunk) {
    char *values = n > 0 ? (char *)inout + (size_t)first * size : NULL;
    int64_t m = n - first < chunk ? n - first : chunk;
    status = sum_chunk(comm, what, values, m, type, base, (char *)base + (size_t)gathered * size);
  }
  pmoei_scratch_close(comm->ctx, frame);
  return status;
}

/* The first error, or the first outcome of another call than rank 0's, as the sentence that every rank returns. A rank
 * whose checks failed may not have come far enough to name its call in full. */
static pmoe_status judge(const pmoe_comm *comm, const char *what) {
  const pmoei_outcome *all = comm->outcomes;
  for (int32_t p = 0; p < comm->nranks; p++)
    if (all[p].status != PMOE_OK)
      return pmoei_error(PMOE_ERR_COMM, "%s: rank %d failed: %s: %s", what, p,
                         pmoe_status_name((pmoe_status)all[p].status), all[p].why);
  for (int32_t p = 1; p < comm->nranks; p++)
    if (strcmp(all[p].what, all[0].what) != 0)
      return pmoei_error(PMOE_ERR_MISMATCH, "rank 0 is in %s, but rank %d is in %s", all[0].what, p, all[p].what);
  return PMOE_OK;
}

static void copy_text(char *out, size_t size, const char *text) {
  size_t length = strlen(text);
  if (length >= size) length = size - 1;
  memcpy(out, text, length);
  memset(out + length, 0, size - length); /* every byte travels */
}

pmoe_status pmoei_comm_agree(pmoe_comm *comm, const char *what, pmoe_status mine) {
  pmoei_outcome outcome = {.status = (int32_t)mine};
  copy_text(outcome.what, sizeof outcome.what, what);
  copy_text(outcome.why, sizeof outcome.why, mine == PMOE_OK ? "" : pmoe_last_error());
  pmoe_status status =
      pmoei_allgather(comm, "agreement before a collective call", &outcome, comm->outcomes, sizeof outcome);
  if (status == PMOE_OK && mine == PMOE_OK) return judge(comm, what);
  /* The exchange's own name is the same in every call; who came late is missed by this one. */
  if (status == PMOE_ERR_TIMEOUT) status = pmoei_error(status, "%s: %s", what, pmoe_last_error());
  return mine == PMOE_OK ? status : pmoei_error(mine, "%s", outcome.why);
}

pmoe_status pmoei_comm_agree_in_step(pmoe_comm *comm, const char *what, pmoe_status mine) {
  return comm->transport->on_device ? mine : pmoei_comm_agree(comm, what, mine);
}
