// The fake NCCL: every collective against sums computed here, ragged exchanges, splits, capture, errors and abort.
// Ranks are threads with a device each; with -DUSE_MPI they are processes.
#include "check.h"
#include <algorithm>
#include <atomic>
#include <cuda_bf16.h>
#include <nccl.h>
#include <string>
#include <thread>
#ifdef USE_MPI
#include <mpi.h>
#endif

extern "C" void ptxvm_nccl_set_async_error(ncclComm_t comm, ncclResult_t error);

#define NCCL(call)                                                                                                     \
  do {                                                                                                                 \
    ncclResult_t result_ = (call);                                                                                     \
    if (result_ != ncclSuccess) {                                                                                      \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, ncclGetErrorString(result_));                               \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

static int value(int rank, int k) { return (rank + 1) * 100 + k; }

__global__ void produce(float *p, int rank, int n) {
  if (threadIdx.x < n) p[threadIdx.x] = (rank + 1) * 100 + threadIdx.x;
}

static void test_collectives(ncclComm_t comm, int rank, int size, cudaStream_t s) {
  const int n = 6;
  std::vector<int> mine(n * size);
  for (int k = 0; k < n * size; k++) mine[k] = value(rank, k);
  Device<int> in(mine), out(n * size);
  auto result = [&] {
    CUDA(cudaStreamSynchronize(s));
    return out.host();
  };
  int ranks = size * (size + 1) / 2;
  NCCL(ncclAllReduce(in, out, n, ncclInt32, ncclSum, comm, s));
  auto r = result();
  for (int k = 0; k < n; k++) CHECK(r[k] == ranks * 100 + size * k);
  NCCL(ncclAllReduce(in, out, n, ncclInt32, ncclMax, comm, s));
  CHECK(result()[2] == value(size - 1, 2));
  NCCL(ncclAllReduce(in, out, n, ncclInt32, ncclMin, comm, s));
  CHECK(result()[2] == value(0, 2));
  NCCL(ncclReduceScatter(in, out, n, ncclInt32, ncclSum, comm, s));
  r = result();
  for (int k = 0; k < n; k++) CHECK(r[k] == ranks * 100 + size * (rank * n + k));
  NCCL(ncclAllGather(in, out, n, ncclInt32, comm, s));
  r = result();
  for (int k = 0; k < n * size; k++) CHECK(r[k] == value(k / n, k % n));
  NCCL(ncclAlltoAll(in, out, n, ncclInt32, comm, s));
  r = result();
  for (int k = 0; k < n * size; k++) CHECK(r[k] == value(k / n, rank * n + k % n));
  NCCL(ncclBroadcast(in, out, n, ncclInt32, size - 1, comm, s));
  CHECK(result()[3] == value(size - 1, 3));
  NCCL(ncclReduce(in, out, n, ncclInt32, ncclSum, 1, comm, s));
  if (rank == 1) CHECK(result()[3] == ranks * 100 + size * 3);
  NCCL(ncclGather(in, out, n, ncclInt32, 0, comm, s));
  r = result();
  for (int k = 0; rank == 0 && k < n * size; k++) CHECK(r[k] == value(k / n, k % n));
  NCCL(ncclScatter(in, out, n, ncclInt32, 0, comm, s));
  CHECK(result()[4] == value(0, rank * n + 4));
  NCCL(ncclAllReduce(in, in, n, ncclInt32, ncclSum, comm, s)); // in place
  CUDA(cudaStreamSynchronize(s));
  CHECK(in.host()[5] == ranks * 100 + size * 5);
  CHECK(ncclAlltoAll(in, in, n, ncclInt32, comm, s) == ncclInvalidArgument);
  CHECK(ncclBroadcast(in, in, n, ncclInt32, size, comm, s) == ncclInvalidArgument);
  std::vector<__nv_bfloat16> halves(n, __nv_bfloat16(0.5f + rank));
  Device<__nv_bfloat16> h(halves);
  NCCL(ncclAllReduce(h, h, n, ncclBfloat16, ncclAvg, comm, s));
  CUDA(cudaStreamSynchronize(s));
  CHECK((float)h.host()[0] == 0.5f + (size - 1) / 2.0f);
}

// Counts differ by pair and some are zero: rank a sends (a + 2 b) % 4 rows to rank b.
static void test_ragged(ncclComm_t comm, int rank, int size, cudaStream_t s) {
  auto rows = [](int from, int to) { return (from + 2 * to) % 4; };
  std::vector<int> mine;
  int total = 0;
  for (int to = 0; to < size; to++) {
    for (int k = 0; k < rows(rank, to); k++) mine.push_back(1000 * rank + 10 * to + k);
    total += rows(to, rank);
  }
  mine.push_back(-1);
  Device<int> in(mine), out(total + 1);
  NCCL(ncclGroupStart());
  for (int peer = 0, at_in = 0, at_out = 0; peer < size; peer++) {
    NCCL(ncclSend(in + at_in, rows(rank, peer), ncclInt32, peer, comm, s));
    NCCL(ncclRecv(out + at_out, rows(peer, rank), ncclInt32, peer, comm, s));
    at_in += rows(rank, peer), at_out += rows(peer, rank);
  }
  NCCL(ncclGroupEnd());
  CUDA(cudaStreamSynchronize(s));
  auto r = out.host();
  for (int from = 0, at = 0; from < size; from++)
    for (int k = 0; k < rows(from, rank); k++, at++) CHECK_AT(r[at] == 1000 * from + 10 * rank + k, at);
}

static void test_split(ncclComm_t comm, int rank, int size, cudaStream_t s) {
  ncclComm_t part;
  NCCL(ncclCommSplit(comm, rank % 2, -rank, &part, nullptr)); // reversed order within
  int part_rank, part_size;
  NCCL(ncclCommUserRank(part, &part_rank));
  NCCL(ncclCommCount(part, &part_size));
  CHECK(part_size == (size + 1 - rank % 2) / 2 && part_rank == part_size - 1 - rank / 2);
  Device<int> x(std::vector<int>{rank});
  NCCL(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, part, s));
  CUDA(cudaStreamSynchronize(s));
  int want = 0;
  for (int r = rank % 2; r < size; r += 2) want += r;
  CHECK(x.host()[0] == want);
  NCCL(ncclCommDestroy(part));
  NCCL(ncclCommSplit(comm, rank == 0 ? NCCL_SPLIT_NOCOLOR : 0, 0, &part, nullptr));
  CHECK((part == nullptr) == (rank == 0));
  NCCL(ncclCommDestroy(part));
}

