// cudart: stream capture.
#include "engine.h"
#include "streams.h"
#include <algorithm>

using namespace ptxvm;

extern "C" {

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
  *graph = new_graph_handle(capture->graph);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  PTXVM_ENTER(cudaStreamIsCapturing, remember(cudaErrorUnknown));
  Stream *s = stream_of(stream);
  if (!s) return remember(cudaErrorInvalidResourceHandle);
  if (s->legacy && capture_forbids_legacy(s->device)) return remember(cudaErrorStreamCaptureImplicit);
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
  // The graph itself is not for use before the capture ends.
  if (graph) *graph = nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, host_thread.capture_mode);
  return cudaSuccess;
}

} // extern "C"
