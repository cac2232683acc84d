#include "sums.h"

using at::Tensor;
using Tensors = std::vector<Tensor>;

namespace {

// Elements from which on a sum is divided among the devices, and sent by collectives. Fewer are not worth a second
// meeting.
constexpr int64_t kDivided = 1 << 14;

// What tensors of so many elements are sent through, if not from memory to memory.
Collectives* collectives(int64_t elements, Seat seat) {
  return elements < kDivided ? nullptr : seat.exchange->collectives(seat.index);
}

// The sum of parts: f32, in their order, rounded once to their type, on this device.
Tensor sum_here(const Tensors& parts, at::Device device) {
  const auto on_device = [&](const Tensor& part) { return part.to(device).to(at::kFloat); };
  auto total = on_device(parts[0]);
  for (size_t slice = 1; slice < parts.size(); ++slice) total = total.add(on_device(parts[slice]));
  return total.to(parts[0].scalar_type());
}

// The most rows that a device has.
int64_t most_rows(int64_t rows, Seat seat) {
  const auto count = int64_t(seat.count());
  return (rows + count - 1) / count;
}

// `rows` with zeros after them, up to this number.
Tensor padded(const Tensor& rows, int64_t count) {
  const auto missing = count - rows.size(0);
  return missing == 0 ? rows : at::constant_pad_nd(rows, {0, 0, 0, missing});
}

// What each device sums, for collectives: `[devices, own slices, most rows, width]`.
Tensor by_device(const Tensors& own, Seat seat) {
  const auto rows = own[0].size(0), most = most_rows(rows, seat), count = int64_t(seat.count());
  const auto slices = int64_t(own.size());
  if (rows == most * count) {
    // One slice, the usual case, needs no copy.
    const auto all = own.size() == 1 ? own[0].unsqueeze(0) : at::stack(own);
    return all.view({slices, count, most, -1}).transpose(0, 1).contiguous();
  }
  Tensors sent;
  for (size_t device = 0; device < seat.count(); ++device)
    for (const auto& part : own)
      sent.push_back(padded(own_rows(part, {seat.exchange, device}), most));
  return at::stack(sent).view({count, slices, most, -1});
}

}  // namespace

Tensor own_rows(const Tensor& whole, Seat seat) {
  const auto rows = whole.size(0);
  return whole.narrow(0, seat.first(seat.index, rows), seat.rows(seat.index, rows));
}

Tensor sum_of_own_rows(const Tensors& parts, Seat seat) {
  const auto device = parts[0].device();
  if (seat.exchange == nullptr) return sum_here(parts, device);
  if (auto* through = collectives(parts[0].numel(), seat)) {
    const auto rows = parts[0].size(0), most = most_rows(rows, seat);
    // [devices that sent them, their slices, rows]: all slices in order.
    const auto slices = through->exchange(by_device(parts, seat)).view({-1, most, parts[0].size(1)});
    return sum_here(slices.narrow(1, 0, seat.rows(seat.index, rows)).unbind(0), device);
  }
  auto all = seat.exchange->all(seat.index, parts);
  for (auto& part : all) part = own_rows(part, seat);
  return sum_here(all, device);
}

Tensor all_rows(const Tensor& own, int64_t rows, Seat seat) {
  if (seat.exchange == nullptr) return own;
  if (auto* through = collectives(rows * own.size(1), seat)) {
    const auto all = through->gather(padded(own, most_rows(rows, seat)).contiguous());
    if (rows == all.size(0) * all.size(1)) return all.view({rows, -1});
    Tensors shares;
    for (size_t device = 0; device < seat.count(); ++device)
      shares.push_back(all[int64_t(device)].narrow(0, 0, seat.rows(device, rows)));
    return at::cat(shares);
  }
  auto shares = seat.exchange->all(seat.index, {own}, /*alike=*/false);
  for (auto& share : shares) share = share.to(own.device());
  const auto all = at::cat(shares);
  TORCH_CHECK(all.size(0) == rows, "the devices of this peer are at different passes");
  return all;
}

Tensor sum(const Tensors& parts, Seat seat) {
  if (seat.exchange == nullptr) return sum_here(parts, parts[0].device());
  const auto elements = parts[0].numel();
  if (elements < kDivided) return sum_here(seat.exchange->all(seat.index, parts), parts[0].device());
  // Each device sums its share of the elements, and all take the shares: the bytes of a ring.
  Tensors flat;
  for (const auto& part : parts) flat.push_back(part.reshape({elements, 1}));
  return all_rows(sum_of_own_rows(flat, seat), elements, seat).view(parts[0].sizes());
}