// A kernel before and a second stream after the collective, ordered by the stream and by an event.
static void test_order(ncclComm_t comm, int rank, int size, cudaStream_t s) {
  cudaStream_t after;
  cudaEvent_t e;
  CUDA(cudaStreamCreateWithFlags(&after, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  Device<float> x(8), y(8);
  produce<<<1, 32, 0, s>>>(x, rank, 8);
  NCCL(ncclAllReduce(x, x, 8, ncclFloat32, ncclSum, comm, s));
  CUDA(cudaEventRecord(e, s));
  CUDA(cudaStreamWaitEvent(after, e, 0));
  CUDA(cudaMemcpyAsync(y, x, 32, cudaMemcpyDeviceToDevice, after));
  CUDA(cudaStreamSynchronize(after));
  CHECK(y.host()[7] == size * (size + 1) / 2 * 100.0f + 7 * size);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
  produce<<<1, 32, 0, s>>>(x, rank, 8);
  NCCL(ncclAllReduce(x, x, 8, ncclFloat32, ncclSum, comm, s));
  CUDA(cudaStreamEndCapture(s, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int k = 0; k < 3; k++) CUDA(cudaGraphLaunch(exec, s));
  CUDA(cudaStreamSynchronize(s));
  CHECK(x.host()[1] == size * (size + 1) / 2 * 100.0f + size);
}

static void host_barrier(int size) { // of the ranks, without CUDA or NCCL
#ifdef USE_MPI
  MPI_Barrier(MPI_COMM_WORLD);
  (void)size;
#else
  static std::atomic<int> arrived{0};
  int round = arrived++ / size;
  while (arrived < (round + 1) * size) std::this_thread::yield();
#endif
}

static void test_abort(ncclComm_t comm, int rank, int size, cudaStream_t s) { // rank 0 never joins in
  ncclResult_t error = ncclInternalError;
  NCCL(ncclCommGetAsyncError(comm, &error));
  CHECK(error == ncclSuccess);
  Device<int> x(1);
  host_barrier(size);
  if (rank == 0) {
    ptxvm_nccl_set_async_error(comm, ncclSystemError);
    NCCL(ncclCommGetAsyncError(comm, &error));
    CHECK(error == ncclSystemError);
    CHECK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, s) == ncclSystemError);
  } else {
    NCCL(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, s));
    CHECK(cudaStreamQuery(s) == cudaErrorNotReady);
    cudaGetLastError();
  }
  host_barrier(size);
  if (rank == 0) NCCL(ncclCommAbort(comm));
  host_barrier(size);
#ifndef USE_MPI
  NCCL(ncclCommGetAsyncError(comm, &error));
  CHECK(error == (rank == 0 ? ncclSystemError : ncclRemoteError));
#endif
  host_barrier(size);
  if (rank != 0) NCCL(ncclCommAbort(comm));
  CUDA(cudaStreamSynchronize(s)); // what was under way ends
  CHECK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, s) == ncclInvalidUsage);
}

