// Ranks are processes, and MPI carries the bytes; the program has called MPI_Init. Everything that may take long is
// nonblocking, so that streams go on while a rank waits.
#include "../ptxvm/report.h"
#include "nccl_operation.h"
#include <algorithm>
#include <cstring>
#include <map>
#include <mpi.h>

namespace ptxvm {

namespace {

struct Header { // what all ranks must agree about
  int64_t kind, count, type, op, root;
  static Header of(const Call &c) {
    return {static_cast<int>(c.kind), static_cast<int64_t>(c.count), c.type, c.op, c.root};
  }
  Call call() const {
    return {static_cast<Kind>(kind), static_cast<size_t>(count), static_cast<ncclDataType_t>(type),
            static_cast<ncclRedOp_t>(op), static_cast<int>(root)};
  }
};

enum class Phase { Waiting, Agreeing, Exchanging };

struct State {
  Phase phase = Phase::Waiting;
  MPI_Request request = MPI_REQUEST_NULL;
  Header mine{};
  std::vector<Header> headers;
  std::vector<char> out, in;
  std::vector<int> out_counts, out_offsets, in_counts, in_offsets;
};

bool finished(MPI_Request &request) {
  int flag = 0;
  MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
  return flag != 0;
}

class MpiTransport : public Transport {
public:
  explicit MpiTransport(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_rank(comm, &rank_);
    MPI_Comm_size(comm, &size_);
  }
  ~MpiTransport() override {
    if (!aborted_) MPI_Comm_free(&comm_);
  }

  void post(const OperationPtr &o) override {
    bool sends = o->call.kind == Kind::Send, receives = o->call.kind == Kind::Recv;
    o->state = std::make_shared<State>();
    if ((sends || receives) && !o->call.count) return; // moves nothing, is never asked to
    o->sequence = sends ? send_count_[o->call.root]++ : receives ? recv_count_[o->call.root]++ : collective_count_++;
  }

  bool progress(const OperationPtr &o) override {
    if (aborted_) return true;
    if (!o->arrived) o->arrived = true, o->race_task = current_race_task();
    if (o->done) return true;
    State &s = *static_cast<State *>(o->state.get());
    o->done = o->call.kind == Kind::Send ? send(*o, s) : o->call.kind == Kind::Recv ? receive(*o) : collective(*o, s);
    return o->done;
  }

  // All ranks come to the barrier before the split itself, which blocks; until then streams go on.
  void offer_split(int color, int key) override {
    color_ = color, key_ = key;
    MPI_Ibarrier(comm_, &split_);
  }
  bool split_ready() override { return finished(split_); }
  std::unique_ptr<Transport> take_split(int *rank, int *size) override {
    MPI_Comm part;
    MPI_Comm_split(comm_, color_ == NCCL_SPLIT_NOCOLOR ? MPI_UNDEFINED : color_, key_, &part);
    if (part == MPI_COMM_NULL) return nullptr;
    MPI_Comm_rank(part, rank);
    MPI_Comm_size(part, size);
    return std::make_unique<MpiTransport>(part);
  }

  void abort() override { aborted_ = true; }
  bool peer_aborted() const override { return false; } // nothing tells

private:
  static constexpr int kTag = 7;

  // Messages of a pair, and collectives, start in the order of the calls, whatever order the streams come to them in.
  bool send(Operation &o, State &s) {
    if (s.phase == Phase::Waiting) {
      uint64_t &next = next_send_[o.call.root];
      if (next != o.sequence) return false;
      next++;
      size_t bytes = o.call.count * size_of(o.call.type);
      Header header = Header::of(o.call);
      s.out.resize(sizeof header + bytes);
      AsTask as(o);
      memcpy(s.out.data(), &header, sizeof header);
      memcpy(s.out.data() + sizeof header, device_read(o.send, bytes, "ncclSend"), bytes);
      MPI_Isend(s.out.data(), static_cast<int>(s.out.size()), MPI_BYTE, o.call.root, kTag, comm_, &s.request);
      s.phase = Phase::Exchanging;
    }
    return finished(s.request);
  }

  bool receive(Operation &o) {
    uint64_t &next = next_recv_[o.call.root];
    int flag = 0, bytes = 0;
    MPI_Status status;
    if (next != o.sequence) return false;
    MPI_Iprobe(o.call.root, kTag, comm_, &flag, &status);
    if (!flag) return false;
    next++;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    std::vector<char> message(static_cast<size_t>(bytes));
    MPI_Recv(message.data(), bytes, MPI_BYTE, o.call.root, kTag, comm_, MPI_STATUS_IGNORE);
    Header header;
    memcpy(&header, message.data(), sizeof header);
    Call sent = header.call();
    if (sent.count != o.call.count || sent.type != o.call.type) report_mismatch(sent, o.call.root, o.call, rank_);
    AsTask as(o);
    memcpy(device_write(o.recv, message.size() - sizeof header, "ncclRecv"), message.data() + sizeof header,
           message.size() - sizeof header);
    return true;
  }

