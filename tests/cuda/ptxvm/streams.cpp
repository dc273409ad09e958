#include "streams.h"
#include "device_memory.h"
#include "engine.h"
#include "report.h"
#include "statistics.h"
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <unistd.h>

namespace ptxvm {

namespace {

struct Runtime {
  RuntimeLock lock;
  std::map<int, std::unique_ptr<Stream>> legacy; // by device
  std::set<Stream *> streams;                    // created ones
  std::set<Event *> events;
  uint64_t task_count = 0, capture_count = 0;
  uint64_t random = 0;
  std::set<std::shared_ptr<Capture>> captures;
  std::map<std::string, long> calls;
  std::string fail_name;
  long fail_at = 0;
  StreamClock host; // what some thread of the program has waited for
  uint64_t stream_count = 0;
};

Runtime &runtime() {
  static Runtime *r = [] {
    auto *fresh = new Runtime;
    const char *seed = getenv("PTXVM_STREAM_SEED");
    fresh->random = (seed ? strtoull(seed, nullptr, 10) : 1) * 0x9e3779b97f4a7c15ull | 1;
    if (const char *fail = getenv("PTXVM_FAIL")) {
      std::string text = fail;
      size_t colon = text.rfind(':');
      fresh->fail_name = text.substr(0, colon);
      fresh->fail_at = colon == std::string::npos ? 1 : atol(text.c_str() + colon + 1);
    }
    return fresh;
  }();
  return *r;
}

thread_local int this_device = 0;
thread_local cudaStreamCaptureMode this_capture_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;

void join(StreamClock &into, const StreamClock &from) {
  for (auto &entry : from) {
    uint64_t &value = into[entry.first];
    value = std::max(value, entry.second);
  }
}

Stream *new_stream() {
  auto *s = new Stream;
  s->id = ++runtime().stream_count;
  return s;
}

Stream *legacy_stream(int device) {
  auto &slot = runtime().legacy[device];
  if (!slot) {
    slot.reset(new_stream());
    slot->device = device;
    slot->legacy = true;
  }
  return slot.get();
}

std::vector<Stream *> all_streams() {
  std::vector<Stream *> list(runtime().streams.begin(), runtime().streams.end());
  for (auto &entry : runtime().legacy) list.push_back(entry.second.get());
  // Addresses differ from run to run; the order must not.
  std::sort(list.begin(), list.end(), [](Stream *a, Stream *b) {
    uint64_t x = a->queue.empty() ? ~0ull : a->queue.front().number,
             y = b->queue.empty() ? ~0ull : b->queue.front().number;
    return x < y;
  });
  return list;
}

// The legacy stream and the blocking streams of its device wait for one another, in the order of the calls.
bool order_allows(const Stream &stream, const Task &task) {
  if (!stream.legacy && !stream.blocking) return true;
  if (!stream.legacy) {
    auto it = runtime().legacy.find(stream.device);
    return it == runtime().legacy.end() || it->second->queue.empty() || it->second->queue.front().number > task.number;
  }
  for (Stream *other : runtime().streams)
    if (other->device == stream.device && other->blocking && !other->queue.empty() &&
        other->queue.front().number < task.number)
      return false;
  return true;
}

bool is_ready(Stream &stream) {
  Task &task = stream.queue.front();
  if (!order_allows(stream, task)) return false;
  if (options().race) {
    if (!task.race_task) task.race_task = new_race_task(task.name, stream.id, task.before[stream.id], task.before);
    enter_race_task(task.race_task);
  }
  return !task.ready || task.ready();
}

// Runs one task of a stream chosen among those that can go on; false when none can.
bool run_one() {
  Runtime &r = runtime();
  std::vector<Stream *> able;
  for (Stream *s : all_streams())
    if (!s->queue.empty() && is_ready(*s)) able.push_back(s);
  if (able.empty()) return false;
  Stream *stream = able[next_random(r.random) % able.size()];
  Task task = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (options().race) enter_race_task(task.race_task);
  task.work();
  return true;
}

void finish_everything() {
  std::lock_guard<RuntimeLock> lock(runtime().lock);
  while (run_one()) {
  }
}

// At the end of the program: late work still runs, so that its faults are seen, then the verdict.
struct AtExit {
  ~AtExit() {
    finish_everything();
    fflush(stdout);
    print_statistics();
    if (!faults_noted()) return;
    fprintf(stderr, "ptxvm: %d fault(s)\n", faults_noted());
    fflush(stderr);
    _exit(kFaultStatus);
  }
} at_exit;

} // namespace

RuntimeLock &runtime_lock() { return runtime().lock; }
void RuntimeLock::sleep_released() {
  int depth = depth_;
  for (int k = 0; k < depth; k++) unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(200));
  for (int k = 0; k < depth; k++) lock();
}
int current_device() { return this_device; }
int device_count() {
  const char *count = getenv("PTXVM_DEVICES");
  return count ? atoi(count) : 1;
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

bool injected_failure(const char *name) {
  Runtime &r = runtime();
  r.calls[name]++;
  r.calls["*"]++;
  if (!r.fail_at || (r.fail_name != "*" && r.fail_name != name)) return false;
  return --r.fail_at == 0;
}

extern "C" void ptxvm_fail_call(const char *name, int n) {
  std::lock_guard<RuntimeLock> lock(runtime().lock);
  runtime().fail_name = name;
  runtime().fail_at = n;
}

extern "C" long ptxvm_calls(const char *name) {
  std::lock_guard<RuntimeLock> lock(runtime().lock);
  return runtime().calls[name];
}

Stream *stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return legacy_stream(this_device);
  auto *stream = reinterpret_cast<Stream *>(handle);
  return runtime().streams.count(stream) ? stream : nullptr;
}

