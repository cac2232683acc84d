// What the files of the stand-in share.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace stand_in {

using at::Tensor;

// Guards everything that is not of one thread.
extern std::recursive_mutex lock;

// ---- devices ----

// Devices that there are.
int devices();

// The device of this thread.
extern thread_local c10::DeviceIndex current_device;

// ---- streams ----

// A stream of a device; 0 is the one that computes.
using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

// Work of each stream, counted: what happened before a point in the order of things.
using Clock = std::map<StreamKey, uint64_t>;

// The stream of this thread on a device.
StreamKey current_stream(c10::DeviceIndex device);

// Enters an operation that reads or writes memory into the order of its stream. Fails where another stream may still
// write it, or still use what is written.
struct Use {
  const void* address;
  bool writes;
};
void enter(StreamKey stream, const std::vector<Use>& uses);

// Lets what either stream does from now on wait for what the other was told before, as copies between devices do.
void order(StreamKey one, StreamKey other);

// Does some work when something waits for the stream.
void defer(StreamKey stream, std::function<void()> work);

// Lets the host wait for all work of a device.
void wait_for_device(c10::DeviceIndex device);

// ---- memory ----

// Memory of a device that tensors share, with the operations that used it last.
struct Block {
  char* address;
  // Of which a tensor may use a part.
  size_t size, used;
  c10::DeviceIndex device;
  Clock reads, writes;
};

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();

// Whether an address is in pinned memory.
bool is_pinned(const void* address);

// The same memory at the address that the processor may use.
char* on_processor(const void* device_address);

// The block with an address of a device; null for none.
Block* block_of(const void* device_address);

// ---- tensors ----

// Distinct bytes of a tensor.
size_t bytes_of(const Tensor& tensor);

// A tensor of the processor in the memory of one on a device. All others are returned as they are.
Tensor alias_of(const Tensor& tensor);

// A tensor on a device with the values of one in the processor's memory.
Tensor to_device(const Tensor& tensor, c10::DeviceIndex device);

// ---- counts ----

// Counts since the last reset. Rust reads it: `integration/stand_in/counts.rs`.
struct Counts {
  uint64_t kernels, kernel_bytes;
  uint64_t waits;
  uint64_t pageable_copies, pageable_bytes;
  uint64_t bytes_to_device, bytes_to_host;
};
extern Counts counts;

// Counts one kernel and the bytes that it reads and writes.
void count_kernel(const std::string& name, size_t bytes);

// Counts memory that a device has got or, below zero, given back.
void count_memory(c10::DeviceIndex device, int64_t bytes);

// Memory that a device has given out.
size_t live(c10::DeviceIndex device);

}  // namespace stand_in
