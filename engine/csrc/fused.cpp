// The elementwise parts of a layer as autograd functions. Tensors are f32 or bf16. The loops for the CPU are in Rust
// (src/numeric/fused.rs); this file distributes them over libtorch's threads. A GPU has kernels (kernels/).

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include "guard.h"
#include "launch.h"
#include "tensor_list.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Dimensions of a rotation, with the layout in src/numeric/fused.rs.
struct Heads {
  size_t tokens;
  size_t heads;
  size_t key_value_heads;
  size_t size;
  size_t rotated;
};

extern "C" {
void shoal_rms_norm_rows(
    bool bf16, const void* x, const void* weight, void* y, float* scales, size_t rows,
    size_t width, float epsilon, float offset);
void shoal_rms_norm_backward_rows(
    bool bf16, const void* gradient, const void* x, const void* weight, const float* scales,
    void* x_gradient, float* weight_gradient, size_t rows, size_t width, float offset);
void shoal_rotate_rows(
    bool bf16, const void* mixed, void* const* parts, const void* const* angles, size_t first,
    size_t rows, const Heads* heads);
void shoal_rotate_backward_rows(
    bool bf16, const void* const* parts, void* mixed, const void* const* angles, size_t first,
    size_t rows, const Heads* heads);
void shoal_swiglu_rows(bool bf16, const void* both, void* out, size_t rows, size_t inner);
void shoal_swiglu_backward_rows(
    bool bf16, const void* gradient, const void* both, void* both_gradient, size_t rows,
    size_t inner);
void shoal_cross_entropy_rows(
    bool bf16, void* logits, const int64_t* targets, float* losses, size_t rows, size_t width,
    float scale, bool with_gradients);
}

