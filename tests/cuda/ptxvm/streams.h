// Inside of the runtime: stream, event and graph objects.
#pragma once
#include "races.h"
#include "runtime.h"
#include <deque>
#include <map>
#include <set>
#include <thread>

namespace ptxvm {

struct Task {
  uint64_t number; // over all streams, in the order of the calls
  std::string name;
  Work work;
  Ready ready;
  StreamClock before; // what comes before it, for the race detector
  uint32_t race_task = 0;
};

struct GraphNode {
  std::string name;
  Work work;
  Ready ready;
  std::set<size_t> after;
  cudaGraphNodeType type = cudaGraphNodeTypeKernel;
};

struct Graph {
  uint32_t id = 0; // in the handles of its nodes
  std::vector<GraphNode> nodes;
};
cudaGraph_t new_graph_handle(const std::shared_ptr<Graph> &graph);

struct Capture {
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  cudaStreamCaptureMode mode;
  struct Stream *origin;
  std::set<struct Stream *> streams;
  std::thread::id owner;
  bool broken = false;
  unsigned long long id;
};

struct Stream {
  uint64_t id = 0;
  uint64_t enqueued = 0;
  StreamClock clock; // everything that its next task comes after
  int device = 0;
  bool legacy = false, blocking = true; // blocking: ordered with the legacy stream
  bool busy = false;                    // some thread is running its first task
  int priority = 0;
  std::deque<Task> queue;
  std::shared_ptr<Capture> capture;
  std::set<size_t> tail; // nodes the next captured node comes after
};

struct Event {
  int device = 0;
  // Of the last record, whether the stream has come to it: who waits, waits for one record, whatever comes later.
  std::shared_ptr<bool> reached = std::make_shared<bool>(true);
  StreamClock clock; // of the last record
  bool timing = true;
  std::shared_ptr<Capture> capture; // recorded inside one
  std::set<size_t> nodes;
};

Stream *stream_of(cudaStream_t handle); // nullptr for an unknown one
Event *event_of(cudaEvent_t handle);

struct Runtime {
  RuntimeLock lock;
  std::map<int, std::unique_ptr<Stream>> legacy; // by device
  std::set<Stream *> streams;                    // created ones
  std::vector<std::unique_ptr<Stream>> retired;  // destroyed ones
  std::set<Event *> events;
  uint64_t task_count = 0, capture_count = 0;
  uint64_t progress = 0; // tasks that have run
  uint64_t random = 0;
  std::set<std::shared_ptr<Capture>> captures;
  std::map<std::string, long> calls;
  std::string fail_name;
  long fail_at = 0;
  StreamClock host; // what some thread of the program has waited for
  uint64_t stream_count = 0;
};

struct HostThread {
  int device = 0;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  cudaError_t last_error = cudaSuccess;
  std::map<int, Stream *> streams; // cudaStreamPerThread by device; they outlive the thread
};
extern thread_local HostThread host_thread;

Runtime &runtime();
Stream *new_stream();
std::vector<Stream *> all_streams();
// The legacy stream would order itself with what is being captured on its device.
bool capture_forbids_legacy(int device);
bool run_one(); // one task of a stream chosen among those that can go on; false when none can
void join(StreamClock &into, const StreamClock &from);

} // namespace ptxvm
