// The host side: streams, events and capture, and what fakes of other CUDA libraries need from it.
//
// A stream is a queue that runs only when somebody waits for it, so everything is as late as CUDA allows. Whenever
// there is a choice between streams, a seeded generator makes it; PTXVM_STREAM_SEED sets the seed.
#pragma once
#include <cstdint>
#include <cuda_runtime_api.h>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ptxvm {

// Held by every entry point, some of which call others; waiting releases it, however often it is held.
class RuntimeLock {
public:
  void lock() { mutex_.lock(), depth_++; }
  void unlock() { depth_--, mutex_.unlock(); }
  void run_released(const std::function<void()> &f); // by the holder, however often it is held
  void sleep_released();

private:
  std::recursive_mutex mutex_;
  int depth_ = 0;
};
RuntimeLock &runtime_lock();

using Work = std::function<void()>;
using Ready = std::function<bool()>; // may the work run now? Asked again and again, only while it heads its queue.

// Puts work into a stream, or into the graph the stream is being captured into.
cudaError_t enqueue(cudaStream_t stream, const char *name, Work work, Ready ready = nullptr);
// Runs queued work, of any stream, until `done`. Nothing to run and nobody else to wait for is a deadlock.
void run_until(const std::function<bool()> &done, const char *why);
cudaError_t wait_for_stream(cudaStream_t stream);
bool is_known_stream(cudaStream_t stream);
bool is_capturing(cudaStream_t stream);
int device_of(cudaStream_t stream);
int current_device();
int device_count();

// Calls that capture forbids. Returns an error, and breaks the capture, when one is under way that this thread may
// harm.
cudaError_t refuse_under_capture(const char *name);
cudaError_t refuse_in_capture(cudaStream_t stream); // work that a captured stream cannot take, in whatever mode

// Fault injection: the n-th call of `name` ("*": of any function) fails. From PTXVM_FAIL=name:n or set by a test.
bool injected_failure(const char *name);
extern "C" void ptxvm_fail_call(const char *name, int n); // n = 0 clears
extern "C" long ptxvm_calls(const char *name);            // how often it was called

// The pointer through which the fakes reach memory that a program names; reports a fault when it is not all live.
void *view(const void *pointer, size_t size, const char *who);
// The same inside queued work: `pointer` must be memory the device reaches, and the race detector learns of the access.
const void *device_read(const void *pointer, size_t size, const char *who);
void *device_write(void *pointer, size_t size, const char *who);
bool is_pinned_or_device(const void *pointer);

cudaError_t remember(cudaError_t error); // for cudaGetLastError

// How every entry point begins: takes the lock and fails if it is told to.
#define PTXVM_ENTER(name, error)                                                                                       \
  std::lock_guard<::ptxvm::RuntimeLock> ptxvm_guard(::ptxvm::runtime_lock());                                          \
  if (::ptxvm::injected_failure(#name)) return error

} // namespace ptxvm
