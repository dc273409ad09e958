// Ranks are threads, or one thread with several devices, of one process.
#include "../ptxvm/report.h"
#include "nccl_operation.h"
#include <algorithm>
#include <cstring>
#include <map>
#include <set>

namespace ptxvm {

namespace {

struct Collective {
  std::vector<OperationPtr> by_rank;
  int finished = 0;
};

struct Channel { // from one rank to another
  std::vector<OperationPtr> sends, recvs;
};

struct World;
struct Split {
  std::map<int, std::pair<int, int>> offers; // colour and key by rank
  std::map<int, std::shared_ptr<World>> worlds;
  std::map<int, std::vector<int>> members;
};

struct World {
  int size = 0;
  std::map<int, int> device_of; // the ranks that have joined
  std::map<uint64_t, Collective> collectives;
  std::map<std::pair<int, int>, Channel> channels;
  std::map<uint64_t, Split> splits;
  std::set<int> aborted;
};

std::map<std::string, std::shared_ptr<World>> &worlds() {
  static auto *map = new std::map<std::string, std::shared_ptr<World>>;
  return *map;
}

bool same_collective(const Call &a, const Call &b) {
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op && a.root == b.root;
}

class ThreadTransport : public Transport {
public:
  ThreadTransport(std::shared_ptr<World> world, int rank) : world_(std::move(world)), rank_(rank) {}

  void post(const OperationPtr &o) override {
    if (o->call.kind == Kind::Send || o->call.kind == Kind::Recv) return post_peer(o);
    o->sequence = collective_count_++;
    Collective &c = world_->collectives[o->sequence];
    c.by_rank.resize(static_cast<size_t>(world_->size));
    for (int r = 0; r < world_->size; r++)
      if (c.by_rank[static_cast<size_t>(r)] && !same_collective(c.by_rank[static_cast<size_t>(r)]->call, o->call))
        report_mismatch(c.by_rank[static_cast<size_t>(r)]->call, r, o->call, rank_);
    c.by_rank[static_cast<size_t>(rank_)] = o;
  }

  bool progress(const OperationPtr &o) override {
    if (world_->aborted.count(rank_)) return true;
    if (!o->arrived) o->arrived = true, o->race_task = current_race_task();
    if (!o->done) {
      if (o->call.kind == Kind::Send || o->call.kind == Kind::Recv) try_transfer(o);
      else try_collective(o->sequence);
    }
    return o->done;
  }

  void offer_split(int color, int key) override { world_->splits[split_count_].offers[rank_] = {color, key}; }
  bool split_ready() override { return static_cast<int>(world_->splits[split_count_].offers.size()) == world_->size; }

  std::unique_ptr<Transport> take_split(int *rank, int *size) override {
    Split &split = world_->splits[split_count_++];
    int color = split.offers[rank_].first;
    if (color == NCCL_SPLIT_NOCOLOR) return nullptr;
    auto &members = split.members[color];
    if (members.empty()) {
      for (auto &offer : split.offers)
        if (offer.second.first == color) members.push_back(offer.first);
      std::stable_sort(members.begin(), members.end(),
                       [&](int a, int b) { return split.offers[a].second < split.offers[b].second; });
      split.worlds[color] = std::make_shared<World>();
      split.worlds[color]->size = static_cast<int>(members.size());
    }
    *size = static_cast<int>(members.size());
    *rank = static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
    return std::make_unique<ThreadTransport>(split.worlds[color], *rank);
  }

  void abort() override { world_->aborted.insert(rank_); }
  bool peer_aborted() const override { return !world_->aborted.empty() && !world_->aborted.count(rank_); }

private:
  void post_peer(const OperationPtr &o) {
    bool sends = o->call.kind == Kind::Send;
    Channel &channel = sends ? world_->channels[{rank_, o->call.root}] : world_->channels[{o->call.root, rank_}];
    auto &mine = sends ? channel.sends : channel.recvs, &theirs = sends ? channel.recvs : channel.sends;
    o->sequence = mine.size();
    mine.push_back(o);
    if (theirs.size() <= o->sequence) return;
    const Call &other = theirs[o->sequence]->call;
    if (other.count != o->call.count || other.type != o->call.type)
      report_mismatch(other, o->call.root, o->call, rank_);
  }

