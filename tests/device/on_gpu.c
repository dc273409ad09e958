/* Linked into the device's tests where they run on the machine's own GPUs: what this machine cannot run is skipped,
 * with the reason. */
#include <cuda_runtime_api.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/ranks.h"

enum { SKIPPED = 77 };
static int devices, groups_run, groups_skipped;

static void skip_all(const char *why) {
  printf("skipped: %s\n", why);
  fflush(stdout);
  _exit(SKIPPED);
}

/* A program all of whose groups were too large is skipped as a whole. */
static void at_exit(int status, void *unused) {
  (void)unused;
  if (status == 0 && groups_skipped > 0 && groups_run == 0) skip_all("every group has more ranks than there are GPUs");
}

__attribute__((constructor)) static void look_at_the_machine(void) {
  int pageable = 0;
  cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) skip_all(cudaGetErrorString(error));
  if (devices == 0) skip_all("no GPU");
  if (cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0) != cudaSuccess || !pageable)
    skip_all("these tests' arrays are the host's, which kernels cannot reach on this machine "
             "(cudaDevAttrPageableMemoryAccess is 0)");
  if (on_exit(at_exit, NULL) != 0) abort();
}

void __real_ranks_launch(ranks_job *job, char failure[RANKS_TEXT]);
void __wrap_ranks_launch(ranks_job *job, char failure[RANKS_TEXT]);

/* NCCL refuses two ranks on one GPU. */
void __wrap_ranks_launch(ranks_job *job, char failure[RANKS_TEXT]) {
  if (job->config->nranks <= devices) {
    groups_run++;
    __real_ranks_launch(job, failure);
    return;
  }
  groups_skipped++;
  print_message("skipped: %d ranks on %d GPUs\n", job->config->nranks, devices);
  skip();
}
