// Copies to a GPU beside its computation, by c10's interface for any device: needs no CUDA headers.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>

#include "guard.h"

namespace {

// The stream on which this thread computes.
c10::Stream computing(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

std::unique_ptr<c10::Event> recorded(const c10::Stream& stream) {
  auto event = std::make_unique<c10::Event>(stream.device_type());
  event->record(stream);
  return event;
}

}  // namespace

extern "C" {

// A stream of the GPU with this index beside the one that computes.
char* shoal_stream_new(int64_t index, c10::Stream** result) {
  return guarded([&] {
    c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    c10::impl::VirtualGuardImpl backend(device.type());
    *result = new c10::Stream(backend.getStreamFromGlobalPool(device, /*isHighPriority=*/false));
  });
}

void shoal_stream_free(c10::Stream* stream) { delete stream; }

// Lets what is copied on a stream from now on wait for what the device was told to compute before: the
// memory that is written may have been read by it.
char* shoal_stream_follow(c10::Stream* stream) {
  return guarded([&] { recorded(computing(stream->device()))->block(*stream); });
}

// Copies on a stream. `from`, if its memory is pinned, must stay as it is until the copy has ended.
char* shoal_copy_on(c10::Stream* stream, at::Tensor* to, at::Tensor* from) {
  return guarded([&] {
    c10::StreamGuard guard(*stream);
    at::NoGradGuard no_grad;
    to->copy_(*from, /*non_blocking=*/true);
  });
}

// The end of what a stream was told so far.
char* shoal_event_new(c10::Stream* stream, c10::Event** result) {
  return guarded([&] { *result = recorded(*stream).release(); });
}

void shoal_event_free(c10::Event* event) { delete event; }

char* shoal_event_is_over(c10::Event* event, bool* result) {
  return guarded([&] { *result = event->query(); });
}

// Lets what this thread computes on the stream's device from now on wait for an event.
char* shoal_event_join(c10::Event* event, c10::Stream* stream) {
  return guarded([&] { event->block(computing(stream->device())); });
}

// Waits for an event.
char* shoal_event_wait(c10::Event* event) {
  return guarded([&] { event->synchronize(); });
}

// CUDA's own handle of the stream on which this thread computes on the GPU with this index.
char* shoal_computing_stream(int64_t index, void** result) {
  return guarded([&] {
    *result = computing(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index))).native_handle();
  });
}

// Bytes that are free on the GPU with this index.
char* shoal_free_memory(int64_t index, size_t* result) {
  return guarded([&] {
    auto* allocator = c10::getDeviceAllocator(c10::kCUDA);
    *result = allocator->getMemoryInfo(static_cast<c10::DeviceIndex>(index)).first;
  });
}

}  // extern "C"
