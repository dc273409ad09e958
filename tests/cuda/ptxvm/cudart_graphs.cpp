// cudart: graphs, captured or built node by node.
#include "engine.h"
#include "launch.h"
#include "streams.h"
#include <algorithm>

using namespace ptxvm;

namespace {

using GraphPtr = std::shared_ptr<Graph>;

GraphPtr &graph_of(cudaGraph_t handle) { return *reinterpret_cast<GraphPtr *>(handle); }
GraphPtr &graph_of(cudaGraphExec_t handle) { return *reinterpret_cast<GraphPtr *>(handle); }

std::map<uint32_t, std::weak_ptr<Graph>> &graphs() {
  static auto *map = new std::map<uint32_t, std::weak_ptr<Graph>>;
  return *map;
}

// A node's handle: which graph, and which of its nodes counted from one.
cudaGraphNode_t handle_of(const Graph &graph, size_t index) {
  return reinterpret_cast<cudaGraphNode_t>(static_cast<uint64_t>(graph.id) << 32 | (index + 1));
}
GraphNode *node_of(cudaGraphNode_t handle, GraphPtr *graph = nullptr, size_t *index = nullptr) {
  uint64_t bits = reinterpret_cast<uint64_t>(handle), at = (bits & 0xffffffff) - 1;
  auto it = graphs().find(static_cast<uint32_t>(bits >> 32));
  GraphPtr owner = it == graphs().end() ? nullptr : it->second.lock();
  if (!owner || at >= owner->nodes.size()) return nullptr;
  if (graph) *graph = owner;
  if (index) *index = at;
  return &owner->nodes[at];
}

cudaError_t depend(Graph &graph, size_t index, const cudaGraphNode_t *on, size_t count) {
  std::set<size_t> after;
  for (size_t k = 0; k < count; k++) {
    GraphPtr owner;
    size_t other;
    if (!node_of(on[k], &owner, &other) || owner.get() != &graph || other == index) return cudaErrorInvalidValue;
    after.insert(other);
  }
  graph.nodes[index].after.insert(after.begin(), after.end());
  return cudaSuccess;
}

cudaError_t add_node(cudaGraphNode_t *out, cudaGraph_t handle, const cudaGraphNode_t *after, size_t count,
                     cudaGraphNodeType type, const std::string &name, Work work) {
  if (!out || !handle || (count && !after)) return cudaErrorInvalidValue;
  Graph &graph = *graph_of(handle);
  graph.nodes.push_back({name, std::move(work), nullptr, {}, type});
  if (cudaError_t error = depend(graph, graph.nodes.size() - 1, after, count)) return graph.nodes.pop_back(), error;
  *out = handle_of(graph, graph.nodes.size() - 1);
  return cudaSuccess;
}

// An executable graph is a copy: later changes to the graph do not reach it.
GraphPtr copy_of(const Graph &graph) { return std::make_shared<Graph>(graph); }

cudaError_t kernel_work(const cudaKernelNodeParams *p, std::string *name, Work *work) {
  if (!p || p->extra) return cudaErrorInvalidValue;
  return prepare_launch(p->func, p->gridDim, p->blockDim, p->kernelParams, p->sharedMemBytes, false, name, work);
}

// A node of an executable graph is named by the node it was made from.
GraphNode *node_in(cudaGraphExec_t exec, cudaGraphNode_t node) {
  size_t index;
  if (!exec || !node_of(node, nullptr, &index) || index >= graph_of(exec)->nodes.size()) return nullptr;
  return &graph_of(exec)->nodes[index];
}

bool has_cycle(const Graph &graph) {
  std::vector<bool> done(graph.nodes.size());
  for (size_t left = done.size(), before = left + 1; left && left != before;) {
    before = left;
    for (size_t n = 0; n < done.size(); n++) {
      const auto &after = graph.nodes[n].after;
      if (done[n] || !std::all_of(after.begin(), after.end(), [&](size_t a) { return done[a]; })) continue;
      done[n] = true;
      left--;
    }
  }
  return !std::all_of(done.begin(), done.end(), [](bool d) { return d; });
}

// One launch of a graph under way: nodes run one at a time, in any order their edges allow.
struct GraphRun {
  std::shared_ptr<Graph> graph;
  std::vector<bool> done;
  size_t left;
  bool running = false; // a host node lets other threads in here

  bool advance() { // runs what can run; true when all has
    if (running) return false;
    running = true;
    const uint32_t task = current_race_task();
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
      enter_race_task(task);
    } while (left);
    running = false;
    return left == 0;
  }
};
} // namespace

cudaGraph_t ptxvm::new_graph_handle(const std::shared_ptr<Graph> &graph) {
  static uint32_t count = 0;
  graph->id = ++count;
  graphs()[graph->id] = graph;
  return reinterpret_cast<cudaGraph_t>(new GraphPtr(graph));
}

