// The residual stream in parts: each device has the rows of some tokens, and products of slices read all of them.

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>

#include "guard.h"
#include "packed.h"
#include "saved_seat.h"
#include "tensor_list.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// The device's rows of what all devices have whole.
struct TakeRows : Function<TakeRows> {
  static Tensor forward(AutogradContext* context, const Tensor& whole, Seat seat) {
    context->saved_data["rows"] = whole.size(0);
    save(context, seat);
    // A copy, so that the whole is not kept.
    return own_rows(whole, seat).clone();
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto rows = context->saved_data["rows"].toInt();
    return {all_rows(gradients[0].contiguous(), rows, saved_seat(context)), Tensor()};
  }
};

// The rows of all devices, which all do the same with them.
struct AllRows : Function<AllRows> {
  static Tensor forward(AutogradContext* context, const Tensor& own, int64_t rows, Seat seat) {
    save(context, seat);
    return all_rows(own.contiguous(), rows, seat);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {own_rows(gradients[0], saved_seat(context)).contiguous(), Tensor(), Tensor()};
  }
};

// The device's rows of a sum of partial products, each of which has the gradient of the sum.
struct SumOfRows : Function<SumOfRows> {
  static Tensor forward(AutogradContext* context, at::TensorList parts, Seat seat) {
    context->saved_data["count"] = int64_t(parts.size());
    context->saved_data["rows"] = parts[0].size(0);
    save(context, seat);
    return sum_of_own_rows(parts.vec(), seat);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto rows = context->saved_data["rows"].toInt();
    const auto whole = all_rows(gradients[0].contiguous(), rows, saved_seat(context));
    variable_list all(size_t(context->saved_data["count"].toInt()), whole);
    all.push_back(Tensor());
    return all;
  }
};

// How many matrices each product joins, the windows of those that are packed, and how many of these products a slice has.
struct Joins {
  std::vector<int64_t> matrices, biases;
  std::vector<Window> windows;
  int64_t of_slice;
};

Tensor joined(at::TensorList parts) { return parts.size() == 1 ? parts[0] : at::cat(parts); }

// Products of all rows with matrices of each slice. Backward the device gets the rows of the others again, so that it
// keeps its own only.
struct Products : Function<Products> {
  static variable_list forward(
      AutogradContext* context, const Tensor& own, at::TensorList matrices, at::TensorList biases, int64_t rows,
      const Joins& joins, Seat seat) {
    const auto x = all_rows(own, rows, seat);
    variable_list products;
    size_t matrix = 0, bias = 0;
    for (size_t product = 0; product < joins.matrices.size(); ++product) {
      const auto count = size_t(joins.matrices[product]), added = size_t(joins.biases[product]);
      const auto offset = added == 0 ? std::optional<Tensor>() : joined(biases.slice(bias, added));
      products.push_back(at::linear(
          x, factor(matrices.slice(matrix, count), joins.windows.data() + matrix, x.scalar_type()), offset));
      matrix += count, bias += added;
    }
    const bool trains = std::any_of(matrices.begin(), matrices.end(), [](const Tensor& one) { return one.requires_grad(); });
    // Only gradients of matrices need the rows.
    variable_list kept{trains ? own : Tensor()};
    kept.insert(kept.end(), matrices.begin(), matrices.end());
    context->saved_data["of rows"] = own.requires_grad();
    context->save_for_backward(std::move(kept));
    context->saved_data["rows"] = rows;
    context->saved_data["matrices"] = joins.matrices;
    context->saved_data["biases"] = joins.biases;
    context->saved_data["windows"] = numbers(joins.windows.data(), joins.windows.size());
    context->saved_data["of slice"] = joins.of_slice;
    save(context, seat);
    return products;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto seat = saved_seat(context);
    const auto kept = context->get_saved_variables();
    const auto counts = context->saved_data["matrices"].toIntVector();
    const auto added = context->saved_data["biases"].toIntVector();
    const auto of_slice = size_t(context->saved_data["of slice"].toInt());
    const auto rows = context->saved_data["rows"].toInt();
    const auto x = kept[0].defined() ? all_rows(kept[0], rows, seat) : Tensor();
    const bool of_rows = context->saved_data["of rows"].toBool();
    variable_list of_matrices, of_biases, of_slices;
    const auto* matrices = kept.data() + 1;
    const auto windows = saved_windows(context->saved_data["windows"].toIntVector());
    const auto* window = windows.data();
    for (size_t product = 0; product < counts.size(); ++product) {
      const auto gradient = gradients[product].contiguous();
      const at::TensorList parts(matrices, size_t(counts[product]));
      matrices += counts[product];
      if (of_rows) {
        const auto of_x = gradient.mm(factor(parts, window, gradient.scalar_type()));
        if (product % of_slice == 0) of_slices.push_back(of_x);
        else of_slices.back() = of_slices.back().add(of_x);
      }
      const auto of_joined = parts[0].requires_grad() ? gradient.t().mm(x) : Tensor();
      const auto of_offset = added[product] > 0 && parts[0].requires_grad() ? gradient.sum(0) : Tensor();
      int64_t row = 0;
      for (size_t part = 0; part < parts.size(); ++part) {
        const auto outputs = parts[part].size(0);
        of_matrices.push_back(of_joined.defined() ? of_joined.narrow(0, row, outputs) : Tensor());
        if (int64_t(part) < added[product])
          of_biases.push_back(of_offset.defined() ? of_offset.narrow(0, row, outputs) : Tensor());
        row += outputs;
      }
      window += counts[product];
    }
    variable_list all{of_slices.empty() ? Tensor() : sum_of_own_rows(of_slices, seat)};
    all.insert(all.end(), of_matrices.begin(), of_matrices.end());
    all.insert(all.end(), of_biases.begin(), of_biases.end());
    all.insert(all.end(), 3, Tensor());
    return all;
  }
};

}  // namespace

