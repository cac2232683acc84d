// Tensors that Rust passes as arrays of pointers, and new ones that it takes over.

#pragma once

#include <vector>

#include <ATen/ATen.h>

inline std::vector<at::Tensor> tensors(at::Tensor* const* pointers, size_t count) {
  std::vector<at::Tensor> list;
  list.reserve(count);
  for (size_t index = 0; index < count; ++index) list.push_back(*pointers[index]);
  return list;
}

// Gives `list` to Rust, which expects `count` tensors.
inline void give(const std::vector<at::Tensor>& list, at::Tensor** results, size_t count) {
  TORCH_CHECK(list.size() == count, list.size(), " tensors in place of ", count);
  for (size_t index = 0; index < count; ++index) results[index] = new at::Tensor(list[index]);
}
