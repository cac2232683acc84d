// Streams and events. The stream that computes does its work at once. Others do theirs when something waits for them,
// or asks whether they are done. The order that events make is kept in vector clocks: see `enter`.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include <deque>
#include <functional>

namespace stand_in {

thread_local c10::DeviceIndex current_device = 0;

int devices() {
  static const int count = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    TORCH_CHECK(driver != nullptr, "stand-in: ", dlerror());
    return reinterpret_cast<int (*)()>(dlsym(driver, "stand_in_cards"))();
  }();
  return count;
}

namespace {

struct Stream {
  // What happened before the stream's next operation; its own entry counts its operations.
  Clock before;
  std::deque<std::function<void()>> work;
};
std::map<StreamKey, Stream> streams;
c10::StreamId next_stream = 1;

// What the host has waited for: it happened before whatever the host starts.
Clock host;

thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

struct Event {
  StreamKey stream;
  Clock clock;
};

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, count] : other) clock[stream] = std::max(clock[stream], count);
}

void do_work(StreamKey key) {
  const std::lock_guard guard(lock);
  auto& work = streams[key].work;
  while (!work.empty()) {
    const auto first = std::move(work.front());
    work.pop_front();
    first();
  }
}

void host_waits(const Event& event) {
  const std::lock_guard guard(lock);
  ++counts.waits;
  do_work(event.stream);
  join(host, event.clock);
}

void host_waits(StreamKey key) {
  const std::lock_guard guard(lock);
  host_waits(Event{key, streams[key].before});
}

// Whether an operation at `uses` may not be over for a stream that has seen `before`.
std::optional<StreamKey> may_run(const Clock& uses, StreamKey stream, const Clock& before) {
  const auto seen = [](const Clock& clock, StreamKey key) {
    const auto found = clock.find(key);
    return found == clock.end() ? 0 : found->second;
  };
  for (const auto& [other, count] : uses)
    if (other != stream && count > seen(before, other) && count > seen(host, other)) return other;
  return {};
}

}  // namespace

StreamKey current_stream(c10::DeviceIndex device) { return {device, current_streams[device]}; }

void enter(StreamKey key, const std::vector<Use>& uses) {
  const std::lock_guard guard(lock);
  auto& stream = streams[key];
  const auto number = ++stream.before[key];
  for (const auto& use : uses) {
    Block* block = block_of(use.address);
    if (block == nullptr) continue;
    auto other = may_run(block->writes, key, stream.before);
    if (!other && use.writes) other = may_run(block->reads, key, stream.before);
    TORCH_CHECK(!other, "stand-in: stream ", key.second, " of cuda:", int(key.first), " uses memory that stream ",
                other->second, " of cuda:", int(other->first), " may still use");
    (use.writes ? block->writes : block->reads)[key] = number;
  }
}

void order(StreamKey one, StreamKey other) {
  const std::lock_guard guard(lock);
  join(streams[one].before, streams[other].before);
  join(streams[other].before, streams[one].before);
}

void defer(StreamKey stream, std::function<void()> work) {
  const std::lock_guard guard(lock);
  streams[stream].work.push_back(std::move(work));
}

void wait_for_device(c10::DeviceIndex device) {
  const std::lock_guard guard(lock);
  for (const auto& [key, stream] : streams)
    if (key.first == device) host_waits(key);
}

namespace {

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

c10::Stream stream_of(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, key.first), key.second);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < devices(), "stand-in: there is no ", device);
    if (device.has_index()) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(devices()); }

  c10::Stream getStream(c10::Device device) const override { return stream_of(current_stream(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({device.index(), 0}); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    const std::lock_guard guard(lock);
    return stream_of({device.index(), next_stream++});
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(intptr_t(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    do_work(key_of(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits(key_of(stream)); }
  void synchronizeDevice(c10::DeviceIndex device) const override { wait_for_device(device); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    const std::lock_guard guard(lock);
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {key_of(stream), streams[key_of(stream)].before};
  }
  void block(void* event, const c10::Stream& stream) const override {
    const std::lock_guard guard(lock);
    const auto* of = static_cast<Event*>(event);
    if (of->stream != key_of(stream)) do_work(of->stream);
    join(streams[key_of(stream)].before, of->clock);
  }
  bool queryEvent(void* event) const override {
    const std::lock_guard guard(lock);
    do_work(static_cast<Event*>(event)->stream);
    join(host, static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override { host_waits(*static_cast<Event*>(event)); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices() > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return devices(); }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(devices()); }
  c10::DeviceIndex current_device() const override { return stand_in::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return stand_in::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { stand_in::current_device = device; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { wait_for_device(device); }
};

}  // namespace
}  // namespace stand_in

namespace at {
// libtorch finds them by this name.
using stand_in::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
