// Products with frozen packed matrices, whose values exist while one product reads them.

#include <torch/csrc/autograd/custom_function.h>

#include "guard.h"
#include "packed.h"
#include "tensor_list.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// The product of rows with windows below each other. Backward the values are unpacked again.
struct PackedLinear : Function<PackedLinear> {
  static Tensor forward(
      AutogradContext* context, const Tensor& x, at::TensorList sections, const std::vector<Window>& windows,
      const std::optional<Tensor>& bias) {
    context->save_for_backward(sections.vec());
    context->saved_data["windows"] = numbers(windows.data(), windows.size());
    return at::linear(x, unpacked(sections, windows.data(), x.scalar_type()), bias);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto sections = context->get_saved_variables();
    const auto windows = saved_windows(context->saved_data["windows"].toIntVector());
    const auto gradient = gradients[0].contiguous();
    const auto values = unpacked(sections, windows.data(), gradient.scalar_type());
    variable_list all{gradient.matmul(values)};
    all.insert(all.end(), sections.size() + 2, Tensor());
    return all;
  }
};

}  // namespace

extern "C" {

// The product of `x` with `count` windows of packed matrices below each other, plus a bias unless it is null.
char* shoal_packed_linear(
    Tensor* x, Tensor** sections, const Window* windows, size_t count, Tensor* bias, Tensor** result) {
  return guarded([&] {
    const auto all = tensors(sections, count);
    const auto offset = bias == nullptr ? std::optional<Tensor>() : *bias;
    *result = new Tensor(PackedLinear::apply(
        *x, at::TensorList(all), std::vector<Window>(windows, windows + count), offset));
  });
}

}  // extern "C"
