// Causal self-attention within documents that lie one after the other, and within windows, without a matrix of all pairs
// of tokens. A GPU has libtorch's flash attention for sequences of different lengths; a processor, and a GPU without it,
// computes document by document.

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <limits>

#include "guard.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// What tokens may read: their own document up to themselves, and of a window > 0 only so many tokens.
struct Reach {
  std::vector<int64_t> lengths;
  int64_t window;
  std::optional<double> scale;
  // The first tokens of documents and N, where a GPU reads them.
  Tensor starts;
};

// A sink of each head, f32, takes part in the softmax over the keys of a token, and has no value (Xiao et al., arXiv
// 2309.17453). With the logarithm s of a token's sum of exponentials its share is that of the sink's exponential in the new sum,
// and the shares of all keys shrink by the factor that the output does.
struct WithSinks {
  Tensor output, sums;
};

// A number for each head in the layout of `sums`, which the processor has as `[N, heads]` and a GPU as `[heads, N]`.
Tensor for_sums(const Tensor& sinks, const Tensor& sums) {
  return sums.is_cuda() ? sinks.to(at::kFloat).unsqueeze(1) : sinks.to(at::kFloat);
}

// Numbers in that layout as `[N, heads]`.
Tensor by_token(const Tensor& of_sums) { return of_sums.is_cuda() ? of_sums.transpose(0, 1) : of_sums; }

// The output and sums of attention with its sinks, if it has some.
WithSinks with_sinks(const Tensor& output, const Tensor& sums, const std::optional<Tensor>& sinks) {
  if (!sinks) return {output, sums};
  const auto all = at::logaddexp(sums, for_sums(*sinks, sums));
  const auto left = by_token(at::exp(sums - all)).unsqueeze(-1);
  return {(output * left).to(output.scalar_type()), all};
}

// The gradient of sinks, of the new output and sums: minus the sum, over tokens, of the sink's share times what the output's
// gradient makes of the output.
Tensor gradient_of_sinks(const Tensor& gradient, const Tensor& output, const Tensor& sums, const Tensor& sinks) {
  const auto share = by_token(at::exp(for_sums(sinks, sums) - sums));
  const auto made = (gradient.to(at::kFloat) * output).sum(-1);
  return (share * made).sum(0).neg().to(sinks.scalar_type());
}

// Attention of `[B, heads, T, D]` with sinks by the matrix of all pairs. A mask is bool, or added; without one tokens read
// those before them if `causal`. A scale of NaN is none.
Tensor by_all_pairs(
    const Tensor& queries, const Tensor& keys, const Tensor& values, const std::optional<Tensor>& mask,
    const Tensor& sinks, bool causal, double scale) {
  const double factor = std::isnan(scale) ? 1.0 / std::sqrt(static_cast<double>(queries.size(-1))) : scale;
  const int64_t tokens = queries.size(2), read = keys.size(2);
  auto products = (at::matmul(queries, keys.transpose(-2, -1)) * factor).to(at::kFloat);
  const auto hidden = -std::numeric_limits<double>::infinity();
  if (mask && mask->scalar_type() == at::kBool) products = products.masked_fill(mask->logical_not(), hidden);
  else if (mask) products = products + *mask;
  else if (causal) {
    const auto later = at::ones({tokens, read}, products.options().dtype(at::kBool)).triu(read - tokens + 1);
    products = products.masked_fill(later, hidden);
  }
  const auto of_sinks = sinks.to(at::kFloat).view({1, -1, 1, 1}).expand({products.size(0), -1, tokens, 1});
  const auto shares = at::softmax(at::cat(variable_list{products, of_sinks}, -1), -1).narrow(-1, 0, read);
  return at::matmul(shares.to(values.scalar_type()), values);
}

// Queries of a document that read the keys of one range: all before each, or those that a mask allows.
struct Piece {
  int64_t query, queries, key, keys;
  bool masked;
};

// Queries of a window's pieces. Each reads as many keys, and one less than the window.
constexpr int64_t window_block = 256;

