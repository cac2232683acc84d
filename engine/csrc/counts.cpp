// Counts that travel as the gradient of a weight.

#include <torch/csrc/autograd/custom_function.h>

#include "guard.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// Passes logits on. The gradient of the biases is the counts, whatever the gradient of the logits is.
struct Count : Function<Count> {
  static Tensor forward(
      AutogradContext* context, const Tensor& logits, const Tensor&, const Tensor& counts) {
    context->save_for_backward({counts});
    return logits.view_as(logits);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto counts = context->get_saved_variables()[0];
    return {gradients[0], counts, Tensor()};
  }
};

}  // namespace

extern "C" {

// The logits, of which a backward pass gives `counts` as the gradient of `biases`: both `[E]`, f32.
char* shoal_count(Tensor* logits, Tensor* biases, Tensor* counts, Tensor** result) {
  return guarded([&] { *result = new Tensor(Count::apply(*logits, *biases, *counts)); });
}

}  // extern "C"
