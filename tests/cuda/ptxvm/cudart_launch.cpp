// cudart: the entry points that nvcc's host code calls to register its PTX and to launch kernels.
#include "engine.h"
#include "launch.h"
#include "report.h"
#include <cstring>
#include <unordered_map>

using namespace ptxvm;

namespace {

struct FatBinaryWrapper {
  int magic, version;
  const char *data;
  void *unused;
};

struct Kernel {
  const Function *function;
  int max_dynamic_shared = 48 * 1024;
  int ptx_version;
};

struct Registered { // of one host object
  std::unique_ptr<Module> module;
  int ptx_version = 0;
};

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

std::unordered_map<const void *, Kernel> &kernels() {
  static auto *map = new std::unordered_map<const void *, Kernel>;
  return *map;
}

thread_local std::vector<Configuration> configurations;

int target_of(const std::string &ptx) {
  size_t at = ptx.find(".target sm_");
  return at == std::string::npos ? 0 : atoi(ptx.c_str() + at + 11);
}

// Takes the PTX for the newest architecture that the device runs.
void load(const char *data, Registered &registered) {
  uint16_t header;
  uint64_t size;
  memcpy(&header, data + 6, sizeof header);
  memcpy(&size, data + 8, sizeof size);
  const char *at = data + header, *end = at + size;
  std::string best;
  bool compressed = false;
  while (at < end) {
    uint16_t kind;
    uint32_t entry_header;
    uint64_t entry_size, flags;
    memcpy(&kind, at, sizeof kind);
    memcpy(&entry_header, at + 4, sizeof entry_header);
    memcpy(&entry_size, at + 8, sizeof entry_size);
    memcpy(&flags, at + 40, sizeof flags);
    if (kind == 1) {
      const char *text = at + entry_header;
      compressed |= (flags & 0xa000) != 0;
      std::string ptx = flags & 0xa000 ? "" : std::string(text, strnlen(text, entry_size));
      int target = target_of(ptx);
      if (target && target <= options().capability && target > registered.ptx_version)
        best = ptx, registered.ptx_version = target;
    }
    at += entry_header + entry_size;
  }
  if (best.empty())
    stop(compressed
             ? "the PTX is compressed: compile with nvcc --no-compress"
             : "an object holds no PTX that capability %d runs: compile with -gencode arch=compute_80,code=compute_80",
         options().capability);
  try {
    registered.module = parse_module(std::move(best));
  } catch (const ParseError &error) {
    stop("%s", error.what());
  }
}

int max_shared() { return options().capability >= 90 ? 232448 : 166912; }

Program *program_for(const Kernel &kernel) {
  try {
    return program_of(kernel.function);
  } catch (const ParseError &error) {
    stop("%s", error.what());
  }
}

// How many blocks a multiprocessor holds at once.
int resident_blocks(const Kernel &kernel, int threads, size_t shared) {
  size_t each = program_for(kernel)->static_shared + shared + 1024;
  int by_shared = static_cast<int>(static_cast<size_t>(max_shared()) / each);
  return std::min(std::min(32, 2048 / ((threads + 31) / 32 * 32)), by_shared);
}

// Zeroed once; the barrier in it is left ready for the next launch.
uint64_t grid_workspace() {
  static uint64_t address = 0;
  if (!address) {
    address = device_memory().allocate(64, "the grid barrier of cooperative kernels");
    memset(device_memory().alias(address), 0, 64);
  }
  return address;
}

} // namespace

