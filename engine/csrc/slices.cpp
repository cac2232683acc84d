// Partial products that are added in the order of slices, forward and backward, by one device or by
// several threads with a device each.

#include <torch/csrc/autograd/custom_function.h>

#include "exchange.h"
#include "guard.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// Elements from which on a sum is divided among the devices. Fewer are not worth a second meeting.
constexpr int64_t kDivided = 1 << 14;

// The sum of parts: f32, in their order, rounded once to their type, on this device.
Tensor sum_here(const variable_list& parts, at::Device device) {
  const auto on_device = [&](const Tensor& part) { return part.to(device).to(at::kFloat); };
  auto total = on_device(parts[0]);
  for (size_t slice = 1; slice < parts.size(); ++slice) total = total.add(on_device(parts[slice]));
  return total.to(parts[0].scalar_type());
}

// The sum of the parts of all slices, each device's share of the elements on that device. Shares are equal, so that the
// last may have zeros at its end.
Tensor sum_of_collectives(const variable_list& own, int64_t seats, Collectives& collectives) {
  const auto elements = own[0].numel(), share = (elements + seats - 1) / seats;
  // One slice, the usual case, needs no copy.
  auto parts = (own.size() == 1 ? own[0] : at::stack(own)).reshape({int64_t(own.size()), elements});
  if (share * seats > elements) parts = at::constant_pad_nd(parts, {0, share * seats - elements});
  // [seats that sum, own slices, share], then [seats that sent them, their slices, share]: all slices in order.
  const auto sent = parts.view({-1, seats, share}).transpose(0, 1).contiguous();
  const auto slices = collectives.exchange(sent).view({-1, share}).unbind(0);
  const auto sums = collectives.gather(sum_here(slices, own[0].device()));
  return sums.view(-1).narrow(0, 0, elements).view(own[0].sizes());
}

// The same by copies from device to device.
Tensor sum_of_copies(const variable_list& own, size_t seat, Exchange& meeting) {
  const auto device = own[0].device();
  const auto elements = own[0].numel(), seats = int64_t(meeting.seats());
  variable_list flat;
  for (const auto& part : own) flat.push_back(part.reshape({-1}));
  auto parts = meeting.all(seat, flat);
  const auto first = elements * int64_t(seat) / seats, end = elements * int64_t(seat + 1) / seats;
  for (auto& part : parts) part = part.narrow(0, first, end - first);
  auto shares = meeting.all(seat, {sum_here(parts, device)}, /*alike=*/false);
  for (auto& share : shares) share = share.to(device);
  return at::cat(shares).view(own[0].sizes());
}

// The sum of the parts of all slices, in their order. Without an exchange, `own` are all.
Tensor sum(const variable_list& own, int64_t exchange, int64_t seat) {
  const auto device = own[0].device();
  if (exchange == 0) return sum_here(own, device);
  auto& meeting = *reinterpret_cast<Exchange*>(exchange);
  if (own[0].numel() < kDivided) return sum_here(meeting.all(size_t(seat), own), device);
  // Each device sums its share of the elements, and all take the shares: the bytes of a ring.
  if (auto* collectives = meeting.collectives(size_t(seat)))
    return sum_of_collectives(own, int64_t(meeting.seats()), *collectives);
  return sum_of_copies(own, size_t(seat), meeting);
}

// A tensor that slices read: as many aliases, whose gradients are added in the order of slices.
struct FanOut : Function<FanOut> {
  static variable_list forward(
      AutogradContext* context, const Tensor& x, int64_t count, int64_t exchange, int64_t seat) {
    context->saved_data["exchange"] = exchange;
    context->saved_data["seat"] = seat;
    variable_list aliases;
    for (int64_t slice = 0; slice < count; ++slice) aliases.push_back(x.detach());
    return aliases;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto total = sum(
        gradients, context->saved_data["exchange"].toInt(), context->saved_data["seat"].toInt());
    return {total, Tensor(), Tensor(), Tensor()};
  }
};

// The sum of partial products. Each has the gradient of the sum.
struct Sum : Function<Sum> {
  static Tensor forward(
      AutogradContext* context, at::TensorList parts, int64_t exchange, int64_t seat) {
    context->saved_data["count"] = int64_t(parts.size());
    return sum(parts.vec(), exchange, seat);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    variable_list all(size_t(context->saved_data["count"].toInt()), gradients[0]);
    all.insert(all.end(), 2, Tensor());
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
    auto results =
        FanOut::apply(*x, int64_t(count), reinterpret_cast<int64_t>(exchange), int64_t(seat));
    for (size_t slice = 0; slice < count; ++slice) aliases[slice] = new Tensor(results[slice]);
  });
}

// Writes the `all` parts of all seats of the exchange in order, on the device of the first of `count` own ones; without
// an exchange, the own ones are all. `alike` is whether all have one shape.
char* shoal_all_parts(
    Tensor** own, size_t count, Exchange* exchange, size_t seat, Tensor** results, size_t all, bool alike) {
  return guarded([&] {
    variable_list list;
    for (size_t slice = 0; slice < count; ++slice) list.push_back(*own[slice]);
    const auto parts = exchange == nullptr ? list : exchange->all(seat, list, alike);
    TORCH_CHECK(parts.size() == all, "the devices of this peer have other slices");
    for (size_t slice = 0; slice < all; ++slice)
      results[slice] = new Tensor(parts[slice].to(list[0].device()));
  });
}

// The sum of `count` parts, with those of the other seats of the exchange unless it is null, in order.
char* shoal_sum_in_order(
    Tensor** parts, size_t count, Exchange* exchange, size_t seat, Tensor** result) {
  return guarded([&] {
    variable_list list;
    for (size_t slice = 0; slice < count; ++slice) list.push_back(*parts[slice]);
    *result = new Tensor(
        Sum::apply(at::TensorList(list), reinterpret_cast<int64_t>(exchange), int64_t(seat)));
  });
}

}  // extern "C"