static void run_rank(int rank, int size, int device, ncclUniqueId id, const std::string &fault) {
  CUDA(cudaSetDevice(device));
  ncclComm_t comm;
  NCCL(ncclCommInitRank(&comm, size, id, rank));
  cudaStream_t s;
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  if (!fault.empty()) {
    Device<int> x(8);
    CUDA(cudaMemset(x, 0, 32));
    CUDA(cudaDeviceSynchronize());
    if (fault == "counts") NCCL(ncclAllReduce(x, x, rank == 2 ? 7 : 8, ncclInt32, ncclSum, comm, s));
    if (fault == "kinds" && rank == 1) NCCL(ncclBroadcast(x, x, 8, ncclInt32, 0, comm, s));
    if (fault == "kinds" && rank != 1) NCCL(ncclAllReduce(x, x, 8, ncclInt32, ncclSum, comm, s));
    if (fault == "peers" && rank == 0) NCCL(ncclSend(x, 5, ncclInt32, 1, comm, s));
    if (fault == "peers" && rank == 1) NCCL(ncclRecv(x, 6, ncclInt32, 0, comm, s));
    CUDA(cudaStreamSynchronize(s));
    return;
  }
  test_collectives(comm, rank, size, s), test_ragged(comm, rank, size, s), test_split(comm, rank, size, s),
      test_order(comm, rank, size, s);
  test_abort(comm, rank, size, s);
  CUDA(cudaDeviceSynchronize());
}

#ifdef USE_MPI
int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  ncclUniqueId id;
  if (rank == 0) NCCL(ncclGetUniqueId(&id));
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  run_rank(rank, size, 0, id, argc > 1 ? argv[1] : "");
  int status = rank == 0 ? finish("nccl over MPI") : failures != 0;
  MPI_Finalize();
  return status;
}
#else
static void test_one_thread(int size) { // one thread with all devices, as a group
  std::vector<ncclComm_t> comms(size);
  NCCL(ncclCommInitAll(comms.data(), size, nullptr));
  std::vector<Device<int> *> x;
  for (int r = 0; r < size; r++) {
    CUDA(cudaSetDevice(r));
    x.push_back(new Device<int>(std::vector<int>{r + 1}));
  }
  NCCL(ncclGroupStart());
  for (int r = 0; r < size; r++) NCCL(ncclAllReduce(*x[r], *x[r], 1, ncclInt32, ncclSum, comms[r], 0));
  NCCL(ncclGroupEnd());
  for (int r = 0; r < size; r++) {
    CUDA(cudaSetDevice(r));
    CHECK(x[r]->host()[0] == size * (size + 1) / 2);
  }
  for (ncclComm_t c : comms) NCCL(ncclCommDestroy(c));
  const int same[2] = {0, 0};
  CHECK(ncclCommInitAll(comms.data(), 2, same) == ncclInvalidUsage); // two ranks on one GPU
}

int main(int argc, char **argv) {
  std::string fault = argc > 1 ? argv[1] : "";
  const int size = fault == "peers" ? 2 : 4;
  ncclUniqueId id;
  NCCL(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; r++) threads.emplace_back(run_rank, r, size, r, id, fault);
  for (auto &t : threads) t.join();
  if (fault.empty()) test_one_thread(size);
  return finish("nccl");
}
#endif
