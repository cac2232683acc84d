// Sums of what slices have, in their order, and the rows of them that each device has. Devices have about equally many
// rows, in order.

#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "exchange.h"

// The place of a device among those that compute passes together: none if the exchange is null.
struct Seat {
  Exchange* exchange;
  size_t index;

  size_t count() const { return exchange == nullptr ? 1 : exchange->seats(); }
  // The first of so many rows that a device has; of all of them together, one past the last.
  int64_t first(size_t device, int64_t rows) const { return int64_t(device) * rows / int64_t(count()); }
  int64_t rows(size_t device, int64_t rows) const { return first(device + 1, rows) - first(device, rows); }
};

// The rows of `whole` that the seat has: a view.
at::Tensor own_rows(const at::Tensor& whole, Seat seat);

// This device's rows of the sum of the parts of all slices, `[rows, width]`: added in f32 and in their order, rounded once
// to their type. Of the devices each has the parts of some slices, in order.
at::Tensor sum_of_own_rows(const std::vector<at::Tensor>& parts, Seat seat);

// The rows of all devices, in order: `rows` in all.
at::Tensor all_rows(const at::Tensor& own, int64_t rows, Seat seat);

// The sum of the parts of all slices, of any shape.
at::Tensor sum(const std::vector<at::Tensor>& parts, Seat seat);
