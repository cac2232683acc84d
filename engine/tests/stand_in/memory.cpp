// Device memory: a file in memory that is mapped twice. Addresses of devices are those of the first mapping, which
// nothing may read or write. Kernels use the second.

#include <fcntl.h>
#include <sys/mman.h>

#include <cstring>

namespace stand_in {
namespace {

// Addresses of each device. The system gives memory to those that are written.
constexpr size_t kAddresses = size_t(64) << 30;
constexpr size_t kMostDevices = 8;
// Sizes of blocks are multiples of it.
constexpr size_t kUnit = 512;
// Free blocks of at least this go back to the system.
constexpr size_t kLarge = size_t(1) << 20;

size_t capacity() {
  static const size_t bytes = [] {
    const char* set = std::getenv("STAND_IN_MEMORY");
    return set != nullptr ? size_t(std::strtoull(set, nullptr, 10)) : size_t(16) << 30;
  }();
  return bytes;
}

struct Arena {
  int file = memfd_create("stand-in", 0);
  char *of_devices = nullptr, *of_processor = nullptr;

  Arena() {
    constexpr size_t all = kMostDevices * kAddresses;
    TORCH_CHECK(ftruncate(file, off_t(all)) == 0, "stand-in: no file in memory");
    const auto map = [&](int access) {
      void* at = mmap(nullptr, all, access, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "stand-in: no room for addresses");
      return static_cast<char*>(at);
    };
    of_devices = map(PROT_NONE);
    of_processor = map(PROT_READ | PROT_WRITE);
  }
};

Arena& arena() {
  static Arena* const only = new Arena;
  return *only;
}

// Memory of one device. Freed blocks keep the operations that used them.
struct Pool {
  size_t end = 0;
  std::multimap<size_t, Block*> free;
  std::map<char*, Block*> all;
};
std::array<Pool, kMostDevices> pools;

Block* take(c10::DeviceIndex device, size_t size) {
  auto& pool = pools[size_t(device)];
  const auto found = pool.free.lower_bound(size);
  if (found != pool.free.end() && found->first <= 2 * size) {
    Block* block = found->second;
    pool.free.erase(found);
    block->used = size;
    return block;
  }
  TORCH_CHECK(pool.end + size <= kAddresses, "stand-in: no addresses are left");
  char* address = arena().of_devices + size_t(device) * kAddresses + pool.end;
  pool.end += size;
  return pool.all[address] = new Block{address, size, size, device, {}, {}};
}

void give_back(void* context) {
  const std::lock_guard guard(lock);
  auto* block = static_cast<Block*>(context);
  if (block->size >= kLarge)
    fallocate(arena().file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block->address - arena().of_devices,
              off_t(block->size));
  pools[size_t(block->device)].free.emplace(block->size, block);
  count_memory(block->device, -int64_t(block->used));
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kCUDA, current_device);
    if (bytes == 0) return {nullptr, device};
    const std::lock_guard guard(lock);
    const size_t size = (bytes + kUnit - 1) / kUnit * kUnit, used = live(device.index());
    TORCH_CHECK_WITH(OutOfMemoryError, used + size <= capacity(), "stand-in: ", device, " is out of memory: ", bytes,
                     " bytes were asked for, ", capacity() - used, " are free");
    Block* block = take(device.index(), size);
    count_memory(device.index(), int64_t(size));
    std::memset(on_processor(block->address), 0xff, size);
    return {block->address, block, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(on_processor(to), on_processor(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {capacity() - live(device), capacity()};
  }
} device_memory;

// Pinned memory, by address.
std::map<const char*, size_t> pinned;

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 4096, std::max<size_t>(bytes, 1)) == 0, "stand-in: no pinned memory");
    const std::lock_guard guard(lock);
    pinned[static_cast<char*>(address)] = bytes;
    return {address, address, &unpin, c10::Device(c10::kCPU)};
  }
  static void unpin(void* address) {
    const std::lock_guard guard(lock);
    pinned.erase(static_cast<char*>(address));
    std::free(address);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_memory;

const int memory_registered = (c10::SetAllocator(c10::kCUDA, &device_memory, /*priority=*/100), 0);

}  // namespace

c10::DeviceAllocator* device_allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* address) {
  const std::lock_guard guard(lock);
  auto after = pinned.upper_bound(static_cast<const char*>(address));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(address) < after->first + after->second;
}

char* on_processor(const void* device_address) {
  const auto offset = static_cast<const char*>(device_address) - arena().of_devices;
  TORCH_CHECK(offset >= 0 && size_t(offset) < kMostDevices * kAddresses, "stand-in: no address of a device");
  return arena().of_processor + offset;
}

Block* block_of(const void* device_address) {
  if (device_address == nullptr) return nullptr;
  const std::lock_guard guard(lock);
  auto* address = static_cast<char*>(const_cast<void*>(device_address));
  const auto device = size_t(address - arena().of_devices) / kAddresses;
  if (device >= kMostDevices) return nullptr;
  auto& all = pools[device].all;
  auto after = all.upper_bound(address);
  return after == all.begin() ? nullptr : std::prev(after)->second;
}

}  // namespace stand_in