  void try_transfer(const OperationPtr &o) {
    bool sends = o->call.kind == Kind::Send;
    Channel &channel = sends ? world_->channels[{rank_, o->call.root}] : world_->channels[{o->call.root, rank_}];
    if (channel.sends.size() <= o->sequence || channel.recvs.size() <= o->sequence) return;
    Operation &from = *channel.sends[o->sequence], &to = *channel.recvs[o->sequence];
    if (!from.arrived || !to.arrived) return;
    size_t bytes = from.call.count * size_of(from.call.type);
    const void *source;
    {
      AsTask as(from);
      source = device_read(from.send, bytes, "ncclSend");
    }
    AsTask as(to);
    memmove(device_write(to.recv, bytes, "ncclRecv"), source, bytes);
    from.done = to.done = true;
  }

  void try_collective(uint64_t sequence) {
    Collective &c = world_->collectives[sequence];
    for (auto &o : c.by_rank)
      if (!o || !o->arrived) return;
    // All sources are taken first: with a buffer in place, results overwrite them.
    std::vector<std::vector<char>> sources;
    for (int r = 0; r < world_->size; r++) {
      const Operation &o = *c.by_rank[static_cast<size_t>(r)];
      size_t bytes = send_bytes(o.call, r, world_->size);
      AsTask as(o);
      const char *from =
          static_cast<const char *>(bytes ? device_read(o.send, bytes, describe(o.call).c_str()) : nullptr);
      sources.emplace_back(from, from + bytes);
    }
    for (int r = 0; r < world_->size; r++) {
      const Operation &o = *c.by_rank[static_cast<size_t>(r)];
      combine(o, r, world_->size,
              [&](int from) { return sources[static_cast<size_t>(from)].data() + part_of(o.call, from, r).offset; });
    }
    for (auto &o : c.by_rank) o->done = true;
    world_->collectives.erase(sequence);
  }

  std::shared_ptr<World> world_;
  int rank_;
  uint64_t collective_count_ = 0, split_count_ = 0;
};

class ThreadConnector : public Connector {
public:
  ThreadConnector(std::shared_ptr<World> world, int size, int rank, int device)
      : world_(std::move(world)), rank_(rank) {
    if (world_->size && world_->size != size)
      stop("NCCL ranks disagree about the number of ranks: %d and %d", world_->size, size);
    if (world_->device_of.count(rank)) stop("two NCCL ranks both claim to be rank %d", rank);
    world_->size = size;
    world_->device_of[rank] = device;
  }
  bool complete() override { return static_cast<int>(world_->device_of.size()) == world_->size; }
  std::unique_ptr<Transport> take(ncclResult_t *result) override {
    std::set<int> devices;
    for (auto &entry : world_->device_of) devices.insert(entry.second);
    *result = devices.size() == world_->device_of.size() ? ncclSuccess : ncclInvalidUsage; // two ranks on one GPU
    return *result == ncclSuccess ? std::make_unique<ThreadTransport>(world_, rank_) : nullptr;
  }

private:
  std::shared_ptr<World> world_;
  int rank_;
};

} // namespace

void make_unique_id(ncclUniqueId *id) {
  static uint64_t count = 0;
  memset(id, 0, sizeof *id);
  ++count;
  memcpy(id->internal, &count, sizeof count);
}

std::unique_ptr<Connector> connect(const ncclUniqueId &id, int size, int rank, int device) {
  auto &world = worlds()[std::string(id.internal, sizeof id.internal)];
  if (!world) world = std::make_shared<World>();
  return std::make_unique<ThreadConnector>(world, size, rank, device);
}

} // namespace ptxvm
