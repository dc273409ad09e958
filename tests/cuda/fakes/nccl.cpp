// The part of NCCL that distributed training calls, against the real header. Operations take their place in streams; a
// collective happens when every rank's stream has come to it. Ranks that call different things are reported, where the
// library would hang or mix up data.
#include "../ptxvm/device_memory.h"
#include "../ptxvm/report.h"
#include "nccl_operation.h"
#include <cstring>
#include <map>

using namespace ptxvm;

struct ncclComm {
  int rank = 0, size = 0, device = 0;
  std::unique_ptr<Transport> transport;
  ncclResult_t async = ncclSuccess;
  bool aborted = false;
};

namespace {

struct Pending { // a communicator whose creation waits for the end of a group
  ncclComm_t *out;
  std::unique_ptr<Connector> connector; // for a new one
  ncclComm_t parent = nullptr;          // for a split one
  int rank, size, device;
};

struct Queued {
  ncclComm_t comm;
  OperationPtr operation;
  cudaStream_t stream;
};

thread_local int group_depth = 0;
thread_local std::vector<Queued> queued;
thread_local std::vector<Pending> pending;
thread_local std::string last_message;

ncclResult_t refuse(ncclResult_t result, const std::string &why) {
  last_message = why;
  return result;
}

ncclResult_t finish_pending(Pending &p) {
  ncclResult_t result = ncclSuccess;
  auto comm = std::make_unique<ncclComm>();
  comm->rank = p.rank, comm->size = p.size, comm->device = p.device;
  if (p.parent) {
    run_until([&] { return p.parent->transport->split_ready(); }, "ncclCommSplit");
    comm->transport = p.parent->transport->take_split(&comm->rank, &comm->size);
    *p.out = comm->transport ? comm.release() : nullptr; // a rank without colour gets none
    return ncclSuccess;
  }
  run_until([&] { return p.connector->complete(); }, "ncclCommInitRank");
  comm->transport = p.connector->take(&result);
  *p.out = result == ncclSuccess ? comm.release() : nullptr;
  return result == ncclSuccess ? result : refuse(result, "two ranks of a communicator use the same GPU");
}

ncclResult_t begin_or_finish(Pending p) {
  if (!group_depth) return finish_pending(p);
  pending.push_back(std::move(p));
  return ncclSuccess;
}

// The same operation once more: a captured one is posted anew at every launch of its graph.
void post_again(Queued &q) {
  auto fresh = std::make_shared<Operation>();
  fresh->call = q.operation->call, fresh->send = q.operation->send, fresh->recv = q.operation->recv;
  q.operation = fresh;
  q.comm->transport->post(fresh);
}

bool moves_nothing(const Operation &o) { return o.call.kind >= Kind::Send && !o.call.count; }

// The operations of one group in one stream start together, and end when all have ended.
ncclResult_t submit_together(cudaStream_t stream, const std::vector<Queued> &list) {
  bool captured = is_capturing(stream);
  if (!captured)
    for (const Queued &q : list) q.comm->transport->post(q.operation);
  auto current = std::make_shared<std::vector<Queued>>(list);
  auto posted = std::make_shared<bool>(!captured);
  Ready ready = [current, posted] {
    if (!*posted)
      for (Queued &q : *current) post_again(q);
    *posted = true;
    bool all = true;
    for (Queued &q : *current)
      if (!moves_nothing(*q.operation)) all &= q.comm->transport->progress(q.operation);
    return all;
  };
  std::string name = describe(list[0].operation->call);
  if (enqueue(
          stream, name.c_str(), [posted] { *posted = false; }, ready) == cudaSuccess)
    return ncclSuccess;
  return refuse(ncclUnhandledCudaError, "the stream refused " + name);
}

ncclResult_t submit(const std::vector<Queued> &list) {
  std::vector<std::pair<std::pair<cudaStream_t, int>, std::vector<Queued>>> by_stream;
  for (const Queued &q : list) {
    std::pair<cudaStream_t, int> place(q.stream, q.stream ? 0 : q.comm->device);
    auto it = by_stream.begin();
    while (it != by_stream.end() && it->first != place) ++it;
    if (it == by_stream.end()) it = by_stream.insert(it, {place, {}});
    it->second.push_back(q);
  }
  ncclResult_t result = ncclSuccess;
  int device = current_device();
  for (auto &entry : by_stream) {
    if (!entry.first.first) cudaSetDevice(entry.first.second); // the default stream of the communicator's device
    ncclResult_t one = submit_together(entry.first.first, entry.second);
    if (one != ncclSuccess) result = one;
  }
  cudaSetDevice(device);
  return result;
}

bool is_reduction(Kind kind) { return kind == Kind::AllReduce || kind == Kind::Reduce || kind == Kind::ReduceScatter; }

ncclResult_t call(ncclComm_t comm, Call c, const void *send, void *recv, cudaStream_t stream) {
  if (!comm) return refuse(ncclInvalidArgument, "the communicator is NULL");
  if (comm->aborted) return refuse(ncclInvalidUsage, "the communicator was aborted");
  if (comm->async != ncclSuccess) return refuse(comm->async, "the communicator has failed");
  if (c.root < 0 || c.root >= comm->size) return refuse(ncclInvalidArgument, "no rank " + std::to_string(c.root));
  if (c.type < 0 || c.type >= ncclNumTypes) return refuse(ncclInvalidArgument, "unknown data type");
  if (is_reduction(c.kind) && (c.op < 0 || c.op >= ncclNumOps)) return refuse(ncclInvalidArgument, "unknown reduction");
  if (c.kind == Kind::AlltoAll && send == recv && c.count)
    return refuse(ncclInvalidArgument, "ncclAlltoAll does not work in place");
  if (!is_known_stream(stream)) return refuse(ncclInvalidArgument, "unknown stream");
  auto operation = std::make_shared<Operation>();
  operation->call = c, operation->send = send, operation->recv = recv;
  if (group_depth) {
    queued.push_back({comm, operation, stream});
    return ncclSuccess;
  }
  return submit({{comm, operation, stream}});
}

bool refuses_blocking(const char *name) { return refuse_under_capture(name) != cudaSuccess; }

} // namespace

