/* A CUDA device: memory, events, graphs. */
#include "device_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_GRAPHS = 8 };

typedef struct cuda_device {
  bench_device base;
  void *flush; /* twice the cache */
  cudaGraphExec_t graph[MAX_GRAPHS];
  int num_graphs;
} cuda_device;

pmoe_status bench_cuda_status(cudaError_t error, const char *call) {
  if (error == cudaSuccess) return PMOE_OK;
  int length = (int)strcspn(call, "(");
  fprintf(stderr, "pmoe-bench: %.*s: %s: %s\n", length, call, cudaGetErrorName(error), cudaGetErrorString(error));
  return error == cudaErrorMemoryAllocation ? PMOE_ERR_NOMEM : PMOE_ERR_DEVICE;
}

/* ---- memory ---- */
static pmoe_status take(bench_device *device, size_t bytes, void **out) {
  (void)device;
  BENCH_CUDA_TRY(cudaMalloc(out, bytes ? bytes : 1));
  return PMOE_OK;
}

static void give_back(bench_device *device, void *p) {
  (void)device;
  (void)cudaFree(p);
}

static pmoe_status wait_for(bench_device *device) {
  BENCH_CUDA_TRY(cudaStreamSynchronize(bench_cuda_stream(device)));
  return PMOE_OK;
}

static pmoe_status copy(bench_device *device, void *to, const void *from, size_t bytes) {
  BENCH_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, bench_cuda_stream(device)));
  return wait_for(device);
}

static pmoe_status zero(bench_device *device, void *p, size_t bytes) {
  BENCH_CUDA_TRY(cudaMemsetAsync(p, 0, bytes, bench_cuda_stream(device)));
  return wait_for(device);
}

static pmoe_status move(bench_device *device, void *to, const void *from, size_t bytes) {
  BENCH_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, bench_cuda_stream(device)));
  return PMOE_OK;
}

/* ---- time ---- */
static void destroy_events(cudaEvent_t *event, int n) {
  for (int i = 0; i < n; i++)
    if (event[i]) (void)cudaEventDestroy(event[i]);
  free(event);
}

static pmoe_status create_events(int n, cudaEvent_t **out) {
  *out = calloc((size_t)n, sizeof **out);
  if (!*out) return PMOE_ERR_NOMEM;
  for (int i = 0; i < n; i++) BENCH_CUDA_TRY(cudaEventCreate(&(*out)[i]));
  return PMOE_OK;
}

/* The cache is emptied before the clock starts, which also lets the host run ahead of the device. */
static pmoe_status enqueue(cuda_device *d, const bench_op *op, int turn, cudaEvent_t begun, cudaEvent_t done) {
  cudaStream_t stream = bench_cuda_stream(&d->base);
  if (d->base.flush) BENCH_CUDA_TRY(cudaMemsetAsync(d->flush, turn & 0xff, 2 * d->base.cache_bytes, stream));
  BENCH_CUDA_TRY(cudaEventRecord(begun, stream));
  pmoe_status status = op->run(op->arg);
  if (status < 0) return status;
  BENCH_CUDA_TRY(cudaEventRecord(done, stream));
  return PMOE_OK;
}

static pmoe_status elapsed(cudaEvent_t begun, cudaEvent_t done, double *ms) {
  float value = 0;
  BENCH_CUDA_TRY(cudaEventElapsedTime(&value, begun, done));
  *ms = (double)value;
  return PMOE_OK;
}

static pmoe_status measure_with(cuda_device *d, const bench_options *o, bench_op *ops, int num_ops,
                                cudaEvent_t *event) {
  for (int i = 0; i < o->warmup + o->iters; i++)
    for (int j = 0; j < num_ops; j++) {
      cudaEvent_t *pair = event + 2 * ((i < o->warmup ? 0 : i - o->warmup) * num_ops + j);
      pmoe_status status = enqueue(d, &ops[j], i, pair[0], pair[1]);
      if (status < 0) return status;
    }
  pmoe_status status = wait_for(&d->base);
  for (int i = 0; i < o->iters && status == PMOE_OK; i++)
    for (int j = 0; j < num_ops && status == PMOE_OK; j++)
      status = elapsed(event[2 * (i * num_ops + j)], event[2 * (i * num_ops + j) + 1], &ops[j].ms[i]);
  return status;
}