extern "C" {

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned) {
  PTXVM_ENTER(cudaGraphCreate, remember(cudaErrorMemoryAllocation));
  *graph = new_graph_handle(std::make_shared<Graph>());
  return cudaSuccess;
}
cudaError_t cudaGraphClone(cudaGraph_t *clone, cudaGraph_t graph) {
  PTXVM_ENTER(cudaGraphClone, remember(cudaErrorMemoryAllocation));
  if (!graph) return remember(cudaErrorInvalidValue);
  *clone = new_graph_handle(copy_of(*graph_of(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  PTXVM_ENTER(cudaGraphDestroy, remember(cudaErrorUnknown));
  if (!graph) return remember(cudaErrorInvalidValue);
  graphs().erase(graph_of(graph)->id);
  delete &graph_of(graph);
  return cudaSuccess;
}

// ---- Nodes

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after, size_t count,
                                   const cudaKernelNodeParams *params) {
  PTXVM_ENTER(cudaGraphAddKernelNode, remember(cudaErrorUnknown));
  std::string name;
  Work work;
  if (cudaError_t error = kernel_work(params, &name, &work)) return remember(error);
  return remember(add_node(node, graph, after, count, cudaGraphNodeTypeKernel, name, std::move(work)));
}
cudaError_t cudaGraphAddMemcpyNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after, size_t count,
                                   const cudaMemcpy3DParms *params) {
  PTXVM_ENTER(cudaGraphAddMemcpyNode, remember(cudaErrorUnknown));
  Work work;
  if (cudaError_t error = params ? prepare_copy(*params, &work) : cudaErrorInvalidValue) return remember(error);
  return remember(add_node(node, graph, after, count, cudaGraphNodeTypeMemcpy, "a memcpy node", std::move(work)));
}
cudaError_t cudaGraphAddMemcpyNode1D(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                     size_t count, void *to, const void *from, size_t size, cudaMemcpyKind kind) {
  PTXVM_ENTER(cudaGraphAddMemcpyNode, remember(cudaErrorUnknown));
  Work work;
  if (!size) return remember(cudaErrorInvalidValue);
  if (cudaError_t error = prepare_copy(to, from, size, kind, &work)) return remember(error);
  return remember(add_node(node, graph, after, count, cudaGraphNodeTypeMemcpy, "a memcpy node", std::move(work)));
}
cudaError_t cudaGraphAddMemsetNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after, size_t count,
                                   const cudaMemsetParams *params) {
  PTXVM_ENTER(cudaGraphAddMemsetNode, remember(cudaErrorUnknown));
  Work work;
  if (cudaError_t error = params ? prepare_fill(*params, &work) : cudaErrorInvalidValue) return remember(error);
  return remember(add_node(node, graph, after, count, cudaGraphNodeTypeMemset, "a memset node", std::move(work)));
}
cudaError_t cudaGraphAddHostNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after, size_t count,
                                 const cudaHostNodeParams *params) {
  PTXVM_ENTER(cudaGraphAddHostNode, remember(cudaErrorUnknown));
  if (!params || !params->fn) return remember(cudaErrorInvalidValue);
  return remember(add_node(
      node, graph, after, count, cudaGraphNodeTypeHost, "a host node",
      [function = params->fn, data = params->userData] { runtime_lock().run_released([=] { function(data); }); }));
}
cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                  size_t count) {
  PTXVM_ENTER(cudaGraphAddEmptyNode, remember(cudaErrorUnknown));
  return remember(add_node(node, graph, after, count, cudaGraphNodeTypeEmpty, "an empty node", [] {}));
}
cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t *from, const cudaGraphNode_t *to,
                                     const cudaGraphEdgeData *, size_t count) {
  PTXVM_ENTER(cudaGraphAddDependencies, remember(cudaErrorUnknown));
  for (size_t k = 0; k < count; k++) {
    GraphPtr owner;
    size_t index;
    if (!graph || !node_of(to[k], &owner, &index) || owner != graph_of(graph)) return remember(cudaErrorInvalidValue);
    if (cudaError_t error = depend(*owner, index, from + k, 1)) return remember(error);
  }
  return cudaSuccess;
}
cudaError_t cudaGraphKernelNodeSetParams(cudaGraphNode_t node, const cudaKernelNodeParams *params) {
  PTXVM_ENTER(cudaGraphKernelNodeSetParams, remember(cudaErrorUnknown));
  GraphNode *n = node_of(node);
  if (!n || n->type != cudaGraphNodeTypeKernel) return remember(cudaErrorInvalidValue);
  return remember(kernel_work(params, &n->name, &n->work));
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType *type) {
  PTXVM_ENTER(cudaGraphNodeGetType, remember(cudaErrorUnknown));
  if (!node_of(node)) return remember(cudaErrorInvalidValue);
  *type = node_of(node)->type;
  return cudaSuccess;
}