extern "C" {

// For tests of error handling: what ncclCommGetAsyncError will say.
void ptxvm_nccl_set_async_error(ncclComm_t comm, ncclResult_t error) {
  std::lock_guard<RuntimeLock> lock(runtime_lock());
  comm->async = error;
}

ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  PTXVM_ENTER(ncclGetUniqueId, ncclSystemError);
  make_unique_id(id);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *) {
  PTXVM_ENTER(ncclCommInitRank, ncclSystemError);
  if (refuses_blocking("ncclCommInitRank")) return ncclInvalidUsage;
  if (!comm || size < 1 || rank < 0 || rank >= size)
    return refuse(ncclInvalidArgument, "rank or number of ranks out of range");
  Pending p{comm, connect(id, size, rank, current_device()), nullptr, rank, size, current_device()};
  return begin_or_finish(std::move(p));
}
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
  ncclUniqueId id;
  int before = current_device();
  if (ncclResult_t result = ncclGetUniqueId(&id)) return result;
  ncclGroupStart();
  for (int k = 0; k < count; k++) {
    cudaSetDevice(devices ? devices[k] : k);
    ncclCommInitRank(comms + k, count, id, k);
  }
  cudaSetDevice(before);
  return ncclGroupEnd();
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *) {
  PTXVM_ENTER(ncclCommSplit, ncclSystemError);
  if (refuses_blocking("ncclCommSplit")) return ncclInvalidUsage;
  if (!comm || !out || (color < 0 && color != NCCL_SPLIT_NOCOLOR))
    return refuse(ncclInvalidArgument, "a NULL communicator, or a negative colour");
  if (comm->aborted) return refuse(ncclInvalidUsage, "the communicator was aborted");
  comm->transport->offer_split(color, key);
  return begin_or_finish({out, nullptr, comm, 0, 0, comm->device});
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) { return comm ? ncclSuccess : ncclInvalidArgument; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  PTXVM_ENTER(ncclCommDestroy, ncclSystemError);
  if (!comm) return ncclSuccess;
  int device = current_device();
  cudaSetDevice(comm->device); // what is queued still needs the communicator
  cudaError_t error = cudaDeviceSynchronize();
  cudaSetDevice(device);
  if (error) return refuse(ncclUnhandledCudaError, "a stream could not be waited for");
  delete comm;
  return ncclSuccess;
}
// Operations under way end without a result. The object stays: queued work refers to it.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  PTXVM_ENTER(ncclCommAbort, ncclSystemError);
  if (!comm) return ncclSuccess;
  comm->aborted = true;
  comm->transport->abort();
  return ncclSuccess;
}
ncclResult_t ncclCommRevoke(ncclComm_t comm, int) { return ncclCommAbort(comm); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  PTXVM_ENTER(ncclCommGetAsyncError, ncclSystemError);
  if (!comm || !error) return refuse(ncclInvalidArgument, "a NULL argument");
  if (comm->async == ncclSuccess && comm->transport->peer_aborted()) comm->async = ncclRemoteError;
  *error = comm->async;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  return comm ? (*count = comm->size, ncclSuccess) : ncclInvalidArgument;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  return comm ? (*rank = comm->rank, ncclSuccess) : ncclInvalidArgument;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
  return comm ? (*device = comm->device, ncclSuccess) : ncclInvalidArgument;
}

