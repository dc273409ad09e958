// The run time's entry points beyond the everyday ones: shapes of copies and fills, pools, graphs built by hand,
// cooperative launches, and what the device says about itself. Two devices. With an argument: a planted fault.
#include "check.h"
#include <cooperative_groups.h>
#include <dlfcn.h>
#include <string>

static bool fails_with(cudaError_t got, cudaError_t expected) {
  if (got != expected) printf("%s instead of %s\n", cudaGetErrorName(got), cudaGetErrorName(expected));
  cudaGetLastError();
  return got == expected;
}
__global__ void set(int *p, int value) { p[threadIdx.x] = value; }
__global__ void scale(int *p, int factor) { p[threadIdx.x] *= factor; }

static void test_pitched() {
  const int rows = 5, columns = 7;
  char host[rows][columns], back[rows][columns] = {};
  for (int k = 0; k < rows * columns; k++) host[k / columns][k % columns] = (char)k;
  char *d;
  size_t pitch;
  CUDA(cudaMallocPitch(&d, &pitch, columns, rows));
  CHECK(pitch >= columns && pitch % 256 == 0);
  CUDA(cudaMemset2D(d, pitch, 1, pitch, rows));
  CUDA(cudaMemcpy2D(d, pitch, host, columns, columns, rows, cudaMemcpyHostToDevice));
  CUDA(cudaMemset2D(d + 2 * pitch, pitch, 99, 3, 2));
  CUDA(cudaMemcpy2D(back, columns, d, pitch, columns, rows, cudaMemcpyDeviceToHost));
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++)
      CHECK_AT(back[r][c] == ((r == 2 || r == 3) && c < 3 ? 99 : r * columns + c), r * columns + c);
  CHECK(fails_with(cudaMemcpy2D(back, columns - 1, d, pitch, columns, rows, cudaMemcpyDeviceToHost),
                   cudaErrorInvalidPitchValue));
  CHECK(fails_with(cudaMemset2D(d, columns, 0, columns + 1, rows), cudaErrorInvalidPitchValue));
  CUDA(cudaFree(d));
}

static void test_boxes() {
  const int w = 4, h = 3, z = 2;
  int host[z][h][w];
  for (int k = 0; k < w * h * z; k++) host[k / (w * h)][k / w % h][k % w] = k;
  cudaPitchedPtr box;
  CUDA(cudaMalloc3D(&box, make_cudaExtent(w * sizeof(int), h, z)));
  CUDA(cudaMemset3D(box, 0, make_cudaExtent(w * sizeof(int), h, z)));
  cudaMemcpy3DParms p = {};
  p.srcPtr = make_cudaPitchedPtr(host, w * sizeof(int), w, h);
  p.dstPtr = box;
  p.extent = make_cudaExtent(w * sizeof(int), h, z);
  p.kind = cudaMemcpyHostToDevice;
  CUDA(cudaMemcpy3D(&p));
  int part[h][2] = {}; // columns 1 and 2 of the second slice
  p = {};
  p.srcPtr = box;
  p.srcPos = make_cudaPos(sizeof(int), 0, 1);
  p.dstPtr = make_cudaPitchedPtr(part, 2 * sizeof(int), 2, h);
  p.extent = make_cudaExtent(2 * sizeof(int), h, 1);
  p.kind = cudaMemcpyDeviceToHost;
  CUDA(cudaMemcpy3DAsync(&p, 0));
  CUDA(cudaDeviceSynchronize());
  for (int y = 0; y < h; y++)
    for (int x = 0; x < 2; x++) CHECK_AT(part[y][x] == host[1][y][x + 1], y);
  CUDA(cudaMemset3DAsync(box, 0x11, make_cudaExtent(4, 1, 2), 0));
  int first;
  CUDA(cudaMemcpy(&first, (char *)box.ptr + box.pitch * box.ysize, 4, cudaMemcpyDeviceToHost));
  CHECK(first == 0x11111111);
  CUDA(cudaFree(box.ptr));
}

