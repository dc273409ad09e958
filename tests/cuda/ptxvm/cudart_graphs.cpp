// cudart: stream capture and graphs.
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
  std::swap(*mode, host_thread.capture_mode);
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
