// Where the threads of several devices, which compute the same passes, exchange tensors.

#pragma once

#include <ATen/ATen.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "collectives.h"

// A meeting place of the threads, which all exchange the same sequence of parts.
class Exchange {
 public:
  explicit Exchange(size_t seats) : turns_(seats, 0), collectives_(seats) {
    for (auto& table : tables_) table.parts.resize(seats);
  }

  size_t seats() const { return turns_.size(); }

  // What a seat sends large sums through; null if they are exchanged here as all else is. For the seat's own thread.
  Collectives* collectives(size_t seat) const { return collectives_[seat].get(); }

  // Lets a seat send large sums through these. All seats do so before they exchange.
  void use(size_t seat, Collectives* collectives) { collectives_[seat].reset(collectives); }

  // The parts of all seats, in their order. Waits until all have brought theirs for this turn. `alike` is whether all
  // have one shape.
  std::vector<at::Tensor> all(size_t seat, const std::vector<at::Tensor>& own, bool alike = true) {
    std::unique_lock lock(mutex_);
    // While some take the parts of a turn, others may bring those of the next, but none of a third.
    auto& table = tables_[turns_[seat]++ % 2];
    table.parts[seat] = own;
    const size_t seats = table.parts.size();
    if (++table.brought == seats) changed_.notify_all();
    changed_.wait(lock, [&] { return table.brought == seats || ended_; });
    TORCH_CHECK(table.brought == seats, "another device of this peer has stopped");
    std::vector<at::Tensor> parts;
    for (const auto& brought : table.parts) parts.insert(parts.end(), brought.begin(), brought.end());
    if (++table.taken == seats) {
      table.brought = table.taken = 0;
      for (auto& brought : table.parts) brought.clear();
    }
    for (const auto& part : parts)
      TORCH_CHECK(!alike || part.sizes() == parts[0].sizes(), "the devices of this peer are at different products");
    return parts;
  }

  // A seat takes no part any more: ends all waits, now and later, with an error.
  void end(size_t seat) {
    std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
    // Gloo's members see that a connection ends, NCCL's have to be told.
    for (const auto& collectives : collectives_)
      if (collectives) collectives->end();
    collectives_[seat].reset();
  }

 private:
  struct Table {
    std::vector<std::vector<at::Tensor>> parts;
    size_t brought = 0, taken = 0;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  Table tables_[2];
  std::vector<uint64_t> turns_;
  bool ended_ = false;
  std::vector<std::unique_ptr<Collectives>> collectives_;
};
