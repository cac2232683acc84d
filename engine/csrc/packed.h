// Frozen matrices in four bits for each weight: sections of bytes, with the layout of src/numeric/nf4/.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "launch.h"

// A part of a packed matrix: rows of `width` values, which begin `stride` weights apart. Those of a matrix that is not
// packed are zero.
struct Window {
  int64_t weights, first, rows, width, stride;
};

extern "C" void shoal_nf4_rows(
    bool bf16, const uint8_t* section, const Window* window, size_t row, size_t rows, void* out);

// The values of windows below each other, in the dtype of a product's other factor.
inline at::Tensor unpacked(at::TensorList sections, const Window* windows, at::ScalarType dtype) {
  int64_t rows = 0;
  for (size_t part = 0; part < sections.size(); ++part) rows += windows[part].rows;
  const auto width = windows[0].width;
  auto out = at::empty({rows, width}, sections[0].options().dtype(dtype));
  auto* place = static_cast<char*>(out.data_ptr());
  const auto row_bytes = width * out.element_size();
  for (size_t part = 0; part < sections.size(); ++part) {
    const auto& window = windows[part];
    const auto* section = sections[part].const_data_ptr<uint8_t>();
    if (out.is_cuda()) {
      launch("nf4", out, window.rows * width, section, uint64_t(window.rows), uint64_t(width),
             uint64_t(window.weights), uint64_t(window.first), uint64_t(window.stride), place);
    } else {
      at::parallel_for(0, window.rows, 8, [&](int64_t start, int64_t end) {
        shoal_nf4_rows(dtype == at::kBFloat16, section, &window, size_t(start), size_t(end - start), place + start * row_bytes);
      });
    }
    place += window.rows * row_bytes;
  }
  return out;
}

// Matrices below each other: packed ones in this dtype, others as they are.
inline at::Tensor factor(at::TensorList parts, const Window* windows, at::ScalarType dtype) {
  if (windows[0].weights > 0) return unpacked(parts, windows, dtype);
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

// Windows as numbers that autograd saves.
inline std::vector<int64_t> numbers(const Window* windows, size_t count) {
  const auto* first = reinterpret_cast<const int64_t*>(windows);
  return {first, first + 5 * count};
}

inline std::vector<Window> saved_windows(const std::vector<int64_t>& numbers) {
  const auto* first = reinterpret_cast<const Window*>(numbers.data());
  return {first, first + numbers.size() / 5};
}