namespace {

// Minimum number of rows per thread.
constexpr int64_t grain = 32;
// Rows in each partial sum of a norm's weight gradient, for any number of threads.
constexpr int64_t block = 64;

// Address of row `row` of a contiguous tensor whose rows have `width` elements.
char* row_of(const Tensor& tensor, int64_t row, int64_t width) {
  return static_cast<char*>(tensor.data_ptr()) + row * width * tensor.element_size();
}

template <typename Work>
void over_rows(int64_t rows, Work work) {
  at::parallel_for(0, rows, grain, [&](int64_t start, int64_t end) { work(start, end - start); });
}

// Threads of a kernel in which some share a row.
constexpr int64_t lanes = 16;
// Threads of a block that share a row.
constexpr int64_t block_threads = 256;

struct RmsNorm : Function<RmsNorm> {
  static Tensor forward(
      AutogradContext* context, const Tensor& input, const Tensor& weight, double epsilon,
      double offset) {
    auto x = input.contiguous();
    const int64_t width = x.size(-1), rows = x.numel() / width;
    auto y = at::empty_like(x);
    auto scales = at::empty({rows}, x.options().dtype(at::kFloat));
    TORCH_CHECK(weight.scalar_type() == x.scalar_type() && weight.is_contiguous(), "a norm's weight is of its input's dtype");
    if (x.is_cuda()) {
      launch("rms_norm", x, rows * lanes, x.data_ptr(), uint64_t(rows), uint64_t(width), weight.data_ptr(), y.data_ptr(),
             scales.data_ptr(), static_cast<float>(epsilon), static_cast<float>(offset));
    } else over_rows(rows, [&](int64_t row, int64_t count) {
      shoal_rms_norm_rows(
          is_bf16(x), row_of(x, row, width), weight.data_ptr(), row_of(y, row, width),
          scales.data_ptr<float>() + row, count, width, static_cast<float>(epsilon),
          static_cast<float>(offset));
    });
    context->save_for_backward({x, weight, scales});
    context->saved_data["offset"] = offset;
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto& scales = saved[2];
    const auto offset = static_cast<float>(context->saved_data["offset"].toDouble());
    auto gradient = gradients[0].contiguous();
    const int64_t width = x.size(-1), rows = x.numel() / width;
    const int64_t blocks = (rows + block - 1) / block;
    auto x_gradient = at::empty_like(x);
    auto parts = at::empty({blocks, width}, x.options().dtype(at::kFloat));
    if (x.is_cuda()) {
      launch("rms_norm_backward", x, rows * lanes, gradient.data_ptr(), uint64_t(rows), uint64_t(width), x.data_ptr(),
             saved[1].data_ptr(), scales.data_ptr(), x_gradient.data_ptr(), offset);
      launch("rms_norm_weight", x, blocks * width, gradient.data_ptr(), uint64_t(rows), uint64_t(width), x.data_ptr(),
             scales.data_ptr(), parts.data_ptr(), uint64_t(block));
    } else at::parallel_for(0, blocks, 1, [&](int64_t start, int64_t end) {
      for (int64_t index = start; index < end; ++index) {
        const int64_t row = index * block, count = std::min(block, rows - row);
        shoal_rms_norm_backward_rows(
            is_bf16(x), row_of(gradient, row, width), row_of(x, row, width), saved[1].data_ptr(),
            scales.data_ptr<float>() + row, row_of(x_gradient, row, width),
            parts.data_ptr<float>() + index * width, count, width, offset);
      }
    });
    return {x_gradient, parts.sum(0).to(x.scalar_type()), Tensor(), Tensor()};
  }
};

struct Rotate : Function<Rotate> {
  static variable_list forward(
      AutogradContext* context, const Tensor& input, const Tensor& cosine, const Tensor& sine,
      int64_t heads, int64_t key_value_heads) {
    auto mixed = input.contiguous();
    const int64_t samples = mixed.size(0), tokens = mixed.size(1), width = mixed.size(2);
    const int64_t head = width / (heads + 2 * key_value_heads);
    const Heads extents{size_t(tokens), size_t(heads), size_t(key_value_heads), size_t(head),
                        size_t(2 * cosine.size(1))};
    auto queries = at::empty({samples, tokens, heads, head}, mixed.options());
    auto keys = at::empty({samples, tokens, key_value_heads, head}, mixed.options());
    auto values = at::empty_like(keys);
    if (mixed.is_cuda()) {
      launch("rotate", mixed, mixed.numel(), mixed.data_ptr(), uint64_t(samples * tokens), uint64_t(width),
             queries.data_ptr(), keys.data_ptr(), values.data_ptr(), cosine.data_ptr(), sine.data_ptr(), extents);
    } else over_rows(samples * tokens, [&](int64_t row, int64_t count) {
      void* parts[] = {
          row_of(queries, row, heads * head), row_of(keys, row, key_value_heads * head),
          row_of(values, row, key_value_heads * head)};
      const void* angles[] = {cosine.data_ptr(), sine.data_ptr()};
      shoal_rotate_rows(
          is_bf16(mixed), row_of(mixed, row, width), parts, angles, row, count, &extents);
    });
    context->save_for_backward({cosine, sine});
    return {queries, keys, values};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto saved = context->get_saved_variables();
    auto queries = gradients[0].contiguous();
    auto keys = gradients[1].contiguous();
    auto values = gradients[2].contiguous();
    const int64_t samples = queries.size(0), tokens = queries.size(1), heads = queries.size(2);
    const int64_t key_value_heads = keys.size(2), head = queries.size(3);
    const int64_t width = (heads + 2 * key_value_heads) * head;
    const Heads extents{size_t(tokens), size_t(heads), size_t(key_value_heads), size_t(head),
                        size_t(2 * saved[0].size(1))};
    auto mixed = at::empty({samples, tokens, width}, queries.options());
    if (mixed.is_cuda()) {
      launch("rotate_backward", mixed, mixed.numel(), queries.data_ptr(), uint64_t(samples * tokens), uint64_t(width),
             keys.data_ptr(), values.data_ptr(), mixed.data_ptr(), saved[0].data_ptr(), saved[1].data_ptr(), extents);
    } else over_rows(samples * tokens, [&](int64_t row, int64_t count) {
      const void* parts[] = {
          row_of(queries, row, heads * head), row_of(keys, row, key_value_heads * head),
          row_of(values, row, key_value_heads * head)};
      const void* angles[] = {saved[0].data_ptr(), saved[1].data_ptr()};
      shoal_rotate_backward_rows(
          is_bf16(mixed), parts, row_of(mixed, row, width), angles, row, count, &extents);
    });
    return {mixed, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

struct SwiGlu : Function<SwiGlu> {
  static Tensor forward(AutogradContext* context, const Tensor& input) {
    auto both = input.contiguous();
    const int64_t width = both.size(-1), rows = both.numel() / width;
    auto size = both.sizes().vec();
    size.back() = width / 2;
    auto out = at::empty(size, both.options());
    if (both.is_cuda()) {
      launch("swiglu", both, out.numel(), both.data_ptr(), uint64_t(rows), uint64_t(width / 2), out.data_ptr());
    } else over_rows(rows, [&](int64_t row, int64_t count) {
      shoal_swiglu_rows(
          is_bf16(both), row_of(both, row, width), row_of(out, row, width / 2), count, width / 2);
    });
    context->save_for_backward({both});
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto both = context->get_saved_variables()[0];
    auto gradient = gradients[0].contiguous();
    const int64_t width = both.size(-1), rows = both.numel() / width;
    auto both_gradient = at::empty_like(both);
    if (both.is_cuda()) {
      launch("swiglu_backward", both, gradient.numel(), gradient.data_ptr(), uint64_t(rows), uint64_t(width / 2),
             both.data_ptr(), both_gradient.data_ptr());
    } else over_rows(rows, [&](int64_t row, int64_t count) {
      shoal_swiglu_backward_rows(
          is_bf16(both), row_of(gradient, row, width / 2), row_of(both, row, width),
          row_of(both_gradient, row, width), count, width / 2);
    });
    return {both_gradient};
  }
};

}  // namespace

extern "C" {

// `x` normalised over its last dimension and multiplied by `weight + offset`.
char* shoal_rms_norm(Tensor* x, Tensor* weight, double epsilon, double offset, Tensor** result) {
  return guarded([&] { *result = new Tensor(RmsNorm::apply(*x, *weight, epsilon, offset)); });
}

// Splits `[B, T, (heads + 2 key_value_heads) D]` into queries, keys and values `[B, T, heads, D]`,
// and rotates the first R channels of the first two by `[T, R / 2]` angles. Writes three tensors to `results`.
char* shoal_rotate(
    Tensor* mixed, Tensor* cosine, Tensor* sine, int64_t heads, int64_t key_value_heads,
    Tensor** results) {
  return guarded([&] {
    give(Rotate::apply(*mixed, *cosine, *sine, heads, key_value_heads), results, 3);
  });
}

// silu of the first half of the last dimension, times the second.
char* shoal_swiglu(Tensor* both, Tensor** result) {
  return guarded([&] { *result = new Tensor(SwiGlu::apply(*both)); });
}

// The cross-entropy of each row of contiguous logits `[N, V]`: f32 `[N]`. With gradients, the logits
// become those of the losses times `scale`. No autograd.
char* shoal_cross_entropy(
    Tensor* logits, Tensor* targets, double scale, bool with_gradients, Tensor** losses) {
  return guarded([&] {
    const int64_t rows = logits->size(0), width = logits->size(1);
    auto labels = targets->contiguous();
    auto values = at::empty({rows}, logits->options().dtype(at::kFloat));
    if (logits->is_cuda()) {
      TORCH_CHECK(logits->is_contiguous() && labels.is_cuda() && labels.scalar_type() == at::kLong, "targets of logits");
      launch("cross_entropy", *logits, rows * block_threads, logits->data_ptr(), uint64_t(rows), uint64_t(width),
             labels.data_ptr(), values.data_ptr(), static_cast<float>(scale), uint32_t(with_gradients));
    } else at::parallel_for(0, rows, 1, [&](int64_t start, int64_t end) {
      shoal_cross_entropy_rows(
          is_bf16(*logits), row_of(*logits, start, width), labels.data_ptr<int64_t>() + start,
          values.data_ptr<float>() + start, end - start, width, static_cast<float>(scale),
          with_gradients);
    });
    *losses = new Tensor(values);
  });
}

}  // extern "C"