std::vector<Piece> pieces_of(int64_t length, int64_t window) {
  const int64_t whole = window > 0 ? std::min(length, window) : length;
  std::vector<Piece> pieces{{0, whole, 0, whole, false}};
  for (int64_t query = whole; query < length; query += window_block) {
    const int64_t count = std::min(window_block, length - query);
    pieces.push_back({query, count, query - window + 1, window - 1 + count, true});
  }
  return pieces;
}

// What is added to the products of a piece's queries with its keys: nothing, or minus infinity outside of the window.
Tensor mask_of(int64_t window, const Tensor& like) {
  const auto numbers = like.options().dtype(at::kLong);
  const auto rows = at::arange(window_block, numbers).unsqueeze(1);
  const auto columns = at::arange(window - 1 + window_block, numbers);
  const auto outside = columns.lt(rows).logical_or(columns.ge(rows.add(window)));
  return at::zeros(outside.sizes(), like.options()).masked_fill_(outside, -std::numeric_limits<double>::infinity());
}

// A part of the tokens of `[N, heads, D]` as the processor's kernel reads it, `[1, heads, tokens, D]`. Its address is a
// multiple of 64, since products may depend on that: so a document has the same bits wherever it lies.
Tensor part(const Tensor& x, int64_t first, int64_t count) {
  auto rows = x.narrow(0, first, count);
  if (reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 64 != 0) rows = rows.clone();
  return rows.unsqueeze(0).transpose(1, 2);
}

// The tokens of `[1, heads, tokens, D]`, as `[tokens, heads, D]`.
Tensor rows_of(const Tensor& x) { return x.squeeze(0).transpose(0, 1); }

// The mask of a piece; none without.
std::optional<Tensor> masked(const Piece& piece, const Tensor& mask) {
  if (!piece.masked) return {};
  return mask.narrow(0, 0, piece.queries).narrow(1, 0, piece.keys).unsqueeze(0).unsqueeze(0);
}

Tensor mask_of_any(const Reach& reach, const Tensor& like) {
  const bool cuts = reach.window > 0 && std::any_of(reach.lengths.begin(), reach.lengths.end(), [&](int64_t length) {
    return length > reach.window;
  });
  return cuts ? mask_of(reach.window, like) : Tensor();
}

// The documents' attention by the processor: output and logarithms of the sums of exponentials, `[N, heads]`.
std::pair<Tensor, Tensor> forward_on_processor(
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Reach& reach) {
  auto output = at::empty_like(queries);
  auto sums = at::empty({queries.size(0), queries.size(1)}, queries.options().dtype(at::kFloat));
  const auto mask = mask_of_any(reach, queries);
  int64_t start = 0;
  for (const int64_t length : reach.lengths) {
    for (const auto& piece : pieces_of(length, reach.window)) {
      const auto [out, of_piece] = at::_scaled_dot_product_flash_attention_for_cpu(
          part(queries, start + piece.query, piece.queries), part(keys, start + piece.key, piece.keys),
          part(values, start + piece.key, piece.keys), 0.0, !piece.masked, masked(piece, mask), reach.scale);
      output.narrow(0, start + piece.query, piece.queries).copy_(rows_of(out));
      sums.narrow(0, start + piece.query, piece.queries).copy_(rows_of(of_piece));
    }
    start += length;
  }
  return {output, sums};
}