ncclResult_t ncclMemAlloc(void **pointer, size_t size) {
  return cudaMalloc(pointer, size) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void *pointer) { return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t, void *buffer, size_t, void **handle) {
  return *handle = buffer, ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void *) { return ncclSuccess; }

ncclResult_t ncclGroupStart(void) { return group_depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd(void) {
  PTXVM_ENTER(ncclGroupEnd, ncclSystemError);
  if (!group_depth) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group_depth) return ncclSuccess;
  std::vector<Pending> creations = std::move(pending);
  std::vector<Queued> operations = std::move(queued);
  pending.clear(), queued.clear();
  ncclResult_t result = ncclSuccess;
  for (Pending &p : creations) {
    ncclResult_t one = finish_pending(p);
    if (one != ncclSuccess) result = one;
  }
  return result == ncclSuccess && !operations.empty() ? submit(operations) : result;
}

ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  PTXVM_ENTER(ncclSend, ncclSystemError);
  return call(comm, {Kind::Send, count, type, ncclSum, peer}, buffer, nullptr, stream);
}
ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  PTXVM_ENTER(ncclRecv, ncclSystemError);
  return call(comm, {Kind::Recv, count, type, ncclSum, peer}, nullptr, buffer, stream);
}
ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  PTXVM_ENTER(ncclAllReduce, ncclSystemError);
  return call(comm, {Kind::AllReduce, count, type, op, 0}, send, recv, stream);
}
ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  PTXVM_ENTER(ncclReduce, ncclSystemError);
  return call(comm, {Kind::Reduce, count, type, op, root}, send, recv, stream);
}
ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  PTXVM_ENTER(ncclReduceScatter, ncclSystemError);
  return call(comm, {Kind::ReduceScatter, count, type, op, 0}, send, recv, stream);
}
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  PTXVM_ENTER(ncclBroadcast, ncclSystemError);
  return call(comm, {Kind::Broadcast, count, type, ncclSum, root}, send, recv, stream);
}
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  PTXVM_ENTER(ncclAllGather, ncclSystemError);
  return call(comm, {Kind::AllGather, count, type, ncclSum, 0}, send, recv, stream);
}
ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  PTXVM_ENTER(ncclAlltoAll, ncclSystemError);
  return call(comm, {Kind::AlltoAll, count, type, ncclSum, 0}, send, recv, stream);
}
ncclResult_t ncclGather(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  PTXVM_ENTER(ncclGather, ncclSystemError);
  return call(comm, {Kind::Gather, count, type, ncclSum, root}, send, recv, stream);
}
ncclResult_t ncclScatter(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) {
  PTXVM_ENTER(ncclScatter, ncclSystemError);
  return call(comm, {Kind::Scatter, count, type, ncclSum, root}, send, recv, stream);
}

const char *ncclGetErrorString(ncclResult_t result) {
  static const char *names[] = {"no error",
                                "unhandled cuda error",
                                "unhandled system error",
                                "internal error",
                                "invalid argument",
                                "invalid usage",
                                "remote process exited or there was a network error",
                                "NCCL operation in progress"};
  return result >= 0 && result < ncclNumResults ? names[result] : "unknown result code";
}
const char *ncclGetLastError(ncclComm_t) { return last_message.c_str(); }

} // extern "C"