static pmoe_status measure(bench_device *device, const bench_options *o, bench_op *ops, int num_ops) {
  cudaEvent_t *event = NULL;
  int n = 2 * num_ops * o->iters;
  pmoe_status status = create_events(n, &event);
  if (status == PMOE_OK) status = measure_with((cuda_device *)device, o, ops, num_ops, event);
  if (event) destroy_events(event, n);
  return status;
}

static pmoe_status train(bench_device *device, const bench_op *ops, int num_ops, int iters, double *ms) {
  cudaEvent_t *event = NULL;
  cudaStream_t stream = bench_cuda_stream(device);
  pmoe_status status = create_events(2, &event);
  if (status == PMOE_OK) status = bench_cuda_status(cudaEventRecord(event[0], stream), "cudaEventRecord");
  for (int i = 0; i < iters && status == PMOE_OK; i++)
    for (int j = 0; j < num_ops && status == PMOE_OK; j++) status = ops[j].run(ops[j].arg);
  if (status == PMOE_OK) status = bench_cuda_status(cudaEventRecord(event[1], stream), "cudaEventRecord");
  if (status == PMOE_OK) status = wait_for(device);
  if (status == PMOE_OK) status = elapsed(event[0], event[1], ms);
  *ms /= iters;
  if (event) destroy_events(event, 2);
  return status;
}

/* ---- graphs ---- */
static pmoe_status capture(bench_device *device, pmoe_status (*run)(void *arg), void *arg, void **graph) {
  cuda_device *d = (cuda_device *)device;
  if (d->num_graphs == MAX_GRAPHS) return PMOE_ERR_STATE;
  cudaStream_t stream = bench_cuda_stream(device);
  cudaGraph_t captured = NULL;
  BENCH_CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  pmoe_status status = run(arg),
              ended = bench_cuda_status(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
  if (status == PMOE_OK) status = ended;
  cudaGraphExec_t exec = NULL;
  if (status == PMOE_OK) status = bench_cuda_status(cudaGraphInstantiate(&exec, captured, 0), "cudaGraphInstantiate");
  if (captured) (void)cudaGraphDestroy(captured);
  if (status < 0) return status;
  d->graph[d->num_graphs++] = exec;
  *graph = exec;
  return PMOE_OK;
}

static pmoe_status launch(bench_device *device, void *graph) {
  BENCH_CUDA_TRY(cudaGraphLaunch((cudaGraphExec_t)graph, bench_cuda_stream(device)));
  return PMOE_OK;
}

/* ---- opening and closing ---- */
static void close_device(bench_device *device) {
  cuda_device *d = (cuda_device *)device;
  for (int i = 0; i < d->num_graphs; i++) (void)cudaGraphExecDestroy(d->graph[i]);
  if (device->stream) (void)cudaStreamDestroy(bench_cuda_stream(device));
  (void)cudaFree(d->flush);
  free(d);
}

static pmoe_status open_device(cuda_device *d) {
  int number, l2 = 0;
  BENCH_CUDA_TRY(cudaGetDevice(&number));
  BENCH_CUDA_TRY(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, number));
  struct cudaDeviceProp properties;
  BENCH_CUDA_TRY(cudaGetDeviceProperties(&properties, number));
  snprintf(d->base.name, sizeof d->base.name, "%.90s", properties.name);
  d->base.cache_bytes = (size_t)l2;
  BENCH_CUDA_TRY(cudaMalloc(&d->flush, 2 * (size_t)l2 + 1));
  cudaStream_t stream;
  BENCH_CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  d->base.stream = stream;
  return PMOE_OK;
}

/* Creating the context has made its device this thread's. */
pmoe_status bench_device_open(pmoe_ctx *ctx, bench_device **out) {
  (void)ctx;
  cuda_device *d = calloc(1, sizeof *d);
  if (!d) return PMOE_ERR_NOMEM;
  bench_device *b = &d->base;
  b->take = take, b->give_back = give_back, b->copy = copy, b->zero = zero, b->wait = wait_for, b->move = move;
  b->measure = measure, b->train = train, b->capture = capture, b->launch = launch;
  b->products = bench_cuda_products, b->close = close_device;
  pmoe_status status = open_device(d);
  if (status < 0) close_device(b);
  else *out = b;
  return status;
}
