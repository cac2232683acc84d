// The seat of a device between a forward pass and its backward pass.

#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "sums.h"

inline void save(torch::autograd::AutogradContext* context, Seat seat) {
  context->saved_data["exchange"] = reinterpret_cast<int64_t>(seat.exchange);
  context->saved_data["seat"] = int64_t(seat.index);
}

inline Seat saved_seat(torch::autograd::AutogradContext* context) {
  auto* exchange = reinterpret_cast<Exchange*>(context->saved_data["exchange"].toInt());
  return {exchange, size_t(context->saved_data["seat"].toInt())};
}
