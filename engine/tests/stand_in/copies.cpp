// Copies of tensors within a device, to it and from it.

#include <ATen/native/Copy.h>
#include <ATen/native/TensorIterator.h>

namespace stand_in {

size_t bytes_of(const Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return 0;
  size_t elements = 1;
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension)
    if (tensor.stride(dimension) != 0) elements *= size_t(tensor.size(dimension));
  return elements * tensor.element_size();
}

Tensor alias_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto options = tensor.options().device(at::kCPU);
  const auto* start = static_cast<const char*>(tensor.storage().data());
  if (start == nullptr || tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  char* first = on_processor(start) + tensor.storage_offset() * int64_t(tensor.element_size());
  return at::for_blob(first, tensor.sizes()).strides(tensor.strides()).options(options).make_tensor();
}

Tensor to_device(const Tensor& tensor, c10::DeviceIndex device) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  const auto options = tensor.options().device(at::Device(at::kCUDA, device));
  const auto result = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  enter(current_stream(device), {{result.storage().data(), true}});
  if (tensor.numel() > 0) alias_of(result).copy_(tensor);
  return result;
}

namespace {

// The device of a copy is where it goes to, or comes from.
void copy(at::TensorIterator& iterator, bool non_blocking) {
  const Tensor to = iterator.tensor(0), from = iterator.tensor(1);
  const auto device = (to.is_cuda() ? to : from).device().index();
  const auto stream = current_stream(device);
  std::vector<Use> uses;
  if (to.is_cuda()) uses.push_back({to.storage().data(), true});
  if (from.is_cuda()) uses.push_back({from.storage().data(), false});
  const bool crosses = to.is_cuda() && from.is_cuda() && to.device() != from.device();
  const auto other = crosses ? current_stream(from.device().index()) : stream;
  if (crosses) order(stream, other);
  enter(stream, uses);
  if (crosses) order(stream, other);

  const bool is_kernel = to.is_cuda() && from.is_cuda();
  const auto bytes = bytes_of(from);
  if (is_kernel) count_kernel("aten::copy_", bytes + bytes_of(to));
  const bool pageable = !is_kernel && !is_pinned((to.is_cuda() ? from : to).storage().data());
  if (!is_kernel) {
    const std::lock_guard guard(lock);
    (to.is_cuda() ? counts.bytes_to_device : counts.bytes_to_host) += bytes;
    counts.pageable_copies += pageable;
    counts.pageable_bytes += pageable ? bytes : 0;
    // The host waits unless it was told not to, and for pageable memory in any case.
    counts.waits += !non_blocking || pageable;
  }
  const Tensor target = alias_of(to), source = alias_of(from);
  if (stream.second == 0 || pageable) {
    target.copy_(source);
    return;
  }
  std::memset(target.data_ptr(), 0xff, bytes_of(target));
  defer(stream, [target, source] { target.copy_(source); });
}

const int copies_registered = (at::native::copy_stub.set_cuda_dispatch_ptr(&copy), 0);

}  // namespace
}  // namespace stand_in
