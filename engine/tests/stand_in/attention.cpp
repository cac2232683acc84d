// Attention: the kernel that torch 2.11.0 chooses on a GPU, computed by the processor's.

#include <ATen/native/transformers/attention.h>

namespace stand_in {
namespace {

using Scale = std::optional<double>;
using Mask = std::optional<Tensor>;

// The rules for Hopper with deterministic algorithms: flash attention takes no mask and no f32, the memory-efficient
// kernel no grouped keys. cuDNN's is off.
int64_t choice(
    const Tensor& queries, const Tensor& keys, const Tensor&, const Mask& mask, double, bool, Scale, bool) {
  const auto type = queries.scalar_type();
  const bool is_narrow = type == at::kBFloat16 || type == at::kHalf;
  if (!mask && is_narrow) return int64_t(at::SDPBackend::flash_attention);
  if (queries.size(1) == keys.size(1)) return int64_t(at::SDPBackend::efficient_attention);
  return int64_t(at::SDPBackend::math);
}

const int choice_registered = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choice), 0);

// Keys or values for each head, from those for each group.
Tensor for_heads(const Tensor& x, int64_t heads) {
  return x.size(1) == heads ? x : x.repeat_interleave(heads / x.size(1), 1);
}

Tensor for_groups(const Tensor& gradient, int64_t groups) {
  if (gradient.size(1) == groups) return gradient;
  return gradient.view({gradient.size(0), groups, -1, gradient.size(2), gradient.size(3)}).sum(2).contiguous();
}

struct Forward {
  Tensor output, log_sums;
};

Forward forward(
    const char* name, const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask, double dropout, bool causal,
    Scale scale) {
  Call call{name, {}, {}, 0};
  const auto argument = [&](const Tensor& x) { return call.argument(x, false); };
  const auto of_mask = mask ? Mask(argument(*mask)) : std::nullopt;
  const auto [queries, keys, values] = std::tuple(argument(q), argument(k), argument(v));
  enter(current_stream(*call.device), call.uses);
  const auto [output, log_sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      queries, for_heads(keys, q.size(1)), for_heads(values, q.size(1)), dropout, causal, of_mask, scale);
  Forward result{call.result(output), call.result(log_sums)};
  count_kernel(name, call.bytes);
  return result;
}

std::tuple<Tensor, Tensor, Tensor> backward(
    const char* name, const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask,
    const Tensor& output, const Tensor& log_sums, double dropout, bool causal, Scale scale) {
  Call call{name, {}, {}, 0};
  const auto argument = [&](const Tensor& x) { return call.argument(x, false); };
  const auto of_mask = mask ? Mask(argument(*mask)) : std::nullopt;
  const auto [queries, keys, values] = std::tuple(argument(q), argument(k), argument(v));
  const auto [of_output, outputs, sums] = std::tuple(argument(gradient), argument(output), argument(log_sums));
  enter(current_stream(*call.device), call.uses);
  const auto [of_queries, of_keys, of_values] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      of_output, queries, for_heads(keys, q.size(1)), for_heads(values, q.size(1)), outputs, sums, dropout, causal,
      of_mask, scale);
  std::tuple result{call.result(of_queries), call.result(for_groups(of_keys, k.size(1))),
                    call.result(for_groups(of_values, v.size(1)))};
  count_kernel(name, call.bytes);
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal, bool, Scale scale) {
  const auto result = forward("aten::_flash_attention_forward", q, k, v, {}, dropout, causal, scale);
  const auto state = at::empty({2}, q.options().dtype(at::kLong)), none = at::empty({0}, q.options());
  return {result.output, result.log_sums, {}, {}, q.size(2), k.size(2), state, none, none};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& output,
    const Tensor& log_sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
    const Tensor&, const Tensor&, Scale scale) {
  return backward("aten::_flash_attention_backward", gradient, q, k, v, {}, output, log_sums, dropout, causal, scale);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(
    const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask, bool, double dropout, bool causal,
    Scale scale) {
  const auto result = forward("aten::_efficient_attention_forward", q, k, v, mask, dropout, causal, scale);
  const auto state = q.options().dtype(at::kLong);
  return {result.output, result.log_sums, at::empty({}, state), at::empty({}, state)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, const Tensor& output,
    const Tensor& log_sums, const Tensor&, const Tensor&, double dropout, std::array<bool, 4>, bool causal,
    Scale scale) {
  const auto of_mask = mask.defined() ? Mask(mask) : std::nullopt;
  const auto [of_queries, of_keys, of_values] = backward(
      "aten::_efficient_attention_backward", gradient, q, k, v, of_mask, output, log_sums, dropout, causal, scale);
  return {of_queries, of_keys, of_values, {}};
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_scaled_dot_product_flash_attention", &flash);
  library.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  library.impl("_scaled_dot_product_efficient_attention", &efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
}

}  // namespace
}  // namespace stand_in
