// The host side: late streams, events, copies, capture and graphs, and failures on demand. Under any stream seed.
#include "check.h"
#include <atomic>
#include <string>

extern "C" void ptxvm_fail_call(const char *name, int n);
extern "C" long ptxvm_calls(const char *name);

__global__ void set(int *p, int value) { p[threadIdx.x] = value; }
__global__ void add(const int *a, int *b) { b[threadIdx.x] += a[threadIdx.x]; }
__global__ void doubled(int *p) { p[threadIdx.x] *= 2; }

static cudaStream_t stream(unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t s;
  CUDA(cudaStreamCreateWithFlags(&s, flags));
  return s;
}
static cudaEvent_t event() {
  cudaEvent_t e;
  CUDA(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  return e;
}
static bool fails_with(cudaError_t got, cudaError_t expected) {
  if (got != expected) printf("%s instead of %s\n", cudaGetErrorName(got), cudaGetErrorName(expected));
  cudaGetLastError();
  return got == expected;
}

static void test_lateness() {
  int *pinned;
  CUDA(cudaMallocHost(&pinned, 128));
  memset(pinned, 0, 128);
  cudaStream_t s = stream();
  set<<<1, 32, 0, s>>>(pinned, 7);
  CHECK(pinned[0] == 0); // nothing has waited yet
  CHECK(cudaStreamQuery(s) == cudaSuccess || cudaStreamQuery(s) == cudaSuccess);
  CHECK(pinned[31] == 7);
  Device<int> d(32);
  CUDA(cudaMemcpyAsync(d, pinned, 128, cudaMemcpyHostToDevice, s)); // pinned: read when it runs
  pinned[3] = 9;
  CUDA(cudaStreamSynchronize(s));
  CHECK(d.host()[3] == 9);
  int pageable[32];
  for (int &x : pageable) x = 5;
  CUDA(cudaMemcpyAsync(d, pageable, 128, cudaMemcpyHostToDevice, s)); // pageable: read at the call
  pageable[0] = 6;
  CUDA(cudaStreamSynchronize(s));
  CHECK(d.host()[0] == 5);
  CUDA(cudaStreamDestroy(s));
  CUDA(cudaFreeHost(pinned));
}

static void test_fresh_memory() {
  Device<float> f(100);
  for (float x : f.host()) CHECK(x != x);
}

static void test_events() {
  cudaStream_t a = stream(), b = stream();
  cudaEvent_t e = event(), back = event();
  Device<int> x(std::vector<int>(32, 0)), y(std::vector<int>(32, 0));
  CUDA(cudaDeviceSynchronize());
  for (int k = 1; k <= 10; k++) {
    set<<<1, 32, 0, a>>>(x, k);
    CUDA(cudaEventRecord(e, a));
    CUDA(cudaStreamWaitEvent(b, e, 0));
    add<<<1, 32, 0, b>>>(x, y);
    CUDA(cudaEventRecord(back, b));
    CUDA(cudaStreamWaitEvent(a, back, 0));
  }
  CHECK(cudaEventQuery(back) == cudaErrorNotReady);
  cudaGetLastError();
  CUDA(cudaEventSynchronize(back));
  CHECK(y.host()[0] == 55);
  CUDA(cudaEventDestroy(e));
  CUDA(cudaStreamDestroy(a));
  CUDA(cudaStreamDestroy(b));
}

static void test_event_recorded_again() { // a wait is for the record before it, whatever comes to a later one first
  cudaStream_t writer = stream(), reader = stream(), other = stream();
  cudaEvent_t written = event();
  Device<int> a(32), b(32);
  CUDA(cudaMemsetAsync(a, 0, 128, writer));
  for (int i = 0; i < 20; i++) set<<<1, 32, 0, writer>>>(a, i);
  CUDA(cudaEventRecord(written, writer));
  CUDA(cudaStreamWaitEvent(reader, written, 0));
  CUDA(cudaMemcpyAsync(b, a, 128, cudaMemcpyDeviceToDevice, reader));
  CUDA(cudaEventRecord(written, other));
  CUDA(cudaStreamSynchronize(other));
  CUDA(cudaStreamSynchronize(reader));
  int got[32];
  CUDA(cudaMemcpy(got, b, 128, cudaMemcpyDeviceToHost));
  CHECK(got[0] == 19 && got[31] == 19);
}

static void test_legacy_order() { // the default stream and blocking streams wait for each other
  cudaStream_t s = stream(cudaStreamDefault);
  Device<int> x(32);
  set<<<1, 32, 0, s>>>(x, 3);
  doubled<<<1, 32>>>(x);
  doubled<<<1, 32, 0, s>>>(x);
  doubled<<<1, 32>>>(x);
  CHECK(x.host()[5] == 24);
  CUDA(cudaStreamDestroy(s));
}

static void test_callbacks() {
  static int order[3], count;
  cudaStream_t s = stream();
  for (int k = 0; k < 3; k++)
    CUDA(cudaLaunchHostFunc(
        s, [](void *p) { order[count++] = (int)(size_t)p; }, (void *)(size_t)k));
  CHECK(count == 0);
  CUDA(cudaStreamSynchronize(s));
  CHECK(count == 3 && order[0] == 0 && order[2] == 2);
  void *p;
  CUDA(cudaMallocAsync(&p, 128, s));
  set<<<1, 32, 0, s>>>((int *)p, 1);
  CUDA(cudaFreeAsync(p, s));
  CUDA(cudaStreamSynchronize(s));
  cudaStream_t other = stream();
  cudaEvent_t e = event();
  CUDA(cudaMallocAsync(&p, 128, s));
  CUDA(cudaEventRecord(e, s));
  CUDA(cudaStreamWaitEvent(other, e, 0));
  set<<<1, 32, 0, other>>>((int *)p, 1);
  CUDA(cudaEventRecord(e, other));
  CUDA(cudaStreamWaitEvent(s, e, 0));
  CUDA(cudaFreeAsync(p, s));
  CUDA(cudaStreamSynchronize(s));
  CUDA(cudaStreamDestroy(s));
}

static void test_graph() {
  cudaStream_t a = stream(), b = stream();
  cudaEvent_t fork = event(), join = event();
  Device<int> x(std::vector<int>(32, 1)), y(std::vector<int>(32, 0));
  CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
  doubled<<<1, 32, 0, a>>>(x);
  CUDA(cudaEventRecord(fork, a));
  CUDA(cudaStreamWaitEvent(b, fork, 0));
  add<<<1, 32, 0, b>>>(x, y);
  CUDA(cudaEventRecord(join, b));
  CUDA(cudaStreamWaitEvent(a, join, 0));
  add<<<1, 32, 0, a>>>(y, x);
  cudaStreamCaptureStatus status;
  CUDA(cudaStreamIsCapturing(b, &status));
  CHECK(status == cudaStreamCaptureStatusActive);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamEndCapture(a, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  size_t nodes;
  CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
  CHECK(nodes == 3);
  CUDA(cudaDeviceSynchronize());
  CHECK(x.host()[0] == 1); // captured, not run
  for (int k = 0; k < 3; k++) CUDA(cudaGraphLaunch(exec, a));
  CUDA(cudaStreamSynchronize(a));
  int hx = 1, hy = 0;
  for (int k = 0; k < 3; k++) hx *= 2, hy += hx, hx += hy;
  CHECK(x.host()[0] == hx && y.host()[31] == hy);
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
}

// What CUDA refuses while a stream is captured; each refusal also spoils the capture.
template <class F> static void refused(cudaError_t expected, F call) {
  cudaStream_t s = stream(cudaStreamDefault);
  Device<int> x(32);
  cudaGraph_t graph;
  CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  set<<<1, 32, 0, s>>>(x, 1);
  CHECK(fails_with(call(s, x.data), expected));
  set<<<1, 32, 0, s>>>(x, 1);
  CHECK(fails_with(cudaGetLastError(), cudaErrorStreamCaptureInvalidated));
  CHECK(fails_with(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated));
  CHECK(graph == nullptr);
  CUDA(cudaStreamDestroy(s));
}

static void test_refusals() {
  refused(cudaErrorStreamCaptureUnsupported, [](cudaStream_t s, int *) { return cudaStreamSynchronize(s); });
  refused(cudaErrorStreamCaptureUnsupported, [](cudaStream_t s, int *) { return cudaStreamQuery(s); });
  refused(cudaErrorStreamCaptureUnsupported, [](cudaStream_t, int *) { return cudaDeviceSynchronize(); });
  refused(cudaErrorStreamCaptureUnsupported, [](cudaStream_t, int *) {
    void *p;
    return cudaMalloc(&p, 16);
  });
  refused(cudaErrorStreamCaptureUnsupported, [](cudaStream_t, int *x) { return cudaFree(x); });
  refused(cudaErrorStreamCaptureImplicit, [](cudaStream_t, int *x) {
    int h;
    return cudaMemcpy(&h, x, 4, cudaMemcpyDeviceToHost);
  });
  refused(cudaErrorStreamCaptureImplicit, [](cudaStream_t, int *x) {
    set<<<1, 32>>>(x, 1);
    return cudaGetLastError();
  });
  refused(cudaErrorStreamCaptureIsolation, [](cudaStream_t s, int *) {
    cudaEvent_t e = event();
    return cudaStreamWaitEvent(s, e, 0);
  });
  refused(cudaErrorCapturedEvent, [](cudaStream_t s, int *) {
    cudaEvent_t e = event();
    cudaEventRecord(e, s);
    return cudaEventSynchronize(e);
  });
  cudaGraph_t graph;
  cudaStream_t a = stream(), b = stream();
  void *allowed; // what relaxed capture does allow
  CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
  CUDA(cudaMalloc(&allowed, 16));
  CUDA(cudaStreamEndCapture(a, &graph));
  CUDA(cudaGraphDestroy(graph));
  CHECK(fails_with(cudaStreamEndCapture(a, &graph), cudaErrorIllegalState));
  CHECK(fails_with(cudaStreamBeginCapture(0, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported));
  cudaEvent_t e = event();
  Device<int> x(32);
  CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
  CUDA(cudaEventRecord(e, a));
  CUDA(cudaStreamWaitEvent(b, e, 0));
  set<<<1, 32, 0, b>>>(x, 1); // never joined
  CHECK(fails_with(cudaStreamEndCapture(b, &graph), cudaErrorStreamCaptureUnmatched));
  CHECK(fails_with(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureUnjoined));
}

static void test_failures() {
  void *p;
  ptxvm_fail_call("cudaMalloc", 2);
  CUDA(cudaMalloc(&p, 16));
  CUDA(cudaFree(p));
  CHECK(fails_with(cudaMalloc(&p, 16), cudaErrorMemoryAllocation));
  CUDA(cudaMalloc(&p, 16));
  ptxvm_fail_call("*", 1);
  CHECK(cudaMemset(p, 0, 16) != cudaSuccess);
  cudaGetLastError();
  ptxvm_fail_call("cudaLaunchKernel", 1);
  set<<<1, 4>>>((int *)p, 1);
  CHECK(fails_with(cudaGetLastError(), cudaErrorLaunchOutOfResources));
  ptxvm_fail_call("", 0);
  CHECK(ptxvm_calls("cudaMalloc") > 3);
  set<<<1, 2000>>>((int *)p, 1);
  CHECK(fails_with(cudaGetLastError(), cudaErrorInvalidConfiguration));
  set<<<1, 32, 60000>>>((int *)p, 1); // more than 48 KiB has to be asked for
  CHECK(fails_with(cudaGetLastError(), cudaErrorInvalidValue));
  CUDA(cudaFuncSetAttribute(set, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000));
  set<<<1, 4, 60000>>>((int *)p, 1);
  CUDA(cudaGetLastError());
  CUDA(cudaFree(p));
  CHECK(fails_with(cudaFree(p), cudaErrorInvalidValue));
  int h = 0;
  Device<int> d(1);
  CHECK(fails_with(cudaMemcpy(&h, d, 4, cudaMemcpyHostToDevice), cudaErrorInvalidMemcpyDirection));
}

// Planted faults, each run on its own.
static int planted(const std::string &fault) {
  cudaStream_t a = stream(), b = stream();
  Device<int> x(std::vector<int>(32, 0)), y(std::vector<int>(32, 0));
  CUDA(cudaDeviceSynchronize());
  int *late;
  cudaEvent_t ready = event();
  if (fault == "missing_event") { // between producer and consumer
    set<<<1, 32, 0, a>>>(x, 1);
    add<<<1, 32, 0, b>>>(x, y);
  } else if (fault == "allocated_elsewhere") { // nothing orders b after the allocation in a
    CUDA(cudaMallocAsync(&late, 128, a));
    set<<<1, 32, 0, b>>>(late, 1);
  } else if (fault == "copied_elsewhere") {
    CUDA(cudaMallocAsync(&late, 128, a));
    CUDA(cudaMemcpyAsync(late, x, 128, cudaMemcpyDeviceToDevice, b));
  } else if (fault == "two_copies") { // either may be last
    CUDA(cudaMemcpyAsync(y, x, 128, cudaMemcpyDeviceToDevice, a));
    CUDA(cudaMemsetAsync(y, 1, 128, b));
  } else if (fault == "freed_elsewhere") { // b may still use it
    CUDA(cudaMallocAsync(&late, 128, a));
    CUDA(cudaEventRecord(ready, a));
    CUDA(cudaStreamWaitEvent(b, ready, 0));
    set<<<1, 32, 0, b>>>(late, 1);
    CUDA(cudaFreeAsync(late, a));
  } else if (fault == "quits") { // found although the program ends without waiting, and without its exit handlers
    set<<<1, 32, 0, a>>>(x, 1);
    add<<<1, 32, 0, b>>>(x, y);
    _Exit(0);
  } else if (fault == "quits_quickly") {
    set<<<1, 33, 0, a>>>(x, 1);
    quick_exit(0);
  } else if (fault == "leaves") {
    set<<<1, 32, 0, a>>>(x, 1);
    add<<<1, 32, 0, b>>>(x, y);
    exit(0);
  }
  CUDA(cudaDeviceSynchronize());
  CHECK(y.host()[0] == 1);
  return finish("missing event");
}

int main(int argc, char **argv) {
  if (argc > 1) return planted(argv[1]);
  test_lateness(), test_fresh_memory(), test_events(), test_event_recorded_again(), test_legacy_order(),
      test_callbacks(), test_graph(), test_refusals(), test_failures();
  return finish("streams");
}
