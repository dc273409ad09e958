#include "device_memory.h"
#include "engine.h"
#include "ptx.h"
#include "report.h"
#include <cinttypes>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace ptxvm {

static constexpr uint64_t kAlign = 256, kGap = 256, kPage = 4096;

// Host code that touches device memory ends here; any other segmentation fault keeps its usual meaning.
static void on_segmentation_fault(int signal, siginfo_t *info, void *) {
  uint64_t address = reinterpret_cast<uint64_t>(info->si_addr);
  if (device_memory().in_arena(address))
    stop("host code accesses device memory: %s", device_memory().describe(address, 1).c_str());
  const Allocation *a = device_memory().find(address);
  if (a && a->freed) stop("use after free by host code: %s", device_memory().describe(address, 1).c_str());
  ::signal(signal, SIG_DFL);
  raise(signal);
}

DeviceMemory::DeviceMemory() {
  file_ = memfd_create("ptxvm", MFD_CLOEXEC);
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(kArenaSize)) != 0) stop("cannot create device memory");
  void *visible = mmap(nullptr, kArenaSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void *alias = mmap(nullptr, kArenaSize, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (visible == MAP_FAILED || alias == MAP_FAILED) stop("cannot map device memory");
  arena_ = next_ = reinterpret_cast<uint64_t>(visible);
  arena_delta_ = static_cast<int64_t>(reinterpret_cast<uint64_t>(alias) - arena_);
  struct sigaction action = {};
  action.sa_sigaction = on_segmentation_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
}

uint64_t DeviceMemory::allocate(uint64_t size, const std::string &what, int device) {
  // Addresses are never used again: a stale pointer stays recognisable, and address space is plentiful.
  if (size > kCapacity - in_use_ || next_ + size + kGap > arena_ + kArenaSize) return 0;
  uint64_t base = next_;
  next_ = align_up(next_ + size + kGap, kAlign);
  in_use_ += size;
  std::string name = what.empty() ? "allocation " + std::to_string(++allocation_count_) : what;
  table_[base] = {base, size, arena_delta_, MemoryKind::Device, false, device, name};
  memset(alias(base), 0xff, size);
  return base;
}

bool DeviceMemory::release(uint64_t base) {
  auto it = table_.find(base);
  if (it == table_.end() || it->second.freed || it->second.kind != MemoryKind::Device) return false;
  it->second.freed = true;
  in_use_ -= it->second.size;
  uint64_t first = align_up(base, kPage), last = (base + it->second.size) / kPage * kPage;
  if (last > first)
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first - arena_),
              static_cast<off_t>(last - first));
  return true;
}

void DeviceMemory::add_host(void *pointer, uint64_t size, MemoryKind kind, const std::string &what) {
  uint64_t base = reinterpret_cast<uint64_t>(pointer);
  table_[base] = {base, size, 0, kind, false, 0, what};
}

bool DeviceMemory::remove_host(void *pointer) {
  auto it = table_.find(reinterpret_cast<uint64_t>(pointer));
  if (it == table_.end() || it->second.kind == MemoryKind::Device || it->second.owned) return false;
  table_.erase(it);
  return true;
}

void *DeviceMemory::allocate_host(uint64_t size, MemoryKind kind, const std::string &what) {
  void *pointer = mmap(nullptr, align_up(size + 1, kPage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pointer == MAP_FAILED) return nullptr;
  memset(pointer, 0xff, size);
  add_host(pointer, size, kind, what);
  table_[reinterpret_cast<uint64_t>(pointer)].owned = true;
  return pointer;
}

bool DeviceMemory::release_host(void *pointer) {
  auto it = table_.find(reinterpret_cast<uint64_t>(pointer));
  if (it == table_.end() || !it->second.owned || it->second.freed) return false;
  it->second.freed = true;
  // The pages go, their addresses stay taken: a late access is caught, also one of the host.
  mmap(pointer, align_up(it->second.size + 1, kPage), PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return true;
}

const Allocation *DeviceMemory::find(uint64_t address) const {
  auto it = table_.upper_bound(address);
  if (it == table_.begin()) return nullptr;
  --it;
  return address < it->second.base + it->second.size ? &it->second : nullptr;
}

// The first pages belong to nobody.
bool DeviceMemory::is_pageable(uint64_t address) const {
  return options().pageable && address >= 1 << 16 && !in_arena(address) && !find(address);
}

void *DeviceMemory::host_view(const void *pointer, uint64_t size) const {
  uint64_t address = reinterpret_cast<uint64_t>(pointer);
  const Allocation *a = find(address);
  if (!a) return in_arena(address) ? nullptr : const_cast<void *>(pointer);
  if (a->freed || address + size > a->base + a->size) return nullptr;
  return reinterpret_cast<void *>(address + static_cast<uint64_t>(a->alias_delta));
}

// Far from everything, an address has nothing to do with any allocation.
static constexpr uint64_t kNear = 1 << 20;

std::string DeviceMemory::describe(uint64_t address, uint64_t size) const {
  auto after = table_.upper_bound(address);
  const Allocation *below = after == table_.begin() ? nullptr : &std::prev(after)->second;
  const Allocation *above = after == table_.end() ? nullptr : &after->second;
  char text[512];
  auto tell = [&](const char *where, uint64_t distance, const Allocation &a, const char *more) {
    snprintf(text, sizeof text, "0x%" PRIx64 ", %" PRIu64 "%s the %s%s of %" PRIu64 " bytes%s", address, distance,
             where, a.freed ? "freed " : "", a.what.c_str(), a.size, more);
    return std::string(text);
  };
  if (below && address < below->base + below->size) {
    uint64_t offset = address - below->base;
    snprintf(text, sizeof text, "0x%" PRIx64 ", byte %" PRIu64 " of the %s%s of %" PRIu64 " bytes%s", address, offset,
             below->freed ? "freed " : "", below->what.c_str(), below->size,
             offset + size > below->size ? ", and past its end" : "");
    return text;
  }
  uint64_t past = below ? address - (below->base + below->size) : kNear, before = above ? above->base - address : kNear;
  if (past < kNear && past <= before) return tell(" bytes past the end of", past, *below, "");
  if (before < kNear) return tell(" bytes before", before, *above, before < size ? ", and into it" : "");
  snprintf(text, sizeof text, "0x%" PRIx64 ", which is %s", address,
           in_arena(address) ? "in no allocation" : "not device or registered host memory");
  return text;
}

DeviceMemory &device_memory() {
  static DeviceMemory *memory = new DeviceMemory; // outlives every static object of the program
  return *memory;
}

} // namespace ptxvm