cudaError_t ptxvm::prepare_launch(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                                  bool cooperative, std::string *name, Work *work) {
  auto it = kernels().find(host);
  if (it == kernels().end()) return cudaErrorInvalidDeviceFunction;
  const Kernel &kernel = it->second;
  const Function &function = *kernel.function;
  uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (!threads || threads > 1024 || block.z > 64 || !grid.x || !grid.y || !grid.z || grid.x > 2147483647u ||
      grid.y > 65535 || grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  if (threads > static_cast<uint64_t>(function.max_threads)) return cudaErrorInvalidValue;
  Program *program = program_for(kernel);
  if (shared > static_cast<size_t>(kernel.max_dynamic_shared) ||
      program->static_shared + shared > static_cast<size_t>(max_shared()))
    return cudaErrorInvalidValue;
  std::vector<uint8_t> params(static_cast<size_t>(function.param_size), 0);
  for (size_t k = 0; k < function.params.size(); k++)
    memcpy(params.data() + function.params[k].offset, arguments[k], static_cast<size_t>(function.params[k].size));
  Dim g{grid.x, grid.y, grid.z}, b{block.x, block.y, block.z};
  if (cooperative && g.count() > static_cast<uint64_t>(kMultiprocessors) *
                                     static_cast<uint64_t>(resident_blocks(kernel, static_cast<int>(threads), shared)))
    return cudaErrorCooperativeLaunchTooLarge;
  *name = function.name;
  uint64_t workspace = cooperative ? grid_workspace() : 0;
  *work = [=] { run_launch(*program, g, b, shared, params, workspace); };
  return cudaSuccess;
}

static cudaError_t launch(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, bool cooperative,
                          cudaStream_t stream) {
  std::string name;
  Work work;
  cudaError_t error = prepare_launch(host, grid, block, arguments, shared, cooperative, &name, &work);
  return error ? error : enqueue(stream, name.c_str(), std::move(work));
}

extern "C" {

void **__cudaRegisterFatBinary(void *wrapper) {
  std::lock_guard<RuntimeLock> lock(runtime_lock());
  auto *registered = new Registered;
  load(static_cast<FatBinaryWrapper *>(wrapper)->data, *registered);
  return reinterpret_cast<void **>(registered);
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
char __cudaInitModule(void **) { return 1; }

void __cudaRegisterFunction(void **handle, const char *host, char *, const char *name, int, uint3 *, uint3 *, dim3 *,
                            dim3 *, int *) {
  std::lock_guard<RuntimeLock> lock(runtime_lock());
  auto *registered = reinterpret_cast<Registered *>(handle);
  const Function *function = registered->module->find(name);
  if (!function) stop("kernel %s is not in the PTX", name);
  kernels()[host] = {function, 48 * 1024, registered->ptx_version};
}
void __cudaRegisterVar(void **handle, char *host, char *, const char *name, int, size_t size, int, int) {
  std::lock_guard<RuntimeLock> lock(runtime_lock());
  auto *registered = reinterpret_cast<Registered *>(handle);
  auto it = registered->module->symbol_named.find(name);
  if (it != registered->module->symbol_named.end()) register_symbol(host, it->second->address, size);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  Configuration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid, *block = c.block, *shared = c.shared;
  *static_cast<cudaStream_t *>(stream) = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(host));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  PTXVM_ENTER(cudaLaunchKernel, remember(cudaErrorLaunchOutOfResources));
  return remember(launch(host, grid, block, arguments, shared, false, stream));
}
cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
  PTXVM_ENTER(cudaLaunchCooperativeKernel, remember(cudaErrorLaunchOutOfResources));
  return remember(launch(host, grid, block, arguments, shared, true, stream));
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments) {
  bool cooperative = false;
  for (unsigned k = 0; k < config->numAttrs; k++) {
    const cudaLaunchAttribute &attribute = config->attrs[k];
    auto d = attribute.val.clusterDim;
    if (attribute.id == cudaLaunchAttributeClusterDimension && d.x * d.y * d.z > 1) stop("clusters are not supported");
    if (attribute.id == cudaLaunchAttributeCooperative) cooperative = attribute.val.cooperative;
  }
  auto how = cooperative ? cudaLaunchCooperativeKernel : cudaLaunchKernel;
  return how(host, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *host) {
  PTXVM_ENTER(cudaFuncGetAttributes, remember(cudaErrorUnknown));
  auto it = kernels().find(host);
  if (it == kernels().end()) return remember(cudaErrorInvalidDeviceFunction);
  *attributes = cudaFuncAttributes();
  attributes->ptxVersion = attributes->binaryVersion = it->second.ptx_version;
  attributes->maxThreadsPerBlock = it->second.function->max_threads;
  attributes->sharedSizeBytes = program_for(it->second)->static_shared;
  attributes->localSizeBytes = program_for(it->second)->entry->local_size;
  attributes->maxDynamicSharedSizeBytes = it->second.max_dynamic_shared;
  attributes->numRegs = 32;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *host, cudaFuncAttribute attribute, int value) {
  PTXVM_ENTER(cudaFuncSetAttribute, remember(cudaErrorUnknown));
  auto it = kernels().find(host);
  if (it == kernels().end()) return remember(cudaErrorInvalidDeviceFunction);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > max_shared()) return remember(cudaErrorInvalidValue);
  it->second.max_dynamic_shared = value;
  return cudaSuccess;
}
cudaError_t cudaFuncSetCacheConfig(const void *, cudaFuncCache) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int threads,
                                                                   size_t shared, unsigned) {
  PTXVM_ENTER(cudaOccupancyMaxActiveBlocksPerMultiprocessor, remember(cudaErrorUnknown));
  auto it = kernels().find(host);
  if (it == kernels().end()) return remember(cudaErrorInvalidDeviceFunction);
  if (threads < 1 || threads > 1024) return remember(cudaErrorInvalidValue);
  *blocks = resident_blocks(it->second, threads, shared);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, threads, shared, 0);
}

} // extern "C"
