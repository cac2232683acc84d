// Counts the bytes of tensors on some threads, for tests of memory.

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <memory>

namespace {

struct Counter : c10::MemoryReportingInfoBase {
  std::atomic<int64_t> bytes = 0, most = 0;

  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
    const int64_t now = bytes += size;
    int64_t before = most;
    while (before < now && !most.compare_exchange_weak(before, now)) {}
  }
  bool memoryProfilingEnabled() const override { return true; }
};

}  // namespace

extern "C" {

std::shared_ptr<Counter>* shoal_counter_new() { return new std::shared_ptr<Counter>(new Counter); }

void shoal_counter_free(std::shared_ptr<Counter>* counter) { delete counter; }

// Counts what this thread allocates and frees from now on.
void shoal_counter_begin(std::shared_ptr<Counter>* counter) {
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, *counter);
}

// Ends that, on the same thread.
void shoal_counter_end() { c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE); }

// The bytes allocated and not freed.
int64_t shoal_counter_bytes(std::shared_ptr<Counter>* counter) { return (*counter)->bytes; }

// The most that they have been at once.
int64_t shoal_counter_most(std::shared_ptr<Counter>* counter) { return (*counter)->most; }

}  // extern "C"
