// Products whose weights' gradients can wait: a backward pass then gives the factors of each in its place, and the
// gradient of its input sooner (Qi et al., arXiv 2401.10241).

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <unordered_map>

#include "guard.h"
#include "on_this_thread.h"
#include "tensor_list.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// The gradient of a product's result, and what its weight was multiplied with: both rows below each other.
struct Factors {
  Tensor gradient, rows;
};

using AllFactors = std::unordered_map<const at::TensorImpl*, Factors>;

// Where the backward pass of this thread puts factors; null if it computes every weight's gradient.
thread_local AllFactors* waiting = nullptr;

// The backward passes of this thread put factors there while it lives.
struct Waiting {
  explicit Waiting(AllFactors& factors) { waiting = &factors; }
  ~Waiting() { waiting = nullptr; }
};

// A product with a trained weight, as autograd has it of at::linear.
struct Product : Function<Product> {
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
    context->save_for_backward({x, weight});
    context->saved_data["has_bias"] = bias.has_value();
    return at::linear(x, weight, bias);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    const auto gradient = gradients[0].reshape({-1, weight.size(0)});
    variable_list all(3);
    if (context->needs_input_grad(0)) all[0] = gradient.mm(weight).view_as(x);
    if (context->needs_input_grad(1)) {
      // Detached, since it would keep the graph.
      const auto rows = x.detach().reshape({-1, weight.size(1)});
      if (waiting == nullptr) {
        all[1] = gradient.t().mm(rows);
      } else {
        const auto is_first = waiting->insert({weight.unsafeGetTensorImpl(), {gradient, rows}}).second;
        TORCH_CHECK(is_first, "two products have one weight");
      }
    }
    // Autograd sums a bias's over the rows.
    if (context->saved_data["has_bias"].toBool()) all[2] = gradient;
    return all;
  }
};

}  // namespace

extern "C" {

// The product of `x` with a matrix, plus a bias unless it is null.
char* shoal_linear(Tensor* x, Tensor* weight, Tensor* bias, Tensor** result) {
  return guarded([&] {
    const auto offset = bias == nullptr ? std::optional<Tensor>() : *bias;
    const auto trains = at::GradMode::is_enabled() && weight->requires_grad() && x->is_contiguous();
    *result = new Tensor(trains ? Product::apply(*x, *weight, offset) : at::linear(*x, *weight, offset));
  });
}

// Like shoal_gradients, but computes no gradient of the weights of products by shoal_linear. In the place of such a one
// are the gradient of its product in `gradients` and the rows that it multiplied in `rows`, which is null elsewhere.
char* shoal_gradients_or_factors(
    Tensor* output, Tensor* output_gradient, Tensor** inputs, size_t count, Tensor** gradients, Tensor** rows) {
  return guarded([&] {
    AllFactors factors;
    const auto list = tensors(inputs, count);
    variable_list found;
    {
      const OnThisThread guard;
      const Waiting here(factors);
      found = torch::autograd::grad({*output}, list, {*output_gradient}, std::nullopt, false, /*allow_unused=*/true);
    }
    for (size_t index = 0; index < count; ++index) {
      const auto aside = factors.find(list[index].unsafeGetTensorImpl());
      const auto is_aside = aside != factors.end();
      TORCH_CHECK(found[index].defined() != is_aside, "an input has one gradient or the factors of one");
      gradients[index] = new Tensor(is_aside ? aside->second.gradient : found[index]);
      rows[index] = is_aside ? new Tensor(aside->second.rows) : nullptr;
    }
  });
}

}  // extern "C"