static void test_devices() {
  int count, value, can;
  CUDA(cudaGetDeviceCount(&count));
  CHECK(count == 2);
  cudaDeviceProp properties;
  CUDA(cudaGetDeviceProperties(&properties, 1));
  CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
  CHECK(properties.multiProcessorCount == value && properties.warpSize == 32 && properties.totalGlobalMem > 0);
  CHECK(fails_with(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 2), cudaErrorInvalidDevice));
  CUDA(cudaDeviceCanAccessPeer(&can, 0, 1));
  CHECK(can == 1);
  Device<int> a(std::vector<int>(32, 3));
  CUDA(cudaSetDevice(1));
  Device<int> b(std::vector<int>(32, 0));
  CUDA(cudaMemcpyPeer(b, 1, a, 0, 128));
  CHECK(b.host()[31] == 3);
  set<<<1, 32>>>(a, 9);
  CUDA(cudaMemcpyPeerAsync(b, 1, a, 0, 128, 0));
  CHECK(b.host()[31] == 9);
  cudaPointerAttributes where;
  CUDA(cudaPointerGetAttributes(&where, b.data + 5));
  CHECK(where.type == cudaMemoryTypeDevice && where.device == 1);
  CUDA(cudaSetDevice(0));
  CUDA(cudaPointerGetAttributes(&where, a.data));
  CHECK(where.type == cudaMemoryTypeDevice && where.device == 0 && where.devicePointer == a.data);
  int *pinned, local;
  CUDA(cudaHostAlloc(&pinned, 64, cudaHostAllocMapped));
  CUDA(cudaPointerGetAttributes(&where, pinned));
  CHECK(where.type == cudaMemoryTypeHost && where.hostPointer == pinned);
  unsigned flags;
  CUDA(cudaHostGetFlags(&flags, pinned));
  CUDA(cudaPointerGetAttributes(&where, &local));
  CHECK(where.type == cudaMemoryTypeUnregistered);
  CUDA(cudaFreeHost(pinned));
}

static void test_pools() {
  cudaMemPool_t pool, current;
  CUDA(cudaDeviceGetDefaultMemPool(&pool, 0));
  CUDA(cudaDeviceGetMemPool(&current, 0));
  CHECK(pool == current);
  uint64_t threshold = 1 << 20, read = 0;
  CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  CUDA(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &read));
  CHECK(read == threshold);
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  cudaMemPool_t own;
  CUDA(cudaMemPoolCreate(&own, &properties));
  cudaStream_t s;
  int least, greatest, priority;
  CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CUDA(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, greatest));
  CUDA(cudaStreamGetPriority(s, &priority));
  CHECK(priority == greatest);
  int *p, got;
  CUDA(cudaMallocFromPoolAsync(&p, 128, own, s));
  set<<<1, 32, 0, s>>>(p, 4);
  CUDA(cudaMemcpyAsync(&got, p + 3, 4, cudaMemcpyDeviceToHost, s));
  CHECK(got == 4);
  CUDA(cudaFreeAsync(p, s));
  CUDA(cudaStreamSynchronize(s));
  CUDA(cudaMemPoolTrimTo(own, 0));
  CUDA(cudaMemPoolDestroy(own));
  CHECK(fails_with(cudaMemPoolDestroy(pool), cudaErrorInvalidValue));
  int *managed;
  CUDA(cudaMallocManaged(&managed, 128));
  cudaMemLocation here = {cudaMemLocationTypeDevice, 0};
  CUDA(cudaMemAdvise(managed, 128, cudaMemAdviseSetPreferredLocation, here));
  CUDA(cudaMemPrefetchAsync(managed, 128, here, 0, s));
  set<<<1, 32, 0, s>>>(managed, 6);
  CUDA(cudaStreamSynchronize(s));
  CHECK(managed[7] == 6);
  CHECK(fails_with(cudaMemPrefetchAsync(managed, 129, here, 0, s), cudaErrorInvalidValue));
  CUDA(cudaFree(managed));
  CUDA(cudaStreamDestroy(s));
}

static cudaKernelNodeParams kernel_node(void *function, void **arguments) {
  cudaKernelNodeParams p = {};
  p.func = function;
  p.gridDim = dim3(1), p.blockDim = dim3(32);
  p.kernelParams = arguments;
  return p;
}

