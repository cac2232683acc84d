// Partial products that are added in the order of slices, forward and backward, by one device or by
// several threads with a device each.

#include <torch/csrc/autograd/custom_function.h>

#include "guard.h"
#include "saved_seat.h"
#include "tensor_list.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// A tensor that slices read: as many aliases, whose gradients are added in the order of slices.
struct FanOut : Function<FanOut> {
  static variable_list forward(
      AutogradContext* context, const Tensor& x, int64_t count, Seat seat) {
    save(context, seat);
    variable_list aliases;
    for (int64_t slice = 0; slice < count; ++slice) aliases.push_back(x.detach());
    return aliases;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {sum(gradients, saved_seat(context)), Tensor(), Tensor()};
  }
};

// The sum of partial products. Each has the gradient of the sum.
struct Sum : Function<Sum> {
  static Tensor forward(AutogradContext* context, at::TensorList parts, Seat seat) {
    context->saved_data["count"] = int64_t(parts.size());
    return sum(parts.vec(), seat);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    variable_list all(size_t(context->saved_data["count"].toInt()), gradients[0]);
    all.push_back(Tensor());
    return all;
  }
};

}  // namespace

extern "C" {

// A meeting place of so many threads, to be freed with shoal_exchange_free; null without memory.
Exchange* shoal_exchange_new(size_t seats) { return new (std::nothrow) Exchange(seats); }

void shoal_exchange_free(Exchange* exchange) { delete exchange; }

// Lets a seat send large sums through collectives, which it owns from now on. All seats do so before they exchange.
void shoal_exchange_use(Exchange* exchange, size_t seat, Collectives* collectives) {
  exchange->use(seat, collectives);
}

// A seat takes no part any more: ends all waits with an error.
void shoal_exchange_end(Exchange* exchange, size_t seat) { exchange->end(seat); }

// Writes `count` aliases of `x` to `aliases`. Their gradients, with those of the other seats of the exchange
// unless it is null, are added in order.
char* shoal_fan_out(Tensor* x, size_t count, Exchange* exchange, size_t seat, Tensor** aliases) {
  return guarded([&] {
    give(FanOut::apply(*x, int64_t(count), Seat{exchange, seat}), aliases, count);
  });
}

// Writes the `all` parts of all seats of the exchange in order, on the device of the first of `count` own ones; without
// an exchange, the own ones are all. `alike` is whether all have one shape.
char* shoal_all_parts(
    Tensor** own, size_t count, Exchange* exchange, size_t seat, Tensor** results, size_t all, bool alike) {
  return guarded([&] {
    const auto list = tensors(own, count);
    auto parts = exchange == nullptr ? list : exchange->all(seat, list, alike);
    for (auto& part : parts) part = part.to(list[0].device());
    give(parts, results, all);
  });
}

// The sum of `count` parts, with those of the other seats of the exchange unless it is null, in order.
char* shoal_sum_in_order(
    Tensor** parts, size_t count, Exchange* exchange, size_t seat, Tensor** result) {
  return guarded([&] {
    const auto list = tensors(parts, count);
    *result = new Tensor(Sum::apply(at::TensorList(list), Seat{exchange, seat}));
  });
}

}  // extern "C"
