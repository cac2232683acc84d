// Kernels of this crate on a GPU (kernels/).

#pragma once

#include <ATen/ATen.h>

#include <cstdlib>
#include <string>

extern "C" char* shoal_launch(const char* name, int64_t index, uint64_t elements, void** arguments, size_t count);

inline bool is_bf16(const at::Tensor& tensor) { return tensor.scalar_type() == at::kBFloat16; }

// Lets a GPU compute a kernel of the dtype of `on`, with so many threads.
template <typename... Arguments>
inline void launch(const char* kernel, const at::Tensor& on, int64_t threads, Arguments... arguments) {
  void* places[] = {&arguments...};
  const auto name = std::string("shoal_") + kernel + (is_bf16(on) ? "_bf16" : "_f32");
  char* error = shoal_launch(name.c_str(), on.device().index(), uint64_t(threads), places, sizeof...(arguments));
  if (error == nullptr) return;
  const std::string message(error);
  free(error);
  TORCH_CHECK(false, message);
}
