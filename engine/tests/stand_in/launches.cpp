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
#include "../../kernels/embedding.cu"
#include "../../kernels/nf4.cu"
#include "../../kernels/norm.cu"
#include "../../kernels/rotary.cu"
#include "../../kernels/swiglu.cu"
#include "../../kernels/loss.cu"
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

// `bytes` gets the count of rows and of columns, or of elements and whatever the third argument is.
template <typename... Arguments, typename Bytes>
Run runner(const char* name, void (*kernel)(Arguments...), Bytes bytes) {
  return [=](StreamKey stream, void** places) {
    const auto given = arguments_at<Arguments...>(places, std::index_sequence_for<Arguments...>());
    std::vector<Use> uses;
    const auto local = std::apply(
        [&](const auto&... arguments) { return std::tuple<Arguments...>{here(arguments, uses)...}; }, given);
    enter(stream, uses);
    count_kernel(name, bytes(std::get<1>(given), std::get<2>(given)));
    std::apply(kernel, local);
  };
}

// Both forms of a kernel, which reads and writes so many numbers of its dtype for each element, and of others so many bytes.
#define BOTH(name, numbers, others) \
  {"shoal_" #name "_f32", runner("shoal_" #name "_f32", shoal_##name##_f32, \
    [](uint64_t rows, auto width) { return rows * uint64_t(width) * (4 * (numbers) + (others)); })}, \
  {"shoal_" #name "_bf16", runner("shoal_" #name "_bf16", shoal_##name##_bf16, \
    [](uint64_t rows, auto width) { return rows * uint64_t(width) * (2 * (numbers) + (others)); })}

// A kernel of rows, which reads and writes so many bytes for each of their elements.
#define ROWS(name, bytes) {#name, runner(#name, name, [](uint64_t rows, uint64_t width) { return rows * width * (bytes); })}

#define FLAT(name, bytes) {#name, runner(#name, name, [](uint64_t count, auto) { return count * (bytes); })}

const std::map<std::string, Run>& launches() {
  using namespace of_engine;
  static const std::map<std::string, Run> all = {
      FLAT(shoal_largest_f32, 4), FLAT(shoal_largest_bf16, 2), FLAT(shoal_add_f32, 20), FLAT(shoal_add_bf16, 18),
      FLAT(shoal_adamw, 28), ROWS(shoal_embedding_rows, 8), ROWS(shoal_add_rows, 20),
      BOTH(nf4, 1, 1), BOTH(rms_norm, 2, 0), BOTH(rms_norm_backward, 3, 0), BOTH(rms_norm_weight, 2, 0),
      BOTH(rotate, 2, 0), BOTH(rotate_backward, 2, 0), BOTH(swiglu, 3, 0), BOTH(swiglu_backward, 5, 0),
      BOTH(cross_entropy, 2, 0),
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
