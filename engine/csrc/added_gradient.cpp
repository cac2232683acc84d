// A gradient that does not come from what follows.

#include <torch/csrc/autograd/custom_function.h>

#include "guard.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// Passes a tensor on. Its gradient is that of the result and another tensor.
struct AddGradient : Function<AddGradient> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& more) {
    context->save_for_backward({more});
    return input.view_as(input);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto more = context->get_saved_variables()[0];
    return {gradients[0].defined() ? gradients[0].add(more) : more, Tensor()};
  }
};

}  // namespace

extern "C" {

// The tensor, to whose gradient a backward pass adds `more`, of its shape and dtype.
char* shoal_add_gradient(Tensor* input, Tensor* more, Tensor** result) {
  return guarded([&] { *result = new Tensor(AddGradient::apply(*input, *more)); });
}

}  // extern "C"