extern "C" {

// The seat's rows of `[rows, width]`, whose gradient has the rows of all seats.
char* shoal_take_rows(Tensor* whole, Exchange* exchange, size_t seat, Tensor** result) {
  return guarded([&] { *result = new Tensor(TakeRows::apply(*whole, Seat{exchange, seat})); });
}

// The rows of all seats, of `rows` in all. They get the gradient of their copy here.
char* shoal_all_rows(Tensor* own, int64_t rows, Exchange* exchange, size_t seat, Tensor** result) {
  return guarded([&] { *result = new Tensor(AllRows::apply(*own, rows, Seat{exchange, seat})); });
}

// The seat's rows of the sum of `count` parts `[rows, width]` and those of the other seats, in order.
char* shoal_sum_of_rows(Tensor** parts, size_t count, Exchange* exchange, size_t seat, Tensor** result) {
  return guarded([&] {
    const auto all = tensors(parts, count);
    *result = new Tensor(SumOfRows::apply(at::TensorList(all), Seat{exchange, seat}));
  });
}

// Writes `products` products of `rows` rows, of which `own` has the seat's, to `results`: `of_slice` for each of the
// seat's slices. The next `matrices_of[n]` matrices below each other are the factor of product n, to which the next
// `biases_of[n]` vectors are added. Each matrix has a window, of zeros unless it is packed.
char* shoal_products(
    Tensor* own, int64_t rows, Tensor** matrices, const Window* windows, const int64_t* matrices_of, Tensor** biases,
    const int64_t* biases_of,
    size_t products, size_t of_slice, Exchange* exchange, size_t seat, Tensor** results) {
  return guarded([&] {
    const auto count = [&](const int64_t* all) { return size_t(std::accumulate(all, all + products, int64_t(0))); };
    const auto joined = count(matrices_of);
    const Joins joins{
        {matrices_of, matrices_of + products}, {biases_of, biases_of + products}, {windows, windows + joined},
        int64_t(of_slice)};
    const auto factors = tensors(matrices, joined), offsets = tensors(biases, count(biases_of));
    give(
        Products::apply(*own, at::TensorList(factors), at::TensorList(offsets), rows, joins, Seat{exchange, seat}),
        results, products);
  });
}

}  // extern "C"