  bool collective(Operation &o, State &s) {
    if (s.phase == Phase::Waiting) {
      if (next_collective_ != o.sequence) return false;
      s.mine = Header::of(o.call);
      s.headers.resize(static_cast<size_t>(size_));
      MPI_Iallgather(&s.mine, sizeof(Header), MPI_BYTE, s.headers.data(), sizeof(Header), MPI_BYTE, comm_, &s.request);
      s.phase = Phase::Agreeing;
    }
    if (!finished(s.request)) return false;
    if (s.phase == Phase::Agreeing) {
      for (int r = 0; r < size_; r++)
        if (memcmp(&s.headers[static_cast<size_t>(r)], &s.mine, sizeof(Header)))
          report_mismatch(s.headers[static_cast<size_t>(r)].call(), r, o.call, rank_);
      exchange(o, s);
      s.phase = Phase::Exchanging;
      if (!finished(s.request)) return false;
    }
    combine(o, rank_, size_, [&](int from) { return s.in.data() + s.in_offsets[static_cast<size_t>(from)]; });
    next_collective_++; // one at a time: both of its exchanges come before the next one's
    return true;
  }

  void exchange(Operation &o, State &s) {
    size_t bytes = send_bytes(o.call, rank_, size_);
    AsTask as(o);
    const char *source =
        static_cast<const char *>(bytes ? device_read(o.send, bytes, describe(o.call).c_str()) : nullptr);
    s.out.assign(source, source + bytes);
    int at = 0;
    for (int r = 0; r < size_; r++) {
      Part out = part_of(o.call, rank_, r), in = part_of(o.call, r, rank_);
      s.out_counts.push_back(static_cast<int>(out.bytes));
      s.out_offsets.push_back(static_cast<int>(out.offset));
      s.in_counts.push_back(static_cast<int>(in.bytes));
      s.in_offsets.push_back(at);
      at += static_cast<int>(in.bytes);
    }
    s.in.resize(static_cast<size_t>(at));
    MPI_Ialltoallv(s.out.data(), s.out_counts.data(), s.out_offsets.data(), MPI_BYTE, s.in.data(), s.in_counts.data(),
                   s.in_offsets.data(), MPI_BYTE, comm_, &s.request);
  }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 0, color_ = 0, key_ = 0;
  bool aborted_ = false;
  MPI_Request split_ = MPI_REQUEST_NULL;
  uint64_t collective_count_ = 0, next_collective_ = 0;
  std::map<int, uint64_t> send_count_, recv_count_, next_send_, next_recv_;
};

// The id names the rank of MPI_COMM_WORLD that made it; the others tell it who they are, and it tells them all.
struct Id {
  uint64_t number;
  int creator;
};

class MpiConnector : public Connector {
public:
  MpiConnector(const ncclUniqueId &id, int size, int rank)
      : size_(size), rank_(rank), members_(static_cast<size_t>(size), -1) {
    memcpy(&id_, id.internal, sizeof id_);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank_);
    tag_ = 1000 + static_cast<int>(id_.number % 10000) * 2;
    if (world_rank_ == id_.creator) {
      members_[static_cast<size_t>(rank)] = world_rank_;
      return;
    }
    MPI_Send(&rank_, 1, MPI_INT, id_.creator, tag_, MPI_COMM_WORLD);
    MPI_Irecv(members_.data(), size_, MPI_INT, id_.creator, tag_ + 1, MPI_COMM_WORLD, &request_);
  }

  bool complete() override {
    if (world_rank_ != id_.creator) return finished(request_);
    for (;;) {
      if (std::find(members_.begin(), members_.end(), -1) == members_.end()) break;
      int flag = 0, rank;
      MPI_Status status;
      MPI_Iprobe(MPI_ANY_SOURCE, tag_, MPI_COMM_WORLD, &flag, &status);
      if (!flag) return false;
      MPI_Recv(&rank, 1, MPI_INT, status.MPI_SOURCE, tag_, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      members_[static_cast<size_t>(rank)] = status.MPI_SOURCE;
    }
    for (int member : members_)
      if (member != world_rank_) MPI_Send(members_.data(), size_, MPI_INT, member, tag_ + 1, MPI_COMM_WORLD);
    return true;
  }

  std::unique_ptr<Transport> take(ncclResult_t *result) override {
    MPI_Group world, group;
    MPI_Comm comm;
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_incl(world, size_, members_.data(), &group);
    MPI_Comm_create_group(MPI_COMM_WORLD, group, tag_, &comm);
    MPI_Group_free(&group);
    MPI_Group_free(&world);
    *result = ncclSuccess;
    return std::make_unique<MpiTransport>(comm);
  }

private:
  Id id_;
  int size_, rank_, world_rank_ = 0, tag_ = 0;
  std::vector<int> members_;
  MPI_Request request_ = MPI_REQUEST_NULL;
};

} // namespace

void make_unique_id(ncclUniqueId *id) {
  static uint64_t count = 0;
  Id made{++count, 0};
  MPI_Comm_rank(MPI_COMM_WORLD, &made.creator);
  memset(id, 0, sizeof *id);
  memcpy(id->internal, &made, sizeof made);
}

std::unique_ptr<Connector> connect(const ncclUniqueId &id, int size, int rank, int) {
  return std::make_unique<MpiConnector>(id, size, rank);
}

} // namespace ptxvm