static cudaError_t list_nodes(const Graph &graph, const std::vector<size_t> &which, cudaGraphNode_t *out,
                              size_t *count) {
  for (size_t k = 0; out && k < *count; k++) out[k] = k < which.size() ? handle_of(graph, which[k]) : nullptr;
  *count = out ? std::min(*count, which.size()) : which.size();
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  PTXVM_ENTER(cudaGraphGetNodes, remember(cudaErrorUnknown));
  if (!graph || !count) return remember(cudaErrorInvalidValue);
  std::vector<size_t> all;
  for (size_t k = 0; k < graph_of(graph)->nodes.size(); k++) all.push_back(k);
  return list_nodes(*graph_of(graph), all, nodes, count);
}
cudaError_t cudaGraphGetRootNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  PTXVM_ENTER(cudaGraphGetRootNodes, remember(cudaErrorUnknown));
  if (!graph || !count) return remember(cudaErrorInvalidValue);
  std::vector<size_t> roots;
  for (size_t k = 0; k < graph_of(graph)->nodes.size(); k++)
    if (graph_of(graph)->nodes[k].after.empty()) roots.push_back(k);
  return list_nodes(*graph_of(graph), roots, nodes, count);
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *out, cudaGraphEdgeData *edges,
                                         size_t *count) {
  PTXVM_ENTER(cudaGraphNodeGetDependencies, remember(cudaErrorUnknown));
  GraphPtr graph;
  GraphNode *n = node_of(node, &graph);
  if (!n || !count) return remember(cudaErrorInvalidValue);
  for (size_t k = 0; edges && out && k < *count; k++) edges[k] = cudaGraphEdgeData();
  return list_nodes(*graph, {n->after.begin(), n->after.end()}, out, count);
}

// ---- Executable graphs

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
  PTXVM_ENTER(cudaGraphInstantiate, remember(cudaErrorMemoryAllocation));
  if (!graph || has_cycle(*graph_of(graph))) return remember(cudaErrorInvalidValue);
  *exec = reinterpret_cast<cudaGraphExec_t>(new GraphPtr(copy_of(*graph_of(graph))));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(exec, graph, flags);
}
cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t) {
  PTXVM_ENTER(cudaGraphUpload, remember(cudaErrorUnknown));
  return exec ? cudaSuccess : remember(cudaErrorInvalidValue);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  PTXVM_ENTER(cudaGraphExecDestroy, remember(cudaErrorUnknown));
  if (!exec) return remember(cudaErrorInvalidValue);
  delete &graph_of(exec);
  return cudaSuccess;
}
// Launches under way keep what they began with.
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo *info) {
  PTXVM_ENTER(cudaGraphExecUpdate, remember(cudaErrorUnknown));
  if (!exec || !graph) return remember(cudaErrorInvalidValue);
  const Graph &old = *graph_of(exec), &now = *graph_of(graph);
  cudaGraphExecUpdateResultInfo result = {};
  result.result =
      old.nodes.size() == now.nodes.size() ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged;
  for (size_t k = 0; result.result == cudaGraphExecUpdateSuccess && k < now.nodes.size(); k++) {
    if (old.nodes[k].after != now.nodes[k].after) result.result = cudaGraphExecUpdateErrorTopologyChanged;
    else if (old.nodes[k].type != now.nodes[k].type) result.result = cudaGraphExecUpdateErrorNodeTypeChanged;
    if (result.result != cudaGraphExecUpdateSuccess) result.errorNode = handle_of(now, k);
  }
  if (info) *info = result;
  if (result.result != cudaGraphExecUpdateSuccess) return remember(cudaErrorGraphExecUpdateFailure);
  graph_of(exec) = copy_of(now);
  return cudaSuccess;
}
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const cudaKernelNodeParams *params) {
  PTXVM_ENTER(cudaGraphExecKernelNodeSetParams, remember(cudaErrorUnknown));
  if (!node_in(exec, node) || node_in(exec, node)->type != cudaGraphNodeTypeKernel)
    return remember(cudaErrorInvalidValue);
  GraphPtr fresh = copy_of(*graph_of(exec));
  graph_of(exec).swap(fresh);
  GraphNode *n = node_in(exec, node);
  return remember(kernel_work(params, &n->name, &n->work));
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  PTXVM_ENTER(cudaGraphLaunch, remember(cudaErrorUnknown));
  if (!exec) return remember(cudaErrorInvalidValue);
  auto run = std::make_shared<GraphRun>();
  run->graph = graph_of(exec);
  run->done.assign(run->graph->nodes.size(), false);
  run->left = run->done.size();
  return remember(enqueue(
      stream, "cudaGraphLaunch", [] {}, [run] { return run->advance(); }));
}

} // extern "C"
