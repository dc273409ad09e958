#include "device/on_device.h"

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pmoe/nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void expect(int good, const char *what) {
  if (good) return;
  fprintf(stderr, "on_device: %s failed\n", what);
  abort();
}

/* What the library keeps on the device can be looked at too. */
static void *take(void *user, size_t bytes, size_t align, pmoe_mem kind, pmoe_stream stream) {
  (void)user, (void)stream;
  void *p = NULL;
  if (kind == PMOE_MEM_HOST) return posix_memalign(&p, align, bytes) == 0 ? p : NULL;
  cudaError_t error =
      kind == PMOE_MEM_PINNED ? cudaMallocHost(&p, bytes) : cudaMallocManaged(&p, bytes, cudaMemAttachGlobal);
  return error == cudaSuccess ? p : NULL;
}

static void give_back(void *user, void *p, size_t bytes, pmoe_mem kind, pmoe_stream stream) {
  (void)user, (void)bytes, (void)stream;
  if (kind == PMOE_MEM_HOST) free(p);
  else if (kind == PMOE_MEM_PINNED) (void)cudaFreeHost(p);
  else (void)cudaFree(p);
}

/* A test's own allocator counts, and fails when it likes; what the device uses comes from the device all the same,
 * where accesses are checked. */
typedef struct pair {
  void *used, *counted;
} pair;
static pair pairs[1 << 14];
static pthread_mutex_t pairs_mutex = PTHREAD_MUTEX_INITIALIZER;

/* The place of a pointer, or with NULL a free one. */
static pair *find_pair(const void *used) {
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
    if (pairs[i].used == used) return &pairs[i];
  expect(0, "a pair of pointers");
  return NULL;
}

static void *take_from_test(void *user, size_t bytes, size_t align, pmoe_mem kind, pmoe_stream stream) {
  const pmoe_allocator *own = user;
  void *counted = own->alloc(own->user, bytes, align, kind, stream);
  if (!counted || kind == PMOE_MEM_HOST) return counted;
  void *used = take(NULL, bytes, align, kind, stream);
  expect(used != NULL, "cudaMallocManaged");
  pthread_mutex_lock(&pairs_mutex);
  *find_pair(NULL) = (pair){used, counted};
  pthread_mutex_unlock(&pairs_mutex);
  return used;
}

static void give_back_to_test(void *user, void *p, size_t bytes, pmoe_mem kind, pmoe_stream stream) {
  const pmoe_allocator *own = user;
  void *counted = p;
  if (kind != PMOE_MEM_HOST) {
    pthread_mutex_lock(&pairs_mutex);
    pair *place = find_pair(p);
    counted = place->counted;
    *place = (pair){NULL, NULL};
    pthread_mutex_unlock(&pairs_mutex);
    give_back(NULL, p, bytes, kind, stream); /* waits for the device */
  }
  own->release(own->user, counted, bytes, kind, stream);
}

static pmoe_allocator allocator_for(const pmoe_allocator *own) {
  pmoe_allocator allocator = {sizeof allocator, NULL, take, give_back};
  if (!own) return allocator;
  pmoe_allocator *copy = malloc(sizeof *copy); /* as long as the program, for contexts outlive the call */
  expect(copy != NULL, "malloc");
  *copy = *own;
  return (pmoe_allocator){sizeof allocator, copy, take_from_test, give_back_to_test};
}

/* The ranks of a group make their contexts one after the other, so neighbouring numbers keep them apart. */
pmoe_status on_device_ctx_create(const pmoe_ctx_config *cfg, pmoe_ctx **out) {
  static atomic_int contexts;
  pmoe_ctx_config on_device = PMOE_CONFIG_INIT(pmoe_ctx_config);
  if (cfg && cfg->size != sizeof on_device) return pmoe_ctx_create(cfg, out); /* a test of sizes */
  if (cfg) on_device = *cfg;
  int devices = 0;
  expect(cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0, "cudaGetDeviceCount");
  on_device.backend = PMOE_BACKEND_CUDA;
  on_device.device = atomic_fetch_add(&contexts, 1) % devices;
  const pmoe_allocator allocator = allocator_for(on_device.allocator);
  on_device.allocator = &allocator;
  /* A test's providers are the CPU's, unless it knows better. */
  if (on_device.gemm && strncmp(on_device.gemm, "cublas", 6) != 0) on_device.gemm = NULL;
  return pmoe_ctx_create(&on_device, out);
}

/* A communicator of host threads carries NCCL's identifier round. */
pmoe_status on_device_comm_from_hub(pmoe_ctx *ctx, pmoe_hub *hub, int32_t rank, pmoe_comm **out) {
  pmoe_ctx *host_ctx;
  pmoe_comm *host;
  pmoe_status status = pmoe_ctx_create(NULL, &host_ctx);
  if (status != PMOE_OK) return status;
  status = pmoe_comm_from_hub(host_ctx, hub, rank, &host);
  pmoe_ctx_destroy(host_ctx);
  if (status != PMOE_OK) return status;
  int32_t ranks = pmoe_comm_size(host);
  ncclUniqueId mine, *all = malloc((size_t)ranks * sizeof *all);
  expect(all && ncclGetUniqueId(&mine) == ncclSuccess, "ncclGetUniqueId");
  status = pmoe_comm_allgather(host, &mine, all, sizeof mine);
  expect(status == PMOE_OK, pmoe_last_error());
  ncclComm_t comm;
  expect(ncclCommInitRank(&comm, ranks, all[0], rank) == ncclSuccess, "ncclCommInitRank");
  free(all);
  pmoe_comm_destroy(host);
  return pmoe_comm_from_nccl(ctx, comm, out);
}

pmoe_status on_device_wait(pmoe_status status) {
  expect(cudaDeviceSynchronize() == cudaSuccess, "cudaDeviceSynchronize");
  return status;
}

static pmoe_status sum_at_rest(void *user, int64_t *inout, int64_t n, pmoe_stream stream) {
  const pmoe_loss_sum *own = user;
  expect(cudaDeviceSynchronize() == cudaSuccess, "cudaDeviceSynchronize");
  return own->sum(own->user, inout, n, stream);
}

/* What a gate keeps lives as long as the program. */
static pmoe_loss_sum waiting(pmoe_loss_sum own) {
  static pmoe_loss_sum kept[1024];
  static atomic_int number;
  if (!own.sum) return own;
  int i = atomic_fetch_add(&number, 1);
  expect(i < (int)(sizeof kept / sizeof *kept), "on_device_gate_set_loss_sums");
  kept[i] = own;
  return (pmoe_loss_sum){&kept[i], sum_at_rest};
}

pmoe_status on_device_gate_set_loss_sums(pmoe_gate *gate, pmoe_loss_sum micro_batch, pmoe_loss_sum global) {
  return pmoe_gate_set_loss_sums(gate, waiting(micro_batch), waiting(global));
}
