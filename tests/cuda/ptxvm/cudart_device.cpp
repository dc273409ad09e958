// cudart: what the device says about itself, and the names of errors.
#include "device_memory.h"
#include "engine.h"
#include "runtime.h"
#include <cstring>

using namespace ptxvm;

static int attribute(cudaDeviceAttr which) {
  bool hopper = options().capability >= 90;
  switch (which) {
  case cudaDevAttrComputeCapabilityMajor: return options().capability / 10;
  case cudaDevAttrComputeCapabilityMinor: return options().capability % 10;
  case cudaDevAttrMultiProcessorCount: return kMultiprocessors;
  case cudaDevAttrMaxThreadsPerBlock: return 1024;
  case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
  case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
  case cudaDevAttrMaxBlockDimX:
  case cudaDevAttrMaxBlockDimY: return 1024;
  case cudaDevAttrMaxBlockDimZ: return 64;
  case cudaDevAttrMaxGridDimX: return 2147483647;
  case cudaDevAttrMaxGridDimY:
  case cudaDevAttrMaxGridDimZ: return 65535;
  case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: return hopper ? 232448 : 166912;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return hopper ? 233472 : 167936;
  case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
  case cudaDevAttrTotalConstantMemory: return 65536;
  case cudaDevAttrWarpSize: return kLanes;
  case cudaDevAttrMaxRegistersPerBlock:
  case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
  case cudaDevAttrL2CacheSize: return 1 << 25;
  case cudaDevAttrClockRate: return 1000000;
  case cudaDevAttrMemoryClockRate: return 1000000;
  case cudaDevAttrGlobalMemoryBusWidth: return 1024;
  case cudaDevAttrCooperativeLaunch:
  case cudaDevAttrHostRegisterSupported:
  case cudaDevAttrUnifiedAddressing:
  case cudaDevAttrManagedMemory:
  case cudaDevAttrConcurrentKernels:
  case cudaDevAttrCanMapHostMemory:
  case cudaDevAttrMemoryPoolsSupported:
  case cudaDevAttrStreamPrioritiesSupported:
  case cudaDevAttrCanUseHostPointerForRegisteredMem: return 1;
  case cudaDevAttrPageableMemoryAccess: return options().pageable;
  case cudaDevAttrAsyncEngineCount: return 2;
  default: return 0;
  }
}

extern "C" {

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int device) {
  PTXVM_ENTER(cudaDeviceGetAttribute, remember(cudaErrorUnknown));
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  *value = attribute(which);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
  PTXVM_ENTER(cudaGetDeviceProperties, remember(cudaErrorUnknown));
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  *p = cudaDeviceProp();
  strcpy(p->name, "ptxvm");
  p->totalGlobalMem = DeviceMemory::total_bytes();
  p->major = attribute(cudaDevAttrComputeCapabilityMajor);
  p->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->sharedMemPerBlock = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlock));
  p->sharedMemPerBlockOptin = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  p->sharedMemPerMultiprocessor = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = kLanes;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  p->unifiedAddressing = p->managedMemory = p->concurrentKernels = p->canMapHostMemory = 1;
  return cudaSuccess;
}
cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  return device < 0 || device >= device_count() ? remember(cudaErrorInvalidDevice) : cudaSuccess;
}
cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
cudaError_t cudaGetDeviceFlags(unsigned *flags) { return *flags = cudaDeviceScheduleAuto, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceReset(void) { return cudaDeviceSynchronize(); }
cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer && device < device_count() && peer < device_count();
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceDisablePeerAccess(int) { return cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : cudaGetErrorName(error);
}

} // extern "C"
