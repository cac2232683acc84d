// Kernels of this crate, computed by the processor from their own source.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <tuple>

namespace stand_in {

namespace of_engine {
#include "../../kernels/portable.h"
#include "../../kernels/accumulate.cu"
#include "../../kernels/adamw.cu"
}  // namespace of_engine

namespace {

// Computes a kernel with the arguments at these places.
using Run = std::function<void(StreamKey, void**)>;

template <typename Value>
Value here(Value value, std::vector<Use>&) {
  return value;
}

// An address in the memory of a device, where the processor may use it.
template <typename Value>
Value* here(Value* address, std::vector<Use>& uses) {
  TORCH_CHECK(block_of(address) != nullptr, "stand-in: a kernel gets an address that is in no memory of a device");
  uses.push_back({address, !std::is_const_v<Value>});
  return reinterpret_cast<Value*>(on_processor(address));
}

template <typename... Arguments, size_t... places>
std::tuple<Arguments...> arguments_at(void** at, std::index_sequence<places...>) {
  return {*static_cast<Arguments*>(at[places])...};
}

template <typename... Arguments>
Run runner(const char* name, void (*kernel)(Arguments...), size_t (*bytes)(uint64_t count)) {
  return [=](StreamKey stream, void** places) {
    const auto given = arguments_at<Arguments...>(places, std::index_sequence_for<Arguments...>());
    std::vector<Use> uses;
    const auto local = std::apply(
        [&](const auto&... arguments) { return std::tuple<Arguments...>{here(arguments, uses)...}; }, given);
    enter(stream, uses);
    count_kernel(name, bytes(std::get<1>(given)));
    std::apply(kernel, local);
  };
}

const std::map<std::string, Run>& launches() {
  using namespace of_engine;
  static const std::map<std::string, Run> all = {
      {"shoal_largest_f32", runner("shoal_largest_f32", shoal_largest_f32, [](uint64_t count) { return 4 * count; })},
      {"shoal_largest_bf16", runner("shoal_largest_bf16", shoal_largest_bf16, [](uint64_t count) { return 2 * count; })},
      {"shoal_add_f32", runner("shoal_add_f32", shoal_add_f32, [](uint64_t count) { return 20 * count; })},
      {"shoal_add_bf16", runner("shoal_add_bf16", shoal_add_bf16, [](uint64_t count) { return 18 * count; })},
      {"shoal_adamw", runner("shoal_adamw", shoal_adamw, [](uint64_t count) { return 28 * count; })},
  };
  return all;
}

}  // namespace
}  // namespace stand_in

extern "C" {

// A kernel, by its name; null for none.
const void* stand_in_kernel(const char* name) {
  const auto found = stand_in::launches().find(name);
  return found == stand_in::launches().end() ? nullptr : &found->second;
}

void stand_in_launch(const void* kernel, int device, void* stream, void** arguments) {
  const auto key = stand_in::StreamKey{c10::DeviceIndex(device), c10::StreamId(reinterpret_cast<intptr_t>(stream))};
  (*static_cast<const stand_in::Run*>(kernel))(key, arguments);
}

}  // extern "C"
