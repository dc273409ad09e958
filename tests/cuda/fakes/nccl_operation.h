// Inside of the fake NCCL: what one rank asks for, and how the bytes of a collective go round, whatever carries them.
#pragma once
#include "../ptxvm/races.h"
#include "../ptxvm/runtime.h"
#include <functional>
#include <memory>
#include <nccl.h>
#include <string>
#include <vector>

namespace ptxvm {

enum class Kind : int { AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, AlltoAll, Gather, Scatter, Send, Recv };

struct Call {
  Kind kind;
  size_t count; // as the caller gave it
  ncclDataType_t type;
  ncclRedOp_t op;
  int root; // or the peer
};

struct Operation {
  Call call;
  const void *send;
  void *recv;
  uint64_t sequence = 0; // among the collectives of the communicator, or among the sends or receives with this peer
  bool arrived = false, done = false;
  uint32_t race_task = 0;
  std::shared_ptr<void> state; // of the transport
};
using OperationPtr = std::shared_ptr<Operation>;

// A communicator as one rank sees it.
class Transport {
public:
  virtual ~Transport() = default;
  virtual void post(const OperationPtr &operation) = 0; // when it is called
  virtual bool
  progress(const OperationPtr &operation) = 0; // when it heads its stream, again and again; true at the end
  virtual void offer_split(int color, int key) = 0;
  virtual bool split_ready() = 0;
  virtual std::unique_ptr<Transport> take_split(int *rank, int *size) = 0; // nullptr for a rank without colour
  virtual void abort() = 0;
  virtual bool peer_aborted() const = 0;
};

// Connects the ranks that hold the same id: begins, is asked whether all are there, then hands over the transport.
class Connector {
public:
  virtual ~Connector() = default;
  virtual bool complete() = 0;
  virtual std::unique_ptr<Transport> take(ncclResult_t *result) = 0;
};
std::unique_ptr<Connector> connect(const ncclUniqueId &id, int size, int rank, int device);
void make_unique_id(ncclUniqueId *id);

size_t size_of(ncclDataType_t type);
std::string describe(const Call &call);
[[noreturn]] void report_mismatch(const Call &a, int rank_a, const Call &b, int rank_b);

// The part of `from`'s send buffer that goes to `to`: offset and bytes, none when there is nothing.
struct Part {
  size_t offset, bytes;
};
Part part_of(const Call &call, int from, int to);
size_t send_bytes(const Call &call, int rank, int size);
size_t recv_bytes(const Call &call, int rank, int size);
// Puts what the others sent to `rank` together in its receive buffer.
void combine(const Operation &operation, int rank, int size, const std::function<const void *(int from)> &part);

// What is read and written in here counts as done by the stream that `operation` is in.
class AsTask {
public:
  explicit AsTask(const Operation &operation) : saved_(current_race_task()) { enter_race_task(operation.race_task); }
  ~AsTask() { enter_race_task(saved_); }
  AsTask(const AsTask &) = delete;
  AsTask &operator=(const AsTask &) = delete;

private:
  uint32_t saved_;
};

} // namespace ptxvm
