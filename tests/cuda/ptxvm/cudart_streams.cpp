// cudart: devices, streams and events.
#include "engine.h"
#include "streams.h"
#include <algorithm>

using namespace ptxvm;

extern "C" {

cudaError_t cudaGetLastError(void) {
  cudaError_t error = host_thread.last_error;
  host_thread.last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return host_thread.last_error; }

cudaError_t cudaSetDevice(int device) {
  PTXVM_ENTER(cudaSetDevice, remember(cudaErrorUnknown));
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  host_thread.device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
  PTXVM_ENTER(cudaGetDevice, remember(cudaErrorUnknown));
  *device = host_thread.device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count) {
  PTXVM_ENTER(cudaGetDeviceCount, remember(cudaErrorUnknown));
  *count = device_count();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  PTXVM_ENTER(cudaStreamCreate, remember(cudaErrorMemoryAllocation));
  Stream *s = new_stream();
  s->device = host_thread.device;
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
  runtime().retired.emplace_back(s); // another thread may be looking at it
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
  int device = host_thread.device;
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
  // Without the lock: the function may wait for another thread of the program.
  return remember(enqueue(stream, "cudaLaunchHostFunc", [=] { runtime_lock().run_released([=] { function(data); }); }));
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned) {
  PTXVM_ENTER(cudaStreamAddCallback, remember(cudaErrorUnknown));
  if (is_capturing(stream)) return remember(refuse_in_capture(stream));
  return remember(enqueue(stream, "cudaStreamAddCallback",
                          [=] { runtime_lock().run_released([=] { callback(stream, cudaSuccess, data); }); }));
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
  PTXVM_ENTER(cudaStreamGetId, remember(cudaErrorUnknown));
  Stream *s = stream_of(stream);
  if (!s) return remember(cudaErrorInvalidResourceHandle);
  *id = s->id;
  return cudaSuccess;
}

// ---- Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  PTXVM_ENTER(cudaEventCreate, remember(cudaErrorMemoryAllocation));
  auto *e = new Event;
  e->device = host_thread.device;
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
  auto reached = e->reached = std::make_shared<bool>(false);
  cudaError_t error = enqueue(stream, "cudaEventRecord", [=] { *reached = true; });
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
  join(s->clock, e->clock);
  return remember(enqueue(
      stream, "cudaStreamWaitEvent", [] {}, [reached = e->reached] { return *reached; }));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  PTXVM_ENTER(cudaEventSynchronize, remember(cudaErrorUnknown));
  Event *e = event_of(event);
  if (!e) return remember(cudaErrorInvalidResourceHandle);
  if (e->capture) {
    e->capture->broken = true;
    return remember(cudaErrorCapturedEvent);
  }
  run_until([reached = e->reached] { return *reached; }, "cudaEventSynchronize");
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
  if (!*e->reached) run_one();
  if (!*e->reached) return cudaErrorNotReady;
  join(runtime().host, e->clock);
  return cudaSuccess;
}
// There is no device time; a small positive number keeps programs that divide by it alive.
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  PTXVM_ENTER(cudaEventElapsedTime, remember(cudaErrorUnknown));
  Event *a = event_of(start), *b = event_of(end);
  if (!a || !b || !a->timing || !b->timing) return remember(cudaErrorInvalidResourceHandle);
  if (!*a->reached || !*b->reached) return cudaErrorNotReady;
  *milliseconds = 0.001f;
  return cudaSuccess;
}

} // extern "C"