Event *event_of(cudaEvent_t handle) {
  auto *event = reinterpret_cast<Event *>(handle);
  return runtime().events.count(event) ? event : nullptr;
}

bool is_known_stream(cudaStream_t handle) { return stream_of(handle) != nullptr; }
bool is_capturing(cudaStream_t handle) {
  Stream *s = stream_of(handle);
  return s && s->capture;
}
int device_of(cudaStream_t handle) {
  Stream *s = stream_of(handle);
  return s ? s->device : -1;
}

void run_until(const std::function<bool()> &done, const char *why) {
  auto since = std::chrono::steady_clock::now();
  while (!done()) {
    if (run_one()) {
      since = std::chrono::steady_clock::now();
      continue;
    }
    // Another thread, or a rank elsewhere, may still bring what is missing.
    runtime().lock.sleep_released();
    if (std::chrono::steady_clock::now() - since > std::chrono::seconds(20)) {
      std::string heads;
      for (Stream *s : all_streams())
        if (!s->queue.empty())
          heads += std::string("\n    a stream of device ") + std::to_string(s->device) + " waits at " +
                   s->queue.front().name;
      stop("deadlock between streams in %s: nothing can run%s", why, heads.c_str());
    }
  }
}

cudaError_t wait_for_stream(cudaStream_t handle) {
  Stream *s = stream_of(handle);
  if (!s) return cudaErrorInvalidResourceHandle;
  if (s->capture) {
    s->capture->broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  // Waiting for the legacy stream waits for the blocking ones it is ordered after.
  uint64_t last = runtime().task_count;
  auto done = [&] {
    if (!s->queue.empty() && s->queue.front().number <= last) return false;
    if (!s->legacy) return true;
    for (Stream *other : runtime().streams)
      if (other->device == s->device && other->blocking && !other->queue.empty() && other->queue.front().number <= last)
        return false;
    return true;
  };
  run_until(done, "a stream synchronisation");
  join(runtime().host, s->clock);
  for (Stream *other : runtime().streams)
    if (s->legacy && other->device == s->device && other->blocking) join(runtime().host, other->clock);
  return cudaSuccess;
}

static cudaError_t capture_node(Stream &s, const char *name, Work work, Ready ready) {
  Capture &capture = *s.capture;
  if (capture.broken) return cudaErrorStreamCaptureInvalidated;
  size_t index = capture.graph->nodes.size();
  capture.graph->nodes.push_back({name, std::move(work), std::move(ready), s.tail});
  s.tail = {index};
  return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t handle, const char *name, Work work, Ready ready) {
  Runtime &r = runtime();
  Stream *s = stream_of(handle);
  if (!s) return cudaErrorInvalidResourceHandle;
  if (s->capture) return capture_node(*s, name, std::move(work), std::move(ready));
  if (s->legacy)
    for (auto &capture : r.captures)
      if (capture->origin->blocking &&
          capture->mode != cudaStreamCaptureModeRelaxed) { // the legacy stream would order itself with it
        capture->broken = true;
        return cudaErrorStreamCaptureImplicit;
      }
  join(s->clock, r.host);
  if (s->legacy) {
    for (Stream *other : r.streams)
      if (other->device == s->device && other->blocking) join(s->clock, other->clock);
  } else if (s->blocking) {
    join(s->clock, legacy_stream(s->device)->clock);
  }
  s->clock[s->id] = ++s->enqueued;
  s->queue.push_back({++r.task_count, name, std::move(work), std::move(ready), s->clock});
  return cudaSuccess;
}

cudaError_t refuse_under_capture(const char *) {
  for (auto &capture : runtime().captures) {
    bool other_thread = capture->owner != std::this_thread::get_id();
    if (capture->mode == cudaStreamCaptureModeRelaxed || this_capture_mode == cudaStreamCaptureModeRelaxed) continue;
    if (other_thread &&
        (capture->mode == cudaStreamCaptureModeThreadLocal || this_capture_mode == cudaStreamCaptureModeThreadLocal))
      continue;
    capture->broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

bool is_pinned_or_device(const void *pointer) {
  return device_memory().find(reinterpret_cast<uint64_t>(pointer)) != nullptr;
}

void *view(const void *pointer, size_t size, const char *who) {
  if (!size) return const_cast<void *>(pointer);
  void *host = device_memory().host_view(pointer, size);
  if (!host)
    stop("%s touches %zu bytes that are not all live memory: %s", who, size,
         device_memory().describe(reinterpret_cast<uint64_t>(pointer), size).c_str());
  return host;
}

static void *device_access(const void *pointer, size_t size, const char *who, bool writes) {
  if (!size) return const_cast<void *>(pointer);
  if (!is_pinned_or_device(pointer) && !device_memory().in_arena(reinterpret_cast<uint64_t>(pointer)))
    stop("%s works on host memory that is neither pinned nor registered: %p", who, pointer);
  void *host = view(pointer, size, who);
  if (options().race) log_range(reinterpret_cast<uint64_t>(pointer), size, writes);
  return host;
}
const void *device_read(const void *pointer, size_t size, const char *who) {
  return device_access(pointer, size, who, false);
}
void *device_write(void *pointer, size_t size, const char *who) { return device_access(pointer, size, who, true); }

} // namespace ptxvm

using namespace ptxvm;

extern "C" {

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }

cudaError_t cudaSetDevice(int device) {
  PTXVM_ENTER(cudaSetDevice, remember(cudaErrorUnknown));
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  this_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
  PTXVM_ENTER(cudaGetDevice, remember(cudaErrorUnknown));
  *device = this_device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count) {
  PTXVM_ENTER(cudaGetDeviceCount, remember(cudaErrorUnknown));
  *count = device_count();
  return cudaSuccess;
}

// ---- Streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  PTXVM_ENTER(cudaStreamCreate, remember(cudaErrorMemoryAllocation));
  Stream *s = new_stream();
  s->device = this_device;
  s->blocking = flags != cudaStreamNonBlocking;
  s->priority = priority;
  runtime().streams.insert(s);
  *stream = reinterpret_cast<cudaStream_t>(s);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  PTXVM_ENTER(cudaStreamDestroy, remember(cudaErrorUnknown));
  Stream *s = stream_of(stream);
  if (!s || s->legacy) return remember(cudaErrorInvalidResourceHandle);
  run_until([&] { return s->queue.empty(); }, "cudaStreamDestroy");
  join(runtime().host, s->clock);
  runtime().streams.erase(s);
  delete s;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  PTXVM_ENTER(cudaStreamSynchronize, remember(cudaErrorUnknown));
  return remember(wait_for_stream(stream));
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  PTXVM_ENTER(cudaStreamQuery, remember(cudaErrorUnknown));
  Stream *s = stream_of(stream);
  if (!s) return remember(cudaErrorInvalidResourceHandle);
  if (s->capture) {
    s->capture->broken = true;
    return remember(cudaErrorStreamCaptureUnsupported);
  }
  if (!s->queue.empty()) run_one(); // a program that polls must see progress
  if (!s->queue.empty()) return cudaErrorNotReady;
  join(runtime().host, s->clock);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
  PTXVM_ENTER(cudaDeviceSynchronize, remember(cudaErrorUnknown));
  if (cudaError_t error = refuse_under_capture("cudaDeviceSynchronize")) return remember(error);
  uint64_t last = runtime().task_count;
  int device = this_device;
  auto done = [&] {
    for (Stream *s : all_streams())
      if (s->device == device && !s->queue.empty() && s->queue.front().number <= last) return false;
    return true;
  };
  run_until(done, "cudaDeviceSynchronize");
  for (Stream *s : all_streams())
    if (s->device == device) join(runtime().host, s->clock);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  PTXVM_ENTER(cudaStreamGetPriority, remember(cudaErrorUnknown));
  Stream *s = stream_of(stream);
  if (!s) return remember(cudaErrorInvalidResourceHandle);
  *priority = s->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
  PTXVM_ENTER(cudaStreamGetFlags, remember(cudaErrorUnknown));
  Stream *s = stream_of(stream);
  if (!s) return remember(cudaErrorInvalidResourceHandle);
  *flags = s->blocking ? cudaStreamDefault : cudaStreamNonBlocking;
  return cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
  PTXVM_ENTER(cudaStreamGetDevice, remember(cudaErrorUnknown));
  Stream *s = stream_of(stream);
  if (!s) return remember(cudaErrorInvalidResourceHandle);
  *device = s->device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  PTXVM_ENTER(cudaDeviceGetStreamPriorityRange, remember(cudaErrorUnknown));
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  PTXVM_ENTER(cudaLaunchHostFunc, remember(cudaErrorUnknown));
  return remember(enqueue(stream, "cudaLaunchHostFunc", [=] { function(data); }));
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned) {
  PTXVM_ENTER(cudaStreamAddCallback, remember(cudaErrorUnknown));
  if (is_capturing(stream)) return remember(refuse_under_capture("cudaStreamAddCallback"));
  return remember(enqueue(stream, "cudaStreamAddCallback", [=] { callback(stream, cudaSuccess, data); }));
}

// ---- Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  PTXVM_ENTER(cudaEventCreate, remember(cudaErrorMemoryAllocation));
  auto *e = new Event;
  e->device = this_device;
  e->timing = !(flags & cudaEventDisableTiming);
  runtime().events.insert(e);
  *event = reinterpret_cast<cudaEvent_t>(e);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

// Events are kept: queued work may still refer to one that its owner has destroyed.
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  PTXVM_ENTER(cudaEventDestroy, remember(cudaErrorUnknown));
  if (!event_of(event)) return remember(cudaErrorInvalidResourceHandle);
  runtime().events.erase(event_of(event));
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  PTXVM_ENTER(cudaEventRecord, remember(cudaErrorUnknown));
  Event *e = event_of(event);
  Stream *s = stream_of(stream);
  if (!e || !s) return remember(cudaErrorInvalidResourceHandle);
  if (s->capture) {
    if (s->capture->broken) return remember(cudaErrorStreamCaptureInvalidated);
    e->capture = s->capture;
    e->nodes = s->tail;
    return cudaSuccess;
  }
  e->capture = nullptr;
  uint64_t version = ++e->recorded;
  cudaError_t error = enqueue(stream, "cudaEventRecord", [=] { e->completed = std::max(e->completed, version); });
  e->clock = s->clock;
  return remember(error);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  PTXVM_ENTER(cudaStreamWaitEvent, remember(cudaErrorUnknown));
  Event *e = event_of(event);
  Stream *s = stream_of(stream);
  if (!e || !s) return remember(cudaErrorInvalidResourceHandle);
  if (e->capture && runtime().captures.count(e->capture)) {
    if (e->capture->broken) return remember(cudaErrorStreamCaptureInvalidated);
    if (s->capture && s->capture != e->capture) return remember(cudaErrorStreamCaptureMerge);
    if (!s->capture) { // joins the capture
      s->capture = e->capture;
      s->tail.clear();
      e->capture->streams.insert(s);
    }
    s->tail.insert(e->nodes.begin(), e->nodes.end());
    return cudaSuccess;
  }
  if (s->capture) { // an event from outside cannot be waited for inside
    s->capture->broken = true;
    return remember(cudaErrorStreamCaptureIsolation);
  }
  uint64_t version = e->recorded;
  join(s->clock, e->clock);
  return remember(enqueue(
      stream, "cudaStreamWaitEvent", [] {}, [=] { return e->completed >= version; }));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  PTXVM_ENTER(cudaEventSynchronize, remember(cudaErrorUnknown));
  Event *e = event_of(event);
  if (!e) return remember(cudaErrorInvalidResourceHandle);
  if (e->capture) {
    e->capture->broken = true;
    return remember(cudaErrorCapturedEvent);
  }
  uint64_t version = e->recorded;
  run_until([&] { return e->completed >= version; }, "cudaEventSynchronize");
  join(runtime().host, e->clock);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  PTXVM_ENTER(cudaEventQuery, remember(cudaErrorUnknown));
  Event *e = event_of(event);
  if (!e) return remember(cudaErrorInvalidResourceHandle);
  if (e->capture) {
    e->capture->broken = true;
    return remember(cudaErrorCapturedEvent);
  }
  if (e->completed < e->recorded) run_one();
  if (e->completed < e->recorded) return cudaErrorNotReady;
  join(runtime().host, e->clock);
  return cudaSuccess;
}
// There is no device time; a small positive number keeps programs that divide by it alive.
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  PTXVM_ENTER(cudaEventElapsedTime, remember(cudaErrorUnknown));
  Event *a = event_of(start), *b = event_of(end);
  if (!a || !b || !a->timing || !b->timing) return remember(cudaErrorInvalidResourceHandle);
  if (a->completed < a->recorded || b->completed < b->recorded) return cudaErrorNotReady;
  *milliseconds = 0.001f;
  return cudaSuccess;
}