variable_list backward_on_processor(const Tensor& gradient, const variable_list& saved, const Reach& reach) {
  const auto &queries = saved[0], &keys = saved[1], &values = saved[2], &output = saved[3], &sums = saved[4];
  variable_list gradients{at::empty_like(queries), at::empty_like(keys), at::empty_like(values)};
  const auto mask = mask_of_any(reach, queries);
  int64_t start = 0;
  for (const int64_t length : reach.lengths) {
    const auto pieces = pieces_of(length, reach.window);
    const auto size = keys.sizes();
    // Several pieces read the same keys: their gradients are added in f32, in the order of the pieces.
    variable_list added;
    if (pieces.size() > 1)
      for (int which = 0; which < 2; ++which) added.push_back(at::zeros({length, size[1], size[2]}, sums.options()));
    for (const auto& piece : pieces) {
      const auto of = [&](const Tensor& x) { return part(x, start + piece.query, piece.queries); };
      const auto logarithms = part(sums.unsqueeze(2), start + piece.query, piece.queries).squeeze(3);
      const auto [of_queries, of_keys, of_values] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          of(gradient), of(queries), part(keys, start + piece.key, piece.keys),
          part(values, start + piece.key, piece.keys), of(output), logarithms, 0.0, !piece.masked, masked(piece, mask),
          reach.scale);
      gradients[0].narrow(0, start + piece.query, piece.queries).copy_(rows_of(of_queries));
      const Tensor of_read[] = {rows_of(of_keys), rows_of(of_values)};
      for (size_t which = 0; which < 2; ++which) {
        if (added.empty()) gradients[which + 1].narrow(0, start, length).copy_(of_read[which]);
        else added[which].narrow(0, piece.key, piece.keys).add_(of_read[which]);
      }
    }
    for (size_t which = 0; which < added.size(); ++which)
      gradients[which + 1].narrow(0, start, length).copy_(added[which]);
    start += length;
  }
  return gradients;
}

// The documents' attention on a GPU without flash attention of them, by the kernels that libtorch chooses.
Tensor composed(
    const Tensor& queries, const Tensor& keys, const Tensor& values, const std::optional<Tensor>& sinks,
    const Reach& reach) {
  const int64_t heads = queries.size(1);
  const auto by_document = [&](const Tensor& x) {
    // Without a copy for each head a matrix of all pairs would be made.
    const int64_t tokens = x.size(0), groups = x.size(1), size = x.size(2);
    const auto each = groups == heads
        ? x
        : x.unsqueeze(2).expand({tokens, groups, heads / groups, size}).reshape({tokens, heads, size});
    return each.unsqueeze(0).transpose(1, 2).split_with_sizes(reach.lengths, 2);
  };
  const auto all_queries = by_document(queries), all_keys = by_document(keys), all_values = by_document(values);
  const auto mask = mask_of_any(reach, queries);
  variable_list outputs;
  for (size_t document = 0; document < reach.lengths.size(); ++document) {
    for (const auto& piece : pieces_of(reach.lengths[document], reach.window)) {
      const auto narrowed = [&](const Tensor& x, int64_t first, int64_t count) {
        return x.size(2) == count ? x : x.narrow(2, first, count);
      };
      const auto of_queries = narrowed(all_queries[document], piece.query, piece.queries);
      const auto read = narrowed(all_keys[document], piece.key, piece.keys);
      const auto of_read = narrowed(all_values[document], piece.key, piece.keys);
      const auto allowed = masked(piece, mask);
      outputs.push_back(
          sinks ? by_all_pairs(of_queries, read, of_read, allowed, *sinks, !piece.masked, reach.scale.value_or(std::nan("")))
                : at::scaled_dot_product_attention(
                      of_queries, read, of_read, allowed, 0.0, !piece.masked, reach.scale));
    }
  }
  return at::cat(outputs, 2).squeeze(0).transpose(0, 1);
}

// The most tokens of a document, as flash attention is told. With one for all it would compute something else.
int64_t longest(const Reach& reach) {
  return std::max<int64_t>(2, *std::max_element(reach.lengths.begin(), reach.lengths.end()));
}

std::optional<int64_t> before(const Reach& reach) {
  return reach.window > 0 ? std::optional<int64_t>(reach.window - 1) : std::nullopt;
}

std::optional<int64_t> behind(const Reach& reach) {
  return reach.window > 0 ? std::optional<int64_t>(0) : std::nullopt;
}