static void test_graphs() { // fill -> scale -> copy out -> host
  Device<int> x(32);
  int *result, three = 3, called = 0;
  CUDA(cudaMallocHost(&result, 128));
  void *arguments[] = {&x.data, &three};
  cudaGraph_t graph;
  CUDA(cudaGraphCreate(&graph, 0));
  cudaGraphNode_t fill, kernel, copy, host, empty;
  cudaMemsetParams to = {};
  to.dst = x, to.value = 7, to.elementSize = 4, to.width = 32, to.height = 1, to.pitch = 128;
  cudaKernelNodeParams launch = kernel_node((void *)scale, arguments);
  CUDA(cudaGraphAddKernelNode(&kernel, graph, nullptr, 0, &launch));
  CUDA(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &to));
  CUDA(cudaGraphAddDependencies(graph, &fill, &kernel, nullptr, 1));
  CUDA(cudaGraphAddMemcpyNode1D(&copy, graph, &kernel, 1, result, x, 128, cudaMemcpyDeviceToHost));
  CUDA(cudaGraphAddEmptyNode(&empty, graph, &copy, 1));
  cudaHostNodeParams call = {[](void *p) { ++*(int *)p; }, &called};
  CUDA(cudaGraphAddHostNode(&host, graph, &empty, 1, &call));
  three = 100; // arguments are taken when the node is added
  size_t count = 0;
  CUDA(cudaGraphGetNodes(graph, nullptr, &count));
  CHECK(count == 5);
  cudaGraphNode_t roots[5];
  CUDA(cudaGraphGetRootNodes(graph, roots, &count));
  CHECK(count == 1 && roots[0] == fill);
  cudaGraphNodeType type;
  CUDA(cudaGraphNodeGetType(copy, &type));
  CHECK(type == cudaGraphNodeTypeMemcpy);
  cudaGraphExec_t exec;
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int k = 0; k < 2; k++) CUDA(cudaGraphLaunch(exec, 0));
  CUDA(cudaDeviceSynchronize());
  CHECK(result[31] == 21 && called == 2);
  three = 5; // another argument, first in the executable graph alone
  CUDA(cudaGraphExecKernelNodeSetParams(exec, kernel, &launch));
  CUDA(cudaGraphLaunch(exec, 0));
  CUDA(cudaDeviceSynchronize());
  CHECK(result[0] == 35);
  three = 6; // then in the graph, which updates it
  CUDA(cudaGraphKernelNodeSetParams(kernel, &launch));
  cudaGraphExecUpdateResultInfo info;
  CUDA(cudaGraphExecUpdate(exec, graph, &info));
  CUDA(cudaGraphLaunch(exec, 0));
  CUDA(cudaDeviceSynchronize());
  CHECK(result[0] == 42 && info.result == cudaGraphExecUpdateSuccess);
  cudaGraph_t bigger;
  CUDA(cudaGraphClone(&bigger, graph));
  CUDA(cudaGraphAddEmptyNode(&empty, bigger, nullptr, 0));
  CHECK(fails_with(cudaGraphExecUpdate(exec, bigger, &info), cudaErrorGraphExecUpdateFailure));
  CHECK(info.result == cudaGraphExecUpdateErrorTopologyChanged);
  CUDA(cudaGraphAddDependencies(graph, &host, &fill, nullptr, 1)); // a cycle
  cudaGraphExec_t never;
  CHECK(fails_with(cudaGraphInstantiate(&never, graph, 0), cudaErrorInvalidValue));
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaGraphDestroy(bigger));
  CUDA(cudaFreeHost(result));
}

static void test_capture() { // pageable memory takes part: it is read and written when the graph runs
  cudaStream_t s;
  CUDA(cudaStreamCreate(&s));
  Device<int> x(1);
  int from = 1, to = 0;
  CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  CUDA(cudaMemcpyAsync(x, &from, 4, cudaMemcpyHostToDevice, s));
  scale<<<1, 1, 0, s>>>(x, 10);
  CUDA(cudaMemcpyAsync(&to, x, 4, cudaMemcpyDeviceToHost, s));
  cudaStreamCaptureStatus status;
  unsigned long long id = 0;
  CUDA(cudaStreamGetCaptureInfo(s, &status, &id));
  CHECK(status == cudaStreamCaptureStatusActive && id != 0);
  cudaGraph_t graph;
  CUDA(cudaStreamEndCapture(s, &graph));
  CHECK(to == 0);
  cudaGraphExec_t exec;
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (from = 2; from < 5; from++) {
    CUDA(cudaGraphLaunch(exec, s));
    CUDA(cudaStreamSynchronize(s));
    CHECK(to == 10 * from);
  }
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaStreamDestroy(s));
}

