// The gate of GPT-OSS's feed-forward blocks as an autograd function that keeps its input alone, on any device.

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

#include "guard.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// Gates and what they gate in f32, as given and as clamped.
struct Clamped {
  static constexpr double steepness = 1.702, limit = 7.0;

  Tensor gate, up, clamped_gate, clamped_up;

  explicit Clamped(const Tensor& both) {
    const int64_t inner = both.size(-1) / 2;
    gate = both.narrow(-1, 0, inner).to(at::kFloat);
    up = both.narrow(-1, inner, inner).to(at::kFloat);
    clamped_gate = gate.clamp_max(limit);
    clamped_up = up.clamp(-limit, limit);
  }
};

struct ClampedSwiGlu : Function<ClampedSwiGlu> {
  static Tensor forward(AutogradContext* context, const Tensor& both) {
    const Clamped of(both);
    context->save_for_backward({both});
    const auto share = at::sigmoid(of.clamped_gate * Clamped::steepness);
    return ((of.clamped_up + 1.0) * (of.clamped_gate * share)).to(both.scalar_type());
  }

  // The derivative of x · s with s = sigmoid(a · x) is s + a · x · s · (1 - s); beyond a limit it is 0.
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto both = context->get_saved_variables()[0];
    const Clamped of(both);
    const auto gradient = gradients[0].to(at::kFloat);
    const auto share = at::sigmoid(of.clamped_gate * Clamped::steepness);
    const auto gated = of.clamped_gate * share;
    const auto slope = share + gated * (1.0 - share) * Clamped::steepness;
    const auto of_gate = (gradient * (of.clamped_up + 1.0) * slope).masked_fill(of.gate.gt(Clamped::limit), 0.0);
    const auto of_up = (gradient * gated).masked_fill(of.up.abs().gt(Clamped::limit), 0.0);
    return {at::cat(variable_list{of_gate, of_up}, -1).to(both.scalar_type())};
  }
};

}  // namespace

extern "C" {

// Of gates g and values u in the halves of the last dimension, clamped to at most 7 and to ±7: (u + 1) · g · sigmoid(1.702 g).
char* shoal_clamped_swiglu(Tensor* both, Tensor** result) {
  return guarded([&] { *result = new Tensor(ClampedSwiGlu::apply(*both)); });
}

}  // extern "C"