struct WithinDocuments : Function<WithinDocuments> {
  static Tensor forward(
      AutogradContext* context, const Tensor& of_queries, const Tensor& of_keys, const Tensor& of_values,
      const std::optional<Tensor>& sinks, const Reach& reach) {
    const auto queries = of_queries.contiguous(), keys = of_keys.contiguous(), values = of_values.contiguous();
    context->saved_data["lengths"] = reach.lengths;
    context->saved_data["window"] = reach.window;
    context->saved_data["scale"] = reach.scale;
    if (queries.is_cuda()) {
      const auto most = longest(reach);
      auto [output, sums, state, unused, debug] = at::_flash_attention_forward(
          queries, keys, values, reach.starts, reach.starts, most, most, 0.0, true, false, reach.scale, before(reach),
          behind(reach));
      const auto whole = with_sinks(output, sums, sinks);
      context->save_for_backward(
          {queries, keys, values, whole.output, whole.sums, sinks.value_or(Tensor()), reach.starts, state, unused});
      return whole.output;
    }
    const auto [output, sums] = forward_on_processor(queries, keys, values, reach);
    const auto whole = with_sinks(output, sums, sinks);
    context->save_for_backward({queries, keys, values, whole.output, whole.sums, sinks.value_or(Tensor())});
    return whole.output;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Reach reach{
        context->saved_data["lengths"].toIntVector(), context->saved_data["window"].toInt(),
        context->saved_data["scale"].toOptional<double>(), Tensor()};
    const auto gradient = gradients[0].contiguous();
    const auto& sinks = saved[5];
    const auto of_sinks = sinks.defined() ? gradient_of_sinks(gradient, saved[3], saved[4], sinks) : Tensor();
    if (!gradient.is_cuda()) {
      auto all = backward_on_processor(gradient, saved, reach);
      all.insert(all.end(), {of_sinks, Tensor()});
      return all;
    }
    TORCH_CHECK(at::globalContext().deterministicAlgorithms(), "gradients of attention would be different in every run");
    const auto most = longest(reach);
    const auto [of_queries, of_keys, of_values] = at::_flash_attention_backward(
        gradient, saved[0], saved[1], saved[2], saved[3], saved[4], saved[6], saved[6], most, most, 0.0, true, saved[7],
        saved[8], reach.scale, before(reach), behind(reach));
    return {of_queries, of_keys, of_values, of_sinks, Tensor()};
  }
};

}  // namespace

extern "C" {

// Attention of `[N, heads, D]` queries to `[N, groups, D]` keys and values in documents of these lengths, whose sum is N.
// `starts`, i32, has their first tokens and N where flash attention reads them, and is null elsewhere. A window of 0 and a
// scale of NaN are none. `sinks`, `[heads]`, is null where heads have none.
char* shoal_attend_documents(
    Tensor* queries, Tensor* keys, Tensor* values, Tensor* sinks, const int64_t* lengths, size_t documents,
    Tensor* starts, int64_t window, double scale, Tensor** result) {
  return guarded([&] {
    const Reach reach{
        {lengths, lengths + documents}, window, std::isnan(scale) ? std::nullopt : std::optional<double>(scale),
        starts == nullptr ? Tensor() : *starts};
    int64_t tokens = 0;
    for (const int64_t length : reach.lengths) {
      TORCH_CHECK(length > 0, "a document of no token");
      tokens += length;
    }
    TORCH_CHECK(tokens == queries->size(0), "documents of ", tokens, " tokens in place of ", queries->size(0));
    const bool composes = queries->is_cuda() && starts == nullptr;
    const auto of_heads = sinks == nullptr ? std::nullopt : std::optional<Tensor>(*sinks);
    *result = new Tensor(
        composes ? composed(*queries, *keys, *values, of_heads, reach)
                 : WithinDocuments::apply(*queries, *keys, *values, of_heads, reach));
  });
}

// Attention of `[B, heads, T, D]` queries to as many heads of keys and values, with sinks `[heads]`. A bool mask, `[1, 1, T,
// keys]`, says which keys are read; null reads all. A scale of NaN is none.
char* shoal_attend_with_sinks(
    Tensor* queries, Tensor* keys, Tensor* values, Tensor* mask, Tensor* sinks, double scale, Tensor** result) {
  return guarded([&] {
    const auto allowed = mask == nullptr ? std::nullopt : std::optional<Tensor>(*mask);
    *result = new Tensor(by_all_pairs(*queries, *keys, *values, allowed, *sinks, false, scale));
  });
}

}  // extern "C"
