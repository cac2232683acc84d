// Counts of kernels, bytes, waits and memory.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

namespace stand_in {

std::recursive_mutex lock;
Counts counts;

namespace {

struct Kernel {
  uint64_t calls = 0, bytes = 0;
};
std::map<std::string, Kernel> kernels;

struct Memory {
  int64_t live = 0, peak = 0;
};
std::map<c10::DeviceIndex, Memory> memory;

// Writes the counts of the process when it ends.
struct Report {
  ~Report() {
    const char* name = std::getenv("STAND_IN_REPORT");
    if (name == nullptr) return;
    std::FILE* file = std::fopen((std::string(name) + "." + std::to_string(getpid())).c_str(), "w");
    if (file == nullptr) return;
    std::fprintf(file, "kernels %lu, bytes %lu, waits %lu, to the device %lu, to the host %lu, pageable copies %lu of %lu bytes\n",
                 counts.kernels, counts.kernel_bytes, counts.waits, counts.bytes_to_device, counts.bytes_to_host,
                 counts.pageable_copies, counts.pageable_bytes);
    for (const auto& [device, of_device] : memory) std::fprintf(file, "peak of cuda:%d: %ld\n", device, of_device.peak);
    std::vector<std::pair<std::string, Kernel>> sorted(kernels.begin(), kernels.end());
    std::sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) { return a.second.bytes > b.second.bytes; });
    for (const auto& [kernel, of_kernel] : sorted)
      std::fprintf(file, "%-60s %8lu %14lu\n", kernel.c_str(), of_kernel.calls, of_kernel.bytes);
    std::fclose(file);
  }
} report;

}  // namespace

void count_kernel(const std::string& name, size_t bytes) {
  const std::lock_guard guard(lock);
  ++counts.kernels;
  counts.kernel_bytes += bytes;
  auto& kernel = kernels[name];
  ++kernel.calls;
  kernel.bytes += bytes;
}

void count_memory(c10::DeviceIndex device, int64_t bytes) {
  const std::lock_guard guard(lock);
  auto& of_device = memory[device];
  of_device.live += bytes;
  of_device.peak = std::max(of_device.peak, of_device.live);
}

size_t live(c10::DeviceIndex device) {
  const std::lock_guard guard(lock);
  return size_t(memory[device].live);
}

}  // namespace stand_in

extern "C" {

void stand_in_read(stand_in::Counts* result) {
  const std::lock_guard guard(stand_in::lock);
  *result = stand_in::counts;
}

// Begins anew; the peak of memory becomes what is in use.
void stand_in_reset() {
  const std::lock_guard guard(stand_in::lock);
  stand_in::counts = {};
  stand_in::kernels.clear();
  for (auto& [device, memory] : stand_in::memory) memory.peak = memory.live;
}

// Calls of a kernel, by its name with a leading `aten::`.
uint64_t stand_in_calls(const char* kernel) {
  const std::lock_guard guard(stand_in::lock);
  const auto found = stand_in::kernels.find(kernel);
  return found == stand_in::kernels.end() ? 0 : found->second.calls;
}

// Bytes that all calls of a kernel have read and written.
uint64_t stand_in_bytes(const char* kernel) {
  const std::lock_guard guard(stand_in::lock);
  const auto found = stand_in::kernels.find(kernel);
  return found == stand_in::kernels.end() ? 0 : found->second.bytes;
}

// The most memory that a device had given out at once, and what it has now.
void stand_in_memory(int device, uint64_t* peak, uint64_t* live) {
  const std::lock_guard guard(stand_in::lock);
  const auto& memory = stand_in::memory[c10::DeviceIndex(device)];
  *peak = uint64_t(memory.peak);
  *live = uint64_t(memory.live);
}

}  // extern "C"
