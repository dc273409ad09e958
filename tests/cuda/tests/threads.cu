// Four ranks in four host threads, each with its device, a stream for kernels and one for messages: kernels, matrix
// products, ragged exchanges, all-to-all, captured steps, allocation and host functions, all at once.
#include "check.h"
#include <atomic>
#include <cublas_v2.h>
#include <nccl.h>
#include <string>
#include <thread>

#define NCCL(call)                                                                                                     \
  do {                                                                                                                 \
    ncclResult_t result_ = (call);                                                                                     \
    if (result_ != ncclSuccess) {                                                                                      \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, ncclGetErrorString(result_));                               \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

static const int kRanks = 4, kRows = 5, kColumns = 32;
static std::atomic<int> wrong, meeting;

__global__ void produce(float *rows, int rank, int round) {
  int k = blockIdx.x * blockDim.x + threadIdx.x;
  rows[k] = rank * 1000 + round * 10 + k % 7;
}
__global__ void consume(const float *rows, float *sum) { // one block
  __shared__ float s[kColumns];
  float v = 0;
  for (int k = threadIdx.x; k < kRanks * kRows * kColumns; k += blockDim.x) v += rows[k];
  s[threadIdx.x] = v;
  __syncthreads();
  for (int d = kColumns / 2; d > 0; d /= 2) {
    if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];
    __syncthreads();
  }
  if (threadIdx.x == 0) *sum += s[0];
}

struct Rank {
  int rank;
  ncclComm_t comm;
  cudaStream_t compute, messages;
  cudaEvent_t produced, arrived;
  float *rows, *received, *sum;

  static size_t rows_between(int from, int to, int round) { return (from + to + round) % kRows; }

  // Events order the two streams. `early` leaves one out: the sends may begin before the rows are there.
  void step(int round, bool early) {
    produce<<<kRanks * kRows, kColumns, 0, compute>>>(rows, rank, round);
    CUDA(cudaMemsetAsync(received, 0, kRanks * kRows * kColumns * sizeof(float), compute));
    CUDA(cudaEventRecord(produced, compute));
    if (!early) CUDA(cudaStreamWaitEvent(messages, produced, 0));
    NCCL(ncclGroupStart());
    for (int peer = 0; peer < kRanks; peer++) {
      size_t at = peer * kRows * kColumns;
      NCCL(ncclSend(rows + at, rows_between(rank, peer, round) * kColumns, ncclFloat, peer, comm, messages));
      NCCL(ncclRecv(received + at, rows_between(peer, rank, round) * kColumns, ncclFloat, peer, comm, messages));
    }
    NCCL(ncclGroupEnd());
    CUDA(cudaEventRecord(arrived, messages));
    CUDA(cudaStreamWaitEvent(compute, arrived, 0));
    consume<<<1, kColumns, 0, compute>>>(received, sum);
  }

  double expected(int round) const {
    double total = 0;
    for (int from = 0; from < kRanks; from++)
      for (size_t k = 0; k < rows_between(from, rank, round) * kColumns; k++)
        total += from * 1000 + round * 10 + (rank * kRows * kColumns + k) % 7;
    return total;
  }
};

static void multiply(Rank &r) { // on the device's own handle, while other ranks communicate
  cublasHandle_t handle;
  if (cublasCreate(&handle) || cublasSetStream(handle, r.compute)) exit(1);
  const int n = 16;
  std::vector<float> host(n * n);
  for (int k = 0; k < n * n; k++) host[k] = (float)(k % 5 + r.rank);
  Device<float> a(host), c(n * n);
  float one = 1, zero = 0;
  if (cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, a, CUDA_R_32F, n, a, CUDA_R_32F, n, &zero, c,
                   CUDA_R_32F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT))
    exit(1);
  CUDA(cudaStreamSynchronize(r.compute));
  auto got = c.host();
  for (int i = 0; i < n; i++)
    for (int j = 0; j < n; j++) {
      float want = 0;
      for (int k = 0; k < n; k++) want += host[k * n + i] * host[j * n + k];
      wrong += got[j * n + i] != want;
    }
  cublasDestroy(handle);
}

