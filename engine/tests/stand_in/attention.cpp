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

// The documents of the variable-length form, by what a GPU reads of them.
std::vector<int64_t> lengths_of(Call& call, const Mask& starts, int64_t tokens, int64_t most) {
  TORCH_CHECK(starts && starts->scalar_type() == at::kInt && starts->is_contiguous(),
              "stand-in: ", call.name, " reads the first tokens of documents as contiguous i32");
  const auto read = call.argument(*starts, false);
  std::vector<int64_t> lengths;
  for (int64_t place = 1; place < read.numel(); ++place) {
    lengths.push_back(read.const_data_ptr<int32_t>()[place] - read.const_data_ptr<int32_t>()[place - 1]);
    TORCH_CHECK(lengths.back() <= most, "stand-in: a document of ", lengths.back(), " tokens, of at most ", most);
  }
  TORCH_CHECK(read.const_data_ptr<int32_t>()[read.numel() - 1] == tokens, "stand-in: documents are not all tokens");
  return lengths;
}

// What libtorch refuses.
void check_of_documents(const Tensor& q, const Tensor& k, double dropout) {
  const auto type = q.scalar_type();
  TORCH_CHECK(type == at::kBFloat16 || type == at::kHalf, "FlashAttention only support fp16 and bf16 data type");
  TORCH_CHECK(q.dim() == 3 && q.size(2) % 8 == 0 && q.size(2) <= 256, "stand-in: head sizes are multiples of 8 up to 256");
  TORCH_CHECK(q.size(1) % k.size(1) == 0, "Number of heads in key/value must divide number of heads in query");
  TORCH_CHECK(dropout == 0.0, "stand-in: there is no dropout");
}

Tensor of_document(const Tensor& x, int64_t start, int64_t length) {
  return x.narrow(0, start, length).unsqueeze(0).transpose(1, 2);
}

// What flash attention adds to the products of a document's tokens within a window.
Mask window_of(int64_t length, std::optional<c10::SymInt> before, const Tensor& like) {
  if (!before) return {};
  const auto places = at::arange(length, at::kLong), distance = places.unsqueeze(1).sub(places);
  const auto outside = distance.lt(0).logical_or(distance.gt(before->expect_int()));
  return at::zeros({length, length}, like.options()).masked_fill_(outside, -INFINITY).view({1, 1, length, length});
}

using Symbols = std::optional<c10::SymInt>;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_of_documents(
    const Tensor& q, const Tensor& k, const Tensor& v, const Mask& starts, const Mask&, c10::SymInt most, c10::SymInt,
    double dropout, bool causal, bool, Scale scale, Symbols before, Symbols behind, const Mask&, const Mask&) {
  check_of_documents(q, k, dropout);
  TORCH_CHECK(causal && behind.value_or(0) == 0, "stand-in: attention is causal");
  Call call{"aten::_flash_attention_forward", {}, {}, 0};
  const auto argument = [&](const Tensor& x) { return call.argument(x, false); };
  const auto [queries, keys, values] = std::tuple(argument(q), argument(k), argument(v));
  const auto lengths = lengths_of(call, starts, q.size(0), most.expect_int());
  enter(current_stream(*call.device), call.uses);
  const auto output = at::empty_like(queries), sums = at::empty({q.size(1), q.size(0)}, queries.options().dtype(at::kFloat));
  int64_t start = 0;
  for (const int64_t length : lengths) {
    const auto mask = window_of(length, before, queries);
    const auto [of_document_, of_sums] = at::_scaled_dot_product_flash_attention_for_cpu(
        of_document(queries, start, length), for_heads(of_document(keys, start, length), q.size(1)),
        for_heads(of_document(values, start, length), q.size(1)), 0.0, !mask, mask, scale);
    output.narrow(0, start, length).copy_(of_document_.squeeze(0).transpose(0, 1));
    sums.narrow(1, start, length).copy_(of_sums.squeeze(0));
    start += length;
  }
  const auto state = at::empty({2}, q.options().dtype(at::kLong)), none = at::empty({0}, q.options());
  std::tuple result{call.result(output), call.result(sums), state, none, none};
  count_kernel(call.name, call.bytes);
  return result;
}

std::tuple<Tensor, Tensor, Tensor> flash_backward_of_documents(
    const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& output,
    const Tensor& log_sums, const Tensor& starts, const Tensor&, c10::SymInt most, c10::SymInt, double dropout, bool,
    const Tensor&, const Tensor&, Scale scale, Symbols before, Symbols) {
  check_of_documents(q, k, dropout);
  Call call{"aten::_flash_attention_backward", {}, {}, 0};
  const auto argument = [&](const Tensor& x) { return call.argument(x, false); };
  const auto [queries, keys, values] = std::tuple(argument(q), argument(k), argument(v));
  const auto [of_output, outputs, sums] = std::tuple(argument(gradient), argument(output), argument(log_sums));
  const auto lengths = lengths_of(call, starts, q.size(0), most.expect_int());
  enter(current_stream(*call.device), call.uses);
  const Tensor gradients[] = {at::empty_like(queries), at::empty_like(keys), at::empty_like(values)};
  int64_t start = 0;
  for (const int64_t length : lengths) {
    const auto part = [&](const Tensor& x) { return of_document(x, start, length); };
    const auto mask = window_of(length, before, queries);
    const auto [of_queries, of_keys, of_values] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        part(of_output), part(queries), for_heads(part(keys), q.size(1)), for_heads(part(values), q.size(1)),
        part(outputs), sums.narrow(1, start, length).t().contiguous().t().unsqueeze(0), 0.0, !mask, mask, scale);
    const Tensor found[] = {of_queries, for_groups(of_keys, k.size(1)), for_groups(of_values, k.size(1))};
    for (int which = 0; which < 3; ++which)
      gradients[which].narrow(0, start, length).copy_(found[which].squeeze(0).transpose(0, 1));
    start += length;
  }
  std::tuple result{call.result(gradients[0]), call.result(gradients[1]), call.result(gradients[2])};
  count_kernel(call.name, call.bytes);
  return result;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_scaled_dot_product_flash_attention", &flash);
  library.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  library.impl("_flash_attention_forward", &flash_of_documents);
  library.impl("_flash_attention_backward", &flash_backward_of_documents);
  library.impl("_scaled_dot_product_efficient_attention", &efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
}

}  // namespace
}  // namespace stand_in