__global__ void neighbours(int *a, int *b,
                           int rounds) { // every block reads what others wrote before the grid's barrier
  cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  int n = gridDim.x * blockDim.x, i = grid.thread_rank();
  for (int r = 0; r < rounds; r++) {
    b[i] = a[(i + 1) % n] + 1;
    grid.sync();
    a[i] = b[(i + blockDim.x) % n];
    grid.sync();
  }
}

static void test_cooperative() {
  const int blocks = 6, threads = 64, n = blocks * threads, rounds = 5;
  std::vector<int> v(n), want(n), next(n);
  for (int i = 0; i < n; i++) v[i] = want[i] = i * i % 101;
  for (int r = 0; r < rounds; r++) {
    for (int i = 0; i < n; i++) next[i] = want[(i + 1) % n] + 1;
    for (int i = 0; i < n; i++) want[i] = next[(i + threads) % n];
  }
  Device<int> a(v), b(n);
  int r = rounds, resident;
  void *arguments[] = {&a.data, &b.data, &r};
  CUDA(cudaLaunchCooperativeKernel(neighbours, dim3(blocks), dim3(threads), arguments, 0, 0));
  CHECK(a.host() == want);
  CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, neighbours, 1024, 0));
  CHECK(resident == 2);
  CHECK(fails_with(cudaLaunchCooperativeKernel(neighbours, dim3(resident * 4 + 1), dim3(1024), arguments, 0, 0),
                   cudaErrorCooperativeLaunchTooLarge));
  CUDA(cudaFuncSetAttribute(neighbours, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000));
  CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, neighbours, 64, 100000));
  CHECK(resident == 2 || resident == 1);
  cudaFuncAttributes attributes;
  CUDA(cudaFuncGetAttributes(&attributes, neighbours));
  CHECK(attributes.maxDynamicSharedSizeBytes == 100000 && attributes.maxThreadsPerBlock == 1024);
}

static void test_streams() {
  Device<int> x(32);
  set<<<1, 32, 0, cudaStreamPerThread>>>(x, 5); // ordered with the default stream
  CHECK(x.host()[3] == 5);
  cudaEvent_t a, b;
  float milliseconds = -1;
  CUDA(cudaEventCreate(&a));
  CUDA(cudaEventCreate(&b));
  CUDA(cudaEventRecord(a, cudaStreamPerThread));
  CUDA(cudaEventRecord(b, cudaStreamPerThread));
  CHECK(cudaEventElapsedTime(&milliseconds, a, b) == cudaErrorNotReady);
  CUDA(cudaStreamSynchronize(cudaStreamPerThread));
  CUDA(cudaEventElapsedTime(&milliseconds, a, b));
  CHECK(milliseconds > 0);
  int called = 0;
  CUDA(cudaLaunchHostFunc(
      cudaStreamPerThread, [](void *p) { *(int *)p = 1; }, &called));
  CHECK(called == 0);
  CUDA(cudaDeviceSynchronize());
  CHECK(called == 1);
  CHECK(!strcmp(cudaGetErrorName(cudaErrorCooperativeLaunchTooLarge), "cudaErrorCooperativeLaunchTooLarge"));
  CHECK(dlsym(RTLD_DEFAULT, "cudaCreateTextureObject") != nullptr); // there, and says what it is when it is called
}

static int planted(const std::string &fault) {
  int *p;
  CUDA(cudaMalloc(&p, 256));
  if (fault == "missing") {
    cudaTextureObject_t texture;
    cudaCreateTextureObject(&texture, nullptr, nullptr, nullptr);
  } else if (fault == "overlap") {
    CUDA(cudaMemcpy(p, p + 1, 128, cudaMemcpyDeviceToDevice));
  } else if (fault == "overlap_rows") {
    CUDA(cudaMemcpy2D(p, 64, p + 1, 64, 8, 3, cudaMemcpyDeviceToDevice));
  } else if (fault == "row_past") {
    CUDA(cudaMemset2D(p, 100, 0, 80, 3));
  }
  printf("nothing was noticed\n");
  return 0;
}

int main(int argc, char **argv) {
  if (argc > 1) return planted(argv[1]);
  test_pitched(), test_boxes(), test_devices(), test_pools(), test_graphs(), test_capture(), test_cooperative();
  test_streams();
  return finish("api");
}