// ---- Capture and graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  PTXVM_ENTER(cudaStreamBeginCapture, remember(cudaErrorUnknown));
  Stream *s = stream_of(stream);
  if (!s) return remember(cudaErrorInvalidResourceHandle);
  if (s->legacy) return remember(cudaErrorStreamCaptureUnsupported);
  if (s->capture) return remember(cudaErrorIllegalState);
  s->capture = std::make_shared<Capture>();
  s->capture->mode = mode;
  s->capture->owner = std::this_thread::get_id();
  s->capture->origin = s;
  s->capture->streams = {s};
  s->capture->id = ++runtime().capture_count;
  s->tail.clear();
  runtime().captures.insert(s->capture);
  return cudaSuccess;
}

static void add_ancestors(const Graph &graph, const std::set<size_t> &nodes, std::set<size_t> &found) {
  for (size_t n : nodes)
    if (found.insert(n).second) add_ancestors(graph, graph.nodes[n].after, found);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  PTXVM_ENTER(cudaStreamEndCapture, remember(cudaErrorUnknown));
  Stream *s = stream_of(stream);
  *graph = nullptr;
  if (!s) return remember(cudaErrorInvalidResourceHandle);
  if (!s->capture) return remember(cudaErrorIllegalState);
  std::shared_ptr<Capture> capture = s->capture;
  if (capture->origin != s) return remember(cudaErrorStreamCaptureUnmatched);
  std::set<size_t> joined;
  add_ancestors(*capture->graph, s->tail, joined);
  bool unjoined = joined.size() != capture->graph->nodes.size();
  for (Stream *member : capture->streams)
    if (runtime().streams.count(member)) member->capture = nullptr;
  runtime().captures.erase(capture);
  if (capture->broken) return remember(cudaErrorStreamCaptureInvalidated);
  if (unjoined) return remember(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(capture->graph));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  PTXVM_ENTER(cudaStreamIsCapturing, remember(cudaErrorUnknown));
  Stream *s = stream_of(stream);
  if (!s) return remember(cudaErrorInvalidResourceHandle);
  if (s->legacy && !runtime().captures.empty()) return remember(cudaErrorStreamCaptureImplicit);
  *status = !s->capture          ? cudaStreamCaptureStatusNone
            : s->capture->broken ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  if (cudaError_t error = cudaStreamIsCapturing(stream, status)) return error;
  std::lock_guard<RuntimeLock> lock(runtime_lock());
  Stream *s = stream_of(stream);
  if (id) *id = s->capture ? s->capture->id : 0;
  if (graph) *graph = nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, this_capture_mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
  PTXVM_ENTER(cudaGraphInstantiate, remember(cudaErrorMemoryAllocation));
  if (!graph) return remember(cudaErrorInvalidValue);
  *exec =
      reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<Graph>(*reinterpret_cast<std::shared_ptr<Graph> *>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(exec, graph, flags);
}

namespace {
// One launch of a graph under way: nodes run one at a time, in any order their edges allow.
struct GraphRun {
  std::shared_ptr<Graph> graph;
  std::vector<bool> done;
  size_t left;

  bool advance() { // runs what can run; true when all has
    std::vector<size_t> able;
    do {
      able.clear();
      for (size_t n = 0; n < done.size(); n++) {
        const GraphNode &node = graph->nodes[n];
        bool free = std::all_of(node.after.begin(), node.after.end(), [&](size_t a) { return done[a]; });
        if (!done[n] && free && (!node.ready || node.ready())) able.push_back(n);
      }
      if (able.empty()) break;
      size_t n = able[next_random(runtime().random) % able.size()];
      done[n] = true;
      left--;
      graph->nodes[n].work();
    } while (left);
    return left == 0;
  }
};
} // namespace

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  PTXVM_ENTER(cudaGraphLaunch, remember(cudaErrorUnknown));
  if (!exec) return remember(cudaErrorInvalidValue);
  auto run = std::make_shared<GraphRun>();
  run->graph = *reinterpret_cast<std::shared_ptr<Graph> *>(exec);
  run->done.assign(run->graph->nodes.size(), false);
  run->left = run->done.size();
  return remember(enqueue(
      stream, "cudaGraphLaunch", [] {}, [run] { return run->advance(); }));
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  PTXVM_ENTER(cudaGraphGetNodes, remember(cudaErrorUnknown));
  if (!graph || nodes) return remember(cudaErrorInvalidValue); // only the number is known here
  *count = (*reinterpret_cast<std::shared_ptr<Graph> *>(graph))->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  PTXVM_ENTER(cudaGraphDestroy, remember(cudaErrorUnknown));
  delete reinterpret_cast<std::shared_ptr<Graph> *>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  PTXVM_ENTER(cudaGraphExecDestroy, remember(cudaErrorUnknown));
  delete reinterpret_cast<std::shared_ptr<Graph> *>(exec);
  return cudaSuccess;
}

} // extern "C"