static void everything(Rank &r) {
  double want = 0;
  float *scratch;
  for (int round = 0; round < 20; round++) {
    r.step(round, false);
    want += r.expected(round);
    if (round % 5 == r.rank) { // allocations of one rank do not disturb the others
      CUDA(cudaMallocAsync(&scratch, 1000, r.compute));
      CUDA(cudaMemsetAsync(scratch, 0, 1000, r.compute));
      CUDA(cudaFreeAsync(scratch, r.compute));
    }
    if (round % 7 == r.rank) multiply(r);
  }
  // A host function of each rank waits for those of all others.
  CUDA(cudaLaunchHostFunc(
      r.compute,
      [](void *) {
        meeting++;
        while (meeting < kRanks) std::this_thread::yield();
      },
      nullptr));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamSynchronize(r.compute));
  CUDA(cudaStreamSynchronize(r.messages));
  CUDA(cudaStreamBeginCapture(r.compute, cudaStreamCaptureModeThreadLocal));
  r.step(3, false);
  CUDA(cudaStreamEndCapture(r.compute, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int k = 0; k < 3; k++, want += r.expected(3)) CUDA(cudaGraphLaunch(exec, r.compute));
  CUDA(cudaStreamSynchronize(r.compute));
  float sum;
  CUDA(cudaMemcpy(&sum, r.sum, sizeof sum, cudaMemcpyDeviceToHost));
  wrong += sum != (float)want;
  NCCL(ncclAlltoAll(r.rows, r.received, kRows * kColumns, ncclFloat, r.comm, r.messages));
  std::vector<float> got(kRanks * kRows * kColumns);
  CUDA(cudaMemcpyAsync(got.data(), r.received, got.size() * sizeof(float), cudaMemcpyDeviceToHost, r.messages));
  for (int from = 0; from < kRanks; from++)
    for (int k = 0; k < kRows * kColumns; k++)
      wrong += got[from * kRows * kColumns + k] != from * 1000 + 30 + (r.rank * kRows * kColumns + k) % 7;
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
}

static void run(int rank, ncclUniqueId id, const std::string &fault) {
  Rank r;
  r.rank = rank;
  CUDA(cudaSetDevice(rank));
  NCCL(ncclCommInitRank(&r.comm, kRanks, id, rank));
  CUDA(cudaStreamCreateWithFlags(&r.compute, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&r.messages, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&r.produced, cudaEventDisableTiming));
  CUDA(cudaEventCreateWithFlags(&r.arrived, cudaEventDisableTiming));
  const size_t bytes = kRanks * kRows * kColumns * sizeof(float);
  CUDA(cudaMalloc(&r.rows, bytes));
  CUDA(cudaMalloc(&r.received, bytes));
  CUDA(cudaMalloc(&r.sum, sizeof(float)));
  CUDA(cudaMemset(r.sum, 0, sizeof(float)));
  CUDA(cudaDeviceSynchronize());
  if (fault == "early") r.step(0, true);
  else if (fault == "lost" && rank == 1) NCCL(ncclRecv(r.rows, 8, ncclFloat, 0, r.comm, r.messages)); // nobody sends
  else if (fault.empty()) everything(r);
  CUDA(cudaStreamSynchronize(r.messages));
  CUDA(cudaStreamSynchronize(r.compute));
  CUDA(cudaStreamDestroy(r.messages));
  CUDA(cudaStreamDestroy(r.compute));
  NCCL(ncclCommDestroy(r.comm));
  CUDA(cudaFree(r.rows));
}

int main(int argc, char **argv) {
  ncclUniqueId id;
  NCCL(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; r++) threads.emplace_back(run, r, id, argc > 1 ? argv[1] : "");
  for (auto &t : threads) t.join();
  failures += wrong;
  return finish("threads");
}
