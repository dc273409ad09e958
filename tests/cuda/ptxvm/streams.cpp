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

thread_local HostThread host_thread;

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

static Stream *legacy_stream(int device) {
  auto &slot = runtime().legacy[device];
  if (!slot) {
    slot.reset(new_stream());
    slot->device = device;
    slot->legacy = true;
  }
  return slot.get();
}

// Like a created, blocking stream that every thread has for each device.
static Stream *per_thread_stream(int device) {
  Stream *&stream = host_thread.streams[device];
  if (!stream) {
    stream = new_stream();
    stream->device = device;
    runtime().streams.insert(stream);
  }
  return stream;
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
static bool order_allows(const Stream &stream, const Task &task) {
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

static bool is_ready(Stream &stream) {
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
    if (!s->queue.empty() && !s->busy && is_ready(*s)) able.push_back(s);
  if (able.empty()) return false;
  Stream *stream = able[next_random(r.random) % able.size()];
  // The task heads its queue until it is done: host functions run without the lock, and nothing may overtake them.
  Work work = std::move(stream->queue.front().work);
  if (options().race) enter_race_task(stream->queue.front().race_task);
  stream->busy = true;
  work();
  stream->busy = false;
  stream->queue.pop_front();
  r.progress++;
  return true;
}

static void finish_everything() {
  std::lock_guard<RuntimeLock> lock(runtime().lock);
  while (run_one()) {
  }
}

// At the end of the program, however it comes about: late work still runs, so that its faults are seen, then the
// verdict. Returns the status to end with. A forked child has no say.
static const pid_t owner = getpid();
static int conclude(int status) {
  static bool concluded = false;
  if (getpid() != owner || concluded) return status;
  concluded = true;
  finish_everything();
  fflush(stdout);
  print_statistics();
  if (!faults_noted()) return status;
  fprintf(stderr, "ptxvm: %d fault(s)\n", faults_noted());
  fflush(stderr);
  return kFaultStatus;
}

namespace {
struct AtExit {
  AtExit() {
    at_quick_exit([] { end_if_faulty(conclude(0)); });
  }
  ~AtExit() { end_if_faulty(conclude(0)); }
  static void end_if_faulty(int status) {
    if (status) end_process(status);
  }
} at_exit;

} // namespace

// These end a program without its exit handlers. They come here first, for this library stands before the C library.
extern "C" void _exit(int status) { end_process(conclude(status)); }
extern "C" void _Exit(int status) { end_process(conclude(status)); }

RuntimeLock &runtime_lock() { return runtime().lock; }
void RuntimeLock::run_released(const std::function<void()> &f) {
  int depth = depth_;
  for (int k = 0; k < depth; k++) unlock();
  f();
  for (int k = 0; k < depth; k++) lock();
}
void RuntimeLock::sleep_released() {
  run_released([] { std::this_thread::sleep_for(std::chrono::microseconds(200)); });
}
int current_device() { return host_thread.device; }
int device_count() {
  const char *count = getenv("PTXVM_DEVICES");
  return count ? atoi(count) : 1;
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) host_thread.last_error = error;
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
  if (handle == nullptr || handle == cudaStreamLegacy) return legacy_stream(host_thread.device);
  if (handle == cudaStreamPerThread) return per_thread_stream(host_thread.device);
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

static std::chrono::seconds patience() {
  const char *seconds = getenv("PTXVM_TIMEOUT");
  return std::chrono::seconds(seconds ? atol(seconds) : 60);
}

void run_until(const std::function<bool()> &done, const char *why) {
  auto since = std::chrono::steady_clock::now();
  uint64_t progress = runtime().progress;
  while (!done()) {
    if (!run_one()) runtime().lock.sleep_released(); // another thread, or a rank elsewhere, may bring what is missing
    auto now = std::chrono::steady_clock::now();
    if (progress != runtime().progress) {
      progress = runtime().progress;
      since = now;
    }
    if (now - since <= patience() || done()) continue;
    std::string heads;
    for (Stream *s : all_streams())
      if (!s->queue.empty())
        heads +=
            std::string("\n    a stream of device ") + std::to_string(s->device) + " waits at " + s->queue.front().name;
    stop("deadlock between streams in %s: nothing can run (for PTXVM_TIMEOUT seconds)%s", why, heads.c_str());
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

static cudaGraphNodeType type_of(const std::string &name) {
  auto begins = [&](const char *prefix) { return name.compare(0, strlen(prefix), prefix) == 0; };
  return begins("cudaMemcpy")           ? cudaGraphNodeTypeMemcpy
         : begins("cudaMemset")         ? cudaGraphNodeTypeMemset
         : begins("cudaLaunchHostFunc") ? cudaGraphNodeTypeHost
                                        : cudaGraphNodeTypeKernel;
}

static cudaError_t capture_node(Stream &s, const char *name, Work work, Ready ready) {
  Capture &capture = *s.capture;
  if (capture.broken) return cudaErrorStreamCaptureInvalidated;
  size_t index = capture.graph->nodes.size();
  capture.graph->nodes.push_back({name, std::move(work), std::move(ready), s.tail, type_of(name)});
  s.tail = {index};
  return cudaSuccess;
}

bool capture_forbids_legacy(int device) {
  for (auto &capture : runtime().captures) {
    if (!capture->origin->blocking || capture->origin->device != device) continue;
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    return capture->broken = true;
  }
  return false;
}

cudaError_t enqueue(cudaStream_t handle, const char *name, Work work, Ready ready) {
  Runtime &r = runtime();
  Stream *s = stream_of(handle);
  if (!s) return cudaErrorInvalidResourceHandle;
  if (s->capture) return capture_node(*s, name, std::move(work), std::move(ready));
  if (s->legacy && capture_forbids_legacy(s->device)) return cudaErrorStreamCaptureImplicit;
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
    if (capture->mode == cudaStreamCaptureModeRelaxed || host_thread.capture_mode == cudaStreamCaptureModeRelaxed)
      continue;
    if (other_thread && (capture->mode == cudaStreamCaptureModeThreadLocal ||
                         host_thread.capture_mode == cudaStreamCaptureModeThreadLocal))
      continue;
    capture->broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

cudaError_t refuse_in_capture(cudaStream_t handle) {
  stream_of(handle)->capture->broken = true;
  return cudaErrorStreamCaptureUnsupported;
}

bool is_pinned_or_device(const void *pointer) {
  uint64_t address = reinterpret_cast<uint64_t>(pointer);
  return device_memory().find(address) != nullptr || device_memory().is_pageable(address);
}

void *view(const void *pointer, size_t size, const char *who) {
  if (!size) return const_cast<void *>(pointer);
  void *host = device_memory().host_view(pointer, size);
  if (!host) {
    const Allocation *a = device_memory().find(reinterpret_cast<uint64_t>(pointer));
    stop("%s%s touches %zu bytes that are not all live memory: %s", a && a->freed ? "use after free: " : "", who, size,
         device_memory().describe(reinterpret_cast<uint64_t>(pointer), size).c_str());
  }
  return host;
}

static void *device_access(const void *pointer, size_t size, const char *who, bool writes) {
  if (!size) return const_cast<void *>(pointer);
  if (!is_pinned_or_device(pointer) && !device_memory().in_arena(reinterpret_cast<uint64_t>(pointer)))
    stop("%s works on host memory that is neither pinned nor registered: %p", who, pointer);
  void *host = view(pointer, size, who);
  const Allocation *a = device_memory().find(reinterpret_cast<uint64_t>(pointer));
  if (a && a->pending)
    stop("%s uses memory before its cudaMallocAsync, which another stream has not come to: %s", who,
         device_memory().describe(reinterpret_cast<uint64_t>(pointer), size).c_str());
  if (options().race) log_range(reinterpret_cast<uint64_t>(pointer), size, writes);
  return host;
}
const void *device_read(const void *pointer, size_t size, const char *who) {
  return device_access(pointer, size, who, false);
}
void *device_write(void *pointer, size_t size, const char *who) { return device_access(pointer, size, who, true); }

} // namespace ptxvm
