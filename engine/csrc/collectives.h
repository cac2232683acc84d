// libtorch's collectives (c10d) between the devices of a peer, each of which has a thread: NCCL between GPUs, gloo
// between workers of the processor.

#pragma once

#include <ATen/core/Tensor.h>

class Collectives {
 public:
  virtual ~Collectives() = default;
  // `rows` has a row for each device, in order. The result has the rows of all devices that are for this one, in the
  // order of those.
  virtual at::Tensor exchange(at::Tensor rows) = 0;
  // What all devices have, of one shape, in order: in a row for each.
  virtual at::Tensor gather(at::Tensor own) = 0;
  // Ends what waits for the others, with an error. From any thread.
  virtual void end() noexcept = 0;
};
