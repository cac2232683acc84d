// Rows of a tensor in another order.

#include <torch/csrc/autograd/custom_function.h>

#include "guard.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// Takes rows by a permutation. Their gradient is taken by its inverse, so that nothing is added.
struct Permute : Function<Permute> {
  static Tensor forward(
      AutogradContext* context, const Tensor& rows, const Tensor& order, const Tensor& inverse) {
    context->save_for_backward({inverse});
    return rows.index_select(0, order);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto inverse = context->get_saved_variables()[0];
    return {gradients[0].index_select(0, inverse), Tensor(), Tensor()};
  }
};

}  // namespace

extern "C" {

// The rows of `rows`, `[N, ..]`, in the order of a permutation, i64 `[N]`, with its inverse.
char* shoal_permute(Tensor* rows, Tensor* order, Tensor* inverse, Tensor** result) {
  return guarded([&] { *result = new Tensor(Permute::apply(*rows, *order, *inverse)); });
}

}  // extern "C"
