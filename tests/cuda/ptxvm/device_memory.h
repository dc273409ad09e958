// Device memory as two views of the same pages: the addresses that programs see are inaccessible to host code, and the
// engine works through an alias. Every allocation is known, and freed ones are remembered, so each access can be
// judged.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace ptxvm {

enum class MemoryKind { Device, PinnedHost, Managed };

struct Allocation {
  uint64_t base, size;
  int64_t alias_delta; // add to an address to get the pointer the engine uses
  MemoryKind kind;
  bool freed;
  int device;
  std::string what;
  bool pending = false; // allocated in the order of a stream that has not come to it
  bool owned = false;   // host memory that was allocated here, not registered
};

class DeviceMemory {
public:
  DeviceMemory();
  // Fresh memory is filled with 0xff, a NaN in every floating-point format. Returns 0 when memory is used up.
  uint64_t allocate(uint64_t size, const std::string &what, int device = 0);
  void set_pending(uint64_t base, bool pending) { table_.at(base).pending = pending; }
  bool release(uint64_t base); // false when `base` is not a live allocation
  void add_host(void *pointer, uint64_t size, MemoryKind kind, const std::string &what);
  bool remove_host(void *pointer); // registered memory; false for any other
  void *allocate_host(uint64_t size, MemoryKind kind, const std::string &what); // nullptr when there is no more
  bool release_host(void *pointer);

  const Allocation *find(uint64_t address) const; // live or freed, nullptr when there is none
  void *alias(uint64_t address) const {
    return reinterpret_cast<void *>(address + static_cast<uint64_t>(arena_delta_));
  }
  bool in_arena(uint64_t address) const { return address >= arena_ && address < arena_ + kArenaSize; }
  // Host memory that was never registered, where kernels may use that too.
  bool is_pageable(uint64_t address) const;
  // The pointer through which host code of this library may touch [address, address + size); nullptr if not all of it
  // is live memory. Host memory that was never registered is returned as it is.
  void *host_view(const void *pointer, uint64_t size) const;
  std::string describe(uint64_t address, uint64_t size) const; // for reports
  uint64_t bytes_in_use() const { return in_use_; }
  static constexpr uint64_t total_bytes() { return kCapacity; }

private:
  static constexpr uint64_t kArenaSize = 1ull << 40, kCapacity = 16ull << 30;

  uint64_t arena_ = 0, next_ = 0, in_use_ = 0;
  int64_t arena_delta_ = 0;
  int file_ = -1;
  uint64_t allocation_count_ = 0;
  std::map<uint64_t, Allocation> table_;
};

DeviceMemory &device_memory();

} // namespace ptxvm
